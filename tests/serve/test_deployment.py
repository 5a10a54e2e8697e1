"""Files for containers, systemd and Kubernetes: they start what there is, and read the metrics that there are."""

import json
import re
import shlex
import subprocess
import sys
import tomllib

import pytest
import yaml
from support.server import MODEL, ROOT

from tritonllm.cli import build_parser
from tritonllm.cli.serve import check

COMPOSE = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
KUBERNETES = list(yaml.safe_load_all((ROOT / "deploy" / "kubernetes.yaml").read_text()))
DEPLOYMENT = next(part for part in KUBERNETES if part["kind"] == "Deployment")
CONTAINER = DEPLOYMENT["spec"]["template"]["spec"]["containers"][0]
UNIT = (ROOT / "deploy" / "tritonllm.service").read_text()
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()
BOARD = json.loads((ROOT / "docker" / "grafana" / "tritonllm.json").read_text())


_LINES = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE)).splitlines()
INSTRUCTIONS = [line.split(maxsplit=1) for line in _LINES if line]


def instructions(name):
    """What follows these words, in order."""
    return [rest for word, rest in INSTRUCTIONS if word == name]


def entrypoint():
    return json.loads(instructions("ENTRYPOINT")[0])


def setting(name):
    return re.findall(rf"^{name}=(.*)$", UNIT, re.MULTILINE)[0]


COMMANDS = {
    "docker": [*entrypoint(), "model"],
    "compose": [*entrypoint(), *COMPOSE["services"]["server"]["command"]],
    "kubernetes": [*entrypoint(), *CONTAINER["args"]],
    "systemd": shlex.split(setting("ExecStart")),
}


@pytest.mark.parametrize("way", COMMANDS)
def test_the_command_is_understood(way):
    program, *rest = COMMANDS[way]
    assert program.endswith("tritonllm")
    args = build_parser().parse_args(rest)
    args.model = "model"
    _, config = check(args)
    assert config.port == 8000


def test_there_is_time_to_drain():
    def seconds(command):
        return float(command[command.index("--drain-seconds") + 1])

    server = COMPOSE["services"]["server"]
    grace = DEPLOYMENT["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert float(server["stop_grace_period"].removesuffix("s")) > seconds(COMMANDS["compose"])
    assert grace > seconds(COMMANDS["kubernetes"])
    assert float(setting("TimeoutStopSec")) > seconds(COMMANDS["systemd"])


def test_probes_and_ports(server):
    for name in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert server.client.get(CONTAINER[name]["httpGet"]["path"]).status_code == 200
    assert "/health" in DOCKERFILE
    assert CONTAINER["ports"][0]["containerPort"] == 8000 and "EXPOSE 8000" in DOCKERFILE
    published = [port for service in COMPOSE["services"].values() for port in service["ports"]]
    assert all(port.startswith("127.0.0.1:") for port in published)
    scraped = yaml.safe_load((ROOT / "docker" / "prometheus.yaml").read_text())["scrape_configs"][0]
    assert scraped["static_configs"][0]["targets"] == ["server:8000"]


def test_what_the_board_shows_is_there(server):
    ask = {"model": MODEL, "prompt": "Hi", "max_tokens": 5, "ignore_eos": True, "stream": True}
    assert server.client.post("/v1/completions", json=ask).status_code == 200
    text = server.client.get("/metrics").text
    shown = {name for panel in BOARD["panels"] for t in panel["targets"] for name in re.findall(r"\w+:\w+", t["expr"])}
    assert len(shown) >= 10
    assert [name for name in sorted(shown) if name not in text] == []
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in BOARD["panels"]]
    assert len(set(places)) == len(places)


def test_what_the_image_copies_and_mounts_is_there():
    for names in re.findall(r"^COPY (.*) \S+$", DOCKERFILE, re.MULTILINE):
        for name in names.split():
            assert (ROOT / name).exists()
            assert f"!{name}" in (ROOT / ".dockerignore").read_text().split()
    mounted = [volume for service in COMPOSE["services"].values() for volume in service.get("volumes", ())]
    for source in (volume.partition(":")[0] for volume in mounted):
        assert (ROOT / "docker" / source).exists() if source.startswith(".") else source in COMPOSE["volumes"]


def test_operations_names_metrics_that_are_there(server):
    text = server.client.get("/metrics").text
    named = set(re.findall(r"`((?:vllm|tritonllm):\w+)", (ROOT / "docs" / "operations.md").read_text()))
    assert len(named) >= 6
    assert [name for name in sorted(named) if name not in text] == []


def test_the_image_is_built_from_what_there_is(tmp_path):
    known = {"FROM", "RUN", "WORKDIR", "COPY", "ENV", "USER", "VOLUME", "EXPOSE", "ENTRYPOINT", "HEALTHCHECK"}
    assert {word for word, _ in INSTRUCTIONS} <= known
    for command in instructions("RUN"):
        subprocess.run(["sh", "-n", "-c", command], check=True)
        assert "apt-get install" not in command or command.endswith("rm -rf /var/lib/apt/lists/*")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r"pip install --no-cache-dir '\.\[(.*)\]'", DOCKERFILE)
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    copied = " ".join(instructions("COPY")).split()
    assert {project["readme"], *project["license-files"], "pyproject.toml", "tritonllm"} <= set(copied)
    assert entrypoint()[0] in project["scripts"]


def test_the_user_of_the_image_owns_what_it_writes():
    words = [word for word, _ in INSTRUCTIONS]
    last_of_root = max(i for i, word in enumerate(words) if word in ("RUN", "COPY"))
    assert words.index("USER") > last_of_root and instructions("USER") == ["server"]
    pod = DEPLOYMENT["spec"]["template"]["spec"]["securityContext"]
    assert f"--uid {pod['runAsUser']} server" in DOCKERFILE and pod["fsGroup"] == pod["runAsUser"]
    volumes = json.loads(instructions("VOLUME")[0])
    environment = dict(pair.split("=", 1) for rest in instructions("ENV") for pair in rest.split())
    for name in ("HF_HOME", "TRITON_CACHE_DIR"):
        assert any(environment[name].startswith(volume) for volume in volumes)
    assert all(
        volume in DOCKERFILE.partition("chown -R server ")[2].splitlines()[0] for volume in ("/models", "/cache")
    )
    assert [volume.partition(":")[2] for volume in COMPOSE["services"]["server"]["volumes"]] == volumes
    assert [mount["mountPath"] for mount in CONTAINER["volumeMounts"]] == volumes
    names = {volume["name"] for volume in DEPLOYMENT["spec"]["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in CONTAINER["volumeMounts"]} == names


def test_the_variables_that_are_set_are_read():
    ours = set()
    for text in (UNIT, DOCKERFILE, str(COMPOSE), str(DEPLOYMENT)):
        ours |= set(re.findall(r"\b(TRITONLLM_[A-Z_]+)", text))
    assert ours == {"TRITONLLM_API_KEY"}
    assert "TRITONLLM_API_KEY" in (ROOT / "tritonllm" / "env.py").read_text()


def test_the_health_check_tells_a_server_from_none(server):
    command = json.loads(instructions("HEALTHCHECK")[0].partition("CMD ")[2])
    assert command[0] == "python" and ":8000/" in command[-1]

    def status(port):
        return subprocess.run([sys.executable, *command[1:-1], command[-1].replace(":8000/", f":{port}/")], stderr=-3)

    assert status(server.url.rpartition(":")[2]).returncode == 0
    assert status(1).returncode == 1


def test_parts_of_the_kubernetes_example_fit():
    kinds = {part["kind"]: part for part in KUBERNETES}
    pod = DEPLOYMENT["spec"]["template"]
    labels = pod["metadata"]["labels"]
    assert DEPLOYMENT["spec"]["selector"]["matchLabels"] == labels == kinds["Service"]["spec"]["selector"]
    (port,) = kinds["Service"]["spec"]["ports"]
    assert port["targetPort"] == CONTAINER["ports"][0]["name"]
    volumes = [volume.get("persistentVolumeClaim") for volume in pod["spec"]["volumes"]]
    claims = {volume["claimName"] for volume in volumes if volume}
    assert claims == {kinds["PersistentVolumeClaim"]["metadata"]["name"]}
    assert pod["metadata"]["annotations"]["prometheus.io/port"] == str(CONTAINER["ports"][0]["containerPort"])


def test_what_grafana_is_given_is_where_it_looks():
    mounts = dict(volume.split(":")[:2] for volume in COMPOSE["services"]["grafana"]["volumes"])
    boards = yaml.safe_load((ROOT / "docker" / "grafana" / "boards.yaml").read_text())["providers"][0]
    source = yaml.safe_load((ROOT / "docker" / "grafana" / "datasource.yaml").read_text())["datasources"][0]
    assert mounts["./grafana/tritonllm.json"].startswith(boards["options"]["path"])
    assert source["url"] == "http://prometheus:9090" and "prometheus" in COMPOSE["services"] and source["isDefault"]


def test_labels_that_the_board_groups_by_are_there(server):
    text = server.client.get("/metrics").text
    expressions = [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]
    grouped = {(label, re.findall(r"\w+:\w+", e)[0]) for e in expressions for label in re.findall(r"by \((\w+)\)", e)}
    assert len(grouped) >= 2
    for label, name in grouped:
        assert re.search(rf"^{name}{{.*\b{label}=", text, re.MULTILINE), (label, name)

"""Files for containers, systemd and Kubernetes: they start what there is, and read the metrics that there are."""

import json
import re
import shlex

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


def entrypoint():
    return json.loads(re.findall(r"^ENTRYPOINT (.*)$", DOCKERFILE, re.MULTILINE)[0])


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

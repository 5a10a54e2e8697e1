"""docs/routing.md names what there is, and deploy/kubernetes-router.yaml starts it."""

import re

import pytest
import yaml
from support.server import ROOT

from tritonllm.cli import build_parser
from tritonllm.cli.route import OPTIONS
from tritonllm.route.config import BackendConfig, read_config

PAGE = (ROOT / "docs" / "routing.md").read_text()
PARTS = list(yaml.safe_load_all((ROOT / "deploy" / "kubernetes-router.yaml").read_text()))
DEPLOYMENT = next(part for part in PARTS if part["kind"] == "Deployment")
CONTAINER = DEPLOYMENT["spec"]["template"]["spec"]["containers"][0]


def test_every_option_is_explained():
    table = PAGE[PAGE.index("| option | default |") :]
    assert [name for name in OPTIONS if f"`--{name}`" not in table] == []
    assert [name for name in BackendConfig.__dataclass_fields__ if f"`{name}`" not in PAGE] == []


def test_every_metric_is_explained(backends, routing):
    (backend,) = backends()
    router = routing([backend])
    there = set(re.findall(r"^# TYPE tritonllm:route_(\S+) ", router.client.get("/metrics").text, re.M))
    there = {name for name in there if not name.endswith("_created")}
    listed = set(re.findall(r"`(\w+)`", "".join(line.split("|")[1] for line in metric_rows())))
    assert there == listed


def metric_rows():
    table = PAGE[PAGE.index("| metric | labels |") :].splitlines()[2:]
    return table[: table.index("")]


@pytest.mark.parametrize(
    "code", sorted(set(re.findall(r"`([a-z]+_[a-z_]+)`", PAGE[PAGE.index("## Failures") : PAGE.index("**Retries.**")])))
)
def test_codes_are_those_of_the_sources(code):
    package = ROOT / "tritonllm"
    sources = "".join(path.read_text() for room in ("http", "route") for path in (package / room).glob("*.py"))
    assert f'"{code}"' in sources


def test_the_example_of_a_file_is_read(tmp_path, monkeypatch):
    monkeypatch.setenv("EXAMPLE_KEY", "secret")
    path = tmp_path / "router.toml"
    path.write_text(re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)[0])
    assert [backend.label for backend in read_config(path, {}).backends] == ["left", "https://models.example.com"]


def test_kubernetes(tmp_path, backends, routing):
    program, *rest = CONTAINER["command"]
    args = build_parser().parse_args(rest)
    assert program == "tritonllm" and args.run.__module__ == "tritonllm.cli.route"
    path = tmp_path / args.config.name
    path.write_text(PARTS[0]["data"][args.config.name])
    config = read_config(path, {"drain_seconds": args.drain_seconds})
    assert len(config.backends) == 2 and config.port == CONTAINER["ports"][0]["containerPort"]
    assert DEPLOYMENT["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > config.drain_seconds
    assert str(args.config.parent) == CONTAINER["volumeMounts"][0]["mountPath"]
    router = routing(backends())
    for probe in ("livenessProbe", "readinessProbe"):
        assert router.client.get(CONTAINER[probe]["httpGet"]["path"]).status_code == 200

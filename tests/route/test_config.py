"""Configurations: what a mistake says, and what a file may hold."""

import pytest

from tritonllm.cli import build_parser, main
from tritonllm.cli.route import OPTIONS, check
from tritonllm.route.config import BackendConfig, RouterConfig, read_config

GOOD = """
policy = "least-tokens"
health_interval = 1
api_keys = ["one", "two"]
[[backends]]
url = "http://127.0.0.1:8000"
models = ["a", "b"]
[[backends]]
url = "https://host/base/"
name = "far"
api_key = "secret"
"""


def written(tmp_path, text):
    path = tmp_path / "router.toml"
    path.write_text(text)
    return path


def test_a_file(tmp_path):
    config = read_config(written(tmp_path, GOOD), {"max_retries": 5})
    assert (config.policy, config.health_interval, config.max_retries) == ("least-tokens", 1, 5)
    assert config.api_keys == ("one", "two")
    near, far = config.backends
    assert (near.label, near.models, near.key) == ("http://127.0.0.1:8000", ("a", "b"), None)
    assert (far.label, far.base, far.key) == ("far", "https://host/base", "secret")


BACKEND = '[[backends]]\nurl = "http://a"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("policy = ", "is not TOML"),
        ("", "no backend"),
        ("backends = 1", r"write \[\[backends\]\]"),
        ("colour = 1\n" + BACKEND, "unknown key 'colour'"),
        (BACKEND + "colour = 1", r"\[\[backends\]\] 1: unknown key 'colour'"),
        ("[[backend]]\nurl = 'http://a'", r"unknown key 'backend': did you mean 'backends'\? There are backends, "),
        ("prefill-min-tokens = 1\n" + BACKEND, "'prefill-min-tokens': did you mean 'prefill_min_tokens'"),
        ("api_key = 'x'\n" + BACKEND, "unknown key 'api_key': did you mean 'api_keys'"),
        ("quiet = true\n" + BACKEND, "unknown key 'quiet': there are"),
        (BACKEND + "model = 'x'", r"1: unknown key 'model': did you mean 'models'\? There are url, name"),
        ("[[backends]]\nname = 'x'", r"\[\[backends\]\] 1: url is missing"),
        ("[[backends]]\nurl = 5", "url must be a string, got 5"),
        ("port = '1'\n" + BACKEND, "port must be an integer"),
        ("port = true\n" + BACKEND, "port must be an integer"),
        ("health_timeout = 'x'\n" + BACKEND, "health_timeout must be a number"),
        ("health_timeout = 0\n" + BACKEND, "health_timeout must be greater than 0"),
        ("host_timeout = 0\n" + BACKEND, "host_timeout must be greater than 0"),
        ("health_timeout = nan\n" + BACKEND, "health_timeout must be greater than 0"),
        ("api_keys = 'x'\n" + BACKEND, "api_keys must be a list of strings"),
        ("api_keys = ['']\n" + BACKEND, "api_keys must not hold an empty key"),
        ("policy = 'fair'\n" + BACKEND, "policy must be one of prefix"),
        ("max_retries = -1\n" + BACKEND, "max_retries must be at least 0"),
        ("failure_threshold = 0\n" + BACKEND, "failure_threshold must be at least 1"),
        ("max_backoff_seconds = 0.5\n" + BACKEND, "max_backoff_seconds must be at least backoff_seconds"),
        ("port = 99999\n" + BACKEND, "port must be from 0"),
        ("ssl_certfile = 'x'\n" + BACKEND, "need each other"),
        (BACKEND + BACKEND, "two backends have the name"),
        (BACKEND + "name = 'x'\n" + BACKEND, "two backends have the url"),
        (BACKEND + "api_key_env = 'TRITONLLM_NOT_SET'", "the environment has no TRITONLLM_NOT_SET"),
        (BACKEND + "api_key_env = 'HOME'\napi_key = 'x'", "exclude each other"),
        (BACKEND + 'api_key = "k\\n"', "api_key has a line break or another character that cannot be sent"),
        (BACKEND + "health_path = 'health'", "health_path must begin with /"),
        (BACKEND + "models = ['']", "models must not hold an empty name"),
    ],
)
def test_a_mistake_in_a_file_is_named(tmp_path, text, message):
    path = written(tmp_path, text)
    with pytest.raises(ValueError, match=message) as caught:
        read_config(path, {})
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://a", "http://", "http://a:x", "http://a:99999", "http://a?b"])
def test_a_bad_url(url):
    with pytest.raises(ValueError, match="url must be as"):
        BackendConfig(url=url)


def test_v1_is_left_out():
    with pytest.raises(ValueError, match="leave /v1 out"):
        BackendConfig(url="http://a/v1/")


def test_a_key_from_the_environment(monkeypatch):
    monkeypatch.setenv("TEST_ROUTER_KEY", "secret\n")  # as files end
    assert BackendConfig(url="http://a", api_key_env="TEST_ROUTER_KEY").key == "secret"


def test_every_option_is_one_of_the_configuration():
    fields = set(RouterConfig.__dataclass_fields__) - {"backends", "api_keys"}
    assert {name.replace("-", "_") for name in OPTIONS} == fields
    assert all("default" in keywords["help"] for name, keywords in OPTIONS.items() if "ssl" not in name)


def test_help_has_the_true_defaults(capsys):
    config = RouterConfig(backends=(BackendConfig(url="http://a"),))
    for name, keywords in OPTIONS.items():
        default = getattr(config, name.replace("-", "_"))
        said = keywords["help"].rpartition("default: ")[2].rstrip(")").split(",")[0].split(";")[0]
        if isinstance(default, int) and default % (1 << 20) == 0:
            assert said == f"{default >> 20} MiB"
        elif default is not None:
            assert said == (default if isinstance(default, str) else f"{default:g}")


def test_options_win_over_the_file(tmp_path):
    path = written(tmp_path, GOOD)
    args = build_parser().parse_args(["route", "--config", str(path), "--policy", "prefix", "--api-key", "three"])
    config, overrides = check(args)
    assert (config.policy, config.api_keys) == ("prefix", ("three",))
    assert overrides == {"policy": "prefix", "api_keys": ("three",)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--backend --config is required"),
        (["--backend", "http://a", "--config", "x"], "not allowed with"),
        (["--backend", "http://a", "--port", "-1"], "port must be"),
        (["--backend", "a"], "url must be as"),
        (["--backend", "http://a", "--policy", "fair"], "invalid choice"),
        (["--backend", "http://a", "--api-key", ""], "empty key"),
    ],
)
def test_a_mistake_is_wrong_usage(options, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["route", *options])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("name", "why"), [("none.toml", "No such file"), ("", "Is a directory")])
def test_a_file_that_cannot_be_read_is_wrong_usage(tmp_path, capsys, name, why):
    path = tmp_path / name
    with pytest.raises(SystemExit) as caught:
        main(["route", "--config", str(path)])
    assert caught.value.code == 2
    assert f"--config {path}: {why}" in capsys.readouterr().err

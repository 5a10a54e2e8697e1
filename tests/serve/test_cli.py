"""``tritonllm serve``: mistakes are found before a model is loaded."""

import json
import subprocess
import sys

import pytest

from tritonllm.cli import build_parser, check, main
from tritonllm.cli.config_file import expanded
from tritonllm.cli.serve import check_tls, origins_of
from tritonllm.serve.api.template import read_template


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--port", "99999"], "--port must be"),
        (["--api-server-count", "0"], "--api-server-count must be"),
        (["--tool-call-parser", "x"], "--tool-call-parser must be one of hermes"),
        (["--reasoning-parser", "x"], "--reasoning-parser must be one of qwen3"),
        (["--tool-parser-plugin", "none.py"], "--tool-parser-plugin must be a Python file"),
        (["--max-queue", "-1"], "--max-queue must be"),
        (["--api-key", ""], "--api-key must not be empty"),
        (["--served-model-name", ""], "--served-model-name must not be empty"),
        (["--ssl-certfile", "x.pem"], "--ssl-keyfile"),
        (["--max-num-seqs", "0"], "max_num_seqs must be"),
        (["--pooler-config", "{"], "pooler_config is no JSON"),
        (["--scheduling-policy", "fair"], "invalid choice"),
        (["--unknown"], "unrecognized arguments"),
        (["--default-chat-template-kwargs", "{"], "--default-chat-template-kwargs is no JSON"),
        (["--default-chat-template-kwargs", "[]"], "--default-chat-template-kwargs must be a dict"),
        (
            ["--default-chat-template-kwargs", '{"tools": 1}'],
            "--default-chat-template-kwargs: chat_template_kwargs has",
        ),
        (["--override-generation-config", "{"], "override_generation_config is no JSON"),
        (["--root-path", "llm/"], "--root-path must begin with /"),
        (["--config", "a.yaml", "--config=b.yaml"], "--config takes one file"),
        (["--config"], "--config takes one file"),
        (["--config", "none.yaml"], "No such file"),
    ],
)
def test_a_mistake_is_wrong_usage(options, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["serve", *options])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port: 99999", "--port must be"),
        ("port: [", "cannot be read as YAML"),
        ("- port", "must be a mapping of options"),
        ("config: other.yaml", "a file cannot name another one"),
        ("port:", "port has no value"),
        ("prot: 8080", "unrecognized arguments: --prot=8080"),
    ],
)
def test_a_mistake_in_a_file_is_wrong_usage(text, message, tmp_path, capsys):
    (tmp_path / "options.yaml").write_text(text)
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--config", str(tmp_path / "options.yaml")])
    assert caught.value.code == 2 and message in capsys.readouterr().err


def test_options_of_a_file(tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text(
        "model: from-the-file\nport: 8123\nserved-model-name: [a, b]\nstrict_fields: true\nquiet: false\n"
        "api-key: [one, two]\nkv-transfer-config: {kv_connector: FileStore}\nmax-model-len: 64\n"
    )
    args = build_parser().parse_args(expanded(["serve", "--max-model-len", "32", f"--config={file}"]))
    check(args)
    assert (args.model, args.port, args.served_model_name, args.max_model_len) == (
        "from-the-file",
        8123,
        ["a", "b"],
        32,
    )
    assert args.strict_fields and not args.quiet and args.api_key == ["one", "two"]
    assert json.loads(args.kv_transfer_config) == {"kv_connector": "FileStore"}
    args = build_parser().parse_args(expanded(["serve", "named", "--config", str(file), "--port=1"]))
    check(args)
    assert (args.model, args.port) == ("named", 1)


def test_a_template_that_is_not_there(tmp_path, capsys):
    assert main(["serve", "--chat-template", str(tmp_path / "none.jinja")]) == 1
    error = capsys.readouterr().err
    assert "--chat-template: cannot read" in error and "none.jinja: No such file" in error


def test_a_template_that_is_none(tmp_path, capsys):
    """Found at the start, and not by the first chat."""
    broken = tmp_path / "broken.jinja"
    broken.write_text("{{ messages }}\n{% if %}")
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--chat-template", str(broken)])
    assert caught.value.code == 2 and "broken.jinja, line 2: " in capsys.readouterr().err


def test_templates_may_have_the_tags_of_transformers(tmp_path):
    good = tmp_path / "good.jinja"
    good.write_text("{% for m in messages %}{%- generation -%}{{ m }}{% endgeneration %}{% continue %}{% endfor %}")
    assert read_template(str(good)) == good.read_text()


def make_certificate(folder, name, *options):
    """A certificate that it signs itself, and its key."""
    files = [folder / f"{name}.pem", folder / f"{name}.key"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-subj", "/CN=localhost", "-days", "2", *options]
    subprocess.run([*command, "-out", files[0], "-keyout", files[1]], check=True, capture_output=True)
    return [str(file) for file in files]


def test_certificates_are_read_before_the_model(tmp_path, capsys):
    (own, key), (_, other), (locked, secret) = (
        make_certificate(tmp_path, "own", "-nodes"),
        make_certificate(tmp_path, "other", "-nodes"),
        make_certificate(tmp_path, "locked", "-passout", "pass:secret"),
    )
    check_tls(own, key)
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("garbage")
    cases = [
        (str(tmp_path / "none.pem"), key, "--ssl-certfile: cannot read"),
        (own, str(tmp_path / "none.key"), "--ssl-keyfile: cannot read"),
        (str(garbage), key, "are no certificate and its key"),
        (own, str(garbage), "are no certificate and its key"),
        (own, other, "KEY_VALUES_MISMATCH"),
        (locked, secret, "is encrypted"),
    ]
    for certificate, its_key, message in cases:
        assert main(["serve", "--ssl-certfile", certificate, "--ssl-keyfile", its_key]) == 1
        assert message in capsys.readouterr().err


def test_without_the_extra(monkeypatch, capsys):
    import tritonllm.serve

    monkeypatch.setattr(tritonllm, "serve", tritonllm.serve)  # what is imported anew here is forgotten again
    for name in [name for name in sys.modules if name.startswith("tritonllm.serve")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    assert main(["serve"]) == 1
    assert "pip install '.[serve]'" in capsys.readouterr().err


def test_origins_are_told_one_by_one_or_as_vllm_wants_them():
    assert origins_of(["https://a.example", "http://localhost:3000"]) == ("https://a.example", "http://localhost:3000")
    assert origins_of(['["https://a.example", "*"]']) == ("https://a.example", "*")
    for bad in ('["https://a.example"', "[1]"):
        with pytest.raises(ValueError, match="--allowed-origins"):
            origins_of([bad])

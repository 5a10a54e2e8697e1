"""``tritonllm serve``: mistakes are found before a model is loaded."""

import subprocess
import sys

import pytest

from tritonllm.cli import main
from tritonllm.cli.serve import check_tls, origins_of
from tritonllm.serve.api.template import read_template


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--port", "99999"], "--port must be"),
        (["--api-server-count", "0"], "--api-server-count must be"),
        (["--tool-call-parser", "x"], "--tool-call-parser must be one of hermes"),
        (["--reasoning-parser", "x"], "--reasoning-parser must be one of qwen3"),
        (["--max-queue", "-1"], "--max-queue must be"),
        (["--api-key", ""], "--api-key must not be empty"),
        (["--served-model-name", ""], "--served-model-name must not be empty"),
        (["--ssl-certfile", "x.pem"], "--ssl-keyfile"),
        (["--max-num-seqs", "0"], "max_num_seqs must be"),
        (["--pooler-config", "{"], "pooler_config is no JSON"),
        (["--scheduling-policy", "fair"], "invalid choice"),
        (["--unknown"], "unrecognized arguments"),
    ],
)
def test_a_mistake_is_wrong_usage(options, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["serve", *options])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


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

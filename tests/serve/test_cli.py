"""``tritonllm serve``: mistakes are found before a model is loaded."""

import sys

import pytest

from tritonllm.cli import main


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
    assert "none.jinja" in capsys.readouterr().err


def test_without_the_extra(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith("tritonllm.serve")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    assert main(["serve"]) == 1
    assert "pip install 'tritonllm[serve]'" in capsys.readouterr().err

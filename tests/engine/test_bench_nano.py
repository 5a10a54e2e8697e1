"""The benchmark of the 300-line engine, in tiny form."""

import json
import subprocess
from types import SimpleNamespace

import pytest
import torch
from support.tiny_models import tiny_config

from bench import engine_workloads, nano, tables
from bench.engine_workloads import Workload

pytestmark = pytest.mark.long

TINY = {"W1": Workload("W1", "tiny", "throughput", 5, (4, 9), (3, 6), 0.6, max_model_len=64)}
OPTIONS = {"nano": {"num_blocks": 64}, "tritonllm": {"num_blocks": 64, "dtype": "float32"}}


@pytest.fixture(params=["qwen3", "llama"])
def tiny(monkeypatch, request):
    """A tiny model, and child processes run in this one."""
    monkeypatch.setattr(engine_workloads, "TOKEN_IDS", 90)
    config = tiny_config(request.param) | {"head_dim": 16}
    monkeypatch.setattr(nano, "MODELS", {"tiny": config})
    monkeypatch.setattr(nano, "WORKLOADS", TINY)

    def run(command, timeout, check):
        assert command[1:3] == ["-m", "bench.nano"]
        return SimpleNamespace(returncode=nano.main(command[3:]))

    monkeypatch.setattr(nano, "subprocess", SimpleNamespace(run=run, TimeoutExpired=subprocess.TimeoutExpired))


def bench(tmp_path):
    out = tmp_path / "new" / "nano.json"
    return nano.main(["--options", json.dumps(OPTIONS), "--repeats", "2", "--out", str(out)]), out


@pytest.mark.smoke
def test_writes_results(tiny, tmp_path, capsys):
    code, out = bench(tmp_path)
    assert code == 0
    report = json.loads(out.read_text())
    whole, small = report["nano"]
    assert [whole["engine"], small["engine"]] == ["tritonllm", "nano"]
    assert report["of_llm"] == pytest.approx(small["value"] / whole["value"]) and report["first_tokens_equal"] == 1
    assert len(small["values"]) == 2 and min(small["values"]) <= small["value"] <= max(small["values"])
    assert report["machine"]["torch"] == torch.__version__ and {"commit", "date", "checksum"} <= set(report)
    assert "of LLM's rate" in capsys.readouterr().out
    assert "| W1 tiny, nano |" in tables.table(report, ())


def test_no_result_of_a_wrong_length(tiny, tmp_path, monkeypatch):
    right = nano.Nano.generate
    monkeypatch.setattr(nano.Nano, "generate", lambda self, batch: [tokens[1:] for tokens in right(self, batch)])
    with pytest.raises(RuntimeError, match="wrong length: no result"):
        bench(tmp_path)


@pytest.mark.parametrize("how", ["crash", "timeout", "disagreement"])
def test_failures_are_named(tiny, tmp_path, monkeypatch, capsys, how):
    good, right = nano.subprocess.run, nano.Nano.generate

    def run(command, timeout, check):
        if how == "timeout":
            raise subprocess.TimeoutExpired(command, timeout)
        return good(command, timeout, check) if how == "disagreement" else SimpleNamespace(returncode=-9)

    monkeypatch.setattr(nano.subprocess, "run", run)
    monkeypatch.setattr(
        nano.Nano, "generate", lambda self, batch: [[-1] * len(tokens) for tokens in right(self, batch)]
    )
    code, out = bench(tmp_path)
    says = {"crash": "exit code -9", "timeout": "within 900 s", "disagreement": "only 0% of the first greedy tokens"}
    assert code == 1 and says[how] in capsys.readouterr().err and not out.exists()


def test_arguments(capsys):
    for argv, says in ((["--repeats", "0"], "at least 1, got 0"), (["--engine", "nano"], "given together")):
        with pytest.raises(SystemExit):
            nano.parse(argv)
        assert says in capsys.readouterr().err

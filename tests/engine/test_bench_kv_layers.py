"""The benchmark of blocks that leave while steps run, in tiny form."""

import json

import pytest
from support.engines import tiny_checkpoint

from bench import kv_layers, reports, tables
from tritonllm.engine.cache.host_copies import HostCopies

pytestmark = pytest.mark.long

SIZES = ["--models", "tiny", "--prompts", "64,96", "--repeats", "1"]


def arguments(out):
    options = json.dumps({"max_num_batched_tokens": 64})
    return [*SIZES, "--folder", str(tiny_checkpoint()), "--options", options, "--out", str(out)]


@pytest.mark.smoke
def test_writes_results(tmp_path, capsys):
    out = tmp_path / "kv-layers.json"
    assert kv_layers.main(arguments(out)) == 0
    report = json.loads(out.read_text())
    assert [(row["prompt"], row["kind"], row["captured"]) for row in report["leaves"]] == [
        *((64, "streamed", False), (64, "behind", False)),
        *((96, "streamed", False), (96, "behind", False)),
    ]
    assert all(row["prompt_ms"] > 0 and row["copy_ms"] > 0 and row["bytes"] for row in report["leaves"])
    assert reports.kind_of(report) == "kv-layers"
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[2] for line in lines if " s: " in line] == [
        *("tiny: the engine starts", "tiny: 64 tokens", "tiny: 96 tokens")
    ]
    text = tables.kv_layers(report)
    assert "tiny, 64 tokens" in text and text.count("\n|") == 1 + 2


def test_what_arrives_in_another_form_has_no_result(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(HostCopies, "_copy_group", lambda self, *group: None)
    assert kv_layers.main([*arguments(tmp_path / "none.json"), "--offloading-size", "0.01"]) == 1
    assert "other blocks arrived than the cache has: no result" in capsys.readouterr().err


def test_blocks_that_never_arrive_are_no_result(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(kv_layers, "SETTLES", 0.0)
    monkeypatch.setattr(HostCopies, "_filled", lambda self, number: None)
    assert kv_layers.main(arguments(tmp_path / "none.json")) == 1
    assert "the blocks do not arrive" in capsys.readouterr().err

"""The benchmark of the cache's second tier, in tiny form."""

import json

import pytest
from support.engines import tiny_checkpoint

from bench import swap, tables
from tritonllm.engine.cache.host_copies import HostCopies

pytestmark = pytest.mark.long


@pytest.mark.smoke
def test_writes_results(tmp_path):
    out = tmp_path / "swap.json"
    sizes = ["--layouts", "tiny", "--blocks", "3,8", "--prompts", "64", "--link-bytes", "4096", "--repeats", "1"]
    model = ["--models", "tiny", "--folder", str(tiny_checkpoint()), "--device", "cpu"]
    options = json.dumps({"max_num_batched_tokens": 512, "kv_offloading_size": 0.01})
    assert swap.main([*sizes, *model, "--options", options, "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert [(row["blocks"], row["shuffled"]) for row in report["copies"]] == [
        *((3, False), (3, True), (8, False), (8, True))
    ]
    assert all(row["load_gb_per_s"] > 0 and row["store_percent_of_link"] > 0 for row in report["copies"])
    (row,) = report["returns"]
    assert row["load_blocks"] == row["load_beside_8_blocks"] == 2 * 3  # the last token is computed, and so its block
    assert row["compute_blocks"] == row["compute_beside_8_blocks"] == 0
    assert {"machine", "commit", "date", "link"} <= set(report)
    text = tables.table(report, ())
    assert "tiny, 8, shuffled" in text and "tiny, 64 tokens" in text and text.count("\n|") == 2 + 4 + 2 + 1


def test_a_copy_that_loses_something_has_no_result(monkeypatch):
    import torch

    monkeypatch.setattr(HostCopies, "run", lambda self, transfers: None)
    rates = {"store_gb_per_s": 1.0, "load_gb_per_s": 1.0}
    with pytest.raises(RuntimeError, match="came back in another form"):
        swap.copies("tiny", [2], torch.device("cpu"), 1, rates)

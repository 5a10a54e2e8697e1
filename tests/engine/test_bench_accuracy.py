"""What narrow formats change: the demo model stays within the bounds of the documents, and measures are right."""

import json
import math
from pathlib import Path

import pytest
import torch

from bench import accuracy, report, smollm2
from bench.accuracy import BOUNDS, FLOAT8_CACHE, Bounds, compared

CPU = torch.device("cpu")
MODELS_DOC = Path(__file__).parents[2] / "docs" / "models.md"
OFTEN = {"fp8", "w4a16", FLOAT8_CACHE}


@pytest.fixture(scope="module")
def subject():
    return accuracy.demo(300)


@pytest.mark.parametrize(
    "format", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.long) for name in BOUNDS]
)
def test_the_demo_model_stays_within_the_bounds(subject, format):
    reference, row = accuracy.rows_of(subject, [format], torch.float32, CPU)
    assert reference["perplexity"] < 2 and reference["kl"] == 0 and reference["agreement"] == 1
    assert BOUNDS[format].broken_by(row, reference["perplexity"]) == []
    assert row["logit_error"] > 1e-4 and row["kl"] > 0  # it is another model


def test_bounds_are_those_of_the_documents():
    assert accuracy.bounds_table() in MODELS_DOC.read_text(encoding="utf-8")
    row = {"kl": 0.2, "agreement": 0.8, "perplexity": 11.0}
    assert Bounds(kl=0.3, agreement=0.7, perplexity=1.2).broken_by(row, 10.0) == []
    assert Bounds(kl=0.1, agreement=0.9, perplexity=1.05).broken_by(row, 10.0) == ["kl", "agreement", "perplexity"]


def test_measures():
    """Of two positions, in one of which the most likely token changes; a constant added to all logits is no error."""
    theirs = torch.tensor([[math.log(3), 0.0], [0.0, 0.0]])
    mine = torch.tensor([[5.0, 5.0 + math.log(3)], [7.0, 7.0]])
    found = compared([mine], [theirs], [[0, 1]])
    # 3/4 and 1/4 became 1/4 and 3/4
    assert found["kl"] == pytest.approx(math.log(3) / 2 / 2) and found["kl_max"] == pytest.approx(math.log(3) / 2)
    assert found["agreement"] == 0.5
    assert found["perplexity"] == pytest.approx(4 / 3)  # the next token is 1, to which the first row gives 3/4
    assert found["logit_error"] == pytest.approx(2) and found["logit_max"] == pytest.approx(math.log(3), rel=1e-6)
    assert found["logit_mean"] == pytest.approx(math.log(3) / 2, rel=1e-6)


def test_writes_results(tmp_path, capsys, monkeypatch):
    """Of the models that are there, each with a line of its own; and docs/results.md shows them."""
    monkeypatch.setattr(smollm2, "missing", lambda: "SmolLM2 needs a package")
    out = tmp_path / "accuracy" / "cpu-float32.json"
    assert accuracy.main(["--formats", "fp8,bfloat16", "--tokens", "40", "--device", "cpu", "--out", str(out)]) == 0
    captured = capsys.readouterr()
    assert "SmolLM2 needs a package" in captured.err and "| demo, fp8 |" in captured.out
    written = json.loads(out.read_text())
    assert [row["format"] for row in written["accuracy"]] == ["float32", "fp8", "bfloat16"]
    assert written["machine"]["torch"] == torch.__version__ and {"commit", "date"} <= set(written)
    (file,) = report.read(tmp_path)
    assert file.kind == "accuracy" and "(../bench/results/accuracy/cpu-float32.json)" in report.results([file])

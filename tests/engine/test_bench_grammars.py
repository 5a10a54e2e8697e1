"""The benchmark of grammar packages with xgrammar alone, on a tokenizer from a seed."""

import json

import pytest

from bench import grammar_backends
from bench.synthetic_vocabulary import write_tokenizer
from bench.tables import table

pytestmark = pytest.mark.long


@pytest.fixture
def folder(tmp_path):
    write_tokenizer(tmp_path, {"bos_token_id": 1000, "eos_token_id": 1001})
    return tmp_path


def run(folder, *more):
    return grammar_backends.main(["--model", str(folder), "--out", str(folder / "g.json"), *more])


@pytest.mark.smoke
def test_a_whole_run(folder, monkeypatch, capsys):
    monkeypatch.setattr(grammar_backends, "REPEATS", 2)
    cases = {name: grammar_backends.CASES[name] for name in ("person", "range", "forty fields")}
    monkeypatch.setattr(grammar_backends, "CASES", cases)
    assert run(folder, "--packages", "xgrammar") == 0
    report = json.loads((folder / "g.json").read_text())
    person, narrow, _ = report["grammars"]
    assert person["tokens"] > 10 and person["fill_us"] > 0 and person["first_ms"] > 0
    assert 0 < narrow["forced"] <= narrow["forced_compact"] < narrow["tokens"]
    assert table(report, ()).count("| xgrammar |") == 3
    assert "| xgrammar |" in capsys.readouterr().out


def test_an_answer_that_is_not_allowed_gives_no_result(folder, monkeypatch):
    monkeypatch.setattr(grammar_backends, "CASES", {"wrong": ({"type": "integer"}, "text")})
    with pytest.raises(ValueError, match="of the answer is not allowed"):
        run(folder, "--packages", "xgrammar")


def test_an_unknown_package_is_refused(folder, capsys):
    with pytest.raises(SystemExit):
        run(folder, "--packages", "other")
    assert "got 'other'" in capsys.readouterr().err

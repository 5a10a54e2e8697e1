"""The benchmark of grammars and beams without a GPU: its tokenizer and schemas, and a whole run of a tiny model."""

import json
import subprocess
from types import SimpleNamespace

import pytest
import xgrammar
from support.tiny_models import tiny_config
from transformers import AutoTokenizer

from bench import decoding, engine_workloads, tables
from bench.synthetic_vocabulary import vocabulary, write_tokenizer
from tritonllm.config.sampling_params import StructuredOutputsParams

pytestmark = pytest.mark.long


@pytest.fixture
def tiny(monkeypatch):
    """A tiny model with a vocabulary of 600 tokens, and child processes run in this one."""
    config = tiny_config("qwen3") | {"head_dim": 16, "vocab_size": 600, "bos_token_id": 590, "eos_token_id": 592}
    monkeypatch.setattr(engine_workloads, "TOKEN_IDS", 500)
    monkeypatch.setattr(decoding, "MODELS", {"tiny": config, "other": config})
    monkeypatch.setattr(decoding, "ROWS", {"G3": decoding.Row("grammar", 3), "B2": decoding.Row("beams", 2)})
    monkeypatch.setattr(decoding, "ITEMS", 8)


def bench(tmp_path, *more):
    out = tmp_path / "decoding.json"
    options = '{"device": "cpu", "block_size": 4, "num_blocks": 256, "max_model_len": 64}'
    sizes = ["--prompt", "9", "--tokens", "12", "--repeats", "2", "--rows", "G3,B2"]
    code = decoding.main(["--model", "tiny", *sizes, "--options", options, "--out", str(out), *more])
    return code, json.loads(out.read_text())


@pytest.mark.smoke
def test_a_whole_run(tiny, tmp_path, capsys):
    code, report = bench(tmp_path)
    grammar, beams = report["comparisons"]
    assert (
        code == 0
        and list(grammar["modes"]) == ["plain", "grammar", "no_jumps", "half"]
        and list(beams["modes"])[1] == "beams"
    )
    plain, structured = grammar["modes"]["plain"], grammar["modes"]["grammar"]
    assert plain["fill_ms"] == plain["fills_a_step"] == 0 < structured["fill_ms"]
    assert plain["times_plain"] == 1 and plain["steps"] == 12
    assert structured["forced"] > 0 == grammar["modes"]["no_jumps"]["forced"]
    assert structured["more_ms"] == pytest.approx(structured["value"] - plain["value"])
    assert "ms (" in capsys.readouterr().out
    assert tables.table(report, ()).count("| tiny |") == 6
    methods = [vars(getattr(xgrammar, owner))[name] for owner, name in (*decoding.FILLS, *decoding.ACCEPTS)]
    assert not any("timed" in repr(method) for method in methods)  # they are xgrammar's again


def test_each_model_has_a_process_of_its_own(tiny, tmp_path, monkeypatch, capsys):
    started = []

    def run(command, timeout, check):
        started.append(command)
        if "other" in command:
            raise subprocess.TimeoutExpired(command, timeout)
        return SimpleNamespace(returncode=decoding.main(command[3:]))

    monkeypatch.setattr(decoding, "subprocess", SimpleNamespace(run=run, TimeoutExpired=subprocess.TimeoutExpired))
    code, report = bench(tmp_path, "--model", "tiny,other", "--rows", "B2")
    assert code == 1 and [command[1:5] for command in started] == [
        ["-m", "bench.decoding", "--model", name] for name in ("tiny", "other")
    ]
    assert ["failed" in row for row in report["comparisons"]] == [False, True]
    assert "no result within 900 s" in capsys.readouterr().out


def test_an_output_that_ends_early_gives_no_result(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(decoding, "ITEMS", 0)
    with pytest.raises(RuntimeError, match="instead of 12: no result"):
        bench(tmp_path, "--rows", "G3")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--model", "no"], "got 'no'"),
        (["--rows", "G64,G9"], "got 'G9'"),
        (["--tokens", "1"], "at least 2"),
        (["--options", "[1]"], "JSON object"),
    ],
)
def test_bad_arguments(argv, says, capsys):
    with pytest.raises(SystemExit) as stopped:
        decoding.main(argv)
    assert stopped.value.code == 2 and says in capsys.readouterr().err


def test_schemas_differ_and_can_be_used():
    found = decoding.schemas(64)
    assert len({json.dumps(schema) for schema in found}) == 64 and found == decoding.schemas(64)
    for schema in found:
        StructuredOutputsParams(json=schema)


def test_a_vocabulary_is_a_tokenizers(tmp_path):
    """Every token can be written with the merges before it, and text comes back."""
    tokens, merges = vocabulary(2000)
    assert len(set(tokens)) == 2000 and len(merges) == 2000 - 256 and (tokens, merges) == vocabulary(2000)
    assert ["".join(pair) for pair in merges] == tokens[256:]
    write_tokenizer(tmp_path, {"bos_token_id": 2000, "eos_token_id": 2003})
    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path))
    text = '{"name": "the other one", "größe": 1234}\n'
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and len(ids) < len(text.encode())
    assert (len(tokenizer), tokenizer.bos_token_id, tokenizer.eos_token_id) == (2004, 2000, 2003)
    with pytest.raises(ValueError, match="size must be at least 256"):
        vocabulary(255)

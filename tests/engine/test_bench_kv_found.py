"""The benchmark of prefixes that another engine has computed, in tiny form on the CPU."""

import json
from pathlib import Path

import pytest
import torch
from support.imported_processes import imported_processes

from bench import kv_found, kv_found_engine, reports, tables
from bench.kv_found_engine import NEW, Answer, Computed, Side

pytestmark = pytest.mark.long

SIZES = ["--rehearsal", "--tokens", "32,64", "--repeats", "1"]


@pytest.fixture
def sides(tmp_path):
    """Both engines in this process."""
    made = []

    def start(connector):
        job = kv_found.job_of(kv_found.parse([*SIZES, "--connectors", connector]), tmp_path)
        made.extend(map(Side, kv_found.places(job, connector, tmp_path / "store")))
        return made[-2:]

    yield start
    for one in made:
        one._transfer.connector.close()


@pytest.mark.smoke
def test_writes_results(tmp_path):
    out = tmp_path / "kv-found.json"
    settings = '{"Peer": {"threads": 2}, "FileStore": {"threads": 1}}'
    with imported_processes():
        assert kv_found.main([*SIZES, "--connectors", "Peer", "--settings", settings, "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    (start,) = report["starts"]
    assert len(start["start_seconds"]) == len(start["fingerprint_seconds"]) == 2
    assert [(row["connector"], row["tokens"]) for row in report["found"]] == [("Peer", 32), ("Peer", 64)]
    for row in report["found"]:
        assert row["bytes"] == row["tokens"] // 16 * 2 * 2 * 16 * 2 * 128 * 4
        assert row["times"] == pytest.approx(row["computed_ms"] / row["found_ms"])
        assert 0 < row["load_ms"] < row["found_ms"] and row["cached_ms"] > 0 and row["gb_per_s"] > 0
        assert row["settings"] == {"threads": 2}
        assert all(len(times) == 1 for times in row["values_ms"].values())
    assert {"machine", "commit", "date"} <= set(report) and reports.kind_of(report) == "kv-found"
    text = tables.table(report, ())
    assert "Peer, 64 tokens" in text and text.count("\n|") == 2 + 2


def test_a_prefix_is_found_through_a_folder(sides):
    first, second = sides("FileStore")
    assert first.facts()["fingerprint"] == second.facts()["fingerprint"]
    took = kv_found.one_length(first, second, 64, 2)
    assert {kind: [answer.cached for answer in answers] for kind, answers in took.items()} == {
        "computed": [0, 0, 0],
        "found": [64, 64, 64],
        "cached": [64, 64, 64],
    }
    assert all(answer.load_seconds > 0 for answer in took["found"])


class Other:
    """An engine whose answers a test chooses."""

    def __init__(self, **changes):
        self.changes = changes

    def compute(self, tokens, seed):
        return Computed({}, 7, b"blocks")

    def ask(self, tokens, seed, params):
        self.kind = "computed" if seed else "cached" if self.kind == "found" else "found"
        answer = Answer(1.0, 7, 0 if self.kind == "computed" else tokens, 0.1, tokens // 16 * (self.kind == "found"))
        return answer._replace(**self.changes.get(self.kind, {}))

    def forget(self):
        pass

    def digest(self, tokens, seed):
        return self.changes.get("digest", b"blocks")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"digest": b"others"}, "other blocks were found"),
        ({"found": {"cached": 48}}, r"found: \[48, 48\] of 64 tokens were not computed, instead of 64"),
        ({"computed": {"cached": 64}}, "computed: .* instead of 0"),
        ({"found": {"loaded": 3}}, r"found: \[3, 3\] blocks were loaded instead of 4"),
        ({"found": {"token": 8}}, "found: another token came"),
    ],
)
def test_what_was_not_found_as_a_whole_has_no_result(changes, message):
    assert kv_found.one_length(Other(), Other(), 64, 1)["found"][1].cached == 64
    with pytest.raises(RuntimeError, match=message):
        kv_found.one_length(Other(), Other(**changes), 64, 1)


def test_a_digest_is_of_the_blocks_of_the_prefix(sides):
    first, _ = sides("FileStore")
    prefix = first.compute(32, 0)
    assert first.digest(32, 0) == prefix.digest != first.compute(32, 1).digest
    prompt = kv_found_engine.prompt_of(32, 0)
    assert len(prompt) == 32 + NEW and kv_found_engine.prompt_of(64, 0)[:32] != prompt[:32]
    (pool,) = [copies.pool for copies in first._engine._runner.caches.copies]
    pool.view(torch.int32).bitwise_xor_(1)
    assert first.digest(32, 0) != prefix.digest
    first.forget()
    with pytest.raises(RuntimeError, match="0 of 2 blocks are in the cache"):
        first.digest(32, 0)


def test_rows_are_added_to_those_of_the_same_commit(tmp_path, capsys):
    out = tmp_path / "kv-found.json"
    args = kv_found.parse([*SIZES, "--add", "--out", str(out)])
    there = kv_found.begun(args) | {"found": [{"connector": "Peer"}], "date": "2026-01-01"}
    out.write_text(json.dumps(there))
    assert kv_found.begun(args)["found"] == [{"connector": "Peer"}]
    out.write_text(json.dumps(there | {"commit": "another"}))
    assert kv_found.main([*SIZES, "--add", "--out", str(out)]) == 1
    assert "commit of" in capsys.readouterr().err and json.loads(out.read_text())["commit"] == "another"


def test_engines_that_do_not_start_have_no_rows(tmp_path, capsys):
    out = tmp_path / "kv-found.json"
    bad = ["--connectors", "Peer", "--options", '{"dtype": "float99"}', "--out", str(out)]
    with imported_processes():
        assert kv_found.main([*SIZES, *bad]) == 1
    assert "Peer: ValueError: dtype" in capsys.readouterr().err and not out.exists()


def test_bad_arguments(tmp_path, capsys):
    for wrong, message in (
        (["--gpus", "0"], "--gpus must name two"),
        (["--tokens", "16,8"], "multiples of 16"),
        (["--rehearsal", "--connectors", "CudaIpc"], "'CudaIpc' is none that can be measured here"),
        (["--repeats", "0"], "--repeats must be at least 1"),
    ):
        with pytest.raises(SystemExit):
            kv_found.parse(wrong)
        assert message in capsys.readouterr().err
    assert kv_found.main(["--gpus", "0,99"]) == 1 and "needs the GPUs" in capsys.readouterr().err
    job = kv_found.job_of(kv_found.parse(SIZES), tmp_path)._replace(block_bytes=1 << 50)
    with pytest.raises(RuntimeError, match=r"GB left of .*: name another one"):
        kv_found.measure(job, "FileStore", Path(tmp_path), lambda row: None)

"""``bench.serve_load``: what it sends, what it calls a failure, and a rehearsal of all of it with a tiny model."""

import json
import subprocess
import sys

import pytest

from bench import serve_faults, serve_load
from bench.serve_faults import _growth
from bench.serving import descendants, is_alive, resources


def scenario(name):
    return next(one for part in serve_load.SCENARIOS.values() for one in part if one.name == name)


def test_arrivals_have_their_rate():
    asks = scenario("16 requests/s").asks()
    assert len(asks) == 480
    assert asks[-1].at == pytest.approx(30, rel=0.15)
    assert {(ask.input_len, ask.output_len) for ask in asks} == {(512, 128)}


def test_bursts_come_together():
    at = [ask.at for ask in scenario("bursts").asks()]
    assert at == [second for second in range(0, 20, 2) for _ in range(48)]
    assert {ask.at for ask in scenario("saturation").asks()} == {0.0}


def test_growth_is_a_failure():
    before = {"api": {"rss_mb": 100.0, "fds": 20, "threads": 4}, "engine": {"rss_mb": 900.0, "fds": 16, "threads": 9}}
    assert _growth([before, before])["passed"]
    after = {**before, "api": {"rss_mb": 100.0, "fds": 120, "threads": 4}}
    row = _growth([before, before, after])
    assert not row["passed"] and row["why"] == "api: fds grew from 20 to 120"


def test_what_is_left_over_is_a_failure(monkeypatch):
    class Leaking:
        def is_idle(self):
            return False

    async def answers(running, count=1):
        return count

    faults = serve_faults.Faults("", [], 100, serve_faults.SMALL, 2)
    monkeypatch.setattr(serve_faults, "IDLE_SECONDS", 0.1)
    monkeypatch.setattr(faults, "_answers", answers)
    row = faults._survived("a fault", Leaking(), lambda running: {"seen": 3, "wrong": ["a stream broke"]})
    assert (row["passed"], row["seen"]) == (False, 3)
    assert row["why"] == "a stream broke; requests or blocks are left over"


def test_processes_are_watched():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert child.pid in descendants(serve_faults.os.getpid()) and is_alive(child.pid)
        assert resources(child.pid)["fds"] >= 3
        child.kill()
        child.wait()
        assert not is_alive(child.pid)


@pytest.mark.long
def test_a_rehearsal(tmp_path, capsys):
    out = tmp_path / "load.json"
    options = ["--rehearsal", "--only", "qwen", "replicas", "faults", "--rounds", "2", "--out", str(out)]
    assert serve_load.main(options) == 0, capsys.readouterr().out
    report = json.loads(out.read_text())
    assert report["rehearsal"] and report["failed"] == []
    row, one, two = report["load"]
    assert (row["scenario"], row["failed_requests"], row["num_requests"]) == ("256 streams", 0, 4)
    assert row["of_offline"] == row["output_tokens_per_second"] / row["offline"]["output_tokens_per_second"]
    assert [(row["data_parallel_size"], row["num_requests"], row["failed_requests"]) for row in (one, two)] == [
        (1, 8, 0),
        (2, 17, 0),
    ]
    assert one["of_one"] == 1 and two["of_one"] == two["output_tokens_per_second"] / one["output_tokens_per_second"]
    assert len(report["faults"]) == 2 * 5 + 1 + 3
    left = [row["left"] for row in report["faults"] if row["fault"].startswith("streams that leave")]
    assert min(left) > 0, "nobody left"
    ends = {row["fault"]: row["clients"] for row in report["faults"] if "clients" in row}
    assert "error" in ends["kill -9 of the engine"], "those that had not ended before"
    assert "whole" in ends["SIGTERM under load"]


def test_a_mistake_is_wrong_usage(capsys):
    for options, message in (
        (["--rounds", "1"], "--rounds must be"),
        (["--api-server-count", "0"], "must be at least 1"),
    ):
        with pytest.raises(SystemExit):
            serve_load.main(options)
        assert message in capsys.readouterr().err

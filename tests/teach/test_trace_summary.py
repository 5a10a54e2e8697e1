"""A summary's numbers are those of the outputs' metrics and of the counters; its reader takes what breaks off."""

import gzip
import json
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines import greedy, tiny_llm
from support.examples import examples
from support.fake_events import FakeEngine, added, ended, finished, launched, one_step, part, planned

from tritonllm.events import EngineReset
from tritonllm.telemetry.trace import Trace
from tritonllm.telemetry.trace_reader import read_trace
from tritonllm.telemetry.trace_summary import covered, spread, summarize
from tritonllm.telemetry.trace_text import text


@pytest.fixture(scope="module", params=[True, False], ids=["ahead", "one by one"])
def run(request, tmp_path_factory):
    """A run with preemptions, its trace, and its outputs."""
    path = tmp_path_factory.mktemp("trace") / "a.json.gz"
    llm = tiny_llm(num_blocks=24, max_num_batched_tokens=24, async_scheduling=request.param)
    prompts = [[5 + n % (2 + i) for n in range(7 + 5 * i)] for i in range(7)]
    with Trace(llm, path):
        outputs = llm.generate(prompts, greedy(25), use_tqdm=False)
        while llm.engine._in_flight:
            llm.engine.step()
    return llm.engine.stats, outputs, summarize(read_trace(path)), path


def test_requests_have_the_times_of_their_metrics(run):
    _, outputs, summary, _ = run
    found = {one["request"]: one for one in summary["requests"]}
    assert len(found) == len(outputs) == summary["totals"]["requests"]
    for output in outputs:
        one, metrics = found[output.request_id], output.metrics
        assert one["ttft_ms"] == pytest.approx(1e3 * (metrics.first_token_time - metrics.arrival_time), abs=1e-5)
        assert one["total_ms"] == pytest.approx(1e3 * (metrics.finished_time - metrics.arrival_time), abs=1e-5)
        assert 0 <= one["queue_ms"] <= one["ttft_ms"] <= one["total_ms"]
        assert (one["prompt_tokens"], one["output_tokens"]) == (len(output.prompt_token_ids), 25)
        assert (one["cached_tokens"], one["finish_reasons"]) == (output.num_cached_tokens, ["length"])
        decoding = 1e3 * (metrics.finished_time - metrics.first_token_time)
        assert 24 * one["itl_ms"]["mean"] <= decoding + one["ttft_ms"] + 24 * 0.001
    ttft = [1e3 * (output.metrics.first_token_time - output.metrics.arrival_time) for output in outputs]
    of_all = summary["of_requests"]["ttft_ms"]
    assert of_all["mean"] == pytest.approx(statistics.mean(ttft), abs=1e-5)
    assert of_all["p50"] == pytest.approx(statistics.median(ttft), abs=1e-5)
    assert of_all["max"] == pytest.approx(max(ttft), abs=1e-5)


def test_totals_are_those_of_the_engine(run):
    stats, _, summary, _ = run
    totals = summary["totals"]
    assert totals["steps"] == stats.steps
    assert totals["new_tokens"] == stats.generated_tokens == 25 * 7
    assert totals["prompt_tokens"] == stats.prompt_tokens
    assert totals["cached_tokens"] == stats.prefix_cache_hit_tokens
    assert totals["preemptions"] == stats.preemptions > 0
    assert sum(one["preemptions"] for one in summary["requests"]) == stats.preemptions
    assert sum(kind["steps"] for kind in summary["batches"]) == stats.steps
    assert sum(kind["tokens"] for kind in summary["batches"]) == totals["computed_tokens"]
    assert summary["steps"]["device_ms"]["max"] == summary["slowest"][0]["device_ms"]
    assert len(summary["slowest"]) == 10 and summary["blocks"]["all"] == 24 >= summary["blocks"]["most_used"] > 20
    assert summary["trace"]["complete"] and not summary["resets"]


def test_it_is_json_and_text(run):
    _, _, summary, _ = run
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    shown = text(summary)
    assert "7 requests (0 unfinished)" in shown and "The 10 slowest steps, ms" in shown
    assert "none: there is no GPU" in shown and "\x1b" not in shown


def fake(path, *events):
    engine = FakeEngine()
    with Trace(engine, path) as trace:
        trace._clock.start = 100.0
        engine.tell(*events)
    return read_trace(path)


def test_why_the_device_was_idle(tmp_path):
    """Times that are known: 2 ms planned too late, 1 ms of it planning; 50 ms without requests."""
    data = fake(
        tmp_path / "a.json",
        added(100.000, "a"),
        *one_step(100.001, 1, "a", admitted=True),  # on the device from 2 to 12 ms
        *one_step(100.013, 2, "a"),  # planned from 13 to 14
        ended(100.025, "a", 100.012, 2),  # the step ended at 24
        added(100.075, "b"),
        *one_step(100.076, 3, "b"),  # planned from 76 to 77
        ended(100.088, "b", 100.087, 1),
    )
    idle = summarize(data)["idle"]
    assert [(gap["before_step"], gap["ms"], gap["causes"]) for gap in idle["longest"]] == [
        (3, 53.0, {"no requests": 50.0, "other work of the host": 2.0, "planning": 1.0}),
        (2, 2.0, {"other work of the host": 1.0, "planning": 1.0}),
    ]
    assert idle["causes_ms"] == {"no requests": 50.0, "other work of the host": 3.0, "planning": 2.0}
    assert (idle["ms"], idle["share"]) == (55.0, pytest.approx(55 / 85))
    (a, b) = summarize(data)["requests"]
    assert (a["queue_ms"], a["ttft_ms"], a["total_ms"]) == (2.0, pytest.approx(12.0), pytest.approx(25.0))
    assert a["itl_ms"]["max"] == 12.0 and b["itl_ms"] is None


def test_no_idle_time_where_the_next_step_is_launched_before(tmp_path):
    data = fake(
        tmp_path / "a.json",
        added(100.000, "a"),
        planned(100.002, 1, [part("a", "prefill", 0, 4, admitted=True)]),
        launched(100.003, 1),
        planned(100.005, 2, [part("a")]),
        launched(100.006, 2),
        finished(100.020, 1, "a"),
        planned(100.022, 3, [part("a")]),
        launched(100.023, 3, late=True),
        finished(100.030, 2, "a"),
        finished(100.040, 3, "a"),
    )
    summary = summarize(data)
    assert [(step["device_ms"], step["gap_ms"]) for step in sorted(summary["slowest"], key=lambda s: s["step"])] == [
        (18.0, 0.0),
        (10.0, 0.0),
        (10.0, 0.0),
    ]
    assert summary["idle"]["ms"] == 0 and summary["totals"]["unfinished"] == 1
    assert next(step for step in summary["slowest"] if step["step"] == 3)["late"]


def test_a_step_that_broke_off(tmp_path):
    data = fake(
        tmp_path / "a.json", added(100.0, "a"), *one_step(100.001, 1, "a"), EngineReset(100.02, "the step failed: no")
    )
    summary = summarize(data)
    assert summary["resets"] == ["the step failed: no"] and summary["requests"][0]["error"] == "the step failed: no"
    assert "a step was broken off: the step failed: no" in text(summary)


def test_an_empty_trace(tmp_path):
    summary = summarize(fake(tmp_path / "a.json"))
    assert summary["idle"] is None and summary["slowest"] == [] and summary["kernels"] is None
    assert "0 requests" in text(summary)


@given(share=st.floats(0, 1))
@settings(max_examples=examples(60), deadline=None)
def test_what_breaks_off_is_read_as_far_as_it_goes(run, tmp_path_factory, share):
    """Cut anywhere, compressed or not: no error, no event that was not there, and more of a longer piece."""
    path = run[3]
    packed, whole = path.read_bytes(), gzip.decompress(path.read_bytes())
    folder = tmp_path_factory.mktemp("cut")
    for name, data in (("a.json.gz", packed), ("a.json", whole)):
        piece = folder / name
        piece.write_bytes(data[: int(share * len(data))])
        try:
            found = read_trace(piece)
        except ValueError as error:
            assert "is no trace" in str(error) and share < 0.5
            continue
        assert found.events <= whole.count(b"\n{")
        assert found.complete or share < 1
        assert found.why or not found.complete
        if name == "a.json":
            assert found.events >= data[: int(share * len(data))].count(b"\n{") - 1
        assert "ms" in text(summarize(found))


@pytest.mark.parametrize("content", [b"", b"{}", b"[\n]\n", b"\x1f\x8bnothing", b'[{"ph":"X"}]', b"\xff\xfe\x00"])
def test_no_trace(tmp_path, content):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(ValueError, match="is no trace that"):
        read_trace(tmp_path / "a")


def test_spread_and_covered():
    assert spread([]) is None
    assert spread(range(1, 101)) == {"mean": 50.5, "p50": 50, "p90": 90, "p99": 99, "max": 100}
    assert covered([(3, 4), (0, 1), (1, 2), (3.5, 6)]) == [(0, 2), (3, 6)]

"""A trace is valid in the eyes of its format, and says what the engine's counters and the outputs' metrics say."""

import errno
import gzip
import json
import signal
import subprocess
import sys
from itertools import pairwise

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkout import environment
from support.engines import greedy, similar_checkpoint, tiny_llm
from support.examples import examples
from support.fake_events import FakeEngine, added, one_step
from support.server import eventually
from support.trace_rules import check_trace, load

from tritonllm import BeamSearchParams, SamplingParams
from tritonllm.events import StepFinished
from tritonllm.telemetry import trace_requests
from tritonllm.telemetry.trace import Trace
from tritonllm.telemetry.trace_layout import DEVICE, ENGINE, FIRST_LANE, HOST, OVERFLOW, REQUESTS
from tritonllm.telemetry.trace_reader import read_trace

PROMPT = list(range(5, 25))


def of(events, name):
    return [event for event in events if event.get("name") == name]


def traced(llm, path, work, **options):
    with Trace(llm, path, **options) as trace:
        result = work()
    events = load(path)
    assert len(events) == trace.events
    return result, events, check_trace(events)


def steps_of(tracks):
    return sorted(tracks[ENGINE, DEVICE])


@pytest.fixture(scope="module")
def engines():
    options = {"num_blocks": 24, "max_num_batched_tokens": 24}
    return {ahead: tiny_llm(async_scheduling=ahead, **options) for ahead in (True, False)}


def drain(engine):
    """Steps that were launched ahead of the last request's end."""
    while engine._in_flight:
        engine.step()


def check_lanes(tracks, events):
    """Of each request: it waits, is computed in chunks, decodes; and its slices have its tokens."""
    ends = {event["tid"]: [] for event in of(events, "end")}
    for event in of(events, "end"):
        ends[event["tid"]].append(event)
    for (pid, lane), slices in tracks.items():
        if pid != REQUESTS:
            continue
        outer = sorted(one for one in slices if one[2].startswith("request "))
        inner = [one for one in slices if not one[2].startswith("request ")]
        assert {one[2] for one in inner} <= {"queued", "prefill", "decode", "preempted"}
        for begin, end, _, _ in outer:
            mine = sorted(one for one in inner if begin <= one[0] and one[1] <= end and one[0] < max(end, begin + 1))
            for record in ends.get(lane, []):
                if record["ts"] == end and len(record["args"].get("output_tokens", [])) == 1:
                    check_request(record["args"], mine)


def check_request(record, slices):
    names = [name for *_, name, _ in slices]
    assert names.count("preempted") == record["preemptions"]
    assert names.count("queued") == (record["arrival"] is not None)
    if "queue_us" in record:
        (queued,) = [end - begin for begin, end, name, _ in slices if name == "queued"]
        assert queued == record["queue_us"]
    chunks = [args for *_, name, args in slices if name == "prefill"]
    assert len(chunks) == record["chunks"] and sum(args["tokens"] for args in chunks) == record["prefill_tokens"]
    decoded = [args for *_, name, args in slices if name == "decode"]
    assert sum(args["tokens"] for args in decoded) == max(0, record["tokens"] - 1)
    assert all(len(args["itl_us"].split()) == args["tokens"] for args in decoded)
    if decoded and not record["preemptions"]:
        gaps = [float(gap) for args in decoded for gap in args["itl_us"].split()]
        spans = [(begin, end) for begin, end, name, _ in slices if name == "decode"]
        assert sum(gaps) == pytest.approx(spans[-1][1] - spans[0][0], abs=0.5 * len(gaps))
        assert spans[0][0] <= 1e6 * record["first"] + 1 and spans[-1][1] <= 1e6 * record["end"] + 1


sizes = st.tuples(st.integers(1, 40), st.integers(1, 12), st.sampled_from([1, 1, 3]))
requests = st.lists(sizes, min_size=1, max_size=8)
actions = st.lists(st.sampled_from(["step", "step", "add", "abort"]), max_size=30)


@given(loads=requests, script=actions, ahead=st.booleans(), packed=st.booleans())
@settings(max_examples=examples(20), deadline=None)
def test_a_trace_adds_up_to_counters_and_metrics(engines, tmp_path_factory, loads, script, ahead, packed):
    """Over random loads in a small pool, with preemptions, aborts and several sequences a request."""
    llm = engines[ahead]
    engine = llm.engine
    path = tmp_path_factory.mktemp("trace") / ("a.json.gz" if packed else "a.json")
    drain(engine)
    before = engine.stats
    outputs = {}

    def work():
        waiting = [
            (f"r{number}", [5 + i % (2 + number) for i in range(length)], greedy(tokens, n=n))
            for number, (length, tokens, n) in enumerate(loads)
        ]
        doing = iter(script)
        while waiting or engine.has_unfinished_requests():
            what, news = next(doing, "step"), []
            if what == "abort":
                news = engine.abort_request([f"r{len(waiting)}"])
            elif waiting and (what == "add" or not engine.has_unfinished_requests()):
                engine.add_request(*waiting.pop())
            else:
                news = engine.step()
            outputs.update((output.request_id, output) for output in news if output.finished)
        drain(engine)

    _, events, tracks = traced(llm, path, work)
    after, steps = engine.stats, steps_of(tracks)
    facts = [args for *_, args in steps]
    assert len(facts) == after.steps - before.steps
    preempted = after.preemptions - before.preemptions
    assert sum(args.get("preempted", 0) for args in facts) == preempted
    records = {event["args"]["request"]: event["args"] for event in of(events, "end")}
    assert set(records) == set(outputs)
    for name, record in records.items():
        output, metrics = outputs[name], outputs[name].metrics
        assert record["prompt_tokens"] == len(output.prompt_token_ids)
        assert record["output_tokens"] == [len(one.token_ids) for one in output.outputs]
        assert record["finish_reasons"] == [one.finish_reason for one in output.outputs]
        assert record["end"] - record["arrival"] == pytest.approx(
            metrics.finished_time - metrics.arrival_time, abs=1e-8
        )
        if metrics.first_token_time is not None:
            ttft = metrics.first_token_time - metrics.arrival_time
            assert record["first"] - record["arrival"] == pytest.approx(ttft, abs=1e-8)
    assert sum(record["preemptions"] for record in records.values()) == preempted
    generated = sum(sum(record["output_tokens"]) for record in records.values())
    assert generated == after.generated_tokens - before.generated_tokens
    assert sum(record["tokens"] for record in records.values()) == generated == sum(f["new_tokens"] for f in facts)
    check_lanes(tracks, events)


def test_a_request_step_by_step(tmp_path):
    llm = tiny_llm(async_scheduling=False, max_num_batched_tokens=8, num_blocks=32)
    (output,), events, tracks = traced(
        llm, tmp_path / "a.json", lambda: llm.generate([PROMPT], greedy(4), use_tqdm=False)
    )
    (outer, queued, *chunks, decode) = sorted(tracks[REQUESTS, FIRST_LANE], key=lambda one: (one[0], -one[1]))
    assert outer[2] == "request 0" and outer[3] == {"request": "0"}
    assert queued[2] == "queued" and queued[0] == outer[0]
    assert [(c[2], c[3]) for c in chunks] == [
        ("prefill", {"step": step, "start": start, "tokens": tokens})
        for step, start, tokens in ((1, 0, 8), (2, 8, 8), (3, 16, 4))
    ]
    assert (decode[2], decode[3]["tokens"], decode[0]) == ("decode", 3, chunks[-1][1])
    steps = steps_of(tracks)
    assert [(name, args["step"], args["tokens"], args["new_tokens"]) for *_, name, args in steps] == [
        ("prefill", 1, 8, 0),
        ("prefill", 2, 8, 0),
        ("prefill", 3, 4, 1),
        ("decode", 4, 1, 1),
        ("decode", 5, 1, 1),
        ("decode", 6, 1, 1),
    ]
    assert steps[0][3]["prompts"] == ["0: 0+8"] and steps[0][3]["why"] == "queue"
    assert [step[:2] for step in steps[:3]] == [chunk[:2] for chunk in chunks]
    host = sorted(tracks[ENGINE, HOST])
    assert [(name, args["step"]) for *_, name, args in host] == [
        (name, step) for step in range(1, 7) for name in ("plan", "launch", "wait")
    ]
    for launch, wait, step in zip(host[1::3], host[2::3], steps, strict=True):
        assert (step[0], step[1]) == (launch[0], wait[1])
    arrows = [(event["pid"], event["ts"]) for event in events if event["ph"] in "sf"]
    assert arrows == [
        (pid, at)
        for at, to in [(chunk[0], chunk[0]) for chunk in chunks] + [(decode[0], steps[3][0])]
        for pid, at in ((REQUESTS, at), (ENGINE, to))
    ]
    used = [event["args"]["used"] for event in of(events, "blocks")]
    assert used == [5, 6]
    assert [event["args"] for event in of(events, "sequences")] == [{"running": 1, "waiting": 0}]
    (end,) = of(events, "end")
    assert end["args"]["chunks"] == 3 and end["args"]["finish_reasons"] == ["length"] and output.finished
    (begins,), (ends,) = of(events, "trace begins"), of(events, "trace ends")
    assert begins["args"]["kernels"] == "none: there is no GPU" and ends["args"]["why"] == "it was told to end"


def test_what_the_host_says_of_each_token(tmp_path):
    """The times between tokens are those between the ends of the steps that brought them."""
    llm = tiny_llm(async_scheduling=True)
    times = []
    llm.engine.subscribe(lambda event: times.append(event.time) if isinstance(event, StepFinished) else None)
    _, _, tracks = traced(llm, tmp_path / "a.json", lambda: llm.generate([PROMPT], greedy(150), use_tqdm=False))
    decoded = sorted(one for one in tracks[REQUESTS, FIRST_LANE] if one[2] == "decode")
    assert [args["tokens"] for *_, args in decoded] == [64, 64, 21]
    gaps = [int(gap) for *_, args in decoded for gap in args["itl_us"].split()]
    expected = [1e6 * (b - a) for a, b in pairwise(times[:150])]
    assert all(abs(gap - other) <= 0.75 for gap, other in zip(gaps, expected, strict=True))
    for before, after in pairwise(decoded):
        assert before[1] == after[0]
    for before, after in pairwise(steps_of(tracks)):
        assert before[1] <= after[0], "the device does one step after the other"


def test_more_requests_than_lanes(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_requests, "LANES", 3)
    llm = tiny_llm()
    outputs, events, tracks = traced(
        llm, tmp_path / "a.json", lambda: llm.generate([PROMPT[:n] for n in range(3, 11)], greedy(5), use_tqdm=False)
    )
    lanes = {tid for pid, tid in tracks if pid == REQUESTS}
    assert lanes == {FIRST_LANE, FIRST_LANE + 1, FIRST_LANE + 2}
    ends = of(events, "end")
    assert len(ends) == len(outputs) == 8 and sum(event["tid"] == OVERFLOW for event in ends) == 5
    assert [event["args"]["output_tokens"] for event in ends] == [[5]] * 8


def test_lanes_are_given_again(tmp_path):
    llm = tiny_llm()

    def work():
        for _ in range(5):
            llm.generate([PROMPT], greedy(3), use_tqdm=False)

    _, events, tracks = traced(llm, tmp_path / "a.json", work)
    assert {tid for pid, tid in tracks if pid == REQUESTS} == {FIRST_LANE}
    assert len(of(events, "end")) == 5


def test_siblings_beams_and_prompts_that_are_pooled(tmp_path):
    llm = tiny_llm()
    _, events, tracks = traced(
        llm,
        tmp_path / "a.json",
        lambda: (
            llm.generate([PROMPT[:10]], SamplingParams(n=3, max_tokens=4, seed=1, ignore_eos=True), use_tqdm=False),
            llm.beam_search([PROMPT[:10]], BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True)),
        ),
    )
    siblings, beams = of(events, "end")
    assert siblings["args"]["output_tokens"] == [4, 4, 4] and siblings["args"]["tokens"] == 12
    assert len(beams["args"]["output_tokens"]) >= 2
    copies = sum(args.get("copies", 0) for *_, args in steps_of(tracks))
    assert copies == of(events, "block copies")[-1]["args"]["copied"] > 0
    llm = tiny_llm(runner="pooling")
    _, events, _ = traced(llm, tmp_path / "b.json", lambda: llm.embed([PROMPT], use_tqdm=False))
    (end,) = of(events, "end")
    assert end["args"]["prefill_tokens"] == len(PROMPT) and "error" not in end["args"]


def test_drafts(tmp_path):
    draft = {"model": str(similar_checkpoint()), "num_speculative_tokens": 3, "adaptive": False}
    llm = tiny_llm(speculative_config=draft)
    _, events, tracks = traced(llm, tmp_path / "a.json", lambda: llm.generate([PROMPT], greedy(40), use_tqdm=False))
    stats, facts = llm.engine.stats, [args for *_, args in steps_of(tracks)]
    assert sum(args.get("drafts", 0) for args in facts) == stats.num_draft_tokens > 0
    assert of(events, "drafts")[-1]["args"] == {
        "verified": stats.num_draft_tokens,
        "accepted": stats.num_accepted_tokens,
    }
    assert sum(args["new_tokens"] for args in facts) == 40
    assert "verify" in {name for *_, name, _ in steps_of(tracks)}


def test_a_trace_that_begins_in_the_middle(tmp_path):
    llm = tiny_llm(async_scheduling=True, max_num_seqs=2)
    engine = llm.engine
    for name in "abc":
        engine.add_request(name, PROMPT, greedy(20))
    for _ in range(4):
        engine.step()

    def work():
        engine.add_request("late", PROMPT, greedy(3))
        while engine.has_unfinished_requests():
            engine.step()

    _, events, tracks = traced(llm, tmp_path / "a.json", work)
    ends = {event["args"]["request"]: event["args"] for event in of(events, "end")}
    assert {name: end["arrival"] is None for name, end in ends.items()} == dict.fromkeys("abc", True) | {"late": False}
    assert all("queue_us" not in ends[name] for name in "abc")
    assert [ends[name]["output_tokens"] for name in "abc"] == [[20]] * 3
    assert not any(name == "queued" and begin == 0 for (pid, _), one in tracks.items() for begin, _, name, _ in one)


def test_an_end_in_the_middle_and_a_step_that_fails(tmp_path, monkeypatch):
    llm = tiny_llm(async_scheduling=True)
    engine = llm.engine
    trace = Trace(llm, tmp_path / "a.json")
    engine.add_request("a", PROMPT, greedy(20))
    engine.add_request("b", PROMPT, greedy(20))
    for _ in range(4):
        engine.step()
    monkeypatch.setattr(engine._runner, "launch", lambda plan: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    monkeypatch.undo()
    engine.step()
    engine.add_request("c", PROMPT, greedy(20))
    for _ in range(4):
        engine.step()
    trace.close()
    trace.close()
    events = load(tmp_path / "a.json")
    check_trace(events)
    assert len(of(events, "reset")) == 1
    ends = {event["args"]["request"]: event["args"] for event in of(events, "end")}
    assert "ZeroDivisionError" in ends["a"]["error"] and ends["b"]["finish_reasons"] == ["error"]
    assert ends["c"]["unfinished"] and 0 < ends["c"]["tokens"] < 20
    assert not engine._events.heard, "nobody listens any more"


def test_limits(tmp_path):
    llm = tiny_llm()
    trace = Trace(llm, tmp_path / "a.json", max_events=100)
    llm.generate([PROMPT] * 4, greedy(30), use_tqdm=False)
    assert "100 events (max_events)" in trace.note and not llm.engine._events.heard
    events = load(tmp_path / "a.json")
    check_trace(events)
    assert 100 <= len(events) < 150, "what is left of the last step, and the ends of tracks"
    trace.close()
    with Trace(llm, tmp_path / "b.json", delay_steps=2, max_steps=3) as trace:
        llm.generate([PROMPT], greedy(30), use_tqdm=False)
    tracks = check_trace(load(tmp_path / "b.json"))
    assert len(steps_of(tracks)) == 3 and "3 steps (max_iterations)" in trace.note


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_a_trace_of_nothing(tmp_path, name):
    with Trace(FakeEngine(), tmp_path / name):
        pass
    assert [event["name"] for event in load(tmp_path / name)][-1] == "trace ends"


def test_a_full_disk_ends_the_trace_and_not_the_engine(tmp_path, monkeypatch, caplog):
    llm = tiny_llm()
    trace = Trace(llm, tmp_path / "a.json")

    def full(text):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(trace._file, "_write", full)
    (output,) = llm.generate([PROMPT], greedy(5), use_tqdm=False)
    assert output.finished and "No space left" in trace.note and "No space left" in caplog.text
    assert not llm.engine._events.heard
    with pytest.raises(OSError, match="No space left"):
        trace.close()
    with pytest.raises(OSError, match="No such file"):
        Trace(llm, tmp_path / "nowhere" / "a.json")
    assert not llm.engine._events.heard


@pytest.mark.long
def test_memory_is_flat_over_100_000_steps(tmp_path):
    engine, resident = FakeEngine(), []
    process = psutil.Process()
    with Trace(engine, tmp_path / "a.json.gz", max_events=10**9) as trace:
        start = trace._clock.start
        engine.tell(added(start, "endless"))
        for step in range(1, 100_001):
            at = start + 0.012 * step
            engine.tell(*one_step(at, step, ["endless"]))
            if step % 20_000 == 0:
                resident.append(process.memory_info().rss)
                assert not trace._steps and len(trace._tracks._sequences) == 1
    assert trace.events > 400_000
    assert resident[-1] - resident[0] < 8 << 20, "events of a hundredth of that would have stayed"


WRITER = """
import sys, time
from support.fake_events import FakeEngine, added, one_step
from tritonllm.telemetry.trace import Trace
engine = FakeEngine()
trace = Trace(engine, sys.argv[1])
for name in "abc":
    engine.tell(added(trace._clock.start, name))
step = 0
while True:
    step += 1
    engine.tell(*one_step(trace._clock.start + 0.012 * step, step, list("abc")))
"""


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
@pytest.mark.long
def test_a_writer_that_is_killed_leaves_whole_events(tmp_path, name):
    """Between any two writes: Perfetto forgives the missing bracket, but not half a gzip member."""
    path = tmp_path / name
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], env=environment())
    try:
        eventually(lambda: path.exists() and path.stat().st_size > 100_000)
        writer.send_signal(signal.SIGSTOP)  # lets a write end; killed in it, a process leaves a part of what it wrote
        eventually(lambda: psutil.Process(writer.pid).status() == psutil.STATUS_STOPPED)
    finally:
        writer.kill()
        writer.wait()
    data = path.read_bytes()
    text = gzip.decompress(data).decode() if name.endswith(".gz") else data.decode()
    events = json.loads(text + "]")
    assert len(events) > 100
    open_tracks = {event["tid"] for event in events if event["ph"] == "B"}
    last = max(event.get("ts", 0) + event.get("dur", 0) for event in events)
    check_trace(events + [{"ph": "E", "pid": REQUESTS, "tid": lane, "ts": last} for lane in open_tracks])
    read = read_trace(path)
    assert not read.complete and read.events == len(events) and set(read.begun.values()) == {"a", "b", "c"}

"""A trace is valid in the eyes of its format, and says what the engine's counters and the outputs' metrics say."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines import greedy, tiny_llm
from support.trace_rules import check_trace, load

from tritonllm.teach.trace import Trace
from tritonllm.teach.trace_layout import DEVICE, ENGINE, FIRST_LANE, HOST, REQUESTS

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
@settings(max_examples=25, deadline=None)
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

"""What the dashboard shows is what the engine counts, after each step of random loads."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import fake_events
from support.engines import always_load, greedy, similar_checkpoint, tiny_llm
from support.examples import examples

from tritonllm import BeamSearchParams, PoolingParams, SamplingParams
from tritonllm.telemetry import recorder as recorder_module
from tritonllm.telemetry.activity_state import MOST_ENDED, SHOWN_STEPS, State
from tritonllm.telemetry.pool_map import PoolMap
from tritonllm.telemetry.recorder import ActivityRecorder
from tritonllm.telemetry.snapshot import MOST_CELLS, Snapshot, View, from_json, to_json

PROMPT = list(range(5, 25))
ALL = View(rows=1000, cells=MOST_CELLS, steps=512)
SMALL = {"num_blocks": 24, "max_num_batched_tokens": 24}
DRAFT = {"num_speculative_tokens": 3, "adaptive": False}


def make(kind):
    if kind == "drafts":
        return tiny_llm(**SMALL, speculative_config={"model": str(similar_checkpoint()), **DRAFT})
    if kind == "host":
        return always_load(tiny_llm(**SMALL, kv_offloading_size=0.001))
    return tiny_llm(**SMALL, async_scheduling=kind == "ahead")


engines = {}


def engine_of(kind):
    if kind not in engines:
        engines[kind] = make(kind).engine
    return engines[kind]


def used(snapshot):
    return snapshot.cells.kinds.count("u") + snapshot.cells.kinds.count("s")


def check_pool(snapshot, engine):
    """Each block is shown as what it is. Only between a step that ended a continuation and the next one is it late."""
    pool, cells = engine._scheduler.pool, snapshot.cells
    assert cells.blocks_per_cell == 1 and len(cells.kinds) == pool.num_blocks
    users = [pool.ref_count(block) for block in range(pool.num_blocks)]
    expected = "".join(
        "s" if count > 1 else "u" if count else "c" if pool.keeps(block) else "." for block, count in enumerate(users)
    )
    assert cells.kinds == expected
    assert [owner >= 0 for owner in cells.owners] == [count > 0 for count in users]
    stats = engine.stats
    assert used(snapshot) == snapshot.counters.used_blocks == stats.num_blocks - stats.num_free_blocks
    assert snapshot.counters.cached_blocks == expected.count("c")
    assert snapshot.counters.shared_blocks == expected.count("s")
    assert snapshot.used_part == pytest.approx(1 - stats.num_free_blocks / stats.num_blocks)


@given(data=st.data())
@settings(max_examples=examples(25), deadline=None)
def test_what_is_shown_is_what_the_engine_counts(data):
    kind = data.draw(st.sampled_from(["plain", "ahead", "drafts", "host"]))
    sizes = data.draw(st.sampled_from([[1], [1, 1, 3]]))
    prompts = st.lists(st.integers(5, 9), min_size=1, max_size=40)
    wishes = data.draw(st.lists(st.tuples(prompts, st.integers(1, 12), st.sampled_from(sizes)), min_size=1, max_size=6))
    aborted, engine = data.draw(st.sampled_from([None, 3, 8])), engine_of(kind)
    engine.abort_request([str(name) for name in range(6)])  # what an example has left that failed
    before, recorder, outputs, ended = engine.stats, ActivityRecorder(engine), [], {}
    for name, (prompt, most, n) in enumerate(wishes):
        engine.add_request(str(name), prompt, greedy(most, n=n))
    while engine.has_unfinished_requests():
        outputs += engine.step()
        if aborted is not None and engine.stats.steps - before.steps == aborted:
            outputs += engine.abort_request("0")
        snapshot, stats = recorder.look(ALL), engine.stats
        if sizes == [1]:  # else a continuation may have ended that the next step tells of
            check_pool(snapshot, engine)
            assert (snapshot.counters.running, snapshot.counters.waiting) == (stats.num_running, stats.num_waiting)
        counters = snapshot.counters
        assert counters.steps == stats.steps
        assert counters.generated_tokens == stats.generated_tokens - before.generated_tokens
        assert counters.prompt_tokens == stats.prompt_tokens - before.prompt_tokens
        assert counters.preemptions == stats.preemptions - before.preemptions
        assert counters.accepted == stats.num_accepted_tokens - before.num_accepted_tokens
        for line in snapshot.requests:
            if line.state == "ended":
                ended.setdefault(line.request_id, stats.steps)
                assert stats.steps - ended[line.request_id] <= SHOWN_STEPS
    recorder.stop()
    last, stats = recorder.look(ALL), engine.stats
    check_pool(last, engine)
    assert used(last) == 0 and last.counters.running == last.counters.waiting == 0
    assert last.counters.hit_tokens == stats.prefix_cache_hit_tokens - before.prefix_cache_hit_tokens
    assert last.counters.query_tokens == stats.prefix_cache_query_tokens - before.prefix_cache_query_tokens
    assert sum(column.tokens for column in last.steps) > 0
    assert from_json(json.loads(json.dumps(to_json(last)))) == last
    tokens = {output.request_id: sum(len(one.token_ids) for one in output.outputs) for output in outputs}
    for line in last.requests:
        assert (line.state, line.output_tokens, line.blocks) == ("ended", tokens[line.request_id], 0)


def test_who_comes_late_sees_the_same():
    engine = tiny_llm(async_scheduling=False, max_num_seqs=2).engine
    early = ActivityRecorder(engine)
    for name in "abc":
        engine.add_request(name, PROMPT, greedy(30))
    for _ in range(4):
        engine.step()
    late = ActivityRecorder(engine)
    check_pool(late.look(ALL), engine)
    for _ in range(3):
        engine.step()
    one, other = early.look(ALL), late.look(ALL)
    check_pool(other, engine)
    assert other.cells == one.cells
    same = [(line.request_id, line.state, line.output_tokens, line.blocks) for line in one.requests]
    assert [(line.request_id, line.state, line.output_tokens, line.blocks) for line in other.requests] == same
    assert (other.counters.waiting, other.counters.running) == (1, 2)
    assert other.counters.generated_tokens == 6, "since it follows"


def test_a_request_in_the_list():
    engine = tiny_llm(async_scheduling=False, max_num_batched_tokens=16).engine
    recorder = ActivityRecorder(engine)
    engine.add_request("a", PROMPT, greedy(5))
    (line,) = recorder.look(ALL).requests
    assert (line.state, line.computed_tokens, line.total_tokens, line.most_output_tokens) == ("waiting", 0, 20, 5)
    engine.step()
    (line,) = recorder.look(ALL).requests
    assert (line.state, line.computed_tokens, line.total_tokens, line.blocks) == ("prefill", 16, 20, 5)
    engine.step()
    engine.step()
    (line,) = recorder.look(ALL).requests
    assert (line.state, line.output_tokens, line.blocks) == ("decode", 2, 6)
    engine.abort_request("a")
    (line,) = recorder.look(ALL).requests
    assert (line.state, line.output_tokens, line.reason) == ("ended", 2, "abort")
    engine.add_request("b", PROMPT, greedy(2 * SHOWN_STEPS))
    for _ in range(SHOWN_STEPS + 2):
        engine.step()
    (line,) = recorder.look(ALL).requests
    assert (line.request_id, line.cached_tokens, line.number) == ("b", 16, 1)
    columns = recorder.look(View(steps=3)).steps
    assert [(column.decode, column.verify, column.prefill) for column in columns] == [(1, 0, 0)] * 3


def test_only_what_there_is_room_for():
    engine = tiny_llm(max_num_seqs=2, async_scheduling=False).engine
    recorder = ActivityRecorder(engine)
    for name in range(1000):
        engine.add_request(f"request-{name}", PROMPT, greedy(3))
    for _ in range(2):
        engine.step()
    snapshot = recorder.look(View(first_row=995, rows=20, cells=10, steps=1))
    assert snapshot.num_requests == 1000 and snapshot.first_row == 980 and len(snapshot.requests) == 20
    assert snapshot.requests[-1].request_id == "request-999" and len(snapshot.steps) == 1
    assert snapshot.cells.blocks_per_cell == 7 and len(snapshot.cells.kinds) == len(snapshot.cells.owners) == 10
    assert recorder.look(View(rows=2)).requests[0].state == "decode", "those that run come first"
    engine.abort_request([f"request-{name}" for name in range(1000)])
    assert recorder.look(ALL).num_requests == MOST_ENDED


def test_beams_and_pooled_prompts_do_no_harm():
    engine = tiny_llm(async_scheduling=False, num_blocks=200).engine
    recorder = ActivityRecorder(engine)
    engine.add_request("beams", PROMPT, BeamSearchParams(beam_width=3, max_tokens=9))
    engine.add_request("other", PROMPT[3:], greedy(20))
    shown = 0
    while engine.has_unfinished_requests():
        engine.step()
        snapshot = recorder.look(ALL)
        shown = max(shown, snapshot.counters.shared_blocks)
        assert abs(used(snapshot) - (200 - engine.stats.num_free_blocks)) <= 6, "forks are told of by the next step"
    assert shown > 0
    check_pool(recorder.look(ALL), engine)
    pooled = tiny_llm(runner="pooling").engine
    recorder = ActivityRecorder(pooled)
    pooled.add_request("p", PROMPT, PoolingParams(task="embed"))
    while pooled.has_unfinished_requests():
        pooled.step()
    (line,) = recorder.look(ALL).requests
    assert (line.state, line.output_tokens) == ("ended", 0) and recorder.look(ALL).counters.generated_tokens == 0


def test_a_step_that_fails_ends_all(monkeypatch):
    engine = tiny_llm().engine
    recorder = ActivityRecorder(engine)
    engine.add_request("a", PROMPT, greedy(20))
    engine.step()
    engine.step()
    monkeypatch.setattr(engine._runner, "launch", lambda plan: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    monkeypatch.undo()
    engine.step()
    snapshot = recorder.look(ALL)
    assert [(line.state, line.reason) for line in snapshot.requests] == [("ended", "error")]
    check_pool(snapshot, engine)


def test_stop_strings_take_tokens_back():
    engine = tiny_llm().engine
    (text,) = [one.outputs[0].text for one in run(engine, SamplingParams(temperature=0, max_tokens=12))]
    recorder, before = ActivityRecorder(engine), engine.stats.generated_tokens
    run(engine, SamplingParams(temperature=0, max_tokens=12, stop=[text[-3:-1]]))
    assert recorder.look(ALL).counters.generated_tokens == engine.stats.generated_tokens - before


def run(engine, params):
    engine.add_request("s", PROMPT, params)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += [output for output in engine.step() if output.finished]
    return outputs


def test_events_do_not_pile_up_while_nobody_looks(monkeypatch):
    monkeypatch.setattr(recorder_module, "MOST_WAITING", 50)
    engine = tiny_llm().engine
    recorder = ActivityRecorder(engine)
    run(engine, greedy(40))
    assert 0 < len(recorder._waiting) <= 50
    assert recorder.look(ALL).counters.generated_tokens == 40 and not recorder._waiting


@given(data=st.data())
def test_the_grid_of_many_blocks_is_binned(data):
    """By brute force: each cell has the kind that most of its blocks have, and who has most of them."""
    count, cells = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 30))
    block = st.integers(0, count - 1)
    tables = data.draw(st.lists(st.lists(block, unique=True, max_size=20), max_size=5))
    taken = {block for table in tables for block in table}
    kept = data.draw(st.sets(block)) - taken
    pool = PoolMap()
    pool.num_blocks = count
    pool.keep(kept)
    for number, table in enumerate(tables):
        pool.give(str(number), tuple(table))
    users = pool.users()
    grid = pool.cells(cells, users, {str(number): number for number in range(len(tables))})
    kinds = [".cus"[int(min(n, 2)) + bool(n)] if n or b not in kept else "c" for b, n in enumerate(users)]
    owners = [next((i for i, table in enumerate(tables) if b in table), -1) for b in range(count)]
    size = grid.blocks_per_cell
    assert len(grid.kinds) == len(grid.owners) == -(-count // size) <= cells and size == -(-count // cells)
    for at, (kind, owner) in enumerate(zip(grid.kinds, grid.owners, strict=True)):
        mine, theirs = kinds[at * size : (at + 1) * size], owners[at * size : (at + 1) * size]
        assert mine.count(kind) == max(map(mine.count, mine))
        some = [one for one in theirs if one >= 0]
        assert owner == -1 if not some else some.count(owner) == max(map(some.count, some))


def test_a_hundred_thousand_blocks():
    pool = PoolMap()
    pool.num_blocks = 100_000
    for number in range(256):
        pool.give(str(number), tuple(range(number * 64, number * 64 + 64)))
    users = pool.users()
    grid = pool.cells(400, users, {str(number): number for number in range(256)})
    assert int((users > 0).sum()) == 256 * 64 and grid.blocks_per_cell == 250 and len(grid.kinds) == 400
    assert grid.kinds.count("u") == round(256 * 64 / 250) and np.diff(grid.owners[:60]).min() >= 0


def test_views_and_snapshots_that_are_wrong():
    for wrong in ({"cells": 0}, {"rows": -1}, {"steps": 10**6}, {"rows": True}, {"first_row": "1"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            View(**wrong)
    for values in ({}, {**to_json(Snapshot()), "more": 1}, {**to_json(Snapshot()), "requests": [{"x": 1}]}):
        with pytest.raises(ValueError, match="no snapshot"):
            from_json(values)
    assert State().look(ALL, 0.0).num_requests == 0
    State().follow(fake_events.ended(0.0, "?", None, 1))

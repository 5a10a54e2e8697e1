"""What an engine tells of itself is what it does: the events add up to its counters, and cost nothing unheard."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines import greedy, similar_checkpoint, tiny_llm, token_ids
from support.examples import examples

from tritonllm import LLM, SamplingParams, StructuredOutputsParams
from tritonllm.demo import model_path
from tritonllm.engine.loop.announcer import Announcer
from tritonllm.events import (
    EngineReset,
    RequestAdded,
    RequestFinished,
    StepFinished,
    StepLaunched,
    StepPlanned,
    StepRestricted,
    TokensForced,
)

PROMPT = list(range(5, 25))


def heard(llm):
    events = []
    llm.engine.subscribe(events.append)
    return events


def of(events, kind):
    return [event for event in events if isinstance(event, kind)]


def parts(events):
    return [part for event in of(events, StepPlanned) for part in event.parts]


def run(llm, prompts, params):
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.error for output in outputs] == [None] * len(outputs)
    return outputs


def test_the_events_of_one_request():
    llm = tiny_llm(async_scheduling=False)
    events = heard(llm)
    (output,) = run(llm, [PROMPT], greedy(3))
    steps = 3 * [StepPlanned, StepLaunched, StepFinished]
    assert [type(event) for event in events] == [RequestAdded, *steps, RequestFinished]
    added, planned, last = events[0], of(events, StepPlanned), events[-1]
    assert (added.request_id, list(added.prompt_token_ids)) == (output.request_id, PROMPT)
    assert added.sequence_ids == (output.request_id,) and added.params.max_tokens == 3
    first, *decodes = parts(events)
    assert (first.kind, first.start, first.num_tokens, first.samples, first.admitted) == ("prefill", 0, 20, True, True)
    assert (first.cached_tokens, len(first.block_ids), first.new_blocks) == (0, 5, 5)
    assert [(p.kind, p.start, p.num_tokens, p.admitted) for p in decodes] == [
        ("decode", 20, 1, False),
        ("decode", 21, 1, False),
    ]
    assert [(len(p.block_ids), p.new_blocks) for p in decodes] == [(6, 1), (6, 0)]
    assert [(p.num_running, p.num_waiting, p.token_budget, p.admission_end) for p in planned] == 3 * [
        (1, 0, 64, "queue")
    ]
    assert [token for event in of(events, StepFinished) for t in event.tokens for token in t.token_ids] == list(
        output.outputs[0].token_ids
    )
    assert (last.finish_reasons, last.num_output_tokens, last.num_preemptions, last.error) == (
        ("length",),
        (3,),
        0,
        None,
    )
    times = [event.time for event in events]
    assert times == sorted(times)
    metrics = output.metrics
    assert (added.time, last.first_token_time, last.time) == (
        metrics.arrival_time,
        metrics.first_token_time,
        metrics.finished_time,
    )
    waits = [event.time - event.seconds for event in of(events, StepFinished)]
    assert all(begin <= wait for begin, wait in zip([e.time for e in of(events, StepLaunched)], waits, strict=True))


def owned(tables):
    return {block for table in tables.values() for block in table}


@given(data=st.data())
@settings(max_examples=examples(25), deadline=None)
def test_the_events_add_up_to_the_counters(data):
    """Over random loads in a small pool: tokens, cached tokens, preemptions, and who has which block."""
    llm = data.draw(st.sampled_from([True, False]).map(lambda ahead: engines[ahead]))
    engine = llm.engine
    before, (steps, blocks) = engine.stats, (engine.stats.steps, engine.stats.num_blocks)
    count = data.draw(st.integers(1, 6))
    prompts = [data.draw(st.lists(st.integers(5, 9), min_size=1, max_size=40)) for _ in range(count)]
    params = [greedy(data.draw(st.integers(1, 12)), n=data.draw(st.sampled_from([1, 1, 3]))) for _ in range(count)]
    tables, wrong, kept = {}, [], set(engine.present().kept_blocks)
    ends = dict[str, list[str]]()

    def follow(event):
        if isinstance(event, RequestAdded):
            ends[event.request_id] = list(event.sequence_ids)
        if isinstance(event, RequestFinished):
            for name in ends[event.request_id]:
                tables.pop(name, None)
        if isinstance(event, StepPlanned):
            for name in event.preempted:
                tables.pop(name)
            tables.update((part.sequence_id, part.block_ids) for part in event.parts)
            used = event.num_blocks - event.num_free_blocks
            if not used <= len(owned(tables)):  # sequences that have ended since may be among these
                wrong.append(event)
            running = {part.sequence_id: part.block_ids for part in event.parts} | event.idle
            if len(owned(running)) != used or len(running) != event.num_running:
                wrong.append(event)
        pool = engine._scheduler.pool
        if isinstance(event, StepPlanned | RequestFinished):
            kept.update(event.kept_blocks)
        if isinstance(event, StepPlanned):
            kept.difference_update(owned(running))
            if kept != set(pool.kept()):
                wrong.append(event)

    events = []
    ends_of = [engine.subscribe(events.append), engine.subscribe(follow)]
    outputs = run(llm, prompts, params)
    for unsubscribe in ends_of:
        unsubscribe()
    after, planned = engine.stats, of(events, StepPlanned)
    assert not wrong
    assert [event.step for event in planned] == list(range(steps + 1, after.steps + 1))
    assert [event.step for event in of(events, StepFinished)] == [event.step for event in planned]
    assert sum(len(p.preempted) for p in planned) == after.preemptions - before.preemptions
    assert sum(sum(e.num_output_tokens) for e in of(events, RequestFinished)) == (
        after.generated_tokens - before.generated_tokens
    )
    drawn = {name: [] for output in of(events, RequestAdded) for name in output.sequence_ids}
    for event in of(events, StepFinished):
        for new in event.tokens:
            drawn[new.sequence_id] += new.token_ids
    assert list(drawn.values()) == [ids for output in outputs for ids in token_ids([output])]
    first = {}
    for part in parts(events):
        if part.admitted and part.num_tokens:
            first.setdefault(part.request_id, part.cached_tokens)
    assert first == {output.request_id: output.num_cached_tokens for output in outputs}
    assert all(0 <= part.new_blocks <= len(part.block_ids) for part in parts(events))
    assert all(block < blocks for part in parts(events) for block in part.block_ids)
    assert planned[-1].evicted_blocks == engine._scheduler.pool.evictions
    assert kept == set(engine._scheduler.pool.kept())


engines = {ahead: tiny_llm(num_blocks=24, async_scheduling=ahead, max_num_batched_tokens=24) for ahead in (True, False)}


def test_why_nobody_else_came_in():
    llm = tiny_llm(num_blocks=12, max_num_seqs=2, max_num_batched_tokens=20, async_scheduling=False)
    events = heard(llm)
    run(llm, [PROMPT, PROMPT[::-1], PROMPT[3:]], greedy(14))
    reasons = [event.admission_end for event in of(events, StepPlanned)]
    assert reasons[0] == "tokens"  # the first prompt has them all
    assert {"blocks", "preemption", "queue"} <= set(reasons)
    llm = tiny_llm(max_num_seqs=1, async_scheduling=False)
    events = heard(llm)
    run(llm, [PROMPT, PROMPT], greedy(2))
    assert [event.admission_end for event in of(events, StepPlanned)] == ["seats"] * 2 + ["seats"] * 2


def test_who_comes_late_learns_what_there_is():
    llm = tiny_llm(async_scheduling=False, max_num_seqs=2)
    run(llm, [[7] * 13], greedy(1))
    engine, kept = llm.engine, set(llm.engine._scheduler.pool.kept())
    for name in "abc":
        engine.add_request(name, PROMPT, greedy(9))
    for _ in range(3):
        engine.step()
    present = engine.present()
    assert [(r.request_id, r.sequence_ids, len(r.prompt_token_ids)) for r in present.requests] == [
        (name, (name,), 20) for name in "abc"
    ]
    assert present.num_output_tokens == {"a": 3, "b": 3} and present.num_blocks == 64
    assert len(owned(present.tables)) == 64 - engine.stats.num_free_blocks > 0 and len(present.tables) == 2
    assert set(present.kept_blocks) == kept and len(kept) == 3
    events = heard(llm)
    engine.step()
    assert [(part.kind, part.admitted, part.new_blocks) for part in parts(events)] == [("decode", False, 0)] * 2
    engine.abort_request(["a", "b", "c"])
    assert set(engine.present().kept_blocks) == kept.union(*(e.kept_blocks for e in of(events, RequestFinished)))


def test_a_prefix_cache_that_is_reset():
    llm = tiny_llm()
    events = heard(llm)
    run(llm, [PROMPT], greedy(1))
    assert llm.engine.present().kept_blocks and llm.engine.reset_prefix_cache()
    assert [event.reason for event in of(events, EngineReset)] == ["the prefix cache was reset"]
    assert llm.engine.present().kept_blocks == ()


def test_copies_and_shared_blocks():
    llm = tiny_llm()
    events = heard(llm)
    run(llm, [PROMPT[:10]], SamplingParams(n=3, max_tokens=3, seed=1, ignore_eos=True))
    assert sum(len(event.copies) for event in of(events, StepPlanned)) == 2  # the block that is filled in part
    first = of(events, StepPlanned)[0].parts
    assert [part.num_tokens for part in first] == [10, 0, 0]
    assert first[0].block_ids[:2] == first[1].block_ids[:2] == first[2].block_ids[:2]
    assert [part.request_id for part in first] == [of(events, RequestAdded)[0].request_id] * 3
    assert of(events, RequestFinished)[0].num_cached_tokens == 0, "what siblings share was not cached"


def test_drafts():
    draft = {"model": str(similar_checkpoint()), "num_speculative_tokens": 3, "adaptive": False}
    llm = tiny_llm(speculative_config=draft)
    events = heard(llm)
    (output,) = run(llm, [PROMPT], greedy(30))
    new = [tokens for event in of(events, StepFinished) for tokens in event.tokens]
    assert any(tokens.drafts for tokens in new)
    assert sum(tokens.drafts for tokens in new) == output.metrics.num_draft_tokens == llm.engine.stats.num_draft_tokens
    assert sum(tokens.accepted for tokens in new) == output.metrics.num_accepted_tokens
    assert {part.kind for part in parts(events)} == {"prefill", "decode", "verify"} or {"prefill", "verify"}
    assert of(events, StepFinished)[-1].draft_seconds > 0


@pytest.mark.parametrize("speculation", [None, "ngram:3"])
def test_log_probabilities_of_those_who_ask(speculation):
    llm = tiny_llm(speculative_config=speculation, max_num_seqs=4)
    events = heard(llm)
    with_them, without = run(llm, [PROMPT[:4] * 3, PROMPT], [greedy(12, logprobs=2), greedy(12)])
    new = [tokens for event in of(events, StepFinished) for tokens in event.tokens]
    told = [row for tokens in new if tokens.request_id == with_them.request_id for row in tokens.logprobs]
    expected = [[(token, entry.logprob) for token, entry in row.items()] for row in with_them.outputs[0].logprobs]
    assert [list(dict(row).items()) for row in told] == expected  # the token itself is often the most likely one
    assert all(len(row) == 3 for row in told)
    assert not any(tokens.logprobs for tokens in new if tokens.request_id == without.request_id)


def test_the_share_of_prompts_beside_decodes():
    llm = tiny_llm(max_num_batched_tokens=600, num_blocks=256, max_num_seqs=3, async_scheduling=False)
    events, engine = heard(llm), llm.engine
    engine.add_request("a", PROMPT, greedy(4))
    engine.step()
    engine.add_request("b", [7] * 200, greedy(2))
    engine.add_request("c", [8] * 150, greedy(2))
    while engine.has_unfinished_requests():
        engine.step()
    planned = of(events, StepPlanned)
    assert [event.prompt_share for event in planned[:3]] == [600, 256, 256]
    assert [part.num_tokens for part in planned[1].parts] == [1, 200, 56]
    assert planned[-1].prompt_share is None


def test_what_a_grammar_allows_and_forces():
    llm = LLM(str(model_path()), num_blocks=256, max_num_seqs=8)
    events = heard(llm)
    wish = StructuredOutputsParams(regex=r"(yes|no), my very good friend")
    (output,) = run(llm, ["There was"], SamplingParams(temperature=0, max_tokens=60, structured_outputs=wish))
    assert output.outputs[0].text.endswith(", my very good friend")
    masks = {event.step: event.masks[output.request_id] for event in of(events, StepRestricted)}
    new = {event.step: t.token_ids for event in of(events, StepFinished) for t in event.tokens}
    checked = 0
    for step, words in masks.items():
        allowed = np.unpackbits(words.view(np.uint8), bitorder="little")
        if new.get(step):
            assert allowed[new[step][0]], "the token that was drawn is one of those that were allowed"
            checked += not allowed.all()
    assert checked
    forced = sum(len(tokens.token_ids) for event in of(events, TokensForced) for tokens in event.tokens)
    assert forced == llm.engine.stats.forced_tokens > 0


def test_an_abort_and_a_step_that_fails(monkeypatch):
    llm = tiny_llm(async_scheduling=True)
    events, engine = heard(llm), llm.engine
    engine.add_request("a", PROMPT, greedy(20))
    engine.add_request("b", PROMPT, greedy(20))
    for _ in range(3):
        engine.step()
    engine.abort_request("a")
    assert [(event.request_id, event.finish_reasons) for event in of(events, RequestFinished)] == [("a", ("abort",))]
    engine.step()
    assert {t.sequence_id: t.token_ids == () for t in of(events, StepFinished)[-1].tokens} == {"a": True, "b": False}
    monkeypatch.setattr(engine._runner, "launch", lambda plan: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    monkeypatch.undo()
    engine.step()
    (reset,) = of(events, EngineReset)
    assert "ZeroDivisionError" in reset.reason
    run(llm, [PROMPT], greedy(2))
    assert parts(events)[-2].cached_tokens == 0, "the cache was lost with the step"


def test_a_sink_that_fails_is_dropped_and_the_engine_goes_on(caplog):
    llm, calls = tiny_llm(), []

    def broken(event):
        calls.append(event)
        raise RuntimeError("no paper left")

    llm.engine.subscribe(broken)
    events = heard(llm)
    expected = token_ids(run(tiny_llm(), [PROMPT], greedy(5)))
    assert token_ids(run(llm, [PROMPT], greedy(5))) == expected
    assert len(calls) == 1 < len(events)
    assert "no paper left" in caplog.text


def test_nothing_is_built_while_nobody_listens(monkeypatch):
    llm = tiny_llm()
    unsubscribe = llm.engine.subscribe(lambda event: None)
    unsubscribe()
    unsubscribe()
    for name in ("added", "planned", "launched", "restricted", "finished", "forced", "ended"):
        monkeypatch.setattr(Announcer, name, lambda *_, **__: pytest.fail("an event was built"))
    run(llm, [PROMPT], greedy(3))

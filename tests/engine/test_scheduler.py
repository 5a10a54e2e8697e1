import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.scheduling import add, make, make_scheduler, short_of_blocks, step, steps

from tritonllm.engine.data.request import Pooling, RequestStatus
from tritonllm.engine.schedule.prompt_budget import prompt_budget
from tritonllm.layers.segments import Segment, Segments

# --- what the module is


def test_imports_no_torch():
    modules = [f"tritonllm.engine.{name}" for name in ("request", "block_pool", "prefix_cache", "scheduler")]
    code = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("kwargs", "name"), [({"num_blocks": 0}, "num_blocks"), ({"max_model_len": 0}, "max_model_len")]
)
def test_bad_limits(kwargs, name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1"):
        make_scheduler(**kwargs)


# --- add


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (make("taken", 3), "'taken' is in use"),
        (make("r", []), "prompt_token_ids is empty"),
        (make("r", 3, 3), "max_total_tokens must be more than the prompt's 3 tokens and at most 50"),
        (make("r", 3, 51), "at most 50"),
        (make("r", 3, 9, max_tokens=5), "at most 8"),
        (make("r", 40, 50), "40 tokens and one new token need 11 blocks of 4 tokens, but num_blocks is 10"),
    ],
)
def test_refused_requests_change_nothing(request_, message):
    scheduler = make_scheduler(10, max_model_len=50)
    add(scheduler, "taken", 3, 50)
    with pytest.raises(ValueError, match=message):
        scheduler.check(request_)
    with pytest.raises(ValueError, match=message):
        scheduler.add(request_)
    assert (scheduler.num_waiting, request_.status) == (1, RequestStatus.WAITING)


def test_a_request_runs_once():
    scheduler = make_scheduler()
    request = add(scheduler, "r", 3, 4)
    step(scheduler)
    assert request.finish_reason == "length"
    with pytest.raises(ValueError, match="has run before"):
        scheduler.add(request)


def test_the_longest_prompt_that_fits():
    scheduler = make_scheduler(10)
    request = add(scheduler, "r", 39)
    steps(scheduler, 2)
    assert len(request.output_token_ids) == 2


# --- prompts that are pooled


def pooled(scheduler, name, prompt, *, whole=False, cached=True):
    request = make(name, prompt, prompt + 1, max_tokens=1)
    request.pooling = Pooling("last", whole=whole, cached=cached)
    scheduler.add(request)
    return request


def test_a_pooled_prompt_may_fill_the_model_and_the_pool():
    scheduler = make_scheduler(10, max_model_len=40)
    request = pooled(scheduler, "p", 40)
    assert steps(scheduler, 2) == [{"p": 40}, {}]
    assert request.finish_reason == "length" and scheduler.pool.num_free == 10
    with pytest.raises(ValueError, match="at most 41"):
        pooled(scheduler, "q", 41)
    with pytest.raises(ValueError, match="need 10 blocks of 4 tokens, but num_blocks is 9"):
        pooled(make_scheduler(9, max_model_len=40), "q", 40)


def test_whole_prompts_wait_for_a_step_that_holds_them():
    """In their order: a short one that would fit does not overtake."""
    scheduler = make_scheduler(tokens=10)
    for name, length in (("a", 6), ("b", 8), ("c", 2), ("d", 10)):
        pooled(scheduler, name, length, whole=True)
    assert steps(scheduler, 4) == [{"a": 6}, {"b": 8, "c": 2}, {"d": 10}, {}]


def test_whole_prompts_beside_chunks():
    scheduler = make_scheduler(tokens=10)
    add(scheduler, "g", 14, 16)
    pooled(scheduler, "p", 9, whole=True)
    pooled(scheduler, "q", 9)
    assert steps(scheduler, 4) == [{"g": 10}, {"g": 4}, {"g": 1, "p": 9}, {"q": 9}]


def test_cached_tokens_are_of_use_to_some():
    scheduler = make_scheduler()
    add(scheduler, "r", 9, 10)
    tokens = list(scheduler._waiting.first().prompt_token_ids)
    step(scheduler)
    for cached, computed in ((True, 1), (False, 9)):
        request = make("p", tokens, 10, max_tokens=1)
        request.pooling = Pooling("last", cached=cached)
        scheduler.add(request)
        assert step(scheduler) == {"p": computed}


# --- the token budget


def test_prompts_are_cut_anywhere_to_fill_the_budget():
    scheduler = make_scheduler(tokens=10)
    add(scheduler, "a", 7)
    add(scheduler, "b", 15)
    add(scheduler, "c", 1)
    assert steps(scheduler, 4) == [
        {"a": 7, "b": 3},
        {"a": 1, "b": 9},
        {"a": 1, "b": 3, "c": 1},
        {"a": 1, "b": 1, "c": 1},
    ]


def make_long(seats=400, tokens=8192):
    return make_scheduler(40_000, seats=seats, tokens=tokens, max_model_len=20_000)


def test_a_prompt_beside_decodes_comes_in_small_chunks():
    """So that they wait little for it; alone it fills the step."""
    scheduler = make_long()
    add(scheduler, "a", 9000, 20_000)
    assert steps(scheduler, 3) == [{"a": 8192}, {"a": 808}, {"a": 1}]
    add(scheduler, "b", 3000, 20_000)
    chunks = [256] * 11 + [184, 1]
    assert steps(scheduler, 13) == [{"a": 1, "b": chunk} for chunk in chunks]
    scheduler.abort("a")
    scheduler.abort("b")
    add(scheduler, "c", 5000, 20_000)
    assert step(scheduler) == {"c": 5000}


def test_the_more_prompts_wait_the_more_a_step_takes_beside_decodes():
    """And the first that came are the first."""
    scheduler = make_long()
    add(scheduler, "a", 3, 20_000)
    step(scheduler)
    for i in range(100):
        add(scheduler, f"{i:02}", 500, 20_000)
    first, *more = steps(scheduler, 50)
    assert list(first)[:9] == ["a", "00", "01", "02", "03", "04", "05", "06", "07"]
    assert sum(first.values()) - 1 == 4096  # the power of two above 50,000 / 16
    taken = [sum(tokens for tokens in plan.values() if tokens > 1) for plan in more]
    assert taken == sorted(taken, reverse=True) and {0, 256, 512, 1024, 2048} <= set(taken)
    assert all(plan["a"] == 1 for plan in more) and scheduler.num_waiting == 0


def test_prompts_that_want_one_token_fill_every_step():
    """Also while the tokens of those before are in flight: they are the last ones, and nobody waits for a step."""
    scheduler = make_long()
    for name in "abcdefgh":
        add(scheduler, name, 5000, 5001)
    ahead, taken = [], []
    for _ in range(5):
        ahead.append(scheduler.schedule())
        taken.append(ahead[-1].num_tokens)
        if len(ahead) == 2:
            done = ahead.pop(0)
            scheduler.update(done, [[7] if item.samples else [] for item in done.scheduled])
    assert taken == [8192, 8192, 8192, 8192, 40_000 - 4 * 8192]


def test_a_prompt_comes_in_small_chunks_beside_a_last_token_too():
    """It is planned before, and waits for this step; that in the step behind is known not to."""
    scheduler = make_long()
    add(scheduler, "a", 3, 5)
    step(scheduler)
    add(scheduler, "b", 3000, 20_000)
    assert scheduler.schedule().num_tokens == 1 + 256
    assert scheduler.schedule().num_tokens == 3000 - 256


def test_prompts_that_are_not_cut_wait_for_a_step_that_holds_them():
    """In their order, and what the cache has of one does not count."""
    scheduler = make_scheduler(tokens=20, max_model_len=20, enable_chunked_prefill=False)
    for name, length in (("a", 12), ("b", 9), ("c", 2), ("d", 8)):
        add(scheduler, name, length, 20)
    assert steps(scheduler, 2) == [{"a": 12}, {"a": 1, "b": 9, "c": 2, "d": 8}]
    again = make_scheduler(tokens=20, max_model_len=20, enable_chunked_prefill=False)
    first = add(again, "a", 18, 19)
    step(again)
    add(again, "b", [*first.prompt_token_ids], 20)
    add(again, "c", 15, 20)
    assert steps(again, 2) == [{"b": 2, "c": 15}, {"b": 1, "c": 1}]


def test_a_long_prompt_leaves_room_for_others():
    scheduler = make_scheduler(tokens=20, long_prefill_token_threshold=8)
    add(scheduler, "a", 18)
    add(scheduler, "b", 3)
    add(scheduler, "c", 12)
    assert steps(scheduler, 2) == [{"a": 8, "b": 3, "c": 8}, {"a": 8, "b": 1, "c": 4}]


def test_pooled_prompts_take_nothing_from_the_others_share():
    """They may be larger than it, and it never falls below nothing."""
    scheduler = make_long(tokens=4096)
    add(scheduler, "a", 3, 20_000)
    step(scheduler)
    add(scheduler, "b", 300, 20_000)
    pooled(scheduler, "p", 2000)
    add(scheduler, "c", 500, 20_000)
    assert step(scheduler) == {"a": 1, "b": 256, "p": 2000}
    assert step(scheduler) == {"a": 1, "b": 44, "c": 212}
    assert step(scheduler) == {"a": 1, "b": 1, "c": 256}


def test_the_few_tokens_of_a_jump_wait_for_no_prompt():
    scheduler = make_long()
    add(scheduler, "a", 3, 20_000)
    jumps = add(scheduler, "j", 3, 20_000)
    step(scheduler)
    add(scheduler, "b", 2000, 20_000)
    scheduler.append(jumps, [5] * 8)
    assert step(scheduler) == {"a": 1, "j": 9, "b": 256}


@given(st.integers(1, 10_000), st.integers(0, 10**7))
def test_prompt_budget(most, queued):
    budget = prompt_budget(most, queued)
    assert 1 <= budget <= most and (budget == most or budget.bit_count() == 1)
    assert budget == most or (budget >= 256 and budget * 16 >= queued)
    assert budget <= max(256, queued // 8)
    assert prompt_budget(most, queued + 1) >= budget


def test_prompts_that_are_pooled_at_once_are_not_held_back_by_decodes():
    scheduler = make_long()
    add(scheduler, "a", 3, 20_000)
    step(scheduler)
    pooled(scheduler, "p", 3000, whole=True)
    assert step(scheduler) == {"a": 1, "p": 3000}


def test_only_the_last_chunk_samples():
    scheduler = make_scheduler(tokens=8)
    request = add(scheduler, "a", 17)
    seen = []
    for _ in range(4):
        plan = scheduler.schedule()
        (item,) = plan.scheduled
        seen.append((item.start, item.num_tokens, item.samples))
        scheduler.update(plan, [[7] if item.samples else []])
    assert seen == [(0, 8, False), (8, 8, False), (16, 1, True), (17, 1, True)]
    assert request.output_token_ids == [7, 7]


def test_decodes_come_first_in_the_plan():
    scheduler = make_scheduler(tokens=10, policy="priority")
    add(scheduler, "low", 3, priority=1)
    step(scheduler)
    add(scheduler, "high", 9, priority=0)
    plan = scheduler.schedule()
    assert [item.request.request_id for item in plan.scheduled] == ["low", "high"]
    assert (plan.segments.decode.sequences, plan.num_tokens) == (1, 10)


def test_order_decides_who_gets_the_budget():
    scheduler = make_scheduler(tokens=10, policy="priority")
    add(scheduler, "low", 3, priority=1)
    step(scheduler)
    add(scheduler, "high", 20, priority=0)
    assert steps(scheduler, 3) == [{"high": 10}, {"high": 10}, {"low": 1, "high": 1}]


def test_a_single_token_that_does_not_sample_is_no_decode():
    scheduler = make_scheduler(tokens=8, seats=2)
    add(scheduler, "a", 7)
    add(scheduler, "b", 3)
    plan = scheduler.schedule()
    assert [(item.request.request_id, item.num_tokens) for item in plan.scheduled] == [("a", 7), ("b", 1)]
    assert plan.segments == Segments(chunk=Segment(sequences=2, tokens=8, longest=7))


def test_max_num_seqs():
    scheduler = make_scheduler(seats=2)
    for name in "abc":
        add(scheduler, name, 3, 5)
    assert steps(scheduler, 3) == [{"a": 3, "b": 3}, {"a": 1, "b": 1}, {"c": 3}]


def test_an_empty_plan_without_requests():
    plan = make_scheduler().schedule()
    assert (plan.scheduled, plan.preempted, plan.segments) == ((), (), Segments())


# --- planning ahead: the next step before the results of this one


def test_a_token_in_flight_is_planned_with_before_it_is_known():
    scheduler = make_scheduler()
    request = add(scheduler, "a", 3)
    first, second = scheduler.schedule(), scheduler.schedule()
    (item,) = second.scheduled
    assert (item.start, item.num_tokens, item.samples, item.pending, item.output_index) == (3, 1, True, True, 1)
    assert (request.num_tokens, request.num_pending_tokens) == (3, 2)
    scheduler.update(first, [[5]])
    third = scheduler.schedule()
    assert (third.scheduled[0].start, third.scheduled[0].pending) == (4, True)
    scheduler.update(second, [[6]])
    scheduler.update(third, [[7]])
    assert (request.output_token_ids, request.num_pending_tokens) == ([5, 6, 7], 0)
    assert not scheduler.schedule().scheduled[0].pending


def test_a_request_that_its_token_in_flight_ends_is_not_planned_again():
    scheduler = make_scheduler()
    a, b = add(scheduler, "a", 3, 5), add(scheduler, "b", 3)
    first, second = scheduler.schedule(), scheduler.schedule()
    third = scheduler.schedule()
    assert [item.request for item in third.scheduled] == [b]
    for plan in (first, second):
        scheduler.update(plan, [[7], [7]])
    assert (a.finish_reason, len(a.output_token_ids)) == ("length", 2)


def test_a_request_that_stops_has_computed_one_token_in_vain():
    scheduler = make_scheduler()
    a, b = add(scheduler, "a", 3, eos=[0]), add(scheduler, "b", 3)
    first, second = scheduler.schedule(), scheduler.schedule()
    scheduler.update(first, [[0], [7]])
    assert (a.finish_reason, a.output_token_ids) == ("stop", [0])
    assert scheduler.pool.num_free == scheduler.pool.num_blocks - len(b.block_ids)
    assert scheduler.update(second, [[9], [8]]) == [(b, [8])]
    assert a.output_token_ids == [0]


def test_a_token_in_flight_is_kept_when_its_request_is_preempted():
    scheduler, (_, _, c), hole = short_of_blocks()
    scheduler.pool.release(hole[:3])
    flying = scheduler.schedule()
    for _ in range(3):  # the blocks are full after these
        following = scheduler.schedule()
        scheduler.update(flying, [[7]] * 3)
        flying = following
    last = scheduler.schedule()
    assert c in last.preempted
    scheduler.update(flying, [[8]] * 3)
    assert (c.output_token_ids[-1], c.num_pending_tokens, c.block_ids) == (8, 0, [])
    scheduler.update(last, [[7] for _ in last.scheduled])
    for name in "ab":
        scheduler.abort(name)
    (again,) = scheduler.schedule().scheduled
    assert again.request is c
    assert again.start + again.num_tokens == c.num_tokens


def test_seats_of_running_requests_differ_and_come_back():
    scheduler = make_scheduler(seats=3)
    requests = [add(scheduler, name, 3, 5) for name in "abcde"]
    step(scheduler)
    assert sorted(r.seat for r in requests[:3]) == [0, 1, 2]
    assert [r.seat for r in requests[3:]] == [None, None]
    steps(scheduler, 2)
    assert len({r.seat for r in requests[3:]} & {0, 1, 2}) == 2


# --- policies


def test_fcfs_ignores_priority():
    scheduler = make_scheduler(seats=1)
    for arrival, (name, priority) in enumerate([("a", 2), ("b", 0), ("c", 1)]):
        add(scheduler, name, 3, 4, priority=priority, arrival=arrival)
    assert steps(scheduler, 3) == [{"a": 3}, {"b": 3}, {"c": 3}]


def test_priority_then_arrival_then_order_of_add():
    scheduler = make_scheduler(seats=1, policy="priority")
    for name, priority, arrival in [("d", 1, 3), ("c", 1, 2), ("b", 0, 9), ("a", -5, 9), ("e", 1, 3)]:
        add(scheduler, name, 3, 4, priority=priority, arrival=arrival)
    assert steps(scheduler, 5) == [{name: 3} for name in "abcde"]


def test_nobody_overtakes_the_first_that_does_not_fit():
    scheduler = make_scheduler(5)
    add(scheduler, "a", 8, 10)
    add(scheduler, "large", 16, 18)
    add(scheduler, "small", 1, 3)
    assert steps(scheduler, 3) == [{"a": 8}, {"a": 1}, {"large": 16}]


@pytest.mark.parametrize(("num_blocks", "seats"), [(5, 2), (20, 1)], ids=["blocks", "seats"])
def test_a_waiting_request_takes_what_it_needs_from_one_of_lower_priority(num_blocks, seats):
    scheduler = make_scheduler(num_blocks, seats=seats, policy="priority")
    low = add(scheduler, "low", 12, 16, priority=1)
    step(scheduler)
    add(scheduler, "high", 12, 14, priority=0, arrival=1)
    plan = scheduler.schedule()
    assert ([item.request.request_id for item in plan.scheduled], plan.preempted) == (["high"], (low,))
    scheduler.update(plan, [[7]])
    assert step(scheduler) == {"high": 1}
    assert step(scheduler)["low"] > 0
    assert low.num_preemptions == scheduler.stats.preemptions == 1


@pytest.mark.parametrize(("num_blocks", "seats"), [(5, 2), (20, 1)], ids=["blocks", "seats"])
@pytest.mark.parametrize(("policy", "priority"), [("priority", 1), ("fcfs", 0)])
def test_a_waiting_request_takes_nothing_from_one_of_its_own_class(num_blocks, seats, policy, priority):
    scheduler = make_scheduler(num_blocks, seats=seats, policy=policy)
    low = add(scheduler, "low", 12, 16, priority=1)
    step(scheduler)
    add(scheduler, "late", 12, 14, priority=priority, arrival=1)
    assert steps(scheduler, 3) == [{"low": 1}] * 3
    assert (low.finish_reason, low.num_preemptions) == ("length", 0)
    assert step(scheduler) == {"late": 12}


@pytest.mark.parametrize("caching", [True, False])
def test_nobody_gives_way_in_vain(caching):
    """The first in order holds so much that the waiting one would not fit even if all others gave way."""
    scheduler = make_scheduler(11, policy="priority", caching=caching)
    add(scheduler, "first", 20, 23, priority=-1)
    low = [add(scheduler, name, 4, 12, priority=1, arrival=at) for at, name in enumerate("ab")]
    step(scheduler)
    wide = add(scheduler, "wide", 32, 34, priority=0, arrival=9)  # 8 blocks; the first has 6 of the 11
    assert steps(scheduler, 2) == [{"first": 1, "a": 1, "b": 1}] * 2  # the first has ended
    assert (wide.status, scheduler.stats.preemptions) == (RequestStatus.WAITING, 0)
    plan = scheduler.schedule()
    assert [item.request for item in plan.scheduled] == [low[0], wide] and plan.preempted == (low[1],)


def test_as_few_as_needed_give_way_the_last_first():
    scheduler = make_scheduler(8, policy="priority")
    requests = [
        add(scheduler, name, 4, 8, priority=p, arrival=at)
        for at, (name, p) in enumerate(zip("abcd", (1, 1, 2, 0), strict=True))
    ]
    step(scheduler)
    add(scheduler, "urgent", 12, priority=0, arrival=9)
    plan = scheduler.schedule()
    assert plan.preempted == (requests[2], requests[1])
    assert {item.request.request_id: item.num_tokens for item in plan.scheduled} == {"d": 1, "urgent": 12, "a": 1}


def test_blocks_that_others_hold_too_are_not_counted_as_won():
    scheduler = make_scheduler(9, policy="priority")
    prompt = list(range(12))
    for at, (name, priority) in enumerate([("first", -1), ("low", 1)]):
        add(scheduler, name, [*prompt, at], 16, priority=priority, arrival=at)  # 3 blocks are shared, one each is not
        step(scheduler)
    add(scheduler, "wide", 20, priority=0, arrival=9)
    assert "wide" not in step(scheduler)  # 5 blocks are free if `low` gives way, and one of them is reserved
    assert scheduler.stats.preemptions == 0


def test_a_token_in_flight_is_kept_when_its_request_gives_way():
    scheduler = make_scheduler(seats=1, policy="priority")
    low = add(scheduler, "low", 3, priority=1)
    first, second = scheduler.schedule(), scheduler.schedule()
    add(scheduler, "high", 3, 4, priority=0, arrival=1)
    third = scheduler.schedule()
    assert ([item.request.request_id for item in third.scheduled], third.preempted) == (["high"], (low,))
    for plan, token in ((first, 5), (second, 6), (third, 7)):
        scheduler.update(plan, [[token]])
    assert (low.output_token_ids, low.num_pending_tokens, low.status) == ([5, 6], 0, RequestStatus.PREEMPTED)
    (again,) = scheduler.schedule().scheduled
    assert again.request is low and again.start + again.num_tokens == low.num_tokens == 5


def test_who_gave_way_comes_back_when_nothing_higher_waits():
    scheduler = make_scheduler(seats=1, policy="priority")
    low = add(scheduler, "low", 3, 9, priority=1)
    step(scheduler)
    for at, name in enumerate("ab"):
        add(scheduler, name, 3, 5, priority=0, arrival=at)
    assert [list(step(scheduler)) for _ in range(5)] == [["a"], ["a"], ["b"], ["b"], ["low"]]
    assert low.num_preemptions == 1


def test_a_cache_that_is_too_small_is_told_once_and_priorities_are_not(caplog):
    scheduler = make_scheduler(seats=1, policy="priority")
    add(scheduler, "low", 3, priority=1)
    step(scheduler)
    add(scheduler, "high", 3, priority=0)
    step(scheduler)
    assert scheduler.stats.preemptions == 1 and not caplog.records


# --- preemption and admission


def test_the_last_that_came_is_preempted():
    scheduler, (a, b, c), hole = short_of_blocks()
    scheduler.pool.release(hole[:1])
    plan = scheduler.schedule()
    assert [item.request for item in plan.scheduled] == [a, b]
    assert plan.preempted == (c,)
    assert (c.status, c.num_preemptions, c.num_computed_tokens, c.block_ids) == (RequestStatus.PREEMPTED, 1, 0, [])
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.stats.preemptions) == (2, 1, 1)


def test_several_are_preempted_in_one_step_and_each_gives_its_place_up():
    scheduler, (a, b, c), _ = short_of_blocks()
    plan = scheduler.schedule()
    assert [item.request for item in plan.scheduled] == [a]
    assert plan.preempted == (c, b)
    assert plan.num_tokens == 1
    assert len(a.block_ids) == 2


def test_a_victim_whose_blocks_have_other_users_is_not_enough():
    scheduler, (a, b, c), _ = short_of_blocks()
    scheduler.pool.retain(c.block_ids[:1])
    plan = scheduler.schedule()
    assert [item.request for item in plan.scheduled] == [a]
    assert plan.preempted == (c, b)
    assert scheduler.pool.num_free == 0


def test_a_request_that_comes_last_preempts_itself():
    scheduler, (a, b, c), hole = short_of_blocks()
    scheduler.pool.release(hole[:2])
    plan = scheduler.schedule()
    assert [item.request for item in plan.scheduled] == [a, b]
    assert plan.preempted == (c,)


def test_the_lowest_priority_is_preempted():
    scheduler, (a, b, c), _ = short_of_blocks("priority", (1, 2, 0))
    plan = scheduler.schedule()
    assert [item.request for item in plan.scheduled] == [c]
    assert plan.preempted == (b, a)


def test_the_preempted_wait_before_those_who_never_ran():
    scheduler, (a, b, c), hole = short_of_blocks()
    d = add(scheduler, "d", 4, arrival=3)
    scheduler.schedule()
    scheduler.pool.release(hole)
    plan = scheduler.schedule()
    assert [item.request for item in plan.scheduled] == [a, b, c, d]


def test_a_preempted_request_finds_its_blocks_in_the_cache():
    scheduler, (_, b, _), hole = short_of_blocks()
    blocks = list(b.block_ids)
    step(scheduler)
    assert b.status is RequestStatus.PREEMPTED
    scheduler.pool.release(hole)
    plan = scheduler.schedule()
    assert [(item.request.request_id, item.start, item.num_tokens) for item in plan.scheduled] == [
        ("a", 5, 1),
        ("b", 4, 1),
        ("c", 0, 5),  # its block went to a
    ]
    assert b.block_ids[:1] == blocks
    assert b.num_cached_tokens == 0  # of the first admission
    assert (scheduler.stats.prefix_cache_query_tokens, scheduler.stats.prefix_cache_hit_tokens) == (12, 0)


def test_without_a_cache_a_preempted_request_computes_all_of_it_again():
    scheduler, (_, b, _), hole = short_of_blocks(caching=False)
    step(scheduler)
    scheduler.pool.release(hole)
    assert step(scheduler) == {"a": 1, "b": 5, "c": 5}
    assert b.output_token_ids == [7, 7]


@pytest.mark.parametrize("priority", [0, -1])
def test_a_step_that_preempts_admits_nobody_but_those_of_higher_priority(priority):
    scheduler = make_scheduler(10, policy="priority")
    add(scheduler, "a", 4)
    b = add(scheduler, "b", 32, arrival=2)
    step(scheduler)
    scheduler.pool.allocate()  # that was the last one
    add(scheduler, "new", 4, priority=priority, arrival=1)
    plan = scheduler.schedule()
    assert plan.preempted == (b,)
    assert scheduler.pool.num_free >= 6  # enough for `new`, which is before `b` in order
    names = {item.request.request_id for item in plan.scheduled}
    assert names == ({"a", "new"} if priority else {"a"})
    scheduler.update(plan, [[7] for _ in plan.scheduled])
    assert step(scheduler) == {"a": 1, "new": 1 if priority else 4}


@pytest.mark.parametrize(("num_blocks", "admitted"), [(8, False), (9, True)])
def test_admission_leaves_a_block_for_each_running_request(num_blocks, admitted):
    scheduler = make_scheduler(num_blocks)
    add(scheduler, "a", 4)
    add(scheduler, "b", 4)
    step(scheduler)
    add(scheduler, "c", 12)  # 3 blocks; a and b have 4 by the time
    assert step(scheduler) == {"a": 1, "b": 1} | ({"c": 12} if admitted else {})


def test_admission_takes_the_blocks_of_all_chunks():
    scheduler = make_scheduler(8, tokens=8)
    a = add(scheduler, "a", 20)
    add(scheduler, "b", 12)
    assert step(scheduler) == {"a": 8}
    assert len(a.block_ids) == 5
    assert steps(scheduler, 2) == [{"a": 8}, {"a": 4}]  # b would fit, were the rest of a not to come


def test_an_output_that_outgrows_the_pool_ends():
    scheduler = make_scheduler(3)
    request = add(scheduler, "r", 5)
    steps(scheduler, 20)
    assert request.finish_reason == "length"
    assert request.num_tokens == 13  # 12 slots, and a last token that needs none
    assert scheduler.pool.num_free == 3


def test_tail_blocks_are_evicted_before_head_blocks():
    scheduler = make_scheduler(6)
    add(scheduler, "a", prompt := list(range(16)), 17)
    step(scheduler)
    add(scheduler, "b", 15, 16)  # takes the 2 empty blocks and 2 of a's 4
    step(scheduler)
    again = add(scheduler, "again", [*prompt, 99])
    step(scheduler)
    assert again.num_cached_tokens == 8

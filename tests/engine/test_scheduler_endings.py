"""What the prefix cache saves a request, and how a request ends."""

import pytest
from support.scheduling import add, has_unfinished, make_scheduler, short_of_blocks, step, steps

from tritonllm.engine.data.request import RequestStatus
from tritonllm.engine.schedule import prefix_cache

# --- the prefix cache


def test_prefix_hits_skip_computation_and_are_counted():
    scheduler = make_scheduler()
    add(scheduler, "a", prompt := list(range(10)))
    step(scheduler)
    b = add(scheduler, "b", prompt)
    assert step(scheduler) == {"a": 1, "b": 2}
    assert b.num_cached_tokens == 8
    stats = scheduler.stats
    assert (stats.prefix_cache_query_tokens, stats.prefix_cache_hit_tokens) == (20, 8)
    assert (stats.num_blocks, stats.num_free_blocks) == (100, 96)


def test_blocks_of_the_same_step_are_hit():
    """Each layer writes all keys and values of a step before it reads any."""
    scheduler = make_scheduler(tokens=15)
    a = add(scheduler, "a", list(range(10)))
    b = add(scheduler, "b", list(range(10)))
    c = add(scheduler, "c", list(range(14)))
    assert step(scheduler) == {"a": 10, "b": 2, "c": 3}  # of the 14 - 8 tokens that the budget leaves c 3 of
    assert a.block_ids[:2] == b.block_ids[:2] == c.block_ids[:2]
    assert len({request.block_ids[2] for request in (a, b, c)}) == 3


def test_prefix_caching_can_be_off():
    scheduler = make_scheduler(caching=False)
    add(scheduler, "a", list(range(10)))
    step(scheduler)
    b = add(scheduler, "b", list(range(10)))
    assert step(scheduler) == {"a": 1, "b": 10}
    assert (b.num_cached_tokens, scheduler.stats.prefix_cache_query_tokens) == (0, 0)


def test_prompt_logprobs_compute_every_prompt_position():
    scheduler = make_scheduler()
    for name, expected in (("a", 10), ("b", 10)):
        add(scheduler, name, list(range(10)), 11, prompt_logprobs=0)
        assert step(scheduler) == {name: expected}
    add(scheduler, "c", list(range(10)), 11)
    assert step(scheduler) == {"c": 2}
    assert scheduler.stats.prefix_cache_query_tokens == 10


def test_hits_on_free_blocks_count_as_blocks_to_take():
    scheduler = make_scheduler(5)
    add(scheduler, "a", prompt := list(range(16)), 17)
    step(scheduler)
    add(scheduler, "hold", 3)
    step(scheduler)
    add(scheduler, "b", prompt)  # 4 blocks, 3 of them cached but free; of 4 free blocks, `hold` is left one
    assert step(scheduler) == {"hold": 1}
    assert scheduler.num_waiting == 1


def test_hits_on_blocks_in_use_take_no_room():
    scheduler = make_scheduler(7)
    a = add(scheduler, "a", prompt := list(range(16)), 20)
    step(scheduler)
    b = add(scheduler, "b", [*prompt[:12], 99])
    assert step(scheduler) == {"a": 1, "b": 1}  # 4 blocks, of which 3 are in use anyway; 2 are free, one is a's to come
    assert b.block_ids[:3] == a.block_ids[:3]


def test_each_block_is_hashed_once(monkeypatch):
    hashed = []
    real = prefix_cache.xxh3_128_digest
    monkeypatch.setattr(prefix_cache, "xxh3_128_digest", lambda data: hashed.append(data) or real(data))
    scheduler = make_scheduler(tokens=9)
    add(scheduler, "a", 37, 60)
    steps(scheduler, 40)
    assert not has_unfinished(scheduler)
    assert len(hashed) == 59 // 4


# --- the end of a request


@pytest.mark.parametrize(
    ("tokens", "params", "output", "reason", "stop_reason"),
    [
        ([5, 2, 5], {}, [5, 2], "stop", None),
        ([5, 2, 5], {"ignore_eos": True}, [5, 2, 5], "length", None),
        ([5, 3, 5], {"stop_token_ids": [4, 3]}, [5, 3], "stop", 3),
        ([5, 3, 5], {"stop_token_ids": [3], "ignore_eos": True}, [5, 3], "stop", 3),
        ([5, 3, 5], {}, [5, 3, 5], "length", None),
        ([2, 2, 5], {"min_tokens": 2}, [2, 2], "stop", None),
        ([3, 3, 5], {"min_tokens": 2, "stop_token_ids": [3]}, [3, 3], "stop", 3),
        ([2, 5, 5], {"min_tokens": 2}, [2, 5, 5], "length", None),
        ([5, 5, 2], {}, [5, 5, 2], "stop", None),
        ([2], {"stop_token_ids": [2]}, [2], "stop", None),
    ],
)
def test_stop_conditions(tokens, params, output, reason, stop_reason):
    scheduler = make_scheduler()
    request = add(scheduler, "r", 4, 7, eos=[2], max_tokens=3, **params)
    for token in tokens:
        step(scheduler, token)
        if request.status.is_finished:
            break
    assert (request.output_token_ids, request.finish_reason, request.stop_reason) == (output, reason, stop_reason)
    assert (has_unfinished(scheduler), scheduler.num_running, scheduler.pool.num_free) == (False, 0, 100)


def test_update_returns_the_new_tokens_in_the_order_of_the_plan():
    scheduler = make_scheduler(tokens=10)
    a, b, _ = (add(scheduler, name, length) for name, length in (("a", 3), ("b", 4), ("c", 9)))
    plan = scheduler.schedule()
    new = scheduler.update(plan, [[11], [12], []])
    assert new == [(a, [11]), (b, [12])]


@pytest.mark.parametrize("sampled", [[], [[1]], [[1], [1]], [[], []], [[], [1]], [[1], [], []]])
def test_update_wants_a_token_for_each_request_that_samples(sampled):
    scheduler = make_scheduler(tokens=10)
    request = add(scheduler, "a", 3)
    add(scheduler, "b", 9)
    plan = scheduler.schedule()
    with pytest.raises(ValueError, match="sampled must have tokens"):
        scheduler.update(plan, sampled)
    assert (request.num_pending_tokens, request.output_token_ids) == (1, [])
    assert scheduler.update(plan, [[1], []])


@pytest.mark.parametrize("state", ["waiting", "running", "preempted"])
def test_abort_frees_everything_at_once(state):
    if state == "preempted":
        scheduler, (_, _, request), hole = short_of_blocks()
        step(scheduler)
        scheduler.pool.release(hole)
    else:
        scheduler = make_scheduler()
        request = add(scheduler, "c", 9)
        if state == "running":
            step(scheduler)
    assert request.status.name.lower() == state
    assert scheduler.abort("c") is request
    assert request.finish_reason == "abort"
    assert scheduler.abort("c") is None
    for other in ("a", "b"):
        scheduler.abort(other)
    assert (scheduler.num_waiting, scheduler.num_running, has_unfinished(scheduler)) == (0, 0, False)
    assert scheduler.pool.num_free == scheduler.pool.num_blocks
    assert scheduler.schedule().scheduled == ()


def test_tokens_of_a_request_that_was_aborted_during_the_step_are_dropped():
    scheduler = make_scheduler()
    a, b = add(scheduler, "a", 8), add(scheduler, "b", 8)
    plan = scheduler.schedule()
    scheduler.abort("a")
    namesake = add(scheduler, "a", 8)
    assert scheduler.update(plan, [[1], [2]]) == [(b, [2])]
    assert (a.output_token_ids, namesake.output_token_ids, b.output_token_ids) == ([], [], [2])
    assert step(scheduler) == {"a": 4, "b": 1}  # the plan was run, so the first block of the two is in the cache


def test_aborted_requests_do_not_pile_up_behind_one_that_waits():
    scheduler = make_scheduler(seats=1)
    add(scheduler, "running", 3)
    step(scheduler)
    add(scheduler, "waiting", 3)
    for i in range(1000):
        add(scheduler, f"r{i}", 3)
        scheduler.abort(f"r{i}")
    assert scheduler.num_waiting == 1
    assert len(scheduler._waiting._heap) < 5
    scheduler.abort("running")
    assert step(scheduler) == {"waiting": 3}


def test_finish_with_a_stop_string():
    scheduler = make_scheduler()
    request = add(scheduler, "r", 3)
    step(scheduler)
    scheduler.finish("r", RequestStatus.FINISHED_STOPPED, "END")
    assert (request.finish_reason, request.stop_reason) == ("stop", "END")
    assert (has_unfinished(scheduler), scheduler.pool.num_free) == (False, 100)


def test_a_stop_string_in_the_last_token_outranks_the_length():
    scheduler = make_scheduler()
    request = add(scheduler, "r", 3, 4)
    step(scheduler)
    assert request.finish_reason == "length"
    scheduler.finish("r", RequestStatus.FINISHED_STOPPED, "END")
    assert (request.finish_reason, request.stop_reason) == ("stop", "END")
    step(scheduler)
    with pytest.raises(ValueError, match="'r' is not of an unfinished request"):
        scheduler.finish("r", RequestStatus.FINISHED_STOPPED, "END")


def test_finish_wants_a_finished_status():
    scheduler = make_scheduler()
    add(scheduler, "r", 3)
    with pytest.raises(ValueError, match="status must be one of the finished ones"):
        scheduler.finish("r", RequestStatus.WAITING)
    assert scheduler.num_waiting == 1

"""Sequences of one request: one copy of what they share, computed once; admitted and preempted together."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.scheduling import add, has_unfinished, make, make_scheduler, step

from tritonllm.engine.cache.block_copies import BlockCopies
from tritonllm.engine.data.control import ReadsOutput
from tritonllm.engine.data.request import RequestStatus
from tritonllm.engine.schedule.block_pool import BlockPool
from tritonllm.engine.schedule.gang import fork, free, move


def add_siblings(scheduler, name, prompt, n, most=None, **kwargs):
    requests = tuple(make(f"{name}#{i}", prompt, most, n=n, **kwargs) for i in range(n))
    for request in requests:
        request.siblings = requests
        request.prompt_token_ids = requests[0].prompt_token_ids
        scheduler.add(request)
    return requests


def used(scheduler):
    return scheduler.pool.num_blocks - scheduler.pool.num_free


def run(scheduler, tokens=None):
    """One step, in which the siblings draw other tokens; returns the plan."""
    plan = scheduler.schedule()
    drawn = [[10 + i] if item.samples else [] for i, item in enumerate(plan.scheduled)]
    scheduler.update(plan, drawn)
    return plan


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [1, 3, 8, 9, 21])
def test_eight_continuations_hold_one_prompt_and_compute_it_once(length, caching):
    scheduler = make_scheduler(caching=caching)
    requests = add_siblings(scheduler, "r", length, 8)
    plan = run(scheduler)
    assert plan.num_tokens == length and plan.copies == ()
    assert [(item.num_tokens, item.samples) for item in plan.scheduled] == [(length, True)] + 7 * [(0, True)]
    assert all(len(request.output_token_ids) == 1 for request in requests)
    assert used(scheduler) == -(-length // 4)
    tail = requests[0].block_ids[length // 4 :]
    plan = run(scheduler)
    assert plan.segments.only_decodes and plan.num_tokens == 8
    assert used(scheduler) == length // 4 + 8
    assert [source for source, _ in plan.copies] == 7 * tail  # the first one owns the block, and writes on
    assert [target for _, target in plan.copies] == [r.block_ids[-1] for r in requests[1:] if tail]
    assert run(scheduler).copies == ()


def test_a_prompt_of_several_chunks():
    scheduler = make_scheduler(tokens=8)
    requests = add_siblings(scheduler, "r", 21, 3)
    assert [run(scheduler).num_tokens for _ in range(3)] == [8, 8, 5]
    assert [r.num_computed_tokens for r in requests] == [21, 21, 21] and used(scheduler) == 6
    scheduler = make_scheduler(tokens=8)
    add_siblings(scheduler, "r", 16, 3)  # the last chunk takes the whole budget: the others need none
    assert [len(run(scheduler).scheduled) for _ in range(2)] == [1, 3]


def test_results_that_come_late():
    """The next step is planned before the first tokens are known."""
    scheduler = make_scheduler()
    requests = add_siblings(scheduler, "r", 6, 3)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert [item.pending for item in second.scheduled] == [True] * 3 and len(second.copies) == 2
    scheduler.update(first, [[1], [2], [3]])
    scheduler.update(second, [[4], [5], [6]])
    assert [r.output_token_ids for r in requests] == [[1, 4], [2, 5], [3, 6]]


def test_the_prompt_stays_as_long_as_one_needs_it():
    scheduler = make_scheduler()
    requests = add_siblings(scheduler, "r", 6, 3)
    plan = scheduler.schedule()
    scheduler.update(plan, [[1], [2], [3]])
    assert scheduler.abort(requests[0].request_id) is requests[0]
    plan = run(scheduler)
    assert len(plan.copies) == 2 and used(scheduler) == 3
    for request in requests[1:]:
        scheduler.abort(request.request_id)
    assert used(scheduler) == 0


def test_an_early_end_copies_nothing():
    scheduler = make_scheduler()
    add_siblings(scheduler, "r", 6, 4, 7)
    assert run(scheduler).copies == ()
    assert not has_unfinished(scheduler) and used(scheduler) == 0


def test_they_are_admitted_together():
    scheduler = make_scheduler(seats=4)
    alone = add(scheduler, "a", 4, 8)
    step(scheduler)
    add_siblings(scheduler, "r", 6, 4, 9)
    assert [len(run(scheduler).scheduled) for _ in range(3)] == [1, 1, 1]  # three seats are free
    assert alone.status.is_finished
    assert len(run(scheduler).scheduled) == 4


def test_they_wait_for_blocks_of_all():
    scheduler = make_scheduler(8)
    add(scheduler, "a", 8, 100)
    step(scheduler)
    add_siblings(scheduler, "r", 6, 4)  # two blocks for the first, one for each other, and one to spare
    held = scheduler.pool.allocate_many(1)
    assert len(run(scheduler).scheduled) == 1
    scheduler.pool.release(held)
    scheduler.abort("a")
    assert len(run(scheduler).scheduled) == 4


def test_more_than_there_are_seats_run_one_after_the_other():
    scheduler = make_scheduler(seats=3)
    requests = add_siblings(scheduler, "r", 6, 8, 9)
    assert len(run(scheduler).scheduled) == 3
    for _ in range(30):
        run(scheduler)
    assert all(r.status is RequestStatus.FINISHED_LENGTH for r in requests) and used(scheduler) == 0


def test_the_only_one_that_is_left_goes_without_drafts_rather_than_not_at_all():
    """Its tail is a block that it cannot have for them."""
    scheduler = make_scheduler(5, block_size=2, drafts=7)
    first, second, third = add_siblings(scheduler, "r", 1, 3, 20)
    run(scheduler)
    scheduler.abort(first.request_id)
    assert second.tail == third.tail is not None
    plan = scheduler.schedule()
    assert [(item.request, item.drafts) for item in plan.scheduled] == [(second, 0)]
    assert plan.preempted == (third,)


def test_they_are_preempted_together():
    scheduler = make_scheduler(12, seats=4)
    alone = add(scheduler, "a", 4, 100)
    requests = add_siblings(scheduler, "r", 4, 3)
    run(scheduler)
    hole = scheduler.pool.allocate_many(scheduler.pool.num_free - 3)  # one block less than the four need
    plan = run(scheduler)
    assert list(plan.preempted) == list(requests[::-1])
    assert [item.request for item in plan.scheduled] == [alone]
    scheduler.pool.release(hole)
    assert len(run(scheduler).scheduled) == 4
    assert len({tuple(r.block_ids[:1]) for r in requests}) == 1  # again one copy of the prompt


def test_the_only_gang_gives_up_one_after_the_other():
    scheduler = make_scheduler(4)
    requests = add_siblings(scheduler, "r", 4, 3, 12)
    for _ in range(60):
        run(scheduler)
    assert [len(r.output_token_ids) for r in requests] == [8, 8, 8] and used(scheduler) == 0
    assert requests[0].num_preemptions == 0 < requests[2].num_preemptions


def test_siblings_come_back_to_the_prompt_without_a_prefix_cache():
    scheduler = make_scheduler(12, seats=4, caching=False)
    add(scheduler, "a", 4, 100)
    requests = add_siblings(scheduler, "r", 9, 3)
    run(scheduler)
    hole = scheduler.pool.allocate_many(scheduler.pool.num_free - 1)
    assert len(run(scheduler).preempted) == 3
    scheduler.pool.release(hole)
    plan = run(scheduler)
    assert [item.num_tokens for item in plan.scheduled[1:]] == [10, 2, 2]
    assert len({tuple(r.block_ids[:2]) for r in requests}) == 1


@pytest.mark.parametrize("length", [1, 5])
def test_no_drafts_beside_continuations_that_begin(length):
    """A prompt whose last token alone is left is a chunk if several sample from it."""
    scheduler = make_scheduler(drafts=3)
    add(scheduler, "a", 4, 100)
    run(scheduler)
    assert scheduler.schedule().segments.verify.tokens == 4
    requests = add_siblings(scheduler, "r", length, 3)
    plan = scheduler.schedule()
    assert plan.segments.verify.tokens == 0 and plan.segments.chunk.sequences == 3
    assert [item.request for item in plan.scheduled[1:]] == list(requests)


@pytest.mark.parametrize("length", [6, 8])
def test_a_fork_goes_on_from_where_its_parent_is(length):
    scheduler = make_scheduler()
    first, second, third = add_siblings(scheduler, "r", length - 1, 3)
    run(scheduler)
    run(scheduler)  # all have computed `length` tokens
    admission = third.admission
    scheduler.fork(first, third)
    assert third.num_computed_tokens == length and third.admission > admission and third.seat is not None
    third.output_token_ids[:] = [*first.output_token_ids[:-1], 99]
    assert used(scheduler) == len({*first.block_ids, *second.block_ids})
    tail = first.block_ids[length // 4 :]
    plan = run(scheduler)
    assert [item.start for item in plan.scheduled] == [length] * 3
    assert list(plan.copies) == ([(tail[0], third.block_ids[-1])] if tail else [])
    full = length // 4
    assert first.block_ids[:full] == third.block_ids[:full] and first.block_ids[-1] != third.block_ids[-1]
    for request in (first, second, third):
        scheduler.abort(request.request_id)
    assert used(scheduler) == 0


def in_pool(pool, tables, computed, tails):
    """Requests with these blocks, and other state that a fork takes over."""
    requests = []
    for number, (table, tail) in enumerate(zip(tables, tails, strict=True)):
        request = make(f"r{number}", 3)
        request.block_ids, request.tail, request.num_computed_tokens = list(table), tail, computed
        request.block_hashes = [b"%d" % block for block in table]
        request.num_labelled_blocks = min(len(table), number)
        requests.append(request)
    for block in pool.allocate_many(pool.num_free):
        users = sum(table.count(block) for table in tables) + tails.count(block)
        pool.retain([block] * (users - 1)) if users else pool.release([block])
    return requests


@given(st.integers(0, 5), st.integers(0, 3), st.integers(0, 3), st.integers(0, 3), st.booleans())
def test_a_move_is_a_release_and_a_fork(common, mine, theirs, rest, shares_tail):
    """Down to the order in which blocks are free, whichever of them both have."""
    results = []
    for moves in (False, True):
        pool = BlockPool(16)
        blocks = list(range(16))
        both, own, others = blocks[:common], blocks[5 : 5 + mine], blocks[8 : 8 + theirs]
        tails = [15 if shares_tail else None, None]
        computed = 4 * (common + theirs) - (rest if theirs else 0)
        child, parent = in_pool(pool, [both + own, both + others], computed, tails)
        for block in both + own:
            if block % 2:
                pool.label(block, b"%d" % block)
        if moves:
            move(child, parent, pool, 4)
        else:
            free(child, pool)
            fork(parent, child, pool, 4)
        state = child.block_ids, child.tail, child.num_computed_tokens, child.block_hashes, child.num_labelled_blocks
        users = [pool.ref_count(block) for block in blocks]
        results.append((*state, users, pool.allocate_many(pool.num_free)))
    assert results[0] == results[1]


def test_when_all_wait_for_siblings_the_last_give_way():
    scheduler = make_scheduler(seats=4)
    gangs = [add_siblings(scheduler, name, 6, 2) for name in "ab"]
    waiting = add(scheduler, "c", 4)
    run(scheduler)
    for request in (*gangs[0], *gangs[1]):
        request.held, request.controls = True, (ReadsOutput(),)
    plan = scheduler.schedule()
    assert list(plan.preempted) == list(gangs[1][::-1]) and not plan.scheduled
    assert [request.held for request in (*gangs[0], *gangs[1])] == [True, True, False, False]
    assert len(scheduler.schedule().scheduled) == 2
    assert waiting.status is RequestStatus.WAITING


def test_only_the_first_one_reports_the_prompt():
    scheduler = make_scheduler()
    requests = add_siblings(scheduler, "r", 6, 3, prompt_logprobs=0)
    assert [r.reports_prompt for r in requests] == [True, False, False]
    assert run(scheduler).num_tokens == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_are_copied_in_all_layers(dtype):
    pool = torch.randn(3, 2, 7, 4, 2, 8).to(dtype)
    expected = pool.clone()
    expected[:, :, [5, 0]] = pool[:, :, [2, 2]]
    copies = BlockCopies(pool)
    copies.run(np.array([[2, 5], [2, 0]]))
    assert torch.equal(pool, expected)
    copies.warm_up()
    assert torch.equal(pool, expected)

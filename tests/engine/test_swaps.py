"""Sequences that are preempted where no prefix cache names their blocks: those of a request are swapped together.

The rules are in tests/support/host_machine.py (``check_swaps``), which test_host_tier_stateful.py runs under all kinds
of loads. Here are loads of which much is preempted.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.host_machine import MachineWithHost
from support.scheduling import make, make_scheduler

from tritonllm.engine.data.request import RequestStatus
from tritonllm.engine.schedule import prompt_budget
from tritonllm.engine.schedule.host_tier import HostTier
from tritonllm.engine.schedule.rates import LATENCY, Rates
from tritonllm.engine.schedule.swaps import own_labels

GANGS = st.fixed_dictionaries(
    {
        "n": st.sampled_from([2, 3, 1, 4]),
        "prompt": st.integers(1, 8),
        "max_tokens": st.integers(6, 16),
        "after": st.sampled_from([0, 0, 1, 4, 9]),
    }
)


@given(
    gangs=st.lists(GANGS, min_size=3, max_size=8),
    num_blocks=st.integers(10, 24),
    num_slots=st.integers(3, 30),
    block_size=st.integers(1, 2),
    late=st.sampled_from([0.0, 0.5, 0.8]),
    least=st.sampled_from([0, 0, 2, 5]),
    ahead=st.booleans(),
    more_tokens=st.sampled_from([2, 8, 30]),
    luck=st.randoms(use_true_random=False),
)
@settings(max_examples=examples(100))
def test_all_sequences_of_a_request_are_swapped_or_none(gangs, **load):
    machine = MachineWithHost()
    machine.start(policy="fcfs", caching=False, seats=8, drafts=0, beside=prompt_budget.BESIDE, **load)
    for number, one in enumerate(gangs):
        wish = {"family": number % 2, "shared": one["prompt"], "tail": [], "priority": 0, "salt": None}
        machine.add_one(params={"ignore_eos": True, "max_tokens": one["max_tokens"]}, n=one["n"], **wish)
        for _ in range(one["after"]):
            machine.run_step()
    machine.teardown()


def gang(outputs, prompt=4, **kwargs):
    """Sequences of one request that are being preempted for the first time; blocks of one token, of which none but the
    prompt's are shared."""
    requests = tuple(make(f"r{i}", prompt, n=len(outputs), **kwargs) for i in range(len(outputs)))
    for i, (request, count) in enumerate(zip(requests, outputs, strict=True)):
        request.siblings, request.order, request.num_preemptions = requests, (0, 0, i), 1
        request.output_token_ids += [7] * (count + 1)
        request.num_computed_tokens = prompt + count
        request.block_ids = [*range(prompt), *range(100 * i + prompt, 100 * i + prompt + count)]
    return requests


def end_batch(tier):
    transfers = tier.finish(runs=True)
    tier.done = tier.last
    tier.begin()
    return transfers


def leave(tier, *requests):
    """They are preempted; returns how many blocks are stored."""
    tier.keep_own(requests, 1)
    for request in requests:
        request.status = RequestStatus.PREEMPTED
    transfers = end_batch(tier)
    return 0 if transfers is None else len(transfers.stores)


@pytest.mark.parametrize("slots, stored", [(10, 10), (9, 0)])
def test_there_is_room_for_all_or_none_is_stored(slots, stored):
    tier, requests = HostTier(slots, Rates()), gang([3, 2, 1])
    assert leave(tier, *requests[::-1]) == stored
    found = [len(tier.find_own(request, 1, 0)) for request in requests]
    assert found == ([7, 6, 5] if stored else [0, 0, 0])


def test_what_is_left_later_joins_what_siblings_left_or_takes_it_along():
    tier, (first, second) = HostTier(9, Rates()), gang([3, 2])
    assert leave(tier, second) == 6
    tier._store(b"other", 50)
    tier._store(b"newer", 51)
    end_batch(tier)
    assert leave(tier, first) == 3  # in place of others, though those came later
    assert [len(tier.find_own(request, 1, 4)) for request in (first, second)] == [3, 2]
    tier, (first, second) = HostTier(8, Rates()), gang([3, 2])
    assert (leave(tier, second), leave(tier, first)) == (6, 0)
    assert tier.find_own(second, 1, 4) == [] and len(tier.find_own(first, 1, 0)) == 4  # the prompt is there


def test_one_block_that_is_given_up_takes_those_of_all_along():
    tier, requests = HostTier(10, Rates()), gang([3, 2, 1])
    leave(tier, *requests[::-1])
    tier._store(b"other", 50)
    assert tier.stats.num_used_host_blocks == 4 + 1
    assert [len(tier.find_own(request, 1, 4)) for request in requests] == [0, 0, 0]


def test_whether_copying_pays_is_decided_for_all():
    for least, found in ((6, [3, 2, 1]), (7, [0, 0, 0])):
        rates = Rates(seconds_per_token=LATENCY / (least - 0.5))
        tier, requests = HostTier(10, rates), gang([3, 2, 1])
        leave(tier, *requests[::-1])
        assert [len(tier.find_own(request, 1, 4)) for request in requests] == found


def test_nothing_is_stored_by_a_batch_that_loads():
    """It stores first: what is loaded would not be there yet."""
    tier, requests = HostTier(20, Rates()), gang([3, 2])
    leave(tier, *requests[::-1])
    tier.bring(requests[0], [], tier.find_own(requests[0], 1, 0), requests[0].block_ids)
    requests[0].num_preemptions, requests[0].status = 2, RequestStatus.RUNNING
    assert leave(tier, requests[0]) == 0 and tier.find_own(requests[1], 1, 4) == []


def test_none_comes_back_if_one_computes_its_prompt_in_any_case():
    tier, requests = HostTier(20, Rates()), gang([3, 2], prompt_logprobs=0)
    assert leave(tier, *requests[::-1]) == 0


def test_nothing_is_known_of_those_who_have_come_back():
    tier, requests = HostTier(10, Rates()), gang([3, 2, 0])
    leave(tier, *requests[::-1])
    for request in requests:
        tier.find_own(request, 1, 0)
    assert not tier._swaps._swaps and not tier._swaps._of


def test_own_labels_change_with_each_preemption_but_for_the_shared_prompt():
    pair = [make(name, [1] * 9, n=2) for name in "ab"]
    scheduler = make_scheduler()
    for request in pair:
        request.siblings = tuple(pair)
        scheduler.add(request)
        assert own_labels(request, 4) == ([], [])
        request.num_preemptions = 1
        request.output_token_ids += [2] * 8
    (mine, rest), (theirs, others) = own_labels(pair[0], 4), own_labels(pair[1], 4)
    assert mine == theirs and len(mine) == 2 and len(rest) == 2 and not set(rest) & set(others)
    pair[0].num_preemptions = 2
    again = own_labels(pair[0], 4)
    assert again[0] == mine and not set(again[1]) & set(rest)

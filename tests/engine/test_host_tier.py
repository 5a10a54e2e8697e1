"""The second tier's bookkeeping, in small cases. Random ones: test_host_tier_stateful.py."""

from collections import OrderedDict
from types import SimpleNamespace

import pytest
from support.scheduling import add, make, make_scheduler, step

from tritonllm.config.engine import SchedulerConfig
from tritonllm.engine.schedule.host_tier import HostTier
from tritonllm.engine.schedule.rates import Rates
from tritonllm.engine.schedule.scheduler import Scheduler


def tiered(num_blocks=8, num_slots=50, *, caching=True, rates=None, tokens=100):
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=tokens)
    tier = HostTier(num_slots, rates or Rates(block_tokens=4))
    return Scheduler(config, 4, num_blocks, 1000, tier=tier, enable_prefix_caching=caching)


def run(scheduler, token=7):
    """A step, of which the host hears at once that its copies are done."""
    plan = scheduler.schedule()
    scheduler.update(plan, [[token] if item.samples else [] for item in plan.scheduled])
    for batch in (plan.transfers, plan.fills):
        if batch is not None:
            scheduler.tier.done = max(scheduler.tier.done, batch.number)
    return plan


def drain(scheduler):
    while scheduler.num_running + scheduler.num_waiting:
        run(scheduler)


def stored(tier, blocks, plans=1):
    """Labels of so many blocks that went to the host."""
    labels = [b"%d" % block for block in blocks]
    for label, block in zip(labels, blocks, strict=True):
        tier.keep(label, block)
    for _ in range(plans):
        tier.begin()
        tier.finish(runs=True)
    return labels


def test_a_block_of_a_prompt_is_stored_while_the_step_runs_that_fills_it():
    scheduler = tiered(tokens=8)
    add(scheduler, "a", 13, 40)
    first, second, third = (run(scheduler) for _ in range(3))
    blocks = scheduler._running[0].block_ids
    assert first.transfers is second.transfers is third.transfers is third.fills is None
    assert (first.fills.number, second.fills.number) == (1, 2)
    assert [[block for block, _ in plan.fills.stores] for plan in (first, second)] == [blocks[1::-1], blocks[2:3]]
    assert scheduler.stats.tier.stored_blocks == 3


def test_the_end_of_a_prompt_is_given_up_first():
    scheduler = tiered(num_slots=3)
    request = add(scheduler, "a", 17, 40)
    plan = run(scheduler)
    labels = request.block_hashes
    assert len(plan.fills.stores) == 3 and [*map(scheduler.tier.has, labels)] == [True, True, True, False]


def test_the_end_of_a_prompt_is_given_up_first_when_it_has_been_found_as_well():
    """By the device's cache, and by the rest of it that comes back from here."""
    scheduler = tiered(num_blocks=20, num_slots=6)
    first = add(scheduler, "a", 25, 26)
    drain(scheduler)
    scheduler.pool.clear_labels()  # of the blocks behind the first three
    (one, two, three, *_), blocks = first.block_hashes, scheduler.pool.allocate_many(3)
    for label, block in zip((one, two, three), blocks, strict=True):
        scheduler.pool.label(block, label)
    scheduler.tier.rates.pays = lambda blocks: True
    again = add(scheduler, "b", first.prompt_token_ids, 26)
    run(scheduler)
    assert again.num_cached_tokens == 24 and scheduler.tier.loaded == 3
    assert [*scheduler.tier._slot_of] == first.block_hashes[5::-1]


def test_a_prompts_blocks_are_neighbours_in_order():
    """Then those that come to another engine in order are neighbours on both sides."""
    scheduler = tiered(num_blocks=20, tokens=16)
    request = add(scheduler, "a", 33, 40)
    for _ in range(3):
        run(scheduler)
    slots = scheduler.tier.find(request.block_hashes)
    assert slots == [*range(8)]
    tier = HostTier(8, Rates())
    for number in range(4):  # also in the place of others
        labels = [b"%d %d" % (number, block) for block in range(4)]
        tier.keep_all(dict(zip(labels, range(4), strict=True)))
        tier.begin()
        tier.finish(runs=True)
        tier.done = tier.last
        assert tier.find(labels) == [*range(4 * (number % 2), 4 * (number % 2) + 4)]


@pytest.mark.parametrize("beside", [True, False])
def test_a_block_of_an_output_is_stored_with_the_next_plan(beside):
    """The device knows its last token before the host does."""
    scheduler = tiered()
    tier, request = scheduler.tier, add(scheduler, "a", 6, 40)
    run(scheduler)
    tier.streams = beside
    plans = [run(scheduler) for _ in range(4)]
    assert all(plan.fills is None for plan in plans)
    assert [plan.transfers is None for plan in plans] == [True, True, False, True]
    assert [block for block, _ in plans[2].transfers.stores] == request.block_ids[1:2]


def test_without_streams_a_block_is_stored_with_the_plan_after_the_one_that_computes_it():
    scheduler = tiered()
    scheduler.tier.streams = False
    add(scheduler, "a", 9, 40)
    first, second, third = (run(scheduler) for _ in range(3))
    blocks = scheduler._running[0].block_ids
    assert first.transfers is first.fills is second.fills is third.transfers is None
    assert second.transfers.number == 1 and second.transfers.loads == () and second.transfers.wait == 0
    assert [block for block, _ in second.transfers.stores] == blocks[:2][::-1]  # the end is given up first


def test_a_step_with_loads_and_fills_has_two_batches():
    """It may have to wait for the first, and the second waits for it."""
    scheduler = tiered(num_blocks=8)
    for name, length in (("a", 17), ("b", 29)):
        add(scheduler, name, length, length + 1)
        drain(scheduler)
    again = add(scheduler, "again", [*make("a", 17).prompt_token_ids, *range(100, 108)], 40)
    plan = scheduler.schedule()
    assert [item.request for item in plan.scheduled] == [again]
    transfers, fills = plan.transfers, plan.fills
    assert len(transfers.loads) == 4 and transfers.wait == transfers.number == fills.number - 1
    assert [block for block, _ in fills.stores] == again.block_ids[4:6][::-1]
    assert not {block for block, _ in fills.stores} & {block for _, block in transfers.loads}


def test_two_that_fill_blocks_with_the_same_contents_store_them_once():
    scheduler = tiered(num_blocks=20)
    for index, name in enumerate("ab"):
        add(scheduler, name, make("a", 9).prompt_token_ids, 40, arrival=index)
    assert len(run(scheduler).fills.stores) == 2 and scheduler.stats.tier.stored_blocks == 2


def test_writing_into_a_block_that_a_step_fills_waits_for_its_copy():
    scheduler = tiered(num_blocks=4)
    add(scheduler, "a", 13, 40)
    plan = scheduler.schedule()
    scheduler.update(plan, [[7]])
    scheduler.abort("a")  # its step runs to its end all the same
    add(scheduler, "b", make("b", 13).prompt_token_ids, 40)
    other = scheduler.schedule()
    assert other.transfers.wait == plan.fills.number and other.transfers.number == 0
    assert {block for block, _ in other.fills.stores} & {block for block, _ in plan.fills.stores}


def test_what_is_filled_is_told_once_its_batch_has_a_number():
    scheduler = tiered()
    scheduler.tier.tells = True
    add(scheduler, "a", 9, 40)
    plan = scheduler.schedule()
    told = scheduler.tier.take_stored()
    assert {slot for _, slot in told} == {slot for _, slot in plan.fills.stores}
    assert scheduler.tier.last == plan.fills.number


def test_nothing_is_told_of_a_step_that_was_broken_off():
    scheduler = tiered()
    scheduler.tier.tells = True
    add(scheduler, "a", 9, 40)
    plan = scheduler.schedule()
    scheduler.reset()
    tier = scheduler.tier
    assert tier.take_stored() == [] and tier.lend(1) == [] and len(tier._free) == tier.num_slots
    tier.done = plan.fills.number  # nothing is copied any more
    assert len(tier.lend(1)) == 1


def test_an_evicted_prefix_is_loaded_and_the_others_run_meanwhile():
    scheduler = tiered(num_blocks=8)
    add(scheduler, "a", 17, 18)
    drain(scheduler)
    add(scheduler, "b", 29, 30)  # takes all blocks
    drain(scheduler)
    runs = add(scheduler, "runs", 3, 12)
    plan = run(scheduler)
    again = add(scheduler, "again", make("a", 17).prompt_token_ids, 30)
    plan = scheduler.schedule()
    assert [item.request for item in plan.scheduled] == [runs]
    assert len(plan.transfers.loads) == 4 and again in scheduler.tier.loading
    assert [block for _, block in plan.transfers.loads] == again.block_ids[:4]
    scheduler.update(plan, [[7]])
    assert [item.request for item in run(scheduler).scheduled] == [runs]  # nobody has heard that it is done
    scheduler.tier.done = plan.transfers.number
    plan = run(scheduler)
    assert {item.request for item in plan.scheduled} == {runs, again} and plan.transfers.wait <= scheduler.tier.done
    assert next(item for item in plan.scheduled if item.request is again).start == 16 == again.num_cached_tokens


def test_alone_it_waits_on_the_device():
    scheduler = tiered(num_blocks=8)
    for name, length in (("a", 17), ("b", 29)):
        add(scheduler, name, length, length + 1)
        drain(scheduler)
    again = add(scheduler, "again", make("a", 17).prompt_token_ids, 30)
    plan = scheduler.schedule()
    assert [item.request for item in plan.scheduled] == [again]
    assert plan.transfers.wait == plan.transfers.number > 0 and not scheduler.tier.loading


def test_who_waits_for_a_token_in_flight_is_not_kept_waiting_by_loads():
    """A plan of nothing, and the next one is of the request whose token has come; the other one's loads go with it."""
    scheduler = tiered(num_blocks=12)
    for name, length in (("a", 17), ("b", 45)):
        add(scheduler, name, length, length + 1)
        drain(scheduler)
    runs = add(scheduler, "runs", 3, 12)
    runs.controls = (SimpleNamespace(waits=lambda pending: True),)
    first = scheduler.schedule()
    again = add(scheduler, "again", make("a", 17).prompt_token_ids, 30)
    nothing = scheduler.schedule()
    assert nothing.scheduled == () and nothing.transfers is None and again in scheduler.tier.loading
    scheduler.update(first, [[7]])
    plan = scheduler.schedule()
    assert [item.request for item in plan.scheduled] == [runs]
    assert len(plan.transfers.loads) == 4 and plan.transfers.wait < plan.transfers.number


def test_a_block_that_is_given_anew_before_its_load_was_issued_is_loaded_once():
    scheduler = tiered(caching=False)
    tier, (first, second) = scheduler.tier, (make(name, 9) for name in "ab")
    one, two = stored(tier, [1]) + stored(tier, [2])
    tier.begin()
    tier.bring(first, [], tier.find([two]), [5])
    assert tier.finish(runs=False) is None
    tier.loading.pop(first)  # it lost the block
    tier.begin()
    tier.bring(second, [], slots := tier.find([one]), [5])
    assert tier.finish(runs=True).loads == ((slots[0], 5),)


def test_two_with_one_prefix_load_it_once():
    scheduler = tiered(num_blocks=16)
    for name, length in (("a", 17), ("b", 61)):
        add(scheduler, name, length, length + 1)
        drain(scheduler)
    prompt = make("a", 17).prompt_token_ids
    runs = add(scheduler, "runs", 3, 40)
    run(scheduler)
    pair = [add(scheduler, name, [*prompt, 1], 40, arrival=index) for index, name in enumerate(("c", "d"), 1)]
    plan = scheduler.schedule()
    assert len(plan.transfers.loads) == 4 and set(scheduler.tier.loading) == set(pair)
    assert pair[0].block_ids[:4] == pair[1].block_ids[:4]
    assert [item.request for item in plan.scheduled] == [runs]


def test_what_is_computed_sooner_is_computed():
    rates = Rates(block_bytes=1000, block_tokens=4, bytes_per_second=1.0, seconds_per_token=1.0)
    scheduler = tiered(num_blocks=8, rates=rates)
    for name, length in (("a", 17), ("b", 29)):
        add(scheduler, name, length, length + 1)
        drain(scheduler)
    again = add(scheduler, "again", make("a", 17).prompt_token_ids, 30)
    run(scheduler)
    assert again.num_cached_tokens == 0 and scheduler.stats.tier.loaded_blocks == 0


@pytest.mark.parametrize("caching", [True, False])
def test_a_preempted_request_comes_back(caching):
    """With a prefix cache its blocks were stored as they became full, without one as it lost them."""
    scheduler = tiered(num_blocks=9, caching=caching)
    first, second = (add(scheduler, name, 15, 26, arrival=index) for index, name in enumerate("ab"))
    while not second.num_preemptions:
        plan = run(scheduler)
        assert caching or plan.transfers is None or plan.preempted
    lost = second.num_tokens
    while second.status.name != "RUNNING":
        run(scheduler)
    assert first.status.is_finished
    assert scheduler.stats.tier.loaded_blocks + len(scheduler.pool.find_leading(second.block_hashes)) >= lost // 4
    drain(scheduler)
    assert scheduler.pool.num_free == 9


def test_the_least_recently_used_is_given_up():
    tier = HostTier(3, Rates())
    a, b, c = stored(tier, [1]) + stored(tier, [2]) + stored(tier, [3])
    assert len(tier.find([a])) == 1
    (d,) = stored(tier, [4])
    assert [len(tier.find([label])) for label in (a, b, c, d)] == [1, 0, 1, 1]
    tier.keep(c, 3)
    stored(tier, [5])
    assert [len(tier.find([label])) for label in (a, c, d)] == [0, 1, 1]


def test_what_a_load_of_the_same_batch_reads_is_not_given_up():
    scheduler = tiered(num_slots=2, caching=False)
    tier, request = scheduler.tier, make("a", 9)
    labels = stored(tier, [1, 2])
    tier.begin()
    tier.bring(request, [], tier.find(labels), [5, 6, 7])
    tier._store(b"new", 3)  # both slots are read by the loads, which come after the stores
    plan = tier.finish(runs=True)
    assert plan.stores == () and len(plan.loads) == 2


def test_writing_into_a_block_that_is_being_copied_waits():
    tier = HostTier(4, Rates())
    stored(tier, [1, 2])
    tier.begin()
    tier.overwrite([3])
    assert tier.finish(runs=True) is None
    tier.begin()
    tier.overwrite([2])
    transfers = tier.finish(runs=True)
    assert (transfers.number, transfers.wait) == (0, 1)
    tier.done = 1
    tier.begin()
    tier.overwrite([1])
    assert tier.finish(runs=True) is None


def test_a_plan_without_a_step_leaves_its_copies_to_the_next():
    tier = HostTier(4, Rates())
    tier.keep(b"1", 1)
    tier.begin()
    assert tier.finish(runs=False) is None
    tier.keep(b"2", 2)
    tier.begin()
    transfers = tier.finish(runs=True)
    assert transfers.number == 1 and {block for block, _ in transfers.stores} == {1, 2}


def test_bad_num_slots():
    with pytest.raises(ValueError, match="num_slots must be at least 1, got 0"):
        HostTier(0, Rates())


def test_without_a_tier_plans_have_no_copies():
    scheduler = make_scheduler()
    add(scheduler, "a", 9, 12)
    assert scheduler.schedule().transfers is None
    assert step(scheduler) is not None and scheduler.stats.tier.num_host_blocks == 0


def test_slots_are_lent_and_come_back():
    tier = HostTier(6, Rates())
    labels = stored(tier, [1, 2])
    tier.done = tier.last
    tier.begin()
    lent = tier.lend(9)
    assert len(lent) == 3 and not set(lent) & set(tier.find(labels))  # half of all, and the free ones first
    assert tier.lend(1) == []
    tier.take_back(lent[0], b"came")
    tier.take_back(lent[1])
    assert tier.has(b"came") and tier.find([b"came"]) == [lent[0]]
    again = tier.lend(2)
    assert again[0] == lent[1] and len(again) == 2
    tier.take_back(lent[2], labels[0])  # it is here already: the slot is free again
    tier.take_back(again[0], b"more")
    tier.take_back(again[1])
    assert tier.find([*labels, b"came", b"more"]) == [tier.find([name])[0] for name in (*labels, b"came", b"more")]
    assert tier.stats.num_used_host_blocks == 4


class Counted(int):
    """A slot that counts how often sets and dictionaries look at one."""

    looks = 0

    def __hash__(self):
        Counted.looks += 1
        return super().__hash__()


@pytest.mark.parametrize("used", [0, 300])
def test_lending_many_slots_takes_time_in_their_number(used):
    """The prompt of 32,768 tokens that another engine has computed waits for 2,048 of them."""
    tier = HostTier(1000, Rates())
    stored(tier, range(used))
    tier.done = tier.last
    tier.begin()
    tier._free = [Counted(slot) for slot in tier._free]
    Counted.looks = 0
    lent = tier.lend(500)
    assert lent == sorted(lent) and len(lent) == 500
    assert Counted.looks <= 4 * 500


def test_slots_are_lent_in_order():
    """Neighbours are copied together."""
    tier = HostTier(8, Rates())
    stored(tier, range(6))
    tier.done = tier.last
    tier.begin()
    (first,) = tier.lend(1)  # both of the others are free still
    tier.take_back(first)
    assert (lent := tier.lend(4)) == sorted(lent) and len(lent) == 4  # two free ones, and two that are given up
    assert tier.stats.num_used_host_blocks == 4


def test_storing_beside_many_lent_slots_takes_time_in_the_number_of_blocks():
    """A connector that saves slowly has half of all slots, those used longest ago."""
    tier = HostTier(400, Rates())
    tier.tells = True
    stored(tier, range(400))
    lent = {slot for _, slot in tier.take_stored()}
    assert len(lent) == 200
    tier._slot_of = OrderedDict((label, Counted(slot)) for label, slot in sorted(tier._slot_of.items(), key=str))
    for label, slot in list(tier._slot_of.items()):
        if slot not in lent:
            tier._slot_of.move_to_end(label)
    Counted.looks = 0
    new = stored(tier, range(400, 500))
    assert all(map(tier.has, new)) and all(slot in lent for slot in tier._lent)
    assert Counted.looks <= 200 + 10 * 100


def test_a_lent_slot_takes_no_other_block():
    tier = HostTier(4, Rates())
    (slot, other) = tier.lend(2)
    labels = stored(tier, [1, 2, 3, 4])
    assert sum(map(tier.has, labels)) == 2
    tier.clear()
    assert sum(map(tier.has, stored(tier, [5, 6, 7, 8]))) == 2
    tier.reset()
    tier.take_back(slot, b"late")
    assert tier.find([b"late"]) == [slot] and not {slot, other} & set(tier._free)


def test_nobody_is_lent_what_a_copy_still_touches():
    tier = HostTier(4, Rates())
    stored(tier, [1, 2])  # by batch 1, which is under way
    touched = set(tier._slot_of.values())
    assert not set(tier.lend(4)) & touched
    tier = HostTier(4, Rates())
    tier.keep(b"1", 1)
    tier.begin()  # and nothing runs: the store is left for the next batch
    assert tier.finish(runs=False) is None
    assert not set(tier.lend(4)) & set(tier._slot_of.values())
    tier = HostTier(4, Rates())
    stored(tier, [1, 2])
    tier.reset()  # batch 1 is still under way
    assert tier.lend(4) == []
    tier.done = 1
    assert len(tier.lend(4)) == 2


def test_used_slots_are_lent_once_their_copies_are_done():
    tier = HostTier(2, Rates())
    labels = stored(tier, [1, 2])
    assert tier.lend(1) == []
    tier.done = 1
    tier.begin()
    (slot,) = tier.lend(1)
    assert [tier.has(label) for label in labels] == [True, False] or slot == 0
    assert len(tier.find(labels[:1])) + len(tier.find(labels[1:])) == 1


def test_what_was_stored_is_told_once_to_whoever_asks():
    tier = HostTier(4, Rates())
    stored(tier, [1])
    assert tier.take_stored() == []  # nobody asks
    tier.tells = True
    labels = stored(tier, [2, 3])
    assert sorted(tier.take_stored()) == sorted((label, *tier.find([label])) for label in labels)
    assert tier.take_stored() == []
    assert len(tier._lent) == 2
    stored(tier, [4])
    assert tier.take_stored() == []  # half of all slots are lent
    slots = list(tier._lent)
    for slot in slots:
        tier.take_back(slot)
    assert tier.find(labels) and not tier._lent


def test_of_a_prompt_that_is_too_long_the_beginning_is_told():
    """Nobody can use the rest without it. The end comes first, so that others give it up first."""
    tier = HostTier(8, Rates())
    tier.tells = True
    labels = stored(tier, range(6))
    assert [label for label, _ in tier.take_stored()] == labels[3::-1]


def test_of_a_slot_that_was_stored_twice_the_last_block_is_told():
    tier = HostTier(1, Rates())
    tier.tells = True
    for label, block in ((b"a", 1), (b"b", 2)):
        tier.keep(label, block)
    tier.begin()
    tier.finish(runs=True)
    ((label, slot),) = tier.take_stored()
    assert tier.find([label]) == [slot]


def test_what_waits_for_the_next_plan_is_not_told_yet():
    """A plan without a step leaves its stores to the next one: until that, the slot has what it had."""
    tier = HostTier(4, Rates(block_tokens=4))
    tier.tells = True
    tier.keep(b"a", 7)
    tier.begin()
    assert tier.finish(runs=False) is None
    assert tier.take_stored() == []
    tier.begin()
    ((block, slot),) = tier.finish(runs=True).stores
    assert block == 7 and tier.take_stored() == [(b"a", slot)] and tier.take_stored() == []


def test_a_batch_stores_one_block_in_a_slot():
    """Its copies have no order among each other."""
    tier = HostTier(2, Rates(block_tokens=4))
    tier.tells = True
    for block in range(5):
        tier.keep(b"%d" % block, block)
    tier.begin()
    stores = tier.finish(runs=True).stores
    assert sorted(slot for _, slot in stores) == [0, 1] and tier.stored == 2
    told = tier.take_stored()  # not both, for half of all slots are lent at most
    assert told and {(b"%d" % block, slot) for block, slot in stores}.issuperset(told)
    assert [tier.find([b"%d" % block]) for block, _ in stores] == [[slot] for _, slot in stores]

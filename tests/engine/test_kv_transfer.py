"""The engine's side of a connector, in small cases. Random ones: test_kv_transfer_stateful.py."""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from support.kv_connectors import AskedConnector, FailingConnector
from support.scheduling import add, make
from support.server import eventually
from support.waiting import PATIENCE

from tritonllm.config.engine import SchedulerConfig
from tritonllm.config.kv_transfer import KVTransferConfig
from tritonllm.engine.schedule.host_tier import HostTier
from tritonllm.engine.schedule.rates import Rates
from tritonllm.engine.schedule.scheduler import Scheduler
from tritonllm.engine.start.kv_start import make_transfer
from tritonllm.engine.transfer.transfer import KVTransfer


class Engine:
    """What an engine has of it, without a device; copies are done when they are begun."""

    def __init__(self, role="kv_both", connector=None, num_slots=20, num_blocks=20, timeout=10.0):
        config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=100)
        self.scheduler = Scheduler(config, 4, num_blocks, 1000, tier=HostTier(num_slots, Rates(block_tokens=4)))
        self.tier = self.scheduler.tier
        self.connector = connector or AskedConnector()
        self.weights = b"weights"
        config = KVTransferConfig(kv_connector="a:B", kv_role=role, kv_connector_extra_config={"timeout": timeout})
        self.transfer = make_transfer(config, self.connector, self.scheduler, [], lambda: self.weights)
        self.ran = []
        self.copies = SimpleNamespace(run=self.run, ending=lambda number: lambda: True)

    def run(self, transfers):
        self.ran.append(transfers)
        self.tier.done = transfers.number

    def step(self):
        plan = self.scheduler.schedule()
        for batch in (plan.transfers, plan.fills):
            if batch is not None and batch.number:
                self.tier.done = batch.number
        self.scheduler.update(plan, [[7] if item.samples else [] for item in plan.scheduled])
        self.transfer.after_step(self.copies, not self.scheduler.num_running, 0.0)
        return plan

    def answer(self, result):
        asked = self.connector.asked.pop(0)
        asked.future.set_result(result)
        self.transfer.follow(0.0)
        return asked

    def fetch(self, prompt=14, now=0.0):
        return self.transfer.fetch(make("a", prompt), {"from": "there"}, now)


def test_a_prompt_is_looked_up_then_loaded_then_found():
    engine = Engine()
    fetch = engine.fetch()
    lookup = engine.answer(2)
    assert (lookup.kind, len(lookup.keys), lookup.params) == ("lookup", 3, {"from": "there"})
    load = engine.connector.asked[0]
    assert (load.kind, load.keys, load.params) == ("load", lookup.keys[:2], {"from": "there"})
    assert not fetch.done and engine.tier.find(fetch.labels) == []
    engine.answer([True, True])
    assert fetch.done and engine.tier.find(fetch.labels) == load.slots
    assert engine.transfer.stats == (0, 2, 0)
    request = add(engine.scheduler, "a", 14)
    plan = engine.step()  # nobody else runs: it waits for the copies on the device
    assert request.num_cached_tokens == 8 and [slot for slot, _ in plan.transfers.loads] == load.slots


def test_what_did_not_come_is_computed():
    engine = Engine()
    fetch = engine.fetch(18)
    engine.answer(4)
    load = engine.answer([True, False, True, True])
    assert fetch.done and engine.tier.find(fetch.labels) == load.slots[:1]
    assert engine.transfer.stats == (0, 3, 1)


@pytest.mark.parametrize("count", [0, None])
def test_nothing_there(count):
    engine = Engine()
    fetch = engine.fetch()
    engine.answer(count)
    assert fetch.done and not engine.connector.asked


@pytest.mark.parametrize(("count", "missed"), [(0, 3), (None, 3), (2, 1), (3, 0)])
def test_what_the_named_engine_should_have_is_missed(count, missed):
    engine = Engine()
    engine.transfer.fetch(make("a", 14), {"remote_host": "there"}, 0.0)
    engine.answer(count)
    assert engine.transfer.stats == (0, 0, missed)


def test_no_question_about_what_is_here_or_must_be_computed():
    engine = Engine()
    assert engine.fetch(4) is None  # its last token is computed in any case
    add(engine.scheduler, "a", 14, 15)
    engine.step()
    assert engine.fetch(14) is None  # on the device
    assert engine.fetch(18).labels == engine.scheduler.prefix_cache.labels(make("a", 18))[3:]
    assert engine.transfer.fetch(make("a", 30, prompt_logprobs=0), {}, 0.0) is None
    assert Engine("kv_producer").fetch() is None


def test_what_the_host_has_is_not_asked_for():
    engine = Engine()
    first = engine.fetch(14)
    engine.answer(3)
    engine.answer([True] * 3)
    assert first.done and engine.fetch(14) is None
    assert len(engine.fetch(30).labels) == 4


@pytest.mark.parametrize("streams", [True, False])
def test_stored_blocks_are_saved_even_if_no_step_follows(streams):
    """They go with the step that fills them, or in a batch of their own behind it."""
    engine = Engine()
    engine.tier.streams = streams
    add(engine.scheduler, "a", 14, 15)
    plan = engine.step()
    (save,) = engine.connector.asked
    (batch,) = [plan.fills] if streams else engine.ran
    assert save.kind == "save" and len(engine.ran) == (not streams)
    assert sorted(save.slots) == sorted(slot for _, slot in batch.stores) and len(save.slots) == 3
    engine.answer(3)
    assert engine.transfer.stats == (3, 0, 0)
    other = Engine()
    other.fetch()
    assert set(save.keys) == set(other.connector.asked[0].keys)  # what it looks for
    consumer = Engine("kv_consumer")
    add(consumer.scheduler, "a", 14, 15)
    consumer.step()
    assert not consumer.connector.asked


def test_what_was_saved_is_counted_although_no_step_follows():
    engine = Engine()
    add(engine.scheduler, "a", 14, 15)
    assert not engine.transfer.is_saving
    engine.step()
    assert engine.transfer.is_saving and engine.transfer.stats == (0, 0, 0)
    engine.connector.asked.pop().future.set_result(3)
    assert engine.transfer.stats == (3, 0, 0) and not engine.transfer.is_saving
    assert len(engine.tier.lend(20)) == 10  # its slots are back


def test_what_was_brought_does_not_count_as_saved():
    """The tier gives it up while the device has it, and gets it back from there."""
    engine = Engine(num_slots=4)
    prompt = make("a", 14).prompt_token_ids
    engine.fetch()
    engine.answer(2)
    engine.answer([True, True])
    add(engine.scheduler, "a", prompt, 15)
    for _ in range(3):
        engine.step()
    (save,) = engine.connector.asked
    assert len(save.keys) == 1  # the third one
    engine.answer(1)
    assert engine.transfer.stats == (1, 2, 0)
    add(engine.scheduler, "b", 18, 19)
    for _ in range(3):
        engine.step()
    while engine.connector.asked:
        engine.answer(len(engine.connector.asked[0].keys))
    before = engine.transfer.stats.kv_saved_blocks
    add(engine.scheduler, "c", [*prompt, 1, 2, 3, 4], 19)  # a block more
    for _ in range(3):
        engine.step()
    saved = []
    while engine.connector.asked:
        asked = engine.answer(len(engine.connector.asked[0].keys))
        saved += asked.keys
    brought = {engine.transfer._key(label) for label in engine.scheduler.prefix_cache.labels(make("a", prompt))[:2]}
    own = len(set(saved) - brought)
    assert brought & set(saved)  # they are handed out: others may have given them up
    assert engine.transfer.stats == (before + own, 2, 0)


def test_what_was_brought_and_is_computed_again_counts():
    engine = Engine(num_slots=4, num_blocks=8)
    prompt = make("a", 14).prompt_token_ids
    engine.fetch()
    engine.answer(2)
    engine.answer([True, True])
    add(engine.scheduler, "b", 30, 31)  # takes both memories
    for _ in range(3):
        engine.step()
    while engine.connector.asked:
        engine.answer(len(engine.connector.asked[0].keys))
    engine.transfer._brought.update(b"%d" % n for n in range(100))  # of long ago
    engine.fetch()
    engine.answer(0)
    before = engine.transfer.stats.kv_saved_blocks
    add(engine.scheduler, "a", prompt, 15)
    for _ in range(3):
        engine.step()
    count = 0
    while engine.connector.asked:
        count += len(engine.answer(len(engine.connector.asked[0].keys)).keys)
    assert count and engine.transfer.stats == (before + count, 2, 0)
    engine.transfer._limit_brought()
    assert not engine.transfer._brought


def test_a_slot_that_is_being_saved_keeps_its_block():
    engine = Engine(num_slots=4)
    add(engine.scheduler, "a", 10, 11)
    engine.step()
    save = engine.connector.asked[0]
    labels = engine.scheduler.prefix_cache.labels(make("a", 10))
    add(engine.scheduler, "b", 38, 39)
    engine.step()
    assert sorted(engine.tier.find(labels)) == sorted(save.slots)
    assert len(engine.connector.asked) == 1  # half of the slots are lent: no more are
    engine.answer(2)
    add(engine.scheduler, "c", 38, 39)
    engine.step()
    assert engine.tier.find(labels) == []


def test_other_weights_have_other_keys_and_what_comes_late_is_dropped():
    engine = Engine()
    fetch = engine.fetch()
    lookup = engine.answer(3)
    engine.weights = b"others"
    engine.transfer.rename()
    engine.answer([True] * 3)
    assert fetch.done and engine.tier.find(fetch.labels) == [] and engine.transfer.stats == (0, 0, 0)
    engine.fetch()
    assert not set(engine.connector.asked[0].keys) & set(lookup.keys)


def test_a_connector_that_hangs_is_asked_no_more_until_it_answers(caplog):
    engine = Engine(timeout=2.0)
    first, second = engine.fetch(14, now=100.0), engine.fetch(15, now=101.0)
    engine.answer(2)  # the first one's slots are lent now
    engine.transfer.follow(101.9)
    assert not first.done and not second.done
    engine.transfer.follow(102.0)
    assert first.done and not second.done
    assert engine.fetch() is None
    engine.transfer.follow(103.0)
    assert second.done and len(engine.connector.asked) == 2
    assert caplog.text.count("has not answered within 2 s where 3 blocks of a prompt are") == 1
    engine.answer(1)  # late
    assert engine.fetch() is None
    late = engine.answer([True, True])
    assert engine.tier.find(first.labels) == late.slots  # of use to others
    assert engine.fetch(30) is not None


def test_who_finds_no_slot_waits_and_the_others_behind_it_too():
    engine = Engine(num_slots=4, timeout=5.0)
    fetches = [engine.transfer.fetch(make(name, 14), {}, 0.0) for name in "abc"]
    for _ in fetches:
        engine.connector.asked.pop(0).future.set_result(3)
    engine.transfer.follow(0.0)
    (load,) = engine.connector.asked
    assert len(load.slots) == 2  # half of them
    engine.answer([True, True])
    assert [fetch.done for fetch in fetches] == [True, False, False]
    (load,) = engine.connector.asked
    assert load.keys == list(fetches[1].keys[:2])
    engine.transfer.follow(5.0)
    assert all(fetch.done for fetch in fetches) and len(engine.connector.asked) == 1
    engine.answer([False, False])
    assert engine.tier.lend(9) and engine.fetch() is not None  # nobody is owed anything


def test_after_a_reset_slots_come_back_late():
    engine = Engine(num_slots=4)
    fetch = engine.fetch()
    engine.answer(3)
    engine.scheduler.reset()
    engine.transfer.reset()
    load = engine.connector.asked[0]
    assert not set(engine.tier.lend(4)) & set(load.slots) and engine.fetch() is None
    engine.answer([True] * 2)
    assert engine.tier.find(fetch.labels) == load.slots and engine.fetch() is not None


def test_a_connector_that_raises_is_a_miss(caplog):
    engine = Engine(connector=FailingConnector())
    fetch = engine.fetch()
    engine.transfer.follow(0.0)
    assert fetch.done and "out of order" in caplog.text
    add(engine.scheduler, "a", 14, 15)
    engine.step()
    engine.transfer.follow(0.0)
    assert engine.transfer.stats == (0, 0, 0)
    assert len(engine.tier.lend(20)) == 10  # its slots are back


def test_the_connector_is_closed_with_the_engine():
    engine = Engine()
    connector = engine.connector
    assert isinstance(engine.transfer, KVTransfer) and connector.memory == []
    del engine
    gc.collect()
    assert connector.closed == 1


class ThreadedConnector(AskedConnector):
    """Waits for its own thread when it is closed."""

    def __init__(self):
        super().__init__()
        self.thread = ThreadPoolExecutor(1)

    def close(self):
        self.thread.shutdown()
        super().close()


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_an_engine_that_ends_in_the_connectors_own_thread_closes_it_all_the_same():
    connector = ThreadedConnector()
    engines, begun = [Engine(connector=connector)], threading.Event()

    def find_garbage():
        begun.wait(PATIENCE)
        gc.collect()

    found = connector.thread.submit(find_garbage)
    gc.disable()
    try:
        engines.clear()
        begun.set()
        found.result(PATIENCE)
    finally:
        gc.enable()
    eventually(lambda: connector.closed == 1)

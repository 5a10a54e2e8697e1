"""The connector that copies blocks out of another engine's GPU memory, with shared memory of the host in its place
(:mod:`support.ipc_memory`). What it has of ``Peer`` is tested there (test_kv_peer.py)."""

import logging
import random
import threading
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.ipc_engines import ipc_engines, once
from support.ipc_memory import Host, device_slots
from support.nixl_agents import Network
from support.server import eventually
from support.small_slots import ALL, KEYS, SIZE, SLOTS, check_harm, loaded, memory, saved
from support.waiting import PATIENCE

from tritonllm.config.kv_transfer import KVTransferConfig
from tritonllm.engine.transfer import ipc as kv_ipc
from tritonllm.engine.transfer import peer_client as kv_peer_client
from tritonllm.engine.transfer import settings as kv_settings
from tritonllm.engine.transfer.ipc import DeviceReads
from tritonllm.engine.transfer.ipc_memory import arena_bytes
from tritonllm.engine.transfer.nixl import Reads
from tritonllm.engine.transfer.peer import Peer, PeerSettings
from tritonllm.engine.transfer.plane import Frames
from tritonllm.engine.transfer.settings import make_connector
from tritonllm.engine.transfer.wire import places_frame

FIRST_BYTES = 400  # of an answer, and more: the description, the places and which still are


@pytest.fixture
def host():
    return Host()


@pytest.fixture
def engines(host):
    with ipc_engines(host) as start:
        yield start


def test_blocks_go_from_engine_to_engine(host, engines):
    there = memory(100)
    producer, consumer = engines("kv_producer"), engines("kv_consumer", there)
    offer = saved(producer, [4, 3, 2, 1, 0])
    assert producer.save(KEYS[:5], ALL[:5], lambda: True).result(PATIENCE) == 0  # they are there
    assert consumer.lookup(KEYS[:5], offer).result(PATIENCE) == 5
    assert consumer.load(KEYS, ALL, offer).result(PATIENCE) == [True] * 5 + [False] * 2
    assert loaded(there) == [0, 1, 2, 3, 4, 105, 106]
    assert consumer.load(KEYS[:1], [6], offer).result(PATIENCE) == [True] and loaded(there)[6] == 0
    assert len(host.opened) == 1  # once for both


def test_both_ways(host, engines):
    slots, there = memory(), memory(100)
    one, other = engines("kv_both", slots), engines("kv_both", there)
    assert other.load(KEYS, ALL, saved(one)).result(PATIENCE) == [True] * SLOTS and loaded(there) == ALL
    for part in slots:
        part[:] = 50
    assert one.load(KEYS, ALL, saved(other)).result(PATIENCE) == [True] * SLOTS and loaded(slots) == ALL
    assert len(host.owned) == len(host.opened) == 2


def test_copies_outlive_the_slots_and_neighbours_are_one_copy(host, engines):
    begun = []
    host.before_copy = lambda spans: begun.append([nbytes for _, _, nbytes in spans])
    slots, there = memory(), memory(100)
    producer, consumer = engines("kv_producer", slots), engines("kv_consumer", there)
    offer = saved(producer)
    for part in slots:
        part[:] = 99
    assert consumer.load(KEYS[1:6], ALL[1:6], offer).result(PATIENCE) == [True] * 5
    assert loaded(there) == [100, 1, 2, 3, 4, 5, 106]
    assert consumer.load([KEYS[5], KEYS[0], KEYS[1]], [0, 5, 6], offer).result(PATIENCE) == [True] * 3
    assert loaded(there) == [5, 1, 2, 3, 4, 0, 1]
    assert begun == [[7 * 24, 7 * 5], [5 * 24, 5 * 5], [24, 2 * 24, 5, 2 * 5]]


def test_blocks_that_are_saved_from_the_end_of_a_prompt_are_one_copy_all_the_same(host, engines):
    """So the tier tells of them (test_host_tier.py); of what is kept the end goes first."""
    begun, there = [], memory(100)
    host.before_copy = lambda spans: begun.append([nbytes for _, _, nbytes in spans])
    producer, consumer = engines("kv_producer"), engines("kv_consumer", there)
    offer = saved(producer, [6, 5, 4, 3, 2, 1, 0])
    assert [*producer.kept._blocks] == KEYS[::-1]
    assert consumer.load(KEYS, ALL, offer).result(PATIENCE) == [True] * SLOTS and loaded(there) == ALL
    assert begun == [[7 * 24, 7 * 5]] * 2


def test_many_come_in_several_answers_and_copies(host, engines, monkeypatch):
    monkeypatch.setattr(kv_ipc, "FIRST", 1)
    monkeypatch.setattr(kv_ipc, "TOGETHER", 2)
    monkeypatch.setattr(kv_ipc, "SAVED_BYTES", 3 * SIZE)
    begun, there = [], memory(100)
    host.before_copy = lambda spans: begun.append(1)
    producer, consumer = engines("kv_producer"), engines("kv_consumer", there)
    assert consumer.load(KEYS, ALL, saved(producer)).result(PATIENCE) == [True] * SLOTS and loaded(there) == ALL
    assert len(begun) == 3 + 4


def test_places_are_used_again(host, engines):
    there = memory(100)
    producer, consumer = engines("kv_producer", max_bytes=3 * SIZE + 5), engines("kv_consumer", there, wait=0)
    offer = saved(producer)
    assert (len(producer.kept), producer.kept.num_bytes) == (3, 3 * SIZE)
    assert consumer.load(KEYS, ALL, offer).result(PATIENCE) == [False] * 4 + [True] * 3
    assert loaded(there) == [100, 101, 102, 103, 4, 5, 6]
    for number in (1, 2, 0):
        saved(producer, [number])
        assert consumer.load([KEYS[number]], [0], offer).result(PATIENCE) == [True] and loaded(there)[0] == number
    ((memory_of_copies, _),) = host.owned.values()
    assert len(memory_of_copies) == arena_bytes(3, (24, 5)) == 2 * 512


def test_a_place_that_is_another_blocks_by_now_is_a_miss(host, engines, caplog):
    there = memory(100)
    producer, consumer = engines("kv_producer", max_bytes=3 * SIZE), engines("kv_consumer", there)
    offer = saved(producer, [0, 1, 2])
    once(host, lambda: saved(producer, [3]))
    with caplog.at_level("INFO"):
        came = consumer.load(KEYS[:3], [0, 1, 2], offer).result(PATIENCE)
    assert sum(came) == 2 and "1 blocks were given up for others while they were copied" in caplog.text
    assert [there[0][n, 0] for n in range(3) if came[n]] == [n for n in range(3) if came[n]]


def test_a_block_that_was_given_up_and_came_back_meanwhile_is_a_miss(host, engines):
    """Key and place are the same, and yet another block was there while it was read."""
    producer, consumer = engines("kv_producer", max_bytes=2 * SIZE), engines("kv_consumer")
    offer = saved(producer, [0, 1])
    places = [one.place for one in producer.kept.find(KEYS[:2])]

    def change():
        for numbers in ([2, 3], [0, 1]):
            saved(producer, numbers)
        assert [one.place for one in producer.kept.find(KEYS[:2])] == places

    once(host, change)
    assert consumer.load(KEYS[:2], [0, 1], offer).result(PATIENCE) == [False, False]
    assert consumer.load(KEYS[:2], [0, 1], offer).result(PATIENCE) == [True, True]


def test_what_is_old_is_given_up_while_it_is_read(host, engines, monkeypatch):
    producer, consumer = engines("kv_producer", max_age=50.0), engines("kv_consumer")
    offer, now = saved(producer, [0, 1]), time.monotonic
    assert consumer.load(KEYS[:2], [0, 1], offer).result(PATIENCE) == [True, True]

    def change():
        monkeypatch.setattr("tritonllm.engine.transfer.kept.time.monotonic", lambda: now() + 100.0)
        producer.kept.has(KEYS[5])
        monkeypatch.undo()

    once(host, change)
    assert consumer.load(KEYS[:2], [0, 1], offer).result(PATIENCE) == [False, False]


def test_random_loads_while_others_are_saved_bring_no_wrong_block(engines):
    there, luck = memory(100), random.Random(7)
    producer, consumer = engines("kv_producer", max_bytes=4 * SIZE), engines("kv_consumer", there, wait=0)
    offer, over = producer.offer(), threading.Event()

    def save():
        luck = random.Random(8)
        while not over.is_set():
            some = luck.sample(ALL, luck.randint(1, 4))
            producer.save([KEYS[n] for n in some], some, lambda: True).result(PATIENCE)

    saver = threading.Thread(target=save)
    saver.start()
    brought = 0
    for _ in range(150):
        consumer._peers._peers.clear()  # it is not left alone for its misses
        some = luck.sample(ALL, 4)
        came = consumer.load([KEYS[n] for n in some], [0, 1, 2, 3], offer).result(PATIENCE)
        for slot, (number, is_there) in enumerate(zip(some, came, strict=True)):
            if is_there:
                brought += 1
                assert all((part[slot] == number).all() for part in there)
    over.set()
    saver.join(PATIENCE)
    assert brought


def test_blocks_of_a_prompt_that_is_computed_still_come_one_by_one(engines, monkeypatch):
    monkeypatch.setattr(kv_ipc, "PENDING", 3)
    there = memory(100)
    producer, consumer = engines("kv_producer"), engines("kv_consumer", there)
    params = {**producer.offer(), "pending": True}
    assert consumer.lookup(KEYS, params).result(PATIENCE) == SLOTS
    came = consumer.load(KEYS, ALL, params)
    for number in ALL:
        assert not came.done()
        saved(producer, [number])
    assert came.result(PATIENCE) == [True] * SLOTS and loaded(there) == ALL


def test_blocks_that_never_come_are_misses_in_time(engines, monkeypatch):
    monkeypatch.setattr(kv_ipc, "PENDING", 2)
    producer, consumer = engines("kv_producer"), engines("kv_consumer", timeout=8.0)
    params = {**saved(producer, [0, 1]), "pending": True}
    assert consumer.load(KEYS, ALL, params).result(PATIENCE) == [True, True] + [False] * 5


@pytest.mark.parametrize("fault", ["refuse", "break", "closed"])
def test_whatever_fails_is_a_miss_and_the_peer_is_left_alone(host, engines, fault, caplog, monkeypatch):
    there = memory(100)
    producer, other, consumer = engines("kv_producer"), engines("kv_producer"), engines("kv_consumer", there)
    offer, elsewhere = saved(producer), saved(other)
    host.fault = fault
    why = {"refuse": "the device is gone", "break": "the device has failed", "closed": "no way to that GPU"}[fault]
    for _ in range(kv_peer_client.FAILURES):
        assert not any(consumer.load(KEYS, ALL, offer).result(PATIENCE))
        assert not host.running
    assert caplog.text.count(f"gives no blocks ({why}): they are computed") == kv_peer_client.FAILURES
    host.fault = None
    assert not any(consumer.load(KEYS, ALL, offer).result(PATIENCE))
    assert consumer.load(KEYS, ALL, elsewhere).result(PATIENCE) == [True] * SLOTS and loaded(there) == ALL
    now = time.monotonic
    monkeypatch.setattr(kv_peer_client.time, "monotonic", lambda: now() + kv_peer_client.REST)
    assert consumer.load(KEYS, ALL, offer).result(PATIENCE) == [True] * SLOTS


@pytest.mark.parametrize("fault", ["refuse", "break"])
def test_what_cannot_be_copied_is_not_kept(host, engines, fault, caplog):
    producer = engines("kv_producer", max_bytes=3 * SIZE)
    host.fault = fault
    assert producer.save(KEYS, ALL, lambda: True).result(PATIENCE) == 0 and "cannot be kept" in caplog.text
    host.fault = None
    assert saved(producer) and len(producer.kept) == 3


def test_engines_with_other_connectors_give_nothing(engines, caplog):
    network = Network()
    here, frames, reads = (engines("kv_producer", plane=plane) for plane in (None, Frames(), Reads(network.agent)))
    offers = [saved(one) for one in (here, frames, reads)]
    consumer = engines("kv_consumer", wait=0)
    for offer in offers[1:]:
        assert consumer.load(KEYS, ALL, offer).result(PATIENCE) == [False] * SLOTS
    assert "it has another kv_connector" in caplog.text
    for plane in (Frames(), Reads(network.agent)):
        assert engines("kv_consumer", plane=plane).load(KEYS, ALL, offers[0]).result(PATIENCE) == [False] * SLOTS


def test_blocks_of_other_sizes_are_not_read(engines, caplog):
    other = [np.zeros((SLOTS, 24), np.uint8)]
    producer, consumer = engines("kv_producer", other), engines("kv_consumer")
    assert consumer.load(KEYS, ALL, saved(producer)).result(PATIENCE) == [False] * SLOTS
    assert "other sizes" in caplog.text


@pytest.mark.parametrize("place", [-2, 200, 1 << 62])
def test_a_place_that_is_none_is_refused(engines, monkeypatch, caplog, place):
    monkeypatch.setattr(kv_ipc, "places_frame", lambda places: places_frame([place] * len(places)))
    producer, consumer = engines("kv_producer", max_bytes=7 * SIZE), engines("kv_consumer")
    assert consumer.load(KEYS, ALL, saved(producer)).result(PATIENCE) == [False] * SLOTS
    assert "there is no such place" in caplog.text


@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=st.sampled_from(["cut", "drop", "flip", "double"]), place=st.integers(0, FIRST_BYTES))
def test_harm_on_the_way_never_gives_a_wrong_block(engines, kind, place):
    check_harm(engines, 2.0, kind, place)


def test_closing_ends_what_is_under_way(engines):
    producer, consumer = engines("kv_producer"), engines("kv_consumer", timeout=1000.0)
    came = consumer.load(KEYS, ALL, {**saved(producer, [0]), "pending": True})
    eventually(lambda: producer._plane._holders)
    consumer.close()
    assert came.result(PATIENCE) == [False] * SLOTS
    assert consumer.load(KEYS, ALL, producer.offer()).result(0) == [False] * SLOTS
    producer.close()
    assert producer.save(KEYS, ALL, lambda: True).result(0) == 0


def made(role="kv_both", plane=None):
    return Peer(KVTransferConfig(kv_connector="CudaIpc", kv_role=role), PeerSettings(peers=["*"]), plane)


def test_what_cannot_start(host):
    def no_device(index):
        raise OSError("no driver")

    for role in ("kv_producer", "kv_consumer"):
        peer = made(role, DeviceReads(no_device))
        with pytest.raises(ValueError, match=r"kv_connector='CudaIpc' cannot start here \(no driver\): take 'Peer'"):
            peer.register(device_slots(memory()))
        peer.close()
    host.fault = "full"
    peer = made(plane=DeviceReads(host.device))
    with pytest.raises(ValueError, match=r"max_bytes=.* of the GPU's memory cannot be had \(out of memory\): lower it"):
        peer.register(device_slots(memory()))
    peer.close()
    peer = made(plane=DeviceReads(host.device))
    with pytest.raises(ValueError, match="needs slots in a device's memory"):
        peer.register(memory())
    peer.close()


@pytest.mark.parametrize("plane", [Frames(), Reads(lambda: None)])
def test_others_need_slots_in_the_hosts_memory(plane):
    peer = made(plane=plane)
    with pytest.raises(ValueError, match="needs slots in the host's memory"):
        peer.register(device_slots(memory()))
    peer.close()


def test_a_machine_without_a_gpu_is_told_to_take_peer(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    config = KVTransferConfig(kv_connector="CudaIpc", kv_connector_extra_config={"peers": ["*"]})
    with pytest.raises(ValueError, match=r"kv_connector='CudaIpc' needs a CUDA device.*none here: take 'Peer'"):
        make_connector(config)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    connector = make_connector(config)  # and where the engine runs on the CPU
    with pytest.raises(ValueError, match=r"needs a CUDA device, and this engine runs on the CPU: take 'Peer'"):
        connector.register(device_slots(memory()))
    connector.close()


def test_its_settings_are_those_of_peer(host, monkeypatch, caplog):
    monkeypatch.setattr(kv_settings, "load_cuda", lambda: host.device)
    with pytest.raises(ValueError, match="'path' is none of CudaIpc's; there are host, port, advertised_host, peers"):
        make_connector(KVTransferConfig(kv_connector="CudaIpc", kv_connector_extra_config={"path": "x"}))
    with pytest.raises(ValueError, match="max_bytes must be"):
        make_connector(
            KVTransferConfig(
                kv_connector="CudaIpc", kv_role="kv_producer", kv_connector_extra_config={"max_bytes": "4"}
            )
        )
    extra = {"max_bytes": 10 * SIZE}
    with caplog.at_level(logging.INFO):
        config = KVTransferConfig(kv_connector="CudaIpc", kv_role="kv_producer", kv_connector_extra_config=extra)
        connector = make_connector(config)
        connector.register(device_slots(memory()))
    assert "blocks of the cache are served at 127.0.0.1" in caplog.text and connector._plane._arena.places == 10
    connector.close()
    assert not host.owned

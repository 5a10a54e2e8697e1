"""The connector that reads blocks out of another engine's memory, with agents that stand in for NIXL's
(:mod:`support.nixl_agents`). What it has of ``Peer`` is tested there (test_kv_peer.py)."""

import logging
import sys
import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.nixl_agents import Network
from support.server import eventually
from support.small_slots import ALL, KEYS, SLOTS, check_harm, loaded, memory, saved
from support.waiting import PATIENCE

from tritonllm.config.kv_transfer import KVTransferConfig
from tritonllm.engine.transfer import nixl as kv_nixl
from tritonllm.engine.transfer import peer_client as kv_peer_client
from tritonllm.engine.transfer.nixl import Reads
from tritonllm.engine.transfer.peer import Peer, PeerSettings
from tritonllm.engine.transfer.plane import Frames
from tritonllm.engine.transfer.settings import make_connector
from tritonllm.engine.transfer.wire import BlockPlace

PLACE = 32 + 16 + 32 + 8  # bytes of a frame
AGENT = 32 + len("agent 0")


@pytest.fixture
def network():
    return Network()


@pytest.fixture
def engines(network):
    """``engines(role, slots, ...)`` makes a connector; at the end all are closed, and neither a thread nor an agent of
    theirs is left."""
    before, opened = set(threading.enumerate()), []

    def start(role, slots=None, timeout=PATIENCE, plane=Reads, **extra):
        config = KVTransferConfig(kv_connector="Nixl", kv_role=role, kv_connector_extra_config={"timeout": timeout})
        own = plane(network.agent) if plane is Reads else plane()
        opened.append(Peer(config, PeerSettings(**{"peers": ["127.0.0.1"], **extra}), own))
        opened[-1].register(memory() if slots is None else slots)
        return opened[-1]

    yield start
    for connector in opened:
        connector.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE)
        assert not thread.is_alive(), thread
    assert network.living == 0


def test_blocks_go_from_engine_to_engine(network, engines):
    there = memory(100)
    producer, consumer = engines("kv_producer"), engines("kv_consumer", there)
    offer = saved(producer, [4, 3, 2, 1, 0])
    assert consumer.lookup(KEYS[:5], offer).result(PATIENCE) == 5
    assert consumer.load(KEYS, ALL, offer).result(PATIENCE) == [True] * 5 + [False] * 2
    assert loaded(there) == [0, 1, 2, 3, 4, 105, 106]
    assert len(network.agents) == 2 and len(producer._server._served) == 1


def test_both_ways(network, engines):
    slots, there = memory(), memory(100)
    one, other = engines("kv_both", slots), engines("kv_both", there)
    assert other.load(KEYS, ALL, saved(one)).result(PATIENCE) == [True] * SLOTS and loaded(there) == ALL
    for part in slots:
        part[:] = 50
    assert one.load(KEYS, ALL, saved(other)).result(PATIENCE) == [True] * SLOTS and loaded(slots) == ALL
    assert len(network.agents) == 4  # what is read and what reads are apart


@pytest.mark.parametrize("batch", [29, 3 * 29, 1 << 20])
def test_copies_outlive_the_slots_and_come_in_batches(network, engines, batch, monkeypatch):
    monkeypatch.setattr(kv_nixl, "BATCH_BYTES", batch)
    monkeypatch.setattr(kv_nixl, "TOGETHER", 2)
    reads = []
    network.before_read = lambda: reads.append(1)
    slots, there = memory(), memory(100)
    producer, consumer = engines("kv_producer", slots), engines("kv_consumer", there)
    offer = saved(producer)
    for part in slots:
        part[:] = 99
    assert consumer.load(KEYS, ALL, offer).result(PATIENCE) == [True] * SLOTS and loaded(there) == ALL
    assert len(reads) >= SLOTS * 29 / batch


def test_places_are_used_again(engines):
    there = memory(100)
    producer, consumer = engines("kv_producer", max_bytes=3 * 29), engines("kv_consumer", there, wait=0)
    offer = saved(producer)
    assert (len(producer.kept), producer.kept.num_bytes) == (3, 3 * 29)
    assert consumer.load(KEYS, ALL, offer).result(PATIENCE) == [False] * 4 + [True] * 3
    assert loaded(there) == [100, 101, 102, 103, 4, 5, 6]
    assert saved(producer, [1]) and len(producer._plane._copies) == 4
    assert consumer.load(KEYS[1:2], [0], offer).result(PATIENCE) == [True] and loaded(there)[0] == 1


def test_a_place_that_is_another_blocks_by_now_is_a_miss(network, engines, caplog):
    there = memory(100)
    producer, consumer = engines("kv_producer", max_bytes=3 * 29), engines("kv_consumer", there)
    offer = saved(producer, [0, 1, 2])

    def before_read():
        network.before_read = lambda: None
        saved(producer, [3, 4])  # the first one goes to the place that is free, the second one to that of block 0 or 2

    network.before_read = before_read
    came = consumer.load(KEYS[:3], [0, 1, 2], offer).result(PATIENCE)
    assert sum(came) == 2 and "1 blocks were other ones by the time" in caplog.text
    assert [there[0][n, 0] for n in range(3) if came[n]] == [n for n in range(3) if came[n]]


def test_blocks_of_a_prompt_that_is_computed_still_come_one_by_one(engines):
    there = memory(100)
    producer, consumer = engines("kv_producer"), engines("kv_consumer", there)
    params = {**producer.offer(), "pending": True}
    assert consumer.lookup(KEYS, params).result(PATIENCE) == SLOTS
    came = consumer.load(KEYS, ALL, params)
    for number in ALL:
        assert not came.done()
        saved(producer, [number])
        eventually(lambda last=number: there[0][last, 0] == last)
    assert came.result(PATIENCE) == [True] * SLOTS and loaded(there) == ALL


def test_blocks_that_never_come_are_misses_in_time(engines):
    producer, consumer = engines("kv_producer"), engines("kv_consumer", timeout=4.0)
    params = {**saved(producer, [0, 1]), "pending": True}
    assert consumer.load(KEYS, ALL, params).result(PATIENCE) == [True, True] + [False] * 5


@pytest.mark.parametrize("fault", ["refuse", "break", "flip", "stall"])
def test_whatever_fails_is_a_miss_and_the_peer_is_left_alone(network, engines, fault, monkeypatch):
    there, seconds = memory(100), 3.0 if fault == "stall" else 200.0
    producer, other, consumer = engines("kv_producer"), engines("kv_producer"), engines("kv_consumer", there, seconds)
    offer, elsewhere = saved(producer), saved(other)
    network.fault, asked = fault, []
    network.before_read = lambda: asked.append(1)
    for _ in range(kv_peer_client.FAILURES):
        came = consumer.load(KEYS, ALL, offer).result(PATIENCE)
        assert 0 < sum(came) < SLOTS if fault == "flip" else not any(came)
    count = len(asked)
    assert not any(consumer.load(KEYS, ALL, offer).result(PATIENCE)) and len(asked) == count >= kv_peer_client.FAILURES
    consumer._timeout = 200.0
    network.fault = None
    for part in there:
        part[:] = 77  # the slots are others' now
    assert network.arrive_late() == 0 and loaded(there) == [77] * SLOTS
    assert consumer.load(KEYS, ALL, elsewhere).result(PATIENCE) == [True] * SLOTS and loaded(there) == ALL
    now = time.monotonic
    monkeypatch.setattr(kv_peer_client.time, "monotonic", lambda: now() + kv_peer_client.REST)
    assert consumer.load(KEYS, ALL, offer).result(PATIENCE) == [True] * SLOTS


def test_blocks_before_a_failure_count(network, engines, monkeypatch):
    monkeypatch.setattr(kv_nixl, "BATCH_BYTES", 2 * 29)
    there, reads = memory(100), []
    producer, consumer = engines("kv_producer"), engines("kv_consumer", there)

    def before_read():
        reads.append(1)
        network.fault = "break" if len(reads) == 3 else None

    network.before_read = before_read
    came = consumer.load(KEYS, ALL, saved(producer)).result(PATIENCE)
    count = sum(came)
    assert 2 <= count <= 4 and came == [True] * count + [False] * (SLOTS - count)
    assert there[0][:count, 0].tolist() == ALL[:count]


def test_a_peer_that_comes_back_is_another_agent(network, engines):
    there = memory(100)
    producer, consumer = engines("kv_producer"), engines("kv_consumer", there)
    offer = saved(producer)
    assert consumer.load(KEYS[:1], [0], offer).result(PATIENCE) == [True]
    producer.close()
    assert consumer.load(KEYS[:1], [1], offer).result(PATIENCE) == [False]
    saved(engines("kv_producer", port=offer["remote_port"]))
    assert consumer.load(KEYS, ALL, offer).result(PATIENCE) == [True] * SLOTS and loaded(there) == ALL


def test_an_engine_with_peer_can_have_its_blocks_but_not_the_other_way(engines):
    there, nothing = memory(100), memory(100)
    reads, frames = engines("kv_producer"), engines("kv_producer", plane=Frames)
    offers = saved(reads), saved(frames)
    assert engines("kv_consumer", there, plane=Frames).load(KEYS, ALL, offers[0]).result(PATIENCE) == [True] * SLOTS
    assert loaded(there) == ALL
    assert engines("kv_consumer", nothing).load(KEYS, ALL, offers[1]).result(PATIENCE) == [False] * SLOTS


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=st.sampled_from(["cut", "drop", "flip", "double"]), place=st.integers(0, AGENT + SLOTS * PLACE - 1))
def test_harm_on_the_way_never_gives_a_wrong_block(engines, kind, place):
    check_harm(engines, 6.0, kind, place)


def test_an_address_that_is_none_is_refused(engines, monkeypatch, caplog):
    monkeypatch.setattr(kv_nixl, "BlockPlace", lambda head, address: BlockPlace(head, 1 << 63))
    producer, consumer = engines("kv_producer"), engines("kv_consumer")
    assert consumer.load(KEYS, ALL, saved(producer)).result(PATIENCE) == [False] * SLOTS
    assert "no block can lie at such an address" in caplog.text


def test_closing_ends_what_is_under_way(network, engines):
    producer, consumer = engines("kv_producer"), engines("kv_consumer", timeout=1000.0)
    network.fault = "stall"
    came = consumer.load(KEYS, ALL, saved(producer))
    eventually(lambda: network.stalled)
    consumer.close()
    assert came.result(0) == [False] * SLOTS and network.arrive_late() == 0
    assert consumer.load(KEYS, ALL, producer.offer()).result(0) == [False] * SLOTS
    producer.close()
    assert producer.save(KEYS, ALL, lambda: True).result(0) == 0


def test_what_cannot_start(network):
    def no_agent():
        raise OSError("no UCX here")

    for role in ("kv_producer", "kv_consumer"):
        peer = Peer(KVTransferConfig(kv_connector="Nixl", kv_role=role), PeerSettings(peers=["*"]), Reads(no_agent))
        with pytest.raises(ValueError, match=r"kv_connector='Nixl' cannot start here \(no UCX here\): take 'Peer'"):
            peer.register(memory())
        peer.close()
    peer = Peer(KVTransferConfig(kv_connector="Nixl"), PeerSettings(peers=["*"]), Reads(network.agent))
    with pytest.raises(ValueError, match="must be contiguous"):
        peer.register([part[:, ::2] for part in memory()])
    peer.close()


def test_the_package_is_named_if_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(ValueError, match=r"needs the package nixl .* pip install '\.\[nixl\]' in .*, or take 'Peer'"):
        make_connector(KVTransferConfig(kv_connector="Nixl", kv_role="kv_producer"))


def test_its_settings_are_those_of_peer(network, monkeypatch, caplog):
    monkeypatch.setattr("tritonllm.engine.transfer.settings.load_nixl", lambda: network.agent)
    with pytest.raises(ValueError, match="'path' is none of Nixl's; there are host, port, advertised_host, peers"):
        make_connector(KVTransferConfig(kv_connector="Nixl", kv_connector_extra_config={"path": "x"}))
    with caplog.at_level(logging.INFO):
        connector = make_connector(KVTransferConfig(kv_connector="Nixl", kv_role="kv_producer"))
        connector.register(memory())
    assert "blocks of the cache are served at 127.0.0.1" in caplog.text
    connector.close()
    assert network.living == 0

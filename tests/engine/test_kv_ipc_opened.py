"""Memory of other engines: opened once, closed when it must be, and freed when nobody has it open; and why it is not
opened. Shared memory of the host stands in for a GPU's (:mod:`support.ipc_memory`)."""

import socket
import threading
import time

import pytest
from support.ipc_engines import ipc_engines, once
from support.ipc_memory import Host
from support.server import eventually
from support.small_slots import ALL, KEYS, SLOTS, loaded, memory, saved
from support.waiting import PATIENCE

from tritonllm.engine.transfer import ipc_opened as kv_ipc_opened
from tritonllm.engine.transfer.wire import Channel, Kind, question


@pytest.fixture
def host():
    return Host()


@pytest.fixture
def engines(host):
    with ipc_engines(host) as start:
        yield start


def test_memory_of_a_peer_that_has_ended_is_closed_and_that_of_the_next_one_opened(host, engines):
    there = memory(100)
    producer, consumer = engines("kv_producer"), engines("kv_consumer", there)
    offer = saved(producer)
    assert consumer.load(KEYS[:1], [0], offer).result(PATIENCE) == [True]
    producer.close()
    assert not host.owned  # the consumer let go
    assert consumer.load(KEYS[:1], [1], offer).result(PATIENCE) == [False]
    saved(engines("kv_producer", port=offer["remote_port"]))
    assert consumer.load(KEYS, ALL, offer).result(PATIENCE) == [True] * SLOTS and loaded(there) == ALL
    assert len(host.opened) == 1


@pytest.mark.parametrize("opened_before", [False, True])
def test_memory_that_is_not_what_its_owner_says_is_not_read(host, engines, caplog, opened_before):
    """More places than it has, or than it had when it was opened: whoever copied from there would read anything."""
    there = memory(100)
    producer, consumer = engines("kv_producer"), engines("kv_consumer", there)
    offer = saved(producer)
    if opened_before:
        assert consumer.load(KEYS[:1], [0], offer).result(PATIENCE) == [True]
    host.before_copy = lambda spans: pytest.fail("a copy began")
    producer._plane._arena = producer._plane._arena._replace(places=(1 << 32) - 1)
    assert consumer.load(KEYS[1:2], [1], offer).result(PATIENCE) == [False]
    assert ("another way than before" if opened_before else "smaller than it says") in caplog.text


def test_memory_is_freed_when_nobody_copies_out_of_it_any_more(host, engines):
    begun, go_on = threading.Event(), threading.Event()
    producer, consumer = engines("kv_producer"), engines("kv_consumer")
    offer = saved(producer)

    def change():
        begun.set()
        assert go_on.wait(PATIENCE)

    once(host, change)
    came = consumer.load(KEYS, ALL, offer)
    assert begun.wait(PATIENCE)
    closing = threading.Thread(target=producer._plane.close, args=(PATIENCE,))
    closing.start()
    eventually(lambda: producer._plane._closed)
    assert host.owned and host.opened and closing.is_alive()
    go_on.set()
    closing.join(PATIENCE)
    assert not host.owned and not host.opened and came.result(PATIENCE) == [True] * SLOTS


def test_what_somebody_does_not_let_go_of_is_not_freed(host, engines, caplog):
    producer = engines("kv_producer")
    offer, name = saved(producer), producer._plane._arena.name
    holder = Channel(socket.create_connection(("127.0.0.1", offer["remote_port"]), PATIENCE))
    until = time.monotonic() + PATIENCE
    holder.send(question(Kind.HOLD, [name], 0.0), until)
    assert holder.read_count(1, until) == 1
    producer._plane.close(0.1)
    assert len(host.owned) == 1 and "1 engines do not let go" in caplog.text
    holder.close()
    host.owned.clear()


def test_memory_of_another_name_is_not_held(engines):
    producer = engines("kv_producer")
    holder = Channel(socket.create_connection(("127.0.0.1", saved(producer)["remote_port"]), PATIENCE))
    until = time.monotonic() + PATIENCE
    holder.send(question(Kind.HOLD, [bytes(16)], 0.0), until)
    assert holder.read_count(1, until) == 0 and not producer._plane._holders
    holder.close()


def test_only_so_many_are_open_at_once(host, engines, monkeypatch):
    monkeypatch.setattr(kv_ipc_opened, "MOST_OPEN", 2)
    consumer = engines("kv_consumer")
    offers = [saved(engines("kv_producer")) for _ in range(4)]
    for offer in [*offers, *offers]:
        assert consumer.load(KEYS[:1], [0], offer).result(PATIENCE) == [True]
    eventually(lambda: len(host.opened) == 2)


def test_so_many_are_open_also_if_those_that_were_ended_are_slow_to_go(host, engines, monkeypatch):
    monkeypatch.setattr(kv_ipc_opened, "MOST_OPEN", 2)
    slow, watch = threading.Event(), kv_ipc_opened.OpenedMemory._watch
    monkeypatch.setattr(kv_ipc_opened.OpenedMemory, "_watch", lambda self, one: (slow.wait(PATIENCE), watch(self, one)))
    consumer = engines("kv_consumer")
    for offer in [saved(engines("kv_producer")) for _ in range(5)]:
        assert consumer.load(KEYS[:1], [0], offer).result(PATIENCE) == [True]
    slow.set()
    eventually(lambda: len(host.opened) == 2)


def test_several_loads_at_once_open_it_once(host, engines):
    there = memory(100)
    producer, consumer = engines("kv_producer"), engines("kv_consumer", there)
    offer = saved(producer)
    loads = [consumer.load([key], [slot], offer) for slot, key in enumerate(KEYS)]
    assert [load.result(PATIENCE) for load in loads] == [[True]] * SLOTS and loaded(there) == ALL
    assert len(host.opened) == 1


def test_another_host_is_a_miss_that_says_why(host, engines, caplog):
    producer = engines("kv_producer")
    host.machine = 2
    consumer = engines("kv_consumer")
    assert consumer.load(KEYS, ALL, saved(producer)).result(PATIENCE) == [False] * SLOTS
    assert "another host" in caplog.text and "take 'Peer' or 'Nixl'" in caplog.text and not host.opened

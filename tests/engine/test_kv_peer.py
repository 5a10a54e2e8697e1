"""The connector between engines: what it brings over loopback, and what it does when the other side misbehaves."""

import logging
import socket
import threading
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.fault_proxy import fault_proxy
from support.server import eventually
from support.waiting import PATIENCE

from tritonllm.config.kv_transfer import KVTransferConfig
from tritonllm.engine.transfer import peer as kv_peer
from tritonllm.engine.transfer import peer_client as kv_peer_client
from tritonllm.engine.transfer import peer_server as kv_peer_server
from tritonllm.engine.transfer.connector import Offering
from tritonllm.engine.transfer.peer import Peer
from tritonllm.engine.transfer.settings import make_connector

SLOTS = 7
KEYS = [bytes([n]) * 16 for n in range(SLOTS)]
ALL = list(range(SLOTS))
FRAME = 32 + 16 + 29


def memory(fill=0):
    """7 slots, each with its number plus ``fill`` everywhere."""
    numbers = np.arange(SLOTS, dtype=np.uint8)[:, None] + np.uint8(fill)
    return [np.repeat(numbers, size, axis=1) for size in (24, 5)]


def made(role="kv_both", timeout=PATIENCE, **extra):
    extra = {"peers": ["127.0.0.1"], "timeout": timeout, **extra}
    return make_connector(KVTransferConfig(kv_connector="Peer", kv_role=role, kv_connector_extra_config=extra))


@pytest.fixture
def peers():
    """``peers(role, slots, ...)`` makes one; all are closed at the end, and no thread of theirs is left."""
    before, opened = set(threading.enumerate()), []

    def start(role, slots=None, **extra):
        opened.append(made(role, **extra))
        opened[-1].register(memory() if slots is None else slots)
        return opened[-1]

    yield start
    for peer in opened:
        peer.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE)
        assert not thread.is_alive(), thread


def at(port, **more):
    return {"remote_host": "127.0.0.1", "remote_port": port, **more}


def loaded(slots):
    """The numbers in slots that hold one number only."""
    assert all((part == slots[0][:, :1]).all() for part in slots)
    return slots[0][:, 0].tolist()


def test_blocks_go_from_engine_to_engine(peers):
    there = memory(100)
    producer, consumer = peers("kv_producer"), peers("kv_consumer", there)
    assert isinstance(producer, Offering)
    offer = producer.offer()
    assert offer.pop("remote_port") > 0
    assert offer == {"do_remote_prefill": True, "do_remote_decode": False, "remote_host": "127.0.0.1"}
    params = {**producer.offer(), "remote_engine_id": "x"}
    assert producer.save(KEYS[:5], [4, 3, 2, 1, 0], lambda: True).result(PATIENCE) == 5
    assert producer.save(KEYS[:5], [4, 3, 2, 1, 0], lambda: True).result(PATIENCE) == 0  # they are there
    assert consumer.lookup(KEYS[:5], params).result(PATIENCE) == 5
    assert consumer.load(KEYS, ALL, params).result(PATIENCE) == [True] * 5 + [False] * 2
    assert loaded(there) == [4, 3, 2, 1, 0, 105, 106]
    assert len(producer._server._served) == 1  # both questions had one connection


def test_only_leading_blocks_count(peers):
    producer, consumer = peers("kv_producer"), peers("kv_consumer", wait=0)
    producer.save([KEYS[0], KEYS[2]], [0, 2], lambda: True).result(PATIENCE)
    assert consumer.lookup(KEYS[:3], producer.offer()).result(PATIENCE) == 1
    assert consumer.lookup(KEYS[1:], producer.offer()).result(PATIENCE) == 0


def test_what_is_not_in_its_slot_is_not_kept(peers):
    producer = peers("kv_producer")
    assert producer.save(KEYS[:2], [0, 1], lambda: False).result(PATIENCE) == 0 and not len(producer.kept)


def test_copies_outlive_the_slots(peers):
    slots, there = memory(), memory(100)
    producer, consumer = peers("kv_producer", slots), peers("kv_consumer", there)
    producer.save(KEYS, ALL, lambda: True).result(PATIENCE)
    for part in slots:
        part[:] = 99
    assert consumer.load(KEYS, ALL, producer.offer()).result(PATIENCE) == [True] * SLOTS
    assert loaded(there) == ALL


def test_a_lookup_waits_for_blocks_that_are_about_to_be_saved(peers):
    producer, consumer = peers("kv_producer"), peers("kv_consumer", wait=PATIENCE, timeout=PATIENCE)
    producer.save(KEYS[:1], [0], lambda: True).result(PATIENCE)
    count = consumer.lookup(KEYS[:3], producer.offer())
    producer.save(KEYS[1:2], [1], lambda: True).result(PATIENCE)
    assert not count.done()
    producer.save(KEYS[2:3], [2], lambda: True)
    assert count.result(PATIENCE) == 3


def test_blocks_of_a_prompt_that_is_computed_still_are_taken_for_granted_and_come_one_by_one(peers):
    there = memory(100)
    producer, consumer = peers("kv_producer"), peers("kv_consumer", there, timeout=PATIENCE)
    params = {**producer.offer(), "pending": True}
    assert consumer.lookup(KEYS, params).result(PATIENCE) == SLOTS
    came = consumer.load(KEYS, ALL, params)
    for number in ALL:
        assert not came.done()
        producer.save([KEYS[number]], [number], lambda: True).result(PATIENCE)
    assert came.result(PATIENCE) == [True] * SLOTS and loaded(there) == ALL


def test_blocks_that_never_come_are_misses_in_time(peers):
    producer, consumer = peers("kv_producer"), peers("kv_consumer", timeout=4.0)
    producer.save(KEYS[:2], [0, 1], lambda: True).result(PATIENCE)
    params = {**producer.offer(), "pending": True}
    assert consumer.load(KEYS, ALL, params).result(PATIENCE) == [True, True] + [False] * 5
    assert consumer.lookup(KEYS, {**params, "pending": False}).result(PATIENCE) == 2


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"remote_host": None, "remote_port": None},
        {"remote_host": "127.0.0.1"},
        {"remote_host": 3, "remote_port": 4},
        {"remote_host": "127.0.0.1", "remote_port": "80"},
        {"remote_host": "127.0.0.1", "remote_port": 1 << 16},
        {"remote_host": "10.1.2.3", "remote_port": 80},
    ],
)
def test_who_is_not_named_or_not_listed_is_not_asked(peers, params, monkeypatch):
    monkeypatch.setattr(kv_peer_client.Peers, "_connect", lambda *arguments: pytest.fail("it connects"))
    consumer = peers("kv_consumer")
    assert consumer.lookup(KEYS, params).result(0) == 0
    assert consumer.load(KEYS, ALL, params).result(0) == [False] * SLOTS


@pytest.mark.parametrize("listed", ["127.0.0.1:{}", "127.0.0.1", "*"])
def test_who_is_listed(peers, listed):
    producer = peers("kv_producer")
    producer.save(KEYS, ALL, lambda: True).result(PATIENCE)
    consumer = peers("kv_consumer", peers=["10.0.0.1", listed.format(producer.offer()["remote_port"])])
    assert consumer.lookup(KEYS, producer.offer()).result(PATIENCE) == SLOTS
    other = peers("kv_producer").offer()
    assert (consumer._address(other) is None) == (":" in listed)


@pytest.mark.parametrize(
    ("listed", "host", "is_asked"),
    [
        ("fd00::5", "fd00::5", True),
        ("fd00::5:9000", "fd00::5", True),
        ("[fd00::5]:9000", "fd00::5", True),
        ("1:2:3:4:5:6:7:8:9000", "1:2:3:4:5:6:7:8", True),
        ("[fd00::5]:9001", "fd00::5", False),
        ("fd00::6", "fd00::5", False),
        ("some_host.example", "some_host.example", True),
        ("some-host:9000", "some-host", True),
        ("some-host:9001", "some-host", False),
    ],
)
def test_names_and_addresses_of_engines(peers, caplog, listed, host, is_asked):
    consumer = peers("kv_consumer", peers=[listed])
    where = {"remote_host": host, "remote_port": 9000}
    assert consumer._address(where) == ((host, 9000) if is_asked else None)
    assert ("it is not asked. If it may be, add it to kv_connector_extra_config.peers" in caplog.text) != is_asked


def test_a_name_that_is_none_is_a_miss(peers):
    consumer = peers("kv_consumer", peers=["*"])
    for name in ("a" * 70 + ".b", "\0", "no-such-host.invalid"):
        assert consumer.lookup(KEYS, {"remote_host": name, "remote_port": 80}).result(PATIENCE) == 0


def test_a_peer_that_fails_is_left_alone_for_a_while(peers, monkeypatch):
    producer, consumer = peers("kv_producer"), peers("kv_consumer")
    producer.save(KEYS, ALL, lambda: True).result(PATIENCE)
    with fault_proxy(producer.offer()["remote_port"], "refuse") as proxy:
        params = at(proxy.port)
        assert [consumer.lookup(KEYS, params).result(PATIENCE) for _ in range(9)] == [0] * 9
        assert proxy.connections == kv_peer_client.FAILURES
        assert consumer.lookup(KEYS, producer.offer()).result(PATIENCE) == SLOTS  # others are asked
        proxy.kind = None
        now = time.monotonic
        monkeypatch.setattr(kv_peer_client.time, "monotonic", lambda: now() + kv_peer_client.REST)
        assert consumer.lookup(KEYS, params).result(PATIENCE) == SLOTS
        monkeypatch.undo()
        assert consumer.lookup(KEYS, params).result(PATIENCE) == SLOTS


def test_a_peer_that_has_none_of_the_blocks_is_named_once_and_waited_for_no_more(peers, monkeypatch, caplog):
    producer, consumer = peers("kv_producer"), peers("kv_consumer")
    params = producer.offer()
    where = f"the engine at 127.0.0.1:{params['remote_port']} has none of the prompt's blocks: is it of other weights, "
    waits, ask = [], kv_peer.question
    monkeypatch.setattr(kv_peer, "question", lambda kind, keys, wait: waits.append(wait) or ask(kind, keys, 0.0))
    assert [consumer.lookup(KEYS, params).result(PATIENCE) for _ in range(5)] == [0] * 5
    short = kv_peer_client.SHORT_WAIT
    assert waits == [1.0] * kv_peer_client.FAILURES + [short] * 2
    assert caplog.text.count(where + "dtype or block_size?") == 1
    now = time.monotonic
    monkeypatch.setattr(kv_peer_client.time, "monotonic", lambda: now() + kv_peer_client.REST)
    monkeypatch.setattr(kv_peer.time, "monotonic", lambda: now() + kv_peer_client.REST)
    assert [consumer.lookup(KEYS, params).result(PATIENCE) for _ in range(2)] == [0] * 2
    assert waits[5:] == [1.0, short] and caplog.text.count(where) == 1
    producer.save(KEYS[:1], [0], lambda: True).result(PATIENCE)
    assert [consumer.lookup(KEYS, params).result(PATIENCE) for _ in range(2)] == [
        1
    ] * 2  # something: it is asked as before
    assert waits[7:] == [short, 1.0]
    monkeypatch.setattr(kv_peer_client.time, "monotonic", lambda: now() + kv_peer_client.TELL)
    assert consumer.lookup(KEYS[1:], params).result(PATIENCE) == 0 and caplog.text.count(where) == 2


def test_a_peer_that_comes_back_is_connected_to_again(peers):
    producer, consumer = peers("kv_producer"), peers("kv_consumer")
    port = producer.offer()["remote_port"]
    producer.save(KEYS, ALL, lambda: True).result(PATIENCE)
    assert consumer.lookup(KEYS, at(port)).result(PATIENCE) == SLOTS
    producer.close()
    again = peers("kv_producer", port=port)
    again.save(KEYS[:2], [0, 1], lambda: True).result(PATIENCE)
    assert consumer.lookup(KEYS[:2], at(port)).result(PATIENCE) == 2  # by the first attempt


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=st.sampled_from(["cut", "drop", "flip", "double"]), place=st.integers(0, SLOTS * FRAME - 1))
@example(kind="cut", place=0)
@example(kind="flip", place=FRAME + 32 + 16)
@example(kind="double", place=SLOTS * FRAME - 1)
def test_harm_on_the_way_never_gives_a_wrong_block(peers, kind, place):
    there = memory(100)
    producer, consumer = peers("kv_producer"), peers("kv_consumer", there, timeout=6.0)
    producer.save(KEYS, ALL, lambda: True).result(PATIENCE)
    with fault_proxy(producer.offer()["remote_port"], kind, place) as proxy:
        came = consumer.load(KEYS, ALL, at(proxy.port)).result(PATIENCE)
        harmed = place // FRAME  # it may come nevertheless: a byte that is sent twice can be behind all that counts
        assert all(came[:harmed]) and not any(came[harmed + 1 :])
        for number in ALL:
            if came[number]:
                assert all((part[number] == number).all() for part in there)
        consumer.close()
        producer.close()


def test_who_stalls_costs_the_time_of_a_load_and_no_more(peers):
    producer, consumer = peers("kv_producer"), peers("kv_consumer", timeout=4.0)
    producer.save(KEYS, ALL, lambda: True).result(PATIENCE)
    with fault_proxy(producer.offer()["remote_port"], "stall", 2 * FRAME + 5) as proxy:
        assert consumer.load(KEYS, ALL, at(proxy.port)).result(PATIENCE) == [True, True] + [False] * 5
        assert not consumer._peers._open  # a late answer would be taken for that to the next question


def test_what_nobody_asked_for_is_not_taken_for_an_answer(peers):
    """Of a connection that was used: it has bytes left over."""
    producer, consumer = peers("kv_producer"), peers("kv_consumer")
    producer.save(KEYS[:3], [0, 1, 2], lambda: True).result(PATIENCE)
    with fault_proxy(producer.offer()["remote_port"], "double", 35) as proxy:  # the last byte of a count
        assert consumer.lookup(KEYS[:3], at(proxy.port)).result(PATIENCE) == 3
        (channel,) = consumer._peers._open
        eventually(lambda: not channel.is_quiet)
        assert consumer.lookup(KEYS[:2], at(proxy.port)).result(PATIENCE) == 2
        assert proxy.connections == 2


def test_the_server_hangs_up_on_strangers_and_on_too_many(peers, monkeypatch):
    monkeypatch.setattr(kv_peer_server, "MOST_CONNECTIONS", 2)
    producer, consumer = peers("kv_producer"), peers("kv_consumer")
    producer.save(KEYS, ALL, lambda: True).result(PATIENCE)
    where = "127.0.0.1", producer.offer()["remote_port"]
    with socket.create_connection(where, PATIENCE) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: somebody\r\n\r\n")
        assert stranger.recv(100) == b""
    with socket.create_connection(where, PATIENCE), socket.create_connection(where, PATIENCE) as second:
        eventually(lambda: len(producer._server._served) == 2)
        assert consumer.lookup(KEYS, producer.offer()).result(PATIENCE) == 0
        second.close()
        eventually(lambda: len(producer._server._served) == 1)
        assert consumer.lookup(KEYS, producer.offer()).result(PATIENCE) == SLOTS


def test_closing_ends_what_is_under_way(peers):
    producer, consumer = peers("kv_producer"), peers("kv_consumer", timeout=1000)
    came = consumer.load(KEYS, ALL, {**producer.offer(), "pending": True})
    eventually(lambda: len(producer._server._served) == 1)
    consumer.close()
    producer.close()
    assert came.cancelled() or came.result(0) == [False] * SLOTS
    assert consumer.lookup(KEYS, producer.offer()).result(0) == 0
    assert consumer.load(KEYS, ALL, producer.offer()).result(0) == [False] * SLOTS
    assert producer.save(KEYS, ALL, lambda: True).result(0) == 0


def test_the_limit_of_bytes_holds(peers):
    producer = peers("kv_producer", max_bytes=3 * 29)
    assert producer.save(KEYS, ALL, lambda: True).result(PATIENCE) == SLOTS
    assert (len(producer.kept), producer.kept.num_bytes) == (3, 3 * 29)
    consumer = peers("kv_consumer", wait=0)
    assert consumer.lookup(KEYS[4:], producer.offer()).result(PATIENCE) == 3


def test_roles_and_failures_of_setting_up(peers, caplog):
    assert peers("kv_consumer")._server is None
    with caplog.at_level(logging.INFO):
        port = peers("kv_both").offer()["remote_port"]
    assert f"127.0.0.1:{port}" in caplog.text
    with pytest.raises(ValueError, match=f"port={port}: cannot listen there"):
        made("kv_producer", port=port)


def test_what_others_are_told(peers):
    assert peers("kv_producer", host="0.0.0.0", advertised_host="a.b").offer()["remote_host"] == "a.b"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": "x"}, "'path' is none of Peer's; there are host, port, advertised_host, peers"),
        ({"host": ""}, "host must be the address to listen at, got ''"),
        ({"host": "0.0.0.0"}, "tells nobody where to connect: add advertised_host"),
        ({"host": "a" * 70 + ".b"}, "cannot listen there"),
        ({"advertised_host": 3}, "advertised_host must be an address"),
        ({"port": 1 << 16}, "port must be an integer from 0 to 65535, got 65536"),
        ({"port": True}, "port must be an integer from 0 to 65535, got True"),
        ({"peers": "127.0.0.1"}, "peers must be a list of 'host' or 'host:port', got '127.0.0.1'"),
        *(
            ({"peers": ["10.0.0.5", one]}, r"peers\[1\] must be 'host' or 'host:port' .*, or '\*', got " + got)
            for one, got in (
                ("http://10.0.0.5:9000", "'http://10.0.0.5:9000'"),
                *(("", "''"), (" ", "' '"), ("a:b:c", "'a:b:c'"), ("a:b", "'a:b'"), (":80", "':80'"), ("a:", "'a:'")),
                *(("host:0", "'host:0'"), ("host:99999", "'host:99999'"), ("host:080", "'host:080'"), (3, "3")),
                *(("10.0.0.*", "'10.0"), ("10.0.0.0/8", "'10.0"), ("[::1]", "'"), ("[::1]:0", "'"), ("[a]:80", "'")),
                ("10.0.0.5:9000,10.0.0.6:9000", "'10.0.0.5:9000,10"),
            )
        ),
        ({"peers": []}, "peers is missing: list the engines whose blocks may be loaded"),
        ({"max_bytes": 0}, "max_bytes must be an integer of at least 1"),
        ({"threads": 0}, "threads must be an integer of at least 1"),
        ({"max_age": 0}, "max_age must be a number of seconds above 0"),
        ({"wait": -1}, "wait must be a number of seconds of at least 0"),
        ({"max_bytes": 57}, "max_bytes=57 holds not even two blocks of 29 bytes"),
    ],
)
def test_bad_settings(settings, message):
    peer = None
    with pytest.raises(ValueError, match=message):
        peer = made(**settings)
        peer.register(memory())
    if peer is not None:
        peer.close()
    assert isinstance(peer, Peer | None)

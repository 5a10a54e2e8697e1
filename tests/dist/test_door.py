"""Who knows the secret meets behind the door; a stranger who reaches its port, or who sits on the way, gets nothing."""

import queue
import secrets
import socket
import threading
import time
from contextlib import contextmanager

import psutil
import pytest
import torch.distributed as dist
from support.leftovers import held
from support.waiting import PATIENCE, eventually

from tritonllm.dist import door as module
from tritonllm.dist.connect import local_store
from tritonllm.dist.door import Door, Entrance, IntruderError, new_secret

SECRET = new_secret()


@pytest.fixture
def ended():
    return queue.SimpleQueue()


@pytest.fixture
def store():
    return local_store()


@pytest.fixture
def door(store, ended):
    made = Door("127.0.0.1", SECRET, store[1], patience=PATIENCE, on_end=lambda *what: ended.put(what))
    yield made
    made.close()


@contextmanager
def entered(address, secret=SECRET, rank=1):
    entrance = Entrance(address, secret, rank)
    try:
        yield dist.TCPStore("127.0.0.1", entrance.port, is_master=False)
    finally:
        entrance.close()


def test_ranks_meet_behind_it(door, store, ended):
    store[0].set("from rank 0", b"a" * (3 * module.PIECE + 7))
    with entered(door.address) as one, entered(door.address, rank=2) as two:
        one.set("from rank 1", "hello")
        assert two.get("from rank 1") == b"hello" == store[0].get("from rank 1")
        assert two.get("from rank 0") == b"a" * (3 * module.PIECE + 7)
        assert one.add("count", 1) + two.add("count", 1) == 3
    told = sorted(ended.get(timeout=PATIENCE)[:2] for _ in range(2))
    assert told == [(1, "127.0.0.1"), (2, "127.0.0.1")]


def test_nothing_is_left(store, ended):
    def once():
        door = Door("127.0.0.1", SECRET, store[1], patience=PATIENCE, on_end=lambda *what: ended.put(what))
        with entered(door.address) as reached:
            reached.set("a", "b")
        door.close()

    once()
    before = held()
    for _ in range(3):
        once()
    eventually(lambda: not held() - before)


def test_only_the_address_that_is_needed_is_open(store):
    """Not even another one of this machine; and the store is this machine's own."""
    opened = Door("127.0.0.5", SECRET, store[1], patience=PATIENCE, on_end=lambda *what: None)
    listening = {c.laddr for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN}
    assert opened.address in listening
    ports = {opened.address[1], store[1]}
    assert {ip for ip, port in listening if port in ports} == {"127.0.0.5", "127.0.0.1"}
    opened.close()


def test_another_secret_opens_nothing(door, store):
    with pytest.raises(IntruderError, match="do not know the same secret"):
        Entrance(door.address, new_secret(), 1)
    assert store[0].num_keys() == 0


def test_who_listens_there_without_the_secret_is_not_believed():
    """A stranger in the place of rank 0."""

    def pose():
        connection, _ = listening.accept()
        with connection:
            connection.sendall(secrets.token_bytes(module.NONCE))
            connection.recv(module._HELLO.size)
            connection.sendall(secrets.token_bytes(module.MAC))

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=pose, daemon=True)
        thread.start()
        with pytest.raises(IntruderError, match="see who listens there"):
            Entrance(listening.getsockname(), SECRET, 1)
        thread.join(PATIENCE)


def is_closed(connection):
    """The other side says nothing more; a stranger's bytes that nobody read make its end a reset."""
    connection.settimeout(PATIENCE)
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


@pytest.mark.parametrize(
    "said", [b"\0" * 200, b"\x0c\x00\x00\x00\x00" * 40, secrets.token_bytes(4096)], ids=["zeros", "a store's", "noise"]
)
def test_a_stranger_cannot_read_or_set_keys(door, store, said):
    """Of a plain store they could; see below."""
    store[0].set("rank 0 is at", "10.0.0.1")
    with socket.create_connection(door.address) as stranger:
        stranger.sendall(said)
        assert is_closed(stranger)
    assert store[0].list_keys() == ["rank 0 is at"] and store[0].get("rank 0 is at") == b"10.0.0.1"


def test_why_a_store_alone_is_no_place_to_meet(store):
    """A secret beginning of the keys' names is none: whoever reaches the port is told all names."""
    hidden = dist.PrefixStore(new_secret().hex(), store[0])
    hidden.set("rank 0 is at", "10.0.0.1")
    stranger = dist.TCPStore("127.0.0.1", store[1], is_master=False)
    (name,) = stranger.list_keys()
    stranger.set(name, "10.6.6.6")
    assert hidden.get("rank 0 is at") == b"10.6.6.6"


class Relay:
    """Somebody on the way between a rank and the door, who records what the rank says, and may change it.

    Args:
        address: of the door.
        change: what becomes of each piece from the rank.
    """

    def __init__(self, address, change=lambda data: data):
        self.said, self._change, self._door = [], change, address
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = self._listening.getsockname()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            there = socket.create_connection(self._door)
            for way in ((connection, there, True), (there, connection, False)):
                threading.Thread(target=self._pass, args=way, daemon=True).start()

    def _pass(self, source, target, from_rank):
        try:
            while data := source.recv(1 << 20):
                if from_rank:
                    self.said.append(data)
                    data = self._change(data)
                target.sendall(data)
        except OSError:
            pass
        for connection in (source, target):
            module.end(connection)

    def close(self):
        module.end(self._listening)
        self._listening.close()


@contextmanager
def relayed(address, change=lambda data: data):
    relay = Relay(address, change)
    try:
        yield relay
    finally:
        relay.close()


def twist(data):
    """The last byte of what is said once keys are set: one of an HMAC or of a value."""
    return data[:-1] + bytes([data[-1] ^ 1]) if b"the value" in data else data


@pytest.mark.parametrize("change", [twist, lambda data: data + data if b"the value" in data else data])
def test_what_somebody_on_the_way_changes_or_repeats_is_not_taken(door, store, change, caplog):
    with relayed(door.address, change) as relay, entered(relay.address) as reached:
        reached.set("before", "1")
        assert reached.get("before") == b"1"
        try:
            reached.set("key", "the value")
            reached.get("key")
        except (RuntimeError, dist.DistError):
            pass
        eventually(lambda: "was not sent by the other side" in caplog.text)
    assert store[0].num_keys() in (1, 2)
    assert store[0].num_keys() == 1 or store[0].get("key") == b"the value"  # once, of a piece that was repeated


def test_what_was_said_once_opens_nothing_later(door, store):
    """All that a rank said, word for word."""
    with relayed(door.address) as relay:
        with entered(relay.address) as reached:
            reached.set("key", "1")
            assert reached.get("key") == b"1"  # setting it alone does not wait
        said = b"".join(relay.said)
    store[0].set("key", "2")
    with socket.create_connection(door.address) as stranger:
        stranger.sendall(said)
        assert is_closed(stranger)
    assert store[0].get("key") == b"2"


def test_strangers_who_say_nothing_do_not_keep_ranks_out(door, monkeypatch):
    """Nor do they take more than so many threads, for so long."""
    monkeypatch.setattr(module, "PROOF", 0.2)
    strangers = [socket.create_connection(door.address) for _ in range(2 * module.MOST_UNPROVEN)]
    try:

        def comes_in():
            try:
                with entered(door.address) as reached:
                    reached.set("key", "1")
                    return True
            except (OSError, IntruderError):
                return False

        eventually(comes_in)
    finally:
        for stranger in strangers:
            stranger.close()


def test_a_stranger_who_says_a_byte_now_and_then_does_not_keep_a_place(door, monkeypatch):
    monkeypatch.setattr(module, "PROOF", 0.3)
    with socket.create_connection(door.address) as stranger:
        stranger.settimeout(PATIENCE)
        assert stranger.recv(4096)
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            for _ in range(module._HELLO.size - 1):  # all of them would be answered with an end at once
                stranger.sendall(b"a")
                time.sleep(0.05)


def test_what_ends_once_it_is_told_to_is_no_news(door, ended):
    door.hush()
    with entered(door.address):
        pass
    eventually(lambda: not any(c.fileno() >= 0 for c in door._connections._open - {door._listening}))
    assert ended.empty()

"""Frames: whatever happens to the bytes on their way, nobody takes them for another block than they were."""

import socket
import struct
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.waiting import PATIENCE

from tritonllm.engine.transfer import wire as kv_wire
from tritonllm.engine.transfer.wire import (
    MAGIC,
    MOST_KEYS,
    QUESTION_BYTES,
    BlockPlace,
    Channel,
    Kind,
    WireError,
    count_frame,
    frame,
    head_of,
    place_frame,
    places_frame,
    question,
)

KINDS = (Kind.LOOKUP, Kind.LOAD, Kind.WHERE)  # of questions
KEYS = [bytes([n]) * 16 for n in range(4)]
SIZES = (24, 5)
CONTENTS = [bytes(range(n, n + sum(SIZES))) for n in range(4)]
BLOCKS = [head_of(Kind.BLOCK, (key, data)) + key + data for key, data in zip(KEYS, CONTENTS, strict=True)]
FRAME = len(BLOCKS[0])


def soon(seconds=PATIENCE):
    return time.monotonic() + seconds


class Pair:
    """Two ends of a connection; at one somebody has sent these bytes and hung up."""

    def __init__(self, data, hang_up=True):
        self._sender, receiver = socket.socketpair()
        self._sender.sendall(data)
        if hang_up:
            self._sender.shutdown(socket.SHUT_WR)
        self.channel = Channel(receiver)

    def __enter__(self):
        return self.channel

    def __exit__(self, *exception):
        self.channel.close()
        self._sender.close()


def read_all(data):
    """The blocks that a reader gets who has asked for all keys, up to the first error; and that error."""
    got = []
    with Pair(data) as channel:
        try:
            for key in KEYS:
                into = [bytearray(size) for size in SIZES]
                there = channel.read_block(key, [memoryview(part) for part in into], soon())
                got.append(b"".join(into) if there else None)
        except (OSError, WireError) as error:
            return got, error
    return got, None


def test_blocks_and_misses_arrive_in_order():
    assert read_all(b"".join(BLOCKS)) == (CONTENTS, None)
    missing = frame(Kind.MISS, KEYS[1])
    assert read_all(BLOCKS[0] + missing + BLOCKS[2] + BLOCKS[3]) == ([CONTENTS[0], None, *CONTENTS[2:]], None)


@settings(max_examples=examples(300), deadline=None)
@given(cut=st.integers(0, 4 * FRAME - 1))
def test_cut_bytes_give_the_blocks_before_the_cut(cut):
    got, error = read_all(b"".join(BLOCKS)[:cut])
    assert got == CONTENTS[: cut // FRAME] and isinstance(error, ConnectionError)


@settings(max_examples=examples(300), deadline=None)
@given(at=st.integers(0, 4 * FRAME - 1), change=st.integers(1, 255))
def test_a_changed_byte_never_gives_a_wrong_block(at, change):
    data = bytearray(b"".join(BLOCKS))
    data[at] ^= change
    got, error = read_all(bytes(data))
    assert got == CONTENTS[: at // FRAME] and error is not None


@settings(max_examples=examples(300), deadline=None)
@given(st.data())
def test_pieces_in_another_order_never_give_a_wrong_block(data):
    whole = b"".join(BLOCKS)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    got, _ = read_all(b"".join(data.draw(st.lists(st.sampled_from(pieces), max_size=9))))
    assert all(block == expected for block, expected in zip(got, CONTENTS, strict=False))


@settings(max_examples=examples(200), deadline=None)
@given(st.binary(max_size=400))
def test_other_bytes_are_no_frame(data):
    got, error = read_all(data)
    assert got == [] and error is not None
    with Pair(data) as channel, pytest.raises((OSError, WireError)):
        channel.read_question(KINDS, soon(), 5.0)


@settings(max_examples=examples(100), deadline=None)
@given(
    st.sampled_from(KINDS),
    st.lists(st.binary(min_size=16, max_size=16), min_size=1),
    st.floats(0, 99),
)
def test_questions_arrive(kind, keys, wait):
    with Pair(question(kind, keys, wait)) as channel:
        asked = channel.read_question(KINDS, soon(), 5.0)
    assert (asked.kind, asked.keys) == (kind, keys) and abs(asked.wait - wait) <= 1e-3


@settings(max_examples=examples(200), deadline=None)
@given(at=st.integers(0, 3 * 16 + 4 + 31), change=st.integers(1, 255))
def test_a_changed_question_is_refused(at, change):
    data = bytearray(question(Kind.LOAD, KEYS[:3], 1.0))
    data[at] ^= change
    with Pair(bytes(data)) as channel, pytest.raises((OSError, WireError)):
        channel.read_question(KINDS, soon(), 5.0)


def head(kind, size, magic=MAGIC, version=kv_wire.VERSION):
    return struct.pack("<8sHHI", magic, version, kind, size) + bytes(16)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (head(Kind.LOAD, 4 + 16 * (MOST_KEYS + 1)), "cannot be here"),
        (head(Kind.LOAD, 4), "cannot be here"),
        (head(Kind.LOAD, 2**32 - 1), "cannot be here"),
        (head(Kind.BLOCK, 20), "cannot be here"),
        (head(77, 20), "cannot be here"),
        (head(Kind.LOAD, 20, version=2), "another version"),
        (head(Kind.LOAD, 20, magic=b"GET / HT"), "another protocol"),
        (frame(Kind.LOAD, bytes(4 + 17)), "within a key"),
    ],
    ids=["keys", "none", "huge", "answer", "kind", "version", "magic", "half"],
)
def test_what_is_no_question_is_refused_before_its_payload_is_read(data, message, monkeypatch):
    sizes = []
    read = Channel.read
    monkeypatch.setattr(
        Channel, "read", lambda self, count, deadline: sizes.append(count) or read(self, count, deadline)
    )
    with Pair(data, hang_up=False) as channel, pytest.raises(WireError, match=message):
        channel.read_question(KINDS, soon(), 5.0)
    assert max(sizes) <= len(data)


def test_a_question_that_is_not_answered_here_is_refused():
    with Pair(question(Kind.WHERE, KEYS, 0.0)) as channel, pytest.raises(WireError, match="cannot be here"):
        channel.read_question((Kind.LOOKUP, Kind.LOAD), soon(), 5.0)


@settings(max_examples=examples(100), deadline=None)
@given(address=st.integers(0, 2**64 - 1), at=st.none() | st.integers(0, 2 * (32 + 16 + 32 + 8) - 1))
def test_places_arrive_as_they_were_sent_or_not_at_all(address, at):
    places = [BlockPlace(head_of(Kind.BLOCK, (key,)), address) for key in KEYS[:2]]
    data = bytearray(b"".join(place_frame(key, place) for key, place in zip(KEYS, places, strict=False)))
    if at is not None:
        data[at] ^= 1
    got = []
    with Pair(bytes(data) + frame(Kind.MISS, KEYS[2])) as channel:
        try:
            for key in KEYS[:3]:
                got.append(channel.read_place(key, soon()))
        except WireError:
            assert at is not None
    assert got == ([*places, None] if at is None else places[: at // (len(data) // 2)])


def test_a_place_of_another_block_is_refused():
    other = place_frame(KEYS[1], BlockPlace(head_of(Kind.BLOCK, ()), 7))
    with Pair(other) as channel, pytest.raises(WireError, match="about another block"):
        channel.read_place(KEYS[0], soon())


def test_what_an_agent_says_of_itself_arrives():
    with Pair(frame(Kind.AGENT, b"somebody")) as channel:
        assert channel.read_agent(soon()) == b"somebody"
    with Pair(head(Kind.AGENT, kv_wire.MOST_AGENT_BYTES + 1)) as channel, pytest.raises(WireError, match="cannot be"):
        channel.read_agent(soon())


def test_counts():
    with Pair(count_frame(3)) as channel:
        assert channel.read_count(3, soon()) == 3
    with Pair(count_frame(4)) as channel, pytest.raises(WireError, match="4 blocks of 3"):
        channel.read_count(3, soon())


def test_a_block_of_another_size_is_refused():
    wrong = head_of(Kind.BLOCK, (KEYS[0], bytes(30))) + KEYS[0] + bytes(30)
    assert str(read_all(wrong)[1]).endswith("cannot be here")


def test_bytes_that_come_one_by_one_do_not_extend_the_deadline():
    sender, receiver = socket.socketpair()
    channel = Channel(receiver)
    stop = threading.Event()

    def drip():
        for byte in BLOCKS[0]:
            if stop.wait(0.02):
                return
            sender.send(bytes([byte]))

    thread = threading.Thread(target=drip)
    thread.start()
    with pytest.raises(TimeoutError):
        channel.read_head({Kind.LOAD: QUESTION_BYTES, Kind.BLOCK: (0, 999)}, soon(0.1))
    stop.set()
    thread.join(PATIENCE)
    sender.close()
    channel.close()


def test_places_and_what_is_still_there():
    data = places_frame([5, -1]) + places_frame([1 << 40]) + frame(Kind.READ) + frame(Kind.STILL, b"\1\0\2")
    with Pair(data) as channel:
        assert channel.read_places(3, soon()).tolist() == [5, -1]
        assert channel.read_places(1, soon()).tolist() == [1 << 40]
        channel.read_has_read(soon())
        assert channel.read_still(3, soon()).tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("data", "read"),
    [
        (places_frame([1, 2, 3]), lambda channel: channel.read_places(2, soon())),
        (places_frame([]), lambda channel: channel.read_places(2, soon())),
        (frame(Kind.PLACES, bytes(12)), lambda channel: channel.read_places(2, soon())),
        (frame(Kind.STILL, bytes(2)), lambda channel: channel.read_still(3, soon())),
        (frame(Kind.READ, bytes(1)), lambda channel: channel.read_has_read(soon())),
        (question(Kind.WHERE, KEYS, 0.0), lambda channel: channel.read_has_read(soon())),
    ],
)
def test_places_that_cannot_be_are_refused(data, read):
    with Pair(data) as channel, pytest.raises(WireError):
        read(channel)


@settings(max_examples=examples(100), deadline=None)
@given(at=st.integers(0, 100), change=st.integers(1, 255))
def test_a_changed_byte_never_gives_wrong_places(at, change):
    data = bytearray(places_frame([3, 4, -1]) + frame(Kind.STILL, b"\1\1\0"))
    data[at % len(data)] ^= change
    got = []
    with Pair(bytes(data)) as channel, pytest.raises((WireError, OSError)):
        got.append(channel.read_places(3, soon()).tolist())
        got.append(channel.read_still(3, soon()).tolist())
    assert got in ([], [[3, 4, -1]])


@pytest.mark.parametrize("end", ["here", "there"])
def test_who_waits_for_the_end_hears_of_it(end):
    mine, other = map(Channel, socket.socketpair())
    ended = threading.Event()
    thread = threading.Thread(target=lambda: (mine.wait_for_end(), ended.set()))
    thread.start()
    assert not ended.is_set()
    (mine.end_reading if end == "here" else other.end_sending)()
    assert ended.wait(PATIENCE)
    thread.join(PATIENCE)
    if end == "there":  # what goes the other way still does
        mine.send(b"x", soon())
        assert other.read(1, soon()) == b"x"
    for one in (mine, other):
        one.close()
        one.end_reading()
        one.end_sending()

"""What engines say to each other when one brings blocks from another (:mod:`tritonllm.engine.transfer.peer`): frames
over a stream of bytes. No torch.

A frame is a head and a payload. The head has what the protocol is, its version, the kind of the frame, the bytes of the
payload, and a checksum (xxh3, 128 bits) of all of these and the payload. Numbers are little-endian.

================ ================= ===================================================================================
kind             who sends it      payload
================ ================= ===================================================================================
``LOOKUP``       who wants blocks  milliseconds to wait (4 bytes), keys (16 bytes each)
``COUNT``        who has them      of how many leading keys the blocks are there (4 bytes)
``LOAD``         who wants blocks  as ``LOOKUP``; for each key in order the answer is one of these:
``BLOCK``        who has them      the key, and the block's contents
``MISS``         who has them      the key
``WHERE``        who wants blocks  as ``LOOKUP``; the answer is ``AGENT``, and for each key in order one of the others:
``AGENT``        who has them      what the reader must know of the memory (:mod:`tritonllm.engine.transfer.nixl`,
                                   :mod:`tritonllm.engine.transfer.ipc`)
``PLACE``        who has them      the key, the head of the block's ``BLOCK`` frame, and its address (8 bytes)
``MISS``         who has them      the key
``HOLD``         who wants blocks  as ``LOOKUP``, with the name of a device's memory in place of keys; ``COUNT`` says 1
                                   if it is there, and it stays as long as the connection
``PLACES``       who has them      numbers (8 bytes each) of places in that memory for the next keys of a ``WHERE``, -1
                                   for what is not there
``READ``         who wants blocks  nothing: the places that the last ``WHERE`` was told have been read
``STILL``        who has them      for each key of that ``WHERE`` one byte: 1 if its place was the block's all the while
================ ================= ===================================================================================

A reader says before it reads which kinds may come now, and how long each may be: a frame that is neither is refused
before memory is taken for it. Whoever reads a frame that is not right hangs up, since nobody knows where the next one
begins.
Every read and write has a deadline for all of its bytes, not for each.
"""

import enum
import select
import socket
import struct
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import xxhash

MAGIC = b"tritonkp"
VERSION = 1
KEY_BYTES = 16
MOST_KEYS = 1 << 16  # of a question: a million tokens at 16 a block
_FACTS = struct.Struct("<8sHHI")  # magic, version, kind, bytes of the payload
_HEAD_BYTES = _FACTS.size + 16
_NUMBER = struct.Struct("<I")
_ADDRESS = struct.Struct("<Q")
_PLACES = np.dtype("<i8")
_PLACE_BYTES = KEY_BYTES + _HEAD_BYTES + _ADDRESS.size
MOST_AGENT_BYTES = 1 << 20
QUESTION_BYTES = (_NUMBER.size + KEY_BYTES, _NUMBER.size + KEY_BYTES * MOST_KEYS)


class Kind(enum.IntEnum):
    """The kind of a frame."""

    LOOKUP = 1
    COUNT = 2
    LOAD = 3
    BLOCK = 4
    MISS = 5
    WHERE = 6
    AGENT = 7
    PLACE = 8
    HOLD = 9
    PLACES = 10
    READ = 11
    STILL = 12


Sizes = Mapping[Kind, tuple[int, int]]  # which frames may come, with the least and the most bytes of their payloads


class WireError(Exception):
    """A frame that is damaged, foreign, or not what was to come."""


class FrameHead(NamedTuple):
    """The head of a frame: its kind, the bytes of its payload, and the checksum of both and the payload."""

    kind: Kind
    size: int
    checksum: bytes


class BlockPlace(NamedTuple):
    """Where a block lies in the other engine's memory: the head that its frame would have, and the address."""

    head: bytes
    address: int


class Question(NamedTuple):
    """``LOOKUP``, ``LOAD``, ``WHERE`` or ``HOLD``: seconds to wait for blocks that are not there yet, and the keys."""

    kind: Kind
    wait: float
    keys: Sequence[bytes]


def head_of(kind: Kind, payload: Sequence[bytes | memoryview]) -> bytes:
    """A frame's head.

    Args:
        payload: the parts of the payload, which follow the head one after the other.
    """
    facts = _FACTS.pack(MAGIC, VERSION, kind, sum(memoryview(part).nbytes for part in payload))
    return facts + _checksum(facts, payload)


def frame(kind: Kind, *payload: bytes) -> bytes:
    """A whole frame."""
    return b"".join((head_of(kind, payload), *payload))


def question(kind: Kind, keys: Sequence[bytes], wait: float) -> bytes:
    """A frame that asks for blocks.

    Args:
        keys: the keys of blocks, from 1 to ``MOST_KEYS``.
        wait: seconds that the other side may wait for them.
    """
    return frame(kind, _NUMBER.pack(min(max(0, int(1e3 * wait)), 2**32 - 1)), b"".join(keys))


def count_frame(count: int) -> bytes:
    return frame(Kind.COUNT, _NUMBER.pack(count))


def place_frame(key: bytes, place: BlockPlace) -> bytes:
    return frame(Kind.PLACE, key, place.head, _ADDRESS.pack(place.address))


def places_frame(places: Sequence[int]) -> bytes:
    return frame(Kind.PLACES, np.array(places, _PLACES).tobytes())


def _checksum(facts: bytes, payload: Sequence[bytes | memoryview]) -> bytes:
    state = xxhash.xxh3_128(facts)
    for part in payload:
        state.update(part)
    return state.digest()


class Channel:
    """A connected socket with deadlines, which are times of ``time.monotonic``.

    What goes wrong is an ``OSError`` (``TimeoutError`` past the deadline, ``ConnectionError`` if the other side is
    gone) or a :class:`WireError`; the channel is of no use after that.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        with suppress(OSError):  # it is not TCP, or the other side has left already
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def close(self) -> None:
        """Close the connection, which wakes whoever reads or writes. May be called again, and by another thread."""
        with suppress(OSError):  # the other side was first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    @property
    def address(self) -> tuple[str, int]:
        """The host and port of the other side, to connect there once more.

        Raises:
            OSError: it has hung up.
        """
        host, port = self._socket.getpeername()[:2]
        return host, port

    def end_sending(self) -> None:
        """Tell the other side that nothing more comes; what it still says can be read."""
        with suppress(OSError):  # it was first
            self._socket.shutdown(socket.SHUT_WR)

    def end_reading(self) -> None:
        """Wake whoever reads, without telling the other side."""
        with suppress(OSError):  # it is closed
            self._socket.shutdown(socket.SHUT_RD)

    def wait_for_end(self) -> None:
        """Wait until the other side ends its sending or hangs up, whatever it says before, or until
        :meth:`end_reading`."""
        with suppress(OSError):
            self._socket.settimeout(None)
            while self._socket.recv(4096):
                pass

    @property
    def is_quiet(self) -> bool:
        """Whether the connection is open and nothing has come that nobody asked for."""
        try:
            events = select.poll()
            events.register(self._socket, select.POLLIN)
            return not events.poll(0)
        except (OSError, ValueError):  # it was closed here
            return False

    def send(self, data: bytes | memoryview, deadline: float) -> None:
        self._socket.settimeout(_left(deadline))
        self._socket.sendall(data)

    def read_into(self, into: memoryview, deadline: float) -> None:
        """Receive bytes until ``into`` is full."""
        while into.nbytes:
            self._socket.settimeout(_left(deadline))
            count = self._socket.recv_into(into)
            if not count:
                raise ConnectionResetError("the other side has hung up")
            into = into[count:]

    def read(self, count: int, deadline: float) -> bytes:
        data = bytearray(count)
        self.read_into(memoryview(data), deadline)
        return bytes(data)

    def read_head(self, sizes: Sizes, deadline: float) -> FrameHead:
        data = self.read(_HEAD_BYTES, deadline)
        magic, version, kind, size = _FACTS.unpack_from(data)
        if magic != MAGIC or version != VERSION:
            raise WireError("the other side speaks another protocol, or another version of it")
        least, most = sizes.get(kind, (1, 0))
        if not least <= size <= most:
            raise WireError(f"a frame of kind {kind} and {size} bytes came, which cannot be here")
        return FrameHead(Kind(kind), size, data[_FACTS.size :])

    def read_question(self, kinds: Collection[Kind], idle: float, within: float) -> Question:
        """Receive the next question.

        Args:
            kinds: the kinds of questions that may come.
            idle: until when the question must have begun, by ``time.monotonic``.
            within: how long the rest may take once it has begun, in seconds.
        """
        head = self.read_head(dict.fromkeys(kinds, QUESTION_BYTES), idle)
        payload = self._read_payload(head, time.monotonic() + within)
        (wait,) = _NUMBER.unpack_from(payload)
        keys, rest = divmod(len(payload) - _NUMBER.size, KEY_BYTES)
        if rest:
            raise WireError("a question ends within a key")
        places = range(_NUMBER.size, _NUMBER.size + keys * KEY_BYTES, KEY_BYTES)
        return Question(head.kind, wait / 1e3, [payload[at : at + KEY_BYTES] for at in places])

    def read_count(self, most: int, deadline: float) -> int:
        """The answer to ``LOOKUP`` of so many keys."""
        head = self.read_head({Kind.COUNT: (_NUMBER.size, _NUMBER.size)}, deadline)
        count: int = _NUMBER.unpack(self._read_payload(head, deadline))[0]
        if count > most:
            raise WireError(f"{count} blocks of {most} are there")
        return count

    def read_block(self, key: bytes, into: Sequence[memoryview], deadline: float) -> bool:
        """One answer to ``LOAD``: fill these with the block's contents; false, and they hold what they did, if the
        other side does not have it. After an error they hold anything."""
        size = KEY_BYTES + sum(part.nbytes for part in into)
        head = self.read_head({Kind.BLOCK: (size, size), Kind.MISS: (KEY_BYTES, KEY_BYTES)}, deadline)
        named = self.read(KEY_BYTES, deadline)
        if named != key:
            raise WireError("the answer is about another block")
        contents = into if head.kind is Kind.BLOCK else ()
        for part in contents:
            self.read_into(part, deadline)
        self._check(head, (named, *contents))
        return head.kind is Kind.BLOCK

    def read_agent(self, deadline: float) -> bytes:
        """The first answer to ``WHERE``."""
        return self._read_payload(self.read_head({Kind.AGENT: (1, MOST_AGENT_BYTES)}, deadline), deadline)

    def read_place(self, key: bytes, deadline: float) -> BlockPlace | None:
        """Receive an answer to ``WHERE`` that names a place; ``None`` if the other side does not have the block."""
        sizes = {Kind.PLACE: (_PLACE_BYTES, _PLACE_BYTES), Kind.MISS: (KEY_BYTES, KEY_BYTES)}
        head = self.read_head(sizes, deadline)
        payload = self._read_payload(head, deadline)
        if payload[:KEY_BYTES] != key:
            raise WireError("the answer is about another block")
        if head.kind is Kind.MISS:
            return None
        return BlockPlace(payload[KEY_BYTES : -_ADDRESS.size], *_ADDRESS.unpack(payload[-_ADDRESS.size :]))

    def read_places(self, most: int, deadline: float) -> np.ndarray:
        """The next answer to ``WHERE`` by an engine whose places have numbers: int64, for at least one key and at most
        so many."""
        each = _PLACES.itemsize
        payload = self._read_payload(self.read_head({Kind.PLACES: (each, most * each)}, deadline), deadline)
        if len(payload) % each:
            raise WireError("an answer ends within a place")
        return np.frombuffer(payload, _PLACES).astype(np.int64)

    def read_has_read(self, deadline: float) -> None:
        """Receive the frame that says that the other side has read what it was told of."""
        self._read_payload(self.read_head({Kind.READ: (0, 0)}, deadline), deadline)

    def read_still(self, count: int, deadline: float) -> np.ndarray:
        """The answer to ``READ``: bool, for so many keys."""
        payload = self._read_payload(self.read_head({Kind.STILL: (count, count)}, deadline), deadline)
        return np.frombuffer(payload, np.uint8) == 1

    def _read_payload(self, head: FrameHead, deadline: float) -> bytes:
        payload = self.read(head.size, deadline)
        self._check(head, (payload,))
        return payload

    @staticmethod
    def _check(head: FrameHead, payload: Sequence[bytes | memoryview]) -> None:
        if _checksum(_FACTS.pack(MAGIC, VERSION, head.kind, head.size), payload) != head.checksum:
            raise WireError("a frame is damaged")


def _left(deadline: float) -> float:
    """The seconds that are left until a deadline.

    Raises:
        TimeoutError: the deadline has passed.
    """
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("it took too long")
    return seconds

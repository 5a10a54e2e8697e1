"""Connections to other engines, to ask them for blocks (:mod:`tritonllm.engine.transfer.wire`). No torch.

A connection is used again after an answer that was whole, if the next question comes soon, and closed after any other:
one that was idle for long may lead to a host that is gone, which nobody has told. A peer that fails ``FAILURES``
times in a row is left alone for ``REST`` seconds, so that requests do not wait for it one after the other; then it is
tried again, and left alone again after the first failure.

A peer that answers and has none of the blocks that it should have (its weights are others, for instance) would cost
each request the whole time that a lookup waits for blocks that are late. So after ``FAILURES`` such answers in a row
lookups there wait for ``SHORT_WAIT`` seconds at most, for ``REST`` seconds; then they wait in full again.
"""

import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tritonllm.engine.transfer.wire import Channel, WireError

FAILURES = 3
REST = 5.0
CONNECTING = 3.0  # seconds, at most
MOST_IDLE = 4  # connections that are kept for one peer
FRESH = 2.0  # seconds that one is kept: no host is replaced by another in less
MOST_PEERS = 256  # that are remembered
SHORT_WAIT = 0.05  # seconds; the last blocks of an answered prompt are late by some milliseconds
TELL = 60.0  # seconds between two warnings that a peer has nothing

Address = tuple[str, int]


@dataclass(eq=False)
class _Peer:
    idle: list[tuple[Channel, float]] = field(default_factory=list)  # until when it is used again, the last one longest
    failures: int = 0
    rests_until: float = 0.0
    empty: int = 0  # lookups in a row that waited in full and found nothing
    hurries_until: float = 0.0  # until when lookups wait for a short time only
    told: float | None = None  # when it was said last that it has nothing


class Peers:
    """The connections to other engines. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._peers: OrderedDict[Address, _Peer] = OrderedDict()
        self._open: set[Channel] = set()
        self._closed = False

    @contextmanager
    def channel(self, address: Address, deadline: float) -> Iterator[Channel]:
        """A connection for one question and its whole answer.

        Raises:
            OSError: there is none; the peer is being left alone, for instance.
        """
        channel = self._take(address)
        try:
            if channel is None:
                channel = self._connect(address, deadline)
            yield channel
        except BaseException as error:
            self._failed(address, channel, counts=isinstance(error, OSError | WireError))
            raise
        self._succeeded(address, channel)

    def wait(self, address: Address, seconds: float) -> float:
        """How long a lookup should wait there for blocks that are late.

        Args:
            seconds: how long it may wait at most, in seconds.
        """
        with self._lock:
            hurries = time.monotonic() < self._peer(address).hurries_until
        return min(seconds, SHORT_WAIT) if hurries else seconds

    def answered(self, address: Address, count: int) -> bool:
        """A lookup there has found so many blocks. Whether it is time to say that there are none."""
        now = time.monotonic()
        with self._lock:
            peer = self._peer(address)
            if count:
                peer.empty, peer.hurries_until = 0, 0.0
                return False
            if now >= peer.hurries_until:  # else it did not wait in full
                peer.empty += 1
                if peer.empty >= FAILURES:
                    peer.hurries_until = now + REST
            tells = peer.told is None or now - peer.told >= TELL
            if tells:
                peer.told = now
            return tells

    def close(self) -> None:
        """End all connections, those in use as well."""
        with self._lock:
            self._closed = True
            channels, self._open = self._open, set()
            self._peers.clear()
        for channel in channels:
            channel.close()

    def _peer(self, address: Address) -> _Peer:
        peer = self._peers.setdefault(address, _Peer())
        self._peers.move_to_end(address)
        while len(self._peers) > MOST_PEERS:
            self._drop_idle(self._peers.popitem(last=False)[1])
        return peer

    def _take(self, address: Address) -> Channel | None:
        """An open connection that is idle and still good; ``None`` if there is none.

        Raises:
            OSError: the peer is being left alone, or all is closed.
        """
        with self._lock:
            if self._closed:
                raise ConnectionError("this connector is closed")
            peer = self._peer(address)
            if time.monotonic() < peer.rests_until:
                raise LeftAloneError(f"it failed {peer.failures} times, and is left alone for some seconds")
            while peer.idle:
                channel, until = peer.idle.pop()
                if time.monotonic() < until and channel.is_quiet:
                    return channel
                self._drop(channel)
        return None

    def _connect(self, address: Address, deadline: float) -> Channel:
        seconds = min(CONNECTING, deadline - time.monotonic())
        if seconds <= 0:
            raise TimeoutError("it took too long")
        try:
            channel = Channel(socket.create_connection(address, seconds))
        except ValueError as error:  # a name that cannot be one
            raise OSError(f"{address[0]!r} is no host: {error}") from error
        with self._lock:
            if not self._closed:
                self._open.add(channel)
                return channel
        channel.close()
        raise ConnectionError("this connector is closed")

    def _failed(self, address: Address, channel: Channel | None, counts: bool) -> None:
        with self._lock:
            if channel is not None:
                self._drop(channel)
            if counts and not self._closed:
                peer = self._peer(address)
                peer.failures += 1
                if peer.failures >= FAILURES:
                    peer.rests_until = time.monotonic() + REST
                    self._drop_idle(peer)

    def _succeeded(self, address: Address, channel: Channel) -> None:
        with self._lock:
            if self._closed:
                return
            peer = self._peer(address)
            peer.failures, peer.rests_until = 0, 0.0
            if len(peer.idle) < MOST_IDLE:
                peer.idle.append((channel, time.monotonic() + FRESH))
            else:
                self._drop(channel)

    def _drop_idle(self, peer: _Peer) -> None:
        while peer.idle:
            self._drop(peer.idle.pop()[0])

    def _drop(self, channel: Channel) -> None:
        self._open.discard(channel)
        channel.close()


class LeftAloneError(ConnectionError):
    """The peer has failed too often to be asked now."""

"""Other engines' memory that this process has opened, for as long as both want it. No torch.

CUDA does not say what happens to a process that has opened memory which its owner frees. So whoever opens memory holds
a connection to its owner (``HOLD``, :mod:`tritonllm.engine.transfer.wire`) until it has closed it again, and a thread
waits at that connection. When the owner wants its memory back it ends its side; when it dies, the system does. Then
what is under way here is waited for, the memory is closed, and the connection after it. A restarted engine has memory
of another name, which is opened anew.
"""

import logging
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tritonllm.engine.transfer.ipc_memory import Device, SharedArena, arena_bytes
from tritonllm.engine.transfer.wire import Channel, Kind, WireError, question

logger = logging.getLogger(__name__)
MOST_OPEN = 64  # pieces of memory


@dataclass(eq=False)
class _Opened:
    """A piece of memory that is open, as its owner described it, and how many threads copy out of it."""

    arena: SharedArena
    address: int
    hold: Channel
    users: int = 0


class OpenedMemory:
    """The memory of other engines that is mapped in this process. For any thread.

    Args:
        device: the device that opens memory.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._changed = threading.Condition()
        self._opening: set[bytes] = set()  # names that some thread is opening
        self._opened: OrderedDict[bytes, _Opened] = OrderedDict()  # by name; the one used last is the last
        self._watched = 0
        self._closed = False

    @contextmanager
    def using(self, channel: Channel, arena: SharedArena, deadline: float) -> Iterator[int]:
        """The address of an arena, which stays open inside the block. Copies must have ended when the block ends.

        Args:
            channel: the channel on which the other engine described the arena.

        Raises:
            OSError: it cannot be opened, or is gone.
            WireError: the other side does not answer as it should.
        """
        opened = self._enter(channel, arena, deadline)
        try:
            yield opened.address
        finally:
            with self._changed:
                opened.users -= 1
                self._changed.notify_all()

    def close(self, seconds: float) -> None:
        """Close all, once nobody copies any more, in so many seconds at most."""
        until = time.monotonic() + seconds
        with self._changed:
            self._closed = True
            for opened in self._opened.values():
                opened.hold.end_reading()
            while self._watched and time.monotonic() < until:
                self._changed.wait(max(0.0, until - time.monotonic()))

    def _enter(self, channel: Channel, arena: SharedArena, deadline: float) -> _Opened:
        with self._changed:
            while arena.name in self._opening:
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError("another thread opens it, and takes too long")
            if self._closed:
                raise ConnectionError("this connector is closed")
            there = self._opened.get(arena.name)
            if there is not None:
                if there.arena != arena:
                    raise WireError("the other engine describes its memory in another way than before")
                self._opened.move_to_end(arena.name)
                there.users += 1
                return there
            self._opening.add(arena.name)
        try:
            opened = self._open(channel, arena, deadline)
            self._begin_watch(opened)
            return opened
        finally:
            with self._changed:
                self._opening.discard(arena.name)
                self._changed.notify_all()

    def _begin_watch(self, opened: _Opened) -> None:
        watch = threading.Thread(target=self._watch, args=(opened,), name="kv-ipc-hold", daemon=True)
        with self._changed:
            try:
                watch.start()
            except RuntimeError as error:  # no more threads
                self._device.close(opened.address)
                opened.hold.close()
                raise OSError(f"nobody can watch over its memory: {error}") from error
            opened.users, self._watched = 1, self._watched + 1
            self._opened[opened.arena.name] = opened
            # all that are too many: the thread that watches over one which was ended before may not have run yet
            most = 0 if self._closed else MOST_OPEN
            for one in list(self._opened.values())[: max(0, len(self._opened) - most)]:
                one.hold.end_reading()

    def _open(self, channel: Channel, arena: SharedArena, deadline: float) -> _Opened:
        if arena.machine != self._device.machine:
            raise OSError("it runs on another host, whose GPUs' memory cannot be opened here: take 'Peer' or 'Nixl'")
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("it took too long")
        hold = Channel(socket.create_connection(channel.address, seconds))
        try:
            hold.send(question(Kind.HOLD, [arena.name], 0.0), deadline)
            if hold.read_count(1, deadline) != 1:
                raise ConnectionError("its memory is gone")
            return _Opened(arena, self._open_all(arena), hold)
        except (OSError, WireError):
            hold.close()
            raise

    def _open_all(self, arena: SharedArena) -> int:
        """The address of an arena that is as large as it is said to be."""
        address = self._device.open(arena.handle)
        nbytes = self._device.extent(address)
        if nbytes is not None and nbytes < arena_bytes(arena.places, arena.sizes):
            self._device.close(address)
            raise WireError("the other engine's memory is smaller than it says")
        return address

    def _watch(self, opened: _Opened) -> None:
        """Close memory when its owner, or this process, wants it closed."""
        opened.hold.wait_for_end()
        with self._changed:
            self._opened.pop(opened.arena.name, None)  # who comes now asks the owner again
            while opened.users:
                self._changed.wait()
        try:
            self._device.close(opened.address)
        except OSError as error:  # the device has failed: then nothing can be closed
            logger.warning("another engine's memory cannot be closed: %s", error)
        opened.hold.close()  # now the owner may free it
        with self._changed:
            self._watched -= 1
            self._changed.notify_all()

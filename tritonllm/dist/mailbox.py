"""Messages from one process to several, through memory that they share: each is written once, whoever reads it.

The memory has no name (``memfd_create``): nothing of it is left when the last process that has it ends, however that
ends. It also holds what the readers say of themselves: a beat, and how many messages they have acted on.

A number is written by one process only, after what it speaks of. That is enough where stores are seen in the order in
which they were made, as on x86; between the interpreter's own instructions there are barriers on other processors, too.
"""

import mmap
import os
import time
from collections.abc import Callable
from multiprocessing import reduction
from typing import Any

import numpy as np

SLOTS, SLOT = 8, 1 << 20  # pieces of messages in flight, and bytes of each: a step of 256 decodes has 10 to 600 KB
LINE = 8  # numbers between those of two writers: a cache line
SHORTEST, LONGEST = 5e-5, 2e-3  # seconds that a waiting process sleeps at a time
HEADER = 16  # bytes before a piece: of the message that are still to come with it, and of the piece


def await_(ready: Callable[[], bool], check: Callable[[], None], spin: float) -> None:
    """Wait until ``ready``: for ``spin`` seconds without a sleep, then with longer ones.

    Args:
        check: raises if there is nothing to wait for any more.
    """
    begin = time.monotonic()
    while not ready():
        waited = time.monotonic() - begin
        if waited < spin:
            os.sched_yield()
        else:
            check()
            time.sleep(min(LONGEST, max(SHORTEST, waited / 16)))


class Mailbox:
    """The shared memory; can be an argument of a process that is spawned.

    Args:
        memory: a file descriptor, which this takes over; by default of new memory.
        readers: how many.
    """

    def __init__(self, readers: int, memory: int | None = None) -> None:
        numbers = 8 * LINE * (1 + readers)
        self._begin = -(-numbers // mmap.PAGESIZE) * mmap.PAGESIZE
        size = self._begin + SLOTS * (HEADER + SLOT)
        if memory is None:
            memory = os.memfd_create("tritonllm-steps")
            os.ftruncate(memory, size)
        self.readers = readers
        self._memory = memory
        self._map = mmap.mmap(memory, size)
        self._numbers = np.frombuffer(self._map, np.int64, LINE * (1 + readers)).reshape(1 + readers, LINE)

    def __reduce__(self) -> tuple[Any, ...]:
        return _attached, (self.readers, reduction.DupFd(self._memory))

    @property
    def sent(self) -> int:
        """Messages so far."""
        return int(self._numbers[0, 1])

    def beat(self, reader: int) -> None:
        """A reader says that it lives."""
        self._numbers[1 + reader, 1] += 1

    def beats(self, reader: int) -> int:
        return int(self._numbers[1 + reader, 1])

    def acted(self, reader: int) -> None:
        """A reader has done what one more message says."""
        self._numbers[1 + reader, 2] += 1

    def acts(self, reader: int) -> int:
        return int(self._numbers[1 + reader, 2])

    def send(self, message: bytes, check: Callable[[], None] = lambda: None) -> None:
        """Write to all readers; waits while the one that is furthest behind has as many pieces to read as there is
        room for.

        Args:
            check: raises if a reader will never read.
        """
        at = 0
        while True:
            piece = message[at : at + SLOT]
            written = int(self._numbers[0, 0])
            await_(lambda: written - int(self._numbers[1:, 0].min()) < SLOTS, check, 0.0)  # noqa: B023 (called here)
            begin = self._slot(written)
            header = np.array([len(message) - at, len(piece)], np.int64).tobytes()
            self._map[begin : begin + HEADER + len(piece)] = header + piece
            at += len(piece)
            if at == len(message):
                self._numbers[0, 1] += 1
            self._numbers[0, 0] = written + 1
            if at == len(message):
                return

    def receive(self, reader: int, check: Callable[[], None] = lambda: None, spin: float = 0.0) -> bytes:
        """The next message.

        Args:
            check: raises if none will come.
            spin: seconds of waiting in which the process does not sleep, so that it is there in microseconds.
        """
        pieces: list[bytes] = []
        while True:
            read = int(self._numbers[1 + reader, 0])
            await_(lambda: int(self._numbers[0, 0]) > read, check, spin)  # noqa: B023 (called here)
            begin = self._slot(read)
            left, size = np.frombuffer(self._map, np.int64, 2, begin).tolist()
            pieces.append(self._map[begin + HEADER : begin + HEADER + size])
            self._numbers[1 + reader, 0] = read + 1
            if left == size:
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _slot(self, index: int) -> int:
        return self._begin + index % SLOTS * (HEADER + SLOT)


def _attached(readers: int, memory: Any) -> Mailbox:
    return Mailbox(readers, memory.detach())

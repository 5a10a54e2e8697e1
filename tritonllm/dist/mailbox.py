"""Messages from one process to several, through memory that they share: each is written once, whoever reads it.

The memory has no name (``memfd_create``): nothing of it is left when the last process that has it ends, however that
ends. It also holds what the readers say of themselves: a beat, and how many messages they have acted on.

A number is written by one process only, after what it speaks of. That is enough where stores are seen in the order in
which they were made, as on x86; between the interpreter's own instructions there are barriers on other processors, too.
"""

import mmap
import os
import struct
import time
import weakref
from collections.abc import Callable, Sequence
from multiprocessing import reduction
from typing import Any

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


def close_with(owner: object, files: Sequence[int]) -> None:
    """Close these descriptors when an object's last reference goes. A piece of memory without a name takes its room for
    as long as one of its descriptors is open, whoever has ended."""
    weakref.finalize(owner, _close, files)


def _close(files: Sequence[int]) -> None:
    for file in files:
        os.close(file)


class Mailbox:
    """The shared memory; can be an argument of a process that is spawned. It goes with the last object that has it.

    Args:
        memory: a file descriptor, which this takes over; by default of new memory.
        readers: how many processes read.
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
        close_with(self, [memory])
        self._bytes = memoryview(mmap.mmap(memory, size))
        self._numbers = self._bytes[:numbers].cast("q")  # faster to index than an array of numpy

    def __reduce__(self) -> tuple[Any, ...]:
        return _attached, (self.readers, reduction.DupFd(self._memory))

    @property
    def sent(self) -> int:
        """How many messages were sent so far."""
        return self._numbers[1]

    def beat(self, reader: int) -> None:
        """A reader says that it lives."""
        self._numbers[self._line(reader) + 1] += 1

    def beats(self, reader: int) -> int:
        return self._numbers[self._line(reader) + 1]

    def acted(self, reader: int) -> None:
        """A reader has done what one more message says."""
        self._numbers[self._line(reader) + 2] += 1

    def acts(self, reader: int) -> int:
        return self._numbers[self._line(reader) + 2]

    def send(self, message: bytes | bytearray, check: Callable[[], None] = lambda: None) -> None:
        """Write to all readers; waits while the one that is furthest behind has as many pieces to read as there is
        room for.

        Args:
            check: raises if a reader will never read.
        """
        at, whole = 0, memoryview(message)
        while True:
            piece = whole[at : at + SLOT]
            written = self._numbers[0]
            oldest = written - SLOTS  # in its place the piece goes
            await_(lambda: all(n > oldest for n in self._read_counts()), check, 0.0)  # noqa: B023 (called here)
            begin = self._slot(written)
            struct.pack_into("qq", self._bytes, begin, len(whole) - at, len(piece))
            self._bytes[begin + HEADER : begin + HEADER + len(piece)] = piece
            at += len(piece)
            if at == len(whole):
                self._numbers[1] += 1
            self._numbers[0] = written + 1
            if at == len(whole):
                return

    def _read_counts(self) -> list[int]:
        """How many pieces each reader has read."""
        return [self._numbers[self._line(reader)] for reader in range(self.readers)]

    def receive(self, reader: int, check: Callable[[], None] = lambda: None, spin: float = 0.0) -> bytearray:
        """Wait for a reader's next message, and return it.

        Args:
            check: raises if none will come.
            spin: seconds of waiting in which the process does not sleep, so that it is there in microseconds.
        """
        pieces: list[bytearray] = []
        while True:
            read = self._numbers[self._line(reader)]
            await_(lambda: self._numbers[0] > read, check, spin)  # noqa: B023 (called here)
            begin = self._slot(read)
            left, size = struct.unpack_from("qq", self._bytes, begin)
            pieces.append(bytearray(self._bytes[begin + HEADER : begin + HEADER + size]))
            self._numbers[self._line(reader)] = read + 1
            if left == size:
                return pieces[0] if len(pieces) == 1 else bytearray().join(pieces)

    @staticmethod
    def _line(reader: int) -> int:
        """Where a reader's numbers begin: pieces read, beats, messages acted on. Before all are the writer's: pieces
        written, and messages."""
        return LINE * (1 + reader)

    def _slot(self, index: int) -> int:
        return self._begin + index % SLOTS * (HEADER + SLOT)


def _attached(readers: int, memory: Any) -> Mailbox:
    return Mailbox(readers, memory.detach())

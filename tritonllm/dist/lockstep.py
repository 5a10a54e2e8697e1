"""Engines that take every step together: each says what its next step needs, and waits until all have said it.

Engines that share a model's experts (:mod:`tritonllm.dist.exchange`) exchange rows in each layer of each step. So all
of them must take as many steps, and the rows of a step need room that all agree on. The host of each engine says what
its step needs just before it launches that step, while the device still computes the one before. An engine that has
nothing to compute joins the steps of the others; if none has, none takes a step.

Nobody decides, and no message says who is at work: an engine that wants a step writes the next number beside its name,
and one that sees a larger number than its own is behind, and joins. What is written for step n lies in one of two
places, which step n + 2 takes again; whoever writes there has seen all others write n + 1, so all have read n.

The memory has no name (``memfd_create``), as that of :class:`~tritonllm.dist.mailbox.Mailbox`; for the order of what is
written see there. A bell (``eventfd``) of each engine wakes it up when it sleeps.
"""

import mmap
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import reduction
from typing import Any, NamedTuple

from tritonllm.dist.mailbox import LINE, await_, close_with

WORDS = 6  # that an engine says of a step
PLACES = 2
STEP, LEFT, BEAT, SAID = range(4)  # where its numbers lie
EACH = -(-(SAID + PLACES * WORDS) // LINE) * LINE  # numbers of an engine
SPIN = 0.02  # seconds that an engine of a GPU waits for the others without a sleep: a step of them takes that long


class LeftError(RuntimeError):
    """Another engine has ended in order: there will be no more steps."""


class LockstepError(RuntimeError):
    """Another engine did not come to a step in time."""


class Board:
    """The memory and the bells; can be an argument of a process that is spawned.

    Args:
        size: number of engines.
        files: descriptors of the memory and of the bells, which this takes over; by default of new ones.
    """

    def __init__(self, size: int, files: Sequence[int] | None = None) -> None:
        nbytes = -(-8 * EACH * size // mmap.PAGESIZE) * mmap.PAGESIZE
        if files is None:
            memory = os.memfd_create("tritonllm-lockstep")
            os.ftruncate(memory, nbytes)
            files = [memory, *(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(size))]
        self.size = size
        self._files = list(files)
        self.numbers = memoryview(mmap.mmap(self._files[0], nbytes)).cast("q")
        close_with(self, self._files)

    def __reduce__(self) -> tuple[Any, ...]:
        return _attached, (self.size, [reduction.DupFd(file) for file in self._files])

    def bell(self, rank: int) -> int:
        """The descriptor that can be read once an engine has been woken up."""
        return self._files[1 + rank]


def _attached(size: int, files: list[Any]) -> Board:
    return Board(size, [file.detach() for file in files])


class ExpertPlace(NamedTuple):
    """Where an engine is among those that share experts; can be an argument of a process that is spawned.

    Attributes:
        rank: the number of the engine among them.
        port: the port of the store on this machine at which they meet.
        board: the board on which they note their steps.
    """

    rank: int
    port: int
    board: Board


class Lockstep:
    """One engine among those that take their steps together.

    Args:
        board: the board of all engines.
        rank: the number of this engine.
        patience: how long it waits for another, in seconds.
        spin: seconds of waiting in which it does not sleep, which would cost each step 50 us. It takes a core.

    Attributes:
        spin: seconds of waiting in which it does not sleep.
    """

    def __init__(self, board: Board, rank: int, patience: float, spin: float = 0.0) -> None:
        self._board, self._rank, self._patience, self.spin = board, rank, patience, spin
        self._others = [other for other in range(board.size) if other != rank]
        self._numbers, self._taken = board.numbers, 0
        self._heard: dict[int, tuple[int, float]] = {}  # the others' beats, and for how long there was no new one

    @property
    def bell(self) -> int:
        """A descriptor that can be read when this engine may be behind."""
        return self._board.bell(self._rank)

    def hush(self) -> None:
        """Let the bell be silent until it is rung again."""
        with suppress(BlockingIOError):  # it was not rung
            os.eventfd_read(self.bell)

    @property
    def is_behind(self) -> bool:
        """Another engine waits for this one in a step."""
        return any(self._numbers[EACH * other] > self._taken for other in self._others)

    def agree(self, words: Sequence[int]) -> list[list[int]]:
        """Say what the next step needs, and wait for what it needs elsewhere.

        Args:
            words: what this engine tells the others: at most :data:`WORDS` integers, as many on all engines.

        Returns:
            The words of all engines, in their order.

        Raises:
            LeftError: another engine has left.
            LockstepError: another engine did not come in time.
        """
        step = self._taken + 1
        at = SAID + step % PLACES * WORDS
        begin = EACH * self._rank
        for place, word in enumerate(words, begin + at):
            self._numbers[place] = word
        self._numbers[begin] = step  # after what it speaks of
        for other in self._others:
            os.eventfd_write(self._board.bell(other), 1)
        until = time.monotonic() + self._patience

        def check() -> None:
            missing = [other for other in self._others if self._numbers[EACH * other] < step]
            if any(self._numbers[EACH * other + LEFT] for other in missing):
                raise LeftError("another engine has ended")
            if missing and time.monotonic() > until:
                raise LockstepError(
                    f"engine {missing[0]} did not come to step {step} within {self._patience:g} s: it hangs, or "
                    "something on its machine holds it up"
                )

        await_(lambda: all(self._numbers[EACH * other] >= step for other in self._others), check, self.spin)
        self._taken = step
        starts = (EACH * rank + at for rank in range(self._board.size))
        return [self._numbers[start : start + len(words)].tolist() for start in starts]

    def leave(self) -> None:
        """Tell the others that this engine, which is between two steps, takes no more of them."""
        self._numbers[EACH * self._rank + LEFT] = 1

    def beat(self, seconds: float) -> dict[int, float]:
        """Say that this engine lives; by a thread of its own, every so many ``seconds``.

        Returns:
            For how long each of the others has not done so, by this engine's own beats: no time passes for it while it
            is stopped itself. One that has not begun, or has left, is not silent.
        """
        self._numbers[EACH * self._rank + BEAT] += 1
        for other in self._others:
            heard, _ = self._heard.get(other, (0, 0.0))
            now = self._numbers[EACH * other + BEAT]
            silent = heard == now and now > 0 and not self._numbers[EACH * other + LEFT]
            self._heard[other] = now, self._heard[other][1] + seconds if silent else 0.0
        return {other: silent for other, (_, silent) in self._heard.items()}

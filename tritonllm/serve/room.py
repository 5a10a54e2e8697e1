"""How many sequences are in the engine, and who waits until others find room there.

A request finds room at once or is refused, but for those of a body with several prompts, which wait for each other and
for others. The first who waits has a claim to what gets free: a request that comes meanwhile is refused as if that room
were taken. Without claims, one with many sequences would wait for as long as others take each place that gets free.
"""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from tritonllm.beam_search_params import BeamSearchParams
from tritonllm.sampling_params import SamplingParams
from tritonllm.serve.shared_count import SharedCount
from tritonllm.serve.tokenizing import Params

LOOK_AGAIN = 0.05  # seconds between two looks, since other processes make room without a word


class QueueFullError(RuntimeError):
    """As many requests wait as may wait: try again later."""


def sequences_of(params: Params) -> int:
    """How many a request has in the engine."""
    if isinstance(params, BeamSearchParams):
        return params.beam_width
    return params.n if isinstance(params, SamplingParams) else 1


class SequenceCounts(NamedTuple):
    """Of all API processes together.

    Attributes:
        taken: sequences in the engine.
        claimed: those of the first ones who wait, one in each process.
    """

    taken: SharedCount
    claimed: SharedCount


class Room:
    """Args:
    most: sequences that may be in the engine.
    counts: by default, this process is the only one.
    """

    def __init__(self, most: int, counts: SequenceCounts | None = None) -> None:
        self.most = most
        self._counts = counts or SequenceCounts(SharedCount(), SharedCount())
        self._first = False  # who asks is the first of those who wait
        self._turn = asyncio.Lock()
        self._made = asyncio.Event()  # there is room that was not there when it was last cleared

    @property
    def taken(self) -> int:
        return self._counts.taken.total

    def take(self, sequences: int) -> None:
        self._counts.taken.add(sequences)

    def give_back(self, sequences: int) -> None:
        self._counts.taken.add(-sequences)
        self._made.set()

    def check(self, sequences: int) -> None:
        """Raises:
        ValueError: so many never find room.
        QueueFullError: they find none now.
        """
        if sequences > self.most:
            raise ValueError(f"n={sequences} is more than this engine queues, {self.most}: lower it")
        # two who are first in their processes would wait for each other if they saw the other one's claim
        taken = self.taken + (0 if self._first else self._counts.claimed.total)
        if taken + sequences > self.most:
            raise QueueFullError(f"{taken} sequences run or wait, and the queue is full: try again later")

    async def wait(self, sequences: int, check: Callable[[int], None]) -> None:
        """Wait until there is room, which is the caller's if it takes it before it awaits anything. Who came first is
        served first, so that a request with many sequences has its turn, too.

        Args:
            sequences: of the caller.
            check: as :meth:`check`, which it calls.

        Raises:
            Exception: what ``check`` raises, but for :class:`QueueFullError`.
        """
        async with self._turn:
            while True:
                self._made.clear()
                self._first = True
                try:
                    return check(sequences)
                except QueueFullError:
                    pass
                finally:
                    self._first = False
                self._counts.claimed.add(sequences)
                try:
                    await self._look_again()
                finally:
                    self._counts.claimed.add(-sequences)

    async def _look_again(self) -> None:
        try:
            async with asyncio.timeout(LOOK_AGAIN):
                await self._made.wait()
        except TimeoutError:
            pass

"""How many sequences are in the engine, and who waits until others find room there.

A request finds room at once or is refused, but for those of a body with several prompts, which wait for each other and
for others. The first who waits has a claim to what gets free: a request that comes meanwhile is refused as if that room
were taken. Without claims, one with many sequences would wait for as long as others take each place that gets free.
(Other API processes know nothing of it: those who were first in two processes would wait for each other.)
"""

import asyncio
from collections.abc import Callable

from tritonllm.config.beam_search_params import BeamSearchParams
from tritonllm.config.sampling_params import SamplingParams
from tritonllm.serve.engines.shared_count import SharedCount
from tritonllm.serve.engines.tokenizing import Params

LOOK_AGAIN = 0.05  # seconds between two looks, since other processes make room without a word


class QueueFullError(RuntimeError):
    """As many requests wait as may wait: try again later."""


def sequences_of(params: Params) -> int:
    """How many a request has in the engine."""
    if isinstance(params, BeamSearchParams):
        return params.beam_width
    return params.n if isinstance(params, SamplingParams) else 1


class EngineRoom:
    """Counts the sequences in an engine, and refuses requests for which it has no room.

    Args:
        most: how many sequences may be in the engine.
        count: the count of those that are there, over all its API processes.
    """

    def __init__(self, most: int, count: SharedCount) -> None:
        self.most = most
        self._count = count
        self._claimed = 0  # sequences of the first who waits
        self._turn = asyncio.Lock()
        self._made = asyncio.Event()  # there is room that was not there when it was last cleared

    @property
    def taken(self) -> int:
        return self._count.total

    def take(self, sequences: int) -> None:
        self._count.add(sequences)

    def give_back(self, sequences: int) -> None:
        self._count.add(-sequences)
        self._made.set()

    def check(self, sequences: int) -> None:
        """Check that there is room for so many sequences.

        Raises:
            ValueError: so many never find room.
            QueueFullError: they find none now.
        """
        if sequences > self.most:
            raise ValueError(f"n={sequences} is more than this engine queues, {self.most}: lower it")
        taken = self.taken + self._claimed
        if taken + sequences > self.most:
            raise QueueFullError(f"{taken} sequences run or wait, and the queue is full: try again later")

    async def wait(self, sequences: int, check: Callable[[int], None]) -> None:
        """Wait until there is room, which is the caller's if it takes it before it awaits anything. Who came first is
        served first, so that a request with many sequences has its turn, too.

        Args:
            sequences: how many sequences the caller's request has.
            check: as :meth:`check`, which it calls.

        Raises:
            Exception: what ``check`` raises, but for :class:`QueueFullError`.
        """
        async with self._turn:
            while True:
                self._made.clear()
                try:
                    return check(sequences)
                except QueueFullError:
                    self._claimed = sequences
                try:
                    await self._look_again()
                finally:
                    self._claimed = 0

    async def _look_again(self) -> None:
        try:
            async with asyncio.timeout(LOOK_AGAIN):
                await self._made.wait()
        except TimeoutError:
            pass

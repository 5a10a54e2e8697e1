"""Batches of copies between the device and the cache's second tier: their order, and what waits for which. No torch.

Copies come in numbered batches, which the device runs on one stream of its own, in order. A step's plan brings at most
two. The first one (:class:`Transfers`) begins when the steps launched before have ended, stores before loads. So it
stores what earlier plans have computed, and overtakes nothing. The second one (:class:`Fills`) stores the blocks that
the step itself fills, if it computes prompts: each layer behind the launches that compute it
(:mod:`tritonllm.engine.cache.layer_copies`), so that little is left to copy when a long prompt is computed. It ends
behind the step's last layer: so the step can wait for the first batch only. A block counts as stored when its batch has
ended.

Two things are left to see to, and both are waits of the device, not of the host (:attr:`Transfers.wait`):

- a step that writes into a block waits for the batch that still reads or writes it;
- a step that reads loaded blocks waits for the batch that loads them.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple


class Transfers(NamedTuple):
    """What is copied before a step, and what the step waits for.

    Attributes:
        number: the batch's number; each batch has a higher one than those before it.
        stores: blocks and the slots that they are copied to.
        loads: slots and the blocks that they are copied to, after the stores.
        wait: the step begins when all batches up to this number have ended; 0 if it need not wait.
    """

    number: int
    stores: tuple[tuple[int, int], ...]
    loads: tuple[tuple[int, int], ...]
    wait: int = 0


class Fills(NamedTuple):
    """What is copied while a step computes it.

    Attributes:
        number: the batch's number, higher than those of the batches before the step.
        stores: blocks that are whole when the step has ended, and the slots that they are copied to.
    """

    number: int
    stores: tuple[tuple[int, int], ...]


class UnderWay:
    """What the batches read and write that are not known to have ended, the one that is put together among them.

    Args:
        unknown: batches up to this number may be under way, too, and nobody knows what they touch.
    """

    def __init__(self, unknown: int = 0) -> None:
        self.unknown = unknown
        self._storing: dict[int, int] = {}  # blocks that are copied from, and the last batch that does it
        self._arriving: dict[int, int] = {}  # blocks that are copied to
        self._batches: deque[tuple[int, Sequence[tuple[int, int]], Sequence[tuple[int, int]]]] = deque()

    def store(self, block: int, number: int) -> None:
        """This batch will copy from the block."""
        self._storing[block] = number

    def load(self, block: int, number: int) -> None:
        """This batch will copy to the block."""
        self._arriving[block] = number

    def issue(self, number: int, stores: Sequence[tuple[int, int]], loads: Sequence[tuple[int, int]]) -> None:
        """This batch goes with a plan: ``stores`` and ``loads`` as :class:`Transfers` has them."""
        self._batches.append((number, stores, loads))

    def end(self, done: int) -> None:
        """The batches up to this number have ended."""
        while self._batches and self._batches[0][0] <= done:
            number, stores, loads = self._batches.popleft()
            for moving, blocks in ((self._storing, [b for b, _ in stores]), (self._arriving, [b for _, b in loads])):
                for block in blocks:
                    if moving.get(block) == number:
                        del moving[block]

    def last_load(self, blocks: Sequence[int]) -> int:
        """The last batch that copies to one of these blocks; 0 if none does."""
        return max((self._arriving.get(block, 0) for block in blocks), default=0)

    def last_of(self, blocks: Sequence[int]) -> int:
        """The last batch that copies from or to one of these blocks; 0 if none does."""
        last = 0
        for moving in (self._storing, self._arriving):
            if moving:
                last = max(last, *(moving.get(block, 0) for block in blocks), 0)
        return last

    def slots(self) -> set[int]:
        """What those read and write that went with plans, as far as it is known. Takes time in their number."""
        touched = set[int]()
        for _, stores, loads in self._batches:
            touched.update([slot for _, slot in stores], [slot for slot, _ in loads])
        return touched

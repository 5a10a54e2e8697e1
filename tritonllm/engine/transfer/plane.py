"""How the contents of blocks get from the copies that one engine keeps into the slots of another, once it is known who
has them (:mod:`tritonllm.engine.transfer.peer`). No torch.

Questions and what is told of blocks always go over a connection (:mod:`tritonllm.engine.transfer.wire`).
:class:`Frames` sends the contents there as well; :mod:`tritonllm.engine.transfer.nixl` reads them out of the other
engine's memory, and :mod:`tritonllm.engine.transfer.ipc` out of its GPU's.
"""

import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from tritonllm.config.kv_transfer import KVTransferConfig
from tritonllm.engine.transfer.connector import Slots, arrays
from tritonllm.engine.transfer.kept import KeptBlock, KeptBlocks
from tritonllm.engine.transfer.wire import Channel, Kind, Question, frame, head_of, question

QUICK = 10.0  # seconds in which a frame that has begun must be through


class Wanted(NamedTuple):
    """Blocks that are asked for: their keys, the slots that they go to, and whether they are there, which
    :meth:`Plane.bring` says of each as soon as it is, so that those before a failure count."""

    keys: Sequence[bytes]
    slots: Sequence[int]
    there: list[bool]


class Copy(NamedTuple):
    """A copy of a block's contents, and the number of its place if copies have such."""

    contents: bytes | memoryview
    place: int = 0


class Plane(Protocol):
    """How one engine hands blocks to others and takes theirs. ``keep`` is for one thread, all else for any.

    Attributes:
        questions: the kinds of frames that :meth:`answer` answers.
    """

    questions: Collection[Kind]

    def register(self, memory: Sequence[Slots], config: KVTransferConfig, max_bytes: int) -> None:
        """Work on these slots from now on; called once, before all else.

        Args:
            memory: as in :meth:`tritonllm.engine.transfer.connector.KVConnector.register`.
            config: whether it will copy, and whether it will bring.
            max_bytes: how many bytes all copies may take together.

        Raises:
            ValueError: it cannot work.
        """

    def keep(self, keys: Sequence[bytes], slots: Sequence[int], kept: KeptBlocks) -> int:
        """Keep what is in these slots now. Returns of how many blocks that was not there."""

    def gone(self, kept: KeptBlock) -> None:
        """A copy is of no more use."""

    def answer(self, channel: Channel, asked: Question, kept: KeptBlocks, until: float) -> None:
        """Answer a question for blocks, whose waiting ends at that time of ``time.monotonic``.

        Raises:
            OSError: whoever has asked is gone.
        """

    def bring(self, channel: Channel, wanted: Wanted, wait: float, deadline: float) -> None:
        """Ask for blocks, and fill their slots. Once it is over, nothing is written there any more.

        Args:
            wait: seconds that the other side may wait for blocks that are not there yet.

        Raises:
            OSError: the other side is gone, or too late.
            WireError: what came is not right.
        """

    def close(self, seconds: float) -> None:
        """End what is under way, in so many seconds at most."""


class Frames:
    """Contents go in frames of the connection."""

    questions: Collection[Kind] = (Kind.LOAD,)

    def __init__(self) -> None:
        self._memory: Sequence[np.ndarray] = ()

    def register(self, memory: Sequence[Slots], config: KVTransferConfig, max_bytes: int) -> None:
        self._memory = arrays(memory)

    def keep(self, keys: Sequence[bytes], slots: Sequence[int], kept: KeptBlocks) -> int:
        return keep_each(keys, slots, kept, lambda slot: Copy(b"".join(views(self._memory, slot))))

    def gone(self, kept: KeptBlock) -> None:
        pass

    def answer(self, channel: Channel, asked: Question, kept: KeptBlocks, until: float) -> None:
        for key in asked.keys:
            one = kept.get(key, until)
            if one is None:
                channel.send(frame(Kind.MISS, key), time.monotonic() + QUICK)
            else:
                channel.send(one.head + key, time.monotonic() + QUICK)
                channel.send(one.contents, time.monotonic() + QUICK)

    def bring(self, channel: Channel, wanted: Wanted, wait: float, deadline: float) -> None:
        channel.send(question(Kind.LOAD, wanted.keys, wait), deadline)
        for at, (key, slot) in enumerate(zip(wanted.keys, wanted.slots, strict=True)):
            wanted.there[at] = channel.read_block(key, views(self._memory, slot), deadline)

    def close(self, seconds: float) -> None:
        pass


def views(memory: Sequence[np.ndarray], slot: int) -> list[memoryview]:
    """The parts of a slot."""
    return [memoryview(part[slot]) for part in memory]


def keep_each(keys: Sequence[bytes], slots: Sequence[int], kept: KeptBlocks, copy: Callable[[int], Copy]) -> int:
    """Keep the blocks that are not there yet, one by one.

    Args:
        copy: makes a copy of a slot.
    """
    count = 0
    for key, slot in zip(keys, slots, strict=True):
        if not kept.has(key):
            contents, place = copy(slot)
            count += kept.put(key, head_of(Kind.BLOCK, (key, contents)), contents, place)
    return count

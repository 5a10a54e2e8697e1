"""Contents of blocks by reads out of another engine's memory, with NIXL (:mod:`tritonllm.engine.transfer.nixl_agent`):
a plane of :class:`tritonllm.engine.transfer.peer.Peer`. No torch.

An engine that saves keeps its copies in one piece of memory that it registers once. Who wants blocks asks over a
connection where they lie, and reads them into its own slots, which it has registered as well; the other engine does
nothing for that, and does not wait for it either. So a place may be given to another block meanwhile: what was read is
a block only if it has the checksum that came with the place.

Blocks are read in batches, so that those before a failure count, and so that each is checked while it is in the
processor's cache still.
"""

import time
from collections import deque
from collections.abc import Collection, Sequence
from functools import partial

import numpy as np

from tritonllm.config.kv_transfer import KVTransferConfig
from tritonllm.engine.transfer.connector import Slots, arrays
from tritonllm.engine.transfer.kept import KeptBlock, KeptBlocks
from tritonllm.engine.transfer.nixl_agent import Agent, MakeAgent, Span
from tritonllm.engine.transfer.nixl_reader import NixlReader
from tritonllm.engine.transfer.plane import QUICK, Copy, Frames, Wanted, keep_each, views
from tritonllm.engine.transfer.wire import (
    BlockPlace,
    Channel,
    Kind,
    Question,
    WireError,
    frame,
    head_of,
    place_frame,
    question,
)

BATCH_BYTES = 32 << 20  # of one read
TOGETHER = 1024  # places in one go


class Reads:
    """Blocks are read by who wants them.

    Args:
        make: makes agents.
    """

    questions: Collection[Kind] = (Kind.LOAD, Kind.WHERE)  # an engine with "Peer" can have its blocks, too

    def __init__(self, make: MakeAgent) -> None:
        self._make = make
        self._frames = Frames()
        self._memory: Sequence[np.ndarray] = ()
        self._size = 0
        self._copies: np.ndarray = np.empty((0, 0), np.uint8)
        self._free: deque[int] = deque()  # places of copies that others had
        self._unused = 0  # places from this one on had no copy yet
        self._agent: Agent | None = None  # of the copies
        self._description = b""
        self._reader: NixlReader | None = None

    def register(self, memory: Sequence[Slots], config: KVTransferConfig, max_bytes: int) -> None:
        memory = arrays(memory)
        if not all(part.flags.c_contiguous for part in memory):
            raise ValueError("kv_connector='Nixl': each array of slots must be contiguous")
        self._memory, self._size = memory, sum(part.shape[1] for part in memory)
        try:
            if config.saves:  # one place more than there are copies, for the one that is being made
                self._copies = np.empty((max_bytes // self._size + 1, self._size), np.uint8)
                self._agent = self._agent_of([self._copies])
                self._description = frame(Kind.AGENT, self._agent.metadata())
            if config.loads:
                self._reader = NixlReader(partial(self._agent_of, memory))
        except OSError as error:
            self.close(0.0)
            raise ValueError(
                f"kv_transfer_config: kv_connector='Nixl' cannot start here ({error}): take 'Peer'"
            ) from error

    def keep(self, keys: Sequence[bytes], slots: Sequence[int], kept: KeptBlocks) -> int:
        return keep_each(keys, slots, kept, self._copy)

    def _copy(self, slot: int) -> Copy:
        try:
            place = self._free.popleft()
        except IndexError:
            place, self._unused = self._unused, self._unused + 1
        contents, at = memoryview(self._copies[place]), 0
        for part in views(self._memory, slot):
            contents[at : at + part.nbytes] = part
            at += part.nbytes
        return Copy(contents, place)

    def gone(self, kept: KeptBlock) -> None:
        self._free.append(kept.place)

    def answer(self, channel: Channel, asked: Question, kept: KeptBlocks, until: float) -> None:
        if asked.kind is Kind.LOAD:
            self._frames.answer(channel, asked, kept, until)
            return
        start, answers = self._copies.ctypes.data, [self._description]
        for key in asked.keys:
            one = kept.get(key, 0.0)
            if len(answers) == TOGETHER or (one is None and answers and time.monotonic() < until):
                channel.send(b"".join(answers), time.monotonic() + QUICK)
                answers.clear()
            one = one or kept.get(key, until)
            if one is None:
                answers.append(frame(Kind.MISS, key))
            else:
                answers.append(place_frame(key, BlockPlace(one.head, start + one.place * self._size)))
        channel.send(b"".join(answers), time.monotonic() + QUICK)

    def bring(self, channel: Channel, wanted: Wanted, wait: float, deadline: float) -> None:
        channel.send(question(Kind.WHERE, wanted.keys, wait), deadline)
        metadata = channel.read_agent(deadline)
        places: dict[int, BlockPlace] = {}
        damaged = 0
        for at, key in enumerate(wanted.keys):
            place = channel.read_place(key, deadline)
            if place is not None and place.address >> 63:
                raise WireError("no block can lie at such an address")
            if place is not None:
                places[at] = place
            full = (len(places) + 1) * self._size > BATCH_BYTES
            if places and (full or at + 1 == len(wanted.keys) or channel.is_quiet):
                damaged += self._read(metadata, wanted, places, deadline)
                places.clear()
        if damaged:
            raise WireError(f"{damaged} blocks were other ones by the time that they were read")

    def close(self, seconds: float) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close(seconds)
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.end()

    def _agent_of(self, memory: Sequence[np.ndarray]) -> Agent:
        agent = self._make()
        agent.register(memory)
        return agent

    def _read(self, metadata: bytes, wanted: Wanted, places: dict[int, BlockPlace], deadline: float) -> int:
        """Fill the slots of these blocks, and count those that are damaged."""
        reader = self._reader
        if reader is None:
            raise ConnectionError("this connector is closed")
        mine: list[Span] = []
        theirs: list[Span] = []
        for at, place in places.items():
            address = place.address
            for part in self._memory:
                size = part.shape[1]
                mine.append((part.ctypes.data + wanted.slots[at] * size, size))
                theirs.append((address, size))
                address += size
        reader.read(metadata, mine, theirs, deadline)
        for at, place in places.items():
            key, contents = wanted.keys[at], views(self._memory, wanted.slots[at])
            wanted.there[at] = head_of(Kind.BLOCK, (key, *contents)) == place.head
        return sum(not wanted.there[at] for at in places)

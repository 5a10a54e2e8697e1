"""Contents of blocks by copies from GPU to GPU between processes of one host, with CUDA IPC: a plane of
:class:`tritonllm.engine.transfer.peer.Peer`. No torch.

An engine that saves keeps its copies in one piece of its GPU's memory, which other processes may open
(:mod:`tritonllm.engine.transfer.ipc_memory`, :mod:`tritonllm.engine.transfer.ipc_opened`). Who wants blocks asks over a
connection in which places they are, and copies them into its own slots, which are in the memory of its GPU as well
(:attr:`~tritonllm.config.kv_transfer.KVTransferConfig.on_device`). The other engine does nothing for that and does not
wait for it, so a place may be given to another block meanwhile.

A checksum would have to be computed on the device, or of bytes brought to the host. Instead each copy that is kept has
a number that no other one ever has. When the reader has copied what it was told of, it says so (``READ``), and the
owner tells of which keys place and number are what they were when it answered (``STILL``). A block is given up under
the lock under which that is compared, and only then is its place written to: so what is still there was there all the
while. The numbers stay with the owner, which compares them.

Copies into a place have ended before anybody is told of it.
"""

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from uuid import uuid4

import numpy as np

from tritonllm.config.kv_transfer import KVTransferConfig
from tritonllm.engine.transfer.connector import DeviceSlots, Slots
from tritonllm.engine.transfer.ipc_memory import HANDLE_BYTES, Device, MakeDevice, SharedArena, arena_bytes
from tritonllm.engine.transfer.ipc_opened import OpenedMemory
from tritonllm.engine.transfer.kept import KeptBlock, KeptBlocks
from tritonllm.engine.transfer.plane import QUICK, Wanted
from tritonllm.engine.transfer.wire import (
    Channel,
    Kind,
    Question,
    WireError,
    count_frame,
    frame,
    places_frame,
    question,
)

logger = logging.getLogger(__name__)
SAVED_BYTES = 64 << 20  # that are copied before others are told of them
FIRST, TOGETHER = 128, 1024  # places in the first answer, with which the copies begin, and in those behind it
PENDING = 32  # blocks of a question, if they are being computed still: those before a failure count
READING = 60.0  # seconds in which who was told of places has read them


class DeviceReads:
    """Blocks are copied by who wants them.

    Args:
        make: makes the device that the slots are on.
    """

    questions: Collection[Kind] = (Kind.WHERE, Kind.HOLD)

    def __init__(self, make: MakeDevice) -> None:
        self._make = make
        self._device: Device | None = None
        self._slots: list[DeviceSlots] = []
        self._size = 0
        self._arena: SharedArena | None = None  # of the copies that are kept here
        self._base = 0
        self._free: deque[int] = deque()  # places of copies that others had
        self._unused = 0  # places from this one on had no copy yet
        self._numbers = itertools.count(1)
        self._saving = threading.Lock()  # while the arena is written to
        self._changed = threading.Condition()
        self._holders: set[Channel] = set()  # of processes that have the arena open
        self._closed = False
        self._opened: OpenedMemory | None = None

    def register(self, memory: Sequence[Slots], config: KVTransferConfig, max_bytes: int) -> None:
        self._slots = [part for part in memory if isinstance(part, DeviceSlots)]
        if len(self._slots) < len(memory):
            raise ValueError("kv_connector='CudaIpc' needs slots in a device's memory, not in the host's: take 'Peer'")
        sizes = tuple(part.shape[1] for part in self._slots)
        self._size = sum(sizes)
        try:
            self._device = device = self._make(self._slots[0].device)
            if config.saves:
                self._arena = self._make_arena(device, max_bytes, sizes)
            if config.loads:
                self._opened = OpenedMemory(device)
        except OSError as error:
            self.close(0.0)
            raise ValueError(
                f"kv_transfer_config: kv_connector='CudaIpc' cannot start here ({error}): take 'Peer'"
            ) from error

    def keep(self, keys: Sequence[bytes], slots: Sequence[int], kept: KeptBlocks) -> int:
        arena, device = self._arena, self._device
        assert arena is not None and device is not None  # it saves
        new = [(key, slot) for key, slot in zip(keys, slots, strict=True) if not kept.has(key)]
        most, count = min(max(1, SAVED_BYTES // self._size), arena.places), 0
        for start in range(0, len(new), most):
            some = new[start : start + most]
            with self._saving:
                if self._closed:
                    break
                kept.make_room(len(some) * self._size)
                slots_of, places = np.array([slot for _, slot in some]), np.empty(len(some), np.int64)
                order = np.argsort(slots_of)  # that of the blocks in a prompt; the keys begin with its end
                places[order] = self._take_places(len(some))
                pairs = slots_of[order], places[order]
                try:
                    device.copy(arena.spans(self._base, self._slots, pairs, into_slots=False))()
                except OSError as error:
                    self._free.extend(places.tolist())
                    logger.warning("blocks cannot be kept for others: %s", error)
                    break
            for (key, _), place in zip(some, places.tolist(), strict=True):
                number = next(self._numbers).to_bytes(8, "little")
                count += kept.put(key, number, b"", place, self._size)
        return count

    def gone(self, kept: KeptBlock) -> None:
        self._free.append(kept.place)

    def answer(self, channel: Channel, asked: Question, kept: KeptBlocks, until: float) -> None:
        arena = self._arena
        if arena is None or self._closed:
            raise ConnectionError("this connector is closed")
        if asked.kind is Kind.HOLD:
            self._hold(channel, asked.keys == [arena.name])
            return
        told, answer = list[KeptBlock | None](), frame(Kind.AGENT, arena.pack())
        while len(told) < len(asked.keys):
            found = self._find_some(asked.keys[len(told) :], kept, until, TOGETHER if told else FIRST)
            answer += places_frame([-1 if one is None else one.place for one in found])
            channel.send(answer, time.monotonic() + QUICK)
            told, answer = told + found, b""
        channel.read_has_read(time.monotonic() + READING)
        channel.send(frame(Kind.STILL, bytes(kept.still(asked.keys, told))), time.monotonic() + QUICK)

    def bring(self, channel: Channel, wanted: Wanted, wait: float, deadline: float) -> None:
        until, together = time.monotonic() + wait, PENDING if wait > 0 else len(wanted.keys)
        damaged = 0
        for start in range(0, len(wanted.keys), together):
            keys, slots = wanted.keys[start : start + together], wanted.slots[start : start + together]
            channel.send(question(Kind.WHERE, keys, until - time.monotonic()), deadline)
            told, still = self._read(channel, np.array(slots), deadline)
            wanted.there[start : start + len(keys)] = (told & still).tolist()
            damaged += int((told & ~still).sum())
        if damaged:  # that is no failure of the other engine, which has little room
            logger.info("%d blocks were given up for others while they were copied: they are computed", damaged)

    def close(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        with self._saving, self._changed:
            was_closed, self._closed = self._closed, True
        if self._opened is not None:
            self._opened.close(seconds)
        if self._arena is None or was_closed or self._device is None:
            return
        with self._changed:
            for channel in self._holders:
                channel.end_sending()
            while self._holders and time.monotonic() < until:
                self._changed.wait(max(0.0, until - time.monotonic()))
            if self._holders:  # they may read it still; it goes with this process
                logger.warning("%d engines do not let go of this one's memory: it is not freed", len(self._holders))
                return
        try:
            self._device.free(self._base)
        except OSError as error:  # the device has failed: then nothing can be freed
            logger.warning("the memory for other engines cannot be freed: %s", error)

    def _make_arena(self, device: Device, max_bytes: int, sizes: tuple[int, ...]) -> SharedArena:
        places = max_bytes // self._size
        try:
            self._base = device.allocate(arena_bytes(places, sizes))
        except OSError as error:
            raise ValueError(
                f"kv_transfer_config: kv_connector_extra_config: max_bytes={max_bytes} of the GPU's memory cannot be "
                f"had ({error}): lower it, kv_offloading_size or gpu_memory_utilization"
            ) from error
        try:
            handle = device.export(self._base)
        except OSError:
            device.free(self._base)
            raise
        return SharedArena(device.machine, uuid4().bytes, handle.ljust(HANDLE_BYTES, b"\0"), places, sizes)

    def _take_places(self, count: int) -> list[int]:
        """Take so many free places, in order: neighbours are copied together."""
        used = [self._free.popleft() for _ in range(min(count, len(self._free)))]
        unused = range(self._unused, self._unused + count - len(used))
        self._unused = unused.stop
        return sorted([*used, *unused])

    def _find_some(self, keys: Sequence[bytes], kept: KeptBlocks, until: float, most: int) -> list[KeptBlock | None]:
        """The first of these blocks, at least one; that one is waited for only if it is not there."""
        found = kept.find(keys[:most])
        missing = next((at for at, one in enumerate(found) if one is None), len(found))
        if missing == len(found) or time.monotonic() >= until:
            return found
        return found[:missing] or [kept.get(keys[0], until)]

    def _hold(self, channel: Channel, is_there: bool) -> None:
        """Keep the arena until the other side hangs up, if that is what it has asked for."""
        with self._changed:
            is_there = is_there and not self._closed
            if is_there:
                self._holders.add(channel)
        try:
            channel.send(count_frame(int(is_there)), time.monotonic() + QUICK)
            if is_there:
                channel.wait_for_end()
        finally:
            with self._changed:
                self._holders.discard(channel)
                self._changed.notify_all()

    def _read(self, channel: Channel, slots: np.ndarray, deadline: float) -> tuple[np.ndarray, np.ndarray]:
        """Copy the blocks that were asked for into slots: bool ``[N]``, whether each was there, and whether it still
        was when it had been copied."""
        opened, device = self._opened, self._device
        arena = SharedArena.unpack(channel.read_agent(deadline))
        if opened is None or device is None:
            raise ConnectionError("this connector is closed")
        if arena.sizes != tuple(part.shape[1] for part in self._slots):
            raise WireError("the other engine's blocks have other sizes")
        places, at, copies = np.full(len(slots), -1), 0, list[Callable[[], None]]()
        with opened.using(channel, arena, deadline) as base:
            try:
                while at < len(slots):
                    some = channel.read_places(len(slots) - at, deadline)
                    if some.min() < -1 or some.max() >= arena.places:
                        raise WireError("there is no such place in the other engine's memory")
                    there = np.flatnonzero(some >= 0)
                    places[at : at + len(some)] = some
                    pairs = slots[at + there], some[there]
                    copies.append(device.copy(arena.spans(base, self._slots, pairs, into_slots=True)))
                    at += len(some)
            finally:
                _wait_for(copies)
            channel.send(frame(Kind.READ), deadline)
            still = channel.read_still(len(slots), deadline)
        return places >= 0, still


def _wait_for(copies: Iterable[Callable[[], None]]) -> None:
    """Wait until all copies have ended, whatever becomes of them.

    Raises:
        OSError: the error of the first that has failed.
    """
    problem: OSError | None = None
    for wait in copies:
        try:
            wait()
        except OSError as error:
            problem = problem or error
    if problem is not None:
        raise problem

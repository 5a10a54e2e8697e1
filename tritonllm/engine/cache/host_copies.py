"""Copies blocks between the cache and the host's memory, beside the steps (:mod:`tritonllm.engine.schedule.host_tier`).

A block of the cache is in as many pieces as there are layers, twice: 32 KB each for Llama-3.1-8B. One copy for each
would cost more to begin than to run. So a kernel gathers some blocks on the device, and the copy engine takes those
that lie side by side in the host's memory, 2 MB and more, in one piece; and back in the opposite order. The copy engine
needs none of the processors that steps run on, and the kernel runs for a small part of the time.

What a step fills leaves while the step runs, in groups of layers (:mod:`tritonllm.engine.cache.layer_copies`). In the
host's memory a block's layers lie side by side, so some of them are a column of the slots. The driver copies that of
slots that follow each other in one piece (torch does not), so connectors see the memory that they always saw.

The host's memory is page-locked: only then does the copy engine reach it by itself. It is registered with the driver
instead of taken from torch's allocator, which rounds up to a power of two and never gives back.

For a connector between devices (:mod:`tritonllm.engine.transfer.ipc`) the slots lie in the device's memory. Then the
kernel writes straight into them, and reads them, wherever they are: nothing is gathered, and no copy engine has a part
in it.
"""

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from tritonllm.dist.peer_memory import CudaDriver
from tritonllm.engine.cache.layer_copies import LayerCopies, LayerGroup, copies_of
from tritonllm.engine.data.copy_batches import Fills, Transfers
from tritonllm.engine.data.inputs import upload
from tritonllm.engine.transfer.connector import DeviceSlots, Slots
from tritonllm.kernels import pack_blocks, unpack_blocks

# Blocks that are gathered at a time. Their copy takes 1.2 ms at 55 GB/s, many times what launching it does.
STAGING_BYTES = 64 << 20
# Less is copied in one piece behind the step. It takes 1.2 ms at 55 GB/s, and nine groups of layers may take the host
# as long for their launches (an estimate, from 0.1 ms for one).
STREAMED_BYTES = 64 << 20
ENDS_WITHIN = 60.0  # seconds that a thread waits for a batch: the device is lost if it takes longer


def staging_bytes(block_bytes: int, num_slots: int) -> int:
    """Memory of the device for the blocks that are gathered at a time; 0 without slots."""
    return min(num_slots, max(1, STAGING_BYTES // block_bytes)) * block_bytes


def device_bytes(block_bytes: int, num_slots: int, on_device: bool) -> int:
    """Memory of the device that :class:`HostCopies` takes: its slots, or what goes to slots of the host."""
    return num_slots * block_bytes if on_device else staging_bytes(block_bytes, num_slots)


class HostCopies:
    """The second tier's memory, and the stream that fills and reads it.

    Args:
        pools: ``[L, 2, P, S, K, D]``, keys and values of L layers of one shape, of each model that has blocks of these
            numbers; those of the model whose steps tell of its layers come first.
        num_slots: blocks that the host's memory holds.
        on_device: the slots lie in the device's memory instead.
        layers: for each pool of that model, the numbers of its layers, ascending; by default it has the first pool.

    Raises:
        ValueError: the driver does not lock so much memory, or the device has not so much.
    """

    def __init__(
        self,
        pools: Sequence[torch.Tensor],
        num_slots: int,
        on_device: bool = False,
        layers: Sequence[Sequence[int]] | None = None,
    ) -> None:
        device = pools[0].device
        block_bytes = sum(pool[:, :, 0].nbytes for pool in pools)
        self._staged, self._slots = staging_bytes(block_bytes, num_slots) // block_bytes, num_slots
        self._on_device = on_device
        # blocks that leave layer by layer; the CPU, which copies at once, has no launches to save
        self._least = -(-STREAMED_BYTES // block_bytes) if device.type == "cuda" else 0
        try:
            self._parts = [_CopyPart.of(pool, num_slots, 0 if on_device else self._staged, on_device) for pool in pools]
        except torch.OutOfMemoryError as error:
            if not on_device:
                raise
            raise ValueError(
                f"kv_offloading_size: the GPU has no {num_slots * block_bytes / (1 << 30):.1f} GiB left, which are of "
                "its memory with this kv_connector: lower it, num_blocks or gpu_memory_utilization"
            ) from error
        self._stream: torch.cuda.Stream | None = None
        self._events: deque[tuple[int, torch.cuda.Event]] = deque()  # of the batches that may still run
        self._done = self._given_up = 0
        self._device = device
        self._layers = [pool.shape[0] for pool in pools]
        self._announced = [range(len(pools[0]))] if layers is None else layers
        self._driver: CudaDriver | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._driver = CudaDriver(device)
            for part in self._parts:
                release = _hold(self._stream) if on_device else _lock(part.host, self._stream)
                weakref.finalize(self, release, part.host).atexit = False  # the process takes its memory with it

    @property
    def done(self) -> int:
        """The number of the last batch that is known to have ended."""
        while self._events and self._events[0][1].query():
            self._done = self._events.popleft()[0]
        if self._given_up > self._done and not self._events and (self._stream is None or self._stream.query()):
            self._done = self._given_up
        return self._done

    def give_up(self, number: int) -> None:
        """A step was broken off: batches up to this one that have not begun never will, and one that was begun in part
        does not go on. They count as ended once nothing is copied any more."""
        self._given_up = number

    @torch.inference_mode()
    def run(self, transfers: Transfers) -> None:
        """Begin a batch once the work launched before has ended, and let the work launched from now on wait for as much
        as it says. The host waits for nothing."""
        if self._stream is None:
            self._copy(transfers)
            self._done = max(self._done, transfers.number)
            return
        main = torch.cuda.current_stream(self._stream.device)
        if transfers.number:
            self._stream.wait_stream(main)
            with torch.cuda.stream(self._stream):
                self._copy(transfers)
            event = torch.cuda.Event()
            event.record(self._stream)
            self._events.append((transfers.number, event))
        waited = [event for number, event in self._events if number <= transfers.wait]
        if waited:
            main.wait_event(waited[-1])  # they end in order
        if transfers.wait > max([self._done, *(number for number, _ in self._events)]):
            main.wait_stream(self._stream)  # an interrupt came between that batch and its event

    @property
    def marked_layers(self) -> list[int]:
        """Where a step that is captured should say that layers end."""
        groups = [] if self._on_device else copies_of(self._layers, self._announced)
        return list(dict.fromkeys(group.after for group in groups if group.after is not None))

    def fill(self, fills: Fills, by_layer: bool, ends: Mapping[int, torch.cuda.Event] | None = None) -> LayerCopies:
        """Copies of what a step computes, which is launched next. The host waits for nothing.

        Args:
            by_layer: the step says of each layer when it is launched (:meth:`LayerCopies.computed`), or where it ends.
                Of few blocks that is not asked.
            ends: where the layers end of a step that is launched as a whole: events by layer.
        """
        pairs = sorted(fills.stores, key=lambda pair: pair[1])  # slots that follow each other are copied together
        apart = by_layer and not self._on_device and len(pairs) >= self._least
        groups = copies_of(self._layers, self._announced if apart else ())
        there: list[torch.Tensor] = []  # blocks and slots, on the device when the first group needs them
        copy = partial(self._copy_group, np.array(pairs, dtype=np.int64), there, ends or {})
        return LayerCopies(groups, copy, partial(self._filled, fills.number))

    @torch.inference_mode()
    def _copy_group(
        self, pairs: np.ndarray, there: list[torch.Tensor], ends: Mapping[int, torch.cuda.Event], group: LayerGroup
    ) -> None:
        """Begin the copy of some layers of ``pairs[N, 2]`` int64, of blocks to slots, once these layers, or all that is
        launched, have ended."""
        if self._stream is not None:
            end = None if group.after is None else ends.get(group.after)
            if end is not None:
                self._stream.wait_event(end)
            else:
                self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            if not there:
                there += upload([np.ascontiguousarray(pairs[:, at]) for at in (0, 1)], self._device)
            blocks, places = there
            part, pieces = self._parts[group.pool], slice(2 * group.rows.start, 2 * group.rows.stop)
            if self._on_device:  # all layers
                pack_blocks(part.rows, blocks, part.host, places=places)
                return
            rows, slots = part.rows[pieces], pairs[:, 1].tolist()
            staging = part.staged_rows(len(rows))
            for start in range(0, len(slots), len(staging)):
                some = slots[start : start + len(staging)]
                pack_blocks(rows, blocks[start : start + len(some)], staging[: len(some)])
                self._to_host(staging, part.host[:, pieces], some)

    def _to_host(self, staging: torch.Tensor, host: torch.Tensor, slots: list[int]) -> None:
        """``staging[N, R, E]`` to these ``slots`` of some rows of a part, ``host[slots, R, E]``."""
        if self._driver is None or self._stream is None or host.is_contiguous():
            for at, slot, count in runs(slots):
                host[slot : slot + count].copy_(staging[at : at + count], non_blocking=True)
            return
        width, pitch = staging[0].nbytes, host.stride(0) * host.element_size()
        to, source = host.data_ptr(), staging.data_ptr()
        spans = [(to + slot * pitch, source + at * width, count) for at, slot, count in runs(slots)]
        with self._driver.current():
            self._driver.copy_to_host(spans, width, pitch, self._stream.cuda_stream)

    def _filled(self, number: int) -> None:
        if self._stream is None:
            self._done = max(self._done, number)
        else:
            event = torch.cuda.Event()
            event.record(self._stream)
            self._events.append((number, event))

    @property
    def memory(self) -> list[Slots]:
        """``[slots, bytes]`` uint8 of each pool: the slots, as they are."""
        flat = [part.host.flatten(1).view(torch.uint8) for part in self._parts]
        if not self._on_device:
            return [slots.numpy() for slots in flat]
        index = flat[0].get_device() if self._device.type == "cuda" else None
        return [DeviceSlots(slots.data_ptr(), (slots.shape[0], slots.shape[1]), index, slots) for slots in flat]

    def ending(self, number: int) -> Callable[[], bool]:
        """What waits in another thread until a batch has ended that was begun a moment ago; false if it does not."""
        event = next((event for one, event in self._events if one == number), None)

        def ended() -> bool:
            limit = time.monotonic() + ENDS_WITHIN
            while event is not None and not event.query():
                if time.monotonic() > limit:
                    return False
                time.sleep(1e-3)
            return True

        return ended

    def warm_up(self) -> None:
        """Launches that copy nothing."""
        (nowhere,) = upload([np.full(1, -1, dtype=np.int64)], self._device)
        for rows, staging, host in self._parts:
            if self._on_device:
                pack_blocks(rows, nowhere, host, places=nowhere)
                unpack_blocks(host, nowhere, rows, places=nowhere)
            else:
                pack_blocks(rows, nowhere, staging[:1])
                unpack_blocks(staging[:1], nowhere, rows)

    @torch.inference_mode()
    def measure(self) -> float:
        """Bytes per second of loads, by a load of a few blocks into block 0; before the first step."""
        count = min(self._slots, 4 * self._staged)
        loads = tuple((slot, 0) for slot in range(count))
        best = float("inf")
        for _ in range(3):
            begin = self._clock()
            with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                self._copy(Transfers(0, (), loads))
            best = min(best, self._clock() - begin)
        for part in self._parts:
            part.rows[:, 0].zero_()
        return count * sum(part.host[0].nbytes for part in self._parts) / max(best, 1e-9)

    def _clock(self) -> float:
        if self._stream is not None:
            self._stream.synchronize()
        return time.monotonic()

    def _copy(self, transfers: Transfers) -> None:
        if self._on_device:
            self._copy_on_device(transfers)
            return
        for slots, blocks in self._pieces(sorted(transfers.stores, key=lambda pair: pair[1])):
            for rows, staging, host in self._parts:
                pack_blocks(rows, blocks, staging[: len(slots)])
                for at, slot, count in runs(slots):
                    host[slot : slot + count].copy_(staging[at : at + count], non_blocking=True)
        for slots, blocks in self._pieces([(block, slot) for slot, block in sorted(transfers.loads)]):
            for rows, staging, host in self._parts:
                for at, slot, count in runs(slots):
                    staging[at : at + count].copy_(host[slot : slot + count], non_blocking=True)
                unpack_blocks(staging[: len(slots)], blocks, rows)

    def _copy_on_device(self, transfers: Transfers) -> None:
        loads = [(block, slot) for slot, block in transfers.loads]
        for pairs, stores in ((transfers.stores, True), (loads, False)):
            both = np.array(pairs, dtype=np.int64).reshape(-1, 2)
            blocks, places = upload([np.ascontiguousarray(both[:, at]) for at in (0, 1)], self._device)
            for rows, _, slots in self._parts if pairs else ():
                if stores:
                    pack_blocks(rows, blocks, slots, places=places)
                else:
                    unpack_blocks(slots, blocks, rows, places=places)

    def _pieces(self, pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[list[int], torch.Tensor]]:
        """The slots of as many (block, slot) at a time as the staging memory holds, and their blocks on the device."""
        if pairs:
            both = np.array(pairs, dtype=np.int64)
            (blocks,) = upload([np.ascontiguousarray(both[:, 0])], self._device)
            for start in range(0, len(pairs), self._staged):
                yield both[start : start + self._staged, 1].tolist(), blocks[start : start + self._staged]


class _CopyPart(NamedTuple):
    """What the copies of one pool's blocks read and write.

    Attributes:
        rows: ``[R, P, E]``, the pool.
        staging: ``[N, R, E]`` on the device: blocks that are gathered at a time.
        host: ``[slots, R, E]``; with slots on the device it is there.
    """

    rows: torch.Tensor
    staging: torch.Tensor
    host: torch.Tensor

    @classmethod
    def of(cls, pool: torch.Tensor, num_slots: int, staged: int, on_device: bool) -> "_CopyPart":
        rows = pool.flatten(3).flatten(0, 1)
        shape = rows.shape[0], rows.shape[2]
        place = "cpu" if pool.is_cuda and not on_device else pool.device
        host = torch.empty(num_slots, *shape, dtype=pool.dtype, device=place)
        return cls(rows, torch.empty(staged, *shape, dtype=pool.dtype, device=pool.device), host)

    def staged_rows(self, count: int) -> torch.Tensor:
        """``[M, count, E]``: the same staging memory for so many of a block's rows, and for as many more blocks."""
        blocks, rows, elements = self.staging.shape
        most = blocks * rows // count
        return self.staging.view(-1, elements)[: most * count].view(most, count, elements)


def runs(slots: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Where slots follow each other: the place of the first of them, the slot, and how many they are."""
    start = 0
    for at in range(1, len(slots) + 1):
        if at == len(slots) or slots[at] != slots[at - 1] + 1:
            yield start, slots[start], at - start
            start = at


def _lock(memory: torch.Tensor, stream: torch.cuda.Stream) -> Callable[[torch.Tensor], None]:
    """Page-lock it. Returns what undoes that, once nothing copies any more."""
    runtime = torch.cuda.cudart()
    status = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 1)  # for every device
    if int(status):
        raise ValueError(
            f"kv_offloading_size: the driver cannot lock {memory.nbytes / (1 << 30):.1f} GiB of the host's memory "
            f"({status}): lower it, or end what else takes that memory"
        )

    def release(memory: torch.Tensor) -> None:
        stream.synchronize()
        runtime.cudaHostUnregister(memory.data_ptr())

    return release


def _hold(stream: torch.cuda.Stream) -> Callable[[torch.Tensor], None]:
    """What keeps memory of the device from torch's allocator until nothing on the stream copies any more."""
    return lambda memory: stream.synchronize()

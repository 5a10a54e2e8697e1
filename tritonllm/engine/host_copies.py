"""Copies blocks between the cache and the host's memory, beside the steps (:mod:`tritonllm.engine.host_tier`).

A block of the cache is in as many pieces as there are layers, twice: 32 KB each for Llama-3.1-8B. One copy for each
would cost more to begin than to run. So a kernel gathers some blocks on the device, and the copy engine takes those
that lie side by side in the host's memory, 2 MB and more, in one piece; and back in the opposite order. The copy engine
needs none of the processors that steps run on, and the kernel runs for a twentieth of the time.

The host's memory is page-locked: only then does the copy engine reach it by itself. It is registered with the driver
instead of taken from torch's allocator, which rounds up to a power of two and never gives back.
"""

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

import numpy as np
import torch

from tritonllm.engine.host_tier import Transfers
from tritonllm.engine.inputs import upload
from tritonllm.kernels import pack_blocks, unpack_blocks

# Blocks that are gathered at a time. Each takes a launch and a copy; of 32 MB the copy is 0.6 ms at 55 GB/s.
STAGING_BYTES = 32 << 20


def staging_bytes(block_bytes: int, num_slots: int) -> int:
    """Memory of the device for the blocks that are gathered at a time; 0 without slots."""
    return min(num_slots, max(1, STAGING_BYTES // block_bytes)) * block_bytes


class HostCopies:
    """The second tier's memory, and the stream that fills and reads it.

    Args:
        pool: ``[L, 2, P, S, K, D]``, keys and values of L layers.
        num_slots: blocks that the host's memory holds.

    Raises:
        ValueError: the driver does not lock so much memory.
    """

    def __init__(self, pool: torch.Tensor, num_slots: int) -> None:
        self._rows = pool.flatten(3).flatten(0, 1)  # [R, P, E]
        rows, _, elements = self._rows.shape
        device, dtype = pool.device, pool.dtype
        block_bytes = rows * elements * dtype.itemsize
        count = staging_bytes(block_bytes, num_slots) // block_bytes
        self._staging = torch.empty(count, rows, elements, dtype=dtype, device=device)
        self._host = torch.empty(num_slots, rows, elements, dtype=dtype)
        self._stream: torch.cuda.Stream | None = None
        self._events: deque[tuple[int, torch.cuda.Event]] = deque()  # of the batches that may still run
        self._done = 0
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            release = _lock(self._host, self._stream)
            weakref.finalize(self, release, self._host).atexit = False  # the process takes its memory with it

    @property
    def done(self) -> int:
        """The number of the last batch that is known to have ended."""
        while self._events and self._events[0][1].query():
            self._done = self._events.popleft()[0]
        return self._done

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

    @torch.inference_mode()
    def measure(self) -> float:
        """Bytes per second of loads, by a load of a few blocks into block 0; before the first step."""
        count = min(len(self._host), 4 * len(self._staging))
        loads = tuple((slot, 0) for slot in range(count))
        best = float("inf")
        for _ in range(3):  # the first also compiles
            begin = self._clock()
            with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                self._copy(Transfers(0, (), loads))
            best = min(best, self._clock() - begin)
        self._rows[:, 0].zero_()
        return count * self._host[0].nbytes / max(best, 1e-9)

    def _clock(self) -> float:
        if self._stream is not None:
            self._stream.synchronize()
        return time.monotonic()

    def _copy(self, transfers: Transfers) -> None:
        for part, blocks in self._parts(transfers.stores):
            pack_blocks(self._rows, blocks, self._staging[: len(part)])
            for at, slot, count in runs([slot for _, slot in part]):
                self._host[slot : slot + count].copy_(self._staging[at : at + count], non_blocking=True)
        for part, blocks in self._parts([(block, slot) for slot, block in sorted(transfers.loads)]):
            for at, slot, count in runs([slot for _, slot in part]):
                self._staging[at : at + count].copy_(self._host[slot : slot + count], non_blocking=True)
            unpack_blocks(self._staging[: len(part)], blocks, self._rows)

    def _parts(self, pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[Sequence[tuple[int, int]], torch.Tensor]]:
        """As many (block, slot) at a time as the staging memory holds, and their blocks on the device."""
        size = len(self._staging)
        for start in range(0, len(pairs), size):
            part = pairs[start : start + size]
            (blocks,) = upload([np.array([block for block, _ in part], dtype=np.int64)], self._rows.device)
            yield part, blocks


class HostCopiesOfPools:
    """The second tier of caches whose blocks have the same numbers: of a model and of its draft model.

    Args:
        pools: of each model.
        num_slots: blocks that the host's memory holds, of each.
    """

    def __init__(self, pools: Sequence[torch.Tensor], num_slots: int) -> None:
        self._copies = [HostCopies(pool, num_slots) for pool in pools]
        self._bytes = [pool[:, :, 0].nbytes for pool in pools]  # of a block

    @property
    def done(self) -> int:
        """The number of the last batch that is known to have ended for all of them."""
        return min([copies.done for copies in self._copies])

    def run(self, transfers: Transfers) -> None:
        """:meth:`HostCopies.run` of each."""
        for copies in self._copies:
            copies.run(transfers)

    def measure(self) -> float:
        """Bytes per second of loads of all of them."""
        seconds = [size / copies.measure() for size, copies in zip(self._bytes, self._copies, strict=True)]
        return sum(self._bytes) / sum(seconds)


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
    status = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(status):
        raise ValueError(
            f"kv_offloading_size: the driver cannot lock {memory.nbytes / (1 << 30):.1f} GiB of the host's memory "
            f"({status}): lower it, or raise the limit of locked memory (ulimit -l)"
        )

    def release(memory: torch.Tensor) -> None:
        stream.synchronize()
        runtime.cudaHostUnregister(memory.data_ptr())

    return release

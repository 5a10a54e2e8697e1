"""Ranks of one machine whose GPUs write to each other's memory: sums of rows are our own kernels'.

The kernels (:mod:`tritonllm.kernels.collective`) send a part straight into the other ranks' inboxes, and add to the
residual stream and normalise in the same launch. What they do not take (other shapes and dtypes, more bytes than pay)
is left to NCCL, as all other collectives are. Every rank decides the same, by the shape.

A kernel that waits for a rank that has died would wait for ever, as NCCL's do until their communicator is aborted. So
it looks at a word in this process's memory now and then, which :meth:`SymmetricGroup.shut` writes: the watch over the
ranks calls that when one fails (:mod:`tritonllm.dist.watch`), and a rank whose parent has died ends its process.
"""

import logging
import zlib
from typing import Any, NamedTuple

import torch

from tritonllm.dist.group import ConnectedGroup
from tritonllm.dist.peer_memory import CudaDriver, Driver, PeerMemory, share_memory
from tritonllm.dist.shared_rows import SharedRows, bytes_of, rows_at
from tritonllm.kernels.collective import AddedNorm, InboxLayout, PeerInbox, layout_for, sum_rows
from tritonllm.kernels.runtime.chip import processors

logger = logging.getLogger(__name__)
EMPTY_WORD = {2: 0x80008000, 4: 0x80000000}  # 32 bits of an empty inbox, by an element's bytes


class Reach(NamedTuple):
    """Up to how many bytes of rows a way to sum them up is the fastest; NCCL's is beyond.

    Attributes:
        one_shot: the most bytes for the way in which all ranks get all parts.
        two_shot: the most bytes for the way in which one rank sums up a row; 0 if it never is the fastest.
    """

    one_shot: int
    two_shot: int = 0

    @property
    def most(self) -> int:
        return max(self)


# By number of ranks; python -m bench.all_reduce measures them. Two ranks send the same bytes in either way, and wait
# only once in one shot. Of four, two shots are faster from 256 KiB on. Both beat NCCL at every size where they are used
# (docs/notebook/collectives.md). Other numbers of ranks have not been measured, nor four H100s.
REACH = {2: Reach(one_shot=1 << 30), 4: Reach(one_shot=256 << 10, two_shot=1 << 30)}
FURTHER = Reach(one_shot=256 << 10)


class SymmetricGroup(ConnectedGroup):
    """A rank that reaches the memory of the others.

    Args:
        backend, device: as for :class:`~tritonllm.dist.group.ConnectedGroup`, with NCCL.
        reach: up to how many bytes each way is taken; by default what was measured for so many ranks.
    """

    def __init__(self, backend: Any, device: torch.device, reach: Reach | None = None) -> None:
        super().__init__(backend, device)
        self.reach = REACH.get(self.size, FURTHER) if reach is None else reach
        self._inbox: PeerInbox | None = None
        self._memory: PeerMemory | None = None
        self._shared: list[PeerMemory] = []
        self._stop = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._stopping = self._stop.numpy()  # to be written without torch, by any thread

    @property
    def inbox(self) -> PeerInbox | None:
        """The inbox of this rank; ``None`` as long as there is none."""
        return self._inbox

    def reserve(self, columns: int, dtype: torch.dtype) -> None:
        layout = layout_for(columns, dtype, self.size, processors(self._device))
        if self._inbox is not None and self._inbox.layout == layout:
            return
        shape = columns, dtype.itemsize, self.size, layout.programs, layout.slots
        found = share_memory(self, self._driver, layout.nbytes, EMPTY_WORD[dtype.itemsize], shape)
        if isinstance(found, str):
            logger.warning("sums over the ranks are left to NCCL: the GPUs do not share memory (%s)", found)
            return
        self._memory, self._inbox = found, self._inbox_in(found, layout)

    def share_rows(self, rows: int, columns: int) -> SharedRows | None:
        # every rank draws by itself, so all must compute alike
        found = share_memory(self, self._driver, bytes_of(rows, columns), 0, (rows, columns, *_kind_of(self._device)))
        if isinstance(found, str):
            logger.warning("limits of draws are found on rank 0: the GPUs do not share memory (%s)", found)
            return None
        self._shared.append(found)
        return rows_at(found.addresses, self.rank, rows, columns, self._device)

    def _inbox_in(self, memory: PeerMemory, layout: InboxLayout) -> PeerInbox:
        links = torch.tensor([*memory.addresses, self._stop.data_ptr()], dtype=torch.int64, device=self._device)
        turns = torch.zeros(layout.programs, dtype=torch.int32, device=self._device)
        return PeerInbox(layout, self.rank, links, turns)

    def _driver(self) -> Driver:
        return CudaDriver(self._device)

    @property
    def fused_rows(self) -> int:
        return -1 if self._inbox is None else self.reach.most // self._inbox.layout.row_bytes

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        inbox = self._inbox
        if inbox is not None and _takes(inbox.layout, x) and len(x) <= self.fused_rows:
            sum_rows(x, inbox, None, x, two_shot=self._in_two(x))
            return x
        return super().all_reduce(x)

    def add_norm(self, part: torch.Tensor, added: AddedNorm) -> torch.Tensor:
        assert self._inbox is not None and _takes(self._inbox.layout, part)
        sum_rows(part, self._inbox, added, part, two_shot=self._in_two(part))
        return part

    def _in_two(self, x: torch.Tensor) -> bool:
        return x.numel() * x.itemsize > self.reach.one_shot

    def shut(self) -> None:
        self._stopping[0] = 1
        super().shut()


def _kind_of(device: torch.device) -> tuple[int, ...]:
    """Numbers that GPUs of one kind have in common."""
    if device.type != "cuda":
        return ()
    about = torch.cuda.get_device_properties(device)
    return zlib.crc32(about.name.encode()), about.multi_processor_count


def _takes(layout: InboxLayout, x: torch.Tensor) -> bool:
    return x.dim() == 2 and x.shape[1] == layout.columns and x.dtype == layout.dtype and x.stride(1) == 1

"""Rows to their experts and back by ranks of one machine whose GPUs write to each other's memory.

Our own kernels (:mod:`tritonllm.kernels.collective.exchange`) write each row straight to the ranks that have one of its
experts, and read only what those have made of it. What they were not given memory for (other columns, more rows) goes
by the collectives of :class:`~tritonllm.dist.exchange.Exchange`, as does everything where GPUs do not share memory.
Every rank decides the same, by what is the same on all of them.

A kernel that waits for a rank that has died looks at a word in this process's memory now and then, which
:meth:`SymmetricExchange.shut` writes.
"""

import logging
from typing import Any

import torch

from tritonllm.dist.exchange import Arrived, Exchange
from tritonllm.dist.group import ConnectedGroup
from tritonllm.dist.peer_memory import CudaDriver, Driver, PeerMemory, share_memory
from tritonllm.kernels.collective import (
    AddedNorm,
    ExchangeLayout,
    ExchangeMemory,
    combine_rows,
    dispatch_rows,
    exchange_layout,
    exchange_memory,
)
from tritonllm.kernels.runtime.chip import processors

logger = logging.getLogger(__name__)


class SymmetricExchange(Exchange):
    """The way of rows to experts and back over memory that all ranks reach.

    Args:
        group: a group of ranks with a GPU each.
        device: the device of this rank.
    """

    def __init__(self, group: ConnectedGroup, device: torch.device) -> None:
        super().__init__(group)
        self._connected = group
        self._device = device
        self._memory: ExchangeMemory | None = None
        self._shared: PeerMemory | None = None
        self._stop = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._stopping = self._stop.numpy()  # to be written without torch, by any thread

    @property
    def memory(self) -> ExchangeMemory | None:
        """The memory of this rank; ``None`` as long as there is none."""
        return self._memory

    def reserve(self, columns: int, dtype: torch.dtype, top_k: int, rows: int) -> None:
        layout = exchange_layout(columns, dtype, self.size, top_k, rows, processors(self._device))
        if self._memory is not None and self._memory.layout == layout:
            return
        shape = columns, dtype.itemsize, self.size, top_k, rows, layout.programs
        found = share_memory(self._connected, self._driver, layout.nbytes, 0, shape)
        if isinstance(found, str):
            logger.warning("rows go to their experts by collectives: the GPUs do not share memory (%s)", found)
            return
        # all ranks have come, and waited for what was on their streams: nobody uses the memory that there was
        self._shared, self._memory = found, self._memory_in(found, layout)

    def _memory_in(self, shared: PeerMemory, layout: ExchangeLayout) -> ExchangeMemory:
        links = torch.tensor([*shared.addresses, self._stop.data_ptr()], dtype=torch.int64, device=self._device)
        own = self._bytes_at(shared.addresses[self.rank], layout.nbytes)
        return exchange_memory(layout, self.rank, own, links)

    def _bytes_at(self, address: int, nbytes: int) -> torch.Tensor:
        return torch.as_tensor(_Bytes(address, nbytes), device=self._device)

    def _driver(self) -> Driver:
        return CudaDriver(self._device)

    def _memory_for(self, columns: int, dtype: torch.dtype, rows: int) -> ExchangeMemory | None:
        """The memory, if it is for rows such as these."""
        memory = self._memory
        if memory is None:
            return None
        layout = memory.layout
        return memory if (layout.columns, layout.dtype) == (columns, dtype) and rows <= layout.rows else None

    def _of_choice(self, x: torch.Tensor, ids: torch.Tensor, rows: int) -> ExchangeMemory | None:
        memory = self._memory_for(x.shape[1], x.dtype, rows)
        return memory if memory is not None and memory.layout.top_k == ids.shape[1] else None

    def dispatch(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, marks: torch.Tensor, held: int, rows: int
    ) -> Arrived:
        memory = self._of_choice(x, ids, rows)
        if memory is None:
            return super().dispatch(x, weights, ids, marks, held, rows)
        return Arrived(*dispatch_rows(x, weights, ids, marks, memory, held, rows))

    def parts(self, rows: int, like: torch.Tensor) -> torch.Tensor | None:
        memory = self._memory_for(like.shape[1], like.dtype, rows)
        return None if memory is None else memory.parts[: self.size * rows]

    def combine(
        self,
        parts: torch.Tensor,
        ids: torch.Tensor,
        marks: torch.Tensor,
        held: int,
        rows: int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        memory = self._with_parts(parts, ids, rows)
        if memory is None:
            return super().combine(parts, ids, marks, held, rows, out)
        return combine_rows(memory, ids, marks, held, rows, out=out)

    def combine_added(
        self,
        parts: torch.Tensor,
        ids: torch.Tensor,
        marks: torch.Tensor,
        held: int,
        rows: int,
        residual: torch.Tensor,
        scale: float = 1.0,
    ) -> torch.Tensor:
        memory = self._with_parts(parts, ids, rows)
        if memory is None:
            return super().combine_added(parts, ids, marks, held, rows, residual, scale)
        return combine_rows(memory, ids, marks, held, rows, residual=residual, scale=scale)

    def combine_normed(
        self, parts: torch.Tensor, ids: torch.Tensor, marks: torch.Tensor, held: int, rows: int, added: AddedNorm
    ) -> torch.Tensor:
        memory = self._with_parts(parts, ids, rows)
        if memory is None:
            return super().combine_normed(parts, ids, marks, held, rows, added)
        return combine_rows(memory, ids, marks, held, rows, added=added)

    def _with_parts(self, parts: torch.Tensor, ids: torch.Tensor, rows: int) -> ExchangeMemory | None:
        """The memory, with ``parts`` where the other ranks read them."""
        memory = self._of_choice(parts, ids, rows)
        if memory is not None and parts.data_ptr() != memory.parts.data_ptr():
            memory.parts[: len(parts)] = parts
        return memory

    def shut(self) -> None:
        self._stopping[0] = 1
        super().shut()


class _Bytes:
    """Bytes at an address of a GPU, for torch (CUDA array interface, version 3)."""

    def __init__(self, address: int, count: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (count,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }

"""Rows of logits in memory that the other ranks' GPUs read (:mod:`tritonllm.dist.peer_memory`)."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tritonllm.kernels import SHARD_UNIT
from tritonllm.kernels.sampling.common import STEP
from tritonllm.kernels.sampling.shard import Found

FLOAT = 4  # bytes


class SharedRows(NamedTuple):
    """This rank's part of some rows of logits, and what leads to the parts of the others.

    Attributes:
        logits: ``[rows, C]`` float32, C columns of each rank.
        found: what was found of each group of 128 of its columns, ``[rows, C / 128]`` each.
        rank_steps: ``[ranks]`` int64, as :func:`~tritonllm.kernels.sample_limited_shards` takes them.
    """

    logits: torch.Tensor
    found: Found
    rank_steps: torch.Tensor

    def first(self, rows: int) -> "SharedRows":
        """The first of them, at the same places on all ranks."""
        return SharedRows(self.logits[:rows], Found(*(t[:rows] for t in self.found if t is not None)), self.rank_steps)


def bytes_of(rows: int, columns: int) -> int:
    """Memory that so many rows and columns of a rank take."""
    return FLOAT * rows * (columns + 2 * (columns // SHARD_UNIT))


def rows_at(addresses: Sequence[int], rank: int, rows: int, columns: int, device: torch.device) -> SharedRows:
    """Rows in memory of :func:`bytes_of` bytes on each rank.

    Args:
        addresses: the address of each rank's memory, as this one sees them; multiples of 256.
        columns: the columns of each rank, a multiple of 128.
    """
    memory = torch.as_tensor(_Floats(addresses[rank], bytes_of(rows, columns) // FLOAT), device=device)
    groups = columns // SHARD_UNIT
    logits, largest, sums = memory.split([rows * columns, rows * groups, rows * groups])
    steps = [(address - addresses[rank]) // (FLOAT * STEP.value) for address in addresses]
    found = Found(largest.view(rows, groups), sums.view(rows, groups))
    return SharedRows(logits.view(rows, columns), found, torch.tensor(steps, dtype=torch.int64, device=device))


def meta_rows(ranks: int, rows: int, columns: int) -> SharedRows:
    """Rows that nobody has."""
    logits = torch.empty(rows, columns, device="meta")
    found = Found(*(logits.new_empty(rows, columns // SHARD_UNIT) for _ in range(2)))
    return SharedRows(logits, found, torch.empty(ranks, dtype=torch.int64, device="meta"))


class _Floats:
    """float32 numbers at an address of a GPU, for torch (CUDA array interface, version 3)."""

    def __init__(self, address: int, count: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (count,),
            "typestr": "<f4",
            "data": (address, False),
            "version": 3,
        }

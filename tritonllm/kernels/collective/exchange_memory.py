"""Where ranks receive each other's rows, and where they read what the experts have made of them.

Each rank has one piece of its GPU's memory that all ranks reach. In it lie, one behind the other: the rows that it
receives, their weights and ids, its *parts* (what its experts have made of the rows), and flags. Row i that rank s
sends lies at ``s * rows + i`` where a step has room for so many ``rows`` of each rank, and so does what an expert makes
of it: nothing is packed, and nobody needs to know how many rows another one has.

A program, number p of a launch, hears only from the programs of that number on the other ranks. Each has a flag for it,
which counts that program's launches.
"""

from typing import NamedTuple

import torch
import triton

from tritonllm.kernels.collective.row_program import RowProgram
from tritonllm.kernels.runtime.checks import FLOATS, require

ALIGNMENT = 256  # bytes
MOST_COLUMNS = 1 << 14
MOST_TOP_K = 32
PROGRAMS_EACH = 4  # on a processor, at most: each tells all ranks when it is done
INT = 4  # bytes
PHASES = DISPATCH, COMBINE = 0, 1


class ExchangeLayout(NamedTuple):
    """How a rank's memory is divided; the same on all ranks. What is named ``..._at`` is in bytes from its beginning,
    where the received rows are.

    Attributes:
        columns: how many columns a row has.
        dtype: the dtype of its elements; 16 or 32 bits.
        size: number of ranks.
        top_k: how many experts a row has.
        rows: how many rows one rank has at most in one step.
        programs: how many programs a launch has at most. All of them fit on the GPU at once.
    """

    columns: int
    dtype: torch.dtype
    size: int
    top_k: int
    rows: int
    programs: int

    @property
    def places(self) -> int:
        """Rows that a rank receives, at most."""
        return self.size * self.rows

    @property
    def weights_at(self) -> int:
        """Where the weights begin, ``[size * rows, top_k]`` float32."""
        return _aligned(self.places * self.columns * self.dtype.itemsize)

    @property
    def ids_at(self) -> int:
        """Where the ids of the experts begin, ``[size * rows, top_k]`` int32."""
        return self.weights_at + _aligned(self.places * self.top_k * INT)

    @property
    def parts_at(self) -> int:
        """Where the experts' results begin, ``[size * rows, columns]``."""
        return self.ids_at + _aligned(self.places * self.top_k * INT)

    @property
    def flags_at(self) -> int:
        """Where the flags begin, ``[2, programs, size]`` int32: what a program reads, those of all senders, lies
        together."""
        return self.parts_at + _aligned(self.places * self.columns * self.dtype.itemsize)

    @property
    def nbytes(self) -> int:
        return self.flags_at + _aligned(len(PHASES) * self.programs * self.size * INT)

    @property
    def program(self) -> RowProgram:
        """What handles a row."""
        return RowProgram(self.columns, self.size)

    def programs_of(self, rows: int) -> int:
        """How many programs a launch for so many rows of each rank has: the same on all ranks, however many rows each
        of them has."""
        return min(rows, self.programs)


class ExchangeMemory(NamedTuple):
    """A rank's memory, and the way to that of the others.

    Attributes:
        layout: the layout of all ranks' memory.
        rank: the rank whose memory this is.
        links: ``[size + 1]`` int64, addresses: of each rank's memory (``nbytes`` bytes, of which the flags are zeros at
            first), and of an int32 that is not zero once nobody shall wait any more. It may be in pinned memory of the
            host.
        epochs: ``[2, programs]`` int32, zeros at first: how often each program has run in either phase.
        x: ``[size * rows, columns]``, the rows that have come here.
        weights, ids: ``[size * rows, top_k]`` float32 and int32, of those rows.
        parts: ``[size * rows, columns]``, what the experts here make of them.
    """

    layout: ExchangeLayout
    rank: int
    links: torch.Tensor
    epochs: torch.Tensor
    x: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor
    parts: torch.Tensor


def exchange_layout(
    columns: int, dtype: torch.dtype, size: int, top_k: int, rows: int, processors: int
) -> ExchangeLayout:
    """The layout for steps of at most ``rows`` rows of each rank.

    Args:
        processors: how many multiprocessors the GPU has.

    Raises:
        ValueError: the dtype is neither of 16 nor of 32 bits, or a number is out of range.
    """
    require(dtype in FLOATS, f"dtype must be float16, bfloat16 or float32, got {dtype}")
    require(1 <= columns <= MOST_COLUMNS, f"columns must be from 1 to {MOST_COLUMNS}, got {columns}")
    require(1 <= top_k <= MOST_TOP_K, f"top_k must be from 1 to {MOST_TOP_K}, got {top_k}")
    require(size >= 1 and rows >= 1, f"size and rows must be at least 1, got {size} and {rows}")
    each = min(PROGRAMS_EACH, RowProgram(columns, size).on_processor)
    return ExchangeLayout(columns, dtype, size, top_k, rows, processors * each)


def exchange_memory(layout: ExchangeLayout, rank: int, own: torch.Tensor, links: torch.Tensor) -> ExchangeMemory:
    """The memory of a rank.

    Args:
        own: ``[layout.nbytes]`` uint8, this rank's; ``links`` leads to it, too.
        links: as :class:`ExchangeMemory` has them.
    """
    epochs = torch.zeros(len(PHASES), layout.programs, dtype=torch.int32, device=own.device)

    def at(start: int, dtype: torch.dtype, columns: int) -> torch.Tensor:
        nbytes = layout.places * columns * dtype.itemsize
        return own[start : start + nbytes].view(dtype).view(layout.places, columns)

    x, parts = (at(start, layout.dtype, layout.columns) for start in (0, layout.parts_at))
    weights, ids = at(layout.weights_at, torch.float32, layout.top_k), at(layout.ids_at, torch.int32, layout.top_k)
    return ExchangeMemory(layout, rank, links, epochs, x, weights, ids, parts)


def _aligned(nbytes: int) -> int:
    return triton.cdiv(nbytes, ALIGNMENT) * ALIGNMENT

"""Sums over the ranks beside products: rows go from GPU to GPU by copies while the next rows are multiplied.

A step with many tokens is bound by its products, and a sum over the ranks between two of them is time in which the
tensor cores wait (of Llama-3.1-70B's shape on four H200s, 0.97 ms behind each product of 8,192 rows). Here a block's
last product, the sum of what it gives, and the next block's first product take turns in pieces of the step's rows:

- Once a piece is multiplied, its rows go to their owners: each rank owns an equal share of every piece, and the copy
  engines carry them, which take no processors from products. (Sums by kernels beside products were not tried: theirs
  hold registers that the products' programs want, and persistent products then wait for a second round.)
- Behind the product of the next piece the owner adds up the parts of this one, adds them to the residual stream and
  normalises; the result goes to all ranks by copies again.
- The next block's first product begins with the rows of the first piece, while the last ones are under way.

The two-shot sum (Thakur et al., "Optimization of Collective Communication Operations in MPICH", 2005: reduce-scatter
and all-gather) in pieces, as the overlap of Wang et al., "Overlap Communication with Dependent Computation via
Decomposition" (2023), does. The residual stream stays with the owners: no rank has all of its rows until
they are gathered (:class:`tritonllm.layers.residual.Stream`).

Numbers in the ranks' memories, which only grow, say what has come; streams wait for them, and no kernel does. Nothing
is overwritten too early. A rank writes parts of the next sum to an owner only behind products whose input had come from
that owner, so the owner has added up the parts of this one; and an owner writes its results only once it has parts of
all ranks, which come behind the products that read the results before.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch

from tritonllm.kernels.collective import AddedNorm
from tritonllm.kernels.collective.parts import launch_add_parts

PIECES = 4
UNIT = 8  # rows of an owner's share are a multiple of it: products like rows that are
ALIGNMENT = 256


class Shape(NamedTuple):
    """How a rank's memory is divided; the same on all ranks.

    Attributes:
        rows: the most of a step.
        columns, dtype: of a row.
        size: number of ranks.
    """

    rows: int
    columns: int
    dtype: torch.dtype
    size: int

    @property
    def row_bytes(self) -> int:
        return self.columns * self.dtype.itemsize

    @property
    def own_rows(self) -> int:
        """The most that a rank owns of a step."""
        return PIECES * share_of_piece(self.rows, self.size)

    @property
    def parts_at(self) -> int:
        """Bytes before the parts that others send, ``[size - 1, own_rows, columns]``; the norm is before them."""
        return _aligned(self.rows * self.row_bytes)

    @property
    def numbers_at(self) -> int:
        """Bytes before the numbers, ``[2, PIECES, size]`` int32: of parts, and of norms."""
        return _aligned(self.parts_at + (self.size - 1) * self.own_rows * self.row_bytes)

    @property
    def num_numbers(self) -> int:
        return 2 * PIECES * self.size

    @property
    def nbytes(self) -> int:
        return self.numbers_at + 4 * self.num_numbers


def share_of_piece(rows: int, size: int) -> int:
    """The most rows that one of ``size`` ranks owns of each piece of a step."""
    return -(-rows // (PIECES * size * UNIT)) * UNIT


def _place_of_parts(share: int, piece: int) -> int:
    """The row of a sender's places at which a piece begins."""
    return piece * share


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Courier(Protocol):
    """What happens beside the current stream, in the order of the calls, and what that stream waits for."""

    def mark(self) -> None:
        """What is sent from here on waits for what is on the current stream now."""

    def copy(self, to: int, at: int, source: torch.Tensor) -> None:
        """Send a contiguous tensor into a rank's memory, ``at`` bytes behind its beginning."""

    def tell(self, to: int, at: int, number: int) -> None:
        """Write a number there, behind the copies before it."""

    def wait(self, at: int, number: int) -> None:
        """The current stream goes on once the number at this place of this rank's memory is not behind ``number``."""


class Relay:
    """This rank's end of all pieced sums, which all ranks begin in the same order.

    Args:
        shape: of the memory.
        rank: this one.
        courier: carries.
        memory: uint8 ``[shape.nbytes]``, this rank's, of zeros at first.

    Attributes:
        normed: ``[shape.rows, columns]``, at the memory's beginning.
        parts: ``[size - 1, shape.own_rows, columns]``, behind it.
    """

    def __init__(self, shape: Shape, rank: int, courier: Courier, memory: torch.Tensor) -> None:
        self.shape, self.rank, self.courier = shape, rank, courier
        rows, others = shape.rows * shape.row_bytes, (shape.size - 1) * shape.own_rows * shape.row_bytes
        self.normed = memory[:rows].view(shape.dtype).view(shape.rows, shape.columns)
        parts = memory[shape.parts_at : shape.parts_at + others].view(shape.dtype)
        self.parts = parts.view(shape.size - 1, shape.own_rows, shape.columns)
        self.others = [other for other in range(shape.size) if other != rank]
        self.sums = 0  # so far; numbers are compared modulo 2**32

    def begin(self, added: AddedNorm) -> "PiecedSum":
        """The next sum, of as many rows as the stream has: at most ``shape.rows``."""
        self.sums += 1
        return PiecedSum(self, added, self.sums)

    def place_of(self, kind: int, piece: int, rank: int) -> int:
        """Where in a rank's memory the number of a piece's parts (0) or norms (1) from a rank is."""
        return self.shape.numbers_at + 4 * ((kind * PIECES + piece) * self.shape.size + rank)


PARTS, NORMS = 0, 1


class PiecedSum:
    """One sum. It is used in this order: :meth:`put` each piece, iterate over what has come, then :meth:`others`.

    Attributes:
        pieces: the rows of each; the last ones may have none.
        normed: ``[rows, columns]``, whose rows :meth:`__iter__` says are there; until the next sum begins.
    """

    def __init__(self, relay: Relay, added: AddedNorm, number: int) -> None:
        self._relay, self._added, self._number = relay, added, number
        rows, shape = len(added.residual), relay.shape
        self._share = share_of_piece(rows, shape.size)
        each = self._share * shape.size
        starts = [min(piece * each, rows) for piece in range(PIECES + 1)]
        self.pieces = [slice(start, stop) for start, stop in pairwise(starts)]
        self.normed = relay.normed[:rows]
        self._sent: list[torch.Tensor] = []  # parts, which copies read until the owners' results are here

    def put(self, piece: int, part: torch.Tensor) -> None:
        """The current stream has computed this rank's part of a piece, contiguous; it must not change any more."""
        relay, courier = self._relay, self._relay.courier
        self._sent.append(part)
        courier.mark()
        first, row_bytes = self.pieces[piece].start, relay.shape.row_bytes
        for other in relay.others:
            own = self._own(piece, other)
            if own.stop > own.start:
                sender = relay.rank - (relay.rank > other)
                row = sender * relay.shape.own_rows + _place_of_parts(self._share, piece)
                rows = part[own.start - first : own.stop - first]
                courier.copy(other, relay.shape.parts_at + row * row_bytes, rows)
            courier.tell(other, relay.place_of(PARTS, piece, relay.rank), self._number)
        if piece:
            self._add_up(piece - 1)

    def __iter__(self) -> Iterator[slice]:
        """Rows whose norm the current stream has from here on: of the first piece, then all others."""
        self._wait(NORMS, 0)
        if self.pieces[0].stop:
            yield self.pieces[0]
        self._add_up(PIECES - 1)
        for piece in range(1, PIECES):
            self._wait(NORMS, piece)
        self._sent.clear()
        if self.pieces[-1].stop > self.pieces[0].stop:
            yield slice(self.pieces[0].stop, self.pieces[-1].stop)

    def others(self, places: torch.Tensor | None, device: torch.device) -> torch.Tensor:
        """bool ``[R]``: rows at these places of the stream, int64, that another rank owns, so that they lack this sum
        or more; ``None`` for all of its rows."""
        if places is None:
            places = torch.arange(self.pieces[-1].stop, device=device)
        each = self._share * self._relay.shape.size
        return places % each // self._share != self._relay.rank

    def _own(self, piece: int, rank: int) -> slice:
        """The rows of a piece that a rank owns."""
        rows = self.pieces[piece]
        start = min(rows.start + rank * self._share, rows.stop)
        return slice(start, min(start + self._share, rows.stop))

    def _add_up(self, piece: int) -> None:
        """The owner's work on a piece, whose result then goes to all."""
        relay, courier = self._relay, self._relay.courier
        self._wait(PARTS, piece)
        own = self._own(piece, relay.rank)
        count = own.stop - own.start
        normed = self.normed[own]
        if count:
            first = self.pieces[piece].start
            part = self._sent[piece][own.start - first : own.stop - first]
            at = _place_of_parts(self._share, piece)
            added = self._added._replace(residual=self._added.residual[own])
            launch_add_parts(part, relay.parts[:, at : at + count], relay.rank, added, normed)
        courier.mark()
        for other in relay.others:
            if count:
                courier.copy(other, own.start * relay.shape.row_bytes, normed)
            courier.tell(other, relay.place_of(NORMS, piece, relay.rank), self._number)

    def _wait(self, kind: int, piece: int) -> None:
        for other in self._relay.others:
            self._relay.courier.wait(self._relay.place_of(kind, piece, other), self._number)

"""Pieces of narrow weights put together as products read them, without being widened.

Nothing is rounded: a weight is kept where float8 (on a chip that converts it), int8, four bits with scales and zero
points of groups of columns, or floats of four bits with scales of a byte (MXFP4, NVFP4) hold what the checkpoint says,
and the kernels' formats have room for it. The loader widens what they do not hold: numbers that stand for others (NF4),
columns in another order, groups that a rank's part cuts through (of floats of four bits to less than 16 columns), parts
of a parameter that differ in these, and values that are not finite, which it then names.
"""

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from tritonllm.kernels.dense.narrow import aligned, e2m1_values, pack_nibbles, unit_of
from tritonllm.kernels.dense.weight import FP4, FP8, INT4, INT8, NARROW, PACKED, Groups, Weight
from tritonllm.kernels.runtime.float8 import has_float8
from tritonllm.models.formats.piece import NarrowPiece
from tritonllm.models.slots import Slot

_LEAST = {FP8: 16, INT8: 16, INT4: 32, FP4: 16}  # columns of a group
_MOST = 4096
_FP8_NAN = 0x7F
_LARGEST_POWER = 120  # of a scale of floats of four bits (:class:`~tritonllm.kernels.Weight`)


@dataclass(frozen=True)
class Arrival:
    """A matrix of a checkpoint, or a rank's part of it, and where it goes.

    Attributes:
        slot: its place in the parameter.
        piece: what it is.
        turned: the checkpoint has rows and columns the other way round than the piece.
    """

    slot: Slot
    piece: NarrowPiece
    turned: bool = False

    def write(self, parameter: torch.Tensor) -> None:
        """Widen it into a plain parameter."""
        wide = self.piece.widen(parameter.dtype)
        self.slot.write(parameter, wide.mT if self.turned else wide)

    def rows(self, k: int) -> torch.Tensor | None:
        """The rows of the parameter that the rows of the piece are, all of whose ``k`` columns it has; ``None`` if
        it has not, or if values are changed on the way."""
        slot, (count, columns) = self.slot, self.piece.numbers.shape
        if slot.transposed != self.turned or slot.axis or columns != k or slot.minus or slot.flat_experts:
            return None
        device = self.piece.numbers.device
        if slot.order is None:
            return torch.arange(slot.start, slot.start + count, device=device)
        blocks = torch.tensor(slot.order, device=device)[:, None] * (count // len(slot.order))
        return (slot.start + blocks + torch.arange(count // len(slot.order), device=device)).flatten()


@dataclass(frozen=True)
class _Numbers:
    """The numbers of a piece as a format has them; ``None`` where it does not hold them."""

    scales: torch.Tensor
    nibbles: torch.Tensor | None = None  # from 0 to 15, or the bits of floats
    zeros: torch.Tensor | None = None  # of integers from 0 to 15, one for each group
    bytes: torch.Tensor | None = None  # int8, or those of float8


def assemble(shape: tuple[int, ...], arrivals: Iterable[Arrival]) -> Weight | None:
    """The weight ``shape`` (``[N, K]``, or of experts ``[E, N, K]``) that these fill, on their device; ``None`` if no
    narrow format holds it."""
    arrivals = list(arrivals)
    (*experts, n, k), pieces = shape, [_in_whole_groups(arrival.piece) for arrival in arrivals]
    rows = [arrival.rows(k) for arrival in arrivals]
    across = {piece.groups.columns for piece in pieces}
    if not pieces or any(r is None for r in rows) or len(across) > 1:
        return None
    if any(piece.column_groups is not None for piece in pieces):
        return None
    if not all(bool(_scales(piece).isfinite().all()) for piece in pieces):
        return None  # widened, the values are named
    groups = Groups(1, across.pop())
    found = _format(pieces, groups, k)
    if found is None:
        return None
    format, numbers = found
    device = pieces[0].numbers.device
    data = torch.empty(*experts, n, k // 2 if format in PACKED else k, dtype=NARROW[format], device=device)
    scales = torch.empty(*experts, *groups.shape(n, k), dtype=numbers[0].scales.dtype, device=device)
    scales = aligned(scales) if format == FP4 else scales
    zeros = torch.empty(scales.shape, dtype=torch.uint8, device=device) if format == INT4 else None
    row_scales = None
    if format == FP4 and any(piece.factor is not None for piece in pieces):
        row_scales = torch.ones(*experts, n, device=device)
    bytes_ = torch.int32 if scales.itemsize == 4 else torch.uint8  # no index writes float8
    for arrival, piece, own, part in zip(arrivals, pieces, rows, numbers, strict=True):
        assert own is not None
        at = (own,) if arrival.slot.expert is None else (arrival.slot.expert, own)
        each = torch.arange(len(own), device=device) // piece.groups.rows
        scales.view(bytes_)[at] = part.scales.view(bytes_)[each]
        if format in PACKED:
            assert part.nibbles is not None
            data[at] = pack_nibbles(part.nibbles, groups)
        else:
            assert part.bytes is not None
            data.view(torch.uint8)[at] = part.bytes.view(torch.uint8)
        if zeros is not None and part.zeros is not None:
            zeros[at] = part.zeros.to(torch.uint8)[each]
        if row_scales is not None and piece.factor is not None:
            row_scales[at] = piece.factor
    if zeros is not None and bool((zeros == 8).all()):
        zeros = None
    # beside four bits, and where scales are of groups of columns, rows have 16 bits, which are more exact
    rounds_rows = format in (FP8, INT8) and not groups.columns and not experts
    rounds_rows &= all(piece.rounds_rows for piece in pieces)
    return Weight(data, scales, format, groups, zeros, row_scales, rounds_rows)


def _in_whole_groups(piece: NarrowPiece) -> NarrowPiece:
    """The piece in smaller groups, if it is of floats of four bits, begins or ends within a group, and these are whole.
    (Of gpt-oss's experts four ranks have 720 columns each: 22.5 groups of 32, or 45 of 16.)"""
    least, count, groups = _LEAST[FP4], piece.numbers.shape[1], piece.groups
    if piece.values is None or count % least:
        return piece
    scales, order = piece.scales, piece.column_groups
    if order is not None:
        order = order.view(-1, least)
        if not bool((order == order[:, :1]).all()):
            return piece
        scales, columns = scales[:, order[:, 0]], least
    elif groups.columns and count % groups.columns:
        columns = math.gcd(groups.columns, count)
        scales = scales.repeat_interleave(groups.columns // columns, 1)[:, : count // columns]
    else:
        return piece
    return dataclasses.replace(piece, scales=scales, groups=Groups(groups.rows, columns), column_groups=None)


def _format(pieces: list[NarrowPiece], groups: Groups, k: int) -> tuple[str, list[_Numbers]] | None:
    """The format that holds all pieces, and the numbers of each."""
    if any(piece.values is not None for piece in pieces):
        floats = _floats4(pieces) if _fits(FP4, groups, k) else None
        return None if floats is None else (FP4, floats)
    kinds = {piece.numbers.dtype for piece in pieces}
    if kinds == {torch.float8_e4m3fn}:
        nan = any(bool(((piece.numbers.view(torch.uint8) & _FP8_NAN) == _FP8_NAN).any()) for piece in pieces)
        plain = all(piece.zeros is None for piece in pieces) and not nan
        plain &= has_float8(pieces[0].numbers.device) and _fits(FP8, groups, k)
        return (FP8, [_Numbers(_scales(piece), bytes=piece.numbers) for piece in pieces]) if plain else None
    if torch.float8_e4m3fn in kinds:
        return None
    numbers = [_numbers(piece) for piece in pieces]
    if _fits(INT4, groups, k) and all(each.nibbles is not None for each in numbers):
        return INT4, numbers
    if _fits(INT8, groups, k) and all(each.bytes is not None for each in numbers):
        return INT8, numbers
    return None


def _fits(format: str, groups: Groups, k: int) -> bool:
    columns = groups.columns
    if columns and (columns & (columns - 1) or not _LEAST[format] <= columns <= _MOST):
        return False
    return format not in PACKED or k % unit_of(groups) == 0


def _numbers(piece: NarrowPiece) -> _Numbers:
    up = 8 if piece.numbers.dtype == torch.int8 else 0
    zeros = torch.zeros(piece.scales.shape, dtype=torch.int32, device=piece.scales.device)
    zeros = zeros if piece.zeros is None else piece.zeros
    low, high = (int(bound) + up for bound in torch.aminmax(piece.numbers))
    least, most = (int(bound) + up for bound in torch.aminmax(zeros))
    nibbles = bytes = None
    if low >= 0 and high <= 15 and least >= 0 and most <= 16:
        nibbles = (piece.numbers.short() + up).to(torch.uint8)
    if low - most >= -128 and high - least <= 127:
        each = torch.arange(len(piece.numbers), device=zeros.device) // piece.groups.rows
        spread = zeros[each]
        if piece.groups.columns:
            spread = spread.repeat_interleave(piece.groups.columns, 1)[:, : piece.numbers.shape[1]]
        bytes = (piece.numbers.short() - spread.short()).to(torch.int8)
    return _Numbers(_scales(piece), nibbles, zeros + up, bytes)


def _scales(piece: NarrowPiece) -> torch.Tensor:
    """The scales, float32."""
    return piece.scales if piece.factor is None else piece.scales * piece.factor


def _floats4(pieces: list[NarrowPiece]) -> list[_Numbers] | None:
    """Floats of four bits whose scales are all powers of two, or all float8 with a factor of the piece; ``None``: they
    are neither."""
    if any(piece.values is None or not _are_e2m1(piece.values) or piece.zeros is not None for piece in pieces):
        return None
    for stored in (_powers, _float8):
        scales = [stored(piece) for piece in pieces]
        if all(each is not None for each in scales):
            return [
                _Numbers(each, piece.numbers) for each, piece in zip(scales, pieces, strict=True) if each is not None
            ]
    return None


def _are_e2m1(values: torch.Tensor) -> bool:
    return len(values) == 16 and torch.equal(values, e2m1_values(values.device))


def _powers(piece: NarrowPiece) -> torch.Tensor | None:
    """The scales as float8_e8m0fnu, if they are powers of two that kernels take."""
    stored = piece.scales.to(torch.float8_e8m0fnu)
    fits = (stored.float() == piece.scales) & (piece.scales <= 2.0**_LARGEST_POWER)
    return stored if piece.factor is None and bool(fits.all()) else None


def _float8(piece: NarrowPiece) -> torch.Tensor | None:
    """The scales as float8_e4m3fn, if it holds them."""
    stored = piece.scales.to(torch.float8_e4m3fn)
    fits = (stored.float() == piece.scales) & ~piece.scales.signbit()
    return stored if bool(fits.all()) else None

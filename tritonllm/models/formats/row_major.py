"""Numbers that lie as the weight does, ``[N, K]`` or of experts ``[E, N, K]``, perhaps several to a word along K."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tritonllm.kernels.dense.narrow import e2m1_values
from tritonllm.kernels.dense.weight import Groups
from tritonllm.models.formats.bits import nibbles, unpack
from tritonllm.models.formats.narrow_tensor import Parts
from tritonllm.models.formats.piece import NarrowPiece, cut_out


@dataclass(frozen=True)
class Packing:
    """How the numbers of a row lie.

    Attributes:
        unit: so many columns of the weight are one element of the numbers' last dimension that is read.
        unpack: makes of ``[R, U]``, or ``[R, U, bytes]``, the numbers ``[R, U * unit]``.
        values: what each number stands for; ``None``: itself.
    """

    unit: int
    unpack: Callable[[torch.Tensor], torch.Tensor]
    values: Callable[[torch.device], torch.Tensor] | None = None


ELEMENTS = Packing(1, lambda numbers: numbers)
FLOATS4 = Packing(2, nibbles, e2m1_values)
BLOCKS = Packing(32, lambda blocks: nibbles(blocks.flatten(-2)), e2m1_values)  # of 16 bytes, in one more dimension


def signed_words(bits: int) -> Packing:
    """Signed integers in 32-bit words, each plus half of the range (compressed-tensors)."""
    return Packing(32 // bits, lambda words: _signed(unpack(words, bits, -1), bits))


def _signed(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    return (numbers.short() - (1 << (bits - 1))).to(torch.int8)


@dataclass(frozen=True)
class RowMajor:
    """A scheme whose parts are ``numbers`` and ``scales``, and where they are there:

    - ``divisor`` or ``factor``: a number by whose inverse, or by which, all scales are multiplied;
    - ``zeros``: int8 as the scales, or (``zero_bits``) int32 words of signed integers along N of ``[N, groups]``;
    - ``order``: int32 ``[K]``, the group of each column.

    Attributes:
        name: what messages call it.
        size: N and K.
        groups: what shares a scale.
        packing: how the numbers lie.
        zero_bits: how many bits a packed zero point has; 0: they are not packed.
        times: a number by which the scales are multiplied.
        rounds_rows: products round their rows to the numbers' format, too.
    """

    name: str
    size: tuple[int, int]
    groups: Groups
    packing: Packing = ELEMENTS
    zero_bits: int = 0
    times: float = 1.0
    rounds_rows: bool = False

    def piece(self, parts: Parts, expert: int | None, rows: range, columns: range) -> NarrowPiece:
        """As :class:`~tritonllm.models.formats.narrow_tensor.Scheme` says."""
        lead = () if expert is None else (expert,)
        unit = self.packing.unit
        across = slice(columns.start // unit, -(-columns.stop // unit))
        read = self.packing.unpack(parts("numbers", *lead, slice(rows.start, rows.stop), across))
        numbers = read[:, columns.start - across.start * unit :][:, : len(columns)]
        scales = self._scales(parts, lead)
        return cut_out(
            numbers,
            scales,
            self.groups,
            rows,
            columns,
            zeros=self._zeros(parts, lead, tuple(scales.shape)) if "zeros" in parts else None,
            column_groups=in_order(parts("order"), self.groups.columns) if "order" in parts else None,
            values=None if self.packing.values is None else self.packing.values(numbers.device),
            factor=_factor(parts, lead),
            rounds_rows=self.rounds_rows,
        )

    def _scales(self, parts: Parts, lead: tuple[int, ...]) -> torch.Tensor:
        scales = parts("scales", *lead)
        scales = scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales
        return scales.float().reshape(self.groups.shape(*self.size)) * self.times

    def _zeros(self, parts: Parts, lead: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        zeros = parts("zeros", *lead)
        if self.zero_bits:
            zeros = _signed(unpack(zeros, self.zero_bits, -2)[: shape[0]], self.zero_bits)
        return zeros.int().reshape(shape)


def _factor(parts: Parts, lead: tuple[int, ...]) -> torch.Tensor | None:
    """What multiplies all scales of a weight, float32."""
    if "divisor" in parts:
        return parts("divisor", *lead).float().reshape(()).reciprocal()
    return parts("factor", *lead).float().reshape(()) if "factor" in parts else None


def in_order(order: torch.Tensor, size: int) -> torch.Tensor | None:
    """The group of each column, or ``None`` where a group is the next ``size`` columns, as -1 everywhere says, too."""
    columns = torch.arange(len(order), device=order.device)
    regular = columns // size if size else torch.zeros_like(columns)
    return None if bool((order == regular).all() | (order == -1).all()) else order

"""Numbers that lie ``[K, N]``, several to a word of 32 bits: GPTQ's and AWQ's."""

import math
from dataclasses import dataclass

import torch

from tritonllm.kernels.dense.weight import Groups
from tritonllm.models.formats.bits import unpack
from tritonllm.models.formats.narrow_tensor import Parts
from tritonllm.models.formats.piece import NarrowPiece, cut_out
from tritonllm.models.formats.row_major import in_order


@dataclass(frozen=True)
class ColumnMajor:
    """A scheme with the parts ``numbers``, ``scales`` ``[K / group, N]`` and ``zeros`` of that shape, packed along N;
    and perhaps ``order`` ``[K]``, the group of each column of the weight.

    Attributes:
        name: what messages call it.
        bits: how many bits a number has.
        columns: how many columns of the weight a group has; 0 for all.
        along_rows: the numbers are packed along N, else along K.
        places: where in a word the numbers lie, if not in their order; they have 4 bits then.
        minus: zero points are stored minus this.
    """

    name: str
    bits: int
    columns: int
    along_rows: bool = False
    places: tuple[int, ...] | None = None
    minus: int = 0

    def piece(self, parts: Parts, expert: int | None, rows: range, columns: range) -> NarrowPiece:
        """As :class:`~tritonllm.models.formats.narrow_tensor.Scheme` says."""
        assert expert is None
        packed, whole = (rows, columns) if self.along_rows else (columns, rows)
        count, each = 32 // math.gcd(self.bits, 32), self.bits // math.gcd(self.bits, 32)  # numbers of so many words
        first = packed.start // count * count
        words = slice(first // count * each, -(-packed.stop // count) * each)
        others = slice(whole.start, whole.stop)
        read = parts("numbers", *((others, words) if self.along_rows else (words, others)))
        numbers = self._unpacked(read, 1 if self.along_rows else 0)
        numbers = numbers.narrow(int(self.along_rows), packed.start - first, len(packed)).mT.contiguous()
        zeros = self._unpacked(parts("zeros"), 1).int() + self.minus
        order = in_order(parts("order"), self.columns) if "order" in parts else None
        scales = parts("scales").float().mT
        return cut_out(
            *(numbers, scales, Groups(1, self.columns), rows, columns),
            zeros=zeros.mT[: len(scales)],
            column_groups=order,
        )

    def _unpacked(self, words: torch.Tensor, dim: int) -> torch.Tensor:
        numbers = unpack(words, self.bits, dim)
        if self.places is None:
            return numbers
        return numbers.unflatten(dim, (-1, len(self.places)))[..., list(self.places)].flatten(dim)

"""A weight as a value: its numbers, their scales, and the format that says how both lie in memory.

Layers hold a :class:`Weight`, and public operations take one wherever they take a tensor. The formats:

- ``plain``: elements of float16, bfloat16 or float32 as they are multiplied, ``[N, K]`` or of experts ``[E, N, K]``;
- ``onednn``: laid out for the CPU's products, which alone can read it (:mod:`tritonllm.kernels.dense.cpu`);
- ``fp8``: float8_e4m3fn, and ``int8``: int8, ``[N, K]``, with scales of groups (:class:`Groups`): an element is its
  number times its group's scale;
- ``int4``: uint8 ``[N, K / 2]``, numbers from 0 to 15, of which the group's zero point is taken away first. Of each run
  of 128 columns, or of a group where it is shorter, the first half lies in the low nibbles, the second in the high:
  both are tiles of neighbouring columns then, and none has to be taken apart;
- ``fp4``: packed as ``int4``, but four bits are a float, E2M1: sign, two bits of exponent, one of mantissa. A scale is
  a byte, too: of MXFP4 a power of two (E8M0) for each 32 columns; of NVFP4 float8 (e4m3) for each 16, and a float32
  number for each row. OCP Microscaling Formats (MX) Specification v1.0 (2023); NVIDIA, "Pretraining Large Language
  Models with NVFP4" (2025).

The Triton kernels of products, experts and routers read a weight through :func:`tile_at` and :func:`load_tile`, so a
narrow format is one more case there, with its scales. Hopper's kernels let the bulk copy
engine read (:func:`tritonllm.kernels.hopper.descriptors.weight_descriptor`): a narrow tile lies in shared memory then,
and is widened where the matrix unit takes its operands (``_weights`` of `sm90/tiles.py`, and `hopper/product.py`).
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tritonllm.kernels.runtime.checks import require

PLAIN, ONEDNN, FP8, INT8, INT4, FP4 = "plain", "onednn", "fp8", "int8", "int4", "fp4"
# formats with scales, and the dtype of what holds their elements
NARROW = {FP8: torch.float8_e4m3fn, INT8: torch.int8, INT4: torch.uint8, FP4: torch.uint8}
PACKED = (INT4, FP4)  # two elements to a byte
BYTE_SCALES = {torch.float8_e8m0fnu: "e8m0", torch.float8_e4m3fn: "e4m3"}  # those of "fp4", and what kernels call them
# Of a weight that a program asks for before the kernel before it ends. The four products of a layer, 5 to 32 rows, take
# less on an H100: of Qwen3-0.6B 3 to 6%, a half of Llama-3.1-70B 1%, of Llama-3.1-8B and 3.2-1B 0 to 0.5%. With 64 KB
# all but the half take more, up to 7%: what is asked for takes the memory's time from the kernel before.
AHEAD_BYTES = 16 << 10


class Groups(NamedTuple):
    """The elements of a weight ``[N, K]`` that share a scale: rectangles, cut off at its edges.

    Attributes:
        rows: how many rows of the weight a group has.
        columns: how many columns, a power of two of 16 or more; 0 for all of them.
    """

    rows: int = 1
    columns: int = 0

    def shape(self, n: int, k: int) -> tuple[int, int]:
        """The shape of the scales of a weight ``[n, k]``."""
        return triton.cdiv(n, self.rows), 1 if self.columns == 0 else triton.cdiv(k, self.columns)


class Weight(NamedTuple):
    """The weight of a product, in one of the formats that products read.

    Attributes:
        data: the elements, as the format says.
        scales: ``groups.shape(N, K)`` float32, float16 or bfloat16 of the narrow formats, but of ``"fp4"``
            float8_e8m0fnu up to 2^120, or float8_e4m3fn from 0 on; else ``None``.
        format: ``"plain"``, ``"onednn"``, ``"fp8"``, ``"int8"``, ``"int4"`` or ``"fp4"``.
        groups: what shares a scale and a zero point.
        zeros: the zero points of ``"int4"``, shaped as the scales, uint8 from 0 to 16; ``None``: all are 8.
        row_scales: ``[N]`` float32, which multiply the scales of a row of ``"fp4"``; ``None``: all are 1.
        rounds_rows: a product rounds its rows to the same format, each with a scale of its own (W8A8); of ``"fp8"`` or
            ``"int8"`` whose groups have all columns.
    """

    data: torch.Tensor
    scales: torch.Tensor | None = None
    format: str = PLAIN
    groups: Groups = Groups()
    zeros: torch.Tensor | None = None
    row_scales: torch.Tensor | None = None
    rounds_rows: bool = False

    def each(self) -> Iterator["Weight"]:
        """The weights of several, ``[E, N, K]``, one after the other."""
        for place, data in enumerate(self.data):
            parts = self.scales, self.zeros, self.row_scales
            scales, zeros, row_scales = (None if part is None else part[place] for part in parts)
            yield self._replace(data=data, scales=scales, zeros=zeros, row_scales=row_scales)

    @property
    def columns(self) -> int:
        """K."""
        return self.data.shape[-1] * (2 if self.format in PACKED else 1)


def format_of(data: torch.Tensor, scales: torch.Tensor) -> str:
    """The narrow format of a weight with these parts."""
    if scales.dtype in BYTE_SCALES:
        return FP4
    return next(format for format, dtype in NARROW.items() if dtype == data.dtype)


def elements(name: str, weight: torch.Tensor | Weight) -> torch.Tensor:
    """What an operation on plain weights reads of its argument ``name``.

    Raises:
        ValueError: another format.
    """
    if not isinstance(weight, Weight):
        return weight
    require(weight.format == PLAIN, f"{name} must be a plain weight here, got one of the format {weight.format!r}")
    return weight.data


@triton.jit
def tile_at(weight_ptr, b_row, b_k, stride):
    """Where columns ``b_k`` of rows ``b_row [N]`` of a weight begin, ``[N, K]``; ``stride`` lies between rows."""
    return weight_ptr + b_row.to(tl.int64)[:, None] * stride + b_k


@triton.jit
def load_tile(p_tile, start, mask, EVICT: tl.constexpr):
    """The tile ``start`` columns behind ``p_tile``, 0 where ``mask`` is False (``None``: it is True everywhere)."""
    if mask is None:
        b_tile = tl.load(p_tile + start, eviction_policy=EVICT)
    else:
        b_tile = tl.load(p_tile + start, mask=mask, other=0.0, eviction_policy=EVICT)
    return b_tile


def lines_ahead(rows: int, columns: int, weight: torch.Tensor) -> int:
    """How many lines :func:`fetch_ahead` asks for, of so many rows and columns that a program reads: a power of two."""
    line = 128 // weight.element_size()
    most = AHEAD_BYTES // (128 * rows)
    return triton.next_power_of_2(min(most, columns // line) + 1) // 2


@triton.jit
def fetch_ahead(weight_ptr, b_row, start, stride, LINES: tl.constexpr):
    """Ask memory for the first ``LINES`` lines of 128 bytes, from column ``start`` on, of rows ``b_row [N]``, for the
    second-level cache. Nobody waits for them."""
    LINE: tl.constexpr = 1024 // weight_ptr.dtype.element_ty.primitive_bitwidth
    p_line = tile_at(weight_ptr, b_row, start + tl.arange(0, LINES)[None, :] * LINE, stride)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [p_line], dtype=tl.int32, is_pure=False, pack=1
    )

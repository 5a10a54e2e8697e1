"""What the operators and launchers of products take together; as of :func:`tritonllm.kernels.linear`."""

from typing import NamedTuple

import torch

from tritonllm.kernels.dense.weight import BYTE_SCALES

HEAVY = 2**62  # `together` of a layer that has other kernels than products of few rows between its products


class Operands(NamedTuple):
    """The tensors of a product: ``x [M, K]``, ``weight [N, K]`` (the numbers of a narrow one), and ``out``, which is
    written, or added to."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    norm_weight: torch.Tensor | None
    out: torch.Tensor
    workspace: torch.Tensor | None


class Fused(NamedTuple):
    """What is computed with the product."""

    eps: float
    norm_offset: float
    activation: str | None
    gated: bool
    add: bool  # `scale` times the result to what is in `out`
    scale: float
    constant_weight: bool
    together: int = 0  # elements of the weights of all products of its layer; 0: four of this one's


class Scaled(NamedTuple):
    """The scales of a narrow weight (:class:`~tritonllm.kernels.dense.weight.Groups`), ``None`` for a plain one; and of
    rows that are rounded already, ``[M]`` float32."""

    scales: torch.Tensor | None = None
    group_rows: int = 1
    group_columns: int = 0
    zeros: torch.Tensor | None = None
    row_scales: torch.Tensor | None = None
    rounds_rows: bool = False
    of_rows: torch.Tensor | None = None


NOT_SCALED = Scaled()
UNIT = 128  # columns whose first half is in the low nibbles of as many bytes, and whose second is in the high, at most


def columns_of_unit(group_columns: int) -> int:
    """How many columns of a weight of four bits are packed together, of which so many (0: all) share a scale."""
    return min(group_columns or UNIT, UNIT)


def half_unit(weight: torch.Tensor, scaled: Scaled) -> int:
    """How many neighbouring columns are low nibbles of a weight of four bits; 0 for another."""
    return columns_of_unit(scaled.group_columns) // 2 if weight.dtype == torch.uint8 else 0


def scales_for_kernel(scaled: Scaled) -> tuple[torch.Tensor | None, str | None]:
    """What a kernel reads as scales, and what it takes bytes for: ``"e8m0"`` or ``"e4m3"``, ``None`` for other scales.
    Triton has no type for the first, and not on all chips one for the second."""
    scales = scaled.scales
    kind = None if scales is None else BYTE_SCALES.get(scales.dtype)
    return (scales, None) if scales is None or kind is None else (scales.view(torch.uint8), kind)


class NextNorm(NamedTuple):
    """The norm after a product that is added to the stream, and what it leaves to the next one: see ``add_linear``."""

    next_weight: torch.Tensor
    next_offset: float
    scaled: torch.Tensor
    next_squares: torch.Tensor

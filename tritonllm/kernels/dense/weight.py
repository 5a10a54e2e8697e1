"""A weight as a value: its numbers, their scales, and the format that says how both lie in memory.

Layers hold a :class:`Weight`, and public operations take one wherever they take a tensor. There are two formats.
``plain``: elements of float16, bfloat16 or float32 as they are multiplied, ``[N, K]`` or of experts ``[E, N, K]``.
``onednn``: laid out for the CPU's products, which alone can read it (:mod:`tritonllm.kernels.dense.cpu`).

The Triton kernels of products, experts and routers read a weight through :func:`tile_at` and :func:`load_tile`, so a
narrow format, of a byte or less an element, is one more case there, with its scales. Hopper's kernels let the bulk copy
engine read (:func:`tritonllm.kernels.hopper.descriptors.weight_descriptor`): a narrow tile lies in shared memory then,
and is widened where the matrix unit takes its operands (``_weights`` of `sm90/tiles.py`, and `hopper/product.py`).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tritonllm.kernels.runtime.checks import require

PLAIN, ONEDNN = "plain", "onednn"


class Weight(NamedTuple):
    """A weight.

    Attributes:
        data: as the format says.
        scales: of formats that have them; ``None`` for both that there are.
        format: ``"plain"`` or ``"onednn"``.
    """

    data: torch.Tensor
    scales: torch.Tensor | None = None
    format: str = PLAIN


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

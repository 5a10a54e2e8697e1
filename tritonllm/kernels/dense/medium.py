"""Products of 65 to 256 rows around the residual stream, with the RMS norm between them taken along.

A pre-norm layer adds a product to its stream, normalises the stream, and multiplies that by the next weight. The root
of the mean square is one factor for a whole row, so it can wait until after the second product (FlashNorm: Graef et
al., 2024). So the first product (:func:`add_linear`) leaves, beside the stream, its rows times the norm's weight and
parts of their sums of squares, and the second (:func:`linear_unnormed`) begins from those: no kernel in between.

On Hopper both are one launch of `sm90/tiles.py` for weights of up to 8 million elements; with larger ones cuBLAS,
whose programs share what they fetch, is faster. Elsewhere, and for other sizes, they are :func:`linear` and the norm.
"""

from typing import Any, NamedTuple

import torch

from tritonllm.kernels.dense.arguments import Fused, NextNorm, Operands
from tritonllm.kernels.dense.linear import GATED, linear
from tritonllm.kernels.dense.sm90.tile import HopperTile, fits
from tritonllm.kernels.dense.weight import Weight, elements
from tritonllm.kernels.elementwise import ACTIVATIONS
from tritonllm.kernels.runtime.checks import check_same_dtype, check_tensor, require
from tritonllm.kernels.runtime.registry import register_op, with_reference
from tritonllm.kernels.runtime.variants import Variant, Variants

MIN_M, MAX_M = 65, 256
MIN_N = 1024  # rows of the weight: with fewer there are too few tiles
MAX_WEIGHT = 2**23  # elements


class Unnormed(NamedTuple):
    """Rows that an RMS norm has still to divide by their root mean square.

    Attributes:
        scaled: ``[M, N]``, the rows times the norm's weight.
        squares: ``[T, M]`` float32, which add up to the rows' sums of squares.
        eps: added to the mean square.
    """

    scaled: torch.Tensor
    squares: torch.Tensor
    eps: float


def tile_of(m: int, n: int, adds: bool) -> HopperTile:
    """The tile for ``m`` rows and ``n`` rows of a weight: about one for each of an H200's processors, and most of its
    shared memory for what is under way.

    Chosen in decode steps of Qwen3-0.6B, not one by one (docs/kernels.md).

    Args:
        adds: the product is added to a stream; then a tile's width is a power of two.
    """
    wide = n > 4096 and not adds
    if m > 128:
        if n < 3072:
            return HopperTile(64, 32, 12, 88, False)
        return HopperTile(128, 96, 7, 104, False) if wide else HopperTile(128, 64, 8, 104, False)
    if n < 3072:
        return HopperTile(64, 16, 20, 88, True) if n <= 1024 else HopperTile(64, 32, 12, 88, True)
    return HopperTile(64, 96, 8, 112, True) if wide else HopperTile(64, 64, 12, 88, True)


def _pays(weight: torch.Tensor) -> bool:
    return weight.shape[0] >= MIN_N and weight.numel() <= MAX_WEIGHT


def pays(x: torch.Tensor, weight: torch.Tensor, gated: bool) -> bool:
    return MIN_M <= len(x) <= MAX_M and _pays(weight)


MEDIUM = Variants(
    "add_linear",  # and linear_unnormed
    Variant("tiles", "dense/sm90/tiles.py", (90,), fits, pays),
    Variant("linear", "dense/linear.py"),
)


def rows_that_begin_norms(device: torch.device) -> range:
    """The numbers of rows for which :func:`add_linear` and :func:`linear_unnormed` may pay on ``device``."""
    return range(MIN_M, MAX_M + 1) if MEDIUM.own_rows(device) else range(0)


def begins_norms(weight: torch.Tensor) -> bool:
    """Whether they pay for such a weight; both products of a norm must.

    In bfloat16, for products before the normalisation may leave the range of float16.
    """
    return _pays(weight) and weight.dtype == torch.bfloat16 and weight.stride(0) % 8 == 0


def _add_reference(operands: Operands, fused: Fused, after: NextNorm) -> None:
    x, weight, bias, _, stream, _ = operands
    y = x.float() @ weight.float().T
    stream.copy_(stream.float() + fused.scale * (y if bias is None else y + bias))
    _leave_norm(stream, after)


def _leave_norm(stream: torch.Tensor, after: NextNorm) -> None:
    after.scaled.copy_(stream.float() * (after.next_weight.float() + after.next_offset))
    after.next_squares.zero_()
    after.next_squares[0] = stream.float().square().sum(-1)


@register_op(mutates=("out", "scaled", "next_squares"), reference=_add_reference)
def _add_linear(operands: Operands, fused: Fused, after: NextNorm) -> None:
    x, weight, bias, _, stream, _ = operands
    tiles = MEDIUM.own(x.device, x, weight, False)
    if tiles is not None:
        tiles.module.launch(operands, fused, tile_of(len(x), len(weight), True), after=after)
        return
    linear(x, weight, bias, residual=stream, scale=fused.scale, constant_weight=fused.constant_weight)
    _leave_norm(stream, after)


def _normalised(scaled: torch.Tensor, squares: torch.Tensor, eps: float) -> torch.Tensor:
    return scaled.float() * torch.rsqrt(squares.sum(0) / scaled.shape[1] + eps)[:, None]


def _unnormed_reference(squares: torch.Tensor, operands: Operands, fused: Fused) -> None:
    scaled, weight, bias, _, out, _ = operands
    _, _, activation, gated, *_ = fused
    y = _normalised(scaled, squares, fused.eps) @ weight.float().T
    if bias is not None:
        y += bias
    gate, up = y.chunk(2, dim=-1) if gated else (y, None)
    if activation is not None:
        gate = ACTIVATIONS[activation](gate)
    out.copy_(gate if up is None else gate * up)


@register_op(mutates=("out",), reference=_unnormed_reference)
def _linear_unnormed(squares: torch.Tensor, operands: Operands, fused: Fused) -> None:
    scaled, weight, bias, _, out, _ = operands
    tiles = MEDIUM.own(scaled.device, scaled, weight, fused.gated)
    if tiles is not None:
        tiles.module.launch(operands, fused, tile_of(len(scaled), len(weight), False), squares)
        return
    how: dict[str, Any] = {
        "activation": fused.activation,
        "gated": fused.gated,
        "constant_weight": fused.constant_weight,
    }
    linear(_normalised(scaled, squares, fused.eps).to(scaled.dtype), weight, bias, out=out, **how)


def _outputs(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stream: torch.Tensor, norm_weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(scaled, squares)`` to be written, after all checks."""
    check_tensor("x", x, ("M", None))
    check_tensor("weight", weight, (None, x.shape[1]), like=x)
    check_same_dtype("weight", weight, "x", x)
    (m, _), n = x.shape, weight.shape[0]
    if bias is not None:
        check_tensor("bias", bias, (n,), like=x)
        check_same_dtype("bias", bias, "x", x)
    check_tensor("stream", stream, (m, n), like=x)
    check_same_dtype("stream", stream, "x", x)
    check_tensor("norm_weight", norm_weight, (n,), like=x)
    terms = 1
    if MEDIUM.own(x.device, x, weight, False):  # one for each tile
        terms = -(-n // tile_of(m, n, True).block_n)
    return torch.empty((m, n), dtype=x.dtype, device=x.device), torch.empty(terms, m, device=x.device)


def add_linear(
    x: torch.Tensor,
    weight: torch.Tensor | Weight,
    bias: torch.Tensor | None,
    stream: torch.Tensor,
    norm_weight: torch.Tensor,
    *,
    norm_eps: float = 1e-6,
    norm_weight_offset: float = 0.0,
    scale: float = 1.0,
    constant_weight: bool = False,
) -> Unnormed:
    """``stream += scale * (x @ weight.T + bias)``, in place, and what the norm after it leaves to the next product.

    Sums are in float32, and a row's results do not depend on the others.

    Args:
        x: ``[M, K]`` float16, bfloat16 or float32; contiguous in the last dimension.
        weight: ``[N, K]``, a tensor or a :class:`Weight`, and ``bias``: ``[N]`` or None, with the dtype of ``x``.
        stream: ``[M, N]``; must not overlap ``x``.
        norm_weight: ``[N]``; ``norm_weight_offset`` is added to it, ``norm_eps`` to the mean square.
        constant_weight: as in :func:`tritonllm.kernels.linear`.

    Raises:
        ValueError: a shape, dtype or device that does not fit.
    """
    weight = elements("weight", weight)
    scaled, squares = _outputs(x, weight, bias, stream, norm_weight)
    _add_linear(
        *Operands(x, weight, bias, None, stream, None),
        *Fused(0.0, 0.0, None, False, True, scale, constant_weight),
        *NextNorm(norm_weight, norm_weight_offset, scaled, squares),
    )
    return Unnormed(scaled, squares, norm_eps)


add_linear_ref = with_reference(add_linear)


def _output(x: Unnormed, weight: torch.Tensor, bias: torch.Tensor | None, act: str | None, gated: bool) -> torch.Tensor:
    """What is written, after all checks."""
    scaled, squares, _ = x
    check_tensor("scaled", scaled, ("M", None))
    check_tensor("squares", squares, (None, scaled.shape[0]), dtype=torch.float32, like=scaled)
    require(squares.is_contiguous() and len(squares) > 0, "squares must be contiguous and have a row")
    check_tensor("weight", weight, (None, scaled.shape[1]), like=scaled)
    check_same_dtype("weight", weight, "scaled", scaled)
    rows = weight.shape[0]
    if bias is not None:
        check_tensor("bias", bias, (rows,), like=scaled)
        check_same_dtype("bias", bias, "scaled", scaled)
    require(act is None or act in ACTIVATIONS, f"activation must be one of {', '.join(ACTIVATIONS)}, got {act!r}")
    require(not gated or act in GATED, f"activation must be {' or '.join(GATED)} if gated, got {act!r}")
    require(not gated or rows % 2 == 0, f"weight must have an even number of rows if gated (gate, then up), got {rows}")
    return scaled.new_empty(scaled.shape[0], rows // 2 if gated else rows)


def linear_unnormed(
    x: Unnormed,
    weight: torch.Tensor | Weight,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    gated: bool = False,
    constant_weight: bool = False,
) -> torch.Tensor:
    """``act(normalised x @ weight.T + bias)`` of rows that :func:`add_linear` left unnormalised; as :func:`linear`.

    Raises:
        ValueError: a shape, dtype or device that does not fit, or another activation.
    """
    weight = elements("weight", weight)
    out = _output(x, weight, bias, activation, gated)
    operands = Operands(x.scaled, weight, bias, None, out, None)
    _linear_unnormed(x.squares, *operands, *Fused(x.eps, 0.0, activation, gated, False, 1.0, constant_weight))
    return out


linear_unnormed_ref = with_reference(linear_unnormed)

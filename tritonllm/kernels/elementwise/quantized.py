"""Rows as float8 or int8 with a scale each, which a product of 8 bits reads: as they are, or those of RMSNorm and
SwiGLU on their way out.

Quantising on the way out saves the pass over the rows that a kernel of its own would make, 5 bytes an element (written
and read in 16 bits, written in 8) of the 9 and 11 that the two take apart. Scales by token: "ZeroQuant", Yao et al.
(2022); the format: Micikevicius et al., "FP8 Formats for Deep Learning" (2022).
"""

import torch
import triton
import triton.language as tl

from tritonllm.kernels.elementwise import norm
from tritonllm.kernels.elementwise.activation import ACTIVATIONS, activate
from tritonllm.kernels.runtime import tuning
from tritonllm.kernels.runtime.checks import check_tensor, require
from tritonllm.kernels.runtime.dependent_launch import dependent_launch, let_next_start, wait_for_previous
from tritonllm.kernels.runtime.float8 import DTYPE, empty_rows, quantize_reference, round_to, row_scale
from tritonllm.kernels.runtime.registry import register_op, with_reference


@triton.jit
def _values(p_x, cols, N, ACT: tl.constexpr):
    """Some columns of a row as they are, or (ACT) ``act(gate) * up``, rounded as it would be stored."""
    b_x = tl.load(p_x + cols, mask=cols < N, other=0.0).to(tl.float32)
    if ACT is not None:
        b_up = tl.load(p_x + N + cols, mask=cols < N, other=0.0).to(tl.float32)
        b_x = (activate(b_x, ACT) * b_up).to(p_x.dtype.element_ty).to(tl.float32)
    return b_x


@triton.jit
def _quantize_kernel(
    x_ptr,  # [T, N], or [T, 2N] with ACT
    out_ptr,  # [T, N] float8 or int8
    scale_ptr,  # [T]
    N,
    stride_x,
    stride_out,
    ACT: tl.constexpr,
    ONE_BLOCK: tl.constexpr,  # N <= BLOCK
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one row, in registers; a longer one is computed twice, the second time from the nearest cache."""
    row = tl.program_id(0).to(tl.int64)
    p_x = x_ptr + row * stride_x
    cols = tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    b_y = _values(p_x, cols, N, ACT)
    b_largest = tl.maximum(tl.abs(b_y), 0.0)  # a NaN becomes 0
    if not ONE_BLOCK:
        for start in range(BLOCK, N, BLOCK):
            b_largest = tl.maximum(b_largest, tl.abs(_values(p_x, start + cols, N, ACT)))
    let_next_start(PDL)
    scale, inverse = row_scale(tl.max(b_largest, axis=0), out_ptr.dtype.element_ty)
    tl.store(scale_ptr + row, scale)
    for start in range(0, BLOCK if ONE_BLOCK else N, BLOCK):
        at = start + cols
        if not ONE_BLOCK:
            b_y = _values(p_x, at, N, ACT)
        b_out = round_to(b_y * inverse, out_ptr.dtype.element_ty)
        tl.store(out_ptr + row * stride_out + at, b_out, mask=at < N)


def default_config(n: int, tokens: int) -> tuning.Config:
    block = min(triton.next_power_of_2(n), 16384)
    return {"BLOCK": block, "num_warps": max(1, min(16, block // 512))}


def _launch(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, activation: str | None) -> None:
    tokens, n = q.shape
    if q.numel() == 0:
        return
    config = tuning.get_config("silu_and_mul_quantize", x.device, default_config, n=n, tokens=tokens)
    _quantize_kernel[(tokens,)](
        *(x, q, scale, n, x.stride(0), q.stride(0)),
        ACT=activation,
        ONE_BLOCK=n <= config["BLOCK"],
        **config,
        **dependent_launch(x.device, tokens),
    )


@register_op(mutates=("q", "scale"), reference=quantize_reference)
def _quantize_rows(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor) -> None:
    _launch(x, q, scale, None)


def quantize_rows(x: torch.Tensor, dtype: torch.dtype = DTYPE) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in float8 or int8, each divided by a scale of its own.

    Args:
        x: ``[..., N]`` float16, bfloat16 or float32, N at least 1; contiguous in the last dimension.
        dtype: float8_e4m3fn or int8.

    Returns:
        ``(q, scale)``: ``q[..., N]`` of that dtype and ``scale[...]`` float32, the row's largest magnitude (at least
        1e-30) over 448 or 127; ``x`` is about ``q.float() * scale[..., None]``.

    Raises:
        ValueError: an empty row, a wrong dtype, rows that are not contiguous, or float8 on a GPU without it (compute
            capability 8.9).
    """
    require(dtype in (DTYPE, torch.int8), f"dtype must be torch.float8_e4m3fn or torch.int8, got {dtype}")
    check_tensor("x", x, [None] * max(x.dim(), 1))
    n = x.shape[-1]
    require(n > 0, f"x must have rows of an element or more, got {list(x.shape)}")
    q, scale = empty_rows(x, n, dtype)
    _quantize_rows(x.reshape(-1, n), q.view(-1, n), scale.view(-1))
    return q, scale


quantize_rows_ref = with_reference(quantize_rows)


def round_rows(
    x: torch.Tensor, norm_of: norm.NormOptions | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(q[M, K], scale[M])`` of rows ``x[M, K]``, or of their norm: one launch, but for a norm of long rows."""
    if norm_of is None:
        return quantize_rows(x, dtype)
    if x.shape[1] <= norm.MAX_BLOCK:
        return norm.quantize_normalized(x, norm_of, dtype)
    return quantize_rows(norm.normalize(x, norm_of), dtype)


def _reference(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, activation: str) -> None:
    gate, up = x.float().chunk(2, dim=-1)
    quantize_reference((ACTIVATIONS[activation](gate) * up).to(x.dtype), q, scale)


@register_op(mutates=("q", "scale"), reference=_reference)
def _act_and_mul_quantize(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, activation: str) -> None:
    _launch(x, q, scale, activation)


def _check_gated(x: torch.Tensor) -> None:
    check_tensor("x", x, [None] * max(x.dim(), 1))
    require(
        x.shape[-1] % 2 == 0 and x.shape[-1] > 0,
        f"x must have an even last dimension (gate and up), not 0, got {list(x.shape)}",
    )


def act_and_mul_quantize(
    x: torch.Tensor, activation: str, dtype: torch.dtype = DTYPE
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`silu_and_mul_quantize` with any gated activation, also to int8, of rows that are known to fit."""
    n = x.shape[-1] // 2
    q, scale = empty_rows(x, n, dtype)
    _act_and_mul_quantize(x.reshape(-1, 2 * n), q.view(-1, n), scale.view(-1), activation)
    return q, scale


def silu_and_mul_quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """SwiGLU in float8: ``y = silu(x[..., :N]) * x[..., N:]``, and each row of ``y`` divided by its scale.

    ``y`` is rounded to the dtype of ``x`` first: the result is that of :func:`silu_and_mul` and a quantisation apart.

    Args:
        x: ``[..., 2N]`` float16, bfloat16 or float32, gate first; contiguous in the last dimension.

    Returns:
        ``(q, scale)``: ``q[..., N]`` float8_e4m3fn and ``scale[...]`` float32, the row's largest magnitude (at least
        1e-30) over 448; ``y`` is about ``q.float() * scale[..., None]``.

    Raises:
        ValueError: an odd or empty last dimension, a wrong dtype, or a GPU without float8 (compute capability 8.9).
    """
    _check_gated(x)
    return act_and_mul_quantize(x, "silu")


silu_and_mul_quantize_ref = with_reference(silu_and_mul_quantize)


def _check_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> None:
    norm.check_input(x)
    check_tensor("residual", residual, x.shape, like=x)
    norm.check_affine("weight", weight, x)
    limit = norm.MAX_BLOCK
    require(0 < x.shape[-1] <= limit, f"x must have rows of 1 to {limit} elements to be quantized, got {x.shape[-1]}")


def fused_add_rms_norm_quantize(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    x_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``residual += x * x_scale``, and its RMSNorm in float8: one pass from the stream to the next product's input.

    The norm is rounded to the dtype of ``x`` first: the result is that of :func:`fused_add_rms_norm` and a quantisation
    apart.

    Args:
        x: ``[..., N]`` float16, bfloat16 or float32, N at most 16384; strides as in :func:`rms_norm`. Not changed.
        residual: ``[..., N]``, overwritten with the sum; its dtype may differ from that of ``x``.
        weight: ``[N]`` or ``[H, N]`` as in :func:`rms_norm`.
        eps: added to the mean square.
        weight_offset: added to ``weight``, in float32.
        x_scale: ``x`` is multiplied by it, in float32.

    Returns:
        ``(q, scale, residual)``: ``q[..., N]`` float8_e4m3fn and ``scale[...]`` float32, the row's largest magnitude
        (at least 1e-30) over 448; the norm is about ``q.float() * scale[..., None]``.

    Raises:
        ValueError: a wrong shape, dtype or device, rows that are not contiguous or too long, or a GPU without float8
            (compute capability 8.9).
    """
    _check_norm(x, residual, weight)
    quantized = empty_rows(x, x.shape[-1])
    norm.add_and_normalize(x, residual, norm.NormOptions(weight, None, eps, weight_offset), x_scale, quantized)
    return *quantized, residual


fused_add_rms_norm_quantize_ref = with_reference(fused_add_rms_norm_quantize)

"""The kernel of RMSNorm and LayerNorm, alone or after a residual addition, and RMSNorm; LayerNorm is in `layernorm`.

A row is read once, kept in registers while its statistics are summed, and written once, so the floor is memory:
2N elements a row, 4N with the addition (28 us for 4096 rows of 4096 in bfloat16 at 4.8 TB/s). Short rows (the per-head
norm of Qwen3 has N = 128) share a program; a row beyond one block is read twice, by LayerNorm three times.
RMSNorm: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
"""

import torch
import triton
import triton.language as tl

from tritonllm.kernels.elementwise import cpu
from tritonllm.kernels.elementwise.arguments import NormOptions, Rows
from tritonllm.kernels.runtime import tuning
from tritonllm.kernels.runtime.checks import check_tensor, require
from tritonllm.kernels.runtime.dependent_launch import dependent_launch, let_next_start, wait_for_previous
from tritonllm.kernels.runtime.float8 import empty_rows, quantize_reference, round_to, row_scale
from tritonllm.kernels.runtime.registry import register_op, with_reference

MAX_BLOCK = 16384
# The number of rows whose configuration, and so whose order of a row's sum, a norm that is batch invariant always has.
INVARIANT_ROWS = 256


@triton.jit
def _load_rows(p_x, p_residual, mask, x_scale, ADD: tl.constexpr, EVICT: tl.constexpr):
    """One block of rows in float32; with ADD the residual sum, rounded as it will be stored."""
    b_x = tl.load(p_x, mask=mask, other=0.0, eviction_policy=EVICT).to(tl.float32)
    if ADD:
        b_residual = tl.load(p_residual, mask=mask, other=0.0, eviction_policy=EVICT).to(tl.float32)
        b_x = (b_x * x_scale + b_residual).to(p_residual.dtype.element_ty).to(tl.float32)
    return b_x


@triton.jit
def _squares(b_x, b_mean, mask, MEAN: tl.constexpr):
    """Squares of the differences with the mean: E[x^2] - E[x]^2 would cancel where the mean is large."""
    if MEAN:
        b_x = tl.where(mask, b_x - b_mean, 0.0)
    return b_x * b_x


@triton.jit
def _long_row_squares(p_x, p_residual, m_row, cols, N, x_scale, ADD: tl.constexpr, MEAN: tl.constexpr):
    """For rows longer than a block: the mean (0 without MEAN), and by column the squares of the differences from it."""
    BLOCK: tl.constexpr = cols.shape[1]
    b_mean = tl.zeros(m_row.shape, tl.float32)
    if MEAN:
        b_sum = tl.zeros([m_row.shape[0], BLOCK], tl.float32)
        for start in range(0, N, BLOCK):
            at = start + cols
            b_sum += _load_rows(p_x + at, p_residual + at, m_row & (at < N), x_scale, ADD, "evict_last")
        b_mean = tl.sum(b_sum, axis=1)[:, None] / N
    b_squares = tl.zeros([m_row.shape[0], BLOCK], tl.float32)
    for start in range(0, N, BLOCK):
        at = start + cols
        mask = m_row & (at < N)
        b_x = _load_rows(p_x + at, p_residual + at, mask, x_scale, ADD, "evict_last")
        b_squares += _squares(b_x, b_mean, mask, MEAN)
    return b_mean, b_squares


@triton.jit
def _affine(b_y, b_weight, b_bias, weight_offset, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr):
    if HAS_WEIGHT:
        b_y *= b_weight.to(tl.float32) + weight_offset
    if HAS_BIAS:
        b_y += b_bias.to(tl.float32)
    return b_y


@triton.jit(do_not_specialize=["rows"])
def _norm_kernel(
    x_ptr,  # [rows // H, H, N]
    residual_ptr,  # [rows // H, H, N], read and written if ADD
    weight_ptr,  # [N], or [H, N] if PER_HEAD; read if HAS_WEIGHT
    bias_ptr,  # as the weight; read if HAS_BIAS
    out_ptr,  # [rows // H, H, N], may be x
    scale_ptr,  # [rows] float32 if out is float8 or int8, else None
    rows,
    H,
    N,
    eps,
    weight_offset,
    x_scale,
    stride_x,
    stride_xh,
    stride_residual,
    stride_residual_h,
    stride_out,
    stride_outh,
    ADD: tl.constexpr,
    MEAN: tl.constexpr,  # LayerNorm
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PER_HEAD: tl.constexpr,
    ONE_BLOCK: tl.constexpr,  # N <= BLOCK; always so then
    EARLY: tl.constexpr,  # one block whose weights have registers to wait in
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m_row = (row < rows)[:, None]
    outer = (row // H).to(tl.int64)[:, None]
    inner = (row % H).to(tl.int64)[:, None]
    p_x = x_ptr + outer * stride_x + inner * stride_xh
    p_residual = residual_ptr + outer * stride_residual + inner * stride_residual_h
    p_out = out_ptr + outer * stride_out + inner * stride_outh
    # Loaded for each row: in the shape of the rows, nothing has to move between threads.
    p_weight = weight_ptr + inner * (N if PER_HEAD else 0)
    p_bias = bias_ptr + inner * (N if PER_HEAD else 0)
    cols = tl.arange(0, BLOCK)[None, :]
    b_mean = tl.zeros([ROWS, 1], tl.float32)
    wait_for_previous(PDL)
    if ONE_BLOCK:
        mask = m_row & (cols < N)
        if EARLY:  # one wait for memory instead of two, which is all that few rows cost
            b_weight = tl.load(p_weight + cols, mask=mask, other=0.0) if HAS_WEIGHT else b_mean
            b_bias = tl.load(p_bias + cols, mask=mask, other=0.0) if HAS_BIAS else b_mean
        b_x = _load_rows(p_x + cols, p_residual + cols, mask, x_scale, ADD, "")
        let_next_start(PDL)
        if MEAN:
            b_mean = tl.sum(b_x, axis=1)[:, None] / N
        b_squares = _squares(b_x, b_mean, mask, MEAN)
    else:
        b_mean, b_squares = _long_row_squares(p_x, p_residual, m_row, cols, N, x_scale, ADD, MEAN)
    b_rstd = tl.rsqrt(tl.sum(b_squares, axis=1)[:, None] / N + eps)
    for start in range(0, BLOCK if ONE_BLOCK else N, BLOCK):
        at = start + cols
        mask = m_row & (at < N)
        if not ONE_BLOCK:
            b_x = _load_rows(p_x + at, p_residual + at, mask, x_scale, ADD, "evict_first")
        if ADD:
            tl.store(p_residual + at, b_x.to(residual_ptr.dtype.element_ty), mask=mask)
        if not EARLY:
            b_weight = tl.load(p_weight + at, mask=mask, other=0.0) if HAS_WEIGHT else b_mean
            b_bias = tl.load(p_bias + at, mask=mask, other=0.0) if HAS_BIAS else b_mean
        b_y = _affine((b_x - b_mean) * b_rstd, b_weight, b_bias, weight_offset, HAS_WEIGHT, HAS_BIAS)
        if scale_ptr is not None:  # of the row as it would be stored
            b_y = tl.where(mask, b_y.to(x_ptr.dtype.element_ty).to(tl.float32), 0.0)
            b_scale, b_inverse = row_scale(tl.max(tl.abs(b_y), axis=1), out_ptr.dtype.element_ty)
            b_y *= b_inverse[:, None]
            tl.store(scale_ptr + row, b_scale, mask=row < rows)
            tl.store(p_out + at, round_to(b_y, out_ptr.dtype.element_ty), mask=mask)
        else:
            tl.store(p_out + at, b_y.to(out_ptr.dtype.element_ty), mask=mask)


def default_config(n: int, rows: int) -> tuning.Config:
    """16 elements a thread, and 8 when there are too few rows to fill the chip, where latency is all.

    Many long rows go in blocks, and again from the cache: 257 us for 16384 of 8192 on an H200, in one block 265.
    """
    few = rows <= 256
    block = min(triton.next_power_of_2(n), 4096 if rows > 1024 and n >= 8192 else MAX_BLOCK)
    per_program = max(1, (1024 if few else 2048) // block)
    warps = per_program * block // (256 if few or block < n else 512)
    return {"BLOCK": block, "ROWS": per_program, "num_warps": max(1, min(16, warps))}


def _strides(t: torch.Tensor) -> tuple[int, int, int]:
    """``(H, stride of the first dimension, stride of the second)`` of one to three dimensions as ``[rows, H, N]``."""
    if t.dim() == 3:
        return t.shape[1], t.stride(0), t.stride(1)
    return 1, t.stride(0), 0


def _reference(given: Rows, norm: NormOptions) -> None:
    x, residual, out, scale, x_scale = given
    dtype = x.dtype
    if residual is not None:
        x = residual.copy_(torch.add(residual.float(), x.float(), alpha=x_scale))
    y = x.float()
    if norm.mean:
        y = y - y.mean(-1, keepdim=True)
    y = y * y.square().mean(-1, keepdim=True).add_(norm.eps).rsqrt_()
    if norm.weight is not None:
        y *= norm.weight.float() + norm.weight_offset
    if norm.bias is not None:
        y += norm.bias
    if scale is None:
        out.copy_(y)
    else:
        quantize_reference(y.to(dtype), out, scale)


@register_op(mutates=("residual", "out", "scale"), reference=_reference, cpu=cpu.normalize)
def _norm(given: Rows, norm: NormOptions) -> None:
    x, residual, out, scale, x_scale = given
    if x.numel() == 0:
        return
    n = x.shape[-1]
    rows = x.numel() // n
    heads, *x_strides = _strides(x)
    _, *residual_strides = _strides(x if residual is None else residual)
    _, *out_strides = _strides(out)
    op = ("" if residual is None else "fused_add_") + ("layer_norm" if norm.mean else "rms_norm")
    config = tuning.get_config(op, x.device, default_config, n=n, rows=INVARIANT_ROWS if norm.batch_invariant else rows)
    if scale is not None:
        config = config | {"BLOCK": triton.next_power_of_2(n)}
    programs = triton.cdiv(rows, config["ROWS"])
    _norm_kernel[(programs,)](
        x,
        x if residual is None else residual,
        x if norm.weight is None else norm.weight,
        x if norm.bias is None else norm.bias,
        out,
        scale,
        rows,
        heads,
        n,
        norm.eps,
        norm.weight_offset,
        x_scale,
        *x_strides,
        *residual_strides,
        *out_strides,
        ADD=residual is not None,
        MEAN=norm.mean,
        HAS_WEIGHT=norm.weight is not None,
        HAS_BIAS=norm.bias is not None,
        PER_HEAD=2 in (t.dim() for t in (norm.weight, norm.bias) if t is not None),
        ONE_BLOCK=n <= config["BLOCK"],
        EARLY=n <= config["BLOCK"] and config["ROWS"] * config["BLOCK"] <= 16 * 32 * config["num_warps"],
        **config,
        **dependent_launch(x.device, programs),
    )


def _as_rows(name: str, t: torch.Tensor) -> torch.Tensor:
    """A view of at most three dimensions, for a tensor that is written."""
    if t.dim() <= 3:
        return t
    require(t.is_contiguous(), f"{name} must be contiguous if it has more than three dimensions")
    return t.view(-1, *t.shape[-2:])


def check_input(x: torch.Tensor, out: torch.Tensor | None = None) -> None:
    check_tensor("x", x, [None] * max(x.dim(), 1))
    if out is not None:
        check_tensor("out", out, x.shape, like=x)


def check_affine(name: str, t: torch.Tensor, x: torch.Tensor) -> None:
    """Check a weight or a bias: ``[N]``, or contiguous ``[H, N]`` where ``x`` is ``[..., H, N]``."""
    per_head = isinstance(t, torch.Tensor) and t.dim() == 2 and x.dim() > 2
    check_tensor(name, t, x.shape[-2:] if per_head else x.shape[-1:], like=x)
    require(not per_head or t.is_contiguous(), f"{name} must be contiguous if it has a row for each head")


def normalize(x: torch.Tensor, norm: NormOptions, out: torch.Tensor | None = None) -> torch.Tensor:
    """The norm of ``x`` in ``out`` or a new tensor. Checks nothing: a layer's tensors fit in every step."""
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows = x if x.dim() <= 3 else x.reshape(-1, *x.shape[-2:])
    _norm(rows, None, _as_rows("out", out), None, 1.0, *norm)
    return out


def quantize_normalized(x: torch.Tensor, norm: NormOptions, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """``(q[M, N], scale[M])`` of the norm of ``x[M, N]``, N at most ``MAX_BLOCK``; ``q`` float8 or int8. Checks
    nothing, as :func:`normalize`."""
    q, scale = empty_rows(x, x.shape[1], dtype)
    _norm(x, None, q, scale, 1.0, *norm)
    return q, scale


def add_and_normalize(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm: NormOptions,
    x_scale: float,
    quantized: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``residual += x * x_scale`` and its norm in ``x``, or quantized. Checks nothing, as :func:`normalize`."""
    rows = _as_rows("x", x)
    out, scale = (rows, None) if quantized is None else (_as_rows("q", quantized[0]), quantized[1].view(-1))
    _norm(rows, _as_rows("residual", residual), out, scale, x_scale, *norm)
    return x, residual


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * (weight + weight_offset)`` over the last dimension, in float32 until it is stored.

    ``transformers`` rounds the normalised row of most families to the dtype of ``x`` before it multiplies by
    ``weight``; here there is one rounding, of the product. In float32 both are the same.

    Args:
        x: ``[..., N]`` float16, bfloat16 or float32; contiguous in the last dimension. With up to three dimensions
            the others may have any strides, so the heads of a fused projection, ``qkv[:, :H * D].view(T, H, D)``,
            are normalised where they are.
        weight: ``[N]`` float16, bfloat16 or float32. Where ``x`` is ``[..., H, N]`` also ``[H, N]``, contiguous: a row
            for each head.
        eps: added to the mean square.
        weight_offset: added to ``weight``, in float32 (Gemma keeps its weights less 1).
        out: ``[..., N]`` to write into, which may be ``x`` itself but not overlap it otherwise; by default a new
            tensor with the dtype of ``x``.

    Returns:
        ``out``.

    Raises:
        ValueError: a wrong shape, dtype or device, or rows that are not contiguous.
    """
    check_input(x, out)
    check_affine("weight", weight, x)
    return normalize(x, NormOptions(weight, None, eps, weight_offset), out)


rms_norm_ref = with_reference(rms_norm)


def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    x_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``residual += x * x_scale``, then ``x = rms_norm(residual, weight, eps)``, in place and in one pass.

    The norm is of the sum as it is stored, rounded once, to the dtype of ``residual``: the result equals the two steps
    apart, which is what a reader of the residual stream expects.

    Args:
        x: ``[..., N]`` float16, bfloat16 or float32, overwritten with the normed sum; strides as in :func:`rms_norm`.
        residual: ``[..., N]``, overwritten with the sum; its dtype may differ from that of ``x``. Must not overlap
            ``x``.
        weight: ``[N]`` or ``[H, N]`` as in :func:`rms_norm`.
        eps: added to the mean square.
        weight_offset: added to ``weight``, in float32.
        x_scale: ``x`` is multiplied by it, in float32 (the residual multiplier of Granite and MiniCPM).

    Returns:
        ``(x, residual)``, the tensors given.

    Raises:
        ValueError: a wrong shape, dtype or device, rows that are not contiguous, or a tensor of more than three
            dimensions that is not contiguous.
    """
    check_input(x)
    check_tensor("residual", residual, x.shape, like=x)
    check_affine("weight", weight, x)
    return add_and_normalize(x, residual, NormOptions(weight, None, eps, weight_offset), x_scale)


fused_add_rms_norm_ref = with_reference(fused_add_rms_norm)

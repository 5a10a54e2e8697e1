"""RMSNorm, alone or fused with the residual addition before it.

A row is read once, kept in registers while its mean square is summed, and written once, so the floor is memory:
2N elements a row for :func:`rms_norm`, 4N for :func:`fused_add_rms_norm` (28 us for 4096 rows of 4096 in bfloat16 at
4.8 TB/s). Short rows (the per-head norm of Qwen3 has N = 128) share a program; a row beyond one block is read twice.
RMSNorm: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
"""

import torch
import triton
import triton.language as tl

from tritonllm.kernels import tuning
from tritonllm.kernels.checks import check_tensor, require
from tritonllm.kernels.registry import register_op

MAX_BLOCK = 16384


@triton.jit
def _load_rows(p_x, p_residual, mask, ADD: tl.constexpr):
    """One block of rows in float32; with ADD the residual sum, rounded as it will be stored."""
    b_x = tl.load(p_x, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        b_residual = tl.load(p_residual, mask=mask, other=0.0).to(tl.float32)
        b_x = (b_x + b_residual).to(p_residual.dtype.element_ty).to(tl.float32)
    return b_x


@triton.jit
def _store_rows(b_x, b_rstd, p_weight, p_out, p_residual, m_cols, mask, ADD: tl.constexpr):
    b_weight = tl.load(p_weight, mask=m_cols, other=0.0).to(tl.float32)
    tl.store(p_out, (b_x * b_rstd * b_weight).to(p_out.dtype.element_ty), mask=mask)
    if ADD:
        tl.store(p_residual, b_x.to(p_residual.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_kernel(
    x_ptr,  # [rows // H, H, N]
    residual_ptr,  # [rows // H, H, N], read and written if ADD
    weight_ptr,  # [N]
    out_ptr,  # [rows // H, H, N], may be x
    rows,
    H,
    N,
    eps,
    stride_x,
    stride_xh,
    stride_residual,
    stride_residual_h,
    stride_out,
    stride_outh,
    ADD: tl.constexpr,
    ONE_BLOCK: tl.constexpr,  # N <= BLOCK
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m_row = (row < rows)[:, None]
    outer = (row // H).to(tl.int64)[:, None]
    inner = (row % H).to(tl.int64)[:, None]
    p_x = x_ptr + outer * stride_x + inner * stride_xh
    p_residual = residual_ptr + outer * stride_residual + inner * stride_residual_h
    p_out = out_ptr + outer * stride_out + inner * stride_outh
    cols = tl.arange(0, BLOCK)[None, :]
    if ONE_BLOCK:
        m_cols = cols < N
        mask = m_row & m_cols
        b_x = _load_rows(p_x + cols, p_residual + cols, mask, ADD)
        b_rstd = tl.rsqrt(tl.sum(b_x * b_x, axis=1)[:, None] / N + eps)
        _store_rows(b_x, b_rstd, weight_ptr + cols, p_out + cols, p_residual + cols, m_cols, mask, ADD)
    else:
        b_squares = tl.zeros([ROWS, BLOCK], tl.float32)
        for start in range(0, N, BLOCK):
            mask = m_row & (cols < N - start)
            b_x = _load_rows(p_x + start + cols, p_residual + start + cols, mask, ADD)
            b_squares += b_x * b_x
        b_rstd = tl.rsqrt(tl.sum(b_squares, axis=1)[:, None] / N + eps)
        for start in range(0, N, BLOCK):
            at = start + cols
            m_cols = at < N
            mask = m_row & m_cols
            b_x = _load_rows(p_x + at, p_residual + at, mask, ADD)
            _store_rows(b_x, b_rstd, weight_ptr + at, p_out + at, p_residual + at, m_cols, mask, ADD)


def default_config(n: int, rows: int) -> tuning.Config:
    """16 to 32 elements a thread; 8 when there are too few rows to fill the chip, where latency is all."""
    block = min(triton.next_power_of_2(n), MAX_BLOCK)
    per_program = max(1, 1024 // block)
    tile = per_program * block
    warps = tile // 256 if rows <= 128 else max(min(tile // 512, 8), tile // 1024)
    return {"BLOCK": block, "ROWS": per_program, "num_warps": max(1, min(16, warps))}


def _strides(t: torch.Tensor) -> tuple[int, int, int]:
    """``(H, stride of the first dimension, stride of the second)`` of one to three dimensions as ``[rows, H, N]``."""
    if t.dim() == 3:
        return t.shape[1], t.stride(0), t.stride(1)
    return 1, t.stride(0), 0


def _launch(
    op: str, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, out: torch.Tensor, eps: float
) -> None:
    if x.numel() == 0:
        return
    n = weight.shape[0]
    rows = x.numel() // n
    heads, *x_strides = _strides(x)
    _, *residual_strides = _strides(x if residual is None else residual)
    _, *out_strides = _strides(out)
    config = tuning.get_config(op, x.device, default_config, n=n, rows=rows)
    _rms_norm_kernel[(triton.cdiv(rows, config["ROWS"]),)](
        x,
        x if residual is None else residual,
        weight,
        out,
        rows,
        heads,
        n,
        eps,
        *x_strides,
        *residual_strides,
        *out_strides,
        ADD=residual is not None,
        ONE_BLOCK=n <= config["BLOCK"],
        **config,
    )


def _norm_reference(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float) -> None:
    x = x.float()
    rstd = x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    torch.mul(x * rstd, weight, out=out)


@register_op(mutates=("out",), reference=_norm_reference)
def _rms_norm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float) -> None:
    _launch("rms_norm", x, None, weight, out, eps)


def _add_norm_reference(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    if x.dtype == residual.dtype:
        residual.add_(x)
    else:
        residual.copy_(residual.float() + x.float())
    _norm_reference(residual, weight, x, eps)


@register_op(mutates=("x", "residual"), reference=_add_norm_reference)
def _fused_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    _launch("fused_add_rms_norm", x, residual, weight, x, eps)


def _as_rows(name: str, t: torch.Tensor) -> torch.Tensor:
    """A view of at most three dimensions, for a tensor that is written."""
    if t.dim() <= 3:
        return t
    require(t.is_contiguous(), f"{name} must be contiguous if it has more than three dimensions")
    return t.view(-1, *t.shape[-2:])


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    check_tensor("x", x, [None] * max(x.dim(), 1))
    check_tensor("weight", weight, x.shape[-1:], like=x)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, in float32 until the result is stored.

    ``transformers`` rounds the normalised row to the dtype of ``x`` before it multiplies by ``weight``; here there is
    one rounding, of the product. In float32 both are the same.

    Args:
        x: ``[..., N]`` float16, bfloat16 or float32; contiguous in the last dimension. With up to three dimensions
            the others may have any strides, so the heads of a fused projection, ``qkv[:, :H * D].view(T, H, D)``,
            are normalised where they are.
        weight: ``[N]`` float16, bfloat16 or float32.
        eps: added to the mean square.
        out: ``[..., N]`` to write into, which may be ``x`` itself but not overlap it otherwise; by default a new
            tensor with the dtype of ``x``.

    Returns:
        ``out``.

    Raises:
        ValueError: a wrong shape, dtype or device, or rows that are not contiguous.
    """
    _check(x, weight)
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    else:
        check_tensor("out", out, x.shape, like=x)
    rows = x if x.dim() <= 3 else x.reshape(-1, *x.shape[-2:])
    _rms_norm(rows, weight, _as_rows("out", out), eps)
    return out


def rms_norm_ref(
    x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """:func:`rms_norm` in plain torch."""
    if out is None:
        out = torch.empty_like(x)
    _norm_reference(x, weight, out, eps)
    return out


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """``residual += x``, then ``x = rms_norm(residual, weight, eps)``, in place and in one pass.

    The norm is of the sum as it is stored, rounded to the dtype of ``residual``: the result equals the two steps
    apart, which is what ``transformers`` computes and what a reader of the residual stream expects.

    Args:
        x: ``[..., N]`` float16, bfloat16 or float32, overwritten with the normed sum; strides as in :func:`rms_norm`.
        residual: ``[..., N]``, overwritten with the sum; its dtype may differ from that of ``x``. Must not overlap
            ``x``.
        weight: ``[N]`` float16, bfloat16 or float32.
        eps: added to the mean square.

    Returns:
        ``(x, residual)``, the tensors given.

    Raises:
        ValueError: a wrong shape, dtype or device, rows that are not contiguous, or a tensor of more than three
            dimensions that is not contiguous.
    """
    _check(x, weight)
    check_tensor("residual", residual, x.shape, like=x)
    _fused_add_rms_norm(_as_rows("x", x), _as_rows("residual", residual), weight, eps)
    return x, residual


def fused_add_rms_norm_ref(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`fused_add_rms_norm` in plain torch."""
    _add_norm_reference(x, residual, weight, eps)
    return x, residual

"""Attention over the union of disjoint sets of keys, from the attention over each.

The softmax over all keys follows from the softmax over each set and the logarithm of its denominator (lse): outputs
are averaged with weights ``exp(lse)``. Every state is read once and the result written once; that is the floor.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tritonllm.kernels.attention.common import LOG2E, LOWEST
from tritonllm.kernels.runtime.checks import check_tensor
from tritonllm.kernels.runtime.registry import register_op, with_reference


# Strides of the lse change with the batch: one compilation serves them all.
@triton.jit(do_not_specialize=["use_a_ptr", "rows", "stride_lse_a_part", "stride_lse_a_token", "stride_lse_b_token"])
def _merge_states_kernel(
    a_ptr,  # [N, T, H, D]
    lse_a_ptr,  # [N, T, H] float32
    b_ptr,  # [T, H, D]
    lse_b_ptr,  # [T, H] float32
    use_a_ptr,  # [T] bool, or None
    out_ptr,  # [T, H, D]
    lse_ptr,  # [T, H] float32, or None
    rows,  # T H
    stride_a_part,
    stride_a_token,
    stride_a_head,
    stride_lse_a_part,
    stride_lse_a_token,
    stride_b_token,
    stride_b_head,
    stride_lse_b_token,
    stride_out_token,
    stride_out_head,
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """One program: BLOCK_R (token, head) pairs. The parts are unrolled, so that all their loads fly at once."""
    b_row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    m_row = b_row < rows
    b_token, b_head = b_row // HEADS, b_row % HEADS
    b_dim = tl.arange(0, BLOCK_D)
    m_dim = b_dim < HEAD_SIZE
    m_a = m_row
    if use_a_ptr is not None:
        m_a = m_a & (tl.load(use_a_ptr + b_token, mask=m_row, other=0) != 0)

    b_lse_b = tl.load(lse_b_ptr + b_token * stride_lse_b_token + b_head, mask=m_row, other=float("-inf"))
    p_lse_a = lse_a_ptr + b_token * stride_lse_a_token + b_head
    b_m = tl.maximum(b_lse_b, LOWEST)
    for _ in tl.static_range(PARTS):
        b_m = tl.maximum(b_m, tl.load(p_lse_a, mask=m_a, other=float("-inf")))
        p_lse_a += stride_lse_a_part

    # A state of weight 0 is not read: what it holds may be anything.
    b_sum = tl.exp2((b_lse_b - b_m) * LOG2E)
    p_b = b_ptr + (b_token * stride_b_token + b_head * stride_b_head)[:, None] + b_dim[None, :]
    b_acc = tl.load(p_b, mask=(b_sum > 0)[:, None] & m_dim[None, :], other=0.0).to(tl.float32) * b_sum[:, None]
    p_a = a_ptr + (b_token * stride_a_token + b_head * stride_a_head)[:, None] + b_dim[None, :]
    p_lse_a = lse_a_ptr + b_token * stride_lse_a_token + b_head
    for _ in tl.static_range(PARTS):
        b_weight = tl.exp2((tl.load(p_lse_a, mask=m_a, other=float("-inf")) - b_m) * LOG2E)
        b_a = tl.load(p_a, mask=(b_weight > 0)[:, None] & m_dim[None, :], other=0.0)
        b_acc += b_a.to(tl.float32) * b_weight[:, None]
        b_sum += b_weight
        p_a += stride_a_part
        p_lse_a += stride_lse_a_part

    b_divisor = tl.where(b_sum == 0.0, 1.0, b_sum)
    p_out = out_ptr + (b_token * stride_out_token + b_head * stride_out_head)[:, None] + b_dim[None, :]
    b_out = (b_acc / b_divisor[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(p_out, b_out, mask=m_row[:, None] & m_dim[None, :])
    if lse_ptr is not None:
        b_lse = tl.where(b_sum == 0.0, float("-inf"), b_m + tl.log(b_divisor))
        tl.store(lse_ptr + b_row, b_lse, mask=m_row)


class _States(NamedTuple):
    """What is merged, and what is written."""

    out_a: torch.Tensor
    lse_a: torch.Tensor
    out_b: torch.Tensor
    lse_b: torch.Tensor
    use_a: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor | None


def _reference(given: _States) -> None:
    out_a, lse_a, out_b, lse_b, use_a, out, lse = given
    if use_a is not None:
        lse_a = lse_a.masked_fill(~use_a[:, None], -math.inf)
    lses = torch.cat((lse_a, lse_b[None]))
    total = lses.logsumexp(0)
    weights = (lses - total.masked_fill(total == -math.inf, 0.0)).exp()[..., None]
    states = torch.cat((out_a, out_b[None])).float().masked_fill(weights == 0, 0.0)
    out.copy_((states * weights).sum(0))
    if lse is not None:
        lse.copy_(total)


@register_op(mutates=("out", "lse"), reference=_reference)
def _merge_attention_states(given: _States) -> None:
    out_a, lse_a, out_b, lse_b, use_a, out, lse = given
    parts, tokens, heads, head_size = out_a.shape
    rows = tokens * heads
    if rows == 0:
        return
    block_d = triton.next_power_of_2(head_size)
    block_r = max(1, 1024 // block_d)  # with 4 warps one load of 16 bytes a thread and state
    _merge_states_kernel[(triton.cdiv(rows, block_r),)](
        *(out_a, lse_a, out_b, lse_b, use_a, out, lse, rows),
        *(*out_a.stride()[:3], *lse_a.stride()[:2], *out_b.stride()[:2], lse_b.stride(0), *out.stride()[:2]),
        PARTS=parts,
        HEADS=heads,
        HEAD_SIZE=head_size,
        BLOCK_D=block_d,
        BLOCK_R=block_r,
        num_warps=4,
    )


def _check_states(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    use_a: torch.Tensor | None,
    out: torch.Tensor | None,
    return_lse: bool,
) -> _States:
    """Check the arguments of a merge, and allocate the outputs."""
    check_tensor("out_b", out_b, ("T", "H", "D"))
    tokens, heads, head_size = out_b.shape
    if isinstance(out_a, torch.Tensor) and isinstance(lse_a, torch.Tensor) and out_a.dim() == 3:
        out_a, lse_a = out_a[None], lse_a[None]
    check_tensor("out_a", out_a, ("N", tokens, heads, head_size), dtype=out_b.dtype, like=out_b)
    check_tensor("lse_a", lse_a, (out_a.shape[0], tokens, heads), dtype=torch.float32, like=out_b)
    check_tensor("lse_b", lse_b, (tokens, heads), dtype=torch.float32, like=out_b)
    if use_a is not None:
        check_tensor("use_a", use_a, (tokens,), dtype=torch.bool, like=out_b)
    if out is None:
        out = torch.empty_like(out_b)
    check_tensor("out", out, out_b.shape, dtype=out_b.dtype, like=out_b)
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=out_b.device) if return_lse else None
    return _States(out_a, lse_a, out_b, lse_b, use_a, out, lse)


def merge_attention_states(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    use_a: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of disjoint sets of keys, from the attention over each.

    Args:
        out_a: ``[T, H, D]``, or ``[N, T, H, D]`` for N sets. Where lse is -inf, the set is empty and this is not read.
        lse_a: ``[T, H]`` or ``[N, T, H]`` float32, the natural logarithms of the softmax's denominators. A sink must be
            in one of all the sets only.
        out_b: ``[T, H, D]`` of the dtype of ``out_a``, one more set.
        lse_b: ``[T, H]`` float32.
        use_a: ``[T]`` bool, for which tokens ``out_a`` counts; by default for all.
        out: ``[T, H, D]`` to write into; by default a new tensor.
        return_lse: also return the logarithm of the merged denominator.

    Returns:
        ``out``, or ``(out, lse)`` with lse ``[T, H]`` float32; 0 and -inf where all sets are empty.

    Raises:
        ValueError: a shape, dtype or device that does not fit.
    """
    args = _check_states(out_a, lse_a, out_b, lse_b, use_a, out, return_lse)
    _merge_attention_states(*args)
    return args.out if args.lse is None else (args.out, args.lse)


merge_attention_states_ref = with_reference(merge_attention_states)

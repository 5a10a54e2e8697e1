"""What is left of a sum over ranks where copies bring the parts: add them up, add that to the stream, normalise it.

The copies run beside products (:mod:`tritonllm.dist.relay`), so nothing is waited for here: all parts have come.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from tritonllm.kernels.collective.all_reduce import AddedNorm, _finish, all_reduce_ref
from tritonllm.kernels.collective.inbox import warps_of
from tritonllm.kernels.elementwise import check_affine
from tritonllm.kernels.runtime.checks import check_tensor
from tritonllm.kernels.runtime.registry import runs_in_torch


@triton.jit(do_not_specialize=["rank", "stride_sender"])
def _add_parts_kernel(
    own_ptr,  # [rows, N], this rank's part
    parts_ptr,  # [SIZE - 1, rows, N], the others' in their order
    residual_ptr,  # [rows, N], read and written
    weight_ptr,  # [N]
    out_ptr,  # [rows, N]
    rank,
    N,
    eps,
    weight_offset,
    x_scale,
    stride_own,
    stride_sender,
    stride_part,
    stride_residual,
    stride_out,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    p_residual = residual_ptr + row * stride_residual + cols
    b_residual = tl.load(p_residual, mask=mask, other=0.0)
    b_weight = tl.load(weight_ptr + cols, mask=mask, other=0.0)
    b_sum = tl.zeros(mask.shape, tl.float32)
    for sender in tl.static_range(SIZE):
        place = (sender - (rank < sender).to(tl.int64)) * stride_sender
        b_own = tl.load(own_ptr + row * stride_own + cols, mask=mask & (rank == sender), other=0.0)
        b_part = tl.load(parts_ptr + place + row * stride_part + cols, mask=mask & (rank != sender), other=0.0)
        b_sum += tl.where(rank == sender, b_own, b_part).to(tl.float32)
    pointers = p_residual, weight_ptr + cols, out_ptr + row * stride_out + cols
    b_sum = b_sum.to(own_ptr.dtype.element_ty)
    _finish(b_sum, b_residual, b_weight, *pointers, mask, N, eps, weight_offset, x_scale, ADDS=True, EARLY=True)


def add_parts(own: torch.Tensor, parts: torch.Tensor, rank: int, added: AddedNorm, out: torch.Tensor) -> torch.Tensor:
    """The RMS norm of a residual stream to which the sum of all ranks' rows is added.

    Parts are added in the order of their ranks, in float32, and the sum is rounded to their dtype once, as
    :func:`~tritonllm.kernels.collective.all_reduce` does.

    Args:
        own: ``[rows, columns]``, this rank's part; contiguous in the last dimension, as all here.
        parts: ``[ranks - 1, rows, columns]``, those of the other ranks in their order.
        rank: of ``own``.
        added: the stream, ``[rows, columns]``, to which the sum is added in place, and its norm.
        out: ``[rows, columns]`` for the norm.

    Returns:
        ``out``.

    Raises:
        ValueError: a wrong shape, dtype or device, rows that are not contiguous, or no such rank.
    """
    check_tensor("own", own, [None, None])
    check_tensor("parts", parts, [None, *own.shape], like=own)
    check_tensor("residual", added.residual, own.shape, like=own)
    check_tensor("out", out, own.shape, like=own)
    check_affine("weight", added.weight, own)
    if not 0 <= rank <= len(parts):
        raise ValueError(f"rank must be from 0 to {len(parts)}, the number of parts, got {rank}")
    launch_add_parts(own, parts, rank, added, out)
    return out


def launch_add_parts(own: torch.Tensor, parts: torch.Tensor, rank: int, added: AddedNorm, out: torch.Tensor) -> None:
    """:func:`add_parts` without its checks."""
    rows, columns = own.shape
    if not rows:
        return
    if runs_in_torch(own):
        out.copy_(add_parts_ref(own, list(parts), rank, added))
        return
    block = triton.next_power_of_2(columns)
    _add_parts_kernel[(rows,)](
        own,
        parts,
        added.residual,
        added.weight,
        out,
        rank,
        columns,
        added.eps,
        added.weight_offset,
        added.x_scale,
        own.stride(0),
        parts.stride(0),
        parts.stride(1),
        added.residual.stride(0),
        out.stride(0),
        SIZE=len(parts) + 1,
        BLOCK=block,
        num_warps=warps_of(block),
    )


def add_parts_ref(own: torch.Tensor, parts: Sequence[torch.Tensor], rank: int, added: AddedNorm) -> torch.Tensor:
    """:func:`add_parts` in plain torch; a new tensor."""
    return all_reduce_ref([*parts[:rank], own, *parts[rank:]], added=added)

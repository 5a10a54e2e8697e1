"""Tokens from one step to the next on the device: a step may be launched before the host knows what the last one drew.

A launch of a few bytes: its cost is the launch (about 1.5 us on an H200 in a captured graph), where torch's own gather,
comparison and choice are three.
"""

import torch
import triton
import triton.language as tl

from tritonllm.kernels.runtime.checks import check_tensor
from tritonllm.kernels.runtime.registry import register_op, with_reference

BLOCK = 256


@triton.jit(do_not_specialize=["N"])
def _fill_pending_kernel(ids_ptr, drawn_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_row = row < N
    b_id = tl.load(ids_ptr + row, mask=m_row, other=0)
    m_pending = m_row & (b_id < 0)
    b_drawn = tl.load(drawn_ptr + (-1 - b_id), mask=m_pending, other=0)
    tl.store(ids_ptr + row, b_drawn.to(tl.int32), mask=m_pending)


def _reference(ids: torch.Tensor, drawn: torch.Tensor) -> None:
    pending = ids < 0
    ids[pending] = drawn[-1 - ids[pending].long()].to(torch.int32)


@register_op(mutates=("ids",), reference=_reference)
def _fill_pending_tokens(ids: torch.Tensor, drawn: torch.Tensor) -> None:
    n = ids.shape[0]
    if n > 0:
        _fill_pending_kernel[(triton.cdiv(n, BLOCK),)](ids, drawn, n, BLOCK=BLOCK, num_warps=4)


def _check(ids: torch.Tensor, drawn: torch.Tensor) -> None:
    check_tensor("ids", ids, ("N",), dtype=torch.int32)
    check_tensor("drawn", drawn, ("R",), dtype=torch.int64, like=ids)


def fill_pending_tokens(ids: torch.Tensor, drawn: torch.Tensor) -> None:
    """Replace each negative entry ``-1 - i`` of ``ids`` by ``drawn[i]``, in place.

    Args:
        ids: ``[N]`` int32, at least ``-R``.
        drawn: ``[R]`` int64, what the step before drew.

    Raises:
        ValueError: wrong shape, dtype or device.
    """
    _check(ids, drawn)
    _fill_pending_tokens(ids, drawn)


fill_pending_tokens_ref = with_reference(fill_pending_tokens)

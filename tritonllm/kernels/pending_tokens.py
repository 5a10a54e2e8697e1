"""Tokens from one step to the next on the device: a step may be launched before the host knows what the last one drew.

A launch of a few bytes: its cost is the launch (about 1.5 us on an H200 in a captured graph), where torch's own gather,
comparison and choice are three.
"""

import torch
import triton
import triton.language as tl

from tritonllm.kernels.checks import check_tensor
from tritonllm.kernels.registry import register_op

BLOCK = 256


@triton.jit(do_not_specialize=["N"])
def _fill_pending_kernel(ids_ptr, seats_ptr, last_tokens_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_row = row < N
    b_id = tl.load(ids_ptr + row, mask=m_row, other=0)
    m_pending = m_row & (b_id < 0)
    b_seat = tl.load(seats_ptr + row, mask=m_pending, other=0)
    b_last = tl.load(last_tokens_ptr + b_seat, mask=m_pending, other=0)
    tl.store(ids_ptr + row, b_last.to(tl.int32), mask=m_pending)


def _reference(ids: torch.Tensor, seats: torch.Tensor, last_tokens: torch.Tensor) -> None:
    pending = ids < 0
    ids[pending] = last_tokens[seats[pending]].to(torch.int32)


@register_op(mutates=("ids",), reference=_reference)
def _fill_pending_tokens(ids: torch.Tensor, seats: torch.Tensor, last_tokens: torch.Tensor) -> None:
    n = ids.shape[0]
    if n > 0:
        _fill_pending_kernel[(triton.cdiv(n, BLOCK),)](ids, seats, last_tokens, n, BLOCK=BLOCK, num_warps=4)


def _check(ids: torch.Tensor, seats: torch.Tensor, last_tokens: torch.Tensor) -> None:
    check_tensor("ids", ids, ("N",), dtype=torch.int32)
    check_tensor("seats", seats, ids.shape, dtype=torch.int64, like=ids)
    check_tensor("last_tokens", last_tokens, ("S",), dtype=torch.int64, like=ids)


def fill_pending_tokens(ids: torch.Tensor, seats: torch.Tensor, last_tokens: torch.Tensor) -> None:
    """Replace each negative entry of ``ids`` by what its seat was given last, in place.

    Args:
        ids: ``[N]`` int32.
        seats: ``[N]`` int64, each below S; read where ``ids`` is negative.
        last_tokens: ``[S]`` int64.

    Raises:
        ValueError: wrong shape, dtype or device.
    """
    _check(ids, seats, last_tokens)
    _fill_pending_tokens(ids, seats, last_tokens)


def fill_pending_tokens_ref(ids: torch.Tensor, seats: torch.Tensor, last_tokens: torch.Tensor) -> None:
    """The same in plain torch."""
    _check(ids, seats, last_tokens)
    _reference(ids, seats, last_tokens)

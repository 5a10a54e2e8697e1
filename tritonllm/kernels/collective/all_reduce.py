"""Sums over the ranks of one machine, alone or with what follows in a decoder: the residual addition and its RMSNorm.

``one_shot``: every rank sends its part to all ranks, and each adds them all up. One write to another GPU is all that
few rows wait for. ``two_shot``: a row's parts go to one of the ranks, which adds them up and sends the sum to all: with
n ranks a rank sends 2 (n - 1) / n of the rows instead of n - 1 times all of them, but waits twice. Two ranks send the
same in either way. How data arrives is the subject of :mod:`tritonllm.kernels.collective.inbox`.

A program sends a row ahead of the one that it adds up, so that the link and the memory work at the same time, and takes
its own part from where it is.

All ranks get the same bits: they add in the order of the ranks, in float32, and round once to the dtype of the parts.
The addition and the norm round as :func:`~tritonllm.kernels.fused_add_rms_norm` does.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tritonllm.kernels import fused_add_rms_norm_ref
from tritonllm.kernels.collective.inbox import EMPTY, PeerInbox
from tritonllm.kernels.elementwise import check_affine
from tritonllm.kernels.runtime.checks import check_tensor
from tritonllm.kernels.runtime.chip import on_amd
from tritonllm.kernels.runtime.dependent_launch import dependent_launch, let_next_start, wait_for_previous

# Tries between two looks at the word that ends waiting, about a millisecond: it is in the host's memory, which seems to
# serve one look after the other. When all warps of a launch looked (16 x 264 on an H100), after 128 tries, sums of 1
# MiB in two shots took 1.7 ms and of 32 MiB 13: whoever looked made another rank wait for so long that it looked, too.
LOOK = tl.constexpr(1024)


class Stages(NamedTuple):
    """What a launch does: all of it, but for tests whose ranks take turns in one process."""

    sends: bool = True
    sums: bool = True  # of a two-shot
    finishes: bool = True


class AddedNorm(NamedTuple):
    """What a sum is added to, and the norm of that.

    Attributes:
        residual: ``[rows, columns]``, gets the sum.
        weight: ``[columns]``, of the RMS norm.
        eps: added to the mean square.
        weight_offset: added to the weight.
        x_scale: multiplies the sum over the ranks.
    """

    residual: torch.Tensor
    weight: torch.Tensor
    eps: float = 1e-6
    weight_offset: float = 0.0
    x_scale: float = 1.0


ALL_STAGES = Stages()


@triton.jit
def _inbox_of(links_ptr, rank, BITS: tl.constexpr):
    """The inbox of a rank, as integers."""
    return tl.multiple_of(tl.load(links_ptr + rank).to(tl.pointer_type(BITS)), 16)


@triton.jit
def _send_to_others(links_ptr, rank, at, b_bits, cols, mask, SIZE: tl.constexpr):
    """To all ranks but ``rank`` (-1: to all). Their addresses come from the cache: in registers they made it spill."""
    BITS: tl.constexpr = b_bits.dtype
    for other in tl.static_range(SIZE):
        tl.store(_inbox_of(links_ptr, other, BITS) + at + cols, b_bits, mask=mask & (rank != other))


@triton.jit
def _as_sent(b_x, BITS: tl.constexpr, NOTHING: tl.constexpr):
    """Elements as their bits, of which none means that nothing has come: -0 is sent as 0."""
    b_bits = b_x.to(BITS, bitcast=True)
    return tl.where(b_bits == NOTHING, 0, b_bits).to(BITS)


@triton.jit
def _send(
    x_ptr, links_ptr, rank, row, at, cols, mask, SIZE: tl.constexpr, TWO_SHOT: tl.constexpr, NOTHING: tl.constexpr
):
    """Send this rank's part of a row, to its owner or to all others."""
    BITS: tl.constexpr = tl.int32 if x_ptr.dtype.element_ty.primitive_bitwidth == 32 else tl.int16
    b_bits = _as_sent(tl.load(x_ptr + cols, mask=mask, other=0.0), BITS, NOTHING)
    if TWO_SHOT:
        owner = row % SIZE
        tl.store(_inbox_of(links_ptr, owner, BITS) + at + cols, b_bits, mask=mask & (owner != rank))
    else:
        _send_to_others(links_ptr, rank, at, b_bits, cols, mask, SIZE)


@triton.jit
def _look(parts_ptr, b_own, own, cols, mask, SIZE: tl.constexpr, WIDTH: tl.constexpr, NOTHING: tl.constexpr):
    """The sum of a row's parts as they are now, and whether one is missing.

    The loads are volatile: they go past the caches that other GPUs do not write to.
    """
    b_sum = tl.zeros(mask.shape, tl.float32)
    b_missing = tl.zeros(mask.shape, tl.int32)
    for sender in tl.static_range(SIZE):
        b_bits = tl.load(parts_ptr + sender * WIDTH + cols, mask=mask & (own != sender), other=0, volatile=True)
        b_missing |= (b_bits == NOTHING).to(tl.int32)
        b_sum += tl.where(own == sender, b_own, b_bits.to(b_own.dtype, bitcast=True)).to(tl.float32)
    return b_sum, tl.max(b_missing, axis=0)


@triton.jit
def _receive(
    parts_ptr,
    b_own,
    own,  # the number of the part that is there already; -1: none of them
    cols,
    mask,
    stop_ptr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    NOTHING: tl.constexpr,
):
    """Wait for a row's parts, empty their places, and return their sum, rounded."""
    b_sum, missing = _look(parts_ptr, b_own, own, cols, mask, SIZE, WIDTH, NOTHING)
    tries = 0
    while missing != 0:
        b_sum, missing = _look(parts_ptr, b_own, own, cols, mask, SIZE, WIDTH, NOTHING)
        tries += 1
        if tries % LOOK == 0:  # one thread
            b_stop = tl.load(stop_ptr + tl.zeros_like(cols), mask=cols == 0, other=0, volatile=True)
            missing = tl.where(tl.max(b_stop, axis=0) != 0, 0, missing)
    b_nothing = tl.full(mask.shape, NOTHING, parts_ptr.dtype.element_ty)
    for sender in tl.static_range(SIZE):
        tl.store(parts_ptr + sender * WIDTH + cols, b_nothing, mask=mask & (own != sender))
    return b_sum.to(b_own.dtype)


@triton.jit
def finish_row(
    b_sum,
    b_residual,
    b_weight,
    p_residual,
    p_weight,
    p_out,
    mask,
    N,
    eps,
    weight_offset,
    x_scale,
    ADDS: tl.constexpr,
    NORMS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Add to the residual stream, and normalise; or only store."""
    if ADDS:
        if not EARLY:
            b_residual = tl.load(p_residual, mask=mask, other=0.0)
        b_added = (b_sum.to(tl.float32) * x_scale + b_residual.to(tl.float32)).to(b_residual.dtype)
        tl.store(p_residual, b_added, mask=mask)
    if NORMS:
        if not EARLY:
            b_weight = tl.load(p_weight, mask=mask, other=0.0)
        b_row = b_added.to(tl.float32)
        b_rstd = tl.rsqrt(tl.sum(b_row * b_row, axis=0) / N + eps)
        b_row = b_row * b_rstd * (b_weight.to(tl.float32) + weight_offset)
        tl.store(p_out, b_row.to(p_out.dtype.element_ty), mask=mask)
    if not ADDS:
        tl.store(p_out, b_sum, mask=mask)


@triton.jit(do_not_specialize=["rank", "rows", "most_programs", "slots"])
def _all_reduce_kernel(
    x_ptr,  # [rows, N], this rank's part
    residual_ptr,  # [rows, N], read and written if ADDS
    weight_ptr,  # [N], read if ADDS
    out_ptr,  # [rows, N], may be x
    links_ptr,  # [SIZE + 1] int64
    turns_ptr,  # [most_programs] int32
    rank,
    rows,
    N,
    eps,
    weight_offset,
    x_scale,
    stride_x,
    stride_residual,
    stride_out,
    most_programs,
    slots,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ADDS: tl.constexpr,
    TWO_SHOT: tl.constexpr,
    NOTHING: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,  # residual and weights have registers to wait in
    AHEAD: tl.constexpr,  # rows that a program sends before it waits for the first
    SENDS: tl.constexpr,
    SUMS: tl.constexpr,
    FINISHES: tl.constexpr,
    PDL: tl.constexpr,
):
    BITS: tl.constexpr = tl.int32 if x_ptr.dtype.element_ty.primitive_bitwidth == 32 else tl.int16
    PLACES: tl.constexpr = SIZE * WIDTH  # of a row: one for each sender
    LATER: tl.constexpr = AHEAD if TWO_SHOT else 0  # rows that are summed up before the first sum is waited for
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    # No kernel in flight writes these. The turn is only brought near: weights have pushed it out of the cache.
    stop_ptr = tl.load(links_ptr + SIZE).to(tl.pointer_type(tl.int32))
    mine_ptr = _inbox_of(links_ptr, rank, BITS)
    b_weight = tl.load(weight_ptr + cols, mask=mask, other=0.0) if ADDS and EARLY else cols
    tl.load(turns_ptr + program, volatile=True)
    wait_for_previous(PDL)
    let_next_start(PDL)  # all programs are on the GPU, and what starts now waits for the end of this kernel
    turn = tl.load(turns_ptr + program, volatile=True)
    slot = (turn * most_programs + program) * (slots * PLACES) - AHEAD * PLACES  # an inbox is small: no int64
    for row in range(program - AHEAD * programs, rows + LATER * programs, programs):
        further = row + AHEAD * programs
        if SENDS and further < rows:
            at = slot + AHEAD * PLACES + rank * WIDTH
            x_row_ptr = x_ptr + tl.cast(further, tl.int64) * stride_x
            _send(x_row_ptr, links_ptr, rank, further, at, cols, mask, SIZE, TWO_SHOT, NOTHING)
        if TWO_SHOT and SUMS:
            if (row >= 0) & (row < rows) & (row % SIZE == rank):
                b_own = tl.load(x_ptr + tl.cast(row, tl.int64) * stride_x + cols, mask=mask, other=0.0)
                b_sum = _receive(mine_ptr + slot, b_own, rank, cols, mask, stop_ptr, SIZE, WIDTH, NOTHING)
                b_bits = _as_sent(b_sum, BITS, NOTHING)
                _send_to_others(links_ptr, -1, slot + rank * WIDTH, b_bits, cols, mask, SIZE)
        last = row - LATER * programs
        if FINISHES and last >= 0:
            p_residual = residual_ptr + tl.cast(last, tl.int64) * stride_residual + cols
            b_residual = tl.load(p_residual, mask=mask, other=0.0) if ADDS and EARLY else cols
            if TWO_SHOT:  # from the owner, whose place for its own part is free
                sum_ptr = mine_ptr + slot - LATER * PLACES + last % SIZE * WIDTH
                b_own = tl.zeros(mask.shape, x_ptr.dtype.element_ty)
                b_sum = _receive(sum_ptr, b_own, -1, cols, mask, stop_ptr, 1, WIDTH, NOTHING)
            else:
                b_own = tl.load(x_ptr + tl.cast(last, tl.int64) * stride_x + cols, mask=mask, other=0.0)
                b_sum = _receive(mine_ptr + slot, b_own, rank, cols, mask, stop_ptr, SIZE, WIDTH, NOTHING)
            pointers = p_residual, weight_ptr + cols, out_ptr + tl.cast(last, tl.int64) * stride_out + cols
            numbers = N, eps, weight_offset, x_scale
            finish_row(b_sum, b_residual, b_weight, *pointers, mask, *numbers, ADDS, ADDS, EARLY)
        slot += PLACES
    if FINISHES:
        tl.store(turns_ptr + program, 1 - turn)


def sum_rows(
    x: torch.Tensor,
    inbox: PeerInbox,
    added: AddedNorm | None,
    out: torch.Tensor,
    *,
    two_shot: bool = False,
    stages: Stages = ALL_STAGES,
) -> None:
    """:func:`all_reduce` without its checks: a layer's rows fit in every step.

    Args:
        stages: the stages to run; for tests.
    """
    layout = inbox.layout
    for start in range(0, len(x), layout.rows):
        _launch(x, inbox, added, out, two_shot, stages, slice(start, start + layout.rows))


def _launch(
    x: torch.Tensor,
    inbox: PeerInbox,
    added: AddedNorm | None,
    out: torch.Tensor,
    two_shot: bool,
    stages: Stages,
    part: slice,
) -> None:
    layout, program = inbox.layout, inbox.layout.program
    x, out = x[part], out[part]
    residual, weight, eps, offset, x_scale = (x, x, 0.0, 0.0, 1.0) if added is None else added
    residual = residual if added is None else residual[part]
    programs = min(len(x), layout.programs)
    _all_reduce_kernel[(programs,)](
        x,
        residual,
        weight,
        out,
        inbox.links,
        inbox.turns,
        inbox.rank,
        len(x),
        layout.columns,
        eps,
        offset,
        x_scale,
        x.stride(0),
        residual.stride(0),
        out.stride(0),
        layout.programs,
        layout.slots,
        SIZE=layout.size,
        WIDTH=layout.width,
        ADDS=added is not None,
        TWO_SHOT=two_shot,
        NOTHING=EMPTY[layout.dtype.itemsize],
        BLOCK=program.block,
        EARLY=program.block <= 256 * program.num_warps and not two_shot,
        AHEAD=layout.ahead,
        SENDS=stages.sends,
        SUMS=stages.sums,
        FINISHES=stages.finishes,
        num_warps=program.num_warps,
        **({} if on_amd(x.device) else {"maxnreg": program.registers}),
        **dependent_launch(x.device),
    )


def all_reduce(
    x: torch.Tensor,
    inbox: PeerInbox,
    *,
    added: AddedNorm | None = None,
    out: torch.Tensor | None = None,
    two_shot: bool = False,
) -> torch.Tensor:
    """The sum of all ranks' ``x``, or the RMS norm of a residual stream that it is added to.

    All ranks call it with tensors of the same shapes, one call after the other on one stream; a captured graph may hold
    it. Nothing is waited for on the host. (No operator of torch: what it reads is other processes' memory.)

    Args:
        x: ``[rows, columns]`` of the inbox's dtype, this rank's part; contiguous in the last dimension.
        inbox: the inbox of this rank.
        added: the residual stream, ``[rows, columns]``, to which the sum is added in place, and its norm.
        out: ``[rows, columns]`` for the sum or, with ``added``, the norm; by default ``x`` itself.
        two_shot: each row is summed up on one rank; else on all.

    Returns:
        ``out``.

    Raises:
        ValueError: a wrong shape, dtype or device, or rows that are not contiguous.
    """
    layout = inbox.layout
    out = x if out is None else out
    check_tensor("x", x, [None, layout.columns], dtype=layout.dtype)
    check_tensor("out", out, x.shape, dtype=layout.dtype, like=x)
    if added is not None:
        check_tensor("residual", added.residual, x.shape, like=x)
        check_affine("weight", added.weight, x)
    sum_rows(x, inbox, added, out, two_shot=two_shot)
    return out


def all_reduce_ref(parts: Sequence[torch.Tensor], *, added: AddedNorm | None = None) -> torch.Tensor:
    """What :func:`all_reduce` gives on every rank, in plain torch, from the parts of all of them."""
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total += part.float()
    total = total.to(parts[0].dtype)
    if added is None:
        return total
    residual, weight, eps, offset, x_scale = added
    return fused_add_rms_norm_ref(total, residual, weight, eps, weight_offset=offset, x_scale=x_scale)[0]

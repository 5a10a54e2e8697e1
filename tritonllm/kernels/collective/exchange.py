"""Rows to the ranks of one machine that have their experts, and back: dispatch, and combine with what follows.

``dispatch_rows`` writes each row straight to where the ranks that have one of its experts receive it, and to no others;
with a row go its weights, and to every rank the ids of the experts that it has there, which are -1 elsewhere. The
experts write what they make of a row into this rank's ``parts``. ``combine_rows`` reads, for each row of its own, those
of the ranks that had one of its experts, and adds them in float32 in the order of the ranks, rounds once to the dtype
of the parts, and goes on with the sum as :func:`~tritonllm.kernels.collective.all_reduce` does: the addition to a
residual stream and its norm. Rows travel once in each way. (The two halves of DeepSeek's DeepEP, 2025, in its kernels
for decoding; there rows are packed by expert. Of how memory is laid out tells
:mod:`tritonllm.kernels.collective.exchange_memory`.)

A program of ``dispatch_rows`` writes its rows, sets a flag for each other rank, and waits for theirs
(:mod:`tritonllm.kernels.collective.flags`). ``combine_rows`` has the flags before its work: what the experts have
written is behind :func:`wait_for_previous`, and a release covers what its thread has seen, so one flag from any program
of a rank says that all parts of that rank are there.

One set of places suffices:

- What rank b has received in step n is read by its experts, which end before its combine n sets flags. Rank a's combine
  n waits for those, and its dispatch n + 1, which writes to the same places, comes behind that on a's stream.
- The parts of step n on b are overwritten by b's experts of step n + 1. They run behind b's dispatch n + 1, which has
  waited for the flags of a's dispatch n + 1, set behind the end of a's combine n, which has read the parts.
- A flag is set to the next epoch only after the other rank has read the one before: the phases in between say so. And
  it only grows, so a flag that is ahead is as good.

So launches must not overlap on one rank (they are on one stream); they must be dispatch, combine, dispatch, combine and
so on; and all ranks must launch the same with the same number of ``rows``, also one that has no rows itself. With no
room for rows nothing is launched, anywhere. ``tests/kernels/collective/test_exchange_memory.py`` goes through all
orders in which ranks can take their steps.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from tritonllm.kernels import fused_add_rms_norm_ref
from tritonllm.kernels.collective.all_reduce import ALL_STAGES, AddedNorm, Stages, finish_row
from tritonllm.kernels.collective.exchange_memory import COMBINE, DISPATCH, ExchangeLayout, ExchangeMemory
from tritonllm.kernels.collective.flags import signal, wait_for_others
from tritonllm.kernels.elementwise import check_affine
from tritonllm.kernels.runtime.checks import check_scaled, check_tensor, require
from tritonllm.kernels.runtime.chip import on_amd
from tritonllm.kernels.runtime.dependent_launch import dependent_launch, let_next_start, wait_for_previous

BLOCK = 8192  # columns that a program sends at once, at most


@triton.jit
def _memory_of(links_ptr, rank, start, DTYPE: tl.constexpr):
    """What begins ``start`` bytes behind the beginning of a rank's memory."""
    return tl.multiple_of((tl.load(links_ptr + rank) + start).to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def _experts_of(ids_ptr, marks_ptr, row, count, stride_ids, TOP_K: tl.constexpr, K_BLOCK: tl.constexpr):
    """The experts of a row; -1 for none, as padding and rows that are not there have."""
    k = tl.arange(0, K_BLOCK)
    b_ids = tl.load(ids_ptr + tl.cast(row, tl.int64) * stride_ids + k, mask=(k < TOP_K) & (row < count), other=-1)
    mark = tl.load(marks_ptr + row, mask=row < count, other=-1)
    return tl.where(mark >= 0, b_ids, -1)


@triton.jit
def _local_to(b_ids, rank, held):
    """The experts of a row as those of a rank, from 0 on; -1 for one that is elsewhere."""
    b_local = b_ids - rank * held
    return tl.where((b_local >= 0) & (b_local < held), b_local, -1)


@triton.jit(do_not_specialize=["rank", "count", "rows", "held", "programs"])
def _dispatch_kernel(
    x_ptr,  # [count, N]
    weights_ptr,  # [count, TOP_K] float32
    ids_ptr,  # [count, TOP_K] int32
    marks_ptr,  # [count]
    links_ptr,  # [SIZE + 1] int64
    epochs_ptr,  # [2, programs] int32
    rank,
    count,
    rows,
    held,
    N,
    stride_x,
    stride_weights,
    stride_ids,
    programs,
    weights_at,
    ids_at,
    flags_at,
    PHASE: tl.constexpr,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    LANES: tl.constexpr,
    SENDS: tl.constexpr,
    FINISHES: tl.constexpr,
    PDL: tl.constexpr,
):
    X: tl.constexpr = x_ptr.dtype.element_ty
    program = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    k = tl.arange(0, K_BLOCK)
    p_epoch = epochs_ptr + PHASE * programs + program
    wait_for_previous(PDL)
    let_next_start(PDL)  # all programs are on the GPU, and what starts now waits for the end of this kernel
    epoch = tl.load(p_epoch) + 1
    if SENDS:
        for row in range(program, rows, tl.num_programs(0)):
            x_row_ptr = x_ptr + tl.cast(row, tl.int64) * stride_x
            b_x = tl.load(x_row_ptr + cols, mask=(cols < N) & (row < count), other=0.0)  # while the ids come
            p_weights = weights_ptr + tl.cast(row, tl.int64) * stride_weights + k
            b_weights = tl.load(p_weights, mask=(k < TOP_K) & (row < count), other=0.0)
            b_ids = _experts_of(ids_ptr, marks_ptr, row, count, stride_ids, TOP_K, K_BLOCK)
            place = tl.cast(rank, tl.int64) * rows + row
            for block in tl.static_range(BLOCKS):
                column = block * BLOCK + cols
                if block > 0:
                    b_x = tl.load(x_row_ptr + column, mask=(column < N) & (row < count), other=0.0)
                for other in tl.static_range(SIZE):
                    b_local = _local_to(b_ids, other, held)
                    here = tl.max(b_local, axis=0) >= 0
                    if block == 0:
                        p_ids = _memory_of(links_ptr, other, ids_at, tl.int32) + place * TOP_K + k
                        p_weights = _memory_of(links_ptr, other, weights_at, tl.float32) + place * TOP_K + k
                        tl.store(p_ids, b_local, mask=k < TOP_K)
                        tl.store(p_weights, b_weights, mask=(k < TOP_K) & here)
                    p_x = _memory_of(links_ptr, other, 0, X) + place * N + column
                    tl.store(p_x, b_x, mask=(column < N) & here)
        signal(links_ptr, rank, flags_at, programs, epoch, PHASE, SIZE, LANES)
    if FINISHES:
        wait_for_others(links_ptr, rank, flags_at, programs, epoch, PHASE, SIZE, LANES)
        tl.store(p_epoch, epoch)


@triton.jit(do_not_specialize=["rank", "count", "rows", "held", "programs"])
def _combine_kernel(
    ids_ptr,  # [count, TOP_K] int32
    marks_ptr,  # [count]
    links_ptr,  # [SIZE + 1] int64
    epochs_ptr,  # [2, programs] int32
    residual_ptr,  # [count, N], read and written if ADDS
    weight_ptr,  # [N], read if NORMS
    out_ptr,  # [count, N], written if NORMS or not ADDS
    rank,
    count,
    rows,
    held,
    N,
    eps,
    weight_offset,
    x_scale,
    stride_ids,
    stride_residual,
    stride_out,
    programs,
    parts_at,
    flags_at,
    PARTS: tl.constexpr,  # their dtype
    PHASE: tl.constexpr,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    ADDS: tl.constexpr,
    NORMS: tl.constexpr,
    EARLY: tl.constexpr,  # residual and weights have registers to wait in
    SENDS: tl.constexpr,
    FINISHES: tl.constexpr,
    PDL: tl.constexpr,
):
    program = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    p_epoch = epochs_ptr + PHASE * programs + program
    b_weight = tl.load(weight_ptr + cols, mask=mask, other=0.0) if NORMS and EARLY else cols
    wait_for_previous(PDL)
    let_next_start(PDL)  # all programs are on the GPU, and what starts now waits for the end of this kernel
    epoch = tl.load(p_epoch) + 1
    if SENDS:
        signal(links_ptr, rank, flags_at, programs, epoch, PHASE, SIZE, LANES)
    if FINISHES:
        b_ids = _experts_of(ids_ptr, marks_ptr, program, count, stride_ids, TOP_K, K_BLOCK)  # ahead by one row
        wait_for_others(links_ptr, rank, flags_at, programs, epoch, PHASE, SIZE, LANES)
        for row in range(program, count, tl.num_programs(0)):
            p_residual = residual_ptr + tl.cast(row, tl.int64) * stride_residual + cols
            b_residual = tl.load(p_residual, mask=mask, other=0.0) if ADDS and EARLY else cols
            place = tl.cast(rank, tl.int64) * rows + row
            b_sum = tl.zeros([BLOCK], tl.float32)
            for other in tl.static_range(SIZE):
                here = tl.max(_local_to(b_ids, other, held), axis=0) >= 0
                p_part = _memory_of(links_ptr, other, parts_at, PARTS) + place * N + cols
                # past the cache of this processor, which others do not write to
                b_part = tl.load(p_part, mask=mask & here, other=0.0, cache_modifier=".cg")
                b_sum += b_part.to(tl.float32)
            b_ids = _experts_of(ids_ptr, marks_ptr, row + tl.num_programs(0), count, stride_ids, TOP_K, K_BLOCK)
            pointers = p_residual, weight_ptr + cols, out_ptr + tl.cast(row, tl.int64) * stride_out + cols
            numbers = N, eps, weight_offset, x_scale
            finish_row(b_sum.to(PARTS), b_residual, b_weight, *pointers, mask, *numbers, ADDS, NORMS, EARLY)
        tl.store(p_epoch, epoch)


def dispatch_rows(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    marks: torch.Tensor,
    memory: ExchangeMemory,
    held: int,
    rows: int,
    *,
    stages: Stages = ALL_STAGES,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Send rows to the ranks that have their experts, and receive those for the experts here.

    All ranks call it, in turns with :func:`combine_rows`, with the same ``held`` and ``rows``; a captured graph may
    hold it. Nothing is waited for on the host. (No operator of torch: what it writes is other processes' memory.)

    Args:
        x: ``[T, columns]`` of the memory's dtype; contiguous in the last dimension, as all arguments. T is at most
            ``rows``, and may differ between ranks.
        weights: ``[T, top_k]`` float32.
        ids: ``[T, top_k]`` int32: expert ``e`` is expert ``e % held`` of rank ``e // held``; one that no rank has goes
            nowhere.
        marks: ``[T]`` int32 or int64; a row whose mark is negative is padding and goes nowhere.
        memory: the memory of this rank.
        held: how many experts each rank has.
        rows: room for the rows of a rank, at most those of the memory's layout.
        stages: the stages to run; for tests.

    Returns:
        Parts of the memory: ``x[size * rows, columns]``, ``weights[size * rows, top_k]`` and ``ids[size * rows,
            top_k]``, as
        :class:`ExchangeMemory` has them, where row i of rank s is row ``s * rows + i``. An id is an expert here, from 0
        on, or -1. Where a row has none, its elements and weights are whatever was there before.

    Raises:
        ValueError: a wrong shape, dtype or device, rows that are not contiguous, or too many.
    """
    layout = memory.layout
    check_tensor("x", x, ("T", layout.columns), dtype=layout.dtype, like=memory.x)
    check_tensor("weights", weights, (len(x), layout.top_k), dtype=torch.float32, like=x)
    _check_choice(len(x), ids, marks, layout, held, rows, x)
    received = layout.size * rows
    if rows:
        block = min(layout.program.block, BLOCK)
        _dispatch_kernel[(layout.programs_of(rows),)](
            *(x, weights, ids, marks, memory.links, memory.epochs, memory.rank, len(x), rows, held, layout.columns),
            *(x.stride(0), weights.stride(0), ids.stride(0)),
            *(layout.programs, layout.weights_at, layout.ids_at, layout.flags_at),
            PHASE=DISPATCH,
            BLOCK=block,
            BLOCKS=triton.cdiv(layout.columns, block),
            **_options(layout, x.device, stages),
        )
    return memory.x[:received], memory.weights[:received], memory.ids[:received]


def combine_rows(
    memory: ExchangeMemory,
    ids: torch.Tensor,
    marks: torch.Tensor,
    held: int,
    rows: int,
    *,
    out: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    scale: float = 1.0,
    added: AddedNorm | None = None,
    stages: Stages = ALL_STAGES,
) -> torch.Tensor:
    """The sum of what all ranks have made of this rank's rows: alone, added to a residual stream, or with its norm.

    What this rank's experts have made of the rows that it received is in ``memory.parts`` by then.

    Args:
        memory, ids, marks, held, rows: as :func:`dispatch_rows` got them; ``ids`` and ``marks`` unchanged.
        out: ``[T, columns]`` for the sum or, with ``added``, the norm; by default a new tensor.
        residual: ``[T, columns]``, to which ``scale`` times the sum is added in place; then there is no ``out``.
        scale: see ``residual``, without which it must be 1.
        added: the residual stream, ``[T, columns]``, to which the sum is added in place, and its norm.
        stages: the stages to run; for tests.

    Returns:
        ``residual``, or else ``out``.

    Raises:
        ValueError: a wrong shape, dtype or device, rows that are not contiguous, or too many; or several of ``out``,
            ``residual`` and ``added`` that do not go together.
    """
    layout = memory.layout
    _check_choice("T", ids, marks, layout, held, rows, memory.x)
    check_scaled(scale, residual)
    require(residual is None or (out is None and added is None), "residual must be alone, without out or added")
    shape = len(ids), layout.columns
    weight, eps, offset, stream = None, 0.0, 0.0, residual
    if added is not None:
        stream, weight, eps, offset, scale = added
    if stream is not None:
        check_tensor("residual", stream, shape, like=ids)
    if weight is not None:
        assert stream is not None
        check_affine("weight", weight, stream)
    if residual is not None:
        out = residual
    elif out is None:
        out = torch.empty(shape, dtype=layout.dtype, device=ids.device)
    else:
        check_tensor("out", out, shape, dtype=layout.dtype, like=ids)
    if rows:
        stream, program = out if stream is None else stream, layout.program
        _combine_kernel[(layout.programs_of(rows),)](
            *(ids, marks, memory.links, memory.epochs, stream, out if weight is None else weight, out),
            *(memory.rank, len(ids), rows, held, layout.columns, eps, offset, scale),
            *(ids.stride(0), stream.stride(0), out.stride(0), layout.programs, layout.parts_at, layout.flags_at),
            PARTS=_TYPES[layout.dtype],
            PHASE=COMBINE,
            BLOCK=program.block,
            ADDS=residual is not None or added is not None,
            NORMS=added is not None,
            EARLY=program.block <= 256 * program.num_warps,
            **_options(layout, ids.device, stages),
        )
    return out


_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def _check_choice(
    count: int | str,
    ids: torch.Tensor,
    marks: torch.Tensor,
    layout: ExchangeLayout,
    held: int,
    rows: int,
    like: torch.Tensor,
) -> None:
    check_tensor("ids", ids, (count, layout.top_k), dtype=torch.int32, like=like)
    check_tensor("marks", marks, (len(ids),), dtype=(torch.int32, torch.int64), like=like)
    require(held > 0, f"held must be at least 1, got {held}")
    require(len(ids) <= rows <= layout.rows, f"rows must be from {len(ids)} (T) to {layout.rows}, got {rows}")


def _options(layout: ExchangeLayout, device: torch.device, stages: Stages) -> dict[str, Any]:
    """Keywords of either launch."""
    program = layout.program
    options = {
        "SIZE": layout.size,
        "TOP_K": layout.top_k,
        "K_BLOCK": triton.next_power_of_2(layout.top_k),
        "LANES": 32 * program.num_warps,
        "SENDS": stages.sends,
        "FINISHES": stages.finishes,
        "num_warps": program.num_warps,
    }
    limit = {} if on_amd(device) else {"maxnreg": program.registers}
    return options | limit | dependent_launch(device)


Sent = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # x, weights, ids and marks of a rank


def dispatch_rows_ref(
    sent: Sequence[Sent], rank: int, held: int, rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What :func:`dispatch_rows` gives on a rank, in plain torch, from ``x, weights, ids, marks`` of all of them; zeros
    where a row has no expert there."""
    x, weights, ids, _ = sent[0]
    places = len(sent) * rows
    received = x.new_zeros(places, x.shape[1]), weights.new_zeros(places, ids.shape[1])
    local = ids.new_full((places, ids.shape[1]), -1)
    for sender, (part, part_weights, part_ids, marks) in enumerate(sent):
        here = (marks[:, None] >= 0) & (part_ids >= rank * held) & (part_ids < (rank + 1) * held)
        at = sender * rows + here.any(1).nonzero()[:, 0]
        received[0][at], received[1][at] = part[here.any(1)], part_weights[here.any(1)]
        local[sender * rows : sender * rows + len(part)] = (part_ids - rank * held).where(here, -1)
    return *received, local


def combine_rows_ref(
    parts: Sequence[torch.Tensor],
    rank: int,
    ids: torch.Tensor,
    marks: torch.Tensor,
    held: int,
    rows: int,
    *,
    residual: torch.Tensor | None = None,
    scale: float = 1.0,
    added: AddedNorm | None = None,
) -> torch.Tensor:
    """What :func:`combine_rows` gives on a rank, in plain torch, from the parts of all of them."""
    total = torch.zeros(len(ids), parts[0].shape[1], dtype=torch.float32, device=ids.device)
    for other, part in enumerate(parts):
        here = (marks[:, None] >= 0) & (ids >= other * held) & (ids < (other + 1) * held)
        mine = part[rank * rows : rank * rows + len(ids)].float()
        total += mine.where(here.any(1, keepdim=True), 0.0)
    total = total.to(parts[0].dtype)
    if residual is not None:
        return residual.copy_(residual.float() + scale * total.float())
    if added is None:
        return total
    stream, weight, eps, offset, x_scale = added
    return fused_add_rms_norm_ref(total, stream, weight, eps, weight_offset=offset, x_scale=x_scale)[0]

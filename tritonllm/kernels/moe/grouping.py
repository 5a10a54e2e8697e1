"""Mixture of experts: the pairs (token, expert) in the order of the experts, cut in blocks for a grouped product.

Sizes depend on shapes only, so nothing waits for the device. A first kernel counts the experts of each chunk of pairs;
a second sorts each chunk and puts its runs where the counts say; if one chunk holds all pairs the second does both.
The order is stable, so it is the same in every run. Some microseconds, bound by latency.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tritonllm.kernels.moe.arguments import map_size
from tritonllm.kernels.runtime import tuning
from tritonllm.kernels.runtime.dependent_launch import dependent_launch, let_next_start, wait_for_previous

GROUP = 16  # blocks that share each tile of their expert's weights, which is then read from memory once


class ExpertBlocks(NamedTuple):
    """Pairs by expert. Pair ``t * k + j`` is choice ``j`` of token ``t``; pairs without an expert here are left out.

    Attributes:
        order: ``[T * k]`` int32 pairs; what lies beyond the pairs that have an expert is undefined.
        table: ``[3, blocks]`` int32: expert, first position in ``order``, pairs (0: no such block, and none after it).
            In memory follow the number of blocks with pairs, and for each block the first block of its group and how
            many it has: up to ``GROUP`` blocks of one expert, to be worked on together.
    """

    order: torch.Tensor
    table: torch.Tensor


@triton.jit
def expert_of_pairs(
    ids_ptr, map_ptr, pair, pairs, experts, num_ids, stride_ids, TOP_K: tl.constexpr, MAP_ROWS: tl.constexpr
):
    """The local expert of each pair; -1 beyond the pairs, for an id out of range and for an expert that is elsewhere.

    ids_ptr: [T, TOP_K] with rows `stride_ids` apart; map_ptr: [MAP_ROWS, num_ids], of which token t reads row
    t % MAP_ROWS; MAP_ROWS 0: ids are local experts.
    """
    p_ids = ids_ptr + (pair // TOP_K).to(tl.int64) * stride_ids + pair % TOP_K
    b_id = tl.load(p_ids, mask=pair < pairs, other=-1)
    known = (b_id >= 0) & (b_id < num_ids)
    if MAP_ROWS > 0:
        b_row = pair // TOP_K % MAP_ROWS
        b_id = tl.load(map_ptr + b_row.to(tl.int64) * num_ids + b_id, mask=known, other=-1)
    return tl.where(known & (b_id >= 0) & (b_id < experts), b_id, -1).to(tl.int32)


@triton.jit(do_not_specialize=["pairs"])
def _count_kernel(
    ids_ptr,
    map_ptr,
    counts_ptr,  # [chunks, E_BLOCK]
    pairs,
    experts,
    num_ids,
    stride_ids,
    TOP_K: tl.constexpr,
    MAP_ROWS: tl.constexpr,
    E_BLOCK: tl.constexpr,  # power of two, >= experts
    PDL: tl.constexpr,
    CHUNK: tl.constexpr,
):
    wait_for_previous(PDL)
    let_next_start(PDL)
    chunk = tl.program_id(0)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    b_expert = expert_of_pairs(ids_ptr, map_ptr, pair, pairs, experts, num_ids, stride_ids, TOP_K, MAP_ROWS)
    b_count = tl.histogram(tl.maximum(b_expert, 0), E_BLOCK, mask=b_expert >= 0)
    tl.store(counts_ptr + chunk * E_BLOCK + tl.arange(0, E_BLOCK), b_count)


@triton.jit(do_not_specialize=["pairs", "num_blocks", "block_m", "unit"])
def _place_kernel(
    ids_ptr,
    map_ptr,
    counts_ptr,  # [chunks, E_BLOCK], not read if ONE_CHUNK
    order_ptr,  # [pairs]
    table_ptr,  # [3 * num_blocks + 1 + 2 * num_blocks]
    pairs,
    experts,
    num_ids,
    stride_ids,
    num_blocks,
    block_m,
    unit,  # divides block_m
    GROUP: tl.constexpr,
    TOP_K: tl.constexpr,
    MAP_ROWS: tl.constexpr,
    ONE_CHUNK: tl.constexpr,
    E_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
    CHUNK: tl.constexpr,
    COLS: tl.constexpr,
):
    wait_for_previous(PDL)
    let_next_start(PDL)
    chunk = tl.program_id(0)
    chunks = tl.num_programs(0)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    b_expert = expert_of_pairs(ids_ptr, map_ptr, pair, pairs, experts, num_ids, stride_ids, TOP_K, MAP_ROWS)
    b_count = tl.histogram(tl.maximum(b_expert, 0), E_BLOCK, mask=b_expert >= 0)
    b_total = b_count  # pairs of each expert
    b_before = tl.zeros([E_BLOCK], tl.int32)  # those in chunks before this one
    if not ONE_CHUNK:
        b_total = tl.zeros([E_BLOCK], tl.int32)
        for first in range(0, chunks, COLS):
            other = (first + tl.arange(0, COLS))[:, None]
            p_counts = counts_ptr + other * E_BLOCK + tl.arange(0, E_BLOCK)[None, :]
            b_counts = tl.load(p_counts, mask=other < chunks, other=0)
            b_total += tl.sum(b_counts, axis=0)
            b_before += tl.sum(tl.where(other < chunk, b_counts, 0), axis=0)
    b_start = tl.cumsum(b_total, axis=0) - b_total

    # sorted by expert, then by number, the chunk's pairs are consecutive in the order of each expert
    lane = tl.arange(0, CHUNK)
    b_sorted = tl.sort(tl.where(b_expert >= 0, b_expert, E_BLOCK) * CHUNK + lane)
    b_key = b_sorted // CHUNK
    b_shift = b_start + b_before - (tl.cumsum(b_count, axis=0) - b_count)
    b_position = tl.gather(b_shift, tl.minimum(b_key, E_BLOCK - 1), 0) + lane
    tl.store(order_ptr + b_position, chunk * CHUNK + b_sorted % CHUNK, mask=b_key < E_BLOCK)

    # the table's rows, shared among the programs: a block belongs to the first expert whose blocks end beyond it
    b_blocks = (b_total + block_m - 1) // block_m
    b_end = tl.cumsum(b_blocks, axis=0)
    used = tl.sum(b_blocks, axis=0)
    for first in range(chunk * COLS, num_blocks, chunks * COLS):
        block = first + tl.arange(0, COLS)
        b_owner = tl.sum((b_end[None, :] <= block[:, None]).to(tl.int32), axis=1)
        b_owner = tl.where(block < used, b_owner, 0)
        # an expert's blocks get equal shares of its pairs, but for the unit
        b_of_owner = tl.maximum(tl.gather(b_blocks, b_owner, 0), 1)
        b_pairs = tl.gather(b_total, b_owner, 0)
        b_units = (b_pairs + unit - 1) // unit
        b_block = block - tl.gather(b_end - b_blocks, b_owner, 0)
        b_done = b_block * b_units // b_of_owner * unit
        b_rows = tl.minimum((b_block + 1) * b_units // b_of_owner * unit, b_pairs) - b_done
        mask = block < num_blocks
        tl.store(table_ptr + block, b_owner, mask=mask)
        tl.store(table_ptr + num_blocks + block, tl.gather(b_start, b_owner, 0) + b_done, mask=mask)
        tl.store(table_ptr + 2 * num_blocks + block, tl.where(block < used, b_rows, 0), mask=mask)
        b_group = b_block // GROUP * GROUP
        tl.store(table_ptr + 3 * num_blocks + 1 + block, block - b_block + b_group, mask=mask)
        tl.store(table_ptr + 4 * num_blocks + 1 + block, tl.minimum(b_of_owner - b_group, GROUP), mask=mask)
    if chunk == 0:
        tl.store(table_ptr + 3 * num_blocks, used)


def default_config(pairs: int, experts: int) -> tuning.Config:
    """Chunks small enough to be sorted soon, and few enough for their counts to be added up soon.

    For each size the fastest of 128 experts on an H200 (docs/notebook/experts.md, "Order of the pairs").
    """
    sizes = ((128, 32, 16), (1024, 64, 16), (4096, 128, 16), (16384, 128, 32))
    chunk, columns = next((size[1:] for size in sizes if pairs <= size[0]), (512, 16))
    warps = max(1, min(4, chunk // 64))
    columns = max(1, min(columns, 2048 * warps // triton.next_power_of_2(experts)))  # 64 registers a thread
    return {"CHUNK": chunk, "COLS": columns, "num_warps": warps}


def group_by_expert(
    ids: torch.Tensor, experts: int, block_m: int, expert_map: torch.Tensor | None = None, *, unit: int | None = None
) -> ExpertBlocks:
    """Order pairs by expert and cut them in blocks of at most ``block_m`` pairs of one expert; for the device only.

    An expert gets as few blocks as it needs, which share its pairs evenly in units.

    Args:
        ids: ``[T, k]`` int32 or int64 expert ids, at least one; one out of range has no expert.
        experts: experts that live here.
        block_m: rows of a block.
        expert_map: ``[E]`` or ``[R, E]`` int32 from an id to an expert here, or -1, as of
            :func:`tritonllm.kernels.fused_moe`; by default ids are experts.
        unit: divides ``block_m``; all blocks but an expert's last hold a multiple of it. Default ``block_m``: all but
            the last are full.
    """
    pairs, top_k = ids.numel(), ids.shape[1]
    live = min(experts, pairs)
    num_blocks = live + (pairs - live) // block_m  # every expert may have one block that is not full
    config = tuning.get_config("moe_grouping", ids.device, default_config, pairs=pairs, experts=experts)
    chunks = triton.cdiv(pairs, config["CHUNK"])
    e_block = max(16, triton.next_power_of_2(experts))
    order = torch.empty(pairs, dtype=torch.int32, device=ids.device)
    table = torch.empty(5 * num_blocks + 1, dtype=torch.int32, device=ids.device)[: 3 * num_blocks].view(3, num_blocks)
    map_or_ids = ids if expert_map is None else expert_map
    map_rows, num_ids = map_size(expert_map, experts)
    arguments = (pairs, experts, num_ids, ids.stride(0))
    flags = {"TOP_K": top_k, "MAP_ROWS": map_rows, "E_BLOCK": e_block, **dependent_launch(ids.device)}
    counts = order  # not read if one chunk holds all pairs
    if chunks > 1:
        counts = torch.empty((chunks, e_block), dtype=torch.int32, device=ids.device)
        _count_kernel[(chunks,)](
            ids, map_or_ids, counts, *arguments, **flags, CHUNK=config["CHUNK"], num_warps=config["num_warps"]
        )
    _place_kernel[(chunks,)](
        ids,
        map_or_ids,
        counts,
        order,
        table,
        *arguments,
        num_blocks,
        block_m,
        block_m if unit is None else unit,
        **flags,
        GROUP=GROUP,
        ONE_CHUNK=chunks == 1,
        **config,
    )
    return ExpertBlocks(order, table)

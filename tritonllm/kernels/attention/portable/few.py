"""Decode attention of few sequences: one launch, and little of it after the kernel before has ended.

At batch 1 and a few hundred keys nothing is bound by memory: the time is that of the steps that wait for one another
(length, block ids, keys, logits, weights, output, and the same for a merge). But of all that is read only the queries
and the newest key and value come from the kernel before this one in the stream. So where the caller says that
(``settled``), a program reads its length, its block ids and its first tile of keys and values while that kernel still
runs, and what remains after waiting for it (`dependent_launch`) is one read from the second-level cache, two products
and the merge.

One step further, the kernel takes the place of that before it (FUSED): it reads the rows of the query/key/value
projection, normalises and turns them as :mod:`tritonllm.kernels.attention.qk_norm_rope` does, and stores the newest key
and value.

A sequence's keys are split into parts (Flash-Decoding: Dao, Haziza, Massa and Sizov, 2023), as many as its length asks
for, on the device. They are merged, in the order of their keys, by the program that ends last, found by counting in the
workspace, which is zeros again afterwards; with one part there is nothing to merge.
"""

import torch
import triton
import triton.language as tl

from tritonllm.kernels.attention.arguments import AttentionArgs, Hints, Pages, Queries
from tritonllm.kernels.attention.common import LN2, start_softmax
from tritonllm.kernels.attention.portable.few_parts import attend_to_newest, attend_to_part
from tritonllm.kernels.attention.portable.projection import Projection, projection_arguments
from tritonllm.kernels.attention.portable.tile import merge_parts
from tritonllm.kernels.runtime import tuning
from tritonllm.kernels.runtime.checks import require
from tritonllm.kernels.runtime.dependent_launch import dependent_launch, let_next_start, wait_for_previous


# Arguments whose values and alignment change from step to step: one compilation serves them all.
@triton.jit(do_not_specialize=["table_ptr", "len_ptr", "slot_ptr", "positions_ptr", "window", "stride_table"])
def few_kernel(
    q_ptr,  # [B, H, D]; FUSED: [B, (H + 2 K) D]
    k_ptr,  # [P, S, K, D]
    v_ptr,
    table_ptr,  # [B, M]
    len_ptr,  # [B]
    out_ptr,  # [B, H, D]
    lse_ptr,  # [B, H] float32, or None
    sink_ptr,  # [H], or None
    slope_ptr,  # [H], or None
    k_scale_ptr,  # [K], or None
    v_scale_ptr,  # [K], or None
    part_ptr,  # [B, heads of tiles, parts, ROWS, D] float32, if SPLIT
    part_lse_ptr,  # [B, heads of tiles, parts, ROWS] float32, base 2
    count_ptr,  # [B, heads of tiles] int32 zeros, which they are again in the end
    slot_ptr,  # [B] int64, if FUSED, as all up to k_weight_ptr
    positions_ptr,  # [B]
    cos_sin_ptr,  # [max position, 2 HALF]
    q_weight_ptr,  # [D], or [H, D] if PER_HEAD; None: no norm
    k_weight_ptr,  # [D], or [K, D]
    scale,
    v_factor,
    window,
    softcap,
    k_inverse,  # 1 / scale where that is a number
    v_inverse,
    eps,
    weight_offset,
    stride_q_seq,
    stride_q_head,
    stride_k_block,
    stride_k_slot,
    stride_k_head,
    stride_v_block,
    stride_v_slot,
    stride_v_head,
    stride_table,
    stride_out_seq,
    stride_out_head,
    stride_cos_sin,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SPLIT: tl.constexpr,
    NEWEST: tl.constexpr,  # a program more for the newest key
    SETTLED: tl.constexpr,  # no kernel in flight writes anything but queries and newest keys and values (FUSED: qkv)
    FUSED: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    PER_HEAD: tl.constexpr,
    SCALED: tl.constexpr,  # what is stored is divided by a scale
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,  # query heads of a program
    COLUMNS: tl.constexpr,  # of its products: the same, repeated where they are fewer than eight
    BLOCK_N: tl.constexpr,
    MIN_TILES: tl.constexpr,
    MERGE: tl.constexpr,  # parts at once
    PDL: tl.constexpr,
):
    """One program: a part of the keys of one sequence and key/value head, for up to ROWS query heads."""
    row_tiles: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    # Sequences are on the first axis, with their heads: the others end at 65,535.
    pair = tl.program_id(0).to(tl.int64)
    seq = (tl.program_id(0) // (KV_HEADS * row_tiles)).to(tl.int64)
    tile = tl.program_id(0) % (KV_HEADS * row_tiles)
    kv_head = tile // row_tiles
    part = tl.program_id(1)
    if not SETTLED:
        wait_for_previous(PDL)
    seq_len = tl.load(len_ptr + seq)
    first = tl.maximum(seq_len - window, 0) if WINDOW else 0
    lo = first // BLOCK_N * BLOCK_N
    end = seq_len - 1 if NEWEST else seq_len
    tiles = tl.cdiv(tl.maximum(end - lo, 0), BLOCK_N)
    part_tiles = tl.maximum(tl.cdiv(tiles, tl.num_programs(1) - NEWEST), MIN_TILES)
    parts = tl.cdiv(tiles, part_tiles) + 1 if NEWEST else tl.maximum(tl.cdiv(tiles, part_tiles), 1)
    if part >= parts:
        return
    if part_tiles <= MIN_TILES:  # where there is more to do, what starts early takes room from what runs
        let_next_start(PDL)

    row = tile % row_tiles * ROWS
    b_dim = tl.arange(0, BLOCK_D)
    p_q = q_ptr + seq * stride_q_seq
    p_table = table_ptr + seq * stride_table
    p_k = k_ptr + kv_head.to(tl.int64) * stride_k_head
    p_v = v_ptr + kv_head.to(tl.int64) * stride_v_head
    p_angles = p_q
    if FUSED and HALF:
        p_angles = cos_sin_ptr + tl.load(positions_ptr + seq).to(tl.int64) * stride_cos_sin
    places = (p_q, stride_q_head, p_k, p_v, p_table, p_angles)
    strides = (stride_k_block, stride_k_slot, stride_v_block, stride_v_slot)
    numbers = (scale, softcap, eps, weight_offset, v_factor)
    FLAGS: tl.constexpr = (SETTLED and PDL, FUSED, HALF, PAIRS, PER_HEAD, WINDOW, SOFTCAP)
    SHAPE: tl.constexpr = (GROUP, KV_HEADS, BLOCK_SIZE, HEAD_SIZE, BLOCK_D)
    p_part = part_ptr
    p_part_lse = part_lse_ptr
    if SPLIT:
        p_part += pair * tl.num_programs(1) * (ROWS * HEAD_SIZE)
        p_part_lse += pair * tl.num_programs(1) * ROWS
    p_out = out_ptr + seq * stride_out_seq
    p_lse = None if lse_ptr is None else lse_ptr + seq * KV_HEADS * GROUP

    if NEWEST and part == parts - 1:
        slot = tl.load(slot_ptr + seq) if FUSED else 0
        attend_to_newest(
            *(seq_len, part, row, kv_head, slot, places, strides, numbers, k_inverse, v_inverse),
            *(q_weight_ptr, k_weight_ptr, sink_ptr, k_scale_ptr, v_scale_ptr),
            *(p_part, p_part_lse, FLAGS, SHAPE, SCALED, ROWS),
        )
    else:
        lo += part * part_tiles * BLOCK_N
        hi = tl.minimum(lo + part_tiles * BLOCK_N, end)
        b_out, b_lse, b_row = attend_to_part(
            *(seq_len, part, lo, hi, first, row, kv_head, places, strides, numbers),
            *(q_weight_ptr, sink_ptr, slope_ptr, k_scale_ptr, v_scale_ptr),
            *(FLAGS, SHAPE, ROWS, COLUMNS, BLOCK_N),
        )
        if SPLIT:
            b_column = tl.arange(0, COLUMNS)
            b_at = part * ROWS + b_column
            m_part = b_column < ROWS
            p_mine = p_part + b_at[None, :] * HEAD_SIZE + b_dim[:, None]
            tl.store(p_mine, b_out, mask=m_part[None, :] & (b_dim < HEAD_SIZE)[:, None])
            tl.store(p_part_lse + b_at, b_lse, mask=m_part)
        else:
            m_row = (tl.arange(0, COLUMNS) < ROWS) & (b_row < GROUP)
            b_head = kv_head * GROUP + b_row
            p_columns = p_out + (b_head.to(tl.int64) * stride_out_head)[None, :] + b_dim[:, None]
            tl.store(p_columns, b_out.to(out_ptr.dtype.element_ty), mask=m_row[None, :] & (b_dim < HEAD_SIZE)[:, None])
            if lse_ptr is not None:
                tl.store(p_lse + b_head, b_lse * LN2, mask=m_row)
    if part_tiles > MIN_TILES:
        let_next_start(PDL)
    if SPLIT:
        tl.debug_barrier()  # every thread has stored its share of the part before one counts it
        if tl.atomic_add(count_ptr + pair, 1) == parts - 1:
            tl.store(count_ptr + pair, 0)
            b_m, b_l = start_softmax(None, 0, False, ROWS)
            b_all, b_all_lse = merge_parts(p_part, p_part_lse, parts, b_m, b_l, MERGE, HEAD_SIZE, BLOCK_D)
            b_some = row + tl.arange(0, ROWS)
            m_some = b_some < GROUP
            b_some += kv_head * GROUP
            p_all = p_out + (b_some.to(tl.int64) * stride_out_head)[:, None] + b_dim[None, :]
            tl.store(p_all, b_all.to(out_ptr.dtype.element_ty), mask=m_some[:, None] & (b_dim < HEAD_SIZE)[None, :])
            if lse_ptr is not None:
                tl.store(p_lse + b_some, b_all_lse * LN2, mask=m_some)


def _few_heads(group: int, programs: int) -> int:
    """Query heads of a program by default."""
    return min(2 if programs <= 8 else 4, triton.next_power_of_2(group))


def few_row_tiles(group: int, programs: int) -> int:
    """Into how many tiles a group is cut by default: each of them reads the keys."""
    return triton.cdiv(group, _few_heads(group, programs))


def few_config(head_size: int, group: int, programs: int) -> tuning.Config:
    """``BLOCK_M``: query heads of a program; ``PROGRAMS``: how many programs to aim for.

    Few heads a program win, although programs of a group read the same keys: those come from the second-level cache. A
    layer of Qwen3-30B-A3B at batch 1 takes 40.5 us with 2 heads of 8, 43.7 with all 8
    (docs/notebook/decode-attention.md, "Heads of a group apart").
    """
    heads = _few_heads(group, programs)
    block_n = 32 if head_size <= 128 else 16
    merge = max(1, min(16, 32 * 128 // (heads * triton.next_power_of_2(head_size))))
    tile = {"BLOCK_M": heads, "BLOCK_N": block_n, "MIN_TILES": 1, "MERGE": merge}
    return {"kernel": "few", "PROGRAMS": 1056} | tile | {"num_warps": 1, "num_stages": 1}


def launch(
    queries: Queries,
    pages: Pages,
    hints: Hints,
    args: AttentionArgs,
    config: tuning.Config,
    projection: Projection | None = None,
) -> None:
    """Launch for a token of each sequence, or for a projection, and then ``queries.q`` is its ``qkv``.

    Raises:
        ValueError: for 16 query heads a program or more and four warps. Hopper's asynchronous products would be chosen.
            Each alone is right, but where the weights take the keys' place in shared memory, ptxas 12.8 (of Triton 3.6)
            reads the weights' address from registers that it never wrote, and results are wrong, or the access illegal.
    """
    q, (k_cache, v_cache, block_tables, seq_lens), (workspace, settled, *_) = queries.q, pages, hints
    config = {name: value for name, value in config.items() if name != "kernel"}
    batch, heads, head_size = args.out.shape
    size, kv_heads = k_cache.shape[1:3]
    group = heads // kv_heads
    rows = min(config.pop("BLOCK_M"), triton.next_power_of_2(group))
    columns = max(8, rows)
    require(
        config["num_warps"] < 4 or columns < 16,
        f"num_warps must be 1 or 2 with {columns} query heads a program, got {config['num_warps']}: use BLOCK_M=8",
    )
    row_tiles = triton.cdiv(group, rows)
    most, block_n = hints.most_keys(pages), config["BLOCK_N"]
    # A window that does not begin at a tile's edge touches one tile more.
    keys = min(most, args.window + block_n) if args.window else most
    pairs = batch * kv_heads * row_tiles
    parts = max(1, min(config.pop("PROGRAMS") // pairs, triton.cdiv(keys, block_n * config["MIN_TILES"])))
    newest = projection is not None or (settled and parts > 1)
    parts += newest
    part = part_lse = None
    if parts > 1:
        part = torch.empty((pairs, parts, rows, head_size), dtype=torch.float32, device=q.device)
        part_lse = torch.empty((pairs, parts, rows), dtype=torch.float32, device=q.device)
        if workspace is None or len(workspace) < pairs:
            workspace = torch.zeros(pairs, dtype=torch.int32, device=q.device)
    few_kernel[(pairs, parts)](
        *(q, k_cache, v_cache, block_tables, seq_lens, args.out, args.lse, args.sinks, args.alibi_slopes),
        *(args.k_scale, args.v_scale, part, part_lse, workspace if parts > 1 else None),
        **projection_arguments(q, k_cache, projection),
        scale=args.scale,
        v_factor=args.v_factor,
        window=args.window,
        softcap=args.softcap,
        stride_q_seq=q.stride(0),
        stride_q_head=q.stride(1),
        stride_k_block=k_cache.stride(0),
        stride_k_slot=k_cache.stride(1),
        stride_k_head=k_cache.stride(2),
        stride_v_block=v_cache.stride(0),
        stride_v_slot=v_cache.stride(1),
        stride_v_head=v_cache.stride(2),
        stride_table=block_tables.stride(0),
        stride_out_seq=args.out.stride(0),
        stride_out_head=args.out.stride(1),
        KV_HEADS=kv_heads,
        GROUP=group,
        SPLIT=parts > 1,
        NEWEST=newest,
        SETTLED=settled and newest,
        WINDOW=args.window > 0,
        SOFTCAP=args.softcap > 0,
        BLOCK_SIZE=size,
        HEAD_SIZE=head_size,
        BLOCK_D=triton.next_power_of_2(head_size),
        ROWS=rows,
        COLUMNS=columns,
        **config,
        **dependent_launch(q.device),
    )

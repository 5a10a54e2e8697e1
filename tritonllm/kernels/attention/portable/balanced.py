"""Attention of few queries per sequence, balanced over the chip: the kernel of decode and verify attention.

Every key and value is read once for all rows that share it, (token, query head) pairs of one key/value head, so the
floor is ``2 L K D`` elements over the memory bandwidth. To reach it, all programs must read all the time and end
together, whatever the lengths are. So the tiles of keys of all (key/value head, sequence) pairs form one list, in this
order, and each program takes an equal stretch of it (the method of Stream-K: Osama et al., 2023), found from the
lengths on the device. With the head outermost, the programs at work on one sequence's heads read neighbouring rows of
memory at about the same time.

A pair that lies within one stretch is written at once. The parts of any other are merged by their log-sum-exp
(Flash-Decoding: Dao, Haziza, Massa and Sizov, 2023) by the program that ends last, in the order of their keys, so that
timing does not change a bit of the result. That program is found by counting tiles in the workspace, which it sets
back to zero: nothing waits, and nothing is launched a second time.
"""

import torch
import triton
import triton.language as tl

from tritonllm.kernels.attention.arguments import AttentionArgs, Hints, Pages, Queries
from tritonllm.kernels.attention.common import finish_softmax, start_softmax
from tritonllm.kernels.attention.portable.tile import (
    attend,
    fit_queries,
    load_head_factors,
    load_queries,
    store_part,
    store_rows,
)
from tritonllm.kernels.attention.schedule import count_tiles, cut, describe_sequence, divide, find_sequence, merge_parts
from tritonllm.kernels.runtime import tuning


@triton.jit
def _rows(head, row_tiles, seq, cu_ptr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, ROWS: tl.constexpr):
    """The first ROWS rows of a tile: token in ``q``, query head, token in the sequence, and whether there is one.

    Called before and after the loop over keys. The loads are volatile because the compiler would merge the calls and
    hold the rows' addresses in registers through the loop.
    """
    b_pair = head % row_tiles * BLOCK_M + tl.arange(0, ROWS)
    b_new = b_pair // GROUP
    token = seq
    q_len = 1
    if cu_ptr is not None:
        token = tl.load(cu_ptr + seq, volatile=True)
        q_len = tl.load(cu_ptr + seq + 1, volatile=True) - token
    return token.to(tl.int64) + b_new, head // row_tiles * GROUP + b_pair % GROUP, b_new, b_new < q_len


# Arguments whose values and alignment change from step to step: one compilation serves them all.
@triton.jit(
    do_not_specialize=["table_ptr", "cu_ptr", "len_ptr", "tree_ptr", "window", "batch", "row_tiles", "stride_table"]
)
def balanced_kernel(
    q_ptr,  # [T, H, D]
    k_ptr,  # [P, S, K, D]
    v_ptr,
    table_ptr,  # [B, M]
    cu_ptr,  # [B + 1], or None: one query for each sequence
    len_ptr,  # [B]
    tree_ptr,  # [T], or None
    out_ptr,  # [T, H, D]
    lse_ptr,  # [T, H] float32, or None
    sink_ptr,  # [H], or None
    slope_ptr,  # [H], or None
    k_scale_ptr,  # [K], or None
    v_scale_ptr,  # [K], or None
    part_ptr,  # [2 G, BLOCK_M, D] float32 for G programs
    part_lse_ptr,  # [2 G, BLOCK_M] float32, base 2
    count_ptr,  # [G] int32 zeros, which they are again in the end
    scale,
    v_factor,
    window,
    softcap,
    batch,
    kv_heads,
    row_tiles,
    stride_q_token,
    stride_q_head,
    stride_k_block,
    stride_k_slot,
    stride_k_head,
    stride_v_block,
    stride_v_slot,
    stride_v_head,
    stride_table,
    stride_out_token,
    stride_out_head,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SAME_STRIDES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    ROWS: tl.constexpr,  # of a tile that hold a query
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MIN_TILES: tl.constexpr = 4,
    BLOCK_B: tl.constexpr = 256,
):
    """One program: an equal stretch of the list of tiles, as many pairs as it touches."""
    b_lane = tl.arange(0, BLOCK_B)
    head_tiles, _longest = count_tiles(b_lane, len_ptr, cu_ptr, batch, window, WINDOW, BLOCK_N)
    all_tiles = head_tiles * kv_heads * row_tiles
    share, unit = divide(all_tiles, tl.num_programs(0), MIN_TILES)
    begin = tl.program_id(0) * share
    end = tl.minimum(begin + share, all_tiles)
    head = begin // head_tiles
    at = begin - head * head_tiles
    seq, before = find_sequence(b_lane, at, len_ptr, cu_ptr, batch, window, WINDOW, BLOCK_N)
    pair = begin - at + before  # where the pair's first tile is in the list
    b_dim = tl.arange(0, BLOCK_D)

    while pair < end:
        seq_len, q_len, first, tiles = describe_sequence(seq, True, len_ptr, cu_ptr, window, WINDOW, BLOCK_N)
        part_lo = cut(begin - pair, tiles, unit)
        part_hi = cut(end - pair, tiles, unit)
        if part_lo < part_hi:
            kv_head = head // row_tiles
            b_token, b_head, b_new, m_row = _rows(head, row_tiles, seq, cu_ptr, GROUP, BLOCK_M, BLOCK_M)
            b_q = load_queries(q_ptr, b_token, b_head, m_row, stride_q_token, stride_q_head, HEAD_SIZE, BLOCK_D)
            logit_scale, out_scale, b_slope = load_head_factors(
                *(scale, v_factor, slope_ptr, k_scale_ptr, v_scale_ptr, kv_head, b_head, m_row), BLOCK_M=BLOCK_M
            )
            b_scale = tl.zeros([BLOCK_M], tl.float32) + logit_scale
            b_q, b_scale = fit_queries(b_q, b_scale, k_ptr)
            cached = seq_len - q_len
            b_pos = cached + b_new
            b_end = b_pos + 1
            b_tree = b_new
            if tree_ptr is not None:
                b_tree = tl.load(tree_ptr + b_token, mask=m_row, other=0)
                b_end = tl.zeros([BLOCK_M], tl.int32) + seq_len
                b_bit = tl.arange(0, 32)
                b_pos = cached - 1 + tl.sum((b_tree[:, None] >> b_bit[None, :]) & 1, 1)  # a token sees its ancestors
            # A sink counts once, in the part with the first keys.
            b_m, b_sum = start_softmax(sink_ptr, b_head, m_row & (part_lo == 0), BLOCK_M)
            lo = first // BLOCK_N * BLOCK_N
            # To add up a row is work for several warps together if the tile is low: then each column keeps a sum.
            SUMS: tl.constexpr = [BLOCK_M, BLOCK_N] if BLOCK_M == 16 and b_q.dtype != tl.float32 else [BLOCK_M]
            b_acc, b_m_new, b_l = attend(
                *(tl.zeros([BLOCK_M, BLOCK_D], tl.float32), b_m, tl.zeros(SUMS, tl.float32), b_q),
                *(b_pos + 1 - window, b_end, b_pos, b_tree, b_slope, b_scale),
                k_ptr + kv_head.to(tl.int64) * stride_k_head,
                v_ptr + kv_head.to(tl.int64) * stride_v_head,
                table_ptr + seq.to(tl.int64) * stride_table,
                *(lo + part_lo * BLOCK_N, tl.minimum(lo + part_hi * BLOCK_N, seq_len), first, cached, softcap),
                *(stride_k_block, stride_k_slot, stride_v_block, stride_v_slot),
                HIDE="end" if cu_ptr is None else "rows" if tree_ptr is None else "tree",
                INSTEAD=True,
                SAME_STRIDES=SAME_STRIDES,
                WINDOW=WINDOW,
                SOFTCAP=SOFTCAP,
                ALIBI=slope_ptr is not None,
                BLOCK_SIZE=BLOCK_SIZE,
                HEAD_SIZE=HEAD_SIZE,
                BLOCK_D=BLOCK_D,
                BLOCK_N=BLOCK_N,
            )
            if len(SUMS) == 2:
                b_l = tl.sum(b_l, 1)
            b_out, b_lse = finish_softmax(b_acc, b_m_new, b_l + b_sum * tl.exp2(b_m - b_m_new))
            heads = kv_heads * GROUP
            if part_hi - part_lo == tiles:
                b_token, b_head, _, m_row = _rows(head, row_tiles, seq, cu_ptr, GROUP, BLOCK_M, BLOCK_M)
                store_rows(
                    *(out_ptr, lse_ptr, b_out, b_lse, out_scale, b_token, b_head, m_row, heads),
                    *(stride_out_token, stride_out_head, HEAD_SIZE, BLOCK_D),
                )
            else:
                b_slot = (tl.program_id(0) * 2 + (part_lo == 0).to(tl.int32)) * BLOCK_M + tl.arange(0, BLOCK_M)
                m_store = tl.arange(0, BLOCK_M) < ROWS
                store_part(part_ptr, part_lse_ptr, b_out, b_lse, b_slot, m_store, HEAD_SIZE, BLOCK_D)
                p_count = count_ptr + pair // share
                tl.debug_barrier()  # every thread has stored its share of the part before one counts it
                if tl.atomic_add(p_count, part_hi - part_lo) + part_hi - part_lo == tiles:
                    tl.store(p_count, 0)
                    b_row_token, b_row_head, _, m_some = _rows(head, row_tiles, seq, cu_ptr, GROUP, BLOCK_M, ROWS)
                    b_all, b_all_lse = merge_parts(
                        *(part_ptr, part_lse_ptr, pair, tiles, share, unit),
                        *(tl.arange(0, ROWS), m_some, b_dim, HEAD_SIZE, BLOCK_M),
                    )
                    store_rows(
                        *(out_ptr, lse_ptr, b_all, b_all_lse, out_scale, b_row_token, b_row_head, m_some, heads),
                        *(stride_out_token, stride_out_head, HEAD_SIZE, BLOCK_D),
                    )
        pair += tiles
        seq += 1
        if seq == batch:
            seq = 0
            head += 1


def launch(queries: Queries, pages: Pages, hints: Hints, args: AttentionArgs, config: tuning.Config) -> None:
    """Launch for tokens that see those before them, or a tree's ancestors."""
    config = dict(config)
    (q, cu_seqlens_q, max_seqlen_q, _, tree_mask), (k_cache, v_cache, block_tables, seq_lens) = queries, pages
    workspace = hints.workspace
    batch, heads, head_size = len(seq_lens), *q.shape[1:]
    kv_heads = k_cache.shape[2]
    group = heads // kv_heads
    row_tiles = triton.cdiv(group * max_seqlen_q, config["BLOCK_M"])
    tiles = batch * kv_heads * row_tiles * max(1, triton.cdiv(hints.most_keys(pages), config["BLOCK_N"]))
    programs = min(config.pop("PROGRAMS"), tiles)
    if workspace is None:
        workspace = torch.zeros(programs, dtype=torch.int32, device=q.device)
    programs = min(programs, len(workspace))
    part = torch.empty((2 * programs, config["BLOCK_M"], head_size), dtype=torch.float32, device=q.device)
    part_lse = torch.empty(part.shape[:2], dtype=torch.float32, device=q.device)
    strides = *q.stride()[:2], *pages.strides, *args.out.stride()[:2]
    balanced_kernel[(programs,)](
        *(q, k_cache, v_cache, block_tables, cu_seqlens_q, seq_lens, tree_mask, args.out, args.lse, args.sinks),
        *(args.alibi_slopes, args.k_scale, args.v_scale, part, part_lse, workspace),
        *(args.scale, args.v_factor, args.window, args.softcap, batch, kv_heads, row_tiles, *strides),
        GROUP=group,
        WINDOW=args.window > 0,
        SOFTCAP=args.softcap > 0,
        SAME_STRIDES=k_cache.stride() == v_cache.stride(),
        BLOCK_SIZE=k_cache.shape[1],
        HEAD_SIZE=head_size,
        ROWS=min(config["BLOCK_M"], triton.next_power_of_2(group * max_seqlen_q)),
        BLOCK_D=triton.next_power_of_2(head_size),
        **config,
    )

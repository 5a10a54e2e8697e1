"""Prefill attention for any GPU. Tiled as in FlashAttention-2 (Dao, 2023).

The rows of a tile are (token, query head) pairs of one key/value head: the heads that share keys load them once, and a
tile spans few tokens, so little of the causal diagonal is computed in vain.

A few new tokens behind many cached ones (the next turn of a chat) are a handful of tiles for all processors. Where
there may be so few, the keys of each tile are shared out as :mod:`tritonllm.kernels.attention.schedule` says, from the
lengths on the device, and the program that ends last merges the shares by their log-sum-exp (Flash-Decoding: Dao,
Haziza, Massa and Sizov, 2023), in the order of their keys.
"""

import torch
import triton
import triton.language as tl

from tritonllm.kernels.attention.arguments import AttentionArgs, Hints, Pages, Queries
from tritonllm.kernels.attention.common import finish_softmax, start_softmax
from tritonllm.kernels.attention.portable.tile import (
    attend_regions,
    fit_queries,
    load_head_factors,
    load_queries,
    merge_parts,
    store_part,
    store_rows,
)
from tritonllm.kernels.attention.schedule import (
    count_row_items,
    find_prefill_sequence,
    find_row_item,
    prefill_key_ranges,
    shares_of_keys,
)
from tritonllm.kernels.runtime import chip, tuning
from tritonllm.kernels.runtime.dependent_launch import dependent_launch, let_next_start, wait_for_previous


@triton.jit
def locate_rows(tile, seq, cu_ptr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """A tile's first (token, head) pair, the sequence's new tokens, and each row's token in ``q``, pair and validity.

    Called before and after the loop over keys. The loads are volatile because the compiler would merge the two calls
    and hold the rows' addresses in registers through the loop, which has none to spare.
    """
    begin = tl.load(cu_ptr + seq, volatile=True)
    q_len = tl.load(cu_ptr + seq + 1, volatile=True) - begin
    first_tile = (begin.to(tl.int64) * GROUP // BLOCK_M).to(tl.int32) + seq
    first_pair = (tile - first_tile) * BLOCK_M
    b_pair = first_pair + tl.arange(0, BLOCK_M)
    return first_pair, q_len, begin.to(tl.int64) + b_pair // GROUP, b_pair, b_pair < q_len * GROUP


@triton.jit
def _rows_from(first_pair, seq, cu_ptr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """As :func:`locate_rows`, for the tile that begins with this pair."""
    begin = tl.load(cu_ptr + seq, volatile=True)
    q_len = tl.load(cu_ptr + seq + 1, volatile=True) - begin
    b_pair = first_pair + tl.arange(0, BLOCK_M)
    return first_pair, q_len, begin.to(tl.int64) + b_pair // GROUP, b_pair, b_pair < q_len * GROUP


# Arguments whose values and alignment change from step to step: one compilation serves them all.
@triton.jit(
    do_not_specialize=["table_ptr", "cu_ptr", "len_ptr", "window", "batch", "kv_heads", "programs", "stride_table"]
)
def _prefill_kernel(
    q_ptr,  # [T, H, D]
    k_ptr,  # [P, S, K, D]
    v_ptr,
    table_ptr,  # [B, M]
    cu_ptr,  # [B + 1]
    len_ptr,  # [B]
    out_ptr,  # [T, H, D]
    lse_ptr,  # [T, H] float32, or None
    sink_ptr,  # [H], or None
    slope_ptr,  # [H], or None
    k_scale_ptr,  # [K], or None
    v_scale_ptr,  # [K], or None
    part_ptr,  # [programs, BLOCK_M, D] float32, or None where keys are not shared out; so the next two
    part_lse_ptr,  # [programs, BLOCK_M] float32, base 2
    count_ptr,  # [programs] int32 zeros, which they are again in the end
    scale,
    v_factor,
    window,
    softcap,
    batch,
    kv_heads,
    programs,  # of all, so many share out the keys of long tiles
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
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,  # keys are shared out, and merging a share takes as long as so many of them; 0: they are not
    PDL: tl.constexpr,
):
    """One program: BLOCK_M (token, query head) pairs of one key/value head and one sequence, or a share of their
    keys."""
    wait_for_previous(PDL)
    let_next_start(PDL)
    part = 0
    most = 1
    if SPLIT:
        b_lane = tl.arange(0, 128)
        counts = count_row_items(
            *(b_lane, len_ptr, cu_ptr, batch, window, kv_heads, programs, GROUP, WINDOW, BLOCK_M, BLOCK_N)
        )
        tile = tl.program_id(0)
        if tile >= (counts[0] + counts[1]) * kv_heads:
            return
        kv_head, seq, first_pair, part, most = find_row_item(
            *(b_lane, tile, counts, len_ptr, cu_ptr, batch, window, kv_heads, programs),
            *(GROUP, WINDOW, BLOCK_M, BLOCK_N),
        )
        _, q_len, b_token, b_pair, m_row = _rows_from(first_pair, seq, cu_ptr, GROUP, BLOCK_M)
    else:
        # The last tiles of a sequence see most keys: they start first, so that the short ones fill the end.
        tile = tl.num_programs(0) - 1 - tl.program_id(0)
        kv_head = tl.program_id(1)
        seq = find_prefill_sequence(tl.arange(0, 128), tile, cu_ptr, batch, GROUP, BLOCK_M)
        first_pair, q_len, b_token, b_pair, m_row = locate_rows(tile, seq, cu_ptr, GROUP, BLOCK_M)
        if first_pair >= q_len * GROUP:
            return
    seq_len = tl.load(len_ptr + seq)
    cached = seq_len - q_len
    b_head = kv_head * GROUP + b_pair % GROUP
    b_pos = cached + b_pair // GROUP
    b_q = load_queries(q_ptr, b_token, b_head, m_row, stride_q_token, stride_q_head, HEAD_SIZE, BLOCK_D)
    scale, v_factor, b_slope = load_head_factors(
        *(scale, v_factor, slope_ptr, k_scale_ptr, v_scale_ptr, kv_head, b_head, m_row), BLOCK_M=BLOCK_M
    )
    b_q, b_scale = fit_queries(b_q, scale, k_ptr)
    # A sink counts once, in the share with the first keys.
    b_m, b_l = start_softmax(sink_ptr, b_head, m_row & (part == 0) if SPLIT else m_row, BLOCK_M)
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    pos_lo = cached + first_pair // GROUP
    pos_hi = cached + tl.minimum((first_pair + BLOCK_M - 1) // GROUP, q_len - 1)
    lo, whole_lo, whole_hi, hi = prefill_key_ranges(pos_lo, pos_hi, seq_len, window, CAUSAL, WINDOW, BLOCK_N)
    first = tl.maximum(pos_lo - window + 1, 0) if WINDOW else 0
    shares = 1
    share_lo, share_hi = lo, hi
    if SPLIT:
        key_tiles = tl.cdiv(tl.maximum(hi - lo, 0), BLOCK_N)
        shares = shares_of_keys(key_tiles, most, BLOCK_N, SPLIT)
        if part >= shares:
            return
        share_lo = lo + part * key_tiles // shares * BLOCK_N
        share_hi = tl.minimum(lo + (part + 1) * key_tiles // shares * BLOCK_N, hi)
    if CAUSAL:
        b_end = b_pos + 1
    elif WINDOW:
        b_end = tl.minimum(b_pos + tl.minimum(window, seq_len), seq_len)
    else:
        b_end = tl.zeros([BLOCK_M], tl.int32) + seq_len
    pages = (
        k_ptr + kv_head.to(tl.int64) * stride_k_head,
        v_ptr + kv_head.to(tl.int64) * stride_v_head,
        table_ptr + seq.to(tl.int64) * stride_table,
        stride_k_block,
        stride_k_slot,
        stride_v_block,
        stride_v_slot,
    )
    b_acc, b_m, b_l = attend_regions(
        *((b_acc, b_m, b_l), b_q, (b_pos - window + 1, b_end, b_pos, b_slope), pages),
        *((lo, whole_lo, whole_hi, hi, first), share_lo, share_hi, b_scale, softcap),
        *(SPLIT > 0, WINDOW, SOFTCAP, slope_ptr is not None, BLOCK_SIZE, HEAD_SIZE, BLOCK_D, BLOCK_N),
    )
    b_out, b_lse = finish_softmax(b_acc, b_m, b_l)
    if SPLIT:
        _, _, b_token, b_pair, m_row = _rows_from(first_pair, seq, cu_ptr, GROUP, BLOCK_M)
        if shares > 1:  # shares of cut tiles are the first items: each has a place of its own
            b_at = tile * BLOCK_M + tl.arange(0, BLOCK_M)
            store_part(part_ptr, part_lse_ptr, b_out, b_lse, b_at, b_at >= 0, HEAD_SIZE, BLOCK_D)
            tl.debug_barrier()  # every thread has stored its share of the part before one counts it
            p_count = count_ptr + tile - part
            last = tl.atomic_add(p_count, 1) + 1 == shares
            m_row = m_row & last
            if last:
                tl.store(p_count, 0)
                p_first = part_ptr + (tile - part).to(tl.int64) * (BLOCK_M * HEAD_SIZE)
                p_first_lse = part_lse_ptr + (tile - part) * BLOCK_M
                b_m, b_l = start_softmax(None, 0, False, BLOCK_M)
                b_out, b_lse = merge_parts(p_first, p_first_lse, shares, b_m, b_l, 1, HEAD_SIZE, BLOCK_D)
    else:
        _, _, b_token, b_pair, m_row = locate_rows(tile, seq, cu_ptr, GROUP, BLOCK_M)
    b_head = kv_head * GROUP + b_pair % GROUP
    heads = kv_heads * GROUP if SPLIT else tl.num_programs(1) * GROUP
    store_rows(
        *(out_ptr, lse_ptr, b_out, b_lse, v_factor, b_token, b_head, m_row, heads),
        *(stride_out_token, stride_out_head, HEAD_SIZE, BLOCK_D),
    )


def launch(queries: Queries, pages: Pages, hints: Hints, args: AttentionArgs, config: tuning.Config) -> None:
    """Write ``args.out`` and ``args.lse``."""
    (q, cu_seqlens_q, _, causal, _), (k_cache, v_cache, block_tables, seq_lens) = queries, pages
    tokens, heads, head_size = q.shape
    batch, kv_heads = len(seq_lens), k_cache.shape[2]
    group = heads // kv_heads
    strides = *q.stride()[:2], *pages.strides, *args.out.stride()[:2]
    tiles = tokens * group // config["BLOCK_M"] + batch
    grid, programs = (tiles, kv_heads), 0
    parts: tuple[torch.Tensor | None, ...] = (None, None, None)
    if config["SPLIT"]:
        programs = chip.processors(q.device) * 8 // config["num_warps"]  # a processor has as many at once
        grid = (programs + tiles * kv_heads, 1)
        parts = _parts(programs, config["BLOCK_M"], hints.workspace, q)
    _prefill_kernel[grid](
        *(q, k_cache, v_cache, block_tables, cu_seqlens_q, seq_lens, args.out, args.lse),
        *(args.sinks, args.alibi_slopes, args.k_scale, args.v_scale, *parts, args.scale, args.v_factor),
        *(args.window, args.softcap, batch, kv_heads, programs, *strides),
        GROUP=group,
        CAUSAL=causal,
        WINDOW=args.window > 0,
        SOFTCAP=args.softcap > 0,
        BLOCK_SIZE=k_cache.shape[1],
        HEAD_SIZE=head_size,
        BLOCK_D=triton.next_power_of_2(head_size),
        **config,
        **dependent_launch(q.device),  # whatever the grid: no number of sequences launches another kernel
    )


def _parts(programs: int, rows: int, workspace: torch.Tensor | None, q: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Where shares are kept, the logarithms of their denominators, and counts of those that have ended."""
    if workspace is None or len(workspace) < programs:
        workspace = torch.zeros(programs, dtype=torch.int32, device=q.device)
    part = torch.empty((programs, rows, q.shape[2]), dtype=torch.float32, device=q.device)
    return part, torch.empty(part.shape[:2], dtype=torch.float32, device=q.device), workspace

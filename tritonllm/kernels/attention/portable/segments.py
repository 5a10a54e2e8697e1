"""Attention whose sums have one order: of each segment of 2048 keys by itself, then of the segments, first to last.

Segments are counted from a sequence's first key, so what one of them gives does not depend on who asks: a program that
takes all segments of a prompt's rows in turn gives the same bits as programs that take one each of a decode's, and a
second launch that adds them up. So the processors share out long sequences, and how is no part of the result. A segment
that a query does not see changes none of its sums: they are multiplied by 1, and 0 is added.
"""

import torch
import triton
import triton.language as tl

from tritonllm.kernels.attention.arguments import AttentionArgs, Hints, Pages, Queries
from tritonllm.kernels.attention.common import LOWEST, finish_softmax, start_softmax
from tritonllm.kernels.attention.portable.prefill import locate_rows
from tritonllm.kernels.attention.portable.tile import (
    attend_regions,
    fit_queries,
    load_head_factors,
    load_queries,
    store_rows,
)
from tritonllm.kernels.attention.schedule import find_prefill_sequence, prefill_key_ranges
from tritonllm.kernels.runtime import tuning
from tritonllm.kernels.runtime.dependent_launch import MAX_PROGRAMS, dependent_launch, let_next_start, wait_for_previous

# A power of two, at least any BLOCK_N. On an H200, 256 decodes of 100 to 2000 keys (no parts, where no sequence may
# have more than a segment): 297 us, with segments of 1024 324; one of 4096 keys: 39 us and 22.
SEGMENT_KEYS = 2048
_PROGRAMS = MAX_PROGRAMS  # of a launch: most have nothing to do, and an H200 starts 4096 in 5 us


@triton.jit
def fold(b_acc, b_m, b_l, b_part, b_part_m, b_part_l):
    """The sums of some segments, and behind them those of the next one. The multiply-adds are explicit: what a compiler
    contracts could differ between kernels."""
    b_m_new = tl.maximum(b_m, b_part_m)
    b_alpha = tl.exp2(b_m - b_m_new)
    b_beta = tl.exp2(b_part_m - b_m_new)
    b_acc = tl.fma(b_acc, b_alpha[:, None], b_part * b_beta[:, None])
    return b_acc, b_m_new, tl.fma(b_l, b_alpha, b_part_l * b_beta)


@triton.jit
def _segment(
    b_q,
    rows,
    pages,
    ranges,
    start,
    scale,
    softcap,
    FLAGS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SEGMENT: tl.constexpr,  # 0: all keys
):
    """What a tile's rows see of the SEGMENT keys from ``start`` on, or of all: ``(b_acc [M, D], b_m [M], b_l [M])``."""
    BLOCK_M: tl.constexpr = b_q.shape[0]
    nothing = (
        tl.zeros([BLOCK_M, BLOCK_D], tl.float32),
        tl.full([BLOCK_M], LOWEST, tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
    )
    return attend_regions(
        *(nothing, b_q, rows, pages, ranges, start, start + SEGMENT, scale, softcap),
        *(SEGMENT > 0, FLAGS[0], FLAGS[1], FLAGS[2], BLOCK_SIZE, HEAD_SIZE, BLOCK_D, BLOCK_N),
    )


@triton.jit
def _store(sums, outs, b_token, b_head, m_row, v_factor, heads, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr):
    out_ptr, lse_ptr, stride_token, stride_head = outs
    b_out, b_lse = finish_softmax(sums[0], sums[1], sums[2])
    store_rows(
        *(out_ptr, lse_ptr, b_out, b_lse, v_factor, b_token, b_head, m_row, heads),
        *(stride_token, stride_head, HEAD_SIZE, BLOCK_D),
    )


@triton.jit
def _keep(parts, sums, b_at, m_row, b_dim, HEAD_SIZE: tl.constexpr):
    part_ptr, sums_ptr = parts
    m_part = m_row[:, None] & (b_dim < HEAD_SIZE)[None, :]
    tl.store(part_ptr + b_at[:, None] * HEAD_SIZE + b_dim[None, :], sums[0], mask=m_part)
    tl.store(sums_ptr + b_at * 2, sums[1], mask=m_row)
    tl.store(sums_ptr + b_at * 2 + 1, sums[2], mask=m_row)


# Arguments whose values and alignment change from step to step: one compilation serves them all.
@triton.jit(
    do_not_specialize=[
        "table_ptr",
        "cu_ptr",
        "len_ptr",
        "order_ptr",
        "window",
        "batch",
        "stride_table",
        "slots",
        "most_rows",
    ]
)
def _segments_kernel(
    q_ptr,  # [T, H, D]
    k_ptr,  # [P, S, K, D]
    v_ptr,
    table_ptr,  # [B, M]
    cu_ptr,  # [B + 1]
    len_ptr,  # [B]
    order_ptr,  # [B]: in which decodes, one tile each, are begun; or None
    out_ptr,  # [T, H, D]
    lse_ptr,  # [T, H] float32, or None
    sink_ptr,  # [H], or None
    slope_ptr,  # [H], or None
    k_scale_ptr,  # [K], or None
    v_scale_ptr,  # [K], or None
    part_ptr,  # [B, C, K, R, D] float32; None: no sequence is shared out
    sums_ptr,  # [B, C, K, R, 2] float32, maximum and sum; or None
    scale,
    v_factor,
    window,
    softcap,
    batch,
    slots,  # C: segments of a sequence at most
    most_rows,  # R: (token, head) pairs of a sequence at most
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
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SEGMENT: tl.constexpr,
    ONE: tl.constexpr,  # no sequence has more than one segment
    PDL: tl.constexpr,
):
    """A program has BLOCK_M (token, query head) pairs of one key/value head and one sequence; where sequences are
    shared out, every so many-th segment of them, of which it leaves the sums behind."""
    wait_for_previous(PDL)
    let_next_start(PDL)
    kv_head = tl.program_id(1)
    kv_heads = tl.num_programs(1)
    if order_ptr is not None:
        seq = tl.load(order_ptr + tl.program_id(0))
        tile = (tl.load(cu_ptr + seq).to(tl.int64) * GROUP // BLOCK_M).to(tl.int32) + seq
    else:
        # The last tiles of a sequence see most keys: they start first, so that the short ones fill the end.
        tile = tl.num_programs(0) - 1 - tl.program_id(0)
        seq = find_prefill_sequence(tl.arange(0, 128), tile, cu_ptr, batch, GROUP, BLOCK_M)
    first_pair, q_len, b_token, b_pair, m_row = locate_rows(tile, seq, cu_ptr, GROUP, BLOCK_M)
    if first_pair >= q_len * GROUP:
        return
    seq_len = tl.load(len_ptr + seq)
    cached = seq_len - q_len
    b_head = kv_head * GROUP + b_pair % GROUP
    b_dim = tl.arange(0, BLOCK_D)
    b_q = load_queries(q_ptr, b_token, b_head, m_row, stride_q_token, stride_q_head, HEAD_SIZE, BLOCK_D)
    scale, v_factor, b_slope = load_head_factors(
        *(scale, v_factor, slope_ptr, k_scale_ptr, v_scale_ptr, kv_head, b_head, m_row), BLOCK_M=BLOCK_M
    )
    b_q, b_scale = fit_queries(b_q, scale, k_ptr)
    pos_lo = cached + first_pair // GROUP
    pos_hi = cached + tl.minimum((first_pair + BLOCK_M - 1) // GROUP, q_len - 1)
    lo, whole_lo, whole_hi, hi = prefill_key_ranges(pos_lo, pos_hi, seq_len, window, True, WINDOW, BLOCK_N)
    ranges = (lo, whole_lo, whole_hi, hi, tl.maximum(pos_lo - window + 1, 0) if WINDOW else 0)
    pages = (
        k_ptr + kv_head.to(tl.int64) * stride_k_head,
        v_ptr + kv_head.to(tl.int64) * stride_v_head,
        table_ptr + seq.to(tl.int64) * stride_table,
        stride_k_block,
        stride_k_slot,
        stride_v_block,
        stride_v_slot,
    )
    b_pos = cached + b_pair // GROUP
    rows = (b_pos - window + 1, b_pos + 1, b_pos, b_slope)
    FLAGS: tl.constexpr = (WINDOW, SOFTCAP, slope_ptr is not None)
    heads = kv_heads * GROUP
    outs = (out_ptr, lse_ptr, stride_out_token, stride_out_head)
    from_segment = lo // SEGMENT
    to_segment = tl.cdiv(hi, SEGMENT)
    if part_ptr is None:
        b_m, b_l = start_softmax(sink_ptr, b_head, m_row, BLOCK_M)
        b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        if ONE:
            b_part, b_part_m, b_part_l = _segment(
                *(b_q, rows, pages, ranges, 0, b_scale, softcap, FLAGS, BLOCK_SIZE, HEAD_SIZE, BLOCK_D, BLOCK_N, 0)
            )
            if sink_ptr is None:  # to fold would change nothing, and hold twice as many registers
                b_acc, b_m, b_l = b_part, b_part_m, b_part_l
            else:
                b_acc, b_m, b_l = fold(b_acc, b_m, b_l, b_part, b_part_m, b_part_l)
        else:
            for segment in tl.range(from_segment, to_segment, num_stages=1):
                b_part, b_part_m, b_part_l = _segment(
                    *(b_q, rows, pages, ranges, segment * SEGMENT, b_scale, softcap),
                    *(FLAGS, BLOCK_SIZE, HEAD_SIZE, BLOCK_D, BLOCK_N, SEGMENT),
                )
                b_acc, b_m, b_l = fold(b_acc, b_m, b_l, b_part, b_part_m, b_part_l)
        _, _, b_token, b_pair, m_row = locate_rows(tile, seq, cu_ptr, GROUP, BLOCK_M)
        b_head = kv_head * GROUP + b_pair % GROUP
        _store((b_acc, b_m, b_l), outs, b_token, b_head, m_row, v_factor, heads, HEAD_SIZE, BLOCK_D)
    else:
        to_segment = tl.minimum(to_segment, from_segment + slots)  # a wrong bound harms its own sequence alone
        for segment in tl.range(from_segment + tl.program_id(2), to_segment, tl.num_programs(2), num_stages=1):
            b_acc, b_m, b_l = _segment(
                *(b_q, rows, pages, ranges, segment * SEGMENT, b_scale, softcap),
                *(FLAGS, BLOCK_SIZE, HEAD_SIZE, BLOCK_D, BLOCK_N, SEGMENT),
            )
            _, _, b_token, b_pair, m_row = locate_rows(tile, seq, cu_ptr, GROUP, BLOCK_M)
            if to_segment - from_segment == 1:
                b_head = kv_head * GROUP + b_pair % GROUP
                b_start_m, b_start_l = start_softmax(sink_ptr, b_head, m_row, BLOCK_M)
                if sink_ptr is not None:
                    b_acc, b_m, b_l = fold(tl.zeros_like(b_acc), b_start_m, b_start_l, b_acc, b_m, b_l)
                _store((b_acc, b_m, b_l), outs, b_token, b_head, m_row, v_factor, heads, HEAD_SIZE, BLOCK_D)
            else:
                b_at = (seq.to(tl.int64) * slots + segment - from_segment) * kv_heads + kv_head
                _keep((part_ptr, sums_ptr), (b_acc, b_m, b_l), b_at * most_rows + b_pair, m_row, b_dim, HEAD_SIZE)


@triton.jit(do_not_specialize=["cu_ptr", "len_ptr", "window", "slots", "most_rows"])
def _fold_parts_kernel(
    part_ptr,
    sums_ptr,
    cu_ptr,
    len_ptr,
    out_ptr,
    lse_ptr,
    sink_ptr,
    v_scale_ptr,
    v_factor,
    window,
    slots,
    most_rows,
    stride_out_token,
    stride_out_head,
    GROUP: tl.constexpr,
    WINDOW: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    SEGMENT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: all rows of one sequence and one key/value head."""
    wait_for_previous(PDL)
    let_next_start(PDL)
    seq = tl.program_id(0)
    kv_head = tl.program_id(1)
    kv_heads = tl.num_programs(1)
    begin = tl.load(cu_ptr + seq)
    q_len = tl.load(cu_ptr + seq + 1) - begin
    seq_len = tl.load(len_ptr + seq)
    first = tl.maximum(seq_len - q_len - window + 1, 0) if WINDOW else 0
    count = tl.minimum(tl.cdiv(seq_len, SEGMENT) - first // SEGMENT, slots)
    if (count == 1) | (q_len == 0):  # the kernel before has written the result
        return
    b_pair = tl.arange(0, BLOCK_R)
    b_head = kv_head * GROUP + b_pair % GROUP
    b_dim = tl.arange(0, BLOCK_D)
    m_row = b_pair < q_len * GROUP
    b_m, b_l = start_softmax(sink_ptr, b_head, m_row, BLOCK_R)
    b_acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    AT_ONCE: tl.constexpr = max(1, min(8, 4096 // (BLOCK_R * BLOCK_D)))
    for start in tl.range(0, count, AT_ONCE, num_stages=1):
        parts: tl.tuple = ()
        for i in tl.static_range(AT_ONCE):  # all these loads wait together
            b_at = ((seq.to(tl.int64) * slots + start + i) * kv_heads + kv_head) * most_rows + b_pair
            m_there = m_row & (start + i < count)
            m_part = m_there[:, None] & (b_dim < HEAD_SIZE)[None, :]
            parts += (tl.load(part_ptr + b_at[:, None] * HEAD_SIZE + b_dim[None, :], mask=m_part, other=0.0),)
            parts += (tl.load(sums_ptr + b_at * 2, mask=m_there, other=LOWEST),)
            parts += (tl.load(sums_ptr + b_at * 2 + 1, mask=m_there, other=0.0),)
        for i in tl.static_range(AT_ONCE):
            b_acc, b_m, b_l = fold(b_acc, b_m, b_l, parts[3 * i], parts[3 * i + 1], parts[3 * i + 2])
    if v_scale_ptr is not None:
        v_factor *= tl.load(v_scale_ptr + kv_head)
    outs = (out_ptr, lse_ptr, stride_out_token, stride_out_head)
    b_token = begin.to(tl.int64) + b_pair // GROUP
    _store((b_acc, b_m, b_l), outs, b_token, b_head, m_row, v_factor, kv_heads * GROUP, HEAD_SIZE, BLOCK_D)


def launch(queries: Queries, pages: Pages, hints: Hints, args: AttentionArgs, config: tuning.Config) -> None:
    """Write ``args.out`` and ``args.lse``.

    Sequences of several segments are shared out if their rows fit in one tile. Prompts have tiles enough.
    """
    (q, cu_seqlens_q, max_seqlen_q, _, _), (k_cache, v_cache, block_tables, seq_lens) = queries, pages
    tokens, heads, head_size = q.shape
    batch, kv_heads = len(seq_lens), k_cache.shape[2]
    group, window = heads // kv_heads, args.window > 0
    block_d = triton.next_power_of_2(head_size)
    rows, slots = max_seqlen_q * group, triton.cdiv(hints.most_keys(pages), SEGMENT_KEYS)
    shared = slots > 1 and rows <= config["BLOCK_M"]
    order = hints.order if rows == group and group <= config["BLOCK_M"] else None
    tiles = batch if order is not None else tokens * group // config["BLOCK_M"] + batch
    grid = (tiles, kv_heads, max(1, min(slots, _PROGRAMS // (tiles * kv_heads))) if shared else 1)
    part = sums = None
    if shared:
        part = torch.empty(batch, slots, kv_heads, rows, head_size, dtype=torch.float32, device=q.device)
        sums = torch.empty(batch, slots, kv_heads, rows, 2, dtype=torch.float32, device=q.device)
    _segments_kernel[grid](
        *(q, k_cache, v_cache, block_tables, cu_seqlens_q, seq_lens, order, args.out, args.lse),
        *(args.sinks, args.alibi_slopes, args.k_scale, args.v_scale, part, sums, args.scale, args.v_factor),
        *(args.window, args.softcap, batch, slots, rows),
        *(*q.stride()[:2], *pages.strides, *args.out.stride()[:2]),
        GROUP=group,
        WINDOW=window,
        SOFTCAP=args.softcap > 0,
        BLOCK_SIZE=k_cache.shape[1],
        HEAD_SIZE=head_size,
        BLOCK_D=block_d,
        SEGMENT=SEGMENT_KEYS,
        ONE=slots <= 1,
        **config,
        # not by the size of a prompt: what is compiled must not change between the sizes that warm-up steps have
        **dependent_launch(q.device, batch * kv_heads if rows <= config["BLOCK_M"] else 0),
    )
    if shared:
        _fold_parts_kernel[(batch, kv_heads)](
            *(part, sums, cu_seqlens_q, seq_lens, args.out, args.lse, args.sinks, args.v_scale, args.v_factor),
            *(args.window, slots, rows, *args.out.stride()[:2]),
            GROUP=group,
            WINDOW=window,
            HEAD_SIZE=head_size,
            BLOCK_D=block_d,
            BLOCK_R=triton.next_power_of_2(group) if max_seqlen_q == 1 else config["BLOCK_M"],
            SEGMENT=SEGMENT_KEYS,
            **dependent_launch(q.device, batch * kv_heads),
        )

"""Prefill attention for any GPU. Tiled as in FlashAttention-2 (Dao, 2023).

The rows of a tile are (token, query head) pairs of one key/value head: the heads that share keys load them once, and a
tile spans few tokens, so little of the causal diagonal is computed in vain.
"""

import triton
import triton.language as tl

from tritonllm.kernels.attention.arguments import AttentionArgs, Pages, Queries
from tritonllm.kernels.attention.common import (
    LN2,
    attend,
    finish_softmax,
    load_head_factors,
    row_offsets,
    start_softmax,
)
from tritonllm.kernels.attention.schedule import find_prefill_sequence, prefill_key_ranges
from tritonllm.kernels.runtime import tuning
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


# Arguments whose values and alignment change from step to step: one compilation serves them all.
@triton.jit(do_not_specialize=["table_ptr", "cu_ptr", "len_ptr", "window", "batch", "stride_table"])
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
    scale,
    v_factor,
    window,
    softcap,
    batch,
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
    PDL: tl.constexpr,
):
    """One program: BLOCK_M (token, query head) pairs of one key/value head and one sequence."""
    wait_for_previous(PDL)
    let_next_start(PDL)
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
    b_dim = tl.arange(0, BLOCK_D)
    m_out = m_row[:, None] & (b_dim < HEAD_SIZE)[None, :]
    p_q = q_ptr + row_offsets(b_token, b_head, stride_q_token, stride_q_head)[:, None] + b_dim[None, :]
    b_q = tl.load(p_q, mask=m_out, other=0.0)
    scale, v_factor, b_slope = load_head_factors(
        *(scale, v_factor, slope_ptr, k_scale_ptr, v_scale_ptr, kv_head, b_head, m_row), BLOCK_M=BLOCK_M
    )
    b_m, b_l = start_softmax(sink_ptr, b_head, m_row, BLOCK_M)
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    pos_lo = cached + first_pair // GROUP
    pos_hi = cached + tl.minimum((first_pair + BLOCK_M - 1) // GROUP, q_len - 1)
    lo, whole_lo, whole_hi, hi = prefill_key_ranges(pos_lo, pos_hi, seq_len, window, CAUSAL, WINDOW, BLOCK_N)
    first = tl.maximum(pos_lo - window + 1, 0) if WINDOW else 0
    if CAUSAL:
        b_end = b_pos + 1
    elif WINDOW:
        b_end = tl.minimum(b_pos + tl.minimum(window, seq_len), seq_len)
    else:
        b_end = tl.zeros([BLOCK_M], tl.int32) + seq_len
    for part in tl.static_range(0 if WINDOW else 1, 3):
        if part == 0:
            part_lo, part_hi = lo, whole_lo
        elif part == 1:
            part_lo, part_hi = whole_lo, whole_hi
        else:
            part_lo, part_hi = whole_hi, hi
        b_acc, b_m, b_l = attend(
            *(b_acc, b_m, b_l, b_q, b_pos - window + 1, b_end, b_pos, b_slope),
            k_ptr + kv_head.to(tl.int64) * stride_k_head,
            v_ptr + kv_head.to(tl.int64) * stride_v_head,
            table_ptr + seq.to(tl.int64) * stride_table,
            *(part_lo, part_hi, first, scale, softcap),
            *(stride_k_block, stride_k_slot, stride_v_block, stride_v_slot),
            MASKED=part != 1,
            WINDOW=WINDOW,
            SOFTCAP=SOFTCAP,
            ALIBI=slope_ptr is not None,
            BLOCK_SIZE=BLOCK_SIZE,
            HEAD_SIZE=HEAD_SIZE,
            BLOCK_D=BLOCK_D,
            BLOCK_N=BLOCK_N,
        )

    b_out, b_lse = finish_softmax(b_acc, b_m, b_l)
    _, _, b_token, b_pair, m_row = locate_rows(tile, seq, cu_ptr, GROUP, BLOCK_M)
    b_head = kv_head * GROUP + b_pair % GROUP
    m_out = m_row[:, None] & (b_dim < HEAD_SIZE)[None, :]
    p_out = out_ptr + row_offsets(b_token, b_head, stride_out_token, stride_out_head)[:, None] + b_dim[None, :]
    tl.store(p_out, (b_out * v_factor).to(out_ptr.dtype.element_ty), mask=m_out)
    if lse_ptr is not None:
        heads = tl.num_programs(1) * GROUP
        tl.store(lse_ptr + b_token * heads + b_head, b_lse * LN2, mask=m_row)


def launch(queries: Queries, pages: Pages, args: AttentionArgs, config: tuning.Config) -> None:
    """Write ``args.out`` and ``args.lse``."""
    (q, cu_seqlens_q, _, causal, _), (k_cache, v_cache, block_tables, seq_lens) = queries, pages
    tokens, heads, head_size = q.shape
    batch, kv_heads = len(seq_lens), k_cache.shape[2]
    group = heads // kv_heads
    strides = (
        *q.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        block_tables.stride(0),
        *args.out.stride()[:2],
    )
    grid = (tokens * group // config["BLOCK_M"] + batch, kv_heads)
    _prefill_kernel[grid](
        *(q, k_cache, v_cache, block_tables, cu_seqlens_q, seq_lens, args.out, args.lse),
        *(args.sinks, args.alibi_slopes, args.k_scale, args.v_scale, args.scale, args.v_factor),
        *(args.window, args.softcap, batch, *strides),
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

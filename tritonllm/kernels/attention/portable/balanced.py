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
from tritonllm.kernels.attention.common import (
    LN2,
    LOG2E,
    finish_softmax,
    load_head_factors,
    load_rows,
    row_offsets,
    soft_cap,
    start_softmax,
)
from tritonllm.kernels.attention.schedule import count_tiles, cut, describe_sequence, divide, find_sequence, merge_parts
from tritonllm.kernels.runtime import tuning


@triton.jit
def _read_instead(start, first, last, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Keys [start, start + BLOCK_N), but a seen key in the place of each that no row sees: to load it needs no mask."""
    b_key = tl.minimum(start + tl.arange(0, BLOCK_N), last)
    if WINDOW:
        b_key = tl.maximum(b_key, first)
    return b_key


@triton.jit
def _block_ids(
    p_table, start, first, last, m_tile, WINDOW: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The blocks of the keys of a tile: one number if they share it, else one for each.

    ``m_tile`` is False where there is nothing to read at all, None where there surely is.
    """
    if BLOCK_SIZE % BLOCK_N == 0:
        b_block = tl.load(p_table + tl.minimum(start, last) // BLOCK_SIZE, mask=m_tile)
    else:
        b_key = _read_instead(start, first, last, WINDOW, BLOCK_N)
        b_block = tl.load(p_table + b_key // BLOCK_SIZE, mask=m_tile)
    return b_block


@triton.jit
def _load_tile(p_rows, BLOCK_D: tl.constexpr, HEAD_SIZE: tl.constexpr):
    b_dim = tl.arange(0, BLOCK_D)
    return load_rows(p_rows[:, None] + b_dim[None, :], None, b_dim < HEAD_SIZE, False, BLOCK_D != HEAD_SIZE)


@triton.jit
def _only(a, b):
    return a


@triton.jit
def _convert_before_transposing(b_x, DTYPE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """A float8 tile in the dtype of the product that it is the right operand of.

    The compiler would transpose it for the product as float8, byte by byte (64 loads of one byte from shared memory for
    each thread and tile of 64 x 128, of 730 instructions), and convert then. It does not move a conversion across a
    reduction, so here is one over an axis of size 1: with it the loop has 440 instructions.
    """
    return tl.reduce(tl.reshape(b_x.to(DTYPE), [BLOCK_N, BLOCK_D, 1]), 2, _only)


@triton.jit
def _attend(
    b_q,  # [M, D]
    b_m,  # [M] maximum of the logits so far, base 2
    b_begin,  # [M] each row sees keys from b_begin (WINDOW only) up to b_end
    b_end,
    b_pos,  # [M] position of each row's query
    b_tree,  # [M] which of the sequence's new tokens each row sees, as bits (TREE only)
    b_scale,  # [M] factor of the logits
    b_slope,  # [M] ALiBi slope, base 2
    p_k,  # the head's first key and value in block 0
    p_v,
    p_table,  # the sequence's block ids
    lo,  # keys [lo, hi); lo is a multiple of BLOCK_N
    hi,
    first,  # no row sees a key before this one
    cached,  # keys before the sequence's new tokens
    softcap,
    stride_k_block,
    stride_k_slot,
    stride_v_block,
    stride_v_slot,
    ROWS_DIFFER: tl.constexpr,  # False: every row sees the keys from first up to hi
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    TREE: tl.constexpr,
    SAME_STRIDES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Attend to keys [lo, hi): the values weighted, the maximum and the sum of weights, as in the online softmax."""
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # To add up a row is work for several warps together if the tile is low: then each column keeps a sum until the end.
    SUMS: tl.constexpr = BLOCK_N if BLOCK_M == 16 and b_q.dtype != tl.float32 else 1
    b_l = tl.zeros([BLOCK_M, SUMS], tl.float32)
    SCALED: tl.constexpr = b_q.dtype == tl.float32 and not SOFTCAP and not ALIBI  # see common.attend
    if SCALED:
        b_q *= (b_scale * LOG2E)[:, None]
    last = hi - 1
    # A tile's block ids are loaded one tile ahead: were they loaded with it, the compiler's pipeline would hold them in
    # shared memory and start the key loads a stage later.
    b_next_block = _block_ids(p_table, lo, first, last, lo < hi, WINDOW, BLOCK_SIZE, BLOCK_N)
    for start in tl.range(lo, hi, BLOCK_N):
        b_block = b_next_block.to(tl.int64)
        b_next_block = _block_ids(p_table, start + BLOCK_N, first, last, None, WINDOW, BLOCK_SIZE, BLOCK_N)
        b_slot = _read_instead(start, first, last, WINDOW, BLOCK_N) % BLOCK_SIZE
        b_at = b_block * stride_k_block + b_slot.to(tl.int64) * stride_k_slot
        b_k = _load_tile(p_k + b_at, BLOCK_D, HEAD_SIZE).to(b_q.dtype)
        if not SAME_STRIDES:
            b_at = b_block * stride_v_block + b_slot.to(tl.int64) * stride_v_slot
        b_v = _load_tile(p_v + b_at, BLOCK_D, HEAD_SIZE)
        if b_v.dtype == tl.float8e4nv:
            b_v = _convert_before_transposing(b_v, b_q.dtype, BLOCK_N, BLOCK_D)
        b_key = start + tl.arange(0, BLOCK_N)

        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")  # [M, N]
        if SOFTCAP:
            b_s = soft_cap(b_s * (b_scale * LOG2E)[:, None], softcap * LOG2E)
        elif ALIBI:
            b_s = b_s * (b_scale * LOG2E)[:, None]
        if ALIBI:
            b_s += b_slope[:, None] * (b_key[None, :] - b_pos[:, None]).to(tl.float32)
        m_s = (b_key < hi)[None, :]
        if ROWS_DIFFER:
            m_s = b_key[None, :] < b_end[:, None]
            if TREE:
                b_new = tl.maximum(b_key - cached, 0)
                m_s = m_s & ((b_key < cached)[None, :] | ((b_tree[:, None] >> tl.minimum(b_new, 31)[None, :]) & 1 != 0))
        if WINDOW:
            m_s = m_s & (b_key[None, :] >= b_begin[:, None])
        b_s = tl.where(m_s, b_s, float("-inf"))
        if SOFTCAP or ALIBI or SCALED:
            b_m_new = tl.maximum(b_m, tl.max(b_s, 1))
            b_p = tl.exp2(b_s - b_m_new[:, None])
        else:  # the scale becomes part of the multiply-add before exp2
            b_m_new = tl.maximum(b_m, tl.max(b_s, 1) * (b_scale * LOG2E))
            b_p = tl.exp2(b_s * (b_scale * LOG2E)[:, None] - b_m_new[:, None])
        b_alpha = tl.exp2(b_m - b_m_new)[:, None]
        b_l = b_l * b_alpha + (b_p if SUMS > 1 else tl.sum(b_p, 1, keep_dims=True))
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_alpha, input_precision="ieee")
        b_m = b_m_new
    return b_acc, b_m, tl.sum(b_l, 1)


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


@triton.jit
def _store(
    out_ptr,
    lse_ptr,
    b_out,
    b_lse,
    out_scale,
    b_token,
    b_head,
    m_row,
    heads,
    stride_token,
    stride_head,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    b_dim = tl.arange(0, BLOCK_D)
    p_out = out_ptr + row_offsets(b_token, b_head, stride_token, stride_head)[:, None] + b_dim[None, :]
    m_out = m_row[:, None] & (b_dim < HEAD_SIZE)[None, :]
    tl.store(p_out, (b_out * out_scale).to(out_ptr.dtype.element_ty), mask=m_out)
    if lse_ptr is not None:
        tl.store(lse_ptr + b_token * heads + b_head, b_lse * LN2, mask=m_row)


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
            m_out = m_row[:, None] & (b_dim < HEAD_SIZE)[None, :]
            p_q = q_ptr + row_offsets(b_token, b_head, stride_q_token, stride_q_head)[:, None] + b_dim[None, :]
            b_q = tl.load(p_q, mask=m_out, other=0.0)
            logit_scale, out_scale, b_slope = load_head_factors(
                *(scale, v_factor, slope_ptr, k_scale_ptr, v_scale_ptr, kv_head, b_head, m_row), BLOCK_M=BLOCK_M
            )
            b_scale = tl.zeros([BLOCK_M], tl.float32) + logit_scale
            if k_ptr.dtype.element_ty == tl.float8e4nv and b_q.dtype != tl.float32:
                # float16 holds every float8, and the conversion is one instruction for two; queries fit after division.
                b_peak = tl.max(tl.abs(b_q.to(tl.float32)), 1)
                b_peak = tl.where(b_peak > 0, b_peak, 1.0)
                b_q = (b_q.to(tl.float32) / b_peak[:, None]).to(tl.float16)
                b_scale *= b_peak
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
            b_acc, b_m_new, b_l = _attend(
                *(b_q, b_m, b_pos + 1 - window, b_end, b_pos, b_tree, b_scale, b_slope),
                k_ptr + kv_head.to(tl.int64) * stride_k_head,
                v_ptr + kv_head.to(tl.int64) * stride_v_head,
                table_ptr + seq.to(tl.int64) * stride_table,
                *(lo + part_lo * BLOCK_N, tl.minimum(lo + part_hi * BLOCK_N, seq_len), first, cached, softcap),
                *(stride_k_block, stride_k_slot, stride_v_block, stride_v_slot),
                ROWS_DIFFER=cu_ptr is not None,
                WINDOW=WINDOW,
                SOFTCAP=SOFTCAP,
                ALIBI=slope_ptr is not None,
                TREE=tree_ptr is not None,
                SAME_STRIDES=SAME_STRIDES,
                BLOCK_SIZE=BLOCK_SIZE,
                HEAD_SIZE=HEAD_SIZE,
                BLOCK_M=BLOCK_M,
                BLOCK_N=BLOCK_N,
                BLOCK_D=BLOCK_D,
            )
            b_out, b_lse = finish_softmax(b_acc, b_m_new, b_l + b_sum * tl.exp2(b_m - b_m_new))
            heads = kv_heads * GROUP
            if part_hi - part_lo == tiles:
                b_token, b_head, _, m_row = _rows(head, row_tiles, seq, cu_ptr, GROUP, BLOCK_M, BLOCK_M)
                _store(
                    *(out_ptr, lse_ptr, b_out, b_lse, out_scale, b_token, b_head, m_row, heads),
                    *(stride_out_token, stride_out_head, HEAD_SIZE, BLOCK_D),
                )
            else:
                b_slot = (tl.program_id(0) * 2 + (part_lo == 0).to(tl.int32)) * BLOCK_M + tl.arange(0, BLOCK_M)
                m_store = tl.arange(0, BLOCK_M) < ROWS
                p_part = part_ptr + b_slot.to(tl.int64)[:, None] * HEAD_SIZE + b_dim[None, :]
                tl.store(p_part, b_out, mask=m_store[:, None] & (b_dim < HEAD_SIZE)[None, :])
                tl.store(part_lse_ptr + b_slot, b_lse, mask=m_store)
                p_count = count_ptr + pair // share
                tl.debug_barrier()  # every thread has stored its share of the part before one counts it
                if tl.atomic_add(p_count, part_hi - part_lo) + part_hi - part_lo == tiles:
                    tl.store(p_count, 0)
                    b_row_token, b_row_head, _, m_some = _rows(head, row_tiles, seq, cu_ptr, GROUP, BLOCK_M, ROWS)
                    b_all, b_all_lse = merge_parts(
                        *(part_ptr, part_lse_ptr, pair, tiles, share, unit),
                        *(tl.arange(0, ROWS), m_some, b_dim, HEAD_SIZE, BLOCK_M),
                    )
                    _store(
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
    strides = (
        *q.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        block_tables.stride(0),
        *args.out.stride()[:2],
    )
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

"""What a program of :mod:`tritonllm.kernels.attention.portable.few` computes: part of a sequence's keys, the newest, a
merge.

The products are transposed: their rows are keys and dimensions, of which there are enough, their columns queries, of
which eight do. So a part's output takes few registers. Programs have one or two warps: with four, waiting for each
other some thirty times (reductions, operands that change places) takes longer than the work that is saved.
"""

import triton
import triton.language as tl

from tritonllm.kernels.attention.common import LOG2E, soft_cap, softmax_divisor, start_softmax
from tritonllm.kernels.attention.kv_cache import inverse_scale, saturate
from tritonllm.kernels.attention.portable.projection import load_norm, load_turns, prepare_new_heads
from tritonllm.kernels.attention.portable.tile import (
    convert_where_loaded,
    fit_queries,
    load_block_ids,
    load_head_factors,
    load_rows,
    to_logits,
    to_weights,
)
from tritonllm.kernels.runtime.dependent_launch import wait_for_previous


@triton.jit
def _load_pages(p_k, p_v, b_block, b_key, m_key, b_dim, strides, BLOCK_SIZE: tl.constexpr, HEAD_SIZE: tl.constexpr):
    """Keys and values ``[N, D]``; None for ``m_key``: all are there."""
    MASKED: tl.constexpr = m_key is not None
    MASK_D: tl.constexpr = b_dim.shape[0] != HEAD_SIZE
    b_slot = b_key % BLOCK_SIZE
    p_key = p_k + (b_block * strides[0] + b_slot.to(tl.int64) * strides[1])[:, None] + b_dim[None, :]
    p_value = p_v + (b_block * strides[2] + b_slot.to(tl.int64) * strides[3])[:, None] + b_dim[None, :]
    b_k = load_rows(p_key, m_key, b_dim < HEAD_SIZE, MASKED, MASK_D)
    return b_k, load_rows(p_value, m_key, b_dim < HEAD_SIZE, MASKED, MASK_D)


@triton.jit
def _weigh(b_acc, b_m, b_l, b_s, b_v, m_key, b_distance, b_slope, b_scale, softcap, SCALED: tl.constexpr,
           SOFTCAP: tl.constexpr, ALIBI: tl.constexpr):  # fmt: skip
    """Add the values ``[N, D]`` of a tile by the weights of its logits ``[N, C]``: the new (b_acc, b_m, b_l)."""
    b_factor = b_scale
    if len(b_scale.shape) == 1:
        b_factor = b_scale[None, :]
    b_s = to_logits(b_s, b_factor, softcap, b_slope[None, :], b_distance[:, None], 0, SOFTCAP, ALIBI)
    b_s = tl.where(m_key[:, None], b_s, float("-inf"))
    b_p, b_m, b_alpha = to_weights(b_s, b_m, b_factor, b_scale, 0, SOFTCAP or ALIBI or SCALED)
    b_l = b_l * b_alpha + tl.sum(b_p, 0)
    b_acc = tl.dot(tl.trans(b_v), b_p.to(b_v.dtype), b_acc * b_alpha[None, :], input_precision="ieee")
    return b_acc, b_m, b_l


@triton.jit
def attend_to_part(
    seq_len,
    part,
    lo,  # keys [lo, hi), lo is a multiple of BLOCK_N
    hi,
    first,  # no key before this one is seen
    row,  # the first of the tile's rows
    kv_head,
    places,
    strides,
    numbers,
    q_weight_ptr,
    sink_ptr,
    slope_ptr,
    k_scale_ptr,
    v_scale_ptr,
    FLAGS: tl.constexpr,
    SHAPE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """``(out [D, C], logarithm of the denominator [C], row [C])``; columns beyond ROWS repeat others."""
    p_q, stride_q_head, p_k, p_v, p_table, p_angles = places
    scale, softcap, eps, weight_offset, v_factor = numbers
    WAIT: tl.constexpr = FLAGS[0]
    HALF: tl.constexpr = FLAGS[2]
    PAIRS: tl.constexpr = FLAGS[3]
    GROUP: tl.constexpr = SHAPE[0]
    BLOCK_SIZE: tl.constexpr = SHAPE[2]
    HEAD_SIZE: tl.constexpr = SHAPE[3]
    BLOCK_D: tl.constexpr = SHAPE[4]
    b_dim = tl.arange(0, BLOCK_D)
    # The last tile before waiting for the kernel before this one, the others later.
    start = tl.maximum((hi - 1) // BLOCK_N * BLOCK_N, lo)
    b_key = start + tl.arange(0, BLOCK_N)
    m_key = (b_key >= first) & (b_key < hi)
    b_block = load_block_ids(p_table, start, hi, BLOCK_SIZE, BLOCK_N).to(tl.int64)
    b_k, b_v = _load_pages(p_k, p_v, b_block, b_key, m_key, b_dim, strides, BLOCK_SIZE, HEAD_SIZE)

    b_new = row + tl.arange(0, ROWS)
    m_new = (b_new < GROUP)[:, None]
    b_new_head = (kv_head * GROUP + b_new)[:, None]
    if FLAGS[1]:
        turns = load_turns(p_angles + b_new[:, None] * 0, b_dim[None, :], HALF, PAIRS)
        norm = turns
        if q_weight_ptr is not None:
            p_weight = q_weight_ptr + b_new_head * (HEAD_SIZE if FLAGS[4] else 0)
            norm = load_norm(p_weight, m_new, b_dim[None, :], HALF, PAIRS, HEAD_SIZE)
        wait_for_previous(WAIT)
        b_q = prepare_new_heads(
            *(p_q + b_new_head * HEAD_SIZE, m_new, turns, norm, b_dim[None, :], eps, weight_offset),
            *(q_weight_ptr is not None, HALF, PAIRS, HEAD_SIZE),
        ).to(p_q.dtype.element_ty)
    else:
        wait_for_previous(WAIT)
        p_rows = p_q + b_new_head.to(tl.int64) * stride_q_head + b_dim[None, :]
        b_q = tl.load(p_rows, mask=m_new & (b_dim < HEAD_SIZE)[None, :], other=0.0)
    # Products have eight columns or more: the rows once more.
    b_q = tl.broadcast_to(b_q[None, :, :], [COLUMNS // ROWS, ROWS, BLOCK_D])
    b_q = tl.reshape(b_q, [COLUMNS, BLOCK_D])
    b_row = row + tl.arange(0, COLUMNS) % ROWS
    m_row = b_row < GROUP
    b_head = kv_head * GROUP + b_row
    scale, v_factor, b_slope = load_head_factors(
        *(scale, v_factor, slope_ptr, k_scale_ptr, v_scale_ptr, kv_head, b_head, m_row), BLOCK_M=COLUMNS
    )
    b_q, b_scale = fit_queries(b_q, scale, p_k)
    b_q = tl.trans(b_q)
    b_m, b_l = start_softmax(sink_ptr, b_head, m_row & (part == 0), COLUMNS)  # a sink counts once
    b_acc = tl.zeros([BLOCK_D, COLUMNS], tl.float32)
    SCALED: tl.constexpr = b_q.dtype == tl.float32 and not FLAGS[6] and slope_ptr is None  # see tile.attend
    if SCALED:
        b_q *= b_scale * LOG2E
    b_s = tl.dot(convert_where_loaded(b_k, b_q.dtype), b_q, input_precision="ieee")  # [N, C]
    rest = (b_scale, softcap, SCALED, FLAGS[6], slope_ptr is not None)
    b_far = b_key - (seq_len - 1)
    b_values = convert_where_loaded(b_v, b_q.dtype)
    b_acc, b_m, b_l = _weigh(b_acc, b_m, b_l, b_s, b_values, m_key, b_far, b_slope, *rest)
    if lo < start:
        b_next_block = load_block_ids(p_table, lo, start, BLOCK_SIZE, BLOCK_N)
        for tile in tl.range(lo, start, BLOCK_N):
            b_block = b_next_block.to(tl.int64)
            b_next_block = load_block_ids(p_table, tile + BLOCK_N, start, BLOCK_SIZE, BLOCK_N)
            b_key = tile + tl.arange(0, BLOCK_N)
            m_key = b_key >= first
            b_k, b_v = _load_pages(
                *(p_k, p_v, b_block, b_key, m_key if FLAGS[5] else None, b_dim, strides, BLOCK_SIZE, HEAD_SIZE)
            )
            b_s = tl.dot(convert_where_loaded(b_k, b_q.dtype), b_q, input_precision="ieee")
            b_far = b_key - (seq_len - 1)
            b_values = convert_where_loaded(b_v, b_q.dtype)
            b_acc, b_m, b_l = _weigh(b_acc, b_m, b_l, b_s, b_values, m_key, b_far, b_slope, *rest)
    b_divisor, b_lse = softmax_divisor(b_m, b_l)
    return b_acc * (v_factor / b_divisor)[None, :], b_lse, b_row


@triton.jit
def attend_to_newest(
    seq_len,
    part,
    row,
    kv_head,
    slot,  # where the newest key and value go (FUSED)
    places,
    strides,
    numbers,
    k_inverse,
    v_inverse,
    q_weight_ptr,
    k_weight_ptr,
    sink_ptr,
    k_scale_ptr,
    v_scale_ptr,
    p_part,
    p_part_lse,
    FLAGS: tl.constexpr,
    SHAPE: tl.constexpr,
    SCALED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The part of the newest key: its value, and its logits as the logarithm of the denominator. Stores it."""
    p_q, stride_q_head, p_k, p_v, p_table, p_angles = places
    scale, softcap, eps, weight_offset, v_factor = numbers
    WAIT: tl.constexpr = FLAGS[0]
    FUSED: tl.constexpr = FLAGS[1]
    HALF: tl.constexpr = FLAGS[2]
    PAIRS: tl.constexpr = FLAGS[3]
    GROUP: tl.constexpr = SHAPE[0]
    KV_HEADS: tl.constexpr = SHAPE[1]
    BLOCK_SIZE: tl.constexpr = SHAPE[2]
    HEAD_SIZE: tl.constexpr = SHAPE[3]
    R: tl.constexpr = triton.next_power_of_2(ROWS + 1) if FUSED else ROWS
    NORM: tl.constexpr = q_weight_ptr is not None
    b_dim = tl.arange(0, SHAPE[4])[None, :]
    m_dim = b_dim < HEAD_SIZE
    b_at = tl.arange(0, R)[:, None]
    b_new = row + b_at
    m_query = (b_at < ROWS) & (b_new < GROUP)
    if FUSED:
        m_key = b_at == ROWS  # the newest key takes a row beside the queries
        b_some_head = tl.where(m_query, kv_head * GROUP + b_new, KV_HEADS * GROUP + kv_head)
        turns = load_turns(p_angles + b_new * 0, b_dim, HALF, PAIRS)
        norm = turns
        if NORM:
            p_q_weight = q_weight_ptr + (kv_head * GROUP + b_new) * (HEAD_SIZE if FLAGS[4] else 0)
            p_k_weight = k_weight_ptr + (b_new * 0 + kv_head) * (HEAD_SIZE if FLAGS[4] else 0)
            b_wq, b_wq_mate = load_norm(p_q_weight, m_query, b_dim, HALF, PAIRS, HEAD_SIZE)
            b_wk, b_wk_mate = load_norm(p_k_weight, m_key, b_dim, HALF, PAIRS, HEAD_SIZE)
            norm = (b_wq + b_wk, b_wq_mate + b_wk_mate)
        if SCALED:
            k_inverse = inverse_scale(k_scale_ptr, k_inverse, kv_head, kv_head >= 0)
            v_inverse = inverse_scale(v_scale_ptr, v_inverse, kv_head, kv_head >= 0)
        wait_for_previous(WAIT)
        p_value = p_q + (KV_HEADS * (GROUP + 1) + kv_head) * HEAD_SIZE + b_new * 0 + b_dim
        b_v = tl.load(p_value, mask=m_dim, other=0.0)  # once for each row, so that nothing has to move
        b_x = prepare_new_heads(
            *(p_q + b_some_head * HEAD_SIZE, m_query | m_key, turns, norm, b_dim, eps, weight_offset),
            *(NORM, HALF, PAIRS, HEAD_SIZE),
        )
        b_q = b_x
        if SCALED:
            b_x = saturate(b_x * k_inverse, p_k.dtype.element_ty)
            b_v = saturate(b_v.to(tl.float32) * v_inverse, p_v.dtype.element_ty)
        b_x = b_x.to(p_k.dtype.element_ty)
        b_v = b_v.to(p_v.dtype.element_ty)
        block = slot // BLOCK_SIZE
        at = slot % BLOCK_SIZE
        p_slot = b_new * 0 + b_dim
        m_store = m_key & m_dim & (slot >= 0) & (row == 0)  # once for all heads of the group
        tl.store(p_k + block * strides[0] + at * strides[1] + p_slot, b_x, mask=m_store)
        tl.store(p_v + block * strides[2] + at * strides[3] + p_slot, b_v, mask=m_store)
        b_k = tl.sum(tl.where(m_key, b_x.to(tl.float32), 0.0), 0, keep_dims=True)
    else:
        newest = tl.maximum(seq_len - 1, 0)
        m_any = seq_len > 0
        block = tl.load(p_table + newest // BLOCK_SIZE, mask=m_any, other=0).to(tl.int64)
        at = (newest % BLOCK_SIZE).to(tl.int64)
        wait_for_previous(WAIT)
        p_rows = p_q + (kv_head * GROUP + b_new).to(tl.int64) * stride_q_head + b_dim
        b_q = tl.load(p_rows, mask=m_query & m_dim, other=0.0).to(tl.float32)
        p_key = p_k + block * strides[0] + at * strides[1] + b_new * 0 + b_dim
        p_value = p_v + block * strides[2] + at * strides[3] + b_new * 0 + b_dim
        b_k = tl.load(p_key, mask=m_dim & m_any, other=0.0).to(tl.float32)
        b_v = tl.load(p_value, mask=m_dim & m_any, other=0.0)
    b_row = row + tl.arange(0, R)
    b_head = kv_head * GROUP + b_row
    m_row = b_row < GROUP
    scale, v_factor, _b_slope = load_head_factors(
        *(scale, v_factor, None, k_scale_ptr, v_scale_ptr, kv_head, b_head, m_row), BLOCK_M=R
    )
    b_s = tl.sum(b_q * b_k, 1) * scale
    if FLAGS[6]:
        b_s = soft_cap(b_s, softcap)
    b_s = tl.where(seq_len > 0, b_s * LOG2E, float("-inf"))
    b_m, b_l = start_softmax(sink_ptr, b_head, m_row & (part == 0), R)
    b_m_new = tl.maximum(b_m, b_s)
    b_p = tl.exp2(b_s - b_m_new)
    b_l = b_l * tl.exp2(b_m - b_m_new) + b_p
    b_divisor, b_lse = softmax_divisor(b_m_new, b_l)
    b_out = b_v.to(tl.float32) * (b_p * v_factor / b_divisor)[:, None]
    b_place = part * ROWS + tl.arange(0, R)
    m_part = tl.arange(0, R) < ROWS
    tl.store(p_part + b_place[:, None] * HEAD_SIZE + b_dim, b_out, mask=m_part[:, None] & m_dim)
    tl.store(p_part_lse + b_place, b_lse, mask=m_part)

"""Attention of up to eight queries to part of a sequence's keys, by four warps of a Hopper program, each on its own.

A warp takes a quarter of a tile's keys and has maxima, sums and outputs of its own, so that warps exchange nothing
until a part ends; then the four results become one. (What four warps compute together, as in
:mod:`tritonllm.kernels.attention.sm90.part`, they must stop for five times a tile.) The products are those of single
warps, batched: ``[4, ...]``, a warp to each. They are transposed: rows are keys and dimensions, columns queries, of
which eight do. A float8 tile is converted in the registers that it is loaded into. In Gluon.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tritonllm.kernels.attention.common import LOG2E, LOWEST, row_offsets, soft_cap
from tritonllm.kernels.attention.sm90.pairs import count_part, describe_rows, merge_warps, rows_of_pair, store_rows
from tritonllm.kernels.attention.sm90.tiles import float8_of
from tritonllm.kernels.attention.sm90.tiles_apart import (
    clear_stale_values,
    dims_in_order,
    keys_operand,
    queries_layout,
    queries_operand,
    values_operand,
    weights_operand,
)


@gluon.jit
def _softmax(b_s, b_key, b_m, b_l, rows, seq_len, cached, softcap, FLAGS: gl.constexpr):
    """The weights of a tile ``[4, N, C]``, the new maxima, each key's sum of weights, and what was summed before's
    factor.

    FLAGS: (rows see different keys, window, softcap, ALiBi, tree).
    """
    b_begin, b_end, b_pos, b_tree, b_slope, b_scale = rows
    if FLAGS[2]:
        b_s = soft_cap(b_s * (b_scale * LOG2E)[:, None, :], softcap * LOG2E)
    elif FLAGS[3]:
        b_s = b_s * (b_scale * LOG2E)[:, None, :]
    if FLAGS[3]:
        b_s += b_slope[:, None, :] * (b_key[:, :, None] - b_pos[:, None, :]).to(gl.float32)
    m_s = (b_key < seq_len)[:, :, None]
    if FLAGS[0]:
        m_s = b_key[:, :, None] < b_end[:, None, :]
        if FLAGS[4]:
            b_new = gl.minimum(gl.maximum(b_key - cached, 0), 31)
            m_s = m_s & ((b_key < cached)[:, :, None] | ((b_tree[:, None, :] >> b_new[:, :, None]) & 1 != 0))
    if FLAGS[1]:
        m_s = m_s & (b_key[:, :, None] >= b_begin[:, None, :])
    b_s = gl.where(m_s, b_s, float("-inf"))
    if FLAGS[2] or FLAGS[3]:
        b_m_new = gl.maximum(b_m, gl.max(b_s, 1))
        b_p = gl.exp2(b_s - b_m_new[:, None, :])
    else:  # the scale becomes part of the multiply-add before exp2
        b_m_new = gl.maximum(b_m, gl.max(b_s, 1) * (b_scale * LOG2E))
        b_p = gl.exp2(b_s * (b_scale * LOG2E)[:, None, :] - b_m_new[:, None, :])
    b_alpha = gl.exp2(b_m - b_m_new)
    return b_p, b_m_new, b_l * b_alpha[:, None, :] + b_p, b_alpha


@gluon.jit
def _attend(tiles, sequence, rows, b_q, b_m, count, pipe, softcap, FLAGS: gl.constexpr,
            BLOCK_SIZE: gl.constexpr, mma: gl.constexpr):  # fmt: skip
    """Attend to some tiles: each warp's values weighted ``[4, D, C]``, maxima and sums ``[4, C]``, the new count."""
    first, seq_len, cached = sequence
    k_smem, v_smem, full, empty = pipe
    STAGES: gl.constexpr = k_smem.shape[0]
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    KEYS: gl.constexpr = BLOCK_N // 4
    HEAD_SIZE: gl.constexpr = k_smem.shape[2]
    COLUMNS: gl.constexpr = b_q.shape[2]
    near: gl.constexpr = gl.SliceLayout(2, mma)
    b_near = gl.arange(0, 4, gl.SliceLayout(1, near))[:, None] * KEYS
    b_near += gl.arange(0, KEYS, gl.SliceLayout(0, near))[None, :]
    b_o = gl.zeros([4, HEAD_SIZE, COLUMNS], gl.float32, mma)
    b_l = gl.zeros([4, KEYS, COLUMNS], gl.float32, mma)
    for tile in range(tiles[0], tiles[1]):
        stage = count % STAGES
        start = tile * BLOCK_N
        mbarrier.wait(full.index(stage), count // STAGES & 1)
        b_s = mma_v2(keys_operand(k_smem.index(stage), b_q.dtype, mma), b_q, gl.zeros_like(b_l))
        b_p, b_m, b_l, b_alpha = _softmax(b_s, start + b_near, b_m, b_l, rows, seq_len, cached, softcap, FLAGS)
        if (start + BLOCK_N > seq_len) & (seq_len % BLOCK_SIZE != 0):
            clear_stale_values(v_smem.index(stage), start, first, seq_len)
        if FLAGS[1]:
            if (start < first) & (first % BLOCK_SIZE != 0):
                clear_stale_values(v_smem.index(stage), start, first, seq_len)
        b_v = values_operand(v_smem.index(stage), b_q.dtype, mma)
        b_o = mma_v2(b_v, weights_operand(b_p.to(b_q.dtype), mma), b_o * b_alpha[:, None, :])
        mbarrier.arrive(empty.index(stage), count=1)
        count += 1
    return b_o, b_m, gl.sum(b_l, 1), count


@gluon.jit
def _load_queries(place, lengths, q_ptr, strides, dtype: gl.constexpr, FLOAT8: gl.constexpr, GROUP: gl.constexpr,
                  COLUMNS: gl.constexpr, HEAD_SIZE: gl.constexpr, mma: gl.constexpr):  # fmt: skip
    """A pair's queries as the right operand ``[4, D, C]``, and the factor of their logits, ``[4, C]``."""
    wide: gl.constexpr = queries_layout(COLUMNS, HEAD_SIZE, FLOAT8)
    row: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, wide))
    b_token, b_head, _, m_row = rows_of_pair(place, lengths, GROUP, COLUMNS, COLUMNS, row)
    b_warp = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, wide)))[:, None][:, :, None]
    b_dim = gl.arange(0, HEAD_SIZE, gl.SliceLayout(0, gl.SliceLayout(1, wide)))[None, :][:, None, :]
    p_q = q_ptr + row_offsets(b_token, b_head, strides[0], strides[1])[None, :][:, :, None] + b_dim + b_warp * 0
    b_q = gl.load(p_q, mask=m_row[None, :][:, :, None] & (b_dim + b_warp >= 0), other=0.0)
    b_factor = gl.full([4, COLUMNS], 1.0, gl.float32, gl.SliceLayout(1, mma))
    if FLOAT8:  # float16 holds every float8, and the conversion is one instruction for two; queries fit after division
        b_peak = gl.max(gl.maximum(b_q.to(gl.float32), -b_q.to(gl.float32)), 2)
        b_peak = gl.maximum(b_peak, 1e-30)
        b_q = b_q.to(gl.float32) * (1.0 / b_peak)[:, :, None]
        b_factor = gl.convert_layout(b_peak, b_factor.type.layout)
    return queries_operand(b_q.to(dtype), FLOAT8, mma), b_factor


@gluon.jit
def attend_apart(place, part_lo, part_hi, sequence, tiles, count, tensors, strides, factors, parts, pipe, lengths,
                 plan, dtype: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, BLOCK_M: gl.constexpr,
                 FLAGS: gl.constexpr, BLOCK_SIZE: gl.constexpr):  # fmt: skip
    """Attend to tiles [part_lo, part_hi) of a pair, and store the result, or the merged parts if this was the last.

    ROWS: of the pair's BLOCK_M rows, how many there may be. FLAGS: see :func:`_softmax`. Returns the ring's new count.
    """
    q_ptr, out_ptr, lse_ptr, sink_ptr, slope_ptr, tree_ptr, k_scale_ptr, v_scale_ptr = tensors
    logit_scale, out_scale, softcap = factors
    part_ptr, part_lse_ptr, count_ptr = parts
    head, seq, pair = place
    first, seq_len, cached = sequence
    BLOCK_N: gl.constexpr = pipe[0].shape[1]
    HEAD_SIZE: gl.constexpr = pipe[0].shape[2]
    FLOAT8: gl.constexpr = float8_of(pipe[0].dtype) is not None
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    across: gl.constexpr = gl.SliceLayout(1, mma)
    row: gl.constexpr = gl.SliceLayout(0, across)
    b_q, b_scale = _load_queries(place, lengths, q_ptr, strides, dtype, FLOAT8, GROUP, BLOCK_M, HEAD_SIZE, mma)
    if k_scale_ptr is not None:
        logit_scale *= gl.load(k_scale_ptr + head // lengths[3])
    if v_scale_ptr is not None:
        out_scale *= gl.load(v_scale_ptr + head // lengths[3])
    begin, end, pos, tree, slope = describe_rows(
        place, lengths, cached, seq_len, slope_ptr, tree_ptr, GROUP, BLOCK_M, row
    )
    rows = (begin[None, :], end[None, :], pos[None, :], tree[None, :], slope[None, :], b_scale * logit_scale)
    b_m = gl.full([4, BLOCK_M], LOWEST, gl.float32, across)
    b_sum = gl.zeros([4, BLOCK_M], gl.float32, across)
    if sink_ptr is not None:  # it counts once, in the first warp of the part with the first keys
        described = rows_of_pair(place, lengths, GROUP, BLOCK_M, BLOCK_M, row)
        m_sink = described[3] & (part_lo == 0)
        b_sink = gl.load(sink_ptr + described[1], mask=m_sink, other=float("-inf")).to(gl.float32) * LOG2E
        m_first = (gl.arange(0, 4, gl.SliceLayout(1, across)) == 0)[:, None]
        b_m = gl.maximum(b_sink, LOWEST)[None, :] + b_sum
        b_sum = gl.where(m_first, gl.exp2(b_sink[None, :] - b_m), 0.0)
    lo = first // BLOCK_N
    b_o, b_m_new, b_l, count = _attend(
        (lo + part_lo, lo + part_hi), sequence, rows, b_q, b_m, count, pipe, softcap, FLAGS, BLOCK_SIZE, mma
    )
    b_l += b_sum * gl.exp2(b_m - b_m_new)
    b_out, b_lse = merge_warps(dims_in_order(b_o, FLOAT8).permute([0, 2, 1]), b_m_new, b_l)
    if part_hi - part_lo == tiles:
        store_rows(place, 0, b_out, b_lse, out_scale, tensors, strides, lengths, GROUP, BLOCK_M)
    else:
        column: gl.constexpr = gl.SliceLayout(1, b_out.type.layout)
        b_dim = gl.arange(0, HEAD_SIZE, gl.SliceLayout(0, b_out.type.layout))
        m_row = rows_of_pair(place, lengths, GROUP, BLOCK_M, BLOCK_M, column)[3]
        b_slot = (gl.program_id(0) * 2 + (part_lo == 0).to(gl.int32)) * BLOCK_M + gl.arange(0, BLOCK_M, column)
        gl.store(part_ptr + b_slot.to(gl.int64)[:, None] * HEAD_SIZE + b_dim[None, :], b_out, mask=m_row[:, None])
        gl.store(part_lse_ptr + b_slot, b_lse, mask=m_row)
        count_part(
            place, part_hi - part_lo, tiles, out_scale, tensors, strides, parts, lengths, plan, GROUP, ROWS, HEAD_SIZE,
            BLOCK_M,
        )  # fmt: skip
    return count

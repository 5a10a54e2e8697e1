"""What four warps of a Hopper program compute together: attention of 9 to 32 queries to part of a sequence's keys.

The products are transposed: their rows are keys and dimensions, of which there are always 64 or more, their columns
queries, of which there may be 16. A float8 tile is then a left operand, which the tensor cores take from registers,
where it is converted. In Gluon. (Fewer queries: :mod:`tritonllm.kernels.attention.sm90.apart`.)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tritonllm.kernels.attention.common import LN2, LOG2E, LOWEST, row_offsets, soft_cap
from tritonllm.kernels.attention.schedule import merge_parts
from tritonllm.kernels.attention.sm90.pairs import describe_rows, rows_of_pair
from tritonllm.kernels.attention.sm90.tiles import (
    clear_stale_values,
    convert_keys,
    convert_values,
    dims_of_rows,
    float8_of,
    permute_dims,
)


@gluon.jit
def _softmax(b_s, b_key, b_m, b_l, rows, seq_len, cached, softcap, FLAGS: gl.constexpr):
    """The weights of a tile ``[N, R]``, the new maxima, each key's sum of weights, and what was summed before's factor.

    FLAGS: (rows see different keys, window, softcap, ALiBi, tree).
    """
    b_begin, b_end, b_pos, b_tree, b_slope, b_scale = rows
    if FLAGS[2]:
        b_s = soft_cap(b_s * (b_scale * LOG2E)[None, :], softcap * LOG2E)
    elif FLAGS[3]:
        b_s = b_s * (b_scale * LOG2E)[None, :]
    if FLAGS[3]:
        b_s += b_slope[None, :] * (b_key[:, None] - b_pos[None, :]).to(gl.float32)
    m_s = (b_key < seq_len)[:, None]
    if FLAGS[0]:
        m_s = b_key[:, None] < b_end[None, :]
        if FLAGS[4]:
            b_new = gl.minimum(gl.maximum(b_key - cached, 0), 31)
            m_s = m_s & ((b_key < cached)[:, None] | ((b_tree[None, :] >> b_new[:, None]) & 1 != 0))
    if FLAGS[1]:
        m_s = m_s & (b_key[:, None] >= b_begin[None, :])
    b_s = gl.where(m_s, b_s, float("-inf"))
    if FLAGS[2] or FLAGS[3]:
        b_m_new = gl.maximum(b_m, gl.max(b_s, 0))
        b_p = gl.exp2(b_s - b_m_new[None, :])
    else:  # the scale becomes part of the multiply-add before exp2
        b_m_new = gl.maximum(b_m, gl.max(b_s, 0) * (b_scale * LOG2E))
        b_p = gl.exp2(b_s * (b_scale * LOG2E)[None, :] - b_m_new[None, :])
    b_alpha = gl.exp2(b_m - b_m_new)
    return b_p, b_m_new, b_l * b_alpha[None, :] + b_p, b_alpha


@gluon.jit
def _attend(tiles, sequence, rows, b_m, count, q_smem, p_smem, pipe, softcap, FLAGS: gl.constexpr,
            BLOCK_SIZE: gl.constexpr, mma: gl.constexpr):  # fmt: skip
    """Attend to some tiles: the values weighted ``[D, R]``, the maxima and sums of weights ``[R]``, the new count."""
    first, seq_len, cached = sequence
    k_smem, v_smem, full, empty = pipe
    STAGES: gl.constexpr = k_smem.shape[0]
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    HEAD_SIZE: gl.constexpr = k_smem.shape[2]
    ROWS: gl.constexpr = q_smem.shape[0]
    FLOAT8: gl.constexpr = float8_of(k_smem.dtype) is not None
    b_o = gl.zeros([HEAD_SIZE, ROWS], gl.float32, mma)
    b_l = gl.zeros([BLOCK_N, ROWS], gl.float32, mma)
    for tile in range(tiles[0], tiles[1]):
        stage = count % STAGES
        start = tile * BLOCK_N
        mbarrier.wait(full.index(stage), count // STAGES & 1)
        if FLOAT8:
            b_k = convert_keys(k_smem.index(stage), q_smem.dtype, mma)
        else:
            b_k = k_smem.index(stage)
        t_s = warpgroup_mma(b_k, q_smem.permute((1, 0)), gl.zeros_like(b_l), use_acc=False, is_async=True)
        b_s = warpgroup_mma_wait(0, [t_s])
        b_key = start + gl.arange(0, BLOCK_N, gl.SliceLayout(1, mma))
        b_p, b_m, b_l, b_alpha = _softmax(b_s, b_key, b_m, b_l, rows, seq_len, cached, softcap, FLAGS)
        p_smem.store(b_p.to(p_smem.dtype))
        if (start + BLOCK_N > seq_len) & (seq_len % BLOCK_SIZE != 0):
            clear_stale_values(v_smem.index(stage), start, first, seq_len)
        if FLAGS[1]:
            if (start < first) & (first % BLOCK_SIZE != 0):
                clear_stale_values(v_smem.index(stage), start, first, seq_len)
        if FLOAT8:
            b_v = convert_values(v_smem.index(stage), p_smem.dtype, mma)
        else:
            b_v = v_smem.index(stage).permute((1, 0))
        fence_async_shared()
        gl.thread_barrier()
        t_o = warpgroup_mma(b_v, p_smem, b_o * b_alpha[None, :], is_async=True)
        b_o = warpgroup_mma_wait(0, [t_o])
        mbarrier.arrive(empty.index(stage), count=1)
        count += 1
    return b_o, b_m, gl.sum(b_l, 0), count


@gluon.jit
def _load_queries(place, lengths, q_ptr, strides, q_smem, GROUP: gl.constexpr, FLOAT8: gl.constexpr, mma: gl.constexpr):
    """Put a pair's queries into shared memory, and return the factor of their logits, ``[R]``."""
    ROWS: gl.constexpr = q_smem.shape[0]
    HEAD_SIZE: gl.constexpr = q_smem.shape[1]
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_SIZE, HEAD_SIZE // 8], [4, 1], [1, 0])
    b_token, b_head, _, m_row = rows_of_pair(place, lengths, GROUP, ROWS, ROWS, gl.SliceLayout(1, wide))
    b_dim = gl.arange(0, HEAD_SIZE, gl.SliceLayout(0, wide))
    p_q = q_ptr + row_offsets(b_token, b_head, strides[0], strides[1])[:, None] + b_dim[None, :]
    b_q = gl.load(p_q, mask=m_row[:, None], other=0.0)
    b_factor = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(0, mma))
    if FLOAT8:  # float16 holds every float8, and the conversion is one instruction for two; queries fit after division
        b_peak = gl.max(gl.maximum(b_q.to(gl.float32), -b_q.to(gl.float32)), 1)
        b_peak = gl.where(b_peak > 0, b_peak, 1.0)
        b_half = permute_dims((b_q.to(gl.float32) / b_peak[:, None]).to(gl.float16))
        q_smem.store(gl.convert_layout(b_half, wide))
        b_factor = gl.convert_layout(b_peak, gl.SliceLayout(0, mma))
    else:
        q_smem.store(b_q)
    fence_async_shared()
    gl.thread_barrier()
    return b_factor


@gluon.jit
def _merge(place, tiles, out_scale, tensors, strides, parts, lengths, plan, GROUP: gl.constexpr, ROWS: gl.constexpr,
           HEAD_SIZE: gl.constexpr, BLOCK_M: gl.constexpr):  # fmt: skip
    """Merge all parts of a pair and store the result."""
    q_ptr, out_ptr, lse_ptr, sink_ptr, slope_ptr, tree_ptr, k_scale_ptr, v_scale_ptr = tensors
    stride_q_token, stride_q_head, stride_out_token, stride_out_head, heads = strides
    part_ptr, part_lse_ptr, count_ptr = parts
    begin, end, share, unit, items, programs = plan
    wide: gl.constexpr = gl.BlockedLayout([1, 4], [128 // HEAD_SIZE, HEAD_SIZE // 4], [4, 1], [1, 0])
    b_row = gl.arange(0, ROWS, gl.SliceLayout(1, wide))
    b_dim = gl.arange(0, HEAD_SIZE, gl.SliceLayout(0, wide))
    b_token, b_head, _, m_row = rows_of_pair(place, lengths, GROUP, BLOCK_M, ROWS, gl.SliceLayout(1, wide))
    b_out, b_lse = merge_parts(
        part_ptr, part_lse_ptr, place[2], tiles, share, unit, b_row, m_row, b_dim, HEAD_SIZE, BLOCK_M
    )
    p_out = out_ptr + row_offsets(b_token, b_head, stride_out_token, stride_out_head)[:, None] + b_dim[None, :]
    gl.store(p_out, (b_out * out_scale).to(out_ptr.dtype.element_ty), mask=m_row[:, None])
    if lse_ptr is not None:
        gl.store(lse_ptr + b_token * heads + b_head, b_lse * LN2, mask=m_row)


@gluon.jit
def attend_to_part(place, part_lo, part_hi, sequence, tiles, count, tensors, strides, factors, parts, buffers, lengths,
                   plan, GROUP: gl.constexpr, ROWS: gl.constexpr, FLAGS: gl.constexpr,
                   BLOCK_SIZE: gl.constexpr):  # fmt: skip
    """Attend to tiles [part_lo, part_hi) of a pair, and store the result, or the merged parts if this was the last.

    ROWS: of the pair's BLOCK_M rows, how many there may be. FLAGS: see :func:`_softmax`. Returns the ring's new count.
    """
    q_ptr, out_ptr, lse_ptr, sink_ptr, slope_ptr, tree_ptr, k_scale_ptr, v_scale_ptr = tensors
    stride_q_token, stride_q_head, stride_out_token, stride_out_head, heads = strides
    logit_scale, out_scale, softcap = factors
    part_ptr, part_lse_ptr, count_ptr = parts
    q_smem, p_smem, pipe = buffers
    head, seq, pair = place
    first, seq_len, cached = sequence
    begin, end, share, unit, items, programs = plan
    BLOCK_M: gl.constexpr = q_smem.shape[0]
    HEAD_SIZE: gl.constexpr = q_smem.shape[1]
    FLOAT8: gl.constexpr = float8_of(pipe[0].dtype) is not None
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    across: gl.constexpr = gl.SliceLayout(0, mma)
    b_scale = _load_queries(place, lengths, q_ptr, strides, q_smem, GROUP, FLOAT8, mma)
    if k_scale_ptr is not None:
        logit_scale *= gl.load(k_scale_ptr + head // lengths[3])
    if v_scale_ptr is not None:
        out_scale *= gl.load(v_scale_ptr + head // lengths[3])
    b_scale *= logit_scale
    rows = describe_rows(place, lengths, cached, seq_len, slope_ptr, tree_ptr, GROUP, BLOCK_M, across)
    rows += (b_scale,)
    b_token, b_head, _, m_row = rows_of_pair(place, lengths, GROUP, BLOCK_M, BLOCK_M, across)
    b_m = gl.full([BLOCK_M], LOWEST, gl.float32, across)
    b_sum = gl.zeros([BLOCK_M], gl.float32, across)
    if sink_ptr is not None:  # it counts once, in the part with the first keys
        b_sink = gl.load(sink_ptr + b_head, mask=m_row & (part_lo == 0), other=float("-inf")).to(gl.float32) * LOG2E
        b_m = gl.maximum(b_sink, LOWEST)
        b_sum = gl.exp2(b_sink - b_m)
    lo = first // p_smem.shape[0]
    b_o, b_m_new, b_l, count = _attend(
        (lo + part_lo, lo + part_hi), sequence, rows, b_m, count, q_smem, p_smem, pipe, softcap, FLAGS, BLOCK_SIZE, mma
    )
    b_l += b_sum * gl.exp2(b_m - b_m_new)
    b_divisor = gl.where(b_l == 0.0, 1.0, b_l)
    b_o /= b_divisor[None, :]
    b_lse = gl.where(b_l == 0.0, float("-inf"), b_m_new + gl.log2(b_divisor))
    b_dim = dims_of_rows(HEAD_SIZE, FLOAT8, gl.SliceLayout(1, mma))
    if part_hi - part_lo == tiles:
        p_out = out_ptr + row_offsets(b_token, b_head, stride_out_token, stride_out_head)[None, :] + b_dim[:, None]
        gl.store(p_out, (b_o * out_scale).to(out_ptr.dtype.element_ty), mask=m_row[None, :])
        if lse_ptr is not None:
            gl.store(lse_ptr + b_token * heads + b_head, b_lse * LN2, mask=m_row)
    else:
        b_slot = (gl.program_id(0) * 2 + (part_lo == 0).to(gl.int32)) * BLOCK_M + gl.arange(0, BLOCK_M, across)
        gl.store(part_ptr + b_slot.to(gl.int64)[None, :] * HEAD_SIZE + b_dim[:, None], b_o, mask=m_row[None, :])
        gl.store(part_lse_ptr + b_slot, b_lse, mask=m_row)
        p_count = count_ptr + pair // share
        gl.thread_barrier()  # every thread has stored its share of the part before one counts it
        if gl.atomic_add(p_count, part_hi - part_lo) + part_hi - part_lo == tiles:
            gl.store(p_count, 0)
            _merge(place, tiles, out_scale, tensors, strides, parts, lengths, plan, GROUP, ROWS, HEAD_SIZE, BLOCK_M)
    return count

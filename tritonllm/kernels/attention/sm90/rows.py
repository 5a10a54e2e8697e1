"""What one of two groups of four warps computes in a Hopper prefill: 64 rows of queries over all their keys. In Gluon.

For each tile of keys, from the last to the first, a group has the logits, starts the product for the next tile's, takes
exponentials, and starts the product with the values, of half the tile beside the exponentials of the other half
(PARTS = 2) or of all of it. No wait stands between the exponentials: the assembler moved it before them. And logits
give their registers to the next tile's, which takes the moves away that a second set of registers would need.

A thread of a product's result holds two neighbours of every eight columns. So weights are taken as ``[64, N / 8, 8]``:
maxima and sums over the middle dimension need no exchange, and which keys a row may see is one comparison with a
constant.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tritonllm.kernels.attention.common import LOG2E, LOWEST, soft_cap
from tritonllm.kernels.attention.sm90.tiles import clear_stale_values
from tritonllm.kernels.runtime.checks import aligned


def row_descriptor(x: torch.Tensor, group: int) -> TensorDescriptor | None:
    """``[T, H, D]``, to be copied 64 (token, head) pairs of one key/value head at a time; None where that cannot be."""
    if 64 % group or any(stride * x.itemsize % 16 for stride in x.stride()[:2]) or not aligned(x):
        return None
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [64 // group, group, x.shape[2]], layout)


@gluon.jit
def visible_tiles(pair, q_len, seq_len, window, GROUP: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
                  BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):  # fmt: skip
    """The keys of BLOCK_M (token, head) pairs from ``pair`` on, the last ``q_len`` tokens of ``seq_len`` being new.

    Returns:
        Tiles ``lo <= whole_lo``, ``whole_hi <= hi`` of BLOCK_N, the first key that a row sees and the first that none
        does. Tiles of [whole_lo, whole_hi) need no mask.
    """
    cached = seq_len - q_len
    pos_lo = cached + pair // GROUP
    pos_hi = cached + gl.minimum((pair + BLOCK_M - 1) // GROUP, q_len - 1)
    end = seq_len
    whole_end = seq_len
    first = 0
    whole_lo = 0
    if CAUSAL:
        end = gl.minimum(pos_hi + 1, seq_len)
        whole_end = gl.minimum(pos_lo + 1, seq_len)
    if WINDOW:
        first = gl.maximum(pos_lo - window + 1, 0)
        whole_lo = gl.maximum(pos_hi - window + BLOCK_N, 0) // BLOCK_N
    end = gl.maximum(end, 0)
    lo = first // BLOCK_N
    hi = gl.maximum((end + BLOCK_N - 1) // BLOCK_N, lo + 1)  # one tile at least; all of it may be masked
    return lo, whole_lo, gl.maximum(whole_end, 0) // BLOCK_N, hi, first, end


@gluon.jit
def share_of_tiles(lo, hi, share):
    """Which of the tiles [lo, hi) the share (number, of how many) has."""
    part, parts = share
    tiles = hi - lo
    return lo + tiles * part // parts, lo + tiles * (part + 1) // parts


@gluon.jit
def _logits(count, there, q_smem, pipes, s_layout: gl.constexpr):
    """Start the product of the queries with the tile of keys at place ``count`` of the ring; with what is there, of no
    use, where none will be."""
    k_smem, v_smem, k_full, k_empty, v_full, v_empty = pipes
    STAGES: gl.constexpr = k_smem.shape[0]
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    mbarrier.wait(k_full.index(count % STAGES), count // STAGES & 1, pred=there)
    b_zero = gl.zeros([64, BLOCK_N], gl.float32, s_layout)
    b_k = k_smem.index(count % STAGES).permute((1, 0))
    return warpgroup_mma(q_smem, b_k, b_zero, use_acc=False, is_async=True)


@gluon.jit
def _exponents(b_s, tile, b_m, rows, logits, MASKED: gl.constexpr, FLAGS: gl.constexpr):
    """A tile's exponents (base 2) ``[64, N / 8, 8]``, the new maximum, and the factor of what was summed before.

    FLAGS: (window, softcap, ALiBi, causal).
    """
    BLOCK_N: gl.constexpr = b_s.shape[1]
    b_pos, b_slope, end, window = rows
    scale, softcap = logits
    b_s = b_s.reshape([64, BLOCK_N // 8, 8])
    deep: gl.constexpr = b_s.type.layout
    flat: gl.constexpr = gl.SliceLayout(1, deep)
    b_far = gl.arange(0, BLOCK_N // 8, gl.SliceLayout(0, gl.SliceLayout(2, deep)))[None, :][:, :, None] * 8
    b_near = tile * BLOCK_N + gl.arange(0, 8, gl.SliceLayout(0, flat))[None, :]  # a key is near + far
    factor = scale * LOG2E
    if FLAGS[1]:
        b_s = soft_cap(b_s * factor, softcap * LOG2E)
        factor = 1.0
    if FLAGS[2]:
        b_distance = (b_near - b_pos[:, None])[:, None, :] + b_far
        b_s = b_s * factor + b_slope[:, None][:, None, :] * b_distance.to(gl.float32)
        factor = 1.0
    if MASKED:
        b_end = gl.minimum(b_pos + 1, end) if FLAGS[3] else b_pos * 0 + end
        m_s = b_far < (b_end[:, None] - b_near)[:, None, :]
        if FLAGS[0]:
            m_s = m_s & (b_far > (b_pos[:, None] - window - b_near)[:, None, :])
        b_s = gl.where(m_s, b_s, float("-inf"))
    b_m_new = gl.maximum(b_m, gl.max(gl.max(b_s, 1), 1) * factor)
    return b_s * factor - b_m_new[:, None][:, None, :], b_m_new, gl.exp2(b_m - b_m_new)


@gluon.jit
def _add_values(b_x, b_alpha, b_o, b_l, v_place, v_full, phase, PARTS: gl.constexpr):
    """Start the product of a tile's weights with its values, in one or two parts, and add up the weights."""
    KEYS: gl.constexpr = v_place.shape[0] // PARTS
    p_layout: gl.constexpr = gl.DotOperandLayout(0, b_o.type.layout, 2)
    b_o *= gl.convert_layout(b_alpha, gl.SliceLayout(1, b_o.type.layout))[:, None]
    b_l *= b_alpha[:, None]
    parts = (b_x,)
    if PARTS == 2:
        parts = b_x.reshape([64, 2, KEYS // 8, 8]).permute((0, 2, 3, 1)).split()
    t_o = b_o
    for i in gl.static_range(PARTS):
        b_p = gl.exp2(parts[i])
        b_l += gl.convert_layout(gl.sum(b_p, 1), b_l.type.layout)
        if i == 0:
            mbarrier.wait(v_full, phase)
        b_p = gl.convert_layout(b_p.reshape([64, KEYS]).to(v_place.dtype), p_layout)
        t_o = warpgroup_mma(b_p, v_place.slice(i * KEYS, KEYS, 0), t_o, is_async=True)
    return t_o, b_l


@gluon.jit
def _step(tile, count, more, state, q_smem, pipes, rows, logits, MASKED: gl.constexpr, FLAGS: gl.constexpr,
          PARTS: gl.constexpr, s_layout: gl.constexpr):  # fmt: skip
    """Add a tile whose logits are there, while those of the next are computed, if there are ``more``."""
    k_smem, v_smem, k_full, k_empty, v_full, v_empty = pipes
    b_o, b_s, b_m, b_l = state
    STAGES: gl.constexpr = k_smem.shape[0]
    stage = count % STAGES
    b_x, b_m, b_alpha = _exponents(b_s, tile, b_m, rows, logits, MASKED, FLAGS)
    t_s = _logits(count + 1, more, q_smem, pipes, s_layout)
    t_o, b_l = _add_values(
        b_x, b_alpha, b_o, b_l, v_smem.index(stage), v_full.index(stage), count // STAGES & 1, PARTS
    )  # fmt: skip
    b_s, b_o = warpgroup_mma_wait(0, [t_s, t_o])
    mbarrier.arrive(k_empty.index((count + 1) % STAGES), count=1, pred=more)
    mbarrier.arrive(v_empty.index(stage), count=1)
    return b_o, b_s, b_m, b_l


@gluon.jit
def _describe_rows(rows, heads, HALF: gl.constexpr, GROUP: gl.constexpr, ALIBI: gl.constexpr, layout: gl.constexpr):
    """Position, ALiBi slope and sink (both base 2) of 64 rows."""
    kv_head, begin, q_len, pair, seq_len = rows
    sink_ptr, slope_ptr, k_scale_ptr, v_scale_ptr = heads
    b_pair = pair + HALF * 64 + gl.arange(0, 64, layout)
    b_head = kv_head * GROUP + b_pair % GROUP
    b_slope = b_pair * 0.0
    if ALIBI:
        b_slope = gl.load(slope_ptr + b_head).to(gl.float32) * LOG2E
    b_sink = gl.full([64], float("-inf"), gl.float32, layout)
    if sink_ptr is not None:
        b_sink = gl.load(sink_ptr + b_head).to(gl.float32) * LOG2E
    return seq_len - q_len + b_pair // GROUP, b_slope, b_sink


@gluon.jit
def receive(mail, got):
    """A tile of rows as the copying warp described it: the fields of ``rows``, ``count`` and ``share`` of
    :func:`attend_rows`."""
    letter, full, empty = mail
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    mbarrier.wait(full.index(got % 2), got // 2 & 1)
    b_letter = letter.index(got % 2).load(layout)
    b_field = gl.arange(0, 8, layout)
    fields = ()
    for i in gl.static_range(8):
        fields += (gl.sum(gl.where(b_field == i, b_letter, 0), 0),)  # type: ignore[assignment]
    return fields


@gluon.jit
def attend_rows(rows, count, share, q_smem, mail, got, pipes, heads, window, logits, HALF: gl.constexpr,
                GROUP: gl.constexpr, FLAGS: gl.constexpr, BLOCK_SIZE: gl.constexpr, BLOCK_M: gl.constexpr,
                PARTS: gl.constexpr, MERGED: gl.constexpr, SPLIT: gl.constexpr, s_layout: gl.constexpr,
                o_layout: gl.constexpr):  # fmt: skip
    """64 rows over all their keys, or over a share of them (SPLIT).

    The last tile of keys has a step of its own, in which no product of logits starts. MERGED: the loops do it, and that
    product for nothing. It is a sixth less code: where keys are few, rows run through all of it, and waited for it.

    Args:
        rows: (key/value head, first token in q, new tokens, first pair, keys) of the tile of rows.
        count: where in the ring the last tile of keys is.
        share: (which share of the keys, of how many).
        mail: (letter, full, empty), of which the ``got``-th described the tile.
        logits: (scale, softcap).

    Returns:
        Weighted sums of values ``[64, D]``, maxima and sums of weights ``[64]``, and ``rows`` and ``share``, received
        again.
    """
    seq_len = rows[4]
    k_smem, v_smem, k_full, k_empty, v_full, v_empty = pipes
    STAGES: gl.constexpr = k_smem.shape[0]
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    HEAD_SIZE: gl.constexpr = v_smem.shape[2]
    lo, whole_lo, whole_hi, hi, first, end = visible_tiles(
        rows[3], rows[2], seq_len, window, GROUP, FLAGS[3], FLAGS[0], BLOCK_M, BLOCK_N
    )  # fmt: skip
    if SPLIT:
        lo, hi = share_of_tiles(lo, hi, share)
    b_deep = gl.zeros([64, BLOCK_N], gl.float32, s_layout).reshape([64, BLOCK_N // 8, 8])
    layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(1, b_deep.type.layout))
    b_pos, b_slope, b_sink = _describe_rows(rows, heads, HALF, GROUP, FLAGS[2], layout)
    if SPLIT:  # a sink counts once, with the first keys
        b_sink = gl.where(share[0] == 0, b_sink, float("-inf"))
    of_rows = (b_pos, b_slope, end, window)
    b_s = warpgroup_mma_wait(0, [_logits(count, True, q_smem, pipes, s_layout)])
    mbarrier.arrive(k_empty.index(count % STAGES), count=1)
    if (hi * BLOCK_N > seq_len) & (seq_len % BLOCK_SIZE != 0):  # both groups do it, so neither waits for the other
        mbarrier.wait(v_full.index(count % STAGES), count // STAGES & 1)
        clear_stale_values(v_smem.index(count % STAGES), (hi - 1) * BLOCK_N, first, seq_len)
    state = (gl.zeros([64, HEAD_SIZE], gl.float32, o_layout), b_s, gl.maximum(b_sink, LOWEST), gl.sum(b_deep, 1))
    least = lo + (0 if MERGED else 1)  # the last tile has a step of its own
    top = gl.minimum(gl.maximum(whole_hi, least), hi)
    low = gl.minimum(gl.maximum(whole_lo, least), top)
    for i in range(hi - top):
        tile = hi - 1 - i
        at = count + i
        more = tile > lo if MERGED else True
        state = _step(tile, at, more, state, q_smem, pipes, of_rows, logits, True, FLAGS, PARTS, s_layout)
    count += hi - top
    for i in range(top - low):
        tile = top - 1 - i
        at = count + i
        more = tile > lo if MERGED else True
        state = _step(tile, at, more, state, q_smem, pipes, of_rows, logits, False, FLAGS, PARTS, s_layout)
    count += top - low
    if FLAGS[0]:
        for i in range(low - lo - 1):
            state = _step(
                low - 1 - i, count + i, True, state, q_smem, pipes, of_rows, logits, True, FLAGS, PARTS, s_layout
            )
        count += low - lo - 1
    # received and worked out again: kept through the loops, it would take registers that those have not
    kv_head, begin, q_len, pair, seq_len, _, part, parts = receive(mail, got)
    rows = (kv_head, begin, q_len, pair, seq_len)
    mbarrier.arrive(mail[2].index(got % 2), count=1)
    lo, _, _, hi, first, end = visible_tiles(pair, q_len, seq_len, window, GROUP, FLAGS[3], FLAGS[0], BLOCK_M, BLOCK_N)
    b_pos, b_slope, b_sink = _describe_rows(rows, heads, HALF, GROUP, FLAGS[2], layout)
    if SPLIT:
        lo, hi = share_of_tiles(lo, hi, (part, parts))
        b_sink = gl.where(part == 0, b_sink, float("-inf"))
    of_rows = (b_pos, b_slope, end, window)
    b_o, b_s, b_m, b_l = state
    if not MERGED:
        stage = count % STAGES
        if FLAGS[0]:
            if first % BLOCK_SIZE != 0:
                mbarrier.wait(v_full.index(stage), count // STAGES & 1)
                clear_stale_values(v_smem.index(stage), lo * BLOCK_N, first, seq_len)
        b_x, b_m, b_alpha = _exponents(b_s, lo, b_m, of_rows, logits, True, FLAGS)
        t_o, b_l = _add_values(
            b_x, b_alpha, b_o, b_l, v_smem.index(stage), v_full.index(stage), count // STAGES & 1, PARTS
        )  # fmt: skip
        b_o = warpgroup_mma_wait(0, [t_o])
        mbarrier.arrive(v_empty.index(stage), count=1)
    return b_o, b_m, gl.sum(b_l, 1) + gl.exp2(b_sink - b_m), rows, (part, parts)

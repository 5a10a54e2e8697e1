"""Prefill attention for Hopper: what :mod:`tritonllm.kernels.attention_prefill` computes, with its loads and products
asynchronous. Written in Gluon, the layer of Triton where layouts, barriers and warps are explicit.

A program has three roles (FlashAttention-3: Shah et al., 2024). One warp copies keys and values: pages of the cache go
to shared memory by the bulk copy engine, page by page, some tiles ahead. Two groups of four warps each own 64 rows of
the tile and do products and softmax; while one waits for its products the other has the tensor cores, and within a
group the products of a tile's values run beside the softmax of the next tile. Keys go from last to first, so that the
tiles that need a mask come first.

On an H200 the bulk of long prompts runs at the chip's power limit (1.76 GHz instead of 1.98), so tile sizes, ping-pong
barriers between the groups, queries in registers and more copying warps changed nothing beyond noise; docs/kernels.md.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tritonllm.kernels import tuning
from tritonllm.kernels.attention_common import LN2, LOG2E, LOWEST, AttentionArgs
from tritonllm.kernels.attention_schedule import find_prefill_sequence
from tritonllm.kernels.attention_tiles_sm90 import clear_stale_values, page_descriptors, pages_fit

# Of 65,536 registers: 232 for each thread that multiplies, 40 for one that copies (with 240 and 24 that one spills).
MAX_REGISTERS = 168


@gluon.jit
def _tile_of(item, shape, GROUP: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, BLOCK_M: gl.constexpr,
             BLOCK_N: gl.constexpr, WARPS: gl.constexpr):  # fmt: skip
    """An item's rows and keys.

    Returns:
        ``(rows, keys)``: rows are (valid, key/value head, sequence, its first token in q, its tokens in q, the tile's
        first (token, head) pair, keys before the tokens, keys); keys are tiles ``lo <= whole_lo``, ``whole_hi <= hi``
        of BLOCK_N, the first key that a row sees and the first that none does. Tiles of [whole_lo, whole_hi) need no
        mask.
    """
    cu_ptr, len_ptr, batch, window, tiles = shape
    tile = tiles - 1 - item % tiles  # the last tiles of a sequence see most keys: they start first
    b_lane = gl.arange(0, 128, gl.BlockedLayout([1], [32], [WARPS], [0]))
    seq = find_prefill_sequence(b_lane, tile, cu_ptr, batch, GROUP, BLOCK_M)
    begin = gl.load(cu_ptr + seq)
    q_len = gl.load(cu_ptr + seq + 1) - begin
    seq_len = gl.load(len_ptr + seq)
    pair = (tile - (begin.to(gl.int64) * GROUP // BLOCK_M).to(gl.int32) - seq) * BLOCK_M
    valid = pair < q_len * GROUP
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
    whole_hi = gl.maximum(whole_end, 0) // BLOCK_N
    return (valid, item // tiles, seq, begin, q_len, pair, cached, seq_len), (lo, whole_lo, whole_hi, hi, first, end)


@gluon.jit
def _copy_tile(desc, b_row, column, full, empty, smem, count, BOX: gl.constexpr, PIECES: gl.constexpr):
    """Fetch a tile, one page or part of a page after the other, once its place is free."""
    STAGES: gl.constexpr = smem.shape[0]
    BYTES: gl.constexpr = smem.shape[1] * smem.shape[2] * 2
    stage = count % STAGES
    mbarrier.wait(empty.index(stage), (count // STAGES & 1) ^ 1)
    mbarrier.expect(full.index(stage), BYTES)
    b_lane = gl.arange(0, 32, b_row.type.layout)
    for i in gl.static_range(PIECES):
        row = gl.sum(gl.where(b_lane == i, b_row, 0), 0)
        place = smem.index(stage).slice(i * BOX, BOX, 0)
        tma.async_copy_global_to_shared(desc, [row, column], full.index(stage), place)


@gluon.jit
def _copy(descs, table, pipes, shape, items, GROUP: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
          BLOCK_SIZE: gl.constexpr, HEAD_SIZE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):  # fmt: skip
    """The copying warp. A lane holds the id of one page of a tile, loaded one tile ahead."""
    BOX: gl.constexpr = BLOCK_SIZE if BLOCK_SIZE < BLOCK_N else BLOCK_N
    PIECES: gl.constexpr = BLOCK_N // BOX
    k_desc, v_desc = descs
    table_ptr, stride_table, num_rows = table
    k_smem, v_smem, k_full, k_empty, v_full, v_empty = pipes
    b_lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    count = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        rows, keys = _tile_of(item, shape, GROUP, CAUSAL, WINDOW, BLOCK_M, BLOCK_N, 1)
        lo, whole_lo, whole_hi, hi, first, end = keys
        if rows[0]:
            p_table = table_ptr + rows[2].to(gl.int64) * stride_table
            b_key = (hi - 1) * BLOCK_N + b_lane * BOX
            m_id = (b_lane < PIECES) & (b_key < end) & (b_key + BOX > first)
            b_id = gl.load(p_table + b_key // BLOCK_SIZE, mask=m_id, other=-1)
            for _ in range(hi - lo):
                # a row beyond the cache reads as zeros: pages that no row sees are not looked up
                b_row = gl.where(b_id >= 0, b_id * BLOCK_SIZE + b_key % BLOCK_SIZE, num_rows)
                b_key -= BLOCK_N
                m_id = (b_lane < PIECES) & (b_key >= 0) & (b_key + BOX > first)
                b_id = gl.load(p_table + b_key // BLOCK_SIZE, mask=m_id, other=-1)
                _copy_tile(k_desc, b_row, rows[1] * HEAD_SIZE, k_full, k_empty, k_smem, count, BOX, PIECES)
                _copy_tile(v_desc, b_row, rows[1] * HEAD_SIZE, v_full, v_empty, v_smem, count, BOX, PIECES)
                count += 1


@gluon.jit
def _logits(count, q_smem, pipes, s_layout: gl.constexpr):
    """Start the product of the queries with a tile of keys."""
    k_smem, v_smem, k_full, k_empty, v_full, v_empty = pipes
    STAGES: gl.constexpr = k_smem.shape[0]
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    mbarrier.wait(k_full.index(count % STAGES), count // STAGES & 1)
    b_zero = gl.zeros([64, BLOCK_N], gl.float32, s_layout)
    b_k = k_smem.index(count % STAGES).permute((1, 0))
    return warpgroup_mma(q_smem, b_k, b_zero, use_acc=False, is_async=True)


@gluon.jit
def _softmax(b_s, tile, b_m, b_l, rows, logits, MASKED: gl.constexpr, FLAGS: gl.constexpr):
    """The weights of a tile, the new maximum and sum, and the factor of what was summed before.

    FLAGS: (window, softcap, ALiBi).
    """
    BLOCK_N: gl.constexpr = b_s.shape[1]
    b_begin, b_end, b_pos, b_slope = rows
    scale, softcap = logits
    b_key = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, b_s.type.layout))
    factor = scale * LOG2E
    if FLAGS[1]:  # cap tanh(z) = cap - 2 cap / (e^2z + 1)
        b_s = (softcap - 2.0 * softcap / (gl.exp2(b_s * (2.0 * LOG2E * scale / softcap)) + 1.0)) * LOG2E
        factor = 1.0
    if FLAGS[2]:
        b_s = b_s * factor + b_slope[:, None] * (b_key[None, :] - b_pos[:, None]).to(gl.float32)
        factor = 1.0
    if MASKED:
        m_s = b_key[None, :] < b_end[:, None]
        if FLAGS[0]:
            m_s = m_s & (b_key[None, :] >= b_begin[:, None])
        b_s = gl.where(m_s, b_s, float("-inf"))
    b_m_new = gl.maximum(b_m, gl.max(b_s, 1) * factor)
    b_alpha = gl.exp2(b_m - b_m_new)
    b_p = gl.exp2(b_s * factor - b_m_new[:, None])
    return b_p, b_m_new, b_l * b_alpha + gl.sum(b_p, 1), b_alpha


@gluon.jit
def _step(tile, count, state, q_smem, pipes, rows, logits, MASKED: gl.constexpr, FLAGS: gl.constexpr,
          s_layout: gl.constexpr, p_layout: gl.constexpr):  # fmt: skip
    """One tile: its logits and weights, while the values of the tile before are added."""
    k_smem, v_smem, k_full, k_empty, v_full, v_empty = pipes
    b_o, b_m, b_l, b_p = state
    STAGES: gl.constexpr = k_smem.shape[0]
    before = count - 1
    t_s = _logits(count, q_smem, pipes, s_layout)
    mbarrier.wait(v_full.index(before % STAGES), before // STAGES & 1)
    t_o = warpgroup_mma(b_p, v_smem.index(before % STAGES), b_o, is_async=True)
    b_s = warpgroup_mma_wait(1, [t_s])
    mbarrier.arrive(k_empty.index(count % STAGES), count=1)
    b_p, b_m, b_l, b_alpha = _softmax(b_s, tile, b_m, b_l, rows, logits, MASKED, FLAGS)
    b_o = warpgroup_mma_wait(0, [t_o])
    mbarrier.arrive(v_empty.index(before % STAGES), count=1)
    b_o *= gl.convert_layout(b_alpha, gl.SliceLayout(1, b_o.type.layout))[:, None]
    return b_o, b_m, b_l, gl.convert_layout(b_p.to(v_smem.dtype), p_layout)


@gluon.jit
def _attend(rows, keys, count, q_smem, pipes, heads, shape, logits, HALF: gl.constexpr, GROUP: gl.constexpr,
            CAUSAL: gl.constexpr, FLAGS: gl.constexpr, BLOCK_SIZE: gl.constexpr, s_layout: gl.constexpr,
            o_layout: gl.constexpr):  # fmt: skip
    """64 rows over all their keys, from the last tile to the first; returns values, maxima, sums and the count."""
    valid, kv_head, seq, begin, q_len, pair, cached, seq_len = rows
    lo, whole_lo, whole_hi, hi, first, end = keys
    k_smem, v_smem, k_full, k_empty, v_full, v_empty = pipes
    sink_ptr, slope_ptr, k_scale_ptr, v_scale_ptr = heads
    STAGES: gl.constexpr = k_smem.shape[0]
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    HEAD_SIZE: gl.constexpr = v_smem.shape[2]
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    b_pair = pair + HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, s_layout))
    b_pos = cached + b_pair // GROUP
    b_slope = b_pos
    if FLAGS[2]:
        b_slope = gl.load(slope_ptr + kv_head * GROUP + b_pair % GROUP).to(gl.float32) * LOG2E
    row_keys = (b_pos - shape[3] + 1, gl.minimum(b_pos + 1, end) if CAUSAL else b_pos * 0 + end, b_pos, b_slope)
    b_m = gl.full([64], LOWEST, gl.float32, gl.SliceLayout(1, s_layout))
    b_l = gl.zeros([64], gl.float32, gl.SliceLayout(1, s_layout))
    if sink_ptr is not None:
        b_sink = gl.load(sink_ptr + kv_head * GROUP + b_pair % GROUP).to(gl.float32) * LOG2E
        b_m = gl.maximum(b_sink, LOWEST)
        b_l = gl.exp2(b_sink - b_m)

    b_s = warpgroup_mma_wait(0, [_logits(count, q_smem, pipes, s_layout)])
    mbarrier.arrive(k_empty.index(count % STAGES), count=1)
    b_p, b_m, b_l, b_alpha = _softmax(b_s, hi - 1, b_m, b_l, row_keys, logits, True, FLAGS)
    if (hi * BLOCK_N > seq_len) & (seq_len % BLOCK_SIZE != 0):  # both groups do it, so neither waits for the other
        mbarrier.wait(v_full.index(count % STAGES), count // STAGES & 1)
        clear_stale_values(v_smem.index(count % STAGES), (hi - 1) * BLOCK_N, first, seq_len)
    b_o = gl.zeros([64, HEAD_SIZE], gl.float32, o_layout)
    state = (b_o, b_m, b_l, gl.convert_layout(b_p.to(v_smem.dtype), p_layout))
    count += 1
    top = gl.maximum(gl.minimum(whole_hi, hi - 1), lo)
    low = gl.minimum(gl.maximum(whole_lo, lo), top)
    for i in range(hi - 1 - top):
        state = _step(hi - 2 - i, count, state, q_smem, pipes, row_keys, logits, True, FLAGS, s_layout, p_layout)
        count += 1
    for i in range(top - low):
        state = _step(top - 1 - i, count, state, q_smem, pipes, row_keys, logits, False, FLAGS, s_layout, p_layout)
        count += 1
    if FLAGS[0]:
        for i in range(low - lo):
            state = _step(low - 1 - i, count, state, q_smem, pipes, row_keys, logits, True, FLAGS, s_layout, p_layout)
            count += 1
    b_o, b_m, b_l, b_p = state
    last = count - 1
    mbarrier.wait(v_full.index(last % STAGES), last // STAGES & 1)
    if FLAGS[0]:
        if first % BLOCK_SIZE != 0:
            clear_stale_values(v_smem.index(last % STAGES), lo * BLOCK_N, first, seq_len)
    b_o = warpgroup_mma_wait(0, [warpgroup_mma(b_p, v_smem.index(last % STAGES), b_o, is_async=True)])
    mbarrier.arrive(v_empty.index(last % STAGES), count=1)
    return b_o, b_m, b_l, count


@gluon.jit
def _multiply(tensors, strides, heads, pipes, q_smem, shape, items, factors, HALF: gl.constexpr, GROUP: gl.constexpr,
              CAUSAL: gl.constexpr, FLAGS: gl.constexpr, BLOCK_SIZE: gl.constexpr, BLOCK_M: gl.constexpr,
              BLOCK_N: gl.constexpr):  # fmt: skip
    """One of the two groups that multiply: rows [64 HALF, 64 HALF + 64) of each item."""
    q_ptr, out_ptr, lse_ptr = tensors
    stride_q_token, stride_q_head, stride_out_token, stride_out_head, num_heads = strides
    sink_ptr, slope_ptr, k_scale_ptr, v_scale_ptr = heads
    HEAD_SIZE: gl.constexpr = q_smem.shape[2]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_SIZE, 16])
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_SIZE, HEAD_SIZE // 8], [4, 1], [1, 0])
    count = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        rows, keys = _tile_of(item, shape, GROUP, CAUSAL, FLAGS[0], BLOCK_M, BLOCK_N, 4)
        valid, kv_head, seq, begin, q_len, pair, cached, seq_len = rows
        scale, out_scale, softcap = factors
        if k_scale_ptr is not None:
            scale *= gl.load(k_scale_ptr + kv_head)
        if v_scale_ptr is not None:
            out_scale *= gl.load(v_scale_ptr + kv_head)
        if valid:
            b_pair = pair + HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, wide))
            b_dim = gl.arange(0, HEAD_SIZE, gl.SliceLayout(0, wide))
            m_row = b_pair < q_len * GROUP
            b_token = begin.to(gl.int64) + b_pair // GROUP
            b_head = kv_head * GROUP + b_pair % GROUP
            p_q = q_ptr + (b_token * stride_q_token + b_head * stride_q_head)[:, None] + b_dim[None, :]
            q_smem.index(HALF).store(gl.load(p_q, mask=m_row[:, None], other=0.0))
            fence_async_shared()
            gl.thread_barrier()
            b_o, b_m, b_l, count = _attend(
                rows, keys, count, q_smem.index(HALF), pipes, heads, shape, (scale, softcap),
                HALF, GROUP, CAUSAL, FLAGS, BLOCK_SIZE, s_layout, o_layout,
            )  # fmt: skip
            b_divisor = gl.where(b_l == 0.0, 1.0, b_l)  # 0 for a row that saw nothing
            b_o *= gl.convert_layout(out_scale / b_divisor, gl.SliceLayout(1, o_layout))[:, None]
            p_out = out_ptr + (b_token * stride_out_token + b_head * stride_out_head)[:, None] + b_dim[None, :]
            gl.store(p_out, gl.convert_layout(b_o.to(out_ptr.dtype.element_ty), wide), mask=m_row[:, None])
            if lse_ptr is not None:
                b_pair = pair + HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, s_layout))
                b_lse = gl.where(b_l == 0.0, float("-inf"), b_m + gl.log2(b_divisor)) * LN2
                p_lse = lse_ptr + (begin.to(gl.int64) + b_pair // GROUP) * num_heads + kv_head * GROUP + b_pair % GROUP
                gl.store(p_lse, b_lse, mask=b_pair < q_len * GROUP)


# Arguments whose values and alignment change from step to step: one compilation serves them all.
@gluon.jit(do_not_specialize=["table_ptr", "cu_ptr", "len_ptr", "window", "batch", "tiles", "items", "stride_table"])
def _prefill_sm90_kernel(
    q_ptr,  # [T, H, D]
    k_desc,  # [P * S, K * D]
    v_desc,
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
    tiles,  # of BLOCK_M rows, for each key/value head
    items,
    num_rows,
    heads,
    stride_q_token,
    stride_q_head,
    stride_table,
    stride_out_token,
    stride_out_head,
    GROUP: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    HEAD_SIZE: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    """A program takes items ``program_id, + num_programs, ...``: tiles of BLOCK_M rows of one key/value head."""
    dtype: gl.constexpr = k_desc.dtype
    q_smem = gl.allocate_shared_memory(dtype, [2, 64, HEAD_SIZE], k_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_SIZE], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_SIZE], k_desc.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)  # by both groups
        mbarrier.init(v_empty.index(i), count=2)
    tensors = (q_ptr, out_ptr, lse_ptr)
    strides = (stride_q_token, stride_q_head, stride_out_token, stride_out_head, heads)
    of_heads = (sink_ptr, slope_ptr, k_scale_ptr, v_scale_ptr)
    pipes = (k_smem, v_smem, k_full, k_empty, v_full, v_empty)
    shape = (cu_ptr, len_ptr, batch, window, tiles)
    table = (table_ptr, stride_table, num_rows)
    factors = (scale, v_factor, softcap)
    FLAGS: gl.constexpr = (WINDOW, SOFTCAP, slope_ptr is not None)
    gl.warp_specialize(
        [
            (_multiply, (tensors, strides, of_heads, pipes, q_smem, shape, items, factors,
                         0, GROUP, CAUSAL, FLAGS, BLOCK_SIZE, BLOCK_M, BLOCK_N)),
            (_multiply, (tensors, strides, of_heads, pipes, q_smem, shape, items, factors,
                         1, GROUP, CAUSAL, FLAGS, BLOCK_SIZE, BLOCK_M, BLOCK_N)),
            (_copy, ((k_desc, v_desc), table, pipes, shape, items,
                     GROUP, CAUSAL, WINDOW, BLOCK_SIZE, HEAD_SIZE, BLOCK_M, BLOCK_N)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


def fits(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
    """Head sizes 64 and 128 of a 16-bit dtype (with 256 the accumulators leave too few registers)."""
    if q.shape[-1] not in (64, 128) or q.dtype == torch.float32 or k_cache.dtype != q.dtype:
        return False
    return pages_fit(k_cache, v_cache)


def launch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    causal: bool,
    args: AttentionArgs,
    config: tuning.Config,
) -> None:
    """Write ``args.out`` and ``args.lse``; ``PROGRAMS`` share all items, or each has one if that is 0."""
    tokens, heads, head_size = q.shape
    blocks, size, kv_heads, _ = k_cache.shape
    config = dict(config)
    group, batch = heads // kv_heads, len(seq_lens)
    tiles = tokens * group // config["BLOCK_M"] + batch
    items = tiles * kv_heads
    programs = min(config.pop("PROGRAMS") or items, items)
    _prefill_sm90_kernel[(programs,)](
        *(q, *page_descriptors(k_cache, v_cache, config["BLOCK_N"]), block_tables, cu_seqlens_q, seq_lens),
        *(args.out, args.lse, args.sinks, args.alibi_slopes, args.k_scale, args.v_scale),
        *(args.scale, args.v_factor, args.window, args.softcap, batch, tiles, items, blocks * size, heads),
        *(*q.stride()[:2], block_tables.stride(0), *args.out.stride()[:2]),
        GROUP=group,
        CAUSAL=causal,
        WINDOW=args.window > 0,
        SOFTCAP=args.softcap > 0,
        BLOCK_SIZE=size,
        HEAD_SIZE=head_size,
        STAGES=config.pop("num_stages"),
        maxnreg=MAX_REGISTERS,
        **config,
    )

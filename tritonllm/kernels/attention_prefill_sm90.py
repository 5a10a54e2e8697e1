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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
LOWEST = gl.constexpr(-3.4028234663852886e38)

BLOCK_M = 128  # rows of a program: 64 for each of its two groups
BLOCK_N = 64
STAGES = 3
# Of 65,536 registers: 232 for each thread that multiplies, 40 for one that copies (with 240 and 24 that one spills).
MAX_REGISTERS = 168


@gluon.jit
def _find_sequence(tile, cu_ptr, batch, GROUP: gl.constexpr, BLOCK_M: gl.constexpr, WARPS: gl.constexpr):
    """As in attention_prefill.py."""
    seq = -1
    for start in range(0, batch, 128):
        b_seq = start + gl.arange(0, 128, gl.BlockedLayout([1], [32], [WARPS], [0]))
        b_cu = gl.load(cu_ptr + b_seq, mask=b_seq < batch, other=0).to(gl.int64)
        seq += gl.sum(((b_seq < batch) & (b_cu * GROUP // BLOCK_M + b_seq <= tile)).to(gl.int32), 0)
    return seq


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
    seq = _find_sequence(tile, cu_ptr, batch, GROUP, BLOCK_M, WARPS)
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
def _softmax(b_s, tile, b_m, b_l, limits, factor, MASKED: gl.constexpr, WINDOW: gl.constexpr):
    """The weights of a tile, the new maximum and sum, and the factor of what was summed before."""
    BLOCK_N: gl.constexpr = b_s.shape[1]
    if MASKED:
        b_begin, b_end = limits
        b_key = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, b_s.type.layout))
        m_s = b_key[None, :] < b_end[:, None]
        if WINDOW:
            m_s = m_s & (b_key[None, :] >= b_begin[:, None])
        b_s = gl.where(m_s, b_s, float("-inf"))
    b_m_new = gl.maximum(b_m, gl.max(b_s, 1) * factor)
    b_alpha = gl.exp2(b_m - b_m_new)
    b_p = gl.exp2(b_s * factor - b_m_new[:, None])
    return b_p, b_m_new, b_l * b_alpha + gl.sum(b_p, 1), b_alpha


@gluon.jit
def _step(tile, count, state, q_smem, pipes, limits, factor, MASKED: gl.constexpr, WINDOW: gl.constexpr,
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
    b_p, b_m, b_l, b_alpha = _softmax(b_s, tile, b_m, b_l, limits, factor, MASKED, WINDOW)
    b_o = warpgroup_mma_wait(0, [t_o])
    mbarrier.arrive(v_empty.index(before % STAGES), count=1)
    b_o *= gl.convert_layout(b_alpha, gl.SliceLayout(1, b_o.type.layout))[:, None]
    return b_o, b_m, b_l, gl.convert_layout(b_p.to(v_smem.dtype), p_layout)


@gluon.jit
def _clear_stale_values(tile, count, first, seq_len, pipes, wide: gl.constexpr):
    """Write zeros over the slots of a page that hold no key [first, seq_len): their weight is 0, but they may hold NaN.

    Both groups do it, each before its own products, so neither waits for the other.
    """
    k_smem, v_smem, k_full, k_empty, v_full, v_empty = pipes
    STAGES: gl.constexpr = v_smem.shape[0]
    BLOCK_N: gl.constexpr = v_smem.shape[1]
    mbarrier.wait(v_full.index(count % STAGES), count // STAGES & 1)
    b_v = v_smem.index(count % STAGES).load(wide)
    b_key = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, wide))
    m_v = (b_key >= first) & (b_key < seq_len)
    v_smem.index(count % STAGES).store(gl.where(m_v[:, None], b_v, gl.zeros_like(b_v)))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _attend(rows, keys, count, q_smem, pipes, sink_ptr, shape, scale, HALF: gl.constexpr, SINKS: gl.constexpr,
            GROUP: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, BLOCK_SIZE: gl.constexpr,
            s_layout: gl.constexpr, o_layout: gl.constexpr, wide: gl.constexpr):  # fmt: skip
    """64 rows over all their keys, from the last tile to the first; returns values, maxima, sums and the count."""
    valid, kv_head, seq, begin, q_len, pair, cached, seq_len = rows
    lo, whole_lo, whole_hi, hi, first, end = keys
    k_smem, v_smem, k_full, k_empty, v_full, v_empty = pipes
    STAGES: gl.constexpr = k_smem.shape[0]
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    HEAD_SIZE: gl.constexpr = v_smem.shape[2]
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    factor = scale * LOG2E
    b_pair = pair + HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, s_layout))
    b_pos = cached + b_pair // GROUP
    limits = (b_pos - shape[3] + 1, gl.minimum(b_pos + 1, end) if CAUSAL else b_pos * 0 + end)
    b_m = gl.full([64], LOWEST, gl.float32, gl.SliceLayout(1, s_layout))
    b_l = gl.zeros([64], gl.float32, gl.SliceLayout(1, s_layout))
    if SINKS:
        b_sink = gl.load(sink_ptr + kv_head * GROUP + b_pair % GROUP).to(gl.float32) * LOG2E
        b_m = gl.maximum(b_sink, LOWEST)
        b_l = gl.exp2(b_sink - b_m)

    b_s = warpgroup_mma_wait(0, [_logits(count, q_smem, pipes, s_layout)])
    mbarrier.arrive(k_empty.index(count % STAGES), count=1)
    b_p, b_m, b_l, b_alpha = _softmax(b_s, hi - 1, b_m, b_l, limits, factor, True, WINDOW)
    if (hi * BLOCK_N > seq_len) & (seq_len % BLOCK_SIZE != 0):
        _clear_stale_values(hi - 1, count, first, seq_len, pipes, wide)
    b_o = gl.zeros([64, HEAD_SIZE], gl.float32, o_layout)
    state = (b_o, b_m, b_l, gl.convert_layout(b_p.to(v_smem.dtype), p_layout))
    count += 1
    top = gl.maximum(gl.minimum(whole_hi, hi - 1), lo)
    low = gl.minimum(gl.maximum(whole_lo, lo), top)
    for i in range(hi - 1 - top):
        state = _step(hi - 2 - i, count, state, q_smem, pipes, limits, factor, True, WINDOW, s_layout, p_layout)
        count += 1
    for i in range(top - low):
        state = _step(top - 1 - i, count, state, q_smem, pipes, limits, factor, False, WINDOW, s_layout, p_layout)
        count += 1
    if WINDOW:
        for i in range(low - lo):
            state = _step(low - 1 - i, count, state, q_smem, pipes, limits, factor, True, WINDOW, s_layout, p_layout)
            count += 1
    b_o, b_m, b_l, b_p = state
    last = count - 1
    if WINDOW:
        if first % BLOCK_SIZE != 0:
            _clear_stale_values(lo, last, first, seq_len, pipes, wide)
    mbarrier.wait(v_full.index(last % STAGES), last // STAGES & 1)
    b_o = warpgroup_mma_wait(0, [warpgroup_mma(b_p, v_smem.index(last % STAGES), b_o, is_async=True)])
    mbarrier.arrive(v_empty.index(last % STAGES), count=1)
    return b_o, b_m, b_l, count


@gluon.jit
def _multiply(tensors, strides, pipes, q_smem, shape, items, scale, HALF: gl.constexpr, LSE: gl.constexpr,
              SINKS: gl.constexpr, GROUP: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
              BLOCK_SIZE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):  # fmt: skip
    """One of the two groups that multiply: rows [64 HALF, 64 HALF + 64) of each item."""
    q_ptr, out_ptr, lse_ptr, sink_ptr = tensors
    stride_q_token, stride_q_head, stride_out_token, stride_out_head, heads = strides
    HEAD_SIZE: gl.constexpr = q_smem.shape[2]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_SIZE, 16])
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_SIZE, HEAD_SIZE // 8], [4, 1], [1, 0])
    count = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        rows, keys = _tile_of(item, shape, GROUP, CAUSAL, WINDOW, BLOCK_M, BLOCK_N, 4)
        valid, kv_head, seq, begin, q_len, pair, cached, seq_len = rows
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
                rows, keys, count, q_smem.index(HALF), pipes, sink_ptr, shape, scale,
                HALF, SINKS, GROUP, CAUSAL, WINDOW, BLOCK_SIZE, s_layout, o_layout, wide,
            )  # fmt: skip
            b_divisor = gl.where(b_l == 0.0, 1.0, b_l)  # 0 for a row that saw nothing
            b_o *= gl.convert_layout(1.0 / b_divisor, gl.SliceLayout(1, o_layout))[:, None]
            p_out = out_ptr + (b_token * stride_out_token + b_head * stride_out_head)[:, None] + b_dim[None, :]
            gl.store(p_out, gl.convert_layout(b_o.to(out_ptr.dtype.element_ty), wide), mask=m_row[:, None])
            if LSE:
                b_pair = pair + HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, s_layout))
                b_lse = gl.where(b_l == 0.0, float("-inf"), b_m + gl.log2(b_divisor)) * LN2
                p_lse = lse_ptr + (begin.to(gl.int64) + b_pair // GROUP) * heads + kv_head * GROUP + b_pair % GROUP
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
    lse_ptr,  # [T, H] float32, read if LSE
    sink_ptr,  # [H], read if SINKS
    scale,
    window,
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
    LSE: gl.constexpr,
    SINKS: gl.constexpr,
    GROUP: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
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
    tensors = (q_ptr, out_ptr, lse_ptr, sink_ptr)
    strides = (stride_q_token, stride_q_head, stride_out_token, stride_out_head, heads)
    pipes = (k_smem, v_smem, k_full, k_empty, v_full, v_empty)
    shape = (cu_ptr, len_ptr, batch, window, tiles)
    table = (table_ptr, stride_table, num_rows)
    gl.warp_specialize(
        [
            (_multiply, (tensors, strides, pipes, q_smem, shape, items, scale,
                         0, LSE, SINKS, GROUP, CAUSAL, WINDOW, BLOCK_SIZE, BLOCK_M, BLOCK_N)),
            (_multiply, (tensors, strides, pipes, q_smem, shape, items, scale,
                         1, LSE, SINKS, GROUP, CAUSAL, WINDOW, BLOCK_SIZE, BLOCK_M, BLOCK_N)),
            (_copy, ((k_desc, v_desc), table, pipes, shape, items,
                     GROUP, CAUSAL, WINDOW, BLOCK_SIZE, HEAD_SIZE, BLOCK_M, BLOCK_N)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


def fits(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
    """Head sizes 64 and 128 of a 16-bit dtype, in caches that are one row of memory after the other."""
    blocks, size, _, head_size = k_cache.shape
    if head_size not in (64, 128) or q.dtype == torch.float32 or k_cache.dtype != q.dtype:
        return False
    if size < 8 or size & (size - 1) or blocks * size >= 2**31:
        return False
    return all(
        cache.stride(2) == head_size
        and cache.stride(0) == size * cache.stride(1)
        and cache.stride(1) % 8 == 0
        and cache.data_ptr() % 16 == 0
        for cache in (k_cache, v_cache)
    )


def launch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    sinks: torch.Tensor | None,
    *,
    causal: bool,
    scale: float,
    window: int,
    programs: int | None,
) -> None:
    """Write ``out`` and ``lse``; ``programs`` share all items, or by default each has one."""
    tokens, heads, head_size = q.shape
    blocks, size, kv_heads, _ = k_cache.shape
    group, batch = heads // kv_heads, len(seq_lens)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    shape, box = [blocks * size, kv_heads * head_size], [min(size, BLOCK_N), head_size]
    k_desc = TensorDescriptor(k_cache, shape, [k_cache.stride(1), 1], box, layout)
    v_desc = TensorDescriptor(v_cache, shape, [v_cache.stride(1), 1], box, layout)
    tiles = tokens * group // BLOCK_M + batch
    items = tiles * kv_heads
    _prefill_sm90_kernel[(items if programs is None else min(programs, items),)](
        *(q, k_desc, v_desc, block_tables, cu_seqlens_q, seq_lens, out),
        *(q if lse is None else lse, q if sinks is None else sinks),
        *(scale, window, batch, tiles, items, blocks * size, heads),
        *(*q.stride()[:2], block_tables.stride(0), *out.stride()[:2]),
        LSE=lse is not None,
        SINKS=sinks is not None,
        GROUP=group,
        CAUSAL=causal,
        WINDOW=window > 0,
        BLOCK_SIZE=size,
        HEAD_SIZE=head_size,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        STAGES=STAGES,
        num_warps=4,
        maxnreg=MAX_REGISTERS,
    )

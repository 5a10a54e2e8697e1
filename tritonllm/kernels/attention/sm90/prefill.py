"""Prefill attention for Hopper: what :mod:`tritonllm.kernels.attention.prefill` computes, with its loads and products
asynchronous. Written in Gluon, the layer of Triton where layouts, barriers and warps are explicit.

A program has three roles (FlashAttention-3: Shah et al., 2024). One warp copies queries, keys and values: pages of the
cache go to shared memory by the bulk copy engine, page by page, some tiles ahead. Two groups of four warps each own 64
rows of the tile and do products and softmax (:mod:`tritonllm.kernels.attention.sm90.rows`); while one waits for its
products the other has the tensor cores. Keys go from last to first, so that the tiles that need a mask come first.

Programs stay, and draw one tile of rows after the other: the copying warp is a tile of rows ahead, and results leave by
the bulk copy engine, so neither start nor end of a tile keeps the tensor cores waiting for memory.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from tritonllm.kernels.attention.arguments import AttentionArgs, Hints, Pages, Queries
from tritonllm.kernels.attention.common import LN2, row_offsets
from tritonllm.kernels.attention.schedule import count_row_items, find_prefill_sequence, find_row_item
from tritonllm.kernels.attention.sm90.rows import (
    attend_rows,
    receive,
    row_descriptor,
    share_of_tiles,
    visible_tiles,
)
from tritonllm.kernels.attention.sm90.shares import shares_of, store_share
from tritonllm.kernels.attention.sm90.tiles import page_descriptors, pages_fit
from tritonllm.kernels.runtime import tuning
from tritonllm.kernels.runtime.checks import require

# Of 65,536 registers: 232 for each thread that multiplies, 40 for one that copies (with 240 and 24 that one spills).
MAX_REGISTERS = 168

# Keys of an item up to which a program draws the next one before it copies them, which hides what drawing takes. With
# more it draws afterwards: what was drawn before waits for all those keys, perhaps while other programs are idle. (2048
# tokens behind 6,000, 300 behind 20,000 and 300 behind 100 at once, with the heads of Llama-3.1-8B: 750 us if drawn
# before, so 645. 16 prompts of 1024: 297 and 280.)
DRAWN_EARLY = gl.constexpr(1024)


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
def _page_ids(table, b_lane, seq, tile, first, end, BLOCK_SIZE: gl.constexpr, BLOCK_N: gl.constexpr):
    """Keys with which the pages of a tile begin, or its parts of one page, and the pages' ids, one a lane."""
    table_ptr, stride_table, num_rows = table
    BOX: gl.constexpr = BLOCK_SIZE if BLOCK_SIZE < BLOCK_N else BLOCK_N
    b_key = tile * BLOCK_N + b_lane * BOX
    m_id = (b_lane < BLOCK_N // BOX) & (b_key >= 0) & (b_key < end) & (b_key + BOX > first)
    p_id = table_ptr + seq.to(gl.int64) * stride_table + b_key // BLOCK_SIZE
    return b_key, gl.load(p_id, mask=m_id, other=-1)


@gluon.jit
def _copy_keys(descs, table, pipes, seq, kv_head, keys, pages, count, BLOCK_SIZE: gl.constexpr):
    """Fetch tiles [lo, hi) of keys and values, the last first. A tile's ``pages`` are looked up a tile ahead."""
    k_desc, v_desc = descs
    lo, hi, first, end = keys
    k_smem, v_smem, k_full, k_empty, v_full, v_empty = pipes
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    BOX: gl.constexpr = BLOCK_SIZE if BLOCK_SIZE < BLOCK_N else BLOCK_N
    PIECES: gl.constexpr = BLOCK_N // BOX
    column = kv_head * k_smem.shape[2]
    b_lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    for i in range(hi - lo):
        b_key, b_id = pages
        # a row beyond the cache reads as zeros: pages that no row sees are not looked up
        b_row = gl.where(b_id >= 0, b_id * BLOCK_SIZE + b_key % BLOCK_SIZE, table[2])
        pages = _page_ids(table, b_lane, seq, hi - 2 - i, first, end, BLOCK_SIZE, BLOCK_N)
        _copy_tile(k_desc, b_row, column, k_full, k_empty, k_smem, count, BOX, PIECES)
        _copy_tile(v_desc, b_row, column, v_full, v_empty, v_smem, count, BOX, PIECES)
        count += 1
    return count


@gluon.jit
def _send(mail, queries, sent, rows, count, share, GROUP: gl.constexpr):
    """Describe a tile of rows to the groups that multiply, and fetch its queries. No key/value head: the end."""
    letter, full, empty = mail
    q_smem, q_desc = queries
    kv_head, begin, q_len, pair, seq_len = rows
    slot = sent % 2
    mbarrier.wait(empty.index(slot), (sent // 2 & 1) ^ 1)
    b_field = gl.arange(0, 8, gl.BlockedLayout([8], [32], [1], [0]))
    b_low = gl.where(b_field == 0, kv_head, gl.where(b_field == 1, begin, gl.where(b_field == 2, q_len, pair)))
    b_high = gl.where(b_field == 4, seq_len, gl.where(b_field == 5, count, gl.where(b_field == 6, share[0], share[1])))
    letter.index(slot).store(gl.where(b_field < 4, b_low, b_high))
    if q_desc is not None:
        if kv_head >= 0:
            D: gl.constexpr = q_smem.shape[2]
            mbarrier.expect(full.index(slot), 2 * 64 * D * 2)
            for half in gl.static_range(2):
                box = q_smem.index(slot * 2 + half)._reinterpret(q_smem.dtype, [64 // GROUP, GROUP, D], q_desc.layout)
                corner = [begin + pair // GROUP + half * (64 // GROUP), kv_head * GROUP, 0]
                tma.async_copy_global_to_shared(q_desc, corner, full.index(slot), box)
        else:
            mbarrier.arrive(full.index(slot), count=1)
    else:
        mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def _draw(draw_ptr, b_lane, now):
    """The next item's number, in lane 0, if it is drawn now: as a vector, for the result of a scalar is waited for at
    once."""
    return gl.atomic_add(draw_ptr + b_lane * 0, b_lane * 0 + 1, mask=(b_lane == 0) & now, sem="relaxed")


@gluon.jit
def _copy(descs, queries, table, pipes, mail, shape, tiles, draw_ptr, GROUP: gl.constexpr, CAUSAL: gl.constexpr,
          WINDOW: gl.constexpr, BLOCK_SIZE: gl.constexpr, BLOCK_M: gl.constexpr, SPLIT: gl.constexpr):  # fmt: skip
    """The copying warp: draws tiles of rows, of which each key/value head has ``tiles``, and fetches what they need."""
    cu_ptr, len_ptr, batch, window, kv_heads = shape
    BLOCK_N: gl.constexpr = pipes[0].shape[1]
    b_lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    LANES: gl.constexpr = 64 if SPLIT else 128  # of twice as many, registers do not suffice
    b_seq = gl.arange(0, LANES, gl.BlockedLayout([LANES // 32], [32], [1], [0]))
    counts = (0, tiles, 0)
    if SPLIT:
        counts = count_row_items(
            b_seq, len_ptr, cu_ptr, batch, window, kv_heads, gl.num_programs(0), GROUP, WINDOW, BLOCK_M, BLOCK_N
        )  # fmt: skip
    items = (counts[0] + counts[1]) * kv_heads
    count = 0
    sent = 0
    item = gl.program_id(0)
    while item < items:
        part = 0
        most = 1
        if SPLIT:
            kv_head, seq, pair, part, most = find_row_item(
                b_seq, item, counts, len_ptr, cu_ptr, batch, window, kv_heads, gl.num_programs(0),
                GROUP, WINDOW, BLOCK_M, BLOCK_N,
            )  # fmt: skip
            begin = gl.load(cu_ptr + seq)
        else:
            tile = tiles - 1 - item % tiles  # the last rows of a sequence see most keys: they start first
            kv_head = item // tiles
            seq = find_prefill_sequence(b_seq, tile, cu_ptr, batch, GROUP, BLOCK_M)
            begin = gl.load(cu_ptr + seq)
            pair = (tile - (begin.to(gl.int64) * GROUP // BLOCK_M).to(gl.int32) - seq) * BLOCK_M
        q_len = gl.load(cu_ptr + seq + 1) - begin
        seq_len = gl.load(len_ptr + seq)
        lo, _, _, hi, first, end = visible_tiles(
            pair, q_len, seq_len, window, GROUP, CAUSAL, WINDOW, BLOCK_M, BLOCK_N
        )  # fmt: skip
        early = (hi - lo) * BLOCK_N <= DRAWN_EARLY
        b_early = _draw(draw_ptr, b_lane, early)
        shares = 1
        if SPLIT:
            shares = shares_of(hi - lo, most, BLOCK_N, SPLIT)
            lo, hi = share_of_tiles(lo, hi, (part, shares))
        if (pair < q_len * GROUP) & (part < shares):
            pages = _page_ids(table, b_lane, seq, hi - 1, first, end, BLOCK_SIZE, BLOCK_N)
            _send(mail, queries, sent, (kv_head, begin, q_len, pair, seq_len), count, (part, shares), GROUP)
            sent += 1
            count = _copy_keys(descs, table, pipes, seq, kv_head, (lo, hi, first, end), pages, count, BLOCK_SIZE)
        b_late = _draw(draw_ptr, b_lane, early == 0)
        drawn = gl.sum(gl.where(b_lane == 0, gl.where(early, b_early, b_late), 0), 0)
        if drawn == items - 1:  # every item was followed by a draw: this was the last of all
            gl.store(draw_ptr, 0)
        item = gl.num_programs(0) + drawn
    _send(mail, queries, sent, (-1, 0, 0, 0, 0), 0, (0, 1), GROUP)


@gluon.jit
def _pairs(rows, HALF: gl.constexpr, GROUP: gl.constexpr, layout: gl.constexpr):
    """Token in q, head and validity of a group's 64 rows."""
    kv_head, begin, q_len, pair, seq_len = rows
    b_pair = pair + HALF * 64 + gl.arange(0, 64, layout)
    return begin.to(gl.int64) + b_pair // GROUP, kv_head * GROUP + b_pair % GROUP, b_pair < q_len * GROUP


@gluon.jit
def _store(b_o, rows, out_ptr, outs, strides, HALF: gl.constexpr, GROUP: gl.constexpr):
    """Write 64 rows ``[64, D]``; if all of them are the sequence's, the bulk copy engine does, and nobody waits."""
    kv_head, begin, q_len, pair, seq_len = rows
    out_smem, out_desc = outs
    D: gl.constexpr = b_o.shape[1]
    start = pair + HALF * 64
    place = out_smem.index(HALF)
    tma.store_wait(0)  # what was here before has been read
    gl.thread_barrier()
    place.store(b_o.to(place.dtype))
    fence_async_shared()
    gl.thread_barrier()
    whole = False
    if out_desc is not None:
        whole = start + 64 <= q_len * GROUP
        if whole:
            box = place._reinterpret(place.dtype, [64 // GROUP, GROUP, D], out_desc.layout)
            tma.async_copy_shared_to_global(out_desc, [begin + start // GROUP, kv_head * GROUP, 0], box)
    if not whole:
        wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
        b_token, b_head, m_row = _pairs(rows, HALF, GROUP, gl.SliceLayout(1, wide))
        p_out = out_ptr + row_offsets(b_token, b_head, strides[0], strides[1])[:, None]
        p_out += gl.arange(0, D, gl.SliceLayout(0, wide))[None, :]
        gl.store(p_out, place.load(wide), mask=m_row[:, None])


@gluon.jit
def _finish(b_o, b_m, b_l, rows, out_ptr, lse_ptr, outs, strides, num_heads, out_scale, HALF: gl.constexpr,
            GROUP: gl.constexpr):  # fmt: skip
    """Write the results of 64 rows over all their keys."""
    b_divisor = gl.where(b_l == 0.0, 1.0, b_l)  # 0 for a row that saw nothing
    b_o *= gl.convert_layout(out_scale / b_divisor, gl.SliceLayout(1, b_o.type.layout))[:, None]
    _store(b_o, rows, out_ptr, outs, strides, HALF, GROUP)
    if lse_ptr is not None:
        b_lse = gl.where(b_l == 0.0, float("-inf"), b_m + gl.log2(b_divisor)) * LN2
        layout: gl.constexpr = b_lse.type.layout
        b_token, b_head, m_row = _pairs(rows, HALF, GROUP, layout)
        gl.store(lse_ptr + b_token * num_heads + b_head, b_lse, mask=m_row)


@gluon.jit
def _load_queries(place, rows, q_ptr, strides, HALF: gl.constexpr, GROUP: gl.constexpr):
    """Fetch 64 rows of queries where the bulk copy engine cannot."""
    D: gl.constexpr = place.shape[1]
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    b_token, b_head, m_row = _pairs(rows, HALF, GROUP, gl.SliceLayout(1, wide))
    p_q = q_ptr + row_offsets(b_token, b_head, strides[0], strides[1])[:, None]
    p_q += gl.arange(0, D, gl.SliceLayout(0, wide))[None, :]
    place.store(gl.load(p_q, mask=m_row[:, None], other=0.0))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _multiply(tensors, strides, heads, pipes, queries, outs, parts, mail, window, factors, HALF: gl.constexpr,
              GROUP: gl.constexpr, FLAGS: gl.constexpr, BLOCK_SIZE: gl.constexpr, BLOCK_M: gl.constexpr,
              PARTS: gl.constexpr, MERGED: gl.constexpr, SPLIT: gl.constexpr):  # fmt: skip
    """One of the two groups that multiply: rows [64 HALF, 64 HALF + 64) of each tile that is sent."""
    q_ptr, out_ptr, lse_ptr = tensors
    q_strides, out_strides, num_heads = strides
    sink_ptr, slope_ptr, k_scale_ptr, v_scale_ptr = heads
    q_smem, q_desc = queries
    BLOCK_N: gl.constexpr = pipes[0].shape[1]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, q_smem.shape[2], 16])
    got = 0
    kv_head = 0
    while kv_head >= 0:
        slot = got % 2
        kv_head, begin, q_len, pair, seq_len, count, part, shares = receive(mail, got)
        if kv_head >= 0:
            scale, out_scale, softcap = factors
            if k_scale_ptr is not None:
                scale *= gl.load(k_scale_ptr + kv_head)
            if v_scale_ptr is not None:
                out_scale *= gl.load(v_scale_ptr + kv_head)
            rows = (kv_head, begin, q_len, pair, seq_len)
            place = q_smem.index(slot * 2 + HALF)
            if q_desc is None:
                _load_queries(place, rows, q_ptr, q_strides, HALF, GROUP)
            b_o, b_m, b_l, rows, share = attend_rows(
                rows, count, (part, shares), place, mail, got, pipes, heads, window, (scale, softcap),
                HALF, GROUP, FLAGS, BLOCK_SIZE, BLOCK_M, PARTS, MERGED, SPLIT, s_layout, o_layout,
            )  # fmt: skip
            whole = True
            if SPLIT:
                whole = share[1] == 1
                if share[1] > 1:
                    store_share(
                        b_o, b_m, b_l, rows, share, out_ptr, lse_ptr, out_strides, num_heads, parts, out_scale,
                        HALF, GROUP,
                    )  # fmt: skip
            if whole:
                _finish(b_o, b_m, b_l, rows, out_ptr, lse_ptr, outs, out_strides, num_heads, out_scale, HALF, GROUP)
        got += 1
    tma.store_wait(0)


# Arguments whose values and alignment change from step to step: one compilation serves them all.
@gluon.jit(do_not_specialize=["table_ptr", "cu_ptr", "len_ptr", "window", "batch", "tiles", "stride_table"])
def _prefill_sm90_kernel(
    q_ptr,  # [T, H, D]
    q_desc,  # the same, or None
    k_desc,  # [P * S, K * D]
    v_desc,
    table_ptr,  # [B, M]
    cu_ptr,  # [B + 1]
    len_ptr,  # [B]
    out_ptr,  # [T, H, D]
    out_desc,  # the same, or None
    lse_ptr,  # [T, H] float32, or None
    sink_ptr,  # [H], or None
    slope_ptr,  # [H], or None
    k_scale_ptr,  # [K], or None
    v_scale_ptr,  # [K], or None
    draw_ptr,  # int32 zero, which it is again in the end
    part_ptr,  # [G, 128, D + 1] float32 for G programs, or None; then 2 G more zeros follow the first
    scale,
    v_factor,
    window,
    softcap,
    batch,
    tiles,  # of BLOCK_M rows, for each key/value head
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
    PARTS: gl.constexpr,  # of a tile's product with the values
    MERGED: gl.constexpr,  # all tiles of keys in the same loops
    SPLIT: gl.constexpr,  # keys are shared out, and merging a share takes as long as so many of them; 0: they are not
    STAGES: gl.constexpr,
):
    """A program takes the item of its number, then draws others: bundles of one key/value head."""
    dtype: gl.constexpr = k_desc.dtype
    q_smem = gl.allocate_shared_memory(dtype, [4, 64, HEAD_SIZE], k_desc.layout)  # two tiles
    out_smem = gl.allocate_shared_memory(dtype, [2, 64, HEAD_SIZE], k_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_SIZE], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_SIZE], k_desc.layout)
    letter = gl.allocate_shared_memory(gl.int32, [2, 8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)  # by both groups
        mbarrier.init(v_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
    tensors = (q_ptr, out_ptr, lse_ptr)
    strides = ((stride_q_token, stride_q_head), (stride_out_token, stride_out_head), heads)
    of_heads = (sink_ptr, slope_ptr, k_scale_ptr, v_scale_ptr)
    pipes = (k_smem, v_smem, k_full, k_empty, v_full, v_empty)
    queries = (q_smem, q_desc)
    outs = (out_smem, out_desc)
    mail = (letter, q_full, q_empty)
    parts = (part_ptr, draw_ptr)
    table = (table_ptr, stride_table, num_rows)
    factors = (scale, v_factor, softcap)
    FLAGS: gl.constexpr = (WINDOW, SOFTCAP, slope_ptr is not None, CAUSAL)
    gl.warp_specialize(
        [
            (_multiply, (tensors, strides, of_heads, pipes, queries, outs, parts, mail, window, factors,
                         0, GROUP, FLAGS, BLOCK_SIZE, BLOCK_M, PARTS, MERGED, SPLIT)),
            (_multiply, (tensors, strides, of_heads, pipes, queries, outs, parts, mail, window, factors,
                         1, GROUP, FLAGS, BLOCK_SIZE, BLOCK_M, PARTS, MERGED, SPLIT)),
            (_copy, ((k_desc, v_desc), queries, table, pipes, mail, (cu_ptr, len_ptr, batch, window, heads // GROUP),
                     tiles, draw_ptr, GROUP, CAUSAL, WINDOW, BLOCK_SIZE, BLOCK_M, SPLIT)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


def fits(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
    """Head sizes 64 and 128 of a 16-bit dtype (with 256 the accumulators leave too few registers)."""
    if q.shape[-1] not in (64, 128) or q.dtype == torch.float32 or k_cache.dtype != q.dtype:
        return False
    return pages_fit(k_cache, v_cache)


def launch(queries: Queries, pages: Pages, hints: Hints, args: AttentionArgs, config: tuning.Config) -> None:
    """Write ``args.out`` and ``args.lse``."""
    (q, cu_seqlens_q, _, causal, _), (k_cache, v_cache, block_tables, seq_lens) = queries, pages
    workspace = hints.workspace
    require(causal or args.window == 0, "without causality, the Hopper kernel knows no window")
    tokens, heads, head_size = q.shape
    blocks, size, kv_heads, _ = k_cache.shape
    config = dict(config)
    group, batch = heads // kv_heads, len(seq_lens)
    tiles = tokens * group // config["BLOCK_M"] + batch
    programs = config.pop("PROGRAMS")
    needed = 1 + 2 * programs if config["SPLIT"] else 1
    if workspace is None or len(workspace) < needed:
        workspace = torch.zeros(needed, dtype=torch.int32, device=q.device)
    part = None
    if config["SPLIT"]:
        part = torch.empty((programs, config["BLOCK_M"], head_size + 1), dtype=torch.float32, device=q.device)
    else:
        programs = min(programs, tiles * kv_heads)
    _prefill_sm90_kernel[(programs,)](
        *(q, row_descriptor(q, group), *page_descriptors(k_cache, v_cache, config["BLOCK_N"]), block_tables),
        *(cu_seqlens_q, seq_lens, args.out, row_descriptor(args.out, group), args.lse, args.sinks, args.alibi_slopes),
        *(args.k_scale, args.v_scale, workspace, part, args.scale, args.v_factor, args.window, args.softcap),
        *(batch, tiles, blocks * size, heads),
        *(*q.stride()[:2], block_tables.stride(0), *args.out.stride()[:2]),
        GROUP=group,
        CAUSAL=causal,
        WINDOW=args.window > 0,
        SOFTCAP=args.softcap > 0,
        BLOCK_SIZE=size,
        HEAD_SIZE=head_size,
        STAGES=config.pop("num_stages"),
        # with a window the last step clears stale keys; without causality nobody has measured it
        MERGED=config.pop("MERGED") and causal and args.window == 0,
        maxnreg=MAX_REGISTERS,
        **config,
    )

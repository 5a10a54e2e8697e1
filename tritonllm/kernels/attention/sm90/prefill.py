"""Prefill attention for Hopper: what :mod:`tritonllm.kernels.attention.prefill` computes, with its loads and products
asynchronous. Written in Gluon, the layer of Triton where layouts, barriers and warps are explicit.

A program has three roles (FlashAttention-3: Shah et al., 2024). One warp copies queries, keys and values
(:mod:`tritonllm.kernels.attention.sm90.copying`): pages of the cache go to shared memory by the bulk copy engine, page
by page, some tiles ahead. Two groups of four warps each own 64 rows of the tile and do products and softmax
(:mod:`tritonllm.kernels.attention.sm90.rows`); while one waits for its products the other has the tensor cores. Keys go
from last to first, so that the tiles that need a mask come first.

Programs stay, and draw one tile of rows after the other: the copying warp is a tile of rows ahead, and results leave by
the bulk copy engine, so neither start nor end of a tile keeps the tensor cores waiting for memory.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from tritonllm.kernels.attention.arguments import AttentionArgs, Hints, Pages, Queries
from tritonllm.kernels.attention.common import LN2, row_offsets
from tritonllm.kernels.attention.sm90.copying import copy_items
from tritonllm.kernels.attention.sm90.rows import attend_rows, receive, row_descriptor
from tritonllm.kernels.attention.sm90.shares import store_share
from tritonllm.kernels.attention.sm90.tiles import page_descriptors, pages_fit
from tritonllm.kernels.runtime import tuning
from tritonllm.kernels.runtime.checks import require

# Of 65,536 registers: 232 for each thread that multiplies, 40 for one that copies (with 240 and 24 that one spills).
MAX_REGISTERS = 168


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
            (copy_items, ((k_desc, v_desc), queries, table, pipes, mail,
                          (cu_ptr, len_ptr, batch, window, heads // GROUP), tiles, draw_ptr, GROUP, CAUSAL, WINDOW,
                          BLOCK_SIZE, BLOCK_M, SPLIT)),
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

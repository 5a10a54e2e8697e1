"""Decode and verify attention for Hopper: what :mod:`tritonllm.kernels.attention.portable.balanced` computes, with its
loads and products asynchronous. Written in Gluon, the layer of Triton where layouts, barriers and warps are explicit.

One warp of a program copies keys and values, page by page, into a ring of tiles in shared memory, by the bulk copy
engine; it runs ahead from one pair of sequence and head to the next, so memory is never idle between them
(FlashAttention-3's division of work: Shah et al., 2024). Four warps multiply: up to eight rows each on its own
(:mod:`tritonllm.kernels.attention.sm90.apart`), more together (:mod:`tritonllm.kernels.attention.sm90.part`).

Processors are not equally fast: on an H200, programs with equal stretches of keys end between 213 and 272 us. So where
whole pairs make as even shares as stretches do, a program draws one pair after the other, and no pair is cut; that is
decided on the device. Pairs of equal length do if they go round; of unequal length, if the longest are drawn first
(Graham, "Bounds on multiprocessing timing anomalies", 1969), for which the caller gives the order: 128 sequences of 100
to 2000 keys 127.5 us, cut 134.3, reading them 124. (Stretches in rounds of smaller and smaller ones, drawn likewise,
cut so many pairs that they took 277 us instead of 260.)
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from tritonllm.kernels.attention.arguments import AttentionArgs, Hints, Pages, Queries
from tritonllm.kernels.attention.common import FLOAT8
from tritonllm.kernels.attention.schedule import count_tiles, cut, describe_sequence, divide, find_sequence
from tritonllm.kernels.attention.sm90.apart import attend_apart
from tritonllm.kernels.attention.sm90.part import attend_to_part
from tritonllm.kernels.attention.sm90.tiles import page_descriptors, pages_fit
from tritonllm.kernels.runtime import tuning
from tritonllm.kernels.runtime.dependent_launch import dependent_launch, let_next_start, wait_for_previous


@gluon.jit
def _make_plan(lengths, order_ptr, heads, WINDOW: gl.constexpr, BLOCK_N: gl.constexpr, MIN_TILES: gl.constexpr,
               BLOCK_B: gl.constexpr):  # fmt: skip
    """How the keys are dealt out, and where this program begins.

    Returns:
        ``(plan, place)``: the plan is (the program's stretch of the list, tiles a stretch, tiles a part, pairs to draw
        or 0, programs), the place (head, sequence, where the pair's first tile is in the list). A program that draws
        takes the pair at its place, whatever its stretch. Pairs are drawn sequence by sequence: a block's heads lie
        side by side, and so are read at about the same time (128 x 2048, heads 16/8: 240.5 us, head by head 244.4).
    """
    len_ptr, cu_ptr, batch, row_tiles, window = lengths
    b_lane = gl.arange(0, BLOCK_B, gl.BlockedLayout([BLOCK_B // 32], [32], [4], [0]))  # all in each warp: no barrier
    head_tiles, longest = count_tiles(b_lane, len_ptr, cu_ptr, batch, window, WINDOW, BLOCK_N)
    all_tiles = head_tiles * heads
    programs = gl.num_programs(0)
    share, unit = divide(all_tiles, programs, MIN_TILES)
    begin = gl.program_id(0) * share
    end = gl.minimum(begin + share, all_tiles)
    items = batch * heads
    head = begin // head_tiles
    seq = 0
    pair = 0
    even = gl.cdiv(items, programs) * longest * 16 <= 17 * share
    if order_ptr is not None:
        # 50 sequences of 100 to 2000 keys, 400 pairs: 54.4 us, cut 57.5; 40 of 2000, 320 pairs: 86.9 and 83.3; 128 of
        # 300 and one of 8000: 103 and 56
        even = even | ((2 * longest <= 3 * share) & (2 * items >= 3 * programs))
    if even:
        head = gl.program_id(0) % heads
        seq = gl.program_id(0) // heads
        if order_ptr is not None:
            seq = gl.load(order_ptr + gl.minimum(seq, batch - 1))
        begin = 0
        end = (gl.program_id(0) < items).to(gl.int32)
    else:
        items = 0
        at = begin - head * head_tiles
        seq, before = find_sequence(b_lane, at, len_ptr, cu_ptr, batch, window, WINDOW, BLOCK_N)
        pair = begin - at + before
    return (begin, end, share, unit, items, programs), (head, seq, pair)


@gluon.jit
def _part_of(place, plan, tiles):
    """Which of a pair's tiles are this program's."""
    begin, end, share, unit, items, programs = plan
    lo = gl.where(items > 0, 0, cut(begin - place[2], tiles, unit))
    return lo, gl.where(items > 0, tiles, cut(end - place[2], tiles, unit))


@gluon.jit
def _draw(draw_ptr, order_ptr, heads, items, programs):
    """The next pair's number, ``sequence * heads + head``; ``items`` or more if none is left."""
    drawn = gl.atomic_add(draw_ptr, 1, sem="relaxed")
    if drawn == items - 1:  # every program draws in vain once: this was the last draw of all
        gl.store(draw_ptr, 0)
    item = programs + drawn
    if order_ptr is not None:
        seq = gl.load(order_ptr + item // heads, mask=item < items, other=0)
        item = gl.where(item < items, seq * heads + item % heads, items)
    return item


@gluon.jit
def _send(mail, count, item):
    """Tell the warps that multiply which pair was drawn."""
    letter, full, empty = mail
    mbarrier.wait(empty, (count & 1) ^ 1)
    letter.store(item + gl.arange(0, 4, gl.BlockedLayout([1], [32], [1], [0])) * 0)
    mbarrier.arrive(full, count=1)


@gluon.jit
def _receive(mail, count):
    letter, full, empty = mail
    mbarrier.wait(full, count & 1)
    b_item = letter.load(gl.BlockedLayout([1], [32], [4], [0]))
    mbarrier.arrive(empty, count=1)
    return gl.max(b_item, 0)


@gluon.jit
def _copy_tile(descs, pipe, p_table, count, tile, column, first, seq_len, num_rows, BLOCK_SIZE: gl.constexpr):
    """Fetch a tile of keys and one of values, page by page, once their place is free."""
    k_desc, v_desc = descs
    k_smem, v_smem, full, empty = pipe
    STAGES: gl.constexpr = k_smem.shape[0]
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    BOX: gl.constexpr = BLOCK_SIZE if BLOCK_SIZE < BLOCK_N else BLOCK_N
    BYTES: gl.constexpr = 2 * BLOCK_N * k_smem.shape[2] * k_smem.dtype.primitive_bitwidth // 8
    pages = ()
    for i in gl.static_range(BLOCK_N // BOX):
        key = tile * BLOCK_N + i * BOX
        m_page = (key < seq_len) & (key + BOX > first)
        pages += (gl.load(p_table + key // BLOCK_SIZE, mask=m_page, other=-1),)  # type: ignore[assignment]
    stage = count % STAGES
    mbarrier.wait(empty.index(stage), (count // STAGES & 1) ^ 1)
    mbarrier.expect(full.index(stage), BYTES)
    for i in gl.static_range(BLOCK_N // BOX):
        # a row beyond the cache reads as zeros: pages that no row sees are not looked up
        row = gl.where(pages[i] >= 0, pages[i] * BLOCK_SIZE + (tile * BLOCK_N + i * BOX) % BLOCK_SIZE, num_rows)
        k_place = k_smem.index(stage).slice(i * BOX, BOX, 0)
        v_place = v_smem.index(stage).slice(i * BOX, BOX, 0)
        tma.async_copy_global_to_shared(k_desc, [row, column], full.index(stage), k_place)
        tma.async_copy_global_to_shared(v_desc, [row, column], full.index(stage), v_place)


@gluon.jit
def _copy(descs, table, pipe, mail, lengths, plan, place, draw_ptr, order_ptr, WINDOW: gl.constexpr,
          BLOCK_SIZE: gl.constexpr, EARLY: gl.constexpr):  # fmt: skip
    """The copying warp. EARLY: it begins while the kernel before has yet to write the last key and value of sequences,
    and kernels before that may still draw."""
    table_ptr, stride_table, num_rows = table
    len_ptr, cu_ptr, batch, row_tiles, window = lengths
    begin, end, share, unit, items, programs = plan
    head, seq, pair = place
    BLOCK_N: gl.constexpr = pipe[0].shape[1]
    HEAD_SIZE: gl.constexpr = pipe[0].shape[2]
    heads = items // batch
    count = 0
    sent = 0
    item = items
    while pair < end:
        seq_len, _, first, tiles = describe_sequence(seq, True, len_ptr, cu_ptr, window, WINDOW, BLOCK_N)
        part_lo, part_hi = _part_of((head, seq, pair), plan, tiles)
        p_table = table_ptr + seq.to(gl.int64) * stride_table
        column = head // row_tiles * HEAD_SIZE
        for tile in range(first // BLOCK_N + part_lo, first // BLOCK_N + part_hi):
            if EARLY:
                if (tile + 1) * BLOCK_N >= seq_len:
                    wait_for_previous(True)
            if (items > 0) & (tile + 1 == first // BLOCK_N + part_hi):  # before the last one: the ring is still full
                item = _draw(draw_ptr, order_ptr, heads, items, programs)
                _send(mail, sent, item)
                sent += 1
            _copy_tile(descs, pipe, p_table, count, tile, column, first, seq_len, num_rows, BLOCK_SIZE)
            count += 1
        if items > 0:
            head = item % heads
            seq = item // heads
            pair = (item >= items).to(gl.int32)
        else:
            pair += tiles
            seq += 1
            if seq == batch:
                seq = 0
                head += 1


@gluon.jit
def _multiply(tensors, strides, factors, parts, pipe, buffers, mail, lengths, plan, place, DTYPE: gl.constexpr,
              GROUP: gl.constexpr, ROWS: gl.constexpr, BLOCK_M: gl.constexpr, FLAGS: gl.constexpr,
              BLOCK_SIZE: gl.constexpr, EARLY: gl.constexpr):  # fmt: skip
    """The warps that multiply: for up to eight rows each on its own."""
    wait_for_previous(EARLY)
    len_ptr, cu_ptr, batch, row_tiles, window = lengths
    begin, end, share, unit, items, programs = plan
    head, seq, pair = place
    BLOCK_N: gl.constexpr = pipe[0].shape[1]
    heads = items // batch
    count = 0
    received = 0
    while pair < end:
        seq_len, q_len, first, tiles = describe_sequence(seq, True, len_ptr, cu_ptr, window, FLAGS[1], BLOCK_N)
        part_lo, part_hi = _part_of((head, seq, pair), plan, tiles)
        if part_lo < part_hi:
            sequence = (first, seq_len, seq_len - q_len)
            if BLOCK_M <= 8:
                count = attend_apart(
                    (head, seq, pair), part_lo, part_hi, sequence, tiles, count, tensors, strides, factors, parts, pipe,
                    lengths, plan, DTYPE, GROUP, ROWS, BLOCK_M, FLAGS, BLOCK_SIZE,
                )  # fmt: skip
            else:
                count = attend_to_part(
                    (head, seq, pair), part_lo, part_hi, sequence, tiles, count, tensors, strides, factors, parts,
                    buffers + (pipe,), lengths, plan, GROUP, ROWS, FLAGS, BLOCK_SIZE,
                )  # fmt: skip
        if items > 0:
            item = _receive(mail, received)
            received += 1
            head = item % heads
            seq = item // heads
            pair = (item >= items).to(gl.int32)
        else:
            pair += tiles
            seq += 1
            if seq == batch:
                seq = 0
                head += 1


# Arguments whose values and alignment change from step to step: one compilation serves them all.
@gluon.jit(
    do_not_specialize=[
        *("table_ptr", "cu_ptr", "len_ptr", "tree_ptr", "order_ptr"),
        *("window", "batch", "row_tiles", "num_rows", "stride_table"),
    ]
)
def decode_sm90_kernel(
    q_ptr,  # [T, H, D]
    k_desc,  # [P * S, K * D]
    v_desc,
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
    count_ptr,  # [G + 1] int32 zeros, which they are again in the end
    order_ptr,  # [B], the sequences from the longest to the shortest; or None
    scale,
    v_factor,
    window,
    softcap,
    batch,
    kv_heads,
    row_tiles,
    num_rows,
    stride_q_token,
    stride_q_head,
    stride_table,
    stride_out_token,
    stride_out_head,
    DTYPE: gl.constexpr,  # of the products
    GROUP: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    HEAD_SIZE: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    ROWS: gl.constexpr,  # of a tile that hold a query
    STAGES: gl.constexpr,
    SETTLED: gl.constexpr,  # the kernel before writes nothing of all this but queries and each sequence's last key
    PDL: gl.constexpr,
    MIN_TILES: gl.constexpr = 4,
    BLOCK_B: gl.constexpr = 256,
):
    """One program: a stretch of the list of tiles, as many pairs as it touches, or the pairs that it draws."""
    buffers = ()
    if BLOCK_M > 8:  # queries and weights, for products of four warps together
        q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, HEAD_SIZE], DTYPE)
        p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], DTYPE)
        q_smem = gl.allocate_shared_memory(DTYPE, [BLOCK_M, HEAD_SIZE], q_layout)
        p_smem = gl.allocate_shared_memory(DTYPE, [BLOCK_N, BLOCK_M], p_layout)
        buffers = (q_smem, p_smem)  # type: ignore[assignment]
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BLOCK_N, HEAD_SIZE], k_desc.layout)
    v_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BLOCK_N, HEAD_SIZE], k_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    letter = gl.allocate_shared_memory(gl.int32, [1, 4], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    mail_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mail_empty = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    mbarrier.init(mail_full.index(0), count=1)
    mbarrier.init(mail_empty.index(0), count=1)

    let_next_start(PDL)
    if not SETTLED:
        wait_for_previous(PDL)
    EARLY: gl.constexpr = SETTLED and PDL
    lengths = (len_ptr, cu_ptr, batch, row_tiles, window)
    plan, place = _make_plan(lengths, order_ptr, kv_heads * row_tiles, WINDOW, BLOCK_N, MIN_TILES, BLOCK_B)
    tensors = (q_ptr, out_ptr, lse_ptr, sink_ptr, slope_ptr, tree_ptr, k_scale_ptr, v_scale_ptr)
    strides = (stride_q_token, stride_q_head, stride_out_token, stride_out_head, kv_heads * GROUP)
    pipe = (k_smem, v_smem, full, empty)
    mail = (letter.index(0), mail_full.index(0), mail_empty.index(0))
    FLAGS: gl.constexpr = (cu_ptr is not None, WINDOW, SOFTCAP, slope_ptr is not None, tree_ptr is not None)
    gl.warp_specialize(
        [
            (_multiply, (tensors, strides, (scale, v_factor, softcap), (part_ptr, part_lse_ptr, count_ptr),
                         pipe, buffers, mail, lengths, plan, place, DTYPE, GROUP, ROWS, BLOCK_M, FLAGS, BLOCK_SIZE,
                         EARLY)),
            (_copy, ((k_desc, v_desc), (table_ptr, stride_table, num_rows), pipe, mail, lengths, plan, place,
                     count_ptr + gl.num_programs(0), order_ptr, WINDOW, BLOCK_SIZE, EARLY)),
        ],
        [1],
        [40],
    )  # fmt: skip


def fits(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
    """16-bit queries with heads of 64 or 128, in caches of that dtype or float8."""
    if q.shape[-1] not in (64, 128) or q.dtype == torch.float32:
        return False
    return pages_fit(k_cache, v_cache)


def launch(queries: Queries, pages: Pages, hints: Hints, args: AttentionArgs, config: tuning.Config) -> None:
    """Write ``args.out`` and ``args.lse``, of tokens that see those before them, or a tree's ancestors."""
    q, cu_seqlens_q, max_seqlen_q, _, tree_mask = queries
    (k_cache, v_cache, block_tables, seq_lens), (workspace, settled, order, _) = pages, hints
    batch, heads, head_size = len(seq_lens), *q.shape[1:]
    blocks, size, kv_heads, _ = k_cache.shape
    group = heads // kv_heads
    config = dict(config)
    stages, block_m, block_n = config.pop("num_stages"), config["BLOCK_M"], config["BLOCK_N"]
    row_tiles = triton.cdiv(group * max_seqlen_q, block_m)
    tiles = batch * kv_heads * row_tiles * max(1, triton.cdiv(hints.most_keys(pages), block_n))
    programs = min(config.pop("PROGRAMS"), tiles)
    if workspace is None or len(workspace) < 2:
        workspace = torch.zeros(programs + 1, dtype=torch.int32, device=q.device)
    programs = min(programs, len(workspace) - 1)
    part = torch.empty((2 * programs, block_m, head_size), dtype=torch.float32, device=q.device)
    part_lse = torch.empty(part.shape[:2], dtype=torch.float32, device=q.device)
    product = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}[q.dtype]
    decode_sm90_kernel[(programs,)](
        *(q, *page_descriptors(k_cache, v_cache, block_n), block_tables, cu_seqlens_q, seq_lens, tree_mask, args.out),
        *(args.lse, args.sinks, args.alibi_slopes, args.k_scale, args.v_scale, part, part_lse, workspace),
        order,
        *(args.scale, args.v_factor, args.window, args.softcap, batch, kv_heads, row_tiles, blocks * size),
        *(*q.stride()[:2], block_tables.stride(0), *args.out.stride()[:2]),
        DTYPE=gl.float16 if k_cache.dtype in FLOAT8 else product,
        GROUP=group,
        WINDOW=args.window > 0,
        SOFTCAP=args.softcap > 0,
        BLOCK_SIZE=size,
        HEAD_SIZE=head_size,
        ROWS=min(block_m, triton.next_power_of_2(group * max_seqlen_q)),
        STAGES=stages,
        SETTLED=settled,
        **dependent_launch(q.device),
        **config,
    )

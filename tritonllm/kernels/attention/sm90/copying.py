"""The copying warp of Hopper's prefill: it draws tiles of rows and fetches queries, keys and values. In Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from tritonllm.kernels.attention.schedule import count_row_items, find_prefill_sequence, find_row_item
from tritonllm.kernels.attention.sm90.rows import share_of_tiles, visible_tiles
from tritonllm.kernels.attention.sm90.shares import shares_of

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
def copy_items(descs, queries, table, pipes, mail, shape, tiles, draw_ptr, GROUP: gl.constexpr, CAUSAL: gl.constexpr,
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
        shares = 1
        if SPLIT:
            shares = shares_of(hi - lo, most, BLOCK_N, SPLIT)
            lo, hi = share_of_tiles(lo, hi, (part, shares))
        else:  # of shares there are few, and they are cut evenly: nothing is drawn early
            early = (hi - lo) * BLOCK_N <= DRAWN_EARLY
            b_early = _draw(draw_ptr, b_lane, early)
        if (pair < q_len * GROUP) & (part < shares):
            pages = _page_ids(table, b_lane, seq, hi - 1, first, end, BLOCK_SIZE, BLOCK_N)
            _send(mail, queries, sent, (kv_head, begin, q_len, pair, seq_len), count, (part, shares), GROUP)
            sent += 1
            count = _copy_keys(descs, table, pipes, seq, kv_head, (lo, hi, first, end), pages, count, BLOCK_SIZE)
        if SPLIT:
            drawn = gl.atomic_add(draw_ptr, 1, sem="relaxed")
        elif early:
            drawn = gl.sum(gl.where(b_lane == 0, b_early, 0), 0)
        else:  # not as a vector: registers would not suffice with Triton 3.9
            drawn = gl.atomic_add(draw_ptr, 1, sem="relaxed")
        if drawn == items - 1:  # every item was followed by a draw: this was the last of all
            gl.store(draw_ptr, 0)
        item = gl.num_programs(0) + drawn
    _send(mail, queries, sent, (-1, 0, 0, 0, 0), 0, (0, 1), GROUP)

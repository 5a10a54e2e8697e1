"""Which keys a program of an attention kernel takes, found on the device.

Decode and verify: equal work for all programs. One list holds the tiles of keys of all (head, sequence) pairs, head by
head, sequence by sequence, tile by tile, and program g takes tiles [g share, (g + 1) share). Nothing but the lengths
decides where a pair is cut, so every program finds the same cuts, its own and its neighbours', with no table of them.

Prefill: a program has one tile of rows, and all the keys that those see; where rows are few, a share of those keys, of
which tiles of rows that see many have more than others.

The functions take the lanes of their vectors as arguments, so that kernels in Gluon can call them with a layout.
"""

import triton
import triton.language as tl

from tritonllm.kernels.attention.common import LOWEST, finish_softmax


@triton.jit
def describe_sequence(seq, m_seq, len_ptr, cu_ptr, window, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """For a sequence or a vector of them: length, new tokens, first visible key and tiles of keys (at least one).

    A sequence without new tokens counts as empty; where ``m_seq`` is False there are 0 tiles.
    """
    seq_len = tl.load(len_ptr + seq, mask=m_seq, other=0)
    if cu_ptr is None:
        q_len = seq * 0 + 1
    else:
        q_len = tl.load(cu_ptr + seq + 1, mask=m_seq, other=0) - tl.load(cu_ptr + seq, mask=m_seq, other=0)
        seq_len = tl.where(q_len > 0, seq_len, 0)
    first = seq_len * 0
    if WINDOW:
        first = tl.maximum(seq_len - q_len + 1 - window, 0)
    tiles = tl.maximum(tl.cdiv(seq_len - first // BLOCK_N * BLOCK_N, BLOCK_N), 1)
    return seq_len, q_len, first, tl.where(m_seq, tiles, 0)


@triton.jit
def count_tiles(b_lane, len_ptr, cu_ptr, batch, window, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Tiles of keys of all sequences together, for one head, and of the longest; ``b_lane`` counts from 0."""
    b_total = b_lane * 0
    b_most = b_lane * 0
    for start in tl.range(0, batch, b_lane.shape[0]):
        b_seq = start + b_lane
        _, _, _, b_tiles = describe_sequence(b_seq, b_seq < batch, len_ptr, cu_ptr, window, WINDOW, BLOCK_N)
        b_total += b_tiles
        b_most = tl.maximum(b_most, b_tiles)
    return tl.sum(b_total, 0), tl.max(b_most, 0)


@triton.jit
def find_sequence(b_lane, tile, len_ptr, cu_ptr, batch, window, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """The sequence that a tile belongs to, and the tiles of all before it."""
    seq = 0
    before = 0
    total = 0
    for start in tl.range(0, batch, b_lane.shape[0]):
        b_seq = start + b_lane
        _, _, _, b_tiles = describe_sequence(b_seq, b_seq < batch, len_ptr, cu_ptr, window, WINDOW, BLOCK_N)
        b_end = total + tl.cumsum(b_tiles, 0)
        b_before = (b_seq < batch) & (b_end <= tile)
        seq += tl.sum(b_before.to(tl.int32), 0)
        before += tl.sum(tl.where(b_before, b_tiles, 0), 0)
        total = tl.max(b_end, 0)
    return seq, before


@triton.jit
def divide(all_tiles, programs, MIN_TILES: tl.constexpr):
    """Each program's share of the list, and the least tiles of a pair's part.

    To cut a pair costs as much as some tiles: a program with few cuts only where long parts remain. MIN_TILES is a
    power of two, and so is what is returned: cuts are found many times.
    """
    share = tl.cdiv(all_tiles, programs)
    unit = share * 0 + 1
    for doubling in tl.static_range(5):
        if 2 << doubling <= MIN_TILES:
            unit = tl.where(share * (2 << doubling) <= MIN_TILES * MIN_TILES, 2 << doubling, unit)
    return share, unit


@triton.jit
def cut(at, tiles, unit):
    """Where a pair of ``tiles`` tiles is cut if the programs' border is at its tile ``at``: no part under ``unit``."""
    b_cut = (at + (unit >> 1)) & -unit
    b_cut = tl.where((at >= tiles) | (tiles - b_cut < unit), tiles, b_cut)
    return tl.where(at <= 0, 0, b_cut)


@triton.jit
def merge_parts(
    part_ptr,  # [2 G, M, D] float32 for G programs
    part_lse_ptr,  # [2 G, M] float32, base 2
    pair,  # the first tile of a pair in the list
    tiles,
    share,
    unit,
    b_row,  # [R] rows of the pair's tile
    m_row,
    b_dim,  # [D'] at least HEAD_SIZE dimensions
    HEAD_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """The parts of a pair as one, in the order of their keys: ``(out [R, D'], logarithm of the denominator [R])``."""
    PARTS: tl.constexpr = max(1, min(16, 8192 // (b_row.shape[0] * b_dim.shape[0])))
    m_part = m_row[:, None] & (b_dim < HEAD_SIZE)[None, :]
    begin = pair // share  # the programs whose stretches touch the pair
    end = (pair + tiles - 1) // share + 1
    b_m = b_row * 0.0 + LOWEST
    b_l = b_row * 0.0
    b_acc = b_row[:, None] * 0.0 + b_dim[None, :] * 0.0
    lo = pair * 0
    for start in tl.range(begin, end, PARTS, num_stages=1):
        lses: tl.tuple = ()
        parts: tl.tuple = ()
        b_m_new = b_m
        for i in tl.static_range(PARTS):  # all these loads wait together
            hi = cut((start + i + 1) * share - pair, tiles, unit)
            b_at = ((start + i) * 2 + (lo == 0).to(tl.int32)) * BLOCK_M + b_row
            lses += (tl.load(part_lse_ptr + b_at, mask=m_row & (lo < hi), other=float("-inf")),)
            p_part = part_ptr + b_at.to(tl.int64)[:, None] * HEAD_SIZE + b_dim[None, :]
            parts += (tl.load(p_part, mask=m_part & (lo < hi), other=0.0),)
            lo = hi
        for i in tl.static_range(PARTS):
            b_m_new = tl.maximum(b_m_new, lses[i])
        b_alpha = tl.exp2(b_m - b_m_new)
        b_l *= b_alpha
        b_acc *= b_alpha[:, None]
        for i in tl.static_range(PARTS):
            b_weight = tl.exp2(lses[i] - b_m_new)
            b_l += b_weight
            b_acc += b_weight[:, None] * parts[i]
        b_m = b_m_new
    return finish_softmax(b_acc, b_m, b_l)


@triton.jit
def find_prefill_sequence(b_lane, tile, cu_ptr, batch, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """The sequence that a prefill's tile of BLOCK_M (token, head) pairs belongs to.

    Sequence b begins at tile ``cu[b] * GROUP // BLOCK_M + b``: enough for all before it, whatever their lengths.
    """
    seq = -1
    for start in tl.range(0, batch, b_lane.shape[0]):
        b_seq = start + b_lane
        b_cu = tl.load(cu_ptr + b_seq, mask=b_seq < batch, other=0).to(tl.int64)
        b_begun = (b_seq < batch) & (b_cu * GROUP // BLOCK_M + b_seq <= tile)
        seq += tl.sum(b_begun.to(tl.int32), 0)
    return seq


@triton.jit
def row_work(
    b_seq, len_ptr, cu_ptr, batch, window, GROUP: tl.constexpr, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """For each of a vector of sequences, the tiles of BLOCK_M (token, head) pairs, 0 beyond the last sequence, and the
    tiles of the keys that those see."""
    _, b_new, _, b_keys = describe_sequence(b_seq, b_seq < batch, len_ptr, cu_ptr, window, WINDOW, BLOCK_N)
    return tl.cdiv(b_new * GROUP, BLOCK_M), b_keys


@triton.jit
def shares_of_work(b_keys, work, programs):
    """Into how many shares tiles of rows are cut that see so many tiles of keys: as many as their part of all programs,
    at least one."""
    return tl.maximum(b_keys * programs // tl.maximum(work, 1), 1)


@triton.jit
def shares_of_keys(key_tiles, most, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr):
    """Into how many shares, at most ``most``, so many tiles of keys are cut; none is empty, but where no tile is.

    To merge a share takes as long as to attend to SPLIT keys, so n shares of k keys take k / n + n SPLIT: it is least
    for the root of k / SPLIT.
    """
    best = tl.sqrt(key_tiles.to(tl.float32) * (BLOCK_N / SPLIT)).to(tl.int32)
    return tl.minimum(tl.minimum(tl.maximum(best, 1), most), tl.maximum(key_tiles, 1))


@triton.jit
def count_row_items(
    b_lane, len_ptr, cu_ptr, batch, window, kv_heads, programs, GROUP: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Items of a key/value head: shares of tiles of rows that are cut, and tiles that are not; and the ``work`` of all
    heads, in tiles of rows times tiles of keys. ``b_lane`` counts from 0.

    All heads have at most as many shares of cut tiles as there are programs, since none is rounded up beyond one.
    """
    b_work = b_lane * 0
    for start in tl.range(0, batch, b_lane.shape[0]):
        b_tiles, b_keys = row_work(
            start + b_lane, len_ptr, cu_ptr, batch, window, GROUP, WINDOW, BLOCK_M, BLOCK_N
        )  # fmt: skip
        b_work += b_tiles * b_keys
    work = tl.sum(b_work, 0) * kv_heads
    b_cut = b_lane * 0
    b_whole = b_lane * 0
    for start in tl.range(0, batch, b_lane.shape[0]):
        b_tiles, b_keys = row_work(
            start + b_lane, len_ptr, cu_ptr, batch, window, GROUP, WINDOW, BLOCK_M, BLOCK_N
        )  # fmt: skip
        b_shares = shares_of_work(b_keys, work, programs)
        b_cut += tl.where(b_shares > 1, b_tiles * b_shares, 0)
        b_whole += tl.where(b_shares > 1, 0, b_tiles)
    return tl.sum(b_cut, 0), tl.sum(b_whole, 0), work


@triton.jit
def find_row_item(
    b_lane, item, counts, len_ptr, cu_ptr, batch, window, kv_heads, programs, GROUP: tl.constexpr,
    WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Key/value head, sequence, first pair, number of the share and most shares of its tile, of an item.

    First come the shares of cut tiles, those of a tile as neighbours, then whole tiles; of a sequence the last rows,
    which see most keys, first.

    Args:
        counts: what :func:`count_row_items` returned.
    """
    cut, whole, work = counts
    is_cut = item < cut * kv_heads
    place = tl.where(is_cut, item, item - cut * kv_heads)
    each = tl.maximum(tl.where(is_cut, cut, whole), 1)
    within = place % each
    seq = 0
    before = 0
    total = 0
    for start in tl.range(0, batch, b_lane.shape[0]):
        b_seq = start + b_lane
        b_tiles, b_keys = row_work(b_seq, len_ptr, cu_ptr, batch, window, GROUP, WINDOW, BLOCK_M, BLOCK_N)
        b_shares = shares_of_work(b_keys, work, programs)
        b_items = tl.where((b_shares > 1) == is_cut, b_tiles * b_shares, 0)
        b_end = total + tl.cumsum(b_items, 0)
        b_before = (b_seq < batch) & (b_end <= within)
        seq += tl.sum(b_before.to(tl.int32), 0)
        before += tl.sum(tl.where(b_before, b_items, 0), 0)
        total = tl.max(b_end, 0)
    tiles, keys = row_work(seq, len_ptr, cu_ptr, batch, window, GROUP, WINDOW, BLOCK_M, BLOCK_N)
    shares = shares_of_work(keys, work, programs)
    tile = tiles - 1 - (within - before) // shares
    return place // each, seq, tile * BLOCK_M, (within - before) % shares, shares


@triton.jit
def prefill_key_ranges(
    pos_lo, pos_hi, seq_len, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The keys for queries at positions pos_lo to pos_hi, as ``lo <= whole_lo <= whole_hi <= hi``.

    All queries see all of [whole_lo, whole_hi); [lo, whole_lo) and [whole_hi, hi) need a mask. All but hi are multiples
    of BLOCK_N.
    """
    lo = 0
    whole_lo = 0
    hi = seq_len
    whole_hi = seq_len
    if WINDOW:
        lo = tl.maximum(pos_lo - window + 1, 0) // BLOCK_N * BLOCK_N
        whole_lo = tl.cdiv(tl.maximum(pos_hi - window + 1, 0), BLOCK_N) * BLOCK_N
    if CAUSAL:
        hi = tl.minimum(pos_hi + 1, seq_len)
        whole_hi = tl.maximum(tl.minimum(pos_lo + 1, seq_len), 0)
    elif WINDOW:  # to both sides; a window beyond the sequence is cut, so that the sum does not overflow
        hi = tl.minimum(pos_hi + tl.minimum(window, seq_len), seq_len)
        whole_hi = tl.maximum(tl.minimum(pos_lo + tl.minimum(window, seq_len), seq_len), 0)
    whole_hi = tl.maximum(whole_hi // BLOCK_N * BLOCK_N, lo)
    return lo, tl.minimum(whole_lo, whole_hi), whole_hi, hi

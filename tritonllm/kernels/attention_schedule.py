"""Equal work for all programs of an attention kernel: one list of tiles, cut into stretches, found on the device.

The list holds the tiles of keys of all (head, sequence) pairs, head by head, sequence by sequence, tile by tile.
Program g takes tiles [g share, (g + 1) share). Nothing but the lengths decides where a pair is cut, so every program
finds the same cuts, its own and its neighbours', with no table of them.
"""

import triton
import triton.language as tl

from tritonllm.kernels.attention_common import LOWEST, finish_softmax


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
def count_tiles(len_ptr, cu_ptr, batch, window, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr):
    """Tiles of keys of all sequences, for one head."""
    b_total = tl.zeros([BLOCK_B], tl.int32)
    for start in tl.range(0, batch, BLOCK_B):
        b_seq = start + tl.arange(0, BLOCK_B)
        _, _, _, b_tiles = describe_sequence(b_seq, b_seq < batch, len_ptr, cu_ptr, window, WINDOW, BLOCK_N)
        b_total += b_tiles
    return tl.sum(b_total, 0)


@triton.jit
def find_sequence(
    tile, len_ptr, cu_ptr, batch, window, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr
):
    """The sequence that a tile belongs to, and the tiles of all before it."""
    seq = 0
    before = 0
    total = 0
    for start in tl.range(0, batch, BLOCK_B):
        b_seq = start + tl.arange(0, BLOCK_B)
        _, _, _, b_tiles = describe_sequence(b_seq, b_seq < batch, len_ptr, cu_ptr, window, WINDOW, BLOCK_N)
        b_end = total + tl.cumsum(b_tiles, 0)
        b_before = (b_seq < batch) & (b_end <= tile)
        seq += tl.sum(b_before.to(tl.int32), 0)
        before += tl.sum(tl.where(b_before, b_tiles, 0), 0)
        total = tl.max(b_end, 0)
    return seq, before


@triton.jit
def cut(at, tiles, unit):
    """Where a pair of ``tiles`` tiles is cut if the programs' border is at its tile ``at``: no part under ``unit``."""
    b_cut = (at + unit // 2) // unit * unit
    b_cut = tl.where((at >= tiles) | (tiles - b_cut < unit), tiles, b_cut)
    return tl.where(at <= 0, 0, b_cut)


@triton.jit
def merge_parts(
    part_ptr,  # [2 G, M, D] float32
    part_lse_ptr,  # [2 G, M] float32, base 2
    pair,  # the first tile of a pair in the list
    tiles,
    share,
    unit,
    m_row,
    HEAD_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The parts of a pair as one, in the order of their keys: ``(out [R, D], logarithm of the denominator [R])``."""
    PARTS: tl.constexpr = max(1, min(16, 4096 // (ROWS * BLOCK_D)))
    b_row = tl.arange(0, ROWS)
    b_dim = tl.arange(0, BLOCK_D)
    m_part = m_row[:, None] & (b_dim < HEAD_SIZE)[None, :]
    begin = pair // share  # the programs whose stretches touch the pair
    end = (pair + tiles - 1) // share + 1
    b_m = tl.full([ROWS], LOWEST, tl.float32)
    for start in tl.range(begin, end, 16, num_stages=1):
        b_program = start + tl.arange(0, 16)
        b_lo = cut(b_program * share - pair, tiles, unit)
        m_lse = (b_program < end) & (b_lo < cut((b_program + 1) * share - pair, tiles, unit))
        b_slot = b_program * 2 + (b_lo == 0).to(tl.int32)
        p_lse = part_lse_ptr + b_slot[None, :] * BLOCK_M + b_row[:, None]
        b_lse = tl.load(p_lse, mask=m_lse[None, :] & m_row[:, None], other=float("-inf"))
        b_m = tl.maximum(b_m, tl.max(b_lse, 1))
    b_l = tl.zeros([ROWS], tl.float32)
    b_acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for start in tl.range(begin, end, PARTS, num_stages=1):
        for i in tl.static_range(PARTS):  # the loads of all these parts wait together
            program = start + i
            lo = cut(program * share - pair, tiles, unit)
            there = (program < end) & (lo < cut((program + 1) * share - pair, tiles, unit))
            slot = program * 2 + (lo == 0).to(tl.int32)
            b_lse = tl.load(part_lse_ptr + slot * BLOCK_M + b_row, mask=m_row & there, other=float("-inf"))
            p_part = part_ptr + (slot * BLOCK_M + b_row).to(tl.int64)[:, None] * HEAD_SIZE + b_dim[None, :]
            b_weight = tl.exp2(b_lse - b_m)
            b_l += b_weight
            b_acc += b_weight[:, None] * tl.load(p_part, mask=m_part & there, other=0.0)
    return finish_softmax(b_acc, b_m, b_l)

"""A Hopper prefill of few rows: the keys of each tile of rows are shared out among programs. In Gluon.

A few new tokens behind many cached ones (the next turn of a chat) are 8 tiles of rows, say, for 132 processors: 8
tokens behind 32,768 took 632 us for what can be read in 31. So where there are fewer tiles of rows than half the
programs, a tile's keys are cut into as many shares as its part of all keys is of the programs, fewer if they are short,
and the program that ends last merges them by their log-sum-exp (Flash-Decoding: Dao, Haziza, Massa and Sizov, 2023), in
the order of the keys. How many there are is found from the lengths, on the device
(:func:`~tritonllm.kernels.attention.schedule.count_row_items`): a captured step serves long sequences and short ones,
and its padding, which sees few keys, takes no programs from the others.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tritonllm.kernels.attention.common import LN2, LOWEST, row_offsets


@gluon.jit
def shares_of(key_tiles, most, BLOCK_N: gl.constexpr, SPLIT: gl.constexpr):
    """Into how many shares, at most ``most``, so many tiles of keys are cut; none is empty.

    To merge a share takes as long as to attend to SPLIT keys, so n shares of k keys take k / n + n SPLIT: it is least
    for the root of k / SPLIT.
    """
    best = gl.sqrt(key_tiles.to(gl.float32) * (BLOCK_N / SPLIT)).to(gl.int32)
    return gl.minimum(gl.minimum(gl.maximum(best, 1), most), key_tiles)


@gluon.jit
def store_share(b_o, b_m, b_l, rows, share, out_ptr, lse_ptr, strides, heads, parts, out_scale, HALF: gl.constexpr,
                GROUP: gl.constexpr):  # fmt: skip
    """Keep a share's result for 64 rows; if it is the last one of them, merge them all and write the output.

    All shares of cut tiles are the first items of programs: they are kept by their programs' numbers.

    Args:
        b_o: ``[64, D]`` weighted sums; b_m, b_l: ``[64]`` maxima (base 2) and sums of weights.
        parts: (``[G, 128, D + 1]`` float32, of which the last ``[G, 128]`` are logarithms of sums; the launch's counts,
            ``[1 + 2 G]`` int32, zeros but for the first, which they are again in the end).
    """
    part_ptr, count_ptr = parts
    part, shares = share
    D: gl.constexpr = b_o.shape[1]
    o_layout: gl.constexpr = b_o.type.layout
    first = gl.program_id(0) - part  # the program with the first share
    b_divisor = gl.where(b_l == 0.0, 1.0, b_l)
    b_lse = gl.where(b_l == 0.0, float("-inf"), b_m + gl.log2(b_divisor))
    b_o /= gl.convert_layout(b_divisor, gl.SliceLayout(1, o_layout))[:, None]
    mine = gl.program_id(0) * 128 + HALF * 64
    b_row = gl.arange(0, 64, gl.SliceLayout(1, o_layout))
    b_dim = gl.arange(0, D, gl.SliceLayout(0, o_layout))
    gl.store(part_ptr + (mine + b_row)[:, None] * D + b_dim[None, :], b_o)
    gl.store(part_ptr + gl.num_programs(0) * 128 * D + mine + gl.arange(0, 64, b_lse.type.layout), b_lse)
    p_count = count_ptr + 1 + first * 2 + HALF
    gl.thread_barrier()  # every thread has stored its part before one counts it
    if gl.atomic_add(p_count, 1) + 1 == shares:
        gl.store(p_count, 0)
        for quarter in range(2):  # of all at once, the compiler spills
            _merge(
                rows, first, shares, out_ptr, lse_ptr, strides, heads, parts, out_scale, HALF * 64 + quarter * 32,
                GROUP, D,
            )  # fmt: skip


@gluon.jit
def _merge(rows, first, shares, out_ptr, lse_ptr, strides, heads, parts, out_scale, top, GROUP: gl.constexpr,
           D: gl.constexpr):  # fmt: skip
    """Merge the shares of 32 rows of the tile, from row ``top`` on."""
    kv_head, begin, q_len, pair, seq_len = rows
    part_ptr, count_ptr = parts
    wide: gl.constexpr = gl.BlockedLayout([1, 4], [128 // D, D // 4], [4, 1], [1, 0])
    b_row = top + gl.arange(0, 32, gl.SliceLayout(1, wide))
    b_dim = gl.arange(0, D, gl.SliceLayout(0, wide))
    b_pair = pair + b_row
    m_row = b_pair < q_len * GROUP
    b_m = b_row * 0.0 + LOWEST
    b_l = b_row * 0.0
    b_acc = b_row[:, None] * 0.0 + b_dim[None, :] * 0.0
    for i in range(shares):
        at = (first + i) * 128
        b_lse = gl.load(part_ptr + gl.num_programs(0) * 128 * D + at + b_row, mask=m_row, other=float("-inf"))
        b_part = gl.load(part_ptr + (at + b_row)[:, None] * D + b_dim[None, :], mask=m_row[:, None], other=0.0)
        b_m_new = gl.maximum(b_m, b_lse)
        b_alpha = gl.exp2(b_m - b_m_new)
        b_weight = gl.exp2(b_lse - b_m_new)
        b_l = b_l * b_alpha + b_weight
        b_acc = b_acc * b_alpha[:, None] + b_part * b_weight[:, None]
        b_m = b_m_new
    b_divisor = gl.where(b_l == 0.0, 1.0, b_l)
    b_token = begin.to(gl.int64) + b_pair // GROUP
    b_head = kv_head * GROUP + b_pair % GROUP
    p_out = out_ptr + row_offsets(b_token, b_head, strides[0], strides[1])[:, None] + b_dim[None, :]
    gl.store(p_out, (b_acc * (out_scale / b_divisor)[:, None]).to(out_ptr.dtype.element_ty), mask=m_row[:, None])
    if lse_ptr is not None:
        b_all = gl.where(b_l == 0.0, float("-inf"), b_m + gl.log2(b_divisor)) * LN2
        gl.store(lse_ptr + b_token * heads + b_head, b_all, mask=m_row)

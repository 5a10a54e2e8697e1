"""What both ways to multiply on Hopper share: the rows of a pair of sequence and head, and one result of several.

In Gluon; :mod:`tritonllm.kernels.attention.sm90.part` and :mod:`tritonllm.kernels.attention.sm90.apart` use it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tritonllm.kernels.attention.common import LN2, LOG2E, LOWEST, row_offsets
from tritonllm.kernels.attention.schedule import cut


@gluon.jit
def rows_of_pair(place, lengths, GROUP: gl.constexpr, BLOCK_M: gl.constexpr, ROWS: gl.constexpr, layout: gl.constexpr):
    """A pair's first ROWS rows: token in ``q``, query head, token in the sequence, and whether there is one."""
    return describe_pairs(place, lengths, gl.arange(0, ROWS, layout), GROUP, BLOCK_M)


@gluon.jit
def describe_pairs(place, lengths, b_row, GROUP: gl.constexpr, BLOCK_M: gl.constexpr):
    """Rows ``b_row`` of a pair, described as :func:`rows_of_pair` describes its first ones."""
    head, seq, pair = place
    len_ptr, cu_ptr, batch, row_tiles, window = lengths
    b_pair = head % row_tiles * BLOCK_M + b_row
    b_new = b_pair // GROUP
    token = seq
    q_len = 1
    if cu_ptr is not None:
        token = gl.load(cu_ptr + seq)
        q_len = gl.load(cu_ptr + seq + 1) - token
    return token.to(gl.int64) + b_new, head // row_tiles * GROUP + b_pair % GROUP, b_new, b_new < q_len


@gluon.jit
def describe_rows(place, lengths, cached, seq_len, slope_ptr, tree_ptr, GROUP: gl.constexpr, ROWS: gl.constexpr,
                  layout: gl.constexpr):  # fmt: skip
    """What the softmax must know of each row: the first key it sees and the end, its position, tree and ALiBi slope."""
    b_token, b_head, b_new, m_row = rows_of_pair(place, lengths, GROUP, ROWS, ROWS, layout)
    b_slope = b_new * 0.0
    if slope_ptr is not None:
        b_slope = gl.load(slope_ptr + b_head, mask=m_row, other=0.0).to(gl.float32) * LOG2E
    b_pos = cached + b_new
    b_end = b_pos + 1
    b_tree = b_new
    if tree_ptr is not None:
        b_tree = gl.load(tree_ptr + b_token, mask=m_row, other=0)
        b_end = b_new * 0 + seq_len
        b_pos = b_new * 0 + (cached - 1)
        for bit in gl.static_range(32):  # a token sees its ancestors
            b_pos += (b_tree >> bit) & 1
    return b_pos + 1 - lengths[4], b_end, b_pos, b_tree, b_slope


@gluon.constexpr_function
def rows_layout(head_size: int) -> gl.BlockedLayout:
    """``[4, C, D]``: each thread all four of some elements, so that adding them up needs no exchange."""
    return gl.BlockedLayout([4, 1, 4], [1, 128 // head_size, head_size // 4], [1, 4, 1], [2, 1, 0])


@gluon.jit
def merge_warps(b_o, b_m, b_l):
    """One result of the four warps'.

    Args:
        b_o: sums of weighted values ``[4, C, D]``, of a warp each.
        b_m: the maxima that they are relative to ``[4, C]``, base 2.
        b_l: sums of weights ``[4, C]``.

    Returns:
        Values divided by the sum of weights ``[C, D]``, and the logarithm of that sum ``[C]``, base 2.
    """
    wide: gl.constexpr = rows_layout(b_o.shape[2])
    b_o = gl.convert_layout(b_o, wide)
    b_m = gl.convert_layout(b_m, gl.SliceLayout(2, wide))
    b_l = gl.convert_layout(b_l, gl.SliceLayout(2, wide))
    b_peak = gl.max(b_m, 0)
    b_weight = gl.exp2(b_m - b_peak[None, :])
    b_sum = gl.sum(b_l * b_weight, 0)
    b_divisor = gl.where(b_sum == 0.0, 1.0, b_sum)
    b_lse = gl.where(b_sum == 0.0, float("-inf"), b_peak + gl.log2(b_divisor))
    b_o = gl.sum(b_o * b_weight[:, :, None], 0)
    row: gl.constexpr = gl.SliceLayout(1, b_o.type.layout)
    return b_o * gl.convert_layout(1.0 / b_divisor, row)[:, None], gl.convert_layout(b_lse, row)


@gluon.jit
def store_rows(place, row, b_out, b_lse, out_scale, tensors, strides, lengths, GROUP: gl.constexpr,
               BLOCK_M: gl.constexpr):  # fmt: skip
    """Store the result ``[C, D]`` of a pair's rows from ``row`` on, laid out as :func:`merge_warps` leaves it, and its
    log of the denominator."""
    q_ptr, out_ptr, lse_ptr, sink_ptr, slope_ptr, tree_ptr, k_scale_ptr, v_scale_ptr = tensors
    stride_q_token, stride_q_head, stride_out_token, stride_out_head, heads = strides
    b_row = row + gl.arange(0, b_out.shape[0], gl.SliceLayout(1, b_out.type.layout))
    b_dim = gl.arange(0, b_out.shape[1], gl.SliceLayout(0, b_out.type.layout))
    b_token, b_head, _, m_row = describe_pairs(place, lengths, b_row, GROUP, BLOCK_M)
    p_out = out_ptr + row_offsets(b_token, b_head, stride_out_token, stride_out_head)[:, None] + b_dim[None, :]
    gl.store(p_out, (b_out * out_scale).to(out_ptr.dtype.element_ty), mask=m_row[:, None])
    if lse_ptr is not None:
        gl.store(lse_ptr + b_token * heads + b_head, b_lse * LN2, mask=m_row)


@gluon.constexpr_function
def merges_of(rows: int, head_size: int) -> int:
    """How many programs merge a pair that many have parts of: each as few rows as its threads have dimensions for."""
    return max(1, rows * head_size // 128)


@gluon.constexpr_function
def parts_at_once(rows: int, head_size: int) -> int:
    """How many parts of ``rows`` rows are read at once: 64 registers of a thread."""
    return max(4, min(64, 8192 // (rows * head_size)))


@gluon.jit
def merge_rows(place, tiles, row, out_scale, tensors, strides, parts, lengths, plan, GROUP: gl.constexpr,
               ROWS: gl.constexpr, HEAD_SIZE: gl.constexpr, BLOCK_M: gl.constexpr):  # fmt: skip
    """Merge all parts of ROWS rows of a pair from ``row`` on, each warp every fourth of them, and store the result."""
    part_ptr, part_lse_ptr, count_ptr = parts
    begin, end, share, unit, items, programs = plan
    PARTS: gl.constexpr = parts_at_once(ROWS, HEAD_SIZE)
    MINE: gl.constexpr = max(1, ROWS * HEAD_SIZE // 128)  # rows of a thread
    deep: gl.constexpr = gl.BlockedLayout(
        [1, 1, MINE, 4], [1, 1, 128 // HEAD_SIZE, HEAD_SIZE // 4], [1, 4, 1, 1], [3, 2, 1, 0]
    )
    by_row: gl.constexpr = gl.SliceLayout(3, deep)
    part: gl.constexpr = gl.SliceLayout(2, by_row)
    b_row = row + gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(1, by_row)))
    b_dim = gl.arange(0, HEAD_SIZE, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, deep))))
    b_dim = b_dim[None, :][:, None, :][:, :, None, :]
    _, _, _, m_row = describe_pairs(place, lengths, b_row, GROUP, BLOCK_M)
    b_lane = gl.arange(0, PARTS // 4, gl.SliceLayout(1, part))[:, None] * 4
    b_lane += gl.arange(0, 4, gl.SliceLayout(0, part))[None, :]
    first = place[2] // share  # the programs whose stretches touch the pair
    last = (place[2] + tiles - 1) // share
    b_acc = gl.zeros([4, ROWS, HEAD_SIZE], gl.float32, gl.SliceLayout(0, deep))
    b_l = gl.zeros([4, ROWS], gl.float32, gl.SliceLayout(0, by_row))
    b_m = b_l + LOWEST
    for start in range(first, last + 1, PARTS):
        b_program = start + b_lane
        b_lo = cut(b_program * share - place[2], tiles, unit)
        b_hi = cut((b_program + 1) * share - place[2], tiles, unit)
        b_slot = b_program * 2 + (b_lo == 0).to(gl.int32)
        m_part = ((b_program <= last) & (b_lo < b_hi))[:, :, None] & m_row[None, :][:, None, :]
        b_at = b_slot[:, :, None] * BLOCK_M + b_row[None, :][:, None, :]
        b_lse = gl.load(part_lse_ptr + b_at, mask=m_part, other=float("-inf"))
        p_part = part_ptr + (b_at.to(gl.int64) * HEAD_SIZE)[:, :, :, None] + b_dim
        b_part = gl.load(p_part, mask=m_part[:, :, :, None], other=0.0)
        b_m_new = gl.maximum(b_m, gl.max(b_lse, 0))
        b_weight = gl.exp2(b_lse - b_m_new[None, :, :])
        b_alpha = gl.exp2(b_m - b_m_new)
        b_l = b_l * b_alpha + gl.sum(b_weight, 0)
        b_alpha = gl.convert_layout(b_alpha, gl.SliceLayout(2, b_acc.type.layout), assert_trivial=True)
        b_acc = b_acc * b_alpha[:, :, None] + gl.sum(b_part * b_weight[:, :, :, None], 0)
        b_m = b_m_new
    b_out, b_lse = merge_warps(b_acc, b_m, b_l)
    store_rows(place, row, b_out, b_lse, out_scale, tensors, strides, lengths, GROUP, BLOCK_M)


@gluon.jit
def count_part(place, part_tiles, tiles, out_scale, tensors, strides, parts, lengths, plan, GROUP: gl.constexpr,
               ROWS: gl.constexpr, HEAD_SIZE: gl.constexpr, BLOCK_M: gl.constexpr):  # fmt: skip
    """Count a part that is stored, and merge the pair, or rows of it, if that is this program's.

    Where one program reads all parts at once, the one that counts last merges them. Where more have parts, the first
    few wait for the others and merge some rows each. This pair is the last of their stretch, so that nothing of theirs
    waits; and none of them waits for a program that waits for it: that one would have begun with an earlier pair.
    """
    part_ptr, part_lse_ptr, count_ptr = parts
    begin, end, share, unit, items, programs = plan
    MERGES: gl.constexpr = merges_of(ROWS, HEAD_SIZE)
    SEEN: gl.constexpr = 1 << 24  # by one that merges: more than a pair has tiles
    first = place[2] // share
    p_count = count_ptr + first
    gl.thread_barrier()  # every thread has stored its share of the part before one counts it
    counted = gl.atomic_add(p_count, part_tiles) + part_tiles
    alone = counted == tiles
    if MERGES > 1:
        others = (place[2] + tiles - 1) // share - first
        if (unit == 1) & (others >= gl.maximum(MERGES, parts_at_once(ROWS, HEAD_SIZE))):
            alone = counted < 0
            merge = gl.program_id(0) - first
            if merge < MERGES:
                while counted % SEEN != tiles:
                    counted = gl.atomic_add(p_count, 0)
                merge_rows(
                    place, tiles, merge * (ROWS // MERGES), out_scale, tensors, strides, parts, lengths, plan, GROUP,
                    ROWS // MERGES, HEAD_SIZE, BLOCK_M,
                )  # fmt: skip
                if gl.atomic_add(p_count, SEEN) == tiles + (MERGES - 1) * SEEN:
                    gl.store(p_count, 0)
    if alone:
        gl.store(p_count, 0)
        merge_rows(place, tiles, 0, out_scale, tensors, strides, parts, lengths, plan, GROUP, ROWS, HEAD_SIZE, BLOCK_M)

"""A tile of rows in the attention kernels for any GPU: its queries, the loop over keys, and where its output goes.

Rows are (token, query head) pairs of one key/value head. A schedule (balanced, split, prefill, segments) says which
program has which rows and keys. :mod:`tritonllm.kernels.attention.portable.few`, whose products are transposed, has a
loop of its own, and the same weights, places of parts and merge. The loop is the online softmax of Milakov and
Gimelshein (2018) tiled as in FlashAttention (Dao et al., 2022), over a cache in blocks (Kwon et al., "PagedAttention",
2023).
"""

import triton
import triton.language as tl

from tritonllm.kernels.attention.common import LN2, LOG2E, row_offsets, soft_cap, softmax_divisor


@triton.jit
def load_queries(
    q_ptr, b_token, b_head, m_row, stride_token, stride_head, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr
):
    """The queries of a tile's rows, ``[M, D]``, and 0 where there is none."""
    b_dim = tl.arange(0, BLOCK_D)
    m_q = m_row[:, None] & (b_dim < HEAD_SIZE)[None, :]
    p_q = q_ptr + row_offsets(b_token, b_head, stride_token, stride_head)[:, None] + b_dim[None, :]
    return tl.load(p_q, mask=m_q, other=0.0)


@triton.jit
def load_head_factors(
    scale, v_factor, slope_ptr, k_scale_ptr, v_scale_ptr, kv_head, b_head, m_row, BLOCK_M: tl.constexpr
):
    """The factors of logits and values with the caches' per-head scales, and each row's ALiBi slope, base 2."""
    scale = tl.full([], scale, tl.float32)  # with a shape, for the interpreter too
    if k_scale_ptr is not None:
        scale *= tl.load(k_scale_ptr + kv_head)
    if v_scale_ptr is not None:
        v_factor *= tl.load(v_scale_ptr + kv_head)
    b_slope = tl.zeros([BLOCK_M], tl.float32)
    if slope_ptr is not None:
        b_slope = tl.load(slope_ptr + b_head, mask=m_row, other=0.0).to(tl.float32) * LOG2E
    return scale, v_factor, b_slope


@triton.jit
def store_rows(
    out_ptr,
    lse_ptr,  # None: nobody asks for it
    b_out,  # [M, D], to be multiplied by `factor`
    b_lse,  # [M], base 2
    factor,
    b_token,
    b_head,
    m_row,
    heads,
    stride_token,
    stride_head,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Store the output of a tile's rows, and the logarithm of their denominators."""
    b_dim = tl.arange(0, BLOCK_D)
    p_out = out_ptr + row_offsets(b_token, b_head, stride_token, stride_head)[:, None] + b_dim[None, :]
    m_out = m_row[:, None] & (b_dim < HEAD_SIZE)[None, :]
    tl.store(p_out, (b_out * factor).to(out_ptr.dtype.element_ty), mask=m_out)
    if lse_ptr is not None:
        tl.store(lse_ptr + b_token * heads + b_head, b_lse * LN2, mask=m_row)


@triton.jit
def store_part(part_ptr, part_lse_ptr, b_out, b_lse, b_at, m_row, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store what part of the keys gives a tile's rows, at the places ``b_at[M]``, for the program that merges."""
    b_dim = tl.arange(0, BLOCK_D)
    p_part = part_ptr + b_at.to(tl.int64)[:, None] * HEAD_SIZE + b_dim[None, :]
    tl.store(p_part, b_out, mask=m_row[:, None] & (b_dim < HEAD_SIZE)[None, :])
    tl.store(part_lse_ptr + b_at, b_lse, mask=m_row)


@triton.jit
def merge_parts(
    p_part,  # [parts, R, D] float32, as `store_part` left it
    p_part_lse,  # [parts, R] float32, base 2
    parts,
    b_m,  # [R] maximum and sum with which rows begin
    b_l,
    AT_ONCE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The parts of a tile's keys as one, in their order: ``(out [R, D], logarithm of the denominator [R])``."""
    ROWS: tl.constexpr = b_m.shape[0]
    b_row = tl.arange(0, ROWS)
    b_dim = tl.arange(0, BLOCK_D)
    b_acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for start in tl.range(0, parts, AT_ONCE, num_stages=1):
        b_part = start + tl.arange(0, AT_ONCE)
        m_part = b_part < parts
        b_at = b_part[:, None] * ROWS + b_row[None, :]
        b_lse = tl.load(p_part_lse + b_at, mask=m_part[:, None], other=float("-inf"))
        p_x = p_part + b_at[:, :, None] * HEAD_SIZE + b_dim[None, None, :]
        b_x = tl.load(p_x, mask=m_part[:, None, None] & (b_dim < HEAD_SIZE)[None, None, :], other=0.0)
        b_m_new = tl.maximum(b_m, tl.max(b_lse, 0))
        b_weight = tl.exp2(b_lse - b_m_new[None, :])
        b_alpha = tl.exp2(b_m - b_m_new)
        b_l = b_l * b_alpha + tl.sum(b_weight, 0)
        b_acc = b_acc * b_alpha[:, None] + tl.sum(b_x * b_weight[:, :, None], 0)
        b_m = b_m_new
    b_divisor, b_lse = softmax_divisor(b_m, b_l)
    return b_acc * (1.0 / b_divisor)[:, None], b_lse


@triton.jit
def to_logits(b_s, b_scale, softcap, b_slope, b_key, b_pos, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr):
    """Products as logits base 2, where there is a soft cap or ALiBi; else :func:`to_weights` takes the scale along.

    Args:
        b_scale: a number, or one for each row. What has rows or keys has two dimensions here.
        b_slope, b_key, b_pos: ALiBi's slopes, base 2, and the positions of keys and queries.
    """
    if SOFTCAP:
        b_s = soft_cap(b_s * (b_scale * LOG2E), softcap * LOG2E)
    elif ALIBI:
        b_s = b_s * (b_scale * LOG2E)
    if ALIBI:
        b_s += b_slope * (b_key - b_pos).to(tl.float32)
    return b_s


@triton.jit
def to_weights(b_s, b_m, b_factor, b_scale, KEYS: tl.constexpr, LOGITS: tl.constexpr):
    """A tile's weights relative to the new maximum, that maximum, and the factor of what is relative to the old one.

    Args:
        b_s: logits base 2 if ``LOGITS``, else products; -inf where a row does not see a key.
        b_m: the maximum so far, of each row.
        b_factor, b_scale: what makes logits of products, base 2 and not: a number, or one for each row; the first
            in the shape of ``b_s``.
        KEYS: the axis of the keys.
    """
    if LOGITS:
        b_m_new = tl.maximum(b_m, tl.max(b_s, KEYS))
        b_p = tl.exp2(b_s - tl.expand_dims(b_m_new, KEYS))
    else:  # the scale becomes part of the multiply-add before exp2
        b_m_new = tl.maximum(b_m, tl.max(b_s, KEYS) * (b_scale * LOG2E))
        b_p = tl.exp2(b_s * (b_factor * LOG2E) - tl.expand_dims(b_m_new, KEYS))
    return b_p, b_m_new, tl.exp2(b_m - b_m_new)


@triton.jit
def load_rows(p_rows, m_rows, m_cols, MASK_ROWS: tl.constexpr, MASK_COLS: tl.constexpr):
    """Load a tile; only the masks that are needed reach the compiler, and what they hide reads as 0."""
    if MASK_ROWS and MASK_COLS:
        b_x = tl.load(p_rows, mask=m_rows[:, None] & m_cols[None, :], other=0.0)
    elif MASK_ROWS:
        b_x = tl.load(p_rows, mask=m_rows[:, None], other=0.0)
    elif MASK_COLS:
        b_x = tl.load(p_rows, mask=m_cols[None, :], other=0.0)
    else:
        b_x = tl.load(p_rows)
    return b_x


@triton.jit
def load_block_ids(p_table, start, hi, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The blocks of keys [start, start + BLOCK_N): one number if they share a block, else one for each key."""
    if BLOCK_SIZE % BLOCK_N == 0:
        b_block = tl.load(p_table + start // BLOCK_SIZE, mask=start < hi, other=0)
    else:
        b_key = start + tl.arange(0, BLOCK_N)
        b_block = tl.load(p_table + b_key // BLOCK_SIZE, mask=b_key < hi, other=0)
    return b_block


@triton.jit
def _read_instead(start, first, last, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Keys [start, start + BLOCK_N), but a seen key in the place of each that no row sees: to load it needs no mask."""
    b_key = tl.minimum(start + tl.arange(0, BLOCK_N), last)
    if WINDOW:
        b_key = tl.maximum(b_key, first)
    return b_key


@triton.jit
def _block_ids(
    p_table, start, first, hi, last, m_tile, INSTEAD: tl.constexpr, WINDOW: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The blocks of the keys of a tile: one number if they share it, else one for each.

    With ``INSTEAD``, ``m_tile`` is False where there is nothing to read at all, None where there surely is.
    """
    if not INSTEAD:
        b_block = load_block_ids(p_table, start, hi, BLOCK_SIZE, BLOCK_N)
    elif BLOCK_SIZE % BLOCK_N == 0:
        b_block = tl.load(p_table + tl.minimum(start, last) // BLOCK_SIZE, mask=m_tile)
    else:
        b_key = _read_instead(start, first, last, WINDOW, BLOCK_N)
        b_block = tl.load(p_table + b_key // BLOCK_SIZE, mask=m_tile)
    return b_block


@triton.jit
def fit_queries(b_q, b_scale, p_k):
    """Queries ``[M, D]`` for products with a float8 cache, and the factor of their logits: a number or ``[M]``.

    float16 holds every float8, and one instruction converts two of them; on the way to bfloat16, through float16 and
    float32, there are five. Queries in bfloat16 fit after a division by the largest magnitude of their row.
    """
    if p_k.dtype.element_ty.is_fp8() and b_q.dtype == tl.bfloat16:
        b_wide = b_q.to(tl.float32)
        b_peak = tl.max(tl.abs(b_wide), 1)
        b_peak = tl.where(b_peak > 0, b_peak, 1.0)
        b_q = (b_wide / b_peak[:, None]).to(tl.float16)
        b_scale = b_scale * b_peak
    return b_q, b_scale


@triton.jit
def _only(a, b):
    return a


@triton.jit
def convert_where_loaded(b_x, DTYPE: tl.constexpr):
    """A tile ``[N, D]`` in the dtype of a product, float8 in the registers that it was loaded into.

    The compiler would arrange a tile for its product as float8, byte by byte where that transposes it (64 loads of one
    byte from shared memory for each thread and tile of 64 x 128, of 730 instructions), and convert then. It does not
    move a conversion across a reduction, so here is one over an axis of size 1: with it the loop of decodes has 440
    instructions.
    """
    b_wide = b_x.to(DTYPE)
    if b_x.dtype.is_fp8():
        b_wide = tl.reduce(tl.reshape(b_wide, [b_x.shape[0], b_x.shape[1], 1]), 2, _only)
    return b_wide


@triton.jit
def attend(
    b_acc,  # [M, D] float32: values weighted so far, relative to the running maximum
    b_m,  # [M] running maximum of the logits, base 2
    b_l,  # [M] running sum of 2^(logit - maximum), or [M, N]: of each column of the tiles
    b_q,  # [M, D]
    b_begin,  # [M] each row sees keys from b_begin (WINDOW only) up to b_end
    b_end,
    b_pos,  # [M] position of each row's query
    b_tree,  # [M] which of the sequence's new tokens each row sees, as bits ("tree" only)
    b_slope,  # [M] ALiBi slope, base 2
    b_scale,  # factor of the logits: a number, or [M]
    p_k,  # the head's first key and value in block 0
    p_v,
    p_table,  # the sequence's block ids
    lo,  # keys [lo, hi); lo is a multiple of BLOCK_N
    hi,
    first,  # no row sees a key before this one
    cached,  # keys before the sequence's new tokens ("tree" only)
    softcap,
    stride_k_block,
    stride_k_slot,
    stride_v_block,
    stride_v_slot,
    HIDE: tl.constexpr,  # "nothing": rows see all of [lo, hi), and hi is a multiple of BLOCK_N; "end": rows see the
    # same keys, from first up to hi; "rows": by b_end; "tree": of new tokens those that b_tree says
    INSTEAD: tl.constexpr,  # hidden keys are not masked: a seen one is read in the place of each
    SAME_STRIDES: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attend to keys [lo, hi) and return the new (b_acc, b_m, b_l).

    A hidden value must not be read as it is: its weight is 0, but a stale slot may hold NaN. Prompts mask the loads of
    tiles with hidden keys; decodes, whose every tile may have some, read others instead (docs/notebook/
    attention-one-loop.md has both beside each other: float8 205 us and 246 masked, float32 525 and 685).
    """
    # In float32 queries are scaled before the products, which then are the logits base 2. Elsewhere they would lose
    # precision, so the scale becomes part of the multiply-add before exp2. That does not round the product, of which
    # the maximum is the rounded one: the largest weight is not 1 but 2^x, where x is up to half a unit in the last
    # place of the logit. All weights have that factor, which is of no consequence up to logits of 2^28 (x = 8). From
    # 2^29 on float16 cannot hold it, from 2^32 on float32.
    SCALED: tl.constexpr = b_q.dtype == tl.float32 and not SOFTCAP and not ALIBI
    MASKED: tl.constexpr = HIDE != "nothing" and not INSTEAD
    b_factor = b_scale
    if len(b_scale.shape) == 1:
        b_factor = b_scale[:, None]
    if SCALED:
        b_q *= b_factor * LOG2E
    last = hi - 1
    b_dim = tl.arange(0, BLOCK_D)
    m_dim = b_dim < HEAD_SIZE
    # A tile's block ids are loaded one tile ahead: were they loaded with it, the compiler's pipeline would hold them in
    # shared memory and start the key loads a stage later.
    b_next_block = _block_ids(p_table, lo, first, hi, last, lo < hi, INSTEAD, WINDOW, BLOCK_SIZE, BLOCK_N)
    for start in tl.range(lo, hi, BLOCK_N):
        b_block = b_next_block.to(tl.int64)
        b_next_block = _block_ids(
            *(p_table, start + BLOCK_N, first, hi, last, None, INSTEAD, WINDOW, BLOCK_SIZE, BLOCK_N)
        )
        b_key = start + tl.arange(0, BLOCK_N)
        m_key = (b_key >= first) & (b_key < hi)
        if INSTEAD:
            b_slot = _read_instead(start, first, last, WINDOW, BLOCK_N) % BLOCK_SIZE
        else:
            b_slot = b_key % BLOCK_SIZE
        b_at = b_block * stride_k_block + b_slot.to(tl.int64) * stride_k_slot
        p_key = (p_k + b_at)[:, None] + b_dim[None, :]
        # Masked loads come behind both addresses: split takes 96 registers so, and 124 otherwise; prefill 177 and 187.
        if INSTEAD:
            b_k = load_rows(p_key, m_key, m_dim, MASKED, BLOCK_D != HEAD_SIZE).to(b_q.dtype)
        if not SAME_STRIDES:
            b_at = b_block * stride_v_block + b_slot.to(tl.int64) * stride_v_slot
        p_value = (p_v + b_at)[:, None] + b_dim[None, :]
        if not INSTEAD:
            b_k = load_rows(p_key, m_key, m_dim, MASKED, BLOCK_D != HEAD_SIZE).to(b_q.dtype)
        b_v = load_rows(p_value, m_key, m_dim, MASKED, BLOCK_D != HEAD_SIZE)
        if INSTEAD:  # the tall tiles of prompts spill with it on sm_80 and sm_120
            b_v = convert_where_loaded(b_v, b_q.dtype)
        b_v = b_v.to(b_q.dtype)

        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")  # [M, N]
        b_s = to_logits(*(b_s, b_factor, softcap, b_slope[:, None], b_key[None, :], b_pos[:, None], SOFTCAP, ALIBI))
        if HIDE != "nothing":
            if HIDE == "end":
                m_s = (b_key < hi)[None, :]
            else:
                m_s = b_key[None, :] < b_end[:, None]
            if HIDE == "tree":
                b_new = tl.maximum(b_key - cached, 0)
                m_s = m_s & ((b_key < cached)[None, :] | ((b_tree[:, None] >> tl.minimum(b_new, 31)[None, :]) & 1 != 0))
            if WINDOW:
                m_s = m_s & (b_key[None, :] >= b_begin[:, None])
            b_s = tl.where(m_s, b_s, float("-inf"))
        b_p, b_m, b_alpha = to_weights(b_s, b_m, b_factor, b_scale, 1, SOFTCAP or ALIBI or SCALED)
        if len(b_l.shape) == 2:
            b_l = b_l * b_alpha[:, None] + b_p
        else:
            b_l = b_l * b_alpha + tl.sum(b_p, 1)
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_alpha[:, None], input_precision="ieee")
    return b_acc, b_m, b_l


@triton.jit
def attend_regions(
    state,  # (b_acc, b_m, b_l), as attend has them
    b_q,
    rows,  # (b_begin, b_end, b_pos, b_slope)
    pages,  # (p_k, p_v, p_table, stride_k_block, stride_k_slot, stride_v_block, stride_v_slot)
    ranges,  # (lo, whole_lo, whole_hi, hi) of `prefill_key_ranges`, and the first key that a row sees
    cut_lo,  # CUT: of those, keys [cut_lo, cut_hi)
    cut_hi,
    scale,
    softcap,
    CUT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attend to the keys of a prompt's tile: with masks before and behind those that all of its rows see."""
    b_acc, b_m, b_l = state
    b_begin, b_end, b_pos, b_slope = rows
    lo, whole_lo, whole_hi, hi, first = ranges
    for region in tl.static_range(0 if WINDOW else 1, 3):
        if region == 0:
            part_lo, part_hi = lo, whole_lo
        elif region == 1:
            part_lo, part_hi = whole_lo, whole_hi
        else:
            part_lo, part_hi = whole_hi, hi
        if CUT:
            part_lo, part_hi = tl.maximum(part_lo, cut_lo), tl.minimum(part_hi, cut_hi)
        b_acc, b_m, b_l = attend(
            *(b_acc, b_m, b_l, b_q, b_begin, b_end, b_pos, None, b_slope, scale),
            *(pages[0], pages[1], pages[2], part_lo, part_hi, first, 0, softcap),
            *(pages[3], pages[4], pages[5], pages[6]),
            HIDE="rows" if region != 1 else "nothing",
            INSTEAD=False,
            SAME_STRIDES=False,
            WINDOW=WINDOW,
            SOFTCAP=SOFTCAP,
            ALIBI=ALIBI,
            BLOCK_SIZE=BLOCK_SIZE,
            HEAD_SIZE=HEAD_SIZE,
            BLOCK_D=BLOCK_D,
            BLOCK_N=BLOCK_N,
        )
    return b_acc, b_m, b_l

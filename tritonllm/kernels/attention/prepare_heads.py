"""What a program does with some heads of one token, wherever they come from and go to: normalise, turn, scale, store.

The arithmetic is that of `norm`, `rope` and `kv_cache` in turn, with the roundings of their results, in registers.
"""

import triton
import triton.language as tl

from tritonllm.kernels.attention.kv_cache import saturate
from tritonllm.kernels.elementwise import load_angles, load_pairs, store_pairs


@triton.jit
def _rounded(b_x, dtype):
    """Values rounded as a kernel of its own would store them."""
    return b_x.to(dtype).to(tl.float32)


@triton.jit
def load_weights(p_weight, m_row, HEAD_SIZE: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr):
    """A norm's weights as :func:`prepare_heads` takes them: ``[heads, 1]`` pointers, or None -> three blocks."""
    b_a = tl.zeros(m_row.shape, tl.float32)
    b_b = b_a
    b_rest = b_a
    if p_weight is not None:
        if HALF:
            b_a, b_b = load_pairs(p_weight, m_row, HALF, PAIRS)
        if HEAD_SIZE > 2 * HALF:
            rest = 2 * HALF + tl.arange(0, triton.next_power_of_2(HEAD_SIZE - 2 * HALF))[None, :]
            b_rest = tl.load(p_weight + rest, mask=m_row & (rest < HEAD_SIZE), other=0.0).to(tl.float32)
    return b_a, b_b, b_rest


@triton.jit
def prepare_heads(
    p_in,  # [heads, 1]: first element of each head
    p_out,  # [heads, 1], may be p_in
    m_in,  # [heads, 1]
    m_out,
    b_wa,  # the norm's weights, if NORM
    b_wb,
    b_wr,
    p_table,  # the row of the token's position: HALF cosines, HALF sines
    b_inverse,  # [heads, 1]: multiplies what is stored, if SCALED
    eps,
    weight_offset,
    HEAD_SIZE: tl.constexpr,
    HALF: tl.constexpr,  # half of the elements that turn
    PAIRS: tl.constexpr,
    NORM: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Normalise, turn and store some heads of one token."""
    REST: tl.constexpr = HEAD_SIZE - 2 * HALF
    b_squares = tl.zeros(m_in.shape, tl.float32)
    # All loads before the first wait for one.
    if HALF:
        b_a, b_b = load_pairs(p_in, m_in, HALF, PAIRS)
        b_cos, b_sin = load_angles(p_table, m_in, HALF)
    if REST:
        rest = 2 * HALF + tl.arange(0, triton.next_power_of_2(REST))[None, :]
        b_rest = tl.load(p_in + rest, mask=m_in & (rest < HEAD_SIZE), other=0.0).to(tl.float32)
    if NORM:
        if HALF:
            b_squares += tl.sum(b_a * b_a + b_b * b_b, axis=1)[:, None]
        if REST:
            b_squares += tl.sum(b_rest * b_rest, axis=1)[:, None]
        b_rstd = tl.rsqrt(b_squares / HEAD_SIZE + eps)
        if HALF:
            b_a = _rounded(b_a * b_rstd * (b_wa + weight_offset), p_in.dtype.element_ty)
            b_b = _rounded(b_b * b_rstd * (b_wb + weight_offset), p_in.dtype.element_ty)
        if REST:
            b_rest = _rounded(b_rest * b_rstd * (b_wr + weight_offset), p_in.dtype.element_ty)
    if HALF:
        b_first = _rounded(b_a * b_cos - b_b * b_sin, p_in.dtype.element_ty)
        b_second = _rounded(b_b * b_cos + b_a * b_sin, p_in.dtype.element_ty)
        if SCALED:
            b_first = saturate(b_first * b_inverse, p_out.dtype.element_ty)
            b_second = saturate(b_second * b_inverse, p_out.dtype.element_ty)
        store_pairs(p_out, m_out, b_first, b_second, HALF, PAIRS)
    if REST:
        if SCALED:
            b_rest = saturate(b_rest * b_inverse, p_out.dtype.element_ty)
        tl.store(p_out + rest, b_rest.to(p_out.dtype.element_ty), mask=m_out & (rest < HEAD_SIZE))

"""Attention that begins with the rows of the query/key/value projection: its heads, normalised and turned.

What :mod:`tritonllm.kernels.attention.prepare_heads` does in a kernel of its own, here in the shape in which attention
needs the heads, and with all factors loaded before the heads are there.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tritonllm.kernels.attention.arguments import Heads, Scales


class Projection(NamedTuple):
    """What the kernel needs besides to begin with the rows of the projection: see ``fused_decode_attention``."""

    slot_mapping: torch.Tensor
    heads: Heads
    scales: Scales


def projection_arguments(q: torch.Tensor, k_cache: torch.Tensor, projection: Projection | None) -> dict[str, Any]:
    """The kernel's arguments that only matter with a projection."""
    if projection is None:
        names = ("slot_ptr", "positions_ptr", "cos_sin_ptr", "q_weight_ptr", "k_weight_ptr")
        flags = {"FUSED": False, "HALF": 0, "PAIRS": False, "PER_HEAD": False, "SCALED": False}
        numbers = dict.fromkeys(("k_inverse", "v_inverse", "eps", "weight_offset"), 1.0)
        return dict.fromkeys(names) | flags | numbers | {"stride_cos_sin": 0}
    slots, heads, scales = projection
    table = heads.cos_sin_cache
    return {
        "slot_ptr": slots,
        "positions_ptr": heads.positions,
        "cos_sin_ptr": q if table is None else table,
        "q_weight_ptr": heads.q_weight,
        "k_weight_ptr": heads.k_weight,
        "k_inverse": 1.0 / scales.k_factor,
        "v_inverse": 1.0 / scales.v_factor,
        "eps": heads.eps,
        "weight_offset": heads.weight_offset,
        "stride_cos_sin": 0 if table is None else table.stride(0),
        "FUSED": True,
        "HALF": 0 if table is None else table.shape[1] // 2,
        "PAIRS": heads.interleaved,
        "PER_HEAD": heads.q_weight is not None and heads.q_weight.dim() == 2,
        "SCALED": scales.divide(q.dtype, k_cache),
    }


@triton.jit
def load_turns(p_angles, b_dim, HALF: tl.constexpr, PAIRS: tl.constexpr):
    """Cosines and sines (negative for a pair's first element), ``[R, D]``; ``p_angles [R, 1]``: rows of the table."""
    _, b_angle, m_first = _pairs(b_dim, HALF, PAIRS)
    m_turn = b_dim < 2 * HALF
    b_cos = tl.load(p_angles + b_angle, mask=m_turn, other=1.0).to(tl.float32)
    b_sin = tl.load(p_angles + HALF + b_angle, mask=m_turn, other=0.0).to(tl.float32)
    return b_cos, tl.where(m_first, -b_sin, b_sin)


@triton.jit
def load_norm(p_weight, m_heads, b_dim, HALF: tl.constexpr, PAIRS: tl.constexpr, HEAD_SIZE: tl.constexpr):
    """A norm's weights of elements and of those that they turn with, ``[R, D]``; 0 outside of ``m_heads [R, 1]``."""
    b_mate, _, _ = _pairs(b_dim, HALF, PAIRS)
    b_w = tl.load(p_weight + b_dim, mask=m_heads & (b_dim < HEAD_SIZE), other=0.0).to(tl.float32)
    return b_w, tl.load(p_weight + b_mate, mask=m_heads & (b_dim < 2 * HALF), other=0.0).to(tl.float32)


@triton.jit
def _pairs(b_dim, HALF: tl.constexpr, PAIRS: tl.constexpr):
    """For each dimension: the one that it turns with, their angle, and whether it is the first of the two."""
    if PAIRS:
        m_first = b_dim % 2 == 0
        b_mate = tl.where(m_first, b_dim + 1, b_dim - 1)
        b_angle = b_dim // 2
    else:
        m_first = b_dim < HALF
        b_mate = tl.where(m_first, b_dim + HALF, b_dim - HALF)
        b_angle = tl.where(m_first, b_dim, b_dim - HALF)
    return b_mate, b_angle, m_first


@triton.jit
def prepare_new_heads(
    p_heads,  # [R, 1]
    m_heads,
    turns,  # of load_turns
    norm,  # of load_norm, if NORM
    b_dim,  # [1, D]
    eps,
    weight_offset,
    NORM: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
):
    """Heads normalised and turned, ``[R, D]`` float32, with the roundings of a kernel for each."""
    b_cos, b_sin = turns
    b_w, b_w_mate = norm
    dtype: tl.constexpr = p_heads.dtype.element_ty
    b_x = tl.load(p_heads + b_dim, mask=m_heads & (b_dim < HEAD_SIZE), other=0.0).to(tl.float32)
    if HALF:
        b_mate, _, _ = _pairs(b_dim, HALF, PAIRS)
        b_y = tl.load(p_heads + b_mate, mask=m_heads & (b_dim < 2 * HALF), other=0.0).to(tl.float32)
    if NORM:
        b_rstd = tl.rsqrt(tl.sum(b_x * b_x, 1, keep_dims=True) / HEAD_SIZE + eps)
        b_x = (b_x * b_rstd * (b_w + weight_offset)).to(dtype).to(tl.float32)
        if HALF:
            b_y = (b_y * b_rstd * (b_w_mate + weight_offset)).to(dtype).to(tl.float32)
    if HALF:
        b_x = (b_x * b_cos + b_y * b_sin).to(dtype).to(tl.float32)
    return b_x

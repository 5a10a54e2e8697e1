"""Rotary position embedding of queries and keys, in place and in one launch.

Each pair of elements ``(a, b)`` of a head is turned by its angle: ``(a cos - b sin, b cos + a sin)``. Reads and writes
every rotated element once: memory-bound, 17.5 us for 4096 tokens of 32 + 8 heads of 128 in bfloat16 at 4.8 TB/s. A
program takes one token and a few heads, so the cosines and sines are loaded once for all of them.
Rotary embedding: Su et al., "RoFormer" (2021). Tables: :func:`tritonllm.kernels.rope_cache.build_cos_sin_cache`.
"""

import torch
import triton
import triton.language as tl

from tritonllm.kernels import tuning
from tritonllm.kernels.checks import check_tensor, require
from tritonllm.kernels.registry import register_op


@triton.jit
def _rotate(p_x, head, m_head, stride_h, b_cos, b_sin, HALF: tl.constexpr, BLOCK: tl.constexpr, PAIRS: tl.constexpr):
    """Turn some heads of one token; `p_x` is the first element of its head 0."""
    p_head = p_x + head.to(tl.int64)[:, None] * stride_h
    if PAIRS:  # (0, 1), (2, 3), ...: loaded and stored as they lie, split in registers
        cols = tl.arange(0, 2 * BLOCK)[None, :]
        mask = m_head[:, None] & (cols < 2 * HALF)
        b_x = tl.load(p_head + cols, mask=mask, other=0.0).to(tl.float32)
        b_a, b_b = tl.split(tl.reshape(b_x, (b_x.shape[0], BLOCK, 2)))
        b_out = tl.join(b_a * b_cos - b_b * b_sin, b_b * b_cos + b_a * b_sin)
        b_out = tl.reshape(b_out, (b_x.shape[0], 2 * BLOCK))
        tl.store(p_head + cols, b_out.to(p_x.dtype.element_ty), mask=mask)
    else:  # (0, HALF), (1, HALF + 1), ...
        cols = tl.arange(0, BLOCK)[None, :]
        mask = m_head[:, None] & (cols < HALF)
        b_a = tl.load(p_head + cols, mask=mask, other=0.0).to(tl.float32)
        b_b = tl.load(p_head + HALF + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(p_head + cols, (b_a * b_cos - b_b * b_sin).to(p_x.dtype.element_ty), mask=mask)
        tl.store(p_head + HALF + cols, (b_b * b_cos + b_a * b_sin).to(p_x.dtype.element_ty), mask=mask)


@triton.jit
def _apply_rope_kernel(
    q_ptr,  # [T, H, D]
    k_ptr,  # [T, K, D]
    positions_ptr,  # [T]
    cache_ptr,  # [max_position, 2 * HALF]: cosines, then sines
    H,
    K,
    q_blocks,  # programs that share the heads of q; those after them take k
    stride_q,
    stride_qh,
    stride_k,
    stride_kh,
    stride_cache,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,  # >= HALF
    BLOCK_H: tl.constexpr,
    PAIRS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    cols = tl.arange(0, BLOCK)[None, :]
    p_cache = cache_ptr + tl.load(positions_ptr + token).to(tl.int64) * stride_cache + cols
    b_cos = tl.load(p_cache, mask=cols < HALF, other=0.0).to(tl.float32)
    b_sin = tl.load(p_cache + HALF, mask=cols < HALF, other=0.0).to(tl.float32)
    if block < q_blocks:
        head = block * BLOCK_H + tl.arange(0, BLOCK_H)
        _rotate(q_ptr + token * stride_q, head, head < H, stride_qh, b_cos, b_sin, HALF, BLOCK, PAIRS)
    else:
        head = (block - q_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
        _rotate(k_ptr + token * stride_k, head, head < K, stride_kh, b_cos, b_sin, HALF, BLOCK, PAIRS)


def default_config(heads: int, rotary: int, tokens: int) -> tuning.Config:
    """One warp for 512 pairs, 16 a thread: many small programs, enough loads in flight."""
    per_program = max(1, 512 // triton.next_power_of_2(max(1, rotary // 2)))
    return {"BLOCK_H": min(per_program, triton.next_power_of_2(max(1, heads))), "num_warps": 1}


def _reference(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor, interleaved: bool
) -> None:
    rotary, heads = cos_sin_cache.shape[1], q.shape[1]
    cos, sin = cos_sin_cache.index_select(0, positions).unsqueeze(1).float().chunk(2, dim=-1)
    q, k = q[..., :rotary], k[..., :rotary]
    x = torch.cat((q, k), dim=1).float()
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    turned = (torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(b * cos, a, sin))
    out = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    q.copy_(out[:, :heads])
    k.copy_(out[:, heads:])


@register_op(mutates=("q", "k"), reference=_reference)
def _apply_rope(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor, interleaved: bool
) -> None:
    tokens, q_heads, _ = q.shape
    k_heads, rotary = k.shape[1], cos_sin_cache.shape[1]
    if tokens == 0 or rotary == 0 or q_heads + k_heads == 0:
        return
    config = tuning.get_config(
        "apply_rope", q.device, default_config, heads=max(q_heads, k_heads), rotary=rotary, tokens=tokens
    )
    q_blocks = triton.cdiv(q_heads, config["BLOCK_H"])
    k_blocks = triton.cdiv(k_heads, config["BLOCK_H"])
    _apply_rope_kernel[(tokens, q_blocks + k_blocks)](
        q,
        k,
        positions,
        cos_sin_cache,
        q_heads,
        k_heads,
        q_blocks,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        cos_sin_cache.stride(0),
        HALF=rotary // 2,
        BLOCK=triton.next_power_of_2(rotary // 2),
        PAIRS=interleaved,
        **config,
    )


def apply_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    *,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn the first ``rotary`` elements of each head by the angles of its token's position, in place.

    Computed in float32 and rounded once. Elements beyond ``rotary`` stay (partial rotary embedding).

    Args:
        q: ``[T, H, D]`` float16, bfloat16 or float32; any strides but 1 for the last, so ``q`` and ``k`` may be slices
            of one fused projection.
        k: ``[T, K, D]``.
        positions: ``[T]`` int32 or int64, from 0 to ``max_position - 1``; not checked on a GPU, where another value
            reads outside the table.
        cos_sin_cache: ``[max_position, rotary]`` of a float dtype, the cosines of the ``rotary / 2`` angles, then
            their sines; ``rotary`` is even and at most ``D``.
        interleaved: pair elements ``(2i, 2i + 1)`` (GPT-J) instead of ``(i, i + rotary / 2)`` (GPT-NeoX, Llama).

    Returns:
        ``(q, k)``, the tensors given.

    Raises:
        ValueError: a wrong shape, dtype or device, an odd ``rotary``, or one beyond ``D``.
    """
    check_tensor("q", q, ("T", "H", "D"))
    tokens, _, head_size = q.shape
    check_tensor("k", k, (tokens, "K", head_size), like=q)
    check_tensor("positions", positions, (tokens,), dtype=(torch.int32, torch.int64), like=q)
    check_tensor("cos_sin_cache", cos_sin_cache, ("max_position", "rotary"), like=q)
    rotary = cos_sin_cache.shape[1]
    require(
        rotary % 2 == 0 and rotary <= head_size,
        f"cos_sin_cache must have an even number of columns, at most the head size {head_size}, got {rotary}",
    )
    _apply_rope(q, k, positions, cos_sin_cache, interleaved)
    return q, k


def apply_rope_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    *,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`apply_rope` in plain torch."""
    _reference(q, k, positions, cos_sin_cache, interleaved)
    return q, k

"""Rotary position embedding of queries and keys, in place and in one launch.

Each pair of elements ``(a, b)`` of a head is turned by its angle: ``(a cos - b sin, b cos + a sin)``. Reads and writes
every rotated element once: memory-bound, 20 us for 4096 tokens of 32 + 8 heads of 128 in bfloat16 at 4.26 TB/s. Rotary
embedding: Su et al., "RoFormer" (2021). Tables: :func:`tritonllm.kernels.elementwise.rope_cache.build_cos_sin_cache`.
"""

import torch
import triton
import triton.language as tl

from tritonllm.kernels.runtime import tuning
from tritonllm.kernels.runtime.checks import check_tensor, require
from tritonllm.kernels.runtime.dependent_launch import dependent_launch, let_next_start, wait_for_previous
from tritonllm.kernels.runtime.registry import register_op, with_reference


@triton.jit
def load_pairs(p_row, m_row, HALF: tl.constexpr, PAIRS: tl.constexpr):
    """The first and the second elements of the pairs that turn together: float32, 0 beyond HALF of them."""
    BLOCK: tl.constexpr = triton.next_power_of_2(HALF)
    if PAIRS:  # (0, 1), (2, 3), ...: loaded as they lie, split in registers
        cols = tl.arange(0, 2 * BLOCK)[None, :]
        b_x = tl.load(p_row + cols, mask=m_row & (cols < 2 * HALF), other=0.0).to(tl.float32)
        b_a, b_b = tl.split(tl.reshape(b_x, (b_x.shape[0], BLOCK, 2)))
    else:  # (0, HALF), (1, HALF + 1), ...
        cols = tl.arange(0, BLOCK)[None, :]
        b_a = tl.load(p_row + cols, mask=m_row & (cols < HALF), other=0.0).to(tl.float32)
        b_b = tl.load(p_row + HALF + cols, mask=m_row & (cols < HALF), other=0.0).to(tl.float32)
    return b_a, b_b


@triton.jit
def store_pairs(p_row, m_row, b_a, b_b, HALF: tl.constexpr, PAIRS: tl.constexpr):
    BLOCK: tl.constexpr = triton.next_power_of_2(HALF)
    if PAIRS:
        cols = tl.arange(0, 2 * BLOCK)[None, :]
        b_x = tl.reshape(tl.join(b_a, b_b), (b_a.shape[0], 2 * BLOCK))
        tl.store(p_row + cols, b_x.to(p_row.dtype.element_ty), mask=m_row & (cols < 2 * HALF))
    else:
        cols = tl.arange(0, BLOCK)[None, :]
        tl.store(p_row + cols, b_a.to(p_row.dtype.element_ty), mask=m_row & (cols < HALF))
        tl.store(p_row + HALF + cols, b_b.to(p_row.dtype.element_ty), mask=m_row & (cols < HALF))


@triton.jit
def load_angles(p_table, m_row, HALF: tl.constexpr):
    """Cosines and sines ``[rows, HALF]`` float32, from one row of the table.

    Loaded for each row, from the nearest cache: in the shape of what they turn, nothing has to move between threads
    (through shared memory 4096 tokens take 24.1 us on an H200, so 22.9).
    """
    cols = tl.arange(0, triton.next_power_of_2(HALF))[None, :]
    p_cos = p_table + (tl.zeros(m_row.shape, tl.int32) + cols)
    b_cos = tl.load(p_cos, mask=m_row & (cols < HALF), other=0.0).to(tl.float32)
    b_sin = tl.load(p_cos + HALF, mask=m_row & (cols < HALF), other=0.0).to(tl.float32)
    return b_cos, b_sin


@triton.jit
def _rotate(p_x, head, m_head, stride_h, p_table, HALF: tl.constexpr, PAIRS: tl.constexpr, PDL: tl.constexpr):
    """Turn some heads of one token; `p_x` is the first element of its head 0."""
    p_head = p_x + head.to(tl.int64) * stride_h
    b_a, b_b = load_pairs(p_head, m_head, HALF, PAIRS)
    b_cos, b_sin = load_angles(p_table, m_head, HALF)
    let_next_start(PDL)
    store_pairs(p_head, m_head, b_a * b_cos - b_b * b_sin, b_b * b_cos + b_a * b_sin, HALF, PAIRS)


@triton.jit(do_not_specialize=["positions_ptr"])
def _apply_rope_kernel(
    q_ptr,  # [T, H, D]
    k_ptr,  # [T, K, D]
    positions_ptr,  # [T]
    table_ptr,  # [max_position, 2 * HALF]: cosines, then sines
    H,
    K,
    q_programs,  # of a token, for the heads of q; those after them take k
    programs,  # of a token
    stride_q,
    stride_qh,
    stride_k,
    stride_kh,
    stride_table,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: up to BLOCK_H heads of one token. A token's programs are neighbours, in memory as in time."""
    wait_for_previous(PDL)
    token = (tl.program_id(0) // programs).to(tl.int64)
    program = tl.program_id(0) % programs
    p_table = table_ptr + tl.load(positions_ptr + token).to(tl.int64) * stride_table
    rows = tl.arange(0, BLOCK_H)[:, None]
    if program < q_programs:
        q_head = program * BLOCK_H + rows
        _rotate(q_ptr + token * stride_q, q_head, q_head < H, stride_qh, p_table, HALF, PAIRS, PDL)
    else:
        k_head = (program - q_programs) * BLOCK_H + rows
        _rotate(k_ptr + token * stride_k, k_head, k_head < K, stride_kh, p_table, HALF, PAIRS, PDL)


def default_config(heads: int, rotary: int, tokens: int) -> tuning.Config:
    """4 pairs a thread where latency is all, 8 where few large programs start soonest, 16 where bandwidth is."""
    half = triton.next_power_of_2(max(1, rotary // 2))
    pairs, warps = (256, 2) if tokens * heads <= 1024 else (1024, 4) if tokens * heads <= 65536 else (512, 1)
    return {"BLOCK_H": min(max(1, pairs // half), triton.next_power_of_2(max(1, heads))), "num_warps": warps}


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
    q_programs = triton.cdiv(q_heads, config["BLOCK_H"])
    programs = q_programs + triton.cdiv(k_heads, config["BLOCK_H"])
    _apply_rope_kernel[(tokens * programs,)](
        q,
        k,
        positions,
        cos_sin_cache,
        q_heads,
        k_heads,
        q_programs,
        programs,
        *q.stride()[:2],
        *k.stride()[:2],
        cos_sin_cache.stride(0),
        HALF=rotary // 2,
        PAIRS=interleaved,
        **config,
        **dependent_launch(q.device, tokens * programs),
    )


def check_rope(positions: torch.Tensor, cos_sin_cache: torch.Tensor, x: torch.Tensor, head_size: int) -> None:
    """Check the positions of the tokens of ``x[T, ...]`` and their table."""
    check_positions(positions, x)
    check_angles(cos_sin_cache, x, head_size)


def check_positions(positions: torch.Tensor, x: torch.Tensor) -> None:
    check_tensor("positions", positions, (len(x),), dtype=(torch.int32, torch.int64), like=x)


def check_angles(cos_sin_cache: torch.Tensor, x: torch.Tensor, head_size: int) -> None:
    """Check a table for heads of this size."""
    check_tensor("cos_sin_cache", cos_sin_cache, ("max_position", "rotary"), like=x)
    rotary = cos_sin_cache.shape[1]
    require(
        rotary % 2 == 0 and rotary <= head_size,
        f"cos_sin_cache must have an even number of columns, at most the head size {head_size}, got {rotary}",
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
    check_rope(positions, cos_sin_cache, q, head_size)
    _apply_rope(q, k, positions, cos_sin_cache, interleaved)
    return q, k


apply_rope_ref = with_reference(apply_rope)

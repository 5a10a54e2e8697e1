"""What lies between the query/key/value projection and attention, in one launch, on the projection's own rows.

Queries and keys are normalised by head (RMSNorm) and turned by their position (RoPE), each only where the model does
so; queries go back where they were, keys and values into the paged cache. Every element is read once and written once.
RMSNorm: Zhang and Sennrich (2019). Rotary embedding: Su et al., "RoFormer" (2021). Blocks: Kwon et al. (2023).
"""

import torch
import triton
import triton.language as tl

from tritonllm.kernels.attention import cpu
from tritonllm.kernels.attention.arguments import Heads, Scales, Slots
from tritonllm.kernels.attention.common import (
    check_cache_dtype,
    check_caches,
    check_float8,
    check_head_size,
    check_scales,
)
from tritonllm.kernels.attention.kv_cache import inverse_scale
from tritonllm.kernels.attention.prepare_heads import load_weights, prepare_heads
from tritonllm.kernels.elementwise import apply_rope, check_rope, rms_norm
from tritonllm.kernels.runtime import tuning
from tritonllm.kernels.runtime.checks import check_tensor, require
from tritonllm.kernels.runtime.dependent_launch import dependent_launch, let_next_start, wait_for_previous
from tritonllm.kernels.runtime.registry import OPS, register_op, with_reference


@triton.jit
def _weights_and_table(
    weight_ptr,
    head,
    m_head,
    positions_ptr,
    token,
    table_ptr,
    stride_table,
    HEAD_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    PER_HEAD: tl.constexpr,
    CONSTANT: tl.constexpr,
    PDL: tl.constexpr,
):
    """The norm's weights of these heads, and where the cosines of the token's position lie.

    Waits for the kernels before this one: after the weights if these are constant.
    """
    p_weight = weight_ptr + head * (HEAD_SIZE if PER_HEAD else 0) if weight_ptr is not None else None
    wait_for_previous(PDL and not CONSTANT)
    b_wa, b_wb, b_wr = load_weights(p_weight, m_head, HEAD_SIZE, HALF, PAIRS)
    wait_for_previous(PDL and CONSTANT)
    p_table = table_ptr + tl.load(positions_ptr + token).to(tl.int64) * stride_table if HALF else table_ptr
    return b_wa, b_wb, b_wr, p_table


# Arguments whose alignment changes from step to step: one compilation serves them all.
@triton.jit(do_not_specialize=["slot_ptr", "positions_ptr"])
def _qk_norm_rope_store_kernel(
    qkv_ptr,  # [T, (H + 2 K) * D]
    k_cache_ptr,  # [P, S, K, D]
    v_cache_ptr,
    slot_ptr,  # [T]
    positions_ptr,  # [T], read if HALF
    table_ptr,  # [max_position, 2 * HALF], read if HALF
    q_weight_ptr,  # [D], or [H, D] if PER_HEAD; None: no norm
    k_weight_ptr,  # [D], or [K, D]
    k_scale_ptr,  # [K], or None
    v_scale_ptr,
    k_inverse,  # 1 / scale where that is a number
    v_inverse,
    eps,
    weight_offset,
    stride_qkv,
    stride_table,
    stride_kc_block,
    stride_kc_slot,
    stride_kc_head,
    stride_vc_block,
    stride_vc_slot,
    stride_vc_head,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    PER_HEAD: tl.constexpr,
    SCALED: tl.constexpr,  # what is stored is divided by a scale
    CONSTANT: tl.constexpr,  # no kernel that may still run writes the weights
    BLOCK_SIZE: tl.constexpr,
    Q_PROGRAMS: tl.constexpr,  # of each token; 0: queries stay as they are
    KV_PROGRAMS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: up to BLOCK_H heads of one token's queries, keys or values. A token's programs are neighbours."""
    # At once: attention of many sequences then reads the keys that it has while this kernel adds the last ones.
    let_next_start(PDL)
    NORM: tl.constexpr = q_weight_ptr is not None
    token = (tl.program_id(0) // (Q_PROGRAMS + 2 * KV_PROGRAMS)).to(tl.int64)
    program = tl.program_id(0) % (Q_PROGRAMS + 2 * KV_PROGRAMS)
    p_token = qkv_ptr + token * stride_qkv
    rows = tl.arange(0, BLOCK_H)[:, None]
    if program < Q_PROGRAMS:
        q_head = program * BLOCK_H + rows
        m_q = q_head < Q_HEADS
        p_q = p_token + q_head * HEAD_SIZE
        b_wa, b_wb, b_wr, p_table = _weights_and_table(
            *(q_weight_ptr, q_head, m_q, positions_ptr, token, table_ptr, stride_table),
            *(HEAD_SIZE, HALF, PAIRS, PER_HEAD, CONSTANT, PDL),
        )
        prepare_heads(
            *(p_q, p_q, m_q, m_q, b_wa, b_wb, b_wr, p_table, m_q, eps, weight_offset),
            *(HEAD_SIZE, HALF, PAIRS, NORM, False),
        )
        return
    kv_head = (program - Q_PROGRAMS) % KV_PROGRAMS * BLOCK_H + rows
    m_kv = kv_head < KV_HEADS
    p_k = p_token + (Q_HEADS + kv_head) * HEAD_SIZE
    if program < Q_PROGRAMS + KV_PROGRAMS:
        b_ka, b_kb, b_kr, p_k_table = _weights_and_table(
            *(k_weight_ptr, kv_head, m_kv, positions_ptr, token, table_ptr, stride_table),
            *(HEAD_SIZE, HALF, PAIRS, PER_HEAD, CONSTANT, PDL),
        )
        slot = tl.load(slot_ptr + token)
        at = slot // BLOCK_SIZE * stride_kc_block + slot % BLOCK_SIZE * stride_kc_slot
        p_k_out = k_cache_ptr + at + kv_head.to(tl.int64) * stride_kc_head
        b_k_inverse = inverse_scale(k_scale_ptr, k_inverse, kv_head, m_kv)
        prepare_heads(
            *(p_k, p_k_out, m_kv, m_kv & (slot >= 0), b_ka, b_kb, b_kr, p_k_table, b_k_inverse, eps, weight_offset),
            *(HEAD_SIZE, HALF, PAIRS, NORM, SCALED),
        )
    else:
        wait_for_previous(PDL)
        slot = tl.load(slot_ptr + token)
        at = slot // BLOCK_SIZE * stride_vc_block + slot % BLOCK_SIZE * stride_vc_slot
        p_v_out = v_cache_ptr + at + kv_head.to(tl.int64) * stride_vc_head
        b_v_inverse = inverse_scale(v_scale_ptr, v_inverse, kv_head, m_kv)
        p_v = p_k + KV_HEADS * HEAD_SIZE
        prepare_heads(
            *(p_v, p_v_out, m_kv, m_kv & (slot >= 0), m_kv, m_kv, m_kv, table_ptr, b_v_inverse, eps, weight_offset),
            *(HEAD_SIZE, 0, PAIRS, False, SCALED),
        )


# The number of tokens whose configuration, and so whose order of a head's sum, norms that are batch invariant have.
INVARIANT_TOKENS = 256


def default_config(heads: int, head_size: int, tokens: int) -> tuning.Config:
    """Few tokens: few programs, of 16 elements a thread. Many: as many as the chip holds, of one warp and 32."""
    many = tokens * heads > 65536
    block = max(1, (1024 if many else 2048) // triton.next_power_of_2(head_size))
    return {"BLOCK_H": min(block, triton.next_power_of_2(heads)), "num_warps": 1 if many else 4}


def _reference(qkv: torch.Tensor, constant_weight: bool, slots: Slots, heads: Heads, scales: Scales) -> None:
    q, k, v = split_heads(qkv, slots.k_cache)
    k = k.clone()
    for x, weight in ((q, heads.q_weight), (k, heads.k_weight)):
        if weight is not None:
            rms_norm(x, weight, heads.eps, weight_offset=heads.weight_offset, out=x)
    if heads.positions is not None and heads.cos_sin_cache is not None:
        apply_rope(q, k, heads.positions, heads.cos_sin_cache, interleaved=heads.interleaved)
    OPS["store_kv"](k, v, *slots, *scales)


def split_heads(qkv: torch.Tensor, k_cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values ``[T, heads, D]``, views of the rows."""
    kv_heads, head_size = k_cache.shape[2:]
    heads = qkv.unflatten(1, (qkv.shape[1] // head_size, head_size))
    return heads.split((heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)


@register_op(mutates=("qkv", "k_cache", "v_cache"), reference=_reference, cpu=cpu.qk_norm_rope_store)
def _qk_norm_rope_store(qkv: torch.Tensor, constant_weight: bool, slots: Slots, heads: Heads, scales: Scales) -> None:
    k_cache, v_cache, slot_mapping = slots
    check_float8(k_cache)
    tokens = qkv.shape[0]
    if tokens == 0:
        return
    block_size, kv_heads, head_size = k_cache.shape[1:]
    q_heads = qkv.shape[1] // head_size - 2 * kv_heads
    rotary = 0 if heads.cos_sin_cache is None else heads.cos_sin_cache.shape[1]
    # of a power of two: what is compiled must not change between the sizes that warm-up steps have
    most = triton.next_power_of_2(tokens)
    of_step = INVARIANT_TOKENS if heads.batch_invariant and heads.q_weight is not None else most
    key = {"heads": q_heads + 2 * kv_heads, "head_size": head_size, "tokens": of_step}
    config = tuning.get_config("qk_norm_rope_store", qkv.device, default_config, **key)
    q_programs = triton.cdiv(q_heads, config["BLOCK_H"]) if rotary or heads.q_weight is not None else 0
    kv_programs = triton.cdiv(kv_heads, config["BLOCK_H"])
    programs = q_programs + 2 * kv_programs  # of a token
    table = (qkv, 0) if heads.cos_sin_cache is None else (heads.cos_sin_cache, heads.cos_sin_cache.stride(0))
    _qk_norm_rope_store_kernel[(tokens * programs,)](
        *(qkv, k_cache, v_cache, slot_mapping, slot_mapping if heads.positions is None else heads.positions, table[0]),
        *(heads.q_weight, heads.k_weight, scales.k_scale, scales.v_scale),
        *(1.0 / scales.k_factor, 1.0 / scales.v_factor, heads.eps, heads.weight_offset),
        *(qkv.stride(0), table[1], *k_cache.stride()[:3], *v_cache.stride()[:3]),
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        HEAD_SIZE=head_size,
        HALF=rotary // 2,
        PAIRS=heads.interleaved,
        PER_HEAD=heads.q_weight is not None and heads.q_weight.dim() == 2,
        SCALED=scales.divide(qkv.dtype, k_cache),
        CONSTANT=constant_weight,
        BLOCK_SIZE=block_size,
        Q_PROGRAMS=q_programs,
        KV_PROGRAMS=kv_programs,
        **config,
        **dependent_launch(qkv.device, most * programs),
    )


def qk_norm_rope_store(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor | None = None,
    cos_sin_cache: torch.Tensor | None = None,
    *,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    interleaved: bool = False,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    constant_weight: bool = False,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Normalise and turn the queries and keys of a fused projection, and store keys and values, in one launch.

    Equal to :func:`rms_norm` of each head of q and k, :func:`apply_rope` and :func:`store_kv` in turn, with their
    roundings; a part whose arguments are ``None`` is left out.

    Args:
        qkv: ``[T, (H + 2 K) * D]`` float16, bfloat16 or float32, contiguous in the last dimension: each row H query
            heads, K key heads and K value heads. The queries are overwritten; keys and values stay as they are.
        k_cache: ``[P, S, K, D]`` with the dtype of ``qkv`` or float8_e4m3fn, D a multiple of 8 from 16 to 512, S from 1
            to 256; written.
        v_cache: as ``k_cache``; written.
        slot_mapping: ``[T]`` int64, block id times S plus the place in the block; negative: key and value are not
            stored.
        positions: ``[T]`` int32 or int64, from 0 to ``max_position - 1``, unchecked on a GPU.
        cos_sin_cache: ``[max_position, rotary]`` of a float dtype, cosines and then sines, as in :func:`apply_rope`;
            ``rotary`` is even and at most D. Given together with ``positions``, or neither.
        q_weight: the weight of the query heads' norm, ``[D]``, or ``[H, D]`` contiguous: a row for each head.
        k_weight: ``[D]``, or ``[K, D]`` where ``q_weight`` is ``[H, D]``. Given together with it, or neither.
        eps: added to the mean square.
        weight_offset: added to the weights, in float32 (Gemma).
        interleaved: pair elements ``(2i, 2i + 1)`` instead of ``(i, i + rotary / 2)``.
        k_scale: keys are stored divided by this number, or by this ``[K]`` float32 tensor per head.
        v_scale: values are stored divided by this number, or by this ``[K]`` float32 tensor per head.
        constant_weight: no kernel that may still run writes ``q_weight`` or ``k_weight`` (true while a model is
            served): they are read before the kernel before this one ends.
        batch_invariant: a token's bits do not depend on how many tokens there are (norms sum in one order).

    Returns:
        The queries, ``[T, H, D]``: a view of ``qkv``.

    Raises:
        ValueError: a shape, dtype, device or number that does not fit, an argument without its partner, or a float8
            cache on a GPU without float8.
    """
    heads = Heads(positions, cos_sin_cache, q_weight, k_weight, eps, weight_offset, interleaved, batch_invariant)
    slots = Slots(k_cache, v_cache, slot_mapping)
    scales = check_projection(qkv, slots, heads, k_scale, v_scale)
    _qk_norm_rope_store(qkv, constant_weight, *slots, *heads, *scales)
    return split_heads(qkv, k_cache)[0]


qk_norm_rope_store_ref = with_reference(qk_norm_rope_store)


def check_projection(
    qkv: torch.Tensor,
    slots: Slots,
    heads: Heads,
    k_scale: float | torch.Tensor | None,
    v_scale: float | torch.Tensor | None,
) -> Scales:
    """Check everything; the scales as the operator takes them."""
    k_cache, v_cache, slot_mapping = slots
    positions, cos_sin_cache, *_ = heads
    check_tensor("qkv", qkv, ("T", "(H + 2 K) * D"))
    check_caches(k_cache, v_cache, "K", "D", like=qkv)
    check_cache_dtype(k_cache, "qkv", qkv)
    tokens, columns = qkv.shape
    kv_heads, head_size = k_cache.shape[2:]
    check_head_size("k_cache", head_size)
    require(
        columns % head_size == 0 and columns // head_size > 2 * kv_heads,
        f"qkv must have (H + 2 * {kv_heads}) * {head_size} columns for H query heads, got {columns}",
    )
    check_tensor("slot_mapping", slot_mapping, (tokens,), dtype=torch.int64, like=qkv)
    require(
        (positions is None) == (cos_sin_cache is None), "positions and cos_sin_cache must both be given, or neither"
    )
    if positions is not None and cos_sin_cache is not None:
        check_rope(positions, cos_sin_cache, qkv, head_size)
    check_head_weights(heads, columns // head_size - 2 * kv_heads, kv_heads, head_size, like=qkv)
    return check_scales(k_scale, v_scale, kv_heads, qkv)


def check_head_weights(heads: Heads, q_heads: int, kv_heads: int, head_size: int, *, like: torch.Tensor) -> None:
    """Check the weights of the heads' norms."""
    q_weight, k_weight = heads.q_weight, heads.k_weight
    require((q_weight is None) == (k_weight is None), "q_weight and k_weight must both be given, or neither")
    if q_weight is not None and k_weight is not None:
        per_head = isinstance(q_weight, torch.Tensor) and q_weight.dim() == 2
        for name, weight, count in (("q_weight", q_weight, q_heads), ("k_weight", k_weight, kv_heads)):
            check_tensor(name, weight, (count, head_size) if per_head else (head_size,), like=like)
            require(weight.is_contiguous(), f"{name} must be contiguous, got strides {tuple(weight.stride())}")

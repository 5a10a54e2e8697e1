"""The key/value cache in blocks: storing new tokens, and copying blocks.

A block's S slots hold the keys and values of S consecutive tokens ("PagedAttention": Kwon et al., 2023). Both
operations read every element once and write it once: the floor is those bytes over the memory bandwidth.
"""

import torch
import triton
import triton.language as tl

from tritonllm.kernels.attention.arguments import Scales, Slots
from tritonllm.kernels.attention.common import (
    FLOAT8,
    as_movable,
    check_cache_dtype,
    check_caches,
    check_float8,
    check_scales,
)
from tritonllm.kernels.runtime import tuning
from tritonllm.kernels.runtime.checks import check_tensor
from tritonllm.kernels.runtime.dependent_launch import dependent_launch, let_next_start, wait_for_previous
from tritonllm.kernels.runtime.registry import register_op, with_reference


@triton.jit
def inverse_scale(scale_ptr, inverse, b_head, m_head):
    """1 / scale for each of these heads: from memory, or the number ``inverse``."""
    if scale_ptr is not None:
        b_inverse = tl.div_rn(1.0, tl.load(scale_ptr + b_head, mask=m_head, other=1.0))
    else:
        b_inverse = tl.zeros_like(b_head).to(tl.float32) + inverse
    return b_inverse


@triton.jit
def saturate(b_x, dtype: tl.constexpr):
    """float32 as far as the numbers of a cache's dtype reach, if the conversion to it does not see to that.

    To e4m3 it does. e5m2 has infinities, and its conversion saturates on some chips alone.
    """
    if dtype == tl.float8e5:
        b_x = tl.where(b_x > 57344.0, 57344.0, tl.where(b_x < -57344.0, -57344.0, b_x))  # NaN stays
    return b_x


# Arguments whose values and alignment change from step to step: one compilation serves them all.
@triton.jit(do_not_specialize=["slot_ptr", "T"])
def _store_kv_kernel(
    k_ptr,  # [T, K, D]
    v_ptr,
    k_cache_ptr,  # [P, S, K, D]
    v_cache_ptr,
    slot_ptr,  # [T]
    k_scale_ptr,  # [K], or None
    v_scale_ptr,
    k_inverse,
    v_inverse,
    T,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_kc_block,
    stride_kc_slot,
    stride_kc_head,
    stride_vc_block,
    stride_vc_slot,
    stride_vc_head,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    SCALED: tl.constexpr,  # what is stored is divided by a scale, or of another dtype
    BLOCK_T: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK_T tokens, BLOCK of the K * D columns, keys and values."""
    PROGRAMS: tl.constexpr = triton.cdiv(KV_HEADS * HEAD_SIZE, BLOCK)  # of a token
    b_token = (tl.program_id(0) // PROGRAMS).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    b_col = tl.program_id(0) % PROGRAMS * BLOCK + tl.arange(0, BLOCK)
    m_col = b_col < KV_HEADS * HEAD_SIZE
    m_token = b_token < T
    b_head = (b_col // HEAD_SIZE).to(tl.int64)  # heads may lie 2^31 elements apart
    b_dim = (b_col % HEAD_SIZE)[None, :]
    p_k = k_ptr + (b_token * stride_k_token)[:, None] + (b_head * stride_k_head)[None, :] + b_dim
    p_v = v_ptr + (b_token * stride_v_token)[:, None] + (b_head * stride_v_head)[None, :] + b_dim
    wait_for_previous(PDL)
    # All loads before the first store, which the compiler may not move a load over; and what is not stored is loaded
    # too, since a mask from the slots would make keys and values wait for them.
    b_slot = tl.load(slot_ptr + b_token, mask=m_token, other=-1)
    b_k = tl.load(p_k, mask=m_token[:, None] & m_col[None, :])
    b_v = tl.load(p_v, mask=m_token[:, None] & m_col[None, :])
    let_next_start(PDL)
    if SCALED:
        b_k = b_k.to(tl.float32) * inverse_scale(k_scale_ptr, k_inverse, b_head, m_col)[None, :]
        b_v = b_v.to(tl.float32) * inverse_scale(v_scale_ptr, v_inverse, b_head, m_col)[None, :]
    mask = (b_slot >= 0)[:, None] & m_col[None, :]
    b_block = b_slot // BLOCK_SIZE
    b_slot = b_slot % BLOCK_SIZE
    p_kc = k_cache_ptr + (b_block * stride_kc_block + b_slot * stride_kc_slot)[:, None]
    p_vc = v_cache_ptr + (b_block * stride_vc_block + b_slot * stride_vc_slot)[:, None]
    p_kc += (b_head * stride_kc_head)[None, :] + b_dim
    p_vc += (b_head * stride_vc_head)[None, :] + b_dim
    dtype: tl.constexpr = k_cache_ptr.dtype.element_ty
    tl.store(p_kc, saturate(b_k, dtype).to(dtype), mask=mask)  # to nearest even
    tl.store(p_vc, saturate(b_v, dtype).to(dtype), mask=mask)


@triton.jit(do_not_specialize=["pairs_ptr", "stride_pairs"])
def _copy_blocks_kernel(
    k_cache_ptr,  # [P, S, K, D]
    v_cache_ptr,
    pairs_ptr,  # [N, 2]
    stride_pairs,
    stride_k_block,
    stride_k_slot,
    stride_k_head,
    stride_v_block,
    stride_v_slot,
    stride_v_head,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: BLOCK elements of one pair of blocks, keys and values."""
    # One axis for pairs and their parts: a second one ends at 65,535.
    PROGRAMS: tl.constexpr = triton.cdiv(BLOCK_SIZE * KV_HEADS * HEAD_SIZE, BLOCK)  # of a pair
    pair = (tl.program_id(0) // PROGRAMS).to(tl.int64) * stride_pairs
    source = tl.load(pairs_ptr + pair)
    target = tl.load(pairs_ptr + pair + 1)
    if (source < 0) | (target < 0):
        return
    b_element = tl.program_id(0) % PROGRAMS * BLOCK + tl.arange(0, BLOCK)
    mask = b_element < BLOCK_SIZE * KV_HEADS * HEAD_SIZE
    b_slot = (b_element // (KV_HEADS * HEAD_SIZE)).to(tl.int64)
    b_head = (b_element // HEAD_SIZE % KV_HEADS).to(tl.int64)
    b_dim = b_element % HEAD_SIZE
    p_k = k_cache_ptr + b_slot * stride_k_slot + b_head * stride_k_head + b_dim
    p_v = v_cache_ptr + b_slot * stride_v_slot + b_head * stride_v_head + b_dim
    b_k = tl.load(p_k + source * stride_k_block, mask=mask)
    b_v = tl.load(p_v + source * stride_v_block, mask=mask)
    tl.store(p_k + target * stride_k_block, b_k, mask=mask)
    tl.store(p_v + target * stride_v_block, b_v, mask=mask)


def default_store_config(columns: int, tokens: int) -> tuning.Config:
    """Few tokens: small programs, for latency. Many: several loads in flight in each thread."""
    block = min(triton.next_power_of_2(columns), 256 if tokens <= 16 else 1024)
    block_t = 1 if tokens <= 128 else 4
    return {"BLOCK_T": block_t, "BLOCK": block, "num_warps": max(1, block // 128)}


def default_copy_config(elements: int) -> tuning.Config:
    block = min(triton.next_power_of_2(elements), 4096)
    return {"BLOCK": block, "num_warps": max(1, block // 1024)}


def _store_reference(k: torch.Tensor, v: torch.Tensor, slots: Slots, scales: Scales) -> None:
    k_cache, v_cache, slot_mapping = slots
    k_scale, v_scale, k_factor, v_factor = scales
    stored = slot_mapping >= 0
    block, slot = slot_mapping[stored] // k_cache.shape[1], slot_mapping[stored] % k_cache.shape[1]
    for x, cache, scale, factor in ((k, k_cache, k_scale, k_factor), (v, v_cache, v_scale, v_factor)):
        y = x[stored].float() * (1.0 / factor if scale is None else (1.0 / scale)[:, None])
        if cache.dtype in FLOAT8:
            largest = torch.finfo(cache.dtype).max
            y = y.clamp(-largest, largest)
        cache[block, slot] = y.to(cache.dtype)


@register_op(mutates=("k_cache", "v_cache"), reference=_store_reference)
def _store_kv(k: torch.Tensor, v: torch.Tensor, slots: Slots, scales: Scales) -> None:
    k_cache, v_cache, slot_mapping = slots
    check_float8(k_cache)
    tokens, kv_heads, head_size = k.shape
    columns = kv_heads * head_size
    if k.numel() == 0:
        return
    config = tuning.get_config("store_kv", k.device, default_store_config, columns=columns, tokens=tokens)
    strides = (*k.stride()[:2], *v.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3])
    programs = triton.cdiv(tokens, config["BLOCK_T"]) * triton.cdiv(columns, config["BLOCK"])
    _store_kv_kernel[(programs,)](
        *(k, v, k_cache, v_cache, slot_mapping, scales.k_scale, scales.v_scale),
        *(1.0 / scales.k_factor, 1.0 / scales.v_factor, tokens, *strides),
        BLOCK_SIZE=k_cache.shape[1],
        KV_HEADS=kv_heads,
        HEAD_SIZE=head_size,
        SCALED=scales.divide(k.dtype, k_cache),
        **config,
        **dependent_launch(k.device, programs),
    )


def _copy_reference(k_cache: torch.Tensor, v_cache: torch.Tensor, pairs: torch.Tensor) -> None:
    source, target = pairs[(pairs >= 0).all(1)].unbind(1)
    for cache in (as_movable(k_cache), as_movable(v_cache)):
        cache[target] = cache[source]


@register_op(mutates=("k_cache", "v_cache"), reference=_copy_reference)
def _copy_blocks(k_cache: torch.Tensor, v_cache: torch.Tensor, pairs: torch.Tensor) -> None:
    if len(pairs) == 0:
        return
    block_size, kv_heads, head_size = k_cache.shape[1:]
    elements = block_size * kv_heads * head_size
    config = tuning.get_config("copy_blocks", k_cache.device, default_copy_config, elements=elements)
    strides = (pairs.stride(0), *k_cache.stride()[:3], *v_cache.stride()[:3])
    _copy_blocks_kernel[(len(pairs) * triton.cdiv(elements, config["BLOCK"]),)](
        *(as_movable(k_cache), as_movable(v_cache), pairs, *strides),
        BLOCK_SIZE=block_size,
        KV_HEADS=kv_heads,
        HEAD_SIZE=head_size,
        **config,
    )


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
) -> None:
    """Write each token's key and value into its slot of the cache.

    Inside ``torch.compile`` with torch 2.11, whose Inductor copies a written view in the wrong place if another written
    argument has the same storage, the two caches must not be views of one tensor (2.13 copies it right).

    Args:
        k: ``[T, K, D]`` float16, bfloat16 or float32; only the last dimension must be contiguous (here and in the
            caches), so slices of a fused projection and ``kv[:, 0]`` of a ``[P, 2, S, K, D]`` pool need no copy.
        v: as ``k``.
        k_cache: ``[P, S, K, D]`` with the dtype of ``k``, float8_e4m3fn or float8_e5m2, S from 1 to 256; written.
        v_cache: as ``k_cache``; written.
        slot_mapping: ``[T]`` int64, block id times S plus the place in the block; negative: the token is not stored.
            Two tokens with one slot leave either.
        k_scale: keys are stored divided by this number, or by this ``[K]`` float32 tensor per head. A float8 cache
            saturates: at 448 (e4m3) or 57,344 (e5m2).
        v_scale: values are stored divided by this number, or by this ``[K]`` float32 tensor per head.

    Raises:
        ValueError: a shape, dtype, device or number that does not fit, or a cache of e4m3 on a GPU without that.
    """
    check_tensor("k", k, ("T", "K", "D"))
    check_tensor("v", v, k.shape, dtype=k.dtype, like=k)
    check_caches(k_cache, v_cache, *k.shape[1:], like=k)
    check_cache_dtype(k_cache, "k", k)
    check_tensor("slot_mapping", slot_mapping, (len(k),), dtype=torch.int64, like=k)
    scales = check_scales(k_scale, v_scale, k.shape[1], k)
    _store_kv(k, v, k_cache, v_cache, slot_mapping, *scales)


store_kv_ref = with_reference(store_kv)


def copy_blocks(k_cache: torch.Tensor, v_cache: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copy whole blocks inside both caches, for copy-on-write.

    Args:
        k_cache: ``[P, S, K, D]`` float16, bfloat16, float32 or float8, contiguous in the last dimension, S from 1 to
            256; written.
        v_cache: as ``k_cache``; written.
        pairs: ``[N, 2]`` int64, (source, target) block ids; a pair with a negative id is skipped. The copies run at the
            same time: no target may be another pair's source or target.

    Raises:
        ValueError: a shape, dtype or device that does not fit.
    """
    check_caches(k_cache, v_cache, "K", "D", like=k_cache)
    check_tensor("pairs", pairs, ("N", 2), dtype=torch.int64, like=k_cache)
    _copy_blocks(k_cache, v_cache, pairs)


copy_blocks_ref = with_reference(copy_blocks)

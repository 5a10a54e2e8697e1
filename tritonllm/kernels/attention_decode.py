"""Decode attention: one query token per sequence against a cache in blocks.

Every key and value is read once for all query heads that share it, so the floor is ``2 B L K D`` elements over the
memory bandwidth. To have enough programs at small batches, the keys of a sequence are split and the parts merged by
their log-sum-exp (Flash-Decoding: Dao, Haziza, Massa and Sizov, 2023). The number of parts is fixed by the shapes;
where they begin follows from the true length, on the device.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from tritonllm.kernels import tuning
from tritonllm.kernels.attention_common import (
    LN2,
    AttentionArgs,
    attend,
    check_attention,
    dtype_name,
    finish_softmax,
    load_head_factors,
    reference_attention,
    require_float8,
    start_softmax,
    visible_keys,
)
from tritonllm.kernels.registry import register_op


@triton.jit
def _key_range(seq_len, window, splits, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """The first visible key, the tile that holds it, and the keys per split (a multiple of BLOCK_N)."""
    first = 0
    if WINDOW:
        first = tl.maximum(seq_len - window, 0)
    lo = first // BLOCK_N * BLOCK_N
    return first, lo, tl.cdiv(tl.cdiv(seq_len - lo, BLOCK_N), splits) * BLOCK_N


# Arguments whose values and alignment change from step to step: one compilation serves them all.
@triton.jit(do_not_specialize=["table_ptr", "len_ptr", "window", "splits", "stride_table", "stride_out_split"])
def _decode_kernel(
    q_ptr,  # [B, H, D]
    k_ptr,  # [P, S, K, D]
    v_ptr,
    table_ptr,  # [B, M]
    len_ptr,  # [B]
    out_ptr,  # [B, H, D]; SPLIT: [B, H, splits, D] float32
    lse_ptr,  # [B, H] float32, or None; SPLIT: [B, H, splits], base 2
    sink_ptr,  # [H], or None
    slope_ptr,  # [H], or None
    k_scale_ptr,  # [K], or None
    v_scale_ptr,  # [K], or None
    scale,
    v_factor,
    window,
    softcap,
    splits,
    stride_q_seq,
    stride_q_head,
    stride_k_block,
    stride_k_slot,
    stride_k_head,
    stride_v_block,
    stride_v_slot,
    stride_v_head,
    stride_table,
    stride_out_seq,
    stride_out_head,
    stride_out_split,
    GROUP: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: up to BLOCK_M query heads of one key/value head, one sequence, one split."""
    group_tiles = tl.cdiv(GROUP, BLOCK_M)
    kv_head = tl.program_id(0) // group_tiles
    heads = tl.num_programs(0) // group_tiles * GROUP
    split = tl.program_id(1)
    seq = tl.program_id(2).to(tl.int64)
    seq_len = tl.load(len_ptr + seq)
    first, lo, per_split = _key_range(seq_len, window, splits, WINDOW, BLOCK_N)
    lo += split * per_split
    if SPLIT:
        if lo >= seq_len:
            return  # the merge knows from the length that this split is empty

    b_row = tl.program_id(0) % group_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    m_row = b_row < GROUP
    b_head = kv_head * GROUP + b_row
    b_dim = tl.arange(0, BLOCK_D)
    m_out = m_row[:, None] & (b_dim < HEAD_SIZE)[None, :]
    b_q = tl.load(
        q_ptr + seq * stride_q_seq + (b_head * stride_q_head)[:, None] + b_dim[None, :], mask=m_out, other=0.0
    )
    scale, v_factor, b_slope = load_head_factors(
        *(scale, v_factor, slope_ptr, k_scale_ptr, v_scale_ptr, kv_head, b_head, m_row), BLOCK_M=BLOCK_M
    )
    # The sink joins once: here, or in the merge.
    b_m, b_l = start_softmax(None if SPLIT else sink_ptr, b_head, m_row, BLOCK_M)
    b_end = tl.zeros([BLOCK_M], tl.int32) + seq_len
    b_acc, b_m, b_l = attend(
        *(tl.zeros([BLOCK_M, BLOCK_D], tl.float32), b_m, b_l, b_q, b_end - window, b_end, b_end - 1, b_slope),
        k_ptr + kv_head * stride_k_head,
        v_ptr + kv_head * stride_v_head,
        table_ptr + seq * stride_table,
        *(lo, tl.minimum(lo + per_split, seq_len), first, scale, softcap),
        *(stride_k_block, stride_k_slot, stride_v_block, stride_v_slot),
        MASKED=True,
        WINDOW=WINDOW,
        SOFTCAP=SOFTCAP,
        ALIBI=slope_ptr is not None,
        BLOCK_SIZE=BLOCK_SIZE,
        HEAD_SIZE=HEAD_SIZE,
        BLOCK_D=BLOCK_D,
        BLOCK_N=BLOCK_N,
    )
    b_out, b_lse = finish_softmax(b_acc, b_m, b_l)
    p_out = out_ptr + seq * stride_out_seq + split.to(tl.int64) * stride_out_split + (b_head * stride_out_head)[:, None]
    tl.store(p_out + b_dim[None, :], (b_out * v_factor).to(out_ptr.dtype.element_ty), mask=m_out)
    if lse_ptr is not None:
        if not SPLIT:
            b_lse *= LN2
        tl.store(lse_ptr + (seq * heads + b_head) * splits + split, b_lse, mask=m_row)


@triton.jit(do_not_specialize=["len_ptr", "window", "splits"])
def _merge_kernel(
    part_ptr,  # [B, H, splits, D] float32
    part_lse_ptr,  # [B, H, splits] float32, base 2
    len_ptr,  # [B]
    sink_ptr,  # [H], or None
    out_ptr,  # [B, H, D]
    lse_ptr,  # [B, H] float32, or None
    window,
    splits,
    stride_out_seq,
    stride_out_head,
    WINDOW: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """One program: one head of one sequence."""
    head = tl.program_id(0)
    seq = tl.program_id(1).to(tl.int64)
    row = seq * tl.num_programs(0) + head
    seq_len = tl.load(len_ptr + seq)
    _, lo, per_split = _key_range(seq_len, window, splits, WINDOW, BLOCK_N)
    used = tl.cdiv(seq_len - lo, tl.maximum(per_split, 1))
    b_dim = tl.arange(0, BLOCK_D)
    m_dim = b_dim < HEAD_SIZE

    b_head = head + tl.arange(0, 1)
    b_m, b_l = start_softmax(sink_ptr, b_head, b_head >= 0, 1)
    b_acc = tl.zeros([1, BLOCK_D], tl.float32)
    for start in tl.range(0, used, BLOCK_SPLITS):
        b_split = start + tl.arange(0, BLOCK_SPLITS)
        m_split = b_split < used
        b_lse = tl.load(part_lse_ptr + row * splits + b_split, mask=m_split, other=float("-inf"))
        p_part = part_ptr + (row * splits + b_split)[:, None] * HEAD_SIZE + b_dim[None, :]
        b_part = tl.load(p_part, mask=m_split[:, None] & m_dim[None, :], other=0.0)
        b_m_new = tl.maximum(b_m, tl.max(b_lse, 0))
        b_weight = tl.exp2(b_lse - b_m_new)
        b_alpha = tl.exp2(b_m - b_m_new)
        b_l = b_l * b_alpha + tl.sum(b_weight, 0)
        b_acc = b_acc * b_alpha[:, None] + tl.sum(b_part * b_weight[:, None], 0)[None, :]
        b_m = b_m_new
    b_out, b_lse = finish_softmax(b_acc, b_m, b_l)
    p_out = out_ptr + seq * stride_out_seq + head * stride_out_head + b_dim[None, :]
    tl.store(p_out, b_out.to(out_ptr.dtype.element_ty), mask=m_dim[None, :])
    if lse_ptr is not None:
        tl.store(lse_ptr + seq * tl.num_programs(0) + b_head, b_lse * LN2)


def default_config(
    head_size: int, group: int, programs: int, capacity: int, dtype: str, cache_dtype: str
) -> tuning.Config:
    """``programs``: how many there are without splitting; ``PROGRAMS``: how many to aim for."""
    rows = max(16, triton.next_power_of_2(group))
    # Two programs on each of an H200's 132 processors; more when lengths are likely to differ from each other.
    target = 264 if programs <= 132 else 1056
    if dtype == "float32":  # exact products run on the ordinary units, with operands in registers
        return {"BLOCK_M": 16, "BLOCK_N": 32, "PROGRAMS": target, "num_warps": 8, "num_stages": 2}
    most, block_n = (64, 64) if head_size <= 128 else (32, 32) if head_size <= 256 else (16, 32)
    return {"BLOCK_M": min(rows, most), "BLOCK_N": block_n, "PROGRAMS": target, "num_warps": 4, "num_stages": 3}


def _plan(q: torch.Tensor, k_cache: torch.Tensor, capacity: int, window: int) -> tuple[tuning.Config, int]:
    """The launch configuration, and into how many parts to split the keys: from the shapes alone."""
    batch, heads, head_size = q.shape
    group = heads // k_cache.shape[2]
    config = dict(
        tuning.get_config(
            "paged_decode_attention",
            q.device,
            default_config,
            head_size=head_size,
            group=group,
            programs=batch * k_cache.shape[2],
            capacity=capacity,
            dtype=dtype_name(q),
            cache_dtype=dtype_name(k_cache),
        )
    )
    # A window that does not begin at a tile's edge touches one tile more.
    keys = min(capacity, window + config["BLOCK_N"]) if window else capacity
    unsplit = batch * k_cache.shape[2] * triton.cdiv(group, config["BLOCK_M"])
    splits = min(config.pop("PROGRAMS") // unsplit, triton.cdiv(keys, config["BLOCK_N"]))
    return config, max(1, splits)


def _reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *rest: Any,
) -> None:
    args = AttentionArgs(*rest)
    query_pos = (seq_lens - 1)[:, None]
    blocks = triton.cdiv(int(seq_lens.max()), k_cache.shape[1]) if len(seq_lens) else 0
    visible = visible_keys(query_pos, seq_lens, blocks * k_cache.shape[1], causal=False, window=args.window)
    out, lse = reference_attention(q[:, None], k_cache, v_cache, block_tables, query_pos, visible, args)
    args.out.copy_(out[:, 0])
    if args.lse is not None:
        args.lse.copy_(lse[:, 0])


@register_op(mutates=("out", "lse"), reference=_reference)
def _paged_decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    scale: float,
    v_factor: float,
    window: int,
    softcap: float,
) -> None:
    require_float8(k_cache)
    if len(q) == 0:
        return
    config, splits = _plan(q, k_cache, block_tables.shape[1] * k_cache.shape[1], window)
    batch, heads, head_size = q.shape
    kv_heads = k_cache.shape[2]
    group = heads // kv_heads
    shape = {"WINDOW": window > 0, "HEAD_SIZE": head_size, "BLOCK_D": triton.next_power_of_2(head_size)}
    part, part_lse = out[:, :, None], lse
    if splits > 1:
        part = torch.empty((batch, heads, splits, head_size), dtype=torch.float32, device=q.device)
        part_lse = torch.empty((batch, heads, splits), dtype=torch.float32, device=q.device)
    strides = (
        *q.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        block_tables.stride(0),
        *part.stride()[:3],
    )
    grid = (kv_heads * triton.cdiv(group, config["BLOCK_M"]), splits, batch)
    _decode_kernel[grid](
        *(q, k_cache, v_cache, block_tables, seq_lens, part, part_lse, sinks, alibi_slopes, k_scale, v_scale),
        *(scale, v_factor, window, softcap, splits, *strides),
        GROUP=group,
        SPLIT=splits > 1,
        SOFTCAP=softcap > 0,
        BLOCK_SIZE=k_cache.shape[1],
        **shape,
        **config,
    )
    if splits > 1:
        tensors = (part, part_lse, seq_lens, sinks, out, lse)
        sizes = {"BLOCK_N": config["BLOCK_N"], "BLOCK_SPLITS": 16}
        _merge_kernel[heads, batch](*tensors, window, splits, *out.stride()[:2], **shape, **sizes)


def paged_decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of one query token per sequence, the last, over the sequence's keys and values in blocks.

    Args:
        q: ``[B, H, D]`` float16, bfloat16 or float32; D a multiple of 8 from 16 to 512. May be a slice of a wider
            tensor: only the last dimension must be contiguous (here and in the caches).
        k_cache: ``[P, S, K, D]`` with the dtype of ``q`` or float8_e4m3fn; H a multiple of K, S from 1 to 256. Query
            head h reads key/value head ``h // (H / K)``.
        v_cache: as ``k_cache``.
        block_tables: ``[B, M]`` int32, the ids of each sequence's blocks. Entries of blocks that no query sees (past
            the length, before the window) are never read and may hold anything, and so may unused slots.
        seq_lens: ``[B]`` int32, keys of each sequence with the query's own; at most ``M S``. A sequence of length 0
            gets output 0.
        scale: factor of the logits; by default ``D ** -0.5``.
        window: keys that a query sees, itself included: positions ``(p - window, p]``. None: all.
        softcap: replace logits s by ``softcap * tanh(s / softcap)``; 0: do not.
        sinks: ``[H]``, a logit that joins each head's softmax without a value (it only takes weight).
        alibi_slopes: ``[H]``; ``slope * (key position - query position)`` is added to the logits, after the softcap
            (Press et al., "Train Short, Test Long", 2022).
        k_scale: what the cache's keys must be multiplied by: a number, or ``[K]`` float32.
        v_scale: the same for values.
        out: ``[B, H, D]`` to write into, with the dtype of ``q``; by default a new tensor.
        return_lse: also return the logarithm of the softmax's denominator.

    Returns:
        ``out``, or ``(out, lse)`` with lse ``[B, H]`` float32: natural, sinks included, -inf for an empty sum.

    Raises:
        ValueError: a shape, dtype, device or number that does not fit, or a float8 cache on a GPU without float8.
    """
    args = check_attention(
        *(q, k_cache, v_cache, block_tables, seq_lens, scale, window, softcap),
        *(sinks, alibi_slopes, k_scale, v_scale, out, return_lse),
        batch=len(q),
    )
    _paged_decode_attention(q, k_cache, v_cache, block_tables, seq_lens, *args)
    return args.out if args.lse is None else (args.out, args.lse)


def paged_decode_attention_ref(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """:func:`paged_decode_attention` in plain torch (it waits for the device to read the longest length)."""
    args = check_attention(
        *(q, k_cache, v_cache, block_tables, seq_lens, scale, window, softcap),
        *(sinks, alibi_slopes, k_scale, v_scale, out, return_lse),
        batch=len(q),
    )
    _reference(q, k_cache, v_cache, block_tables, seq_lens, *args)
    return args.out if args.lse is None else (args.out, args.lse)

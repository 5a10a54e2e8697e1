"""Prefill attention: the newest tokens of each sequence, of any number, against a cache in blocks.

``4 D`` FLOPs for each query head and visible key, so the floor is FLOPs over the matrix-product rate. Tiled as in
FlashAttention-2 (Dao, 2023). The rows of a tile are (token, query head) pairs of one key/value head: the heads that
share keys load them once, and a tile spans few tokens, so little of the causal diagonal is computed in vain.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from tritonllm.kernels import chip, tuning
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
from tritonllm.kernels.attention_schedule import find_prefill_sequence, prefill_key_ranges
from tritonllm.kernels.checks import check_tensor, require
from tritonllm.kernels.registry import register_op


@triton.jit
def _locate_rows(tile, seq, cu_ptr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """A tile's first (token, head) pair, the sequence's new tokens, and each row's token in ``q``, pair and validity.

    Called before and after the loop over keys. The loads are volatile because the compiler would merge the two calls
    and hold the rows' addresses in registers through the loop, which has none to spare.
    """
    begin = tl.load(cu_ptr + seq, volatile=True)
    q_len = tl.load(cu_ptr + seq + 1, volatile=True) - begin
    first_tile = (begin.to(tl.int64) * GROUP // BLOCK_M).to(tl.int32) + seq
    first_pair = (tile - first_tile) * BLOCK_M
    b_pair = first_pair + tl.arange(0, BLOCK_M)
    return first_pair, q_len, begin.to(tl.int64) + b_pair // GROUP, b_pair, b_pair < q_len * GROUP


# Arguments whose values and alignment change from step to step: one compilation serves them all.
@triton.jit(do_not_specialize=["table_ptr", "cu_ptr", "len_ptr", "window", "batch", "stride_table"])
def _prefill_kernel(
    q_ptr,  # [T, H, D]
    k_ptr,  # [P, S, K, D]
    v_ptr,
    table_ptr,  # [B, M]
    cu_ptr,  # [B + 1]
    len_ptr,  # [B]
    out_ptr,  # [T, H, D]
    lse_ptr,  # [T, H] float32, or None
    sink_ptr,  # [H], or None
    slope_ptr,  # [H], or None
    k_scale_ptr,  # [K], or None
    v_scale_ptr,  # [K], or None
    scale,
    v_factor,
    window,
    softcap,
    batch,
    stride_q_token,
    stride_q_head,
    stride_k_block,
    stride_k_slot,
    stride_k_head,
    stride_v_block,
    stride_v_slot,
    stride_v_head,
    stride_table,
    stride_out_token,
    stride_out_head,
    GROUP: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: BLOCK_M (token, query head) pairs of one key/value head and one sequence."""
    # The last tiles of a sequence see most keys: they start first, so that the short ones fill the end.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = find_prefill_sequence(tl.arange(0, 128), tile, cu_ptr, batch, GROUP, BLOCK_M)
    first_pair, q_len, b_token, b_pair, m_row = _locate_rows(tile, seq, cu_ptr, GROUP, BLOCK_M)
    if first_pair >= q_len * GROUP:
        return
    seq_len = tl.load(len_ptr + seq)
    cached = seq_len - q_len
    b_head = kv_head * GROUP + b_pair % GROUP
    b_pos = cached + b_pair // GROUP
    b_dim = tl.arange(0, BLOCK_D)
    m_out = m_row[:, None] & (b_dim < HEAD_SIZE)[None, :]
    p_q = q_ptr + (b_token * stride_q_token + b_head * stride_q_head)[:, None] + b_dim[None, :]
    b_q = tl.load(p_q, mask=m_out, other=0.0)
    scale, v_factor, b_slope = load_head_factors(
        *(scale, v_factor, slope_ptr, k_scale_ptr, v_scale_ptr, kv_head, b_head, m_row), BLOCK_M=BLOCK_M
    )
    b_m, b_l = start_softmax(sink_ptr, b_head, m_row, BLOCK_M)
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    pos_lo = cached + first_pair // GROUP
    pos_hi = cached + tl.minimum((first_pair + BLOCK_M - 1) // GROUP, q_len - 1)
    lo, whole_lo, whole_hi, hi = prefill_key_ranges(pos_lo, pos_hi, seq_len, window, CAUSAL, WINDOW, BLOCK_N)
    first = tl.maximum(pos_lo - window + 1, 0) if WINDOW else 0
    b_end = b_pos + 1 if CAUSAL else tl.zeros([BLOCK_M], tl.int32) + seq_len
    for part in tl.static_range(0 if WINDOW else 1, 3):
        if part == 0:
            part_lo, part_hi = lo, whole_lo
        elif part == 1:
            part_lo, part_hi = whole_lo, whole_hi
        else:
            part_lo, part_hi = whole_hi, hi
        b_acc, b_m, b_l = attend(
            *(b_acc, b_m, b_l, b_q, b_pos - window + 1, b_end, b_pos, b_slope),
            k_ptr + kv_head * stride_k_head,
            v_ptr + kv_head * stride_v_head,
            table_ptr + seq.to(tl.int64) * stride_table,
            *(part_lo, part_hi, first, scale, softcap),
            *(stride_k_block, stride_k_slot, stride_v_block, stride_v_slot),
            MASKED=part != 1,
            WINDOW=WINDOW,
            SOFTCAP=SOFTCAP,
            ALIBI=slope_ptr is not None,
            BLOCK_SIZE=BLOCK_SIZE,
            HEAD_SIZE=HEAD_SIZE,
            BLOCK_D=BLOCK_D,
            BLOCK_N=BLOCK_N,
        )

    b_out, b_lse = finish_softmax(b_acc, b_m, b_l)
    _, _, b_token, b_pair, m_row = _locate_rows(tile, seq, cu_ptr, GROUP, BLOCK_M)
    b_head = kv_head * GROUP + b_pair % GROUP
    m_out = m_row[:, None] & (b_dim < HEAD_SIZE)[None, :]
    p_out = out_ptr + (b_token * stride_out_token + b_head * stride_out_head)[:, None] + b_dim[None, :]
    tl.store(p_out, (b_out * v_factor).to(out_ptr.dtype.element_ty), mask=m_out)
    if lse_ptr is not None:
        heads = tl.num_programs(1) * GROUP
        tl.store(lse_ptr + b_token * heads + b_head, b_lse * LN2, mask=m_row)


# The Hopper kernel's rows a tile are 128: half a tile's and fewer leave most of it empty.
SM90_MIN_ROWS = 64
# Keys up to which its programs stay and take one item after the other: a program's start is then longer than its work
# (64 x 256 tokens: 189 us against 207; 16 x 1024: 540 against 366, because items are dealt out unevenly).
SM90_SHARED_BELOW = 512


def default_config(
    head_size: int, group: int, tokens: int, max_q: int, capacity: int, dtype: str, cache_dtype: str, arch: str
) -> tuning.Config:
    """``arch``: ``"sm90"`` where the Hopper kernel can be had. Its ``PROGRAMS`` share all tiles; 0: one for each."""
    rows = max(16, triton.next_power_of_2(max_q * group))
    if arch == "sm90" and max_q * group >= SM90_MIN_ROWS:
        programs = 132 if capacity <= SM90_SHARED_BELOW else 0
        return {"kernel": "sm90", "BLOCK_M": 128, "BLOCK_N": 64, "PROGRAMS": programs, "num_warps": 4, "num_stages": 3}
    config: tuning.Config = {"kernel": "portable"}
    if dtype == "float32":  # exact products run on the ordinary units, with operands in registers
        return config | {"BLOCK_M": min(rows, 32), "BLOCK_N": 16, "num_warps": 8, "num_stages": 2}
    if head_size > 256:
        return config | {"BLOCK_M": min(rows, 32), "BLOCK_N": 32, "num_warps": 8, "num_stages": 2}
    if head_size > 128:
        return config | {"BLOCK_M": min(rows, 64), "BLOCK_N": 64, "num_warps": 8, "num_stages": 2}
    config |= {"BLOCK_M": min(rows, 128), "BLOCK_N": 64, "num_warps": 8 if rows > 32 else 4, "num_stages": 3}
    # Left to itself, the assembler rather spills (on sm_100) than lets one program less reside.
    return config | ({"maxnreg": 255} if head_size <= 64 else {})


def _config_key(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_tables: torch.Tensor, max_seqlen_q: int
) -> dict[str, Any]:
    """What a configuration depends on."""
    tokens, heads, head_size = q.shape
    arch = "any"
    if chip.on_sm90(q.device):
        from tritonllm.kernels import attention_prefill_sm90 as sm90  # Gluon is not there for every GPU

        arch = "sm90" if sm90.fits(q, k_cache, v_cache) else "any"
    return {
        "head_size": head_size,
        "group": heads // k_cache.shape[2],
        "tokens": tokens,
        "max_q": max_seqlen_q,
        "capacity": block_tables.shape[1] * k_cache.shape[1],
        "dtype": dtype_name(q),
        "cache_dtype": dtype_name(k_cache),
        "arch": arch,
    }


def _reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seqlen_q: int,
    causal: bool,
    *rest: Any,
) -> None:
    args = AttentionArgs(*rest)
    begins, lengths = cu_seqlens_q.tolist(), seq_lens.tolist()
    for seq, length in enumerate(lengths):
        begin, end = begins[seq : seq + 2]
        padded = triton.cdiv(length, k_cache.shape[1]) * k_cache.shape[1]
        rows = max(1, 2**27 // (q.shape[1] * max(length, 1)))  # bounds the logits' memory
        for at in range(begin, end, rows):
            tokens = slice(at, min(at + rows, end))
            query_pos = torch.arange(tokens.start, tokens.stop, device=q.device) + (length - end)
            visible = visible_keys(query_pos, seq_lens[seq], padded, causal=causal, window=args.window)
            out, lse = reference_attention(q[tokens], k_cache, v_cache, block_tables[seq], query_pos, visible, args)
            args.out[tokens] = out.to(q.dtype)
            if args.lse is not None:
                args.lse[tokens] = lse


@register_op(mutates=("out", "lse"), reference=_reference)
def _varlen_prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seqlen_q: int,
    causal: bool,
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
    if len(q) == 0 or len(seq_lens) == 0:
        return
    args = AttentionArgs(out, lse, sinks, alibi_slopes, k_scale, v_scale, scale, v_factor, window, softcap)
    launch_prefill(q, k_cache, v_cache, block_tables, cu_seqlens_q, seq_lens, max_seqlen_q, causal, args)


def launch_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seqlen_q: int,
    causal: bool,
    args: AttentionArgs,
) -> None:
    """Look up the configuration and launch the kernel that it is for."""
    key = _config_key(q, k_cache, v_cache, block_tables, max_seqlen_q)
    config = dict(tuning.get_config("varlen_prefill_attention", q.device, default_config, **key))
    if config.pop("kernel") == "sm90":
        from tritonllm.kernels import attention_prefill_sm90 as sm90

        sm90.launch(q, k_cache, v_cache, block_tables, cu_seqlens_q, seq_lens, causal, args, config)
        return
    tokens, heads, head_size = q.shape
    batch, kv_heads = len(seq_lens), k_cache.shape[2]
    group = heads // kv_heads
    strides = (
        *q.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        block_tables.stride(0),
        *args.out.stride()[:2],
    )
    grid = (tokens * group // config["BLOCK_M"] + batch, kv_heads)
    _prefill_kernel[grid](
        *(q, k_cache, v_cache, block_tables, cu_seqlens_q, seq_lens, args.out, args.lse),
        *(args.sinks, args.alibi_slopes, args.k_scale, args.v_scale, args.scale, args.v_factor),
        *(args.window, args.softcap, batch, *strides),
        GROUP=group,
        CAUSAL=causal,
        WINDOW=args.window > 0,
        SOFTCAP=args.softcap > 0,
        BLOCK_SIZE=k_cache.shape[1],
        HEAD_SIZE=head_size,
        BLOCK_D=triton.next_power_of_2(head_size),
        **config,
    )


def varlen_prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    max_seqlen_q: int,
    causal: bool = True,
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
    """Attention of the last tokens of each sequence over the sequence's keys and values in blocks.

    The keys and values of the new tokens must be in the cache already. Sequences may bring any number of tokens, one
    or none included, so prefills, prefill chunks and decodes mix in one batch.

    Args:
        q: ``[T, H, D]``, the sequences' new tokens one after the other. Dtypes, head sizes and strides as in
            :func:`~tritonllm.kernels.paged_decode_attention`, and so for all arguments not listed here.
        cu_seqlens_q: ``[B + 1]`` int32, rising from 0: tokens ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]`` of ``q``
            are the last of sequence b. Tokens from ``cu_seqlens_q[B]`` on are padding: what ``out`` and lse hold there
            does not change.
        seq_lens: ``[B]`` int32, keys of each sequence with its new tokens.
        max_seqlen_q: the most new tokens of a sequence, or a bound; chooses the tile size, results do not depend on it.
        causal: a query sees no key after itself; False: all keys of its sequence. ``window`` hides keys at positions
            up to ``p - window`` in both cases.
        out: ``[T, H, D]`` to write into, with the dtype of ``q``; by default a new tensor.

    Returns:
        ``out``, or ``(out, lse)`` with lse ``[T, H]`` float32. A query that sees no key (a sequence longer in queries
        than in keys) gets output 0.

    Raises:
        ValueError: a shape, dtype, device or number that does not fit, or a float8 cache on a GPU without float8.
    """
    args = check_attention(
        *(q, k_cache, v_cache, block_tables, seq_lens, scale, window, softcap),
        *(sinks, alibi_slopes, k_scale, v_scale, out, return_lse),
        batch=_check_lengths(q, cu_seqlens_q, max_seqlen_q),
    )
    tensors = (q, k_cache, v_cache, block_tables, cu_seqlens_q, seq_lens)
    _varlen_prefill_attention(*tensors, max_seqlen_q, causal, *args)
    return args.out if args.lse is None else (args.out, args.lse)


def varlen_prefill_attention_ref(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    max_seqlen_q: int,
    causal: bool = True,
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
    """:func:`varlen_prefill_attention` in plain torch (it waits for the device to read the lengths)."""
    args = check_attention(
        *(q, k_cache, v_cache, block_tables, seq_lens, scale, window, softcap),
        *(sinks, alibi_slopes, k_scale, v_scale, out, return_lse),
        batch=_check_lengths(q, cu_seqlens_q, max_seqlen_q),
    )
    _reference(q, k_cache, v_cache, block_tables, cu_seqlens_q, seq_lens, max_seqlen_q, causal, *args)
    return args.out if args.lse is None else (args.out, args.lse)


def _check_lengths(q: torch.Tensor, cu_seqlens_q: torch.Tensor, max_seqlen_q: int) -> int:
    """Check what only prefill takes, and return the number of sequences."""
    check_tensor("cu_seqlens_q", cu_seqlens_q, ("B + 1",), dtype=torch.int32, like=q)
    require(len(cu_seqlens_q) >= 1, "cu_seqlens_q must begin with 0, got an empty tensor")
    require(max_seqlen_q >= 1 or len(q) == 0, f"max_seqlen_q must be at least 1, got {max_seqlen_q}")
    return len(cu_seqlens_q) - 1

"""Decode attention with one program for each sequence, key/value head and part of its keys.

The number of parts is fixed by the shapes, so that all programs fill the chip; where they begin follows from the true
length, on the device. Parts are merged by their log-sum-exp in a second launch (Flash-Decoding: Dao, Haziza, Massa and
Sizov, 2023). Without a list of tiles to find one's place in and without counters, this is the faster way where
sequences are few or so many that their lengths even out; between those
:mod:`tritonllm.kernels.attention.portable.balanced` is (docs/notebook/attention-one-loop.md).
"""

import torch
import triton
import triton.language as tl

from tritonllm.kernels.attention.arguments import AttentionArgs, Hints, Pages, Queries
from tritonllm.kernels.attention.common import LN2, finish_softmax, row_offsets, start_softmax
from tritonllm.kernels.attention.portable.tile import (
    attend,
    fit_queries,
    load_head_factors,
    load_queries,
    merge_parts,
    store_rows,
)
from tritonllm.kernels.runtime import tuning
from tritonllm.kernels.runtime.dependent_launch import dependent_launch, let_next_start, wait_for_previous


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
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SPLIT: tl.constexpr,
    SAME_STRIDES: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: up to BLOCK_M query heads of one key/value head, one sequence, one split."""
    wait_for_previous(PDL)
    group_tiles: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    # Sequences are on the first axis, with their heads: the others end at 65,535.
    seq = (tl.program_id(0) // (KV_HEADS * group_tiles)).to(tl.int64)
    tile = tl.program_id(0) % (KV_HEADS * group_tiles)
    kv_head = tile // group_tiles
    split = tl.program_id(1)
    seq_len = tl.load(len_ptr + seq)
    first, lo, per_split = _key_range(seq_len, window, splits, WINDOW, BLOCK_N)
    lo += split * per_split
    if SPLIT:
        if lo >= seq_len:
            return  # the merge knows from the length that this split is empty

    b_row = tile % group_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    m_row = b_row < GROUP
    b_head = kv_head * GROUP + b_row
    b_dim = tl.arange(0, BLOCK_D)
    m_out = m_row[:, None] & (b_dim < HEAD_SIZE)[None, :]
    b_q = load_queries(q_ptr, seq, b_head, m_row, stride_q_seq, stride_q_head, HEAD_SIZE, BLOCK_D)
    scale, v_factor, b_slope = load_head_factors(
        *(scale, v_factor, slope_ptr, k_scale_ptr, v_scale_ptr, kv_head, b_head, m_row), BLOCK_M=BLOCK_M
    )
    b_q, b_scale = fit_queries(b_q, scale, k_ptr)
    # The sink joins once: here, or in the merge.
    b_m, b_l = start_softmax(None if SPLIT else sink_ptr, b_head, m_row, BLOCK_M)
    b_end = tl.zeros([BLOCK_M], tl.int32) + seq_len
    b_acc, b_m, b_l = attend(
        *(tl.zeros([BLOCK_M, BLOCK_D], tl.float32), b_m, b_l, b_q, b_end - window, b_end, b_end - 1, None, b_slope),
        b_scale,
        k_ptr + kv_head.to(tl.int64) * stride_k_head,
        v_ptr + kv_head.to(tl.int64) * stride_v_head,
        table_ptr + seq * stride_table,
        *(lo, tl.minimum(lo + per_split, seq_len), first, 0, softcap),
        *(stride_k_block, stride_k_slot, stride_v_block, stride_v_slot),
        HIDE="end",
        INSTEAD=True,
        SAME_STRIDES=SAME_STRIDES,
        WINDOW=WINDOW,
        SOFTCAP=SOFTCAP,
        ALIBI=slope_ptr is not None,
        BLOCK_SIZE=BLOCK_SIZE,
        HEAD_SIZE=HEAD_SIZE,
        BLOCK_D=BLOCK_D,
        BLOCK_N=BLOCK_N,
    )
    # Not before: what starts early takes room from what runs (b1 x 32768: 48 us with it at the start, 40 without).
    let_next_start(PDL)
    b_out, b_lse = finish_softmax(b_acc, b_m, b_l)
    p_out = out_ptr + split.to(tl.int64) * stride_out_split
    p_out += row_offsets(seq, b_head, stride_out_seq, stride_out_head)[:, None]
    tl.store(p_out + b_dim[None, :], (b_out * v_factor).to(out_ptr.dtype.element_ty), mask=m_out)
    if lse_ptr is not None:
        if not SPLIT:
            b_lse *= LN2
        tl.store(lse_ptr + (seq * (KV_HEADS * GROUP) + b_head) * splits + split, b_lse, mask=m_row)


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
    PDL: tl.constexpr,
):
    """One program: one head of one sequence."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    head = tl.program_id(0)
    seq = tl.program_id(1).to(tl.int64)
    row = seq * tl.num_programs(0) + head
    seq_len = tl.load(len_ptr + seq)
    _, lo, per_split = _key_range(seq_len, window, splits, WINDOW, BLOCK_N)
    used = tl.cdiv(seq_len - lo, tl.maximum(per_split, 1))
    b_head = head + tl.arange(0, 1)
    b_m, b_l = start_softmax(sink_ptr, b_head, b_head >= 0, 1)
    p_part = part_ptr + row * splits * HEAD_SIZE
    b_out, b_lse = merge_parts(p_part, part_lse_ptr + row * splits, used, b_m, b_l, BLOCK_SPLITS, HEAD_SIZE, BLOCK_D)
    heads = tl.num_programs(0)
    store_rows(
        *(out_ptr, lse_ptr, b_out, b_lse, 1.0, seq, b_head, b_head >= 0, heads),
        *(stride_out_seq, stride_out_head, HEAD_SIZE, BLOCK_D),
    )


def split_config(head_size: int, group: int, programs: int, dtype: str) -> tuning.Config:
    """``programs``: how many there are without splitting; ``SPLIT_TO``: how many to aim for."""
    rows = max(16, triton.next_power_of_2(group))
    # Two programs on each of an H200's 132 processors; more when lengths are likely to differ from each other.
    target = 264 if programs <= 132 else 1056
    if dtype == "float32":  # exact products run on the ordinary units, with operands in registers
        # keys and values of two stages take 64 KB: a processor of sm_89 and sm_120 has 99
        tile = {"BLOCK_N": 32 if head_size <= 128 else 16, "num_stages": 2 if head_size <= 256 else 1}
        config = {"BLOCK_M": 16, "num_warps": 8} | tile
        return {"kernel": "split", "SPLIT_TO": target} | config
    most, block_n = (64, 64) if head_size <= 128 else (32, 32) if head_size <= 256 else (16, 32)
    config = {"BLOCK_M": min(rows, most), "BLOCK_N": block_n, "num_warps": 4, "num_stages": 3}
    return {"kernel": "split", "SPLIT_TO": target} | config


def launch(queries: Queries, pages: Pages, hints: Hints, args: AttentionArgs, config: tuning.Config) -> None:
    """Launch both kernels, or the first alone if the keys are not split, for a token of each sequence."""
    q, (k_cache, v_cache, block_tables, seq_lens) = queries.q, pages
    batch, heads, head_size = q.shape
    kv_heads = k_cache.shape[2]
    group = heads // kv_heads
    config = dict(config)
    most, window = hints.most_keys(pages), args.window
    # A window that does not begin at a tile's edge touches one tile more.
    keys = min(most, window + config["BLOCK_N"]) if window else most
    row_tiles = triton.cdiv(group, config["BLOCK_M"])
    wanted = config.pop("SPLIT_TO") // (batch * kv_heads * row_tiles)
    splits = max(1, min(wanted, triton.cdiv(keys, config["BLOCK_N"])))
    shape = {"WINDOW": window > 0, "HEAD_SIZE": head_size, "BLOCK_D": triton.next_power_of_2(head_size)}
    part, part_lse = args.out[:, :, None], args.lse
    if splits > 1:
        part = torch.empty((batch, heads, splits, head_size), dtype=torch.float32, device=q.device)
        part_lse = torch.empty((batch, heads, splits), dtype=torch.float32, device=q.device)
    strides = *q.stride()[:2], *pages.strides, *part.stride()[:3]
    _decode_kernel[(batch * kv_heads * row_tiles, splits)](
        *(q, k_cache, v_cache, block_tables, seq_lens, part, part_lse, args.sinks, args.alibi_slopes),
        *(args.k_scale, args.v_scale, args.scale, args.v_factor, window, args.softcap, splits, *strides),
        KV_HEADS=kv_heads,
        GROUP=group,
        SPLIT=splits > 1,
        SAME_STRIDES=k_cache.stride() == v_cache.stride(),
        SOFTCAP=args.softcap > 0,
        BLOCK_SIZE=k_cache.shape[1],
        **shape,
        **config,
        **dependent_launch(q.device),
    )
    if splits > 1:
        tensors = (part, part_lse, seq_lens, args.sinks, args.out, args.lse)
        sizes = {"BLOCK_N": config["BLOCK_N"], "BLOCK_SPLITS": 16, **dependent_launch(q.device)}
        _merge_kernel[heads, batch](*tensors, window, splits, *args.out.stride()[:2], **shape, **sizes)

"""Attention of which a token's bits depend on its sequence alone: not on the batch, nor on how a prompt was cut.

A softmax over keys is a sum, and sums in floating point depend on their order. Decode attention cuts a sequence's keys
into as many parts as suit the batch, and prefill attention has other tiles, so the same token has other last bits as
the end of a prompt, in a later chunk of it, as a decode, or beside other sequences. Here keys go by in segments that
begin at fixed places, each in tiles of the same size and in one running softmax, and the segments are added up from the
first to the last, whoever asks: one token, a draft or a whole prompt (`portable/segments.py`). A tile that a query does
not see changes none of its sums, for what it adds is exactly 0 and what it multiplies with exactly 1.
"""

import torch

from tritonllm.kernels.attention import cpu
from tritonllm.kernels.attention.arguments import AttentionArgs, Hints, Options, Pages, Queries
from tritonllm.kernels.attention.common import (
    check_attention,
    check_float8,
    dtype_name,
    reference_attention,
    visible_keys,
)
from tritonllm.kernels.attention.portable import segments
from tritonllm.kernels.runtime import chip, tuning
from tritonllm.kernels.runtime.checks import check_tensor, require
from tritonllm.kernels.runtime.registry import register_op, with_reference

_ANY = 1 << 20  # new tokens of a sequence, where nobody says how many


def invariant_config(many_decodes: bool, head_size: int, dtype: str, *, small: bool = False) -> tuning.Config:
    """Tiles of one order of sums for each model, whatever the step.

    How a tile is dealt out to threads decides that order. Where each warp has 16 whole rows, be they all that the
    program has or a quarter, it is one and the same: on an H200 16 x 32 tiles of one warp, 64 x 32 of four and 128 x 32
    of eight (not 16 x 32 of two warps, which share rows). So ``many_decodes`` have small programs, of which a processor
    holds many; few are faster with four warps, and so are long sequences. For head size 128 the best of 22 that spill
    nothing (docs/notebook/decode-attention.md, "One order of sums").

    Args:
        small: a processor has 99 KB of shared memory (sm_89, sm_120), which tiles of wide heads must fit.
    """
    if dtype == "float32":  # exact products run on the ordinary units, with operands in registers
        return {"BLOCK_M": 32, "BLOCK_N": 16, "num_warps": 8, "num_stages": 2}
    if head_size > 256 or (small and head_size > 128):
        return {"BLOCK_M": 32, "BLOCK_N": 32, "num_warps": 8, "num_stages": 2}
    if head_size > 128:
        return {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 8, "num_stages": 2}
    if many_decodes:
        return {"BLOCK_M": 16, "BLOCK_N": 32, "num_warps": 1, "num_stages": 3}
    return {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 4, "num_stages": 3}


def _tokens(queries: Queries, pages: Pages) -> list[tuple[int, int, int]]:
    """``(row of q, sequence, keys that it sees)`` of each token."""
    assert queries.cu_seqlens_q is not None
    begins, lens = queries.cu_seqlens_q.tolist(), pages.seq_lens.tolist()
    spans = enumerate(zip(begins[:-1], begins[1:], lens, strict=True))
    return [(row, seq, length - end + row + 1) for seq, (begin, end, length) in spans for row in range(begin, end)]


def _reference(queries: Queries, pages: Pages, hints: Hints, args: AttentionArgs) -> None:
    """Token by token, each with the keys that it sees: so nothing of it depends on the others."""
    q, (k_cache, v_cache, block_tables, _) = queries.q, pages
    size = k_cache.shape[1]
    for row, seq, keys in _tokens(queries, pages):
        query_pos = torch.tensor([keys - 1], device=q.device)
        length = torch.tensor(max(keys, 0), device=q.device)
        seen = visible_keys(query_pos, length, max(0, -(-keys // size) * size), causal=True, window=args.window)
        given = q[row : row + 1], k_cache, v_cache, block_tables[seq], query_pos, seen, args
        out, lse = reference_attention(*given)
        args.out[row] = out[0].to(q.dtype)
        if args.lse is not None:
            args.lse[row] = lse[0]


def _on_cpu(queries: Queries, pages: Pages, hints: Hints, args: AttentionArgs) -> bool:
    """As :func:`_reference`, by torch's own kernel."""
    if not cpu.takes(pages.k_cache, args):
        return False
    q, (k_cache, v_cache, block_tables, _) = queries.q, pages
    for row, seq, keys in _tokens(queries, pages):
        length = torch.tensor([max(keys, 0)], dtype=torch.int32)
        alone = cpu.CpuDecodes(block_tables[seq : seq + 1], length, k_cache.shape[1])
        args.out[row] = alone.attend(q[row : row + 1], k_cache, v_cache, args)[0]
    return True


@register_op(mutates=("out", "lse"), reference=_reference, cpu=_on_cpu)
def _batch_invariant_attention(queries: Queries, pages: Pages, hints: Hints, args: AttentionArgs) -> None:
    q, kv_heads = queries.q, pages.k_cache.shape[2]
    check_float8(pages.k_cache)
    if len(q) > 0 and len(pages.seq_lens) > 0:
        most_keys = hints.most_keys(pages)
        decodes = queries.max_seqlen_q == 1 and q.shape[1] <= 16 * kv_heads and most_keys <= segments.SEGMENT_KEYS
        many = len(pages.seq_lens) * kv_heads >= 2 * chip.processors(q.device)
        # from no table: another configuration is another order of sums
        small = chip.has_small_memory(q.device)
        config = invariant_config(decodes and many, q.shape[2], dtype_name(q), small=small)
        segments.launch(queries, pages, hints, args, config)


def batch_invariant_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    order: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of the last tokens of each sequence, with the same bits in every batch and every cut.

    A token's result depends on its query, and on the keys and values of its sequence up to it: not on other sequences,
    on how many of its sequence's tokens come in the same call, nor on where its blocks lie.

    Args:
        q, k_cache, v_cache, block_tables, cu_seqlens_q, seq_lens: as in
            :func:`~tritonllm.kernels.varlen_prefill_attention`, and so is what is not listed here. A decode is a
            sequence with one query, a draft one with a few.
        max_seqlen_q: no sequence has more new tokens; with 1 the tiles are those of decodes, and with few
            the processors share out long sequences. By default there may be any number. No bit depends on it.
        max_seqlen_k: no sequence has more keys; by default what the tables have room for. Decides whether sequences are
            shared out, and no bit. A sequence that has more gets a wrong result; the others do not.
        order: ``[B]`` int32, the order in which decodes are begun (``max_seqlen_q`` 1): the longest first fill the
            processors most evenly. No bit depends on it.

    Returns:
        ``out``, or ``(out, lse)`` with lse ``[T, H]`` float32.

    Raises:
        ValueError: a shape, dtype, device or number that does not fit; the message names the argument.
    """
    queries = Queries(q, cu_seqlens_q, _ANY if max_seqlen_q is None else max_seqlen_q)
    pages = Pages(k_cache, v_cache, block_tables, seq_lens)
    options = Options(scale, window, softcap, sinks, alibi_slopes, k_scale, v_scale)
    check_tensor("cu_seqlens_q", cu_seqlens_q, ("B + 1",), dtype=torch.int32, like=q)
    require(len(cu_seqlens_q) >= 1, "cu_seqlens_q must begin with 0, got an empty tensor")
    args = check_attention(q, pages, options, out, return_lse, batch=len(cu_seqlens_q) - 1)
    require(queries.max_seqlen_q >= 1, f"max_seqlen_q must be at least 1, got {max_seqlen_q}")
    if order is not None:
        check_tensor("order", order, (len(seq_lens),), dtype=torch.int32, like=q)
    _batch_invariant_attention(*queries, *pages, *Hints(None, order=order, max_seqlen_k=max_seqlen_k), *args)
    return args.out if args.lse is None else (args.out, args.lse)


batch_invariant_attention_ref = with_reference(batch_invariant_attention)

"""Verify attention: the few newest tokens of each sequence, a speculative draft, against a cache in blocks.

All tokens of a draft read the keys once, together: the kernels are decode's, with more rows (tokens times ``H / K``).
:func:`~tritonllm.kernels.varlen_prefill_attention` computes the same without a tree; its kernel takes over where it is
faster: many rows of many sequences.
"""

import torch

from tritonllm.kernels.attention import cpu
from tritonllm.kernels.attention.arguments import AttentionArgs, Hints, Options, Pages, Queries
from tritonllm.kernels.attention.common import (
    check_attention,
    check_float8,
    reference_attention,
    visible_keys,
)
from tritonllm.kernels.attention.decode import (
    SM90_ROWS,
    balanced_config,
    check_workspace,
    config_key,
    sm90_config,
)
from tritonllm.kernels.runtime import tuning
from tritonllm.kernels.runtime.checks import check_tensor, require
from tritonllm.kernels.runtime.registry import register_op, with_reference
from tritonllm.kernels.runtime.variants import Variant, Variants


def _reference(queries: Queries, pages: Pages, hints: Hints, args: AttentionArgs) -> None:
    (q, cu_seqlens_q, _, _, tree_mask), (k_cache, v_cache, block_tables, seq_lens) = queries, pages
    assert cu_seqlens_q is not None
    begins, lengths, size = cu_seqlens_q.tolist(), seq_lens.tolist(), k_cache.shape[1]
    for seq, length in enumerate(lengths):
        tokens = slice(begins[seq], begins[seq + 1])
        new = tokens.stop - tokens.start
        if new == 0:
            continue
        padded = -(-length // size) * size
        query_pos = torch.arange(length - new, length, device=q.device)
        bits = None
        if tree_mask is not None:
            bits = (tree_mask[tokens, None] >> torch.arange(new, device=q.device)) & 1  # [new, new]
            query_pos = length - new - 1 + bits.sum(-1)
        visible = visible_keys(query_pos, seq_lens[seq], padded, causal=bits is None, window=args.window)
        if bits is not None:
            visible = visible.clone()
            visible[:, length - new : length] &= bits.bool()
        out, lse = reference_attention(q[tokens], k_cache, v_cache, block_tables[seq], query_pos, visible, args)
        args.out[tokens] = out.to(q.dtype)
        if args.lse is not None:
            args.lse[tokens] = lse


def _prefill_pays(programs: int, dtype: str, cache_dtype: str, tree: str) -> bool:
    """64 x 4096 with 16 tokens of 4 heads: balanced 380 us, prefill 272; but it does not split a sequence's keys."""
    return tree == "no" and programs >= 132 and dtype == cache_dtype


# A key's `group` is tokens of a draft times query heads that share keys, its `tree` "yes" or "no".
VERIFY = Variants(
    "paged_verify_attention",
    Variant("sm90", "attention/sm90/decode.py", (90,), "fits", lambda group: group <= SM90_ROWS, sm90_config),
    Variant("prefill", "attention/prefill.py", (90,), None, _prefill_pays),
    Variant("balanced", "attention/portable/balanced.py", config=balanced_config),
)


@register_op(mutates=("workspace", "out", "lse"), reference=_reference, cpu=cpu.verify)
def _paged_verify_attention(queries: Queries, pages: Pages, hints: Hints, args: AttentionArgs) -> None:
    check_float8(pages.k_cache)
    if len(queries.q) == 0 or len(pages.seq_lens) == 0:
        return
    key = config_key(queries.q, pages, queries.max_seqlen_q) | {"tree": "no" if queries.tree_mask is None else "yes"}
    config = tuning.get_config("paged_verify_attention", queries.q.device, VERIFY.default_config, **key)
    VERIFY.launch(config, queries, pages, hints, args)


def paged_verify_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    max_seqlen_q: int,
    tree_mask: torch.Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of each sequence's newest tokens, a few, over all its keys and values in blocks.

    Args:
        q: ``[T, H, D]``, the queries of all sequences one after the other. This and what is not listed here: as in
            :func:`~tritonllm.kernels.paged_decode_attention`.
        cu_seqlens_q: ``[B + 1]`` int32, the first query of each sequence, and the end of the last. No sequence may
            have more queries than keys; one without queries is skipped, and rows of no sequence are left as they are.
        seq_lens: ``[B]`` int32, keys of each sequence, its new tokens included.
        max_seqlen_q: no sequence has more new tokens than this (which decides the tile).
        tree_mask: ``[T]`` int32 for a tree of drafts instead of a chain: bit j of a token's number says that it sees
            new token j of its sequence, an ancestor; its own bit must be set. At most 32 new tokens; a token's position
            is that of the first new token plus the number of its ancestors, which a window counts with. None: each
            token sees those before it.

    Returns:
        ``out``, or ``(out, lse)`` with lse ``[T, H]`` float32.

    Raises:
        ValueError: as in :func:`~tritonllm.kernels.paged_decode_attention`; or a tree of more than 32 tokens, with
            ``alibi_slopes``, or with a window shorter than ``max_seqlen_q``.
    """
    queries = Queries(q, cu_seqlens_q, max_seqlen_q, True, tree_mask)
    pages = Pages(k_cache, v_cache, block_tables, seq_lens)
    options = Options(scale, window, softcap, sinks, alibi_slopes, k_scale, v_scale)
    args = check_attention(q, pages, options, out, return_lse, batch=_check_queries(cu_seqlens_q, queries, options))
    check_workspace(workspace, q)
    _paged_verify_attention(*queries, *pages, *Hints(workspace), *args)
    return args.out if args.lse is None else (args.out, args.lse)


paged_verify_attention_ref = with_reference(paged_verify_attention)


def _check_queries(cu_seqlens_q: torch.Tensor, queries: Queries, options: Options) -> int:
    """Check what decode does not take, and return the number of sequences."""
    (q, _, max_seqlen_q, _, tree_mask), window = queries, options.window
    check_tensor("cu_seqlens_q", cu_seqlens_q, ("B + 1",), dtype=torch.int32, like=q)
    require(len(cu_seqlens_q) >= 1, "cu_seqlens_q must begin with 0, got an empty tensor")
    require(max_seqlen_q >= 1, f"max_seqlen_q must be at least 1, got {max_seqlen_q}")
    if tree_mask is not None:
        check_tensor("tree_mask", tree_mask, (len(q),), dtype=torch.int32, like=q)
        require(max_seqlen_q <= 32, f"max_seqlen_q must be at most 32 with tree_mask, got {max_seqlen_q}")
        require(
            options.alibi_slopes is None,
            "alibi_slopes must be None with tree_mask: keys of a tree have no one position",
        )
        require(
            window is None or window >= max_seqlen_q,
            f"window must be at least max_seqlen_q={max_seqlen_q} with tree_mask, got {window}",
        )
    return len(cu_seqlens_q) - 1

"""Decode attention from the rows of the query/key/value projection: what lies between two products, in one launch.

:func:`qk_norm_rope_store` and then :func:`paged_decode_attention`. Where few sequences attend, one kernel does both
(:mod:`tritonllm.kernels.attention.portable.few`): each program normalises and turns the queries that it needs itself,
which costs less than to wait for a kernel that does it once. Elsewhere the two are launched in turn.
"""

import torch

from tritonllm.kernels.attention import cpu
from tritonllm.kernels.attention.arguments import AttentionArgs, Heads, Hints, Options, Pages, Queries, Scales, Slots
from tritonllm.kernels.attention.common import check_attention, check_float8
from tritonllm.kernels.attention.decode import DECODE, check_hints, decode_config
from tritonllm.kernels.attention.portable import few
from tritonllm.kernels.attention.portable.projection import Projection
from tritonllm.kernels.attention.qk_norm_rope import check_projection, split_heads
from tritonllm.kernels.runtime.registry import OPS, register_op, with_reference


def _reference(
    qkv: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_factor: float,
    pages: Pages,
    heads: Heads,
    hints: Hints,
    args: AttentionArgs,
) -> None:
    scales = Scales(args.k_scale, args.v_scale, k_factor, args.v_factor)
    OPS["qk_norm_rope_store"](qkv, hints.settled, *pages[:2], slot_mapping, *heads, *scales)
    OPS["paged_decode_attention"](split_heads(qkv, pages.k_cache)[0], *pages, *hints, *args)


@register_op(
    mutates=("qkv", "k_cache", "v_cache", "workspace", "out", "lse"), reference=_reference, cpu=cpu.fused_decode
)
def _fused_decode_attention(
    qkv: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_factor: float,
    pages: Pages,
    heads: Heads,
    hints: Hints,
    args: AttentionArgs,
) -> None:
    check_float8(pages.k_cache)
    if len(qkv) == 0:
        return
    q = split_heads(qkv, pages.k_cache)[0]
    config = decode_config(q, pages, hints, args.window)
    scales = Scales(args.k_scale, args.v_scale, k_factor, args.v_factor)
    if config["kernel"] == "few":
        few.launch(Queries(qkv), pages, hints, args, config, Projection(slot_mapping, heads, scales))
        return
    OPS["qk_norm_rope_store"](qkv, hints.settled, *pages[:2], slot_mapping, *heads, *scales)
    DECODE.launch(config, Queries(q), pages, hints, args)


def fused_decode_attention(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    positions: torch.Tensor | None = None,
    cos_sin_cache: torch.Tensor | None = None,
    *,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    interleaved: bool = False,
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
    settled: bool = False,
    order: torch.Tensor | None = None,
    max_seqlen_k: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """:func:`qk_norm_rope_store` of one token for each sequence, and :func:`paged_decode_attention` of its queries.

    Args:
        qkv: ``[B, (H + 2 K) * D]`` float16, bfloat16 or float32, contiguous in the last dimension: each row H query
            heads, K key heads and K value heads. The queries may be overwritten. This and what is not listed here: as
            in :func:`qk_norm_rope_store`, and in :func:`paged_decode_attention`.
        slot_mapping: ``[B]`` int64, the place of each sequence's last key, ``seq_lens - 1``; negative where a sequence
            has length 0.
        settled: no kernel that may still run writes anything of all this but ``qkv`` (true while a model is served):
            it is read before the kernel before this one ends.

    Returns:
        ``out``, ``[B, H, D]``, or ``(out, lse)`` with lse ``[B, H]`` float32.

    Raises:
        ValueError: as those two do.
    """
    heads = Heads(positions, cos_sin_cache, q_weight, k_weight, eps, weight_offset, interleaved)
    k_factor = check_projection(qkv, Slots(k_cache, v_cache, slot_mapping), heads, k_scale, v_scale).k_factor
    pages, hints = Pages(k_cache, v_cache, block_tables, seq_lens), Hints(workspace, settled, order, max_seqlen_k)
    options = Options(scale, window, softcap, sinks, alibi_slopes, k_scale, v_scale)
    args = check_attention(split_heads(qkv, k_cache)[0], pages, options, out, return_lse, batch=len(qkv))
    check_hints(hints, qkv)
    _fused_decode_attention(qkv, slot_mapping, k_factor, *pages, *heads, *hints, *args)
    return args.out if args.lse is None else (args.out, args.lse)


fused_decode_attention_ref = with_reference(fused_decode_attention)

"""Decode attention from the rows of the query/key/value projection: what lies between two products, in one launch.

:func:`qk_norm_rope_store` and then :func:`paged_decode_attention`. Where few sequences attend, one kernel does both
(:mod:`tritonllm.kernels.attention.portable.few`): each program normalises and turns the queries that it needs itself,
which costs less than to wait for a kernel that does it once. Elsewhere the two are launched in turn.
"""

from typing import Any

import torch

from tritonllm.kernels.attention.common import AttentionArgs, check_attention, require_float8
from tritonllm.kernels.attention.decode import (
    check_order,
    check_workspace,
    config_key,
    decode_reference,
    default_config,
    launch_decode,
)
from tritonllm.kernels.attention.portable.few import Projection, launch_few
from tritonllm.kernels.attention.qk_norm_rope import check_projection, qk_norm_rope_store_reference, split_heads
from tritonllm.kernels.runtime import tuning
from tritonllm.kernels.runtime.registry import OPS, register_op, with_reference


def _reference(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    positions: torch.Tensor | None,
    cos_sin_cache: torch.Tensor | None,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    workspace: torch.Tensor | None,
    settled: bool,
    order: torch.Tensor | None,
    k_factor: float,
    eps: float,
    weight_offset: float,
    interleaved: bool,
    *rest: Any,
) -> None:
    args = AttentionArgs(*rest)
    qk_norm_rope_store_reference(
        *(qkv, k_cache, v_cache, slot_mapping, positions, cos_sin_cache, q_weight, k_weight, args.k_scale),
        *(args.v_scale, k_factor, args.v_factor, eps, weight_offset, interleaved, settled),
    )
    q = split_heads(qkv, k_cache)[0]
    decode_reference(q, k_cache, v_cache, block_tables, seq_lens, workspace, settled, order, *args)


@register_op(mutates=("qkv", "k_cache", "v_cache", "workspace", "out", "lse"), reference=_reference)
def _fused_decode_attention(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    positions: torch.Tensor | None,
    cos_sin_cache: torch.Tensor | None,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    workspace: torch.Tensor | None,
    settled: bool,
    order: torch.Tensor | None,
    k_factor: float,
    eps: float,
    weight_offset: float,
    interleaved: bool,
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
    if len(qkv) == 0:
        return
    args = AttentionArgs(out, lse, sinks, alibi_slopes, k_scale, v_scale, scale, v_factor, window, softcap)
    q = split_heads(qkv, k_cache)[0]
    key = config_key(q, k_cache, v_cache, block_tables, len(q), 1)
    config = tuning.get_config("paged_decode_attention", q.device, default_config, **key)
    tables = (block_tables, seq_lens, workspace, settled)
    if config["kernel"] == "few":
        scaled = k_scale is not None or v_scale is not None or k_factor != 1 or v_factor != 1
        rows = (slot_mapping, positions, cos_sin_cache, q_weight, k_weight, k_factor, v_factor)
        projection = Projection(*rows, scaled, eps, weight_offset, interleaved)
        launch_few(qkv, k_cache, v_cache, *tables, args, config, projection)
        return
    OPS["qk_norm_rope_store"](
        *(qkv, k_cache, v_cache, slot_mapping, positions, cos_sin_cache, q_weight, k_weight, k_scale, v_scale),
        *(k_factor, v_factor, eps, weight_offset, interleaved, settled),
    )
    launch_decode(q, k_cache, v_cache, *tables, order, args, config)


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
    rows = (positions, cos_sin_cache, q_weight, k_weight)
    k_factor = check_projection(qkv, k_cache, v_cache, slot_mapping, *rows, k_scale, v_scale)[2]
    args = check_attention(
        *(split_heads(qkv, k_cache)[0], k_cache, v_cache, block_tables, seq_lens, scale, window, softcap),
        *(sinks, alibi_slopes, k_scale, v_scale, out, return_lse),
        batch=len(qkv),
    )
    check_workspace(workspace, qkv)
    check_order(order, qkv)
    _fused_decode_attention(
        *(qkv, k_cache, v_cache, slot_mapping, block_tables, seq_lens, *rows, workspace, settled, order),
        *(k_factor, eps, weight_offset),
        interleaved,
        *args,
    )
    return args.out if args.lse is None else (args.out, args.lse)


fused_decode_attention_ref = with_reference(fused_decode_attention)

"""Decode attention for layer after layer, and step after step: what stays the same is bound, and checked once.

:func:`fused_decode_attention` has some thirty arguments, and from one layer of a step to the next few of them change,
from one step to the next fewer. So a layer's caches, weights and options are bound once (:func:`bind_layer`), a step's
sequences once for all layers (:class:`DecodeStep`), and what is left is a call with the rows of a projection: plan and
run, as in FlashInfer (Ye et al., 2025). On a CPU a step's lengths, blocks and angles are looked up once as well, and no
operator is called: one row of SmolLM2-135M takes 70 us a layer, by the public function 198 (Zen 4, one thread).
"""

from typing import Any, NamedTuple

import torch

from tritonllm.kernels.attention import cpu
from tritonllm.kernels.attention.arguments import AttentionArgs, Heads, Hints, Options
from tritonllm.kernels.attention.common import (
    CACHE_ORDER,
    check_cache_dtype,
    check_caches,
    check_head_size,
    check_options,
    check_scales,
    check_sequences,
)
from tritonllm.kernels.attention.decode import check_hints, check_workspace
from tritonllm.kernels.attention.fused import _fused_decode_attention
from tritonllm.kernels.attention.qk_norm_rope import check_head_weights
from tritonllm.kernels.elementwise import Rotation, check_angles, check_positions, turn_of
from tritonllm.kernels.runtime.checks import check_tensor, require
from tritonllm.kernels.runtime.registry import runs_in_torch


class BoundLayer(NamedTuple):
    """What stays the same for a layer; made by :func:`bind_layer`."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k_factor: float
    heads: Heads  # without positions
    args: AttentionArgs  # `out` has no rows, but the shape and the dtype of one
    workspace: torch.Tensor | None
    store: cpu.Store | None  # None: the CPU has no functions of its own for such a layer


def bind_layer(
    num_heads: int,
    dtype: torch.dtype,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cos_sin_cache: torch.Tensor | None = None,
    *,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    interleaved: bool = False,
    workspace: torch.Tensor | None = None,
    **options: Any,
) -> BoundLayer:
    """Check what stays the same for a layer, once.

    Args:
        num_heads: how many heads of queries there are.
        dtype: the dtype of the rows.
        k_cache, v_cache, cos_sin_cache, q_weight, k_weight, eps, weight_offset, interleaved, workspace, and options
            (``scale``, ``window``, ``softcap``, ``sinks``, ``alibi_slopes``, ``k_scale``, ``v_scale``): see
            :func:`fused_decode_attention`.

    Raises:
        ValueError: a shape, dtype, device or number that does not fit.
    """
    check_caches(k_cache, v_cache, "K", "D", like=k_cache)
    kv_heads, head_size = k_cache.shape[2:]
    check_head_size("k_cache", head_size)
    require(
        num_heads > 0 and kv_heads > 0 and num_heads % kv_heads == 0,
        f"num_heads must be a multiple of k_cache's {kv_heads} heads, got {num_heads}: {CACHE_ORDER}",
    )
    out = torch.empty((0, num_heads, head_size), dtype=dtype, device=k_cache.device)
    check_cache_dtype(k_cache, "the rows", out)
    heads = Heads(None, cos_sin_cache, q_weight, k_weight, eps, weight_offset, interleaved)
    if cos_sin_cache is not None:
        check_angles(cos_sin_cache, out, head_size)
    check_head_weights(heads, num_heads, kv_heads, head_size, like=out)
    check_workspace(workspace, out)
    given = Options(**options)
    args = check_options(given, num_heads, kv_heads, out, None)
    scales = check_scales(given.k_scale, given.v_scale, kv_heads, out)
    store = cpu.store_of(k_cache, v_cache, heads, scales) if cpu.takes(k_cache, args) else None
    return BoundLayer(k_cache, v_cache, scales.k_factor, heads, args, workspace, store)


class DecodeStep:
    """The decodes of one step, for every layer. Its tensors must not be written while it is used.

    Args:
        slot_mapping, block_tables, seq_lens, positions, settled, order, max_seqlen_k: see
            :func:`fused_decode_attention`.

    Raises:
        ValueError: a shape, dtype, device or number that does not fit.
    """

    def __init__(
        self,
        slot_mapping: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        positions: torch.Tensor,
        *,
        settled: bool = False,
        order: torch.Tensor | None = None,
        max_seqlen_k: int | None = None,
    ) -> None:
        check_tensor("slot_mapping", slot_mapping, ("B",), dtype=torch.int64)
        check_sequences(block_tables, seq_lens, len(slot_mapping), like=slot_mapping)
        check_positions(positions, slot_mapping)
        hints = Hints(None, settled, order, max_seqlen_k)
        check_hints(hints, slot_mapping)
        self._slots, self._positions = slot_mapping, positions
        self._tables, self._lens, self._hints = block_tables, seq_lens, hints
        self._decodes: cpu.CpuDecodes | None = None
        self._stored: bool | None = None
        self._turns: dict[tuple[int, bool], tuple[torch.Tensor, Rotation]] = {}

    def attend(self, qkv: torch.Tensor, layer: BoundLayer) -> torch.Tensor:
        """:func:`fused_decode_attention` of ``qkv[B, (H + 2 K) D]``, which is overwritten -> ``[B, H, D]``."""
        if layer.store is not None and runs_in_torch(qkv) and self._is_stored():
            return self._on_cpu(qkv, layer, layer.store)
        heads, args, hints = layer.heads, layer.args, self._hints
        out = qkv.new_empty(len(qkv), *args.out.shape[1:])
        pages = layer.k_cache, layer.v_cache, self._tables, self._lens
        positions = None if heads.cos_sin_cache is None else self._positions
        _fused_decode_attention(
            *(qkv, self._slots, layer.k_factor, *pages, positions, *heads[1:], layer.workspace, *hints[1:]),
            *(out, *args[1:]),
        )
        return out

    def _on_cpu(self, qkv: torch.Tensor, layer: BoundLayer, store: cpu.Store) -> torch.Tensor:
        decodes = self._decodes
        if decodes is None:
            decodes = self._decodes = cpu.CpuDecodes(self._tables, self._lens, layer.k_cache.shape[1])
        q = cpu.project_and_store(qkv, self._slots, store, layer.heads, self._turn(layer.heads))
        return decodes.attend(q, layer.k_cache, layer.v_cache, layer.args)

    def _is_stored(self) -> bool:
        if self._stored is None:
            self._stored = cpu.all_stored(self._slots)
        return self._stored

    def _turn(self, heads: Heads) -> Rotation | None:
        table = heads.cos_sin_cache
        if table is None:
            return None
        key = id(table), heads.interleaved
        if key not in self._turns:  # with the table, so that its id stays its own
            self._turns[key] = table, turn_of(self._positions, table, heads.interleaved)
        return self._turns[key][1]

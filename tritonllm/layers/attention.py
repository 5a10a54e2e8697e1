"""Attention over the paged cache: project, normalise, rotate, store, attend, project."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from tritonllm.kernels import (
    apply_rope,
    cascade_decode_attention,
    fused_decode_attention,
    paged_decode_attention,
    paged_verify_attention,
    qk_norm_rope_store,
    varlen_prefill_attention,
)
from tritonllm.layers.fusion import decodes_at_once, normalises_heads
from tritonllm.layers.linear import Linear
from tritonllm.layers.metadata import AttentionMetadata, KVCacheView
from tritonllm.layers.norm import BlockInput, Norm, NormSpec
from tritonllm.layers.parameters import empty_parameter
from tritonllm.layers.residual import Addend
from tritonllm.layers.rope import RopeSpec


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Multi-head attention with grouped keys and values.

    Another kind of attention (latent attention, say) is another spec and another module beside these two.

    Attributes:
        head_size: elements of one head; ``num_heads * head_size`` may differ from the hidden size.
        scale: multiplies the query-key products; ``head_size ** -0.5`` by default.
        qkv_bias: of the query, key and value projections.
        o_bias: of the output projection.
        clip_qkv: queries, keys and values are clipped to this and its negative (MPT); ``None`` for no clipping.
        qk_norm: normalises queries and keys.
        qk_norm_after_rope: it does so after the rotation instead of before (Hunyuan).
        qk_norm_over: what shares a norm's statistics and weights: each ``head`` its own statistics with the same
            weights, each of the ``heads`` with weights of its own, or ``all`` heads at once.
        rope: rotation of queries and keys; ``None`` for none.
        window: keys that a token sees, itself included; ``None`` for all.
        softcap: replaces logits ``s`` by ``softcap * tanh(s / softcap)``; 0 for none.
        sinks: each head has a learned logit that takes weight and gives no value (GPT-OSS).
        alibi_slopes: of each head; ``None`` for no linear bias.
        causal: a token sees none behind it. Without that a window is to both sides, and sequences come whole.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    clip_qkv: float | None = None
    qk_norm: NormSpec | None = None
    qk_norm_over: Literal["head", "heads", "all"] = "head"
    qk_norm_after_rope: bool = False
    rope: RopeSpec | None = None
    window: int | None = None
    softcap: float = 0.0
    sinks: bool = False
    alibi_slopes: tuple[float, ...] | None = None
    causal: bool = True

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        if self.head_size % 8 or not 16 <= self.head_size <= 512:
            raise ValueError(f"head_size must be a multiple of 8 from 16 to 512, got {self.head_size}")
        if self.rope is not None and self.rope.rotary_dim > self.head_size:
            raise ValueError(f"rotary_dim must be at most head_size={self.head_size}, got {self.rope.rotary_dim}")
        if self.qk_norm_after_rope and (self.qk_norm is None or self.rope is None):
            raise ValueError("qk_norm_after_rope needs a qk_norm and a rope")
        if self.alibi_slopes is not None and len(self.alibi_slopes) != self.num_heads:
            raise ValueError(f"alibi_slopes must have one entry for each of {self.num_heads} heads")


class Attention(nn.Module):
    """Attention as an :class:`AttentionSpec` says."""

    alibi_slopes: torch.Tensor | None

    def __init__(self, hidden_size: int, spec: AttentionSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec = spec
        self.heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        q_size = spec.num_heads * spec.head_size
        columns = sum(self.heads) * spec.head_size
        self.qkv = Linear(hidden_size, columns, bias=spec.qkv_bias, dtype=dtype, device=device)
        self.o = Linear(q_size, hidden_size, bias=spec.o_bias, dtype=dtype, device=device)
        self.q_norm = self.k_norm = None
        if spec.qk_norm is not None:
            self.q_norm = Norm(self._norm_shape(spec.num_heads), spec.qk_norm, dtype=dtype, device=device)
            self.k_norm = Norm(self._norm_shape(spec.num_kv_heads), spec.qk_norm, dtype=dtype, device=device)
        self.sinks = empty_parameter(spec.num_heads, dtype=dtype, device=device) if spec.sinks else None
        slopes = None if spec.alibi_slopes is None else torch.tensor(spec.alibi_slopes, device=device)
        self.register_buffer("alibi_slopes", slopes, persistent=False)

    def _norm_shape(self, heads: int) -> tuple[int, ...]:
        size = self.spec.head_size
        return {"head": (size,), "heads": (heads, size), "all": (heads * size,)}[self.spec.qk_norm_over]

    def forward(
        self,
        x: BlockInput,
        positions: torch.Tensor,
        cos_sin_cache: torch.Tensor | None,
        metadata: AttentionMetadata,
        kv_cache: KVCacheView,
        rows: torch.Tensor | None = None,
    ) -> Addend:
        """Attend from ``[T, hidden]`` at ``positions[T]``; writes the new keys and values into ``kv_cache``.

        Args:
            cos_sin_cache: the table of the spec's ``rope``; ``None`` without one.
            rows: ``[R]`` int64, the tokens whose results are wanted; ``None`` for all T.

        Returns:
            ``[R, hidden]``, to be added.
        """
        out = self.attend(self.qkv(*x), positions, cos_sin_cache, metadata, kv_cache)
        return Addend(self.o, out if rows is None else out.index_select(0, rows))

    def attend(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cos_sin_cache: torch.Tensor | None,
        metadata: AttentionMetadata,
        kv_cache: KVCacheView,
    ) -> torch.Tensor:
        """What lies between the two projections: ``qkv[T, (H + 2 K) D]``, overwritten, -> ``[T, H D]``."""
        if self.spec.clip_qkv is not None:
            qkv.clamp_(-self.spec.clip_qkv, self.spec.clip_qkv)
        cache = kv_cache.k, kv_cache.v
        rope = (None if cos_sin_cache is None else positions, cos_sin_cache)
        heads = {"interleaved": self.spec.rope is not None and self.spec.rope.interleaved}
        if self.spec.qk_norm_after_rope:
            assert cos_sin_cache is not None
            q, k = self._queries_and_keys(qkv)
            apply_rope(q, k, positions, cos_sin_cache, **heads)
            rope = None, None
        heads |= self._norm_weights(qkv)
        options: dict[str, Any] = {
            "scale": self.spec.scale,
            "window": self.spec.window,
            "softcap": self.spec.softcap,
            "sinks": self.sinks,
            "alibi_slopes": self.alibi_slopes,
        }
        if decodes_at_once(metadata):
            tables = metadata.slot_mapping, metadata.block_tables, metadata.seq_lens
            # settled: within a step only qkv is new to a layer
            state = {"workspace": kv_cache.workspace, "settled": True, **_known(metadata)}
            out = fused_decode_attention(qkv, *cache, *tables, *rope, **heads, **options, **state)
        else:
            constant = "q_weight" in heads
            q = qk_norm_rope_store(qkv, *cache, metadata.slot_mapping, *rope, **heads, constant_weight=constant)
            out = paged_attention(q, metadata, kv_cache, causal=self.spec.causal, **options)
        return out.flatten(1)

    def _norm_weights(self, qkv: torch.Tensor) -> dict[str, Any]:
        """The q/k norm as the fused kernel takes it; one that it does not know is done here, in place."""
        if self.q_norm is None or self.k_norm is None:
            return {}
        norm = self.q_norm.spec
        if normalises_heads(norm.kind, self.spec.qk_norm_over, self.spec.qk_norm_after_rope):
            weights = {"q_weight": self.q_norm.weight, "k_weight": self.k_norm.weight}
            return {**weights, "eps": norm.eps, "weight_offset": norm.weight_offset}
        for module, x in zip((self.q_norm, self.k_norm), self._queries_and_keys(qkv), strict=True):
            x = x.view(x.shape[0], -1) if self.spec.qk_norm_over == "all" else x
            module.normalize(x, out=x)
        return {}

    def _queries_and_keys(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of them: ``[T, H, D]`` and ``[T, K, D]``."""
        q, k, _ = qkv.unflatten(1, (sum(self.heads), self.spec.head_size)).split(self.heads, dim=1)
        return q, k


def _known(metadata: AttentionMetadata) -> dict[str, Any]:
    """What a step knows of its decodes' lengths."""
    return {"order": metadata.decode_order, "max_seqlen_k": metadata.max_decode_len}


def paged_attention(
    q: torch.Tensor,
    metadata: AttentionMetadata,
    kv_cache: KVCacheView,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """``q[T, H, D]`` -> ``[T, H, D]``: each segment of the step, only if it is there; keywords as in the kernels.

    Without ``causal``, a decode is a whole sequence of one token, which sees itself either way.
    A window or ALiBi depends on each query's position: such layers read shared keys for every sequence by itself.
    """
    decode, verify, chunk = metadata.segments
    n, drafts_end = decode.tokens, decode.tokens + verify.tokens  # of tokens
    verified = decode.sequences + verify.sequences  # of sequences, up to the end of the second segment
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    cache, tables, lens = (kv_cache.k, kv_cache.v), metadata.block_tables, metadata.seq_lens
    everywhere = {"scale": scale, "softcap": softcap, "sinks": sinks, "workspace": kv_cache.workspace}
    by_position = {"window": window, "alibi_slopes": alibi_slopes}
    if metadata.cascade is not None and window is None and alibi_slopes is None:
        most = metadata.max_decode_len
        cascade_decode_attention(q[:n], *cache, metadata.cascade, out=out[:n], max_seqlen_k=most, **everywhere)
    elif decode.tokens:
        mine = tables[: decode.sequences], lens[: decode.sequences]
        paged_decode_attention(q[:n], *cache, *mine, out=out[:n], **_known(metadata), **everywhere, **by_position)
    if verify.tokens:
        assert metadata.verify_starts is not None
        tokens, sequences = slice(n, drafts_end), slice(decode.sequences, verified)
        batch = tables[sequences], metadata.verify_starts, lens[sequences]
        limits = {"max_seqlen_q": verify.longest, **by_position}
        paged_verify_attention(q[tokens], *cache, *batch, out=out[tokens], **limits, **everywhere)
    if chunk.tokens:
        batch = tables[verified:], metadata.cu_seqlens_q, lens[verified:]
        limits = {"max_seqlen_q": chunk.longest, "causal": causal, **by_position}
        varlen_prefill_attention(q[drafts_end:], *cache, *batch, out=out[drafts_end:], **limits, **everywhere)
    return out

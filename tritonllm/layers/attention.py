"""Attention over the paged cache: project, normalise, rotate, store, attend, project."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.functional import pad

from tritonllm.config.checks import at_least
from tritonllm.dist.group import ALONE, Group
from tritonllm.kernels import (
    BoundLayer,
    apply_rope,
    batch_invariant_attention,
    bind_layer,
    cascade_decode_attention,
    output_gate,
    paged_decode_attention,
    paged_verify_attention,
    qk_norm_rope_store,
    varlen_prefill_attention,
)
from tritonllm.layers.context import split_attention
from tritonllm.layers.fusion import decodes_at_once, normalises_heads
from tritonllm.layers.key_bias import ROOM, KeyBias
from tritonllm.layers.linear import Linear
from tritonllm.layers.metadata import AttentionMetadata, CacheShape, KVCacheView
from tritonllm.layers.norm import BlockInput, Norm, NormSpec
from tritonllm.layers.parameters import empty_parameter
from tritonllm.layers.residual import Addend
from tritonllm.layers.rope import RopeSpec


def check_head_size(size: int) -> None:
    """Check that the kernels of attention know heads of so many elements.

    Raises:
        ValueError: they do not.
    """
    if size % 8 or not 16 <= size <= 512:
        raise ValueError(f"head_size must be a multiple of 8 from 16 to 512, got {size}")


@dataclass(frozen=True, kw_only=True)
class QueryScaling:
    """Queries that grow with their position p, by ``1 + factor * log(1 + floor((p + shift) / every))``.

    Nakanishi, "Scalable-Softmax Is Superior for Attention" (2025), as Llama 4 and Ministral 3 have it.

    Attributes:
        every: positions of a step of it.
        factor: the strength.
        shift: 1 where positions are counted from 1 (Llama 4).
    """

    every: int
    factor: float
    shift: int = 0

    def __post_init__(self) -> None:
        at_least("every", self.every, 1)

    def of(self, positions: torch.Tensor) -> torch.Tensor:
        """``[T]`` int64 -> ``[T]`` float64: so exact that a logarithm has the same float32 in a vector and alone."""
        steps = torch.div(positions + self.shift, self.every, rounding_mode="floor")
        return steps.double().log1p() * self.factor + 1.0


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Multi-head attention with grouped keys and values.

    Another kind of attention (latent attention, say) is another spec and another module beside these two.

    Attributes:
        head_size: elements of one head; ``num_heads * head_size`` may differ from the hidden size.
        input_size: elements from which queries, keys and values are projected; ``None`` if it is the hidden size.
        scale: multiplies the query-key products; ``head_size ** -0.5`` by default.
        qkv_bias: whether the query, key and value projections have a bias.
        o_bias: whether the output projection has a bias.
        clip_qkv: queries, keys and values are clipped to this and its negative (MPT); ``None`` for no clipping.
        qk_norm: the norm of queries and keys; ``None`` for none.
        qk_norm_after_rope: whether that norm comes after the rotation instead of before (Hunyuan).
        qk_norm_over: what shares a norm's statistics and weights: each ``head`` its own statistics with the same
            weights, each of the ``heads`` with weights of its own, or ``all`` heads at once.
        rope: rotation of queries and keys; ``None`` for none.
        query_scaling: how queries grow with their position; ``None`` for not at all. Without ``qk_norm`` and
            ``clip_qkv``.
        window: keys that a token sees, itself included; ``None`` for all.
        attention_chunk: a token sees the keys of its own chunk of so many positions alone (Llama 4); ``None`` for all.
            Without a ``window`` and ALiBi.
        softcap: replaces logits ``s`` by ``softcap * tanh(s / softcap)``; 0 for none.
        sinks: each head has a learned logit that takes weight and gives no value (GPT-OSS).
        v_norm: the norm of each head's values; ``None`` for none.
        values_are_keys: values are what the projection to keys gives, before its norm and rotation (Gemma 4): there is
            no projection to values.
        value_size: elements of one head's values, where these are fewer than its keys'; ``None`` if they are as many.
            In the cache there are zeros behind them. Without ``values_are_keys`` and ``v_norm``.
        value_scale: multiplies the values (MiMo V2). Without ``values_are_keys``.
        own_keys: whether the layer has keys and values of its own. If not, it reads those of an earlier layer and
            projects to queries alone; what concerns keys or values is then that layer's.
        output_gate: the function, ``sigmoid`` (AFMoE) or ``softplus`` (Laguna), of another projection of the layer's
            input that multiplies the heads' output; ``None`` for no gate.
        output_gate_over: what has a number of that projection of its own: each ``element``, or each ``head``.
        alibi_slopes: the slope of each head's linear bias; ``None`` for no bias.
        key_bias: key heads on all ranks, where each key has a number that is added to its logits, computed from the
            values that its token has in all of them (:mod:`tritonllm.layers.key_bias`; Doge); 0 for no such number.
            With a ``scale``, and without ``values_are_keys``, ``value_size``, ``query_scaling``, ``own_keys`` off,
            ``clip_qkv`` or ``qk_norm_after_rope``.
        causal: whether a token sees none behind it. Without that a window is to both sides, and sequences come whole.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    input_size: int | None = None
    scale: float | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    clip_qkv: float | None = None
    qk_norm: NormSpec | None = None
    qk_norm_over: Literal["head", "heads", "all"] = "head"
    qk_norm_after_rope: bool = False
    rope: RopeSpec | None = None
    query_scaling: QueryScaling | None = None
    window: int | None = None
    attention_chunk: int | None = None
    softcap: float = 0.0
    sinks: bool = False
    v_norm: NormSpec | None = None
    values_are_keys: bool = False
    value_size: int | None = None
    value_scale: float = 1.0
    own_keys: bool = True
    output_gate: Literal["sigmoid", "softplus"] | None = None
    output_gate_over: Literal["element", "head"] = "element"
    alibi_slopes: tuple[float, ...] | None = None
    key_bias: int = 0
    causal: bool = True

    def __post_init__(self) -> None:
        at_least("window", self.window, 1)
        at_least("attention_chunk", self.attention_chunk, 1)
        if self.attention_chunk is not None and (self.window is not None or self.alibi_slopes is not None):
            raise ValueError("attention_chunk with a window or alibi_slopes is not supported")
        if self.attention_chunk is not None and not self.causal:
            raise ValueError("attention_chunk without causal is not supported")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        check_head_size(self.head_size)
        if self.key_bias:
            check_head_size(self.cache.size)
            others = self.values_are_keys, self.value_size, self.query_scaling, not self.own_keys, self.clip_qkv
            if self.scale is None or self.qk_norm_after_rope or any(others):
                raise ValueError("key_bias is supported with a scale, and with heads of one size that are projected")
        if self.rope is not None and self.rope.rotary_dim > self.head_size:
            raise ValueError(f"rotary_dim must be at most head_size={self.head_size}, got {self.rope.rotary_dim}")
        if self.qk_norm_after_rope and (self.qk_norm is None or self.rope is None):
            raise ValueError("qk_norm_after_rope needs a qk_norm and a rope")
        if self.query_scaling is not None and (self.qk_norm is not None or self.clip_qkv is not None):
            raise ValueError("query_scaling with a qk_norm or clip_qkv is not supported")
        if self.v_norm is not None and (self.v_norm.weight or self.v_norm.kind != "rms"):
            raise ValueError("v_norm must be an RMS norm without a weight")
        if self.value_size is not None and not 1 <= self.value_size < self.head_size:
            raise ValueError(f"value_size must be None or from 1 to {self.head_size - 1}, got {self.value_size}")
        if self.values_are_keys and (self.value_size is not None or self.value_scale != 1.0):
            raise ValueError("values_are_keys with a value_size or value_scale is not supported")
        if self.v_norm is not None and self.value_size is not None:
            raise ValueError("v_norm with a value_size is not supported")
        if self.alibi_slopes is not None and len(self.alibi_slopes) != self.num_heads:
            raise ValueError(f"alibi_slopes must have one entry for each of {self.num_heads} heads")

    @property
    def cache(self) -> CacheShape:
        """What the layer keeps of a token, or the layer that it reads."""
        return CacheShape(self.num_kv_heads, self.head_size + (ROOM if self.key_bias else 0))

    @property
    def projections(self) -> tuple[tuple[int, int], ...]:
        """The heads that the projection gives of queries, of keys and of values: how many, and elements of one."""
        queries, keys = (self.num_heads, self.head_size), (self.num_kv_heads, self.head_size)
        if not self.own_keys:
            return (queries,)
        return (queries, keys) if self.values_are_keys else (queries, keys, (self.num_kv_heads, self.output_size))

    @property
    def output_size(self) -> int:
        """Elements that attention gives for each head: those of its values."""
        return self.head_size if self.value_size is None else self.value_size

    @property
    def gate_size(self) -> int:
        """Elements of the heads' output that one number of ``output_gate`` multiplies."""
        return 1 if self.output_gate_over == "element" else self.output_size


class Attention(nn.Module):
    """Attention as an :class:`AttentionSpec` says.

    Args:
        group: the ranks among which the heads are dealt out; ``spec`` says what this one has of them. Its result is
            then a part of a sum.
        context: the ranks of the group that split the keys of each sequence.
    """

    alibi_slopes: torch.Tensor | None
    batch_invariant = False

    def __init__(
        self,
        hidden_size: int,
        spec: AttentionSpec,
        *,
        dtype: torch.dtype,
        device: torch.device,
        group: Group = ALONE,
        context: Group = ALONE,
    ) -> None:
        super().__init__()
        self.spec = spec
        self._group, self._context = group, context
        of_heads = spec.num_heads * spec.output_size
        columns = sum(heads * size for heads, size in spec.projections)
        self.qkv = Linear(spec.input_size or hidden_size, columns, bias=spec.qkv_bias, dtype=dtype, device=device)
        self.o = Linear(of_heads, hidden_size, bias=spec.o_bias, dtype=dtype, device=device)
        self.gate: Linear | None = None
        if spec.output_gate:
            gates = of_heads // spec.gate_size
            self.gate = Linear(spec.input_size or hidden_size, gates, bias=False, dtype=dtype, device=device)
        self.q_norm = self.k_norm = self.v_norm = None
        if spec.qk_norm is not None:
            self.q_norm = Norm(self._norm_shape(spec.num_heads), spec.qk_norm, dtype=dtype, device=device)
            if spec.own_keys:
                self.k_norm = Norm(self._norm_shape(spec.num_kv_heads), spec.qk_norm, dtype=dtype, device=device)
        if spec.v_norm is not None and spec.own_keys:
            self.v_norm = Norm((spec.head_size,), spec.v_norm, dtype=dtype, device=device)
        self.key_bias: KeyBias | None = None
        if spec.key_bias:
            how: dict[str, Any] = {"of": spec.key_bias, "head_size": spec.head_size, "scale": spec.scale}
            how |= {"shift": spec.qkv_bias, "dtype": dtype, "device": device, "group": group}
            self.key_bias = KeyBias(spec.num_heads, spec.num_kv_heads, **how)
        over, after = spec.qk_norm_over, spec.qk_norm_after_rope
        known = self.k_norm is not None and normalises_heads(self.k_norm.spec.kind, over, after)
        self._normed_with_rope = known and not spec.key_bias  # behind a key is what its norm must not see
        self._bound: BoundLayer | None = None
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
        query_scale: torch.Tensor | None = None,
    ) -> Addend:
        """Attend from ``[T, input_size]`` at ``positions[T]``; writes the new keys and values into ``kv_cache``.

        Args:
            kv_cache: the layer's cache; with ``own_keys`` off that of the layer that it reads, which has written there.
            cos_sin_cache: the table of the spec's ``rope``; ``None`` without one.
            rows: ``[R]`` int64, the tokens whose results are wanted; ``None`` for all T.
            query_scale: ``[T, 1, 1]``, what the spec's ``query_scaling`` says of the positions; ``None`` without one.

        Returns:
            ``[R, hidden]``, to be added.
        """
        qkv = self._with_values_of_cache(self.qkv(*x))
        if self.key_bias is not None:
            self._normalize_heads(qkv, self.spec.head_size)
            qkv = self.key_bias.append(qkv.unflatten(1, (-1, self.spec.head_size))).flatten(1)
        if self.spec.query_scaling is not None:  # a rotation is linear, so it may come after
            assert query_scale is not None  # the same for all layers: computed once for a step
            queries = self._heads_of(qkv)[:, : self.spec.num_heads]
            queries *= query_scale
        gate = None if self.gate is None else self.gate(*x)
        out = self.attend(qkv, positions, cos_sin_cache, metadata, kv_cache)
        if self.spec.output_size < self.spec.cache.size:
            out = out.unflatten(1, (self.spec.num_heads, -1))[:, :, : self.spec.output_size].flatten(1)
        if gate is not None:
            output_gate(out, gate, function=self.spec.output_gate, out=out)
        return Addend(self.o, out if rows is None else out.index_select(0, rows))

    def _with_values_of_cache(self, qkv: torch.Tensor) -> torch.Tensor:
        """What was projected, with values as the cache has them: scaled, and as long as keys."""
        spec = self.spec
        if not spec.own_keys or (spec.value_size is None and spec.value_scale == 1.0):
            return qkv
        queries_and_keys, values = qkv.tensor_split([(spec.num_heads + spec.num_kv_heads) * spec.head_size], dim=1)
        if spec.value_scale != 1.0:
            values *= spec.value_scale
        if spec.value_size is None:
            return qkv
        values = pad(values.unflatten(1, (-1, spec.value_size)), (0, spec.head_size - spec.value_size))
        return torch.cat((queries_and_keys, values.flatten(1)), dim=1)

    def attend(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cos_sin_cache: torch.Tensor | None,
        metadata: AttentionMetadata,
        kv_cache: KVCacheView,
    ) -> torch.Tensor:
        """What lies between the two projections: ``qkv``, the rows of the first one with values as the
        cache has them, overwritten, -> ``[T, H D]``."""
        spec = self.spec
        if spec.attention_chunk is not None:
            assert metadata.of_chunks is not None  # the decoder has derived them
            metadata = metadata.of_chunks
        if spec.clip_qkv is not None:
            qkv.clamp_(-spec.clip_qkv, spec.clip_qkv)
        if spec.own_keys and spec.values_are_keys:
            qkv = torch.cat((qkv, qkv[:, spec.num_heads * spec.head_size :]), dim=1)
        if self.v_norm is not None:
            values = self._heads_of(qkv)[:, spec.num_heads + spec.num_kv_heads :]
            self.v_norm.normalize(values, out=values)
        if spec.qk_norm_after_rope:
            assert cos_sin_cache is not None and self.spec.rope is not None
            apply_rope(*self._queries_and_keys(qkv), positions, cos_sin_cache, interleaved=self.spec.rope.interleaved)
            cos_sin_cache = None
        if not self._normed_with_rope and self.key_bias is None:
            self._normalize_heads(qkv, spec.head_size)
        local = metadata.local
        if spec.own_keys and local is None and not self.batch_invariant and decodes_at_once(metadata):
            layer = self._bind(cos_sin_cache, kv_cache)
            return metadata.decode_step(positions).attend(qkv, layer).flatten(1)
        if spec.own_keys:
            turned = None if cos_sin_cache is None else positions
            heads = {**self._heads(cos_sin_cache), "constant_weight": self._normed_with_rope}
            heads |= {"batch_invariant": self.batch_invariant, **kv_cache.scales}
            slots = metadata.slot_mapping if local is None else local.slot_mapping
            q = qk_norm_rope_store(qkv, kv_cache.k, kv_cache.v, slots, turned, **heads)
        else:
            q, no_keys = self._queries_and_keys(qkv)
            if cos_sin_cache is not None and spec.rope is not None:
                apply_rope(q, no_keys, positions, cos_sin_cache, interleaved=spec.rope.interleaved)
        if local is not None:
            scale, softcap = self.spec.scale, self.spec.softcap
            return split_attention(q, local, kv_cache, self._context, scale=scale, softcap=softcap).flatten(1)
        if self.batch_invariant:
            return invariant_attention(q, metadata, kv_cache, **self._options()).flatten(1)
        return paged_attention(q, metadata, kv_cache, causal=self.spec.causal, **self._options()).flatten(1)

    def _bind(self, cos_sin_cache: torch.Tensor | None, kv_cache: KVCacheView) -> BoundLayer:
        """This layer with an engine's cache: bound in the first step."""
        bound = self._bound
        if bound is None or bound.k_cache is not kv_cache.k or bound.heads.cos_sin_cache is not cos_sin_cache:
            heads = {**self._heads(cos_sin_cache), **self._options(), **kv_cache.scales}
            heads["workspace"] = kv_cache.workspace
            bound = bind_layer(self.spec.num_heads, self.qkv.dtype, kv_cache.k, kv_cache.v, **heads)
            self._bound = bound
        return bound

    def _options(self) -> dict[str, Any]:
        """What the kernels of attention take."""
        spec = self.spec
        numbers = {"scale": spec.scale, "window": spec.window, "softcap": spec.softcap}
        return {**numbers, "sinks": self.sinks, "alibi_slopes": self.alibi_slopes}

    def _heads(self, cos_sin_cache: torch.Tensor | None) -> dict[str, Any]:
        """How the kernel before attention turns queries and keys, and normalises them if it knows their norm."""
        interleaved = self.spec.rope is not None and self.spec.rope.interleaved
        heads = {"cos_sin_cache": cos_sin_cache, "interleaved": interleaved}
        if not self._normed_with_rope or self.q_norm is None or self.k_norm is None:
            return heads
        norm = self.q_norm.spec
        weights = {"q_weight": self.q_norm.weight, "k_weight": self.k_norm.weight}
        return {**heads, **weights, "eps": norm.eps, "weight_offset": norm.weight_offset}

    def _normalize_heads(self, qkv: torch.Tensor, size: int) -> None:
        """The norms that this kernel does not know, in place, of heads of so many elements."""
        over_all = self.spec.qk_norm_over == "all"
        for module, x in zip((self.q_norm, self.k_norm), self._queries_and_keys(qkv, size), strict=True):
            if module is None:
                continue
            x = x.view(x.shape[0], -1) if over_all else x
            if over_all and self._group.size > 1:
                module.normalize_over(self._group, x)
            else:
                module.normalize(x, out=x)

    def _queries_and_keys(self, qkv: torch.Tensor, size: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of them: ``[T, H, D]`` and ``[T, K, D]``, or of no keys where there are none."""
        heads, queries = self._heads_of(qkv, size), self.spec.num_heads
        return heads[:, :queries], heads[:, queries : queries + self.spec.num_kv_heads]

    def _heads_of(self, qkv: torch.Tensor, size: int | None = None) -> torch.Tensor:
        """``[T, ..., size]``; by default as many elements as the cache has of a head."""
        size = size or self.spec.cache.size
        return qkv.unflatten(1, (qkv.shape[1] // size, size))


def invariant_attention(
    q: torch.Tensor, metadata: AttentionMetadata, kv_cache: KVCacheView, **options: Any
) -> torch.Tensor:
    """:func:`paged_attention` in which each token's result depends on its sequence alone."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    options |= kv_cache.scales
    token = sequence = 0
    decode, verify, chunk = metadata.segments
    starts = (metadata.decode_starts, lambda: metadata.verify_starts, lambda: metadata.cu_seqlens_q)
    for segment, of_segment in zip((decode, verify, chunk), starts, strict=True):
        tokens, sequences = slice(token, token + segment.tokens), slice(sequence, sequence + segment.sequences)
        token, sequence = tokens.stop, sequences.stop
        if segment.tokens:
            cu = of_segment()
            assert cu is not None
            batch = metadata.block_tables[sequences], cu, metadata.seq_lens[sequences]
            most_keys = metadata.max_decode_len
            if segment is verify and most_keys is not None:  # the last drafts may stand behind the longest sequence
                most_keys += segment.longest - 1
            limits: dict[str, Any] = {"max_seqlen_k": most_keys, "max_seqlen_q": segment.longest}
            if segment is decode:
                limits["order"] = metadata.decode_order
            elif segment is chunk:  # of prompts any number: what a step launches must not depend on theirs
                limits["max_seqlen_q"] = None
            batch_invariant_attention(q[tokens], kv_cache.k, kv_cache.v, *batch, out=out[tokens], **limits, **options)
    return out


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
    everywhere |= kv_cache.scales
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
        limits = {"max_seqlen_q": verify.longest, "tree_mask": metadata.tree_mask, **by_position}
        paged_verify_attention(q[tokens], *cache, *batch, out=out[tokens], **limits, **everywhere)
    if chunk.tokens:
        batch = tables[verified:], metadata.cu_seqlens_q, lens[verified:]
        limits = {"max_seqlen_q": chunk.longest, "causal": causal, **by_position}
        varlen_prefill_attention(q[drafts_end:], *cache, *batch, out=out[drafts_end:], **limits, **everywhere)
    return out

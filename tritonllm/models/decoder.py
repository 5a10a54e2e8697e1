"""The one decoder: every supported architecture is a :class:`ModelSpec` over this module."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from tritonllm.kernels import cap_logits
from tritonllm.kernels.dense.medium import Unnormed, leaves_norms
from tritonllm.layers.attention import Attention
from tritonllm.layers.linear import Embedding, Linear, empty_parameter, few_rows
from tritonllm.layers.metadata import AttentionMetadata, KVCacheView
from tritonllm.layers.mlp import MLP, MLPSpec
from tritonllm.layers.moe import MoE
from tritonllm.layers.norm import Norm
from tritonllm.models.interface import LayerWork
from tritonllm.models.spec import ModelSpec


class Normed(NamedTuple):
    """A layer's input after its first norm, where the layer before has computed it."""

    rows: torch.Tensor


class DecoderLayer(nn.Module):
    """Attention and MLP around a residual stream.

    With many rows, what a block computed is added to the stream by the norm that comes next, so it travels beside the
    stream until then; a layer hands the next one its MLP's output, not yet added. With few rows a block's last product
    adds to the stream, and its first one normalises: then nothing travels, and a step is half as many kernels. With
    some hundred rows (on Hopper) a block's last product adds to the stream, too, and leaves the next norm to the
    product that follows; between two layers it is that which travels. What sums up the experts adds to the stream and
    computes the next norm itself.
    """

    def __init__(self, spec: ModelSpec, index: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        layer = spec.layers[index]
        before = spec.norm_position in ("pre", "sandwich")
        after = spec.norm_position in ("post", "sandwich")
        of_stream = spec.norm_position == "stream"
        self.multiplier = spec.residual_multiplier
        self.of_stream = of_stream
        self.parallel = spec.parallel is not None
        self.fusable = spec.norm_position == "pre" and not self.parallel

        def norm(exists: bool) -> Norm | None:
            return Norm((spec.hidden_size,), spec.norm, dtype=dtype, device=device) if exists else None

        # with norms of the stream, the one after a layer's MLP is where the next layer enters
        self.attention_norm = norm(before or (of_stream and index > 0))
        self.attention = Attention(spec.hidden_size, layer.attention, dtype=dtype, device=device)
        self.attention_post_norm = norm(after)
        self.mlp_norm = norm((before or of_stream) and spec.parallel != "one norm")
        self.mlp: MLP | MoE
        if isinstance(layer.mlp, MLPSpec):
            self.mlp = MLP(spec.hidden_size, layer.mlp, dtype=dtype, device=device)
        else:
            self.mlp = MoE(spec.hidden_size, layer.mlp, dtype=dtype, device=device)
        self.mlp_post_norm = norm(after)

    def forward(
        self,
        x: torch.Tensor | Unnormed | Normed | None,
        stream: torch.Tensor | None,
        positions: torch.Tensor,
        cos_sin_cache: torch.Tensor | None,
        metadata: AttentionMetadata,
        kv_cache: KVCacheView,
        rows: torch.Tensor | None = None,
        following: Norm | None = None,
    ) -> tuple[torch.Tensor | Unnormed | Normed | None, torch.Tensor]:
        """``x[T, hidden]``, not yet added to the stream, and the stream -> the same two of the next layer.

        ``None`` in the place of either: no stream yet, or nothing to add to it. Instead of ``x``, what is left of this
        layer's first norm, where the layer before has begun it; ``following`` is the norm that the next one begins
        with. All T tokens are attended to, but with ``rows`` only theirs are the results.
        """
        if rows is None and not isinstance(x, Normed) and self._leaves_norms(positions):
            return self._forward_medium(x, stream, positions, cos_sin_cache, metadata, kv_cache, following)
        if isinstance(x, Unnormed):
            x = None
        if self.fusable and few_rows(positions if rows is None else rows):
            return self._forward_few(x, stream, positions, cos_sin_cache, metadata, kv_cache, rows)
        if x is None:
            x, stream = stream, None
        assert x is not None
        x, stream = self._enter(self.attention_norm, x, stream)
        attended = self.attention(x, positions, cos_sin_cache, metadata, kv_cache, rows=rows)
        stream = _of_rows(stream, rows)
        if self.parallel:
            x = _of_rows(x, rows) if self.mlp_norm is None else self.mlp_norm.normalize(stream)
            return attended.add_(self.mlp(x)), stream
        x, stream = self._enter(self.mlp_norm, _after(self.attention_post_norm, attended), stream)
        if isinstance(self.mlp, MoE) and self.fusable and following is not None and self.mlp.hands_on(following):
            return Normed(self.mlp.add_to(stream, x, following, scale=self.multiplier)), stream
        return _after(self.mlp_post_norm, self.mlp(x)), stream

    def _forward_few(
        self,
        x: torch.Tensor | Normed | None,
        stream: torch.Tensor | None,
        positions: torch.Tensor,
        cos_sin_cache: torch.Tensor | None,
        metadata: AttentionMetadata,
        kv_cache: KVCacheView,
        rows: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """:meth:`forward` for few rows: the products of a block normalise before it and add to the stream after it."""
        norm = self.attention_norm
        assert norm is not None and self.mlp_norm is not None
        if isinstance(x, Normed):
            x, norm = x.rows, None
        elif x is None or stream is None:
            x = stream = x if stream is None else stream
        else:  # layers with many rows came before: the output of the last one is not added yet
            (x, stream), norm = norm(x, stream, self.multiplier), None
        assert x is not None and stream is not None
        step = positions, cos_sin_cache, metadata, kv_cache
        stream = _of_rows(stream, rows)
        stream = self.attention(x, *step, norm=norm, residual=stream, scale=self.multiplier, rows=rows)
        return None, self.mlp(stream, norm=self.mlp_norm, residual=stream, scale=self.multiplier)

    def _leaves_norms(self, rows: torch.Tensor) -> bool:
        mlp, norm = self.mlp, self.mlp_norm
        if not self.fusable or not isinstance(mlp, MLP) or norm is None or norm.spec.kind != "rms":
            return False
        layers = self.attention.qkv, self.attention.o, mlp.up, mlp.down
        return leaves_norms(rows, *(layer.weight for layer in layers))

    def _forward_medium(
        self,
        x: torch.Tensor | Unnormed | None,
        stream: torch.Tensor | None,
        positions: torch.Tensor,
        cos_sin_cache: torch.Tensor | None,
        metadata: AttentionMetadata,
        kv_cache: KVCacheView,
        following: Norm | None,
    ) -> tuple[Unnormed | None, torch.Tensor]:
        """:meth:`forward` for some hundred rows: a product that adds to the stream begins the norm after it, and the
        one that follows ends it."""
        attention, mlp, norm, scale = self.attention, self.mlp, self.mlp_norm, self.multiplier
        assert isinstance(mlp, MLP) and norm is not None and self.attention_norm is not None
        if isinstance(x, Unnormed):
            qkv = attention.qkv.of_unnormed(x)
        elif x is None or stream is None:
            stream = x if stream is None else stream
            assert stream is not None
            qkv = attention.qkv(stream, norm=self.attention_norm)
        else:
            x, stream = self.attention_norm(x, stream, scale)
            qkv = attention.qkv(x)
        assert stream is not None
        attended = attention.attend(qkv, positions, cos_sin_cache, metadata, kv_cache)
        left = attention.o.add_to(stream, attended, norm, scale=scale)
        inner = mlp.up.of_unnormed(left, activation=mlp.spec.activation, gated=mlp.spec.gated)
        if following is None or following.spec.kind != "rms":
            return None, mlp.down(inner, residual=stream, scale=scale)
        return mlp.down.add_to(stream, inner, following, scale=scale), stream

    def _enter(
        self, norm: Norm | None, x: torch.Tensor | Normed, stream: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add ``x`` to the stream; returns a block's input, and the stream."""
        if isinstance(x, Normed):
            assert stream is not None
            return x.rows, stream
        if norm is None:
            stream = x if stream is None else stream.add_(x, alpha=self.multiplier)
            return stream, stream
        normed, stream = norm(x, stream, self.multiplier)
        return normed, normed if self.of_stream else stream


def _after(norm: Norm | None, x: torch.Tensor) -> torch.Tensor:
    return x if norm is None else norm.normalize(x, out=x)


def _of_rows(x: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    return x if rows is None else x.index_select(0, rows)


class Decoder(nn.Module):
    """Token ids -> hidden states -> logits, over a paged cache.

    Weights are allocated on ``device`` once and not initialised: :mod:`tritonllm.models.weights` fills them.

    Args:
        spec: the model.
        dtype: of the weights and activations; norms, rotations and softmax compute in float32.
        device: where the weights are.
        max_model_len: positions go from 0 to ``max_model_len - 1``.
    """

    supports_graphs = True

    def __init__(self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device, max_model_len: int) -> None:
        super().__init__()
        self.spec = spec
        self.dtype = dtype
        size = spec.embedding_size or spec.hidden_size
        self.embed = Embedding(spec.vocab_size, size, dtype=dtype, device=device)
        # a model multiplies by a number of its own dtype: Gemma's sqrt(3072) is 55.5 in bfloat16
        self.embedding_multiplier = float(torch.tensor(spec.embedding_multiplier, dtype=dtype))
        self.positions = self.project_in = self.project_out = self.norm = self.logit_bias = None
        if spec.learned_positions:
            self.positions = Embedding(spec.learned_positions, spec.hidden_size, dtype=dtype, device=device)
        if size != spec.hidden_size:
            self.project_in = Linear(size, spec.hidden_size, bias=False, dtype=dtype, device=device)
            self.project_out = Linear(spec.hidden_size, size, bias=False, dtype=dtype, device=device)
        self.layers = nn.ModuleList(DecoderLayer(spec, i, dtype=dtype, device=device) for i in range(spec.num_layers))
        if spec.final_norm:
            self.norm = Norm((spec.hidden_size,), spec.norm, dtype=dtype, device=device)
        self.lm_head = self.embed
        if not spec.tie_word_embeddings:
            self.lm_head = Embedding(spec.vocab_size, size, dtype=dtype, device=device)
        if spec.logit_bias:
            self.logit_bias = empty_parameter(spec.vocab_size, dtype=dtype, device=device)
        self._tables, self._table_of_layer = _rope_tables(spec, max_model_len, device)
        self._running: Sequence[int] = range(spec.num_layers)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        kv_cache: Sequence[KVCacheView],
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run one step.

        Args:
            input_ids: ``[T]`` int32 or int64, decodes first.
            positions: ``[T]`` int64, each token's place in its sequence.
            metadata: the batch.
            kv_cache: one view per layer; the step's keys and values are written into it.
            rows: ``[R]`` int64, the tokens whose hidden states are wanted. What the last layer computes behind its
                attention is computed for them alone: of a long prompt one row of thousands, 3% of Llama-3.1-8B's time.

        Returns:
            ``[R, hidden]`` after the last norm, for :meth:`compute_logits`; without ``rows`` ``[T, hidden]``.

        Raises:
            ValueError: another number of caches than of layers.
        """
        if len(kv_cache) != self.spec.num_layers:
            raise ValueError(
                f"kv_cache must have one view for each of {self.spec.num_layers} layers, got {len(kv_cache)}"
            )
        x: torch.Tensor | Unnormed | Normed | None = self._embed(input_ids, positions)
        stream: torch.Tensor | None = None
        for place, after in zip(self._running, [*self._running[1:], None], strict=True):
            wanted, following = (rows, None) if after is None else (None, self.layers[after].attention_norm)
            table = self._tables[self._table_of_layer[place]]
            x, stream = self.layers[place](x, stream, positions, table, metadata, kv_cache[place], wanted, following)
        assert stream is not None and not isinstance(x, Normed)  # there is a layer, and nothing follows the last one
        if x is None or isinstance(x, Unnormed):
            return stream if self.norm is None else self.norm.normalize(stream)
        multiplier = self.spec.residual_multiplier
        if self.norm is not None:
            return self.norm(x, stream, multiplier)[0]
        return stream.add_(x, alpha=multiplier)

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Inside the block a step runs one layer of each kind, the last one twice, for the end of a step may want
        fewer rows: it launches every kernel of a whole one, and gives nothing of use."""
        places = self.spec.distinct_layers()
        self._running = (*places, places[-1])
        try:
            yield
        finally:
            self._running = range(self.spec.num_layers)

    def _embed(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        if self.embedding_multiplier != 1.0:
            x *= self.embedding_multiplier
        if self.project_in is not None:
            x = self.project_in(x)
        if self.positions is not None:
            x += self.positions(positions + self.spec.position_offset)
        return x

    @property
    def work(self) -> list[LayerWork]:
        """What each layer computes of a token."""
        return list(map(_work, self.layers))

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden[N, hidden]``, the rows that need logits -> ``[N, vocab]`` float32."""
        if self.project_out is not None:
            hidden = self.project_out(hidden)
        logits = self.lm_head.logits(hidden)
        if self.logit_bias is not None:
            logits += self.logit_bias
        if self.spec.logit_scale != 1.0 or self.spec.logit_softcap:
            cap_logits(logits, scale=self.spec.logit_scale, softcap=self.spec.logit_softcap)
        return logits


def _work(layer: nn.Module) -> LayerWork:
    weights, mlp = sum(p.numel() for p in layer.parameters()), layer.mlp
    if not isinstance(mlp, MoE):
        return LayerWork(weights, experts=False)
    each = (mlp.gate_up.numel() + mlp.down.numel()) // mlp.spec.num_experts
    return LayerWork(weights - each * (mlp.spec.num_experts - mlp.spec.top_k), experts=True)


def _rope_tables(
    spec: ModelSpec, max_model_len: int, device: torch.device
) -> tuple[list[torch.Tensor | None], list[int]]:
    """The tables of the rotations that differ, and which one each layer takes."""
    ropes = []
    for layer in spec.layers:
        if layer.attention.rope not in ropes:
            ropes.append(layer.attention.rope)
    tables = [None if rope is None else rope.table(max_model_len, device) for rope in ropes]
    return tables, [ropes.index(layer.attention.rope) for layer in spec.layers]

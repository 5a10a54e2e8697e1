"""The one decoder: every supported architecture is a :class:`ModelSpec` over this module and its layers
(:mod:`tritonllm.models.decoder_layer`)."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tritonllm.dist.exchange import NO_EXCHANGE, Exchange
from tritonllm.dist.group import ALONE, Group, share_of
from tritonllm.kernels import ROW_UNIT, SHARD_UNIT, cap_logits, decode_short_keys
from tritonllm.layers.attention_chunks import within_chunks
from tritonllm.layers.context import with_local_keys
from tritonllm.layers.exchanged_rows import ExchangedRows
from tritonllm.layers.expert_counts import ExpertCounts
from tritonllm.layers.fusion import FusionPlan, FusionPlanner
from tritonllm.layers.head import Head
from tritonllm.layers.invariance import SEPARATE, make_batch_invariant
from tritonllm.layers.layer_inputs import LayerInputs
from tritonllm.layers.linear import Embedding, Linear, put_beside
from tritonllm.layers.metadata import UNSCALED, AttentionMetadata, KVCacheView, KVScales
from tritonllm.layers.norm import Norm
from tritonllm.layers.parameters import empty_parameter
from tritonllm.layers.residual import Stream
from tritonllm.layers.waves import wave_table
from tritonllm.models.decoder_layer import DecoderLayer, work_of
from tritonllm.models.expert_checks import check_counted, check_exchange
from tritonllm.models.interface import LayerWork
from tritonllm.models.local_spec import local_experts, local_spec
from tritonllm.models.shards import Section
from tritonllm.models.spec import ModelSpec
from tritonllm.models.stages import Stage


class Decoder(nn.Module):
    """Token ids -> hidden states -> logits, over a paged cache.

    Weights are allocated on ``device`` once and not initialised: :mod:`tritonllm.models.weights` fills them.

    Args:
        spec: the model.
        dtype: the dtype of the weights and activations; norms, rotations and softmax compute in float32.
        device: the device that the weights are on.
        max_model_len: positions go from 0 to ``max_model_len - 1``.
        group: the ranks that share the model, or the stage (:mod:`tritonllm.models.shards`).
        context: the ranks of the group that split the keys of each sequence (:mod:`tritonllm.layers.context`).
        stage: which layers are here (:mod:`tritonllm.models.stages`); all of them by default.
        batch_invariant: a token's bits do not depend on the rest of its step (:mod:`tritonllm.layers.invariance`).
        counts_experts: steps count which experts tokens choose.
        exchange: the exchange between engines that share the experts; each has requests of its own, and all else of the
            model. In each layer with experts rows go from one to the other, so all run a step at once.

    Attributes:
        spec: what this rank computes.
        whole: what all ranks compute together.
        group, context, stage, exchange: as they were given.
        incoming: ``[tokens, columns_in]``, where a stage behind the first finds what the one before it has computed of
            a step's tokens. A step overwrites it.
        expert_counts: the counts of all steps so far; ``None`` if they are not counted.
        quantization: the narrow format of the weights of the layers' products (:mod:`tritonllm.models.quantization`).
        together: the most elements that the products of one of its layers have (:class:`Linear`).

    Raises:
        ValueError: the model cannot be cut for so many ranks, or has no experts that could be counted or shared; or it
            shall have an ``exchange`` and be batch invariant, or have one and a ``group`` of several ranks.
    """

    supports_graphs = True

    def __init__(
        self,
        spec: ModelSpec,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
        group: Group = ALONE,
        context: Group = ALONE,
        stage: Stage | None = None,
        batch_invariant: bool = False,
        counts_experts: bool = False,
        exchange: Exchange = NO_EXCHANGE,
    ) -> None:
        super().__init__()
        check_exchange(exchange.size, group.size, batch_invariant)
        self.whole, self.group, self.context, self.batch_invariant = spec, group, context, batch_invariant
        self.stage, self.exchange = stage or Stage.whole(spec), exchange
        local = local_experts(local_spec(spec, group.rank, group.size), exchange.rank, exchange.size)
        local = local.up_to(max_model_len)
        self.spec = self.stage.of(local)
        self.dtype = dtype
        self.incoming: torch.Tensor | None = None
        self.embedding_norm: Norm | None = None
        self.token_types: Embedding | None = None
        self.positions: Embedding | None = None
        self.waves: torch.Tensor | None = None
        self.layer_inputs: LayerInputs | None = None
        self.project_in: Linear | None = None
        self.project_out: Linear | None = None
        self.norm: Norm | None = None
        self.logit_bias: nn.Parameter | None = None
        self.classifier: Head | None = None
        if self.stage.first:
            self._add_embeddings(local, dtype, device, max_model_len)
        how: dict[str, Any] = {"dtype": dtype, "device": device, "group": group, "context": context}
        layers = [DecoderLayer(local, i, **how) for i in self.stage.layers]
        self.layers = nn.ModuleList(layers)
        self.together = max(layer.together for layer in layers)
        if spec.final_norm and self.stage.last:
            self.norm = Norm((spec.hidden_size,), spec.norm, dtype=dtype, device=device)
        if self.stage.first:
            self._add_head(local, dtype, device)
        put_beside(self.children(), self.together)
        if self.layer_inputs is not None:
            put_beside(self.layer_inputs.children(), self.together)
        specs = [layer.attention for layer in self.spec.layers]
        self._heads = {(spec.num_heads, *spec.cache) for spec in specs}
        group.reserve(spec.hidden_size, dtype)
        self.quantization: str | None = None
        self.scales_of_layers: Mapping[int, KVScales] = {}
        self.fuse_anew()
        if batch_invariant:
            make_batch_invariant(self)
        self.expert_counts = _expert_counts(self.spec, device) if counts_experts else None
        self._tables, self._table_of_layer = _rope_tables(self.spec, max_model_len, device)
        scalings = [layer.attention.query_scaling for layer in self.spec.layers]
        self._scalings = [scaling for scaling in dict.fromkeys(scalings) if scaling is not None]
        self._scaling_of_layer = [None if one is None else self._scalings.index(one) for one in scalings]
        self._running: range | tuple[int, ...] = range(self.spec.num_layers)

    @property
    def kv_scales(self) -> list[KVScales]:
        """For each layer here, by what keys and values are divided in a narrow cache."""
        return [self.scales_of_layers.get(layer, UNSCALED) for layer in self.stage.layers]

    def fuse_anew(self) -> None:
        """Decide what is fused by the layers as they are now, before the first step."""
        limits = SEPARATE if self.batch_invariant else None
        traits = [layer.traits for layer in self.layers if isinstance(layer, DecoderLayer)]
        self.fusion = FusionPlanner(traits, limits, summed=self.group.fused_rows)

    @property
    def first_own_logit(self) -> int | None:
        """The token of the first column of :meth:`compute_own_logits`, where a draw can begin with the ranks' parts:
        there are several ranks, each has whole groups of :func:`~tritonllm.kernels.sample_shard`, and their sums have
        the bits that one rank's would have."""
        vocab, own = self.spec.vocab_size, self._own_logits
        if own is None or not self.spec.logits or vocab % ROW_UNIT or share_of(vocab, self.group.size) % SHARD_UNIT:
            return None
        return own.start

    @property
    def columns_in(self) -> int:
        """Elements of a token that come from the stage before: its stream, and the inputs of the layers from here."""
        return self._columns_at(self.stage.layers.start)

    @property
    def columns_out(self) -> int:
        """Elements of a token that go to the next stage; of the last stage, back to the first one."""
        return self._columns_at(self.stage.layers.stop)

    def _columns_at(self, layer: int) -> int:
        inputs = self.whole.layer_inputs
        return self.whole.hidden_size + (0 if inputs is None else (self.whole.num_layers - layer) * inputs.size)

    @property
    def _own_logits(self) -> range | None:
        """The part of the vocabulary that this rank multiplies by; ``None`` for all."""
        rank, size = self.group.rank, self.group.size
        return None if size == 1 else Section(self.spec.vocab_size, uneven=True).of(rank, size)

    def _add_embeddings(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device, max_model_len: int) -> None:
        """What comes before the layers."""
        size, projects = spec.embedding_size or spec.hidden_size, self._own_logits
        self.embed = Embedding(spec.vocab_size, size, dtype=dtype, device=device, projects=projects)
        # a model multiplies by a number of its own dtype: Gemma's sqrt(3072) is 55.5 in bfloat16
        self.embedding_multiplier = float(torch.tensor(spec.embedding_multiplier, dtype=dtype))
        if spec.embedding_norm:
            self.embedding_norm = Norm((size,), spec.norm, dtype=dtype, device=device)
        if spec.token_types:
            self.token_types = Embedding(spec.token_types, spec.hidden_size, dtype=dtype, device=device)
        if spec.learned_positions:
            self.positions = Embedding(spec.learned_positions, spec.hidden_size, dtype=dtype, device=device)
        if spec.wave_positions is not None:
            rows = max_model_len + spec.position_offset
            self.waves = wave_table(rows, spec.hidden_size, spec.wave_positions, dtype, device)
        if spec.layer_inputs is not None:
            sizes = spec.hidden_size, spec.num_layers
            self.layer_inputs = LayerInputs(*sizes, spec.layer_inputs, dtype=dtype, device=device)
        if size != spec.hidden_size:
            self.project_in = Linear(size, spec.hidden_size, bias=False, dtype=dtype, device=device)
            self.project_out = Linear(spec.hidden_size, size, bias=False, dtype=dtype, device=device)

    def _add_head(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        """What makes logits or classes of hidden states."""
        size, projects = spec.embedding_size or spec.hidden_size, self._own_logits
        self.lm_head = self.embed
        if spec.logits and not spec.tie_word_embeddings:
            rows = spec.vocab_size if projects is None else len(projects)
            self.lm_head = Embedding(rows, size, dtype=dtype, device=device)
        if spec.logit_bias:
            self.logit_bias = empty_parameter(spec.vocab_size, dtype=dtype, device=device)
        if spec.head is not None:
            self.classifier = Head(spec.head.dense, dtype=dtype, device=device)

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
            ``[R, hidden]`` after the last norm, for :meth:`compute_logits`; without ``rows`` ``[T, hidden]``. Of a
            stage before the last one always ``[T, columns_out]``, which the next one goes on with.

        Raises:
            ValueError: another number of caches than of layers.
        """
        rows = rows if self.stage.last else None
        return self.forward_with_states(input_ids, positions, metadata, kv_cache, (), rows)[0]

    def forward_with_states(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        kv_cache: Sequence[KVCacheView],
        before: Sequence[int],
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """As :meth:`forward`, and states between the layers, which an EAGLE-3 head reads.

        Args:
            before: layers, of 0 to ``num_layers - 1``; more than one of the same number is allowed.

        Returns:
            What :meth:`forward` does, and for each of ``before`` the residual stream with which this layer begins: new
            tensors ``[T, hidden]`` in the model's dtype, of all tokens. In a :meth:`rehearsal` they are of any layer.

        Raises:
            ValueError: another number of caches than of layers, or a layer that is not there.
        """
        metadata = self.settle(metadata, positions, kv_cache)
        plan = self.plan(len(positions), None if rows is None else len(rows), positions.device)
        return self.run(plan, self.begin(input_ids, positions), positions, metadata, kv_cache, rows, before)

    def settle(
        self, metadata: AttentionMetadata, positions: torch.Tensor, kv_cache: Sequence[KVCacheView]
    ) -> AttentionMetadata:
        """A step's metadata with what this model's layers read beside it. Before the embedding, behind whose end
        attention's kernels take slots and lengths as settled. Arguments as in :meth:`forward`."""
        if self.context.size > 1:
            metadata = with_local_keys(metadata, positions, self.context)
        size = self.spec.attention_chunk
        if size is not None:
            metadata = replace(metadata, of_chunks=within_chunks(metadata, size, kv_cache[0].k.shape[1]))
        return metadata

    def plan(self, tokens: int, rows: int | None, device: torch.device) -> FusionPlan:
        """What decides by a step's size which operations it launches. Arguments as in :meth:`forward`."""
        return self.fusion.plan(self._running, tokens, rows, device)

    def run(
        self,
        plan: FusionPlan,
        stream: Stream,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        kv_cache: Sequence[KVCacheView],
        rows: torch.Tensor | None,
        before: Sequence[int] = (),
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """:meth:`forward_with_states` by a plan, from where a stream begins; without ``metadata`` where something else
        knows the batch (:mod:`tritonllm.models.compiled`)."""
        if len(kv_cache) != self.spec.num_layers:
            raise ValueError(
                f"kv_cache must have one view for each of {self.spec.num_layers} layers, got {len(kv_cache)}"
            )
        before, stored = self._readable(before), None if metadata is None else metadata.stored
        scales = [scaling.of(positions).to(self.dtype)[:, None, None] for scaling in self._scalings]
        states: dict[int, torch.Tensor] = {}
        room = (
            0 if metadata is None else metadata.exchange_rows or max(len(positions), 0 if rows is None else len(rows))
        )
        for place, after, how in zip(self._running, [*self._running[1:], None], plan.layers, strict=True):
            wanted, following = (rows, None) if after is None else (None, self.layers[after].attention_norm)
            table, scaling = self._tables[self._table_of_layer[place]], self._scaling_of_layer[place]
            if place in before:
                states[place] = stream.settled()
            counter, travels, last = None, None, wanted is not None
            if self.expert_counts is not None:
                counter = self.expert_counts.of_layer(place, metadata, rows=last, rehearses=self._rehearses)
            if self.exchange.size > 1:
                travels = ExchangedRows(self.exchange, room, metadata.marks(wanted=last))
            batch = positions, table, metadata, kv_cache[place]
            scale = None if scaling is None else scales[scaling]
            self.layers[place](stream, how, *batch, wanted, following, counter, travels, scale, place)
            if stored is not None:
                stored(place)
        hidden = stream.enter(self.norm, plan.last_norm).rows
        if stream.layer_inputs is not None and not self.stage.last:
            hidden = torch.cat((hidden, stream.layer_inputs[:, self.spec.num_layers :].flatten(1)), dim=1)
        return hidden, [states[place] for place in before]

    def begin(self, input_ids: torch.Tensor, positions: torch.Tensor) -> Stream:
        """The residual stream with which a step begins. Arguments as in :meth:`forward`."""
        inputs = None
        if self.incoming is None:
            rows = self._embed(input_ids, positions)
            if self.layer_inputs is not None:
                inputs = self.layer_inputs(input_ids, rows)
        else:
            rows = self.incoming[: len(positions)]
            if self.whole.layer_inputs is not None:
                rows, inputs = rows[:, : self.spec.hidden_size], rows[:, self.spec.hidden_size :]
                rows, inputs = rows.contiguous(), inputs.unflatten(1, (-1, self.whole.layer_inputs.size))
        return Stream(
            rows,
            layer_inputs=inputs,
            scale=self.spec.residual_multiplier,
            becomes_normed=self.spec.norm_position == "stream",
            group=self.group,
        )

    @property
    def _rehearses(self) -> bool:
        return self._running != range(self.spec.num_layers)

    def _readable(self, before: Sequence[int]) -> Sequence[int]:
        """Where :meth:`run` reads its stream: a rehearsal has few layers, and one is as good as another."""
        if self._rehearses:
            return [self._running[-1]] * len(before)
        for place in before:
            if place not in self._running:
                raise ValueError(f"before must be layers of 0 to {self.spec.num_layers - 1}, got {place}")
        return before

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
        kinds = input_ids
        if self.token_types is not None:
            kinds, input_ids = input_ids // self.spec.vocab_size, input_ids % self.spec.vocab_size
        x = self.embed(input_ids)
        if self.embedding_multiplier != 1.0:
            x *= self.embedding_multiplier
        if self.project_in is not None:
            x = self.project_in(x)
        if self.token_types is not None:
            x += self.token_types(kinds)
        if self.positions is not None:
            x += self.positions(positions + self.spec.position_offset)
        if self.waves is not None:
            x += self.waves.index_select(0, positions + self.spec.position_offset)
        if self.embedding_norm is not None:
            self.embedding_norm.normalize(x, out=x)
        return x

    @property
    def work(self) -> list[LayerWork]:
        """What each layer computes of a token."""
        return list(map(work_of, self.layers))

    def short_keys(self, sequences: int) -> int:
        """Up to how many keys the attention of so many decodes is a matter of latency; 0: it never is."""
        each = self.context.size  # ranks attend with the heads of all of them, each to its part of the keys
        return each * max(decode_short_keys(each * h, k, d, self.dtype, sequences) for h, k, d in self._heads)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden[N, hidden]``, the rows that need logits -> ``[N, vocab]`` float32, if the model has ``logits``."""
        return self.group.all_gather(self.compute_own_logits(hidden), self.spec.vocab_size)

    def compute_own_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The columns of :meth:`compute_logits` that this rank multiplies for: in the first columns of ``out``, which
        has ``N`` rows, or in a new tensor, contiguous."""
        if self.project_out is not None:
            hidden = self.project_out(hidden)
        own = self._own_logits
        if out is not None and own is not None:
            out = out[:, : len(own)]
        logits = self.lm_head.logits(hidden, out)
        if self.logit_bias is not None:
            logits += self.logit_bias if own is None else self.logit_bias[own.start : own.stop]
        if self.spec.logit_scale != 1.0 or self.spec.logit_softcap:
            cap_logits(logits, scale=self.spec.logit_scale, softcap=self.spec.logit_softcap)
        return logits


def _expert_counts(spec: ModelSpec, device: torch.device) -> ExpertCounts:
    check_counted(spec)
    return ExpertCounts(spec.experts, device)


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

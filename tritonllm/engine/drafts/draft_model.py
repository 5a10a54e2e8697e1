"""A second, smaller model that guesses what the large one will say.

It has keys and values of its own, in blocks of the same numbers: a request's table names its blocks in both caches, so
whatever happens to a block (a hit of the prefix cache, a copy, a preemption) happens to both halves of it. For that the
draft model computes every token that the large one computes, in the same step. What a step rejects is overwritten in
both by what comes next.

A guess is drawn with the noise of the token that it guesses (the request's seed, the token's number): where both models
have the same distribution they draw the same token, and where they have similar ones they mostly do.
"Fast Inference from Transformers via Speculative Decoding": Leviathan et al., 2023; shared noise: Daliri et al.,
"Coupling without Communication and Drafter-Invariant Speculative Decoding", 2024.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tritonllm.config.engine import EngineConfig
from tritonllm.config.speculative import OF_HEADS
from tritonllm.engine.data.inputs import Batch
from tritonllm.engine.data.step_inputs import ALIGNMENT
from tritonllm.engine.drafts.draft_tree import DraftTree
from tritonllm.engine.drafts.drafters import DraftStep
from tritonllm.kernels import sample
from tritonllm.layers.metadata import AttentionMetadata, KVCacheView
from tritonllm.layers.segments import Segments, decodes
from tritonllm.models import checkpoint
from tritonllm.models.decoder import Decoder
from tritonllm.models.eagle import Eagle3Head, Eagle3Spec, EagleHead
from tritonllm.models.eagle_files import (
    dummy_eagle_weights,
    embeds_itself,
    has_bias,
    load_eagle_weights,
    read_eagle_spec,
)
from tritonllm.models.interface import CausalLM, ModelFacts
from tritonllm.models.loading import load_model, read_spec
from tritonllm.models.spec import ModelSpec


class DraftModel:
    """Drafts by decode steps of a second model, one for each draft, inside of the step that verifies them.

    Args:
        model: the loaded draft model, on the device of the large one.
        seats: the most sequences of a step.
        drafts: how many drafts each sequence has.
        device: the device that steps run on.
        tree: the tree that the drafts form; ``None`` for a chain.

    Attributes:
        model: the draft model.
        cache: a view of the cache for each layer of the draft model; empty before :meth:`take_cache`.
        extra_bytes: how many bytes of a block the drafter keeps beside keys and values.
        stores_last: whether the last draft is computed, too, for its keys and values.
    """

    remembers = False
    stores_last = True
    extra_bytes = 0

    def __init__(
        self, model: CausalLM, seats: int, drafts: int, device: torch.device, tree: DraftTree | None = None
    ) -> None:
        self.model = model
        self._tree = tree
        self.cache: Sequence[KVCacheView] = []
        self._workspace = torch.zeros(seats, dtype=torch.int32, device=device)
        self._places = torch.arange(drafts + 1, dtype=torch.int64, device=device)[:, None]
        # A row for each decode step, all of them aligned: a kernel is compiled anew for a pointer that is not.
        room = drafts + 1, -(-seats // ALIGNMENT) * ALIGNMENT
        columns = torch.zeros(4, *room, dtype=torch.int64, device=device)
        self._positions, self._slots, self._draws, self._drawn = columns
        self._lengths = torch.zeros(room, dtype=torch.int32, device=device)

    def take_cache(self, cache: Sequence[KVCacheView]) -> None:
        """Begin anew with these blocks; with none where the model's are given up."""
        self.cache = cache

    def remember(self, output: torch.Tensor) -> None:
        """Does nothing: this drafter does not look back at ended outputs."""

    def advance(
        self, model: CausalLM, cache: Sequence[KVCacheView], batch: Batch, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """Run the large model's step, and compute what it has computed.

        Args:
            model: the large one, as steps run it.
            cache: the cache views of the large model's layers.
            batch: the step, settled.
            rows: ``[R]`` int64, tokens whose hidden states are wanted; ``None`` for all.

        Returns:
            The large model's ``[R, hidden]``.
        """
        inputs = batch.inputs
        hidden = model(inputs.input_ids, inputs.positions, batch.metadata, cache, rows)
        self.follow(batch, rows, hidden)
        return hidden

    def follow(self, batch: Batch, rows: torch.Tensor | None, hidden: torch.Tensor) -> None:
        """Compute what the large model has computed in a step without drafts, for the keys and values.

        Args:
            batch: the step, settled.
            rows: as the large model has them: behind the last layer's attention nothing is computed of the others.
            hidden: the large model's states.
        """
        inputs = batch.inputs
        if batch.metadata.segments.verify.sequences:
            return  # it has computed these tokens to propose them
        metadata = dataclasses.replace(batch.metadata)  # what the large model binds to it is not of this cache
        self.model(inputs.input_ids, inputs.positions, metadata, self.cache, rows)

    def begin(self, step: DraftStep) -> torch.Tensor | None:
        """What the first decode step has of the one before it."""
        return None

    def compute(
        self, tokens: torch.Tensor, carried: torch.Tensor | None, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One decode step of B sequences: hidden states, and what the next one has of it."""
        return self.model(tokens, positions, metadata, self.cache), None

    def settle(self, batch: Batch, rows: int) -> None:
        """Move what lies by position, beside keys and values, behind a verdict on trees of the first rows."""

    def propose(self, step: DraftStep) -> None:
        """One decode step for each draft, and one more that stores the last draft's keys and values: the next step has
        need of them if all drafts are right, and its first decode would else be one of two tokens."""
        if self._tree is not None:
            self._tree.propose(self, step)
            return
        count, most = step.drafts.shape
        mine = slice(None), slice(count)
        slots, positions, lengths = self._slots[mine], self._positions[mine], self._lengths[mine]
        slots.copy_(step.metadata.slot_mapping.view(count, -1).t())
        positions.copy_(step.positions.t())
        lengths.copy_((positions + 1) * (slots >= 0))  # nothing is computed of sequences with fewer drafts
        draws, drawn = self._draws[mine], self._drawn[mine]
        draws.copy_(step.sampling.steps + self._places)
        tokens, carried = step.ids[:, 0].contiguous(), self.begin(step)
        for place in range(most + self.stores_last):
            metadata = dataclasses.replace(
                step.metadata,
                segments=Segments(decodes(count)),
                slot_mapping=slots[place],
                seq_lens=lengths[place],
                verify_starts=None,
                decode_order=None,
            )
            hidden, carried = self.compute(tokens, carried, positions[place], metadata)
            if place < most:
                sampling = step.sampling._replace(steps=draws[place])
                rows = {"workspace": self._workspace, "out": drawn[place]}
                tokens = sample(self.model.compute_logits(hidden), *sampling, **rows)
        step.drafts.copy_(torch.where(self._places < step.counts, drawn, -1)[:most].t())
        step.ids[:, 1:].copy_(step.drafts.clamp_min(0))


def draft_cost(draft: CausalLM, model: CausalLM) -> float:
    """What a decode step of the draft model takes, in those of the large one: weights that are read for a token."""
    return _weights(draft) / _weights(model)


def _weights(model: CausalLM) -> int:
    spec = model.spec
    return sum(layer.weights for layer in model.work) + spec.vocab_size * spec.hidden_size


def read_draft_spec(config: EngineConfig, spec: ModelFacts, limit: int) -> ModelSpec | None:
    """What the configuration's draft model or head is; ``None`` without one. Only its ``config.json`` is read.

    Args:
        spec: the facts of the large model.
        limit: the longest sequence that may come.

    Raises:
        ValueError: a draft model that is not there, or that does not fit the large one.
    """
    speculative = config.speculative_config
    if speculative is None or speculative.model is None:
        return None
    of_head = speculative.method in OF_HEADS
    name = f"speculative_config: model={speculative.model!r}"
    if not (spec.causal and spec.logits):
        raise ValueError(f"{name}: {spec.architecture} generates no text that could be drafted; leave it out")
    try:
        folder = _folder(config)
        draft = read_eagle_spec(folder, speculative.method, spec.num_layers) if of_head else read_spec(folder)
    except ValueError as error:
        raise ValueError(f"{name} cannot be the draft model: {error}") from error
    if not isinstance(draft, ModelSpec) or not (draft.causal and draft.logits):
        raise ValueError(
            f"{name}: {draft.architecture} cannot draft; take a model that generates text and has a family here "
            "(docs/models.md)"
        )
    vocabulary = draft.target_vocab_size if isinstance(draft, Eagle3Spec) else draft.vocab_size
    if vocabulary != spec.vocab_size:
        raise ValueError(
            f"{name} has a vocabulary of {vocabulary} tokens, the model one of {spec.vocab_size}: they must be "
            "the same; take a smaller model of the same series"
        )
    if of_head:
        _check_head(name, draft, spec)
    if speculative.tree is not None:
        for one in (spec, draft):
            _check_tree(one, speculative.num_speculative_tokens)
    # heads say 2048 or so, which they were trained on; their rotations know no limit
    if not of_head and draft.max_position_embeddings < limit:
        raise ValueError(
            f"{name} has max_position_embeddings={draft.max_position_embeddings}, and max_model_len is {limit}: set "
            f"max_model_len={draft.max_position_embeddings}, or take a draft model for longer texts"
        )
    return draft


def _check_head(name: str, head: ModelSpec, spec: ModelFacts) -> None:
    """Check that a head fits the large model.

    Raises:
        ValueError: the head does not fit the large model; the message begins with ``name``.
    """
    width = head.target_hidden_size if isinstance(head, Eagle3Spec) else head.hidden_size
    if not isinstance(spec, ModelSpec) or width != spec.hidden_size:
        raise ValueError(
            f"{name} is a head for hidden states of {width} numbers, those of {spec.architecture} have "
            f"{spec.hidden_size}: take a head that was trained for this model, which must have a family here"
        )
    if isinstance(head, Eagle3Spec) and spec.norm_position == "stream":
        raise ValueError(
            f"{name} reads states between layers, which {spec.architecture} has with norms only: take another method"
        )


def _check_tree(spec: ModelFacts, nodes: int) -> None:
    """Check that the model's attention can see a tree of so many drafts.

    Raises:
        ValueError: the model's attention cannot see a tree of so many drafts.
    """
    name = f"speculative_config: speculative_token_tree: {spec.architecture}"
    if not isinstance(spec, ModelSpec):
        raise ValueError(f"{name} has no family here, whose attention is known: leave the tree out")
    for attention in (layer.attention for layer in spec.layers):
        if attention.alibi_slopes is not None:
            raise ValueError(f"{name} has ALiBi, by which keys of a tree have no one position: leave the tree out")
        if attention.window is not None and attention.window <= nodes:
            raise ValueError(
                f"{name} has layers that see {attention.window} tokens, and the tree {nodes} nodes: take fewer than "
                f"{attention.window}"
            )


def load_draft(
    config: EngineConfig, spec: ModelSpec | None, target: CausalLM, device: torch.device, limit: int
) -> CausalLM | None:
    """The draft model or head that :func:`read_draft_spec` described, in the large model's dtype and where that is.

    Args:
        target: the large model.
        device: where it is.
        limit: the longest sequence that may come.

    Raises:
        ValueError: weights that do not match the configuration; the message names the model and a tensor.
    """
    if spec is None:
        return None
    model, speculative = config.model, config.speculative_config
    assert speculative is not None  # it has a draft model
    try:
        if speculative.method in OF_HEADS:
            return _load_head(config, spec, target, limit)
        return load_model(
            _folder(config),
            spec,
            dtype=target.dtype,
            device=device,
            max_model_len=limit,
            load_format=model.load_format,
            seed=model.seed,
            allow_nan=model.allow_nan,
        )
    except ValueError as error:
        raise ValueError(f"speculative_config: model={speculative.model!r}: {error}") from error


def make_head(spec: ModelSpec, target: CausalLM, *, bias: bool, limit: int, own_embedding: bool = False) -> EagleHead:
    """An EAGLE head without weights. One that is narrower than the model's embeddings has a table of its own."""
    assert isinstance(target, Decoder)  # :func:`read_draft_spec` has seen to it
    table = target.embed.weight
    options: dict[str, Any] = {"bias": bias, "dtype": target.dtype, "device": table.device, "max_model_len": limit}
    if not isinstance(spec, Eagle3Spec):
        return EagleHead(spec, target, **options)
    own_embedding = own_embedding or spec.hidden_size != table.shape[1]
    return Eagle3Head(spec, target, own_embedding=own_embedding, **options)


def _load_head(config: EngineConfig, spec: ModelSpec, target: CausalLM, limit: int) -> EagleHead:
    folder, form = _folder(config), config.model.load_format
    if form == "dummy":
        head = make_head(spec, target, bias=False, limit=limit)
        dummy_eagle_weights(head, config.model.seed)
        return head
    assert isinstance(target, Decoder)  # as in :func:`make_head`
    own = isinstance(spec, Eagle3Spec) and embeds_itself(folder, target, form)
    head = make_head(spec, target, bias=has_bias(folder), limit=limit, own_embedding=own)
    load_eagle_weights(head, folder, load_format=form, allow_nan=config.model.allow_nan)
    return head


def _folder(config: EngineConfig) -> Path:
    speculative = config.speculative_config
    assert speculative is not None and speculative.model is not None  # it was checked
    kept_in, form = config.model.download_dir, config.model.load_format
    return checkpoint.resolve(speculative.model, speculative.revision, load_format=form, download_dir=kept_in)

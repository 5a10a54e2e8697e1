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

import torch

from tritonllm.config import EngineConfig
from tritonllm.engine.drafters import DraftStep
from tritonllm.engine.inputs import Batch
from tritonllm.engine.step import ALIGNMENT
from tritonllm.kernels import sample
from tritonllm.layers.metadata import KVCacheView
from tritonllm.layers.segments import Segments, decodes
from tritonllm.models import checkpoint
from tritonllm.models.interface import CausalLM, ModelFacts
from tritonllm.models.loading import load_model, read_spec
from tritonllm.models.spec import ModelSpec


class DraftModel:
    """Drafts by decode steps of a second model, one for each draft, inside of the step that verifies them.

    Args:
        model: loaded, on the device of the large one.
        seats: most sequences of a step.
        drafts: of each sequence.
        device: where steps run.

    Attributes:
        model: the same.
        cache: a view for each of its layers; whoever runs steps sets it.
    """

    remembers = False

    def __init__(self, model: CausalLM, seats: int, drafts: int, device: torch.device) -> None:
        self.model = model
        self.cache: Sequence[KVCacheView] = []
        self._workspace = torch.zeros(seats, dtype=torch.int32, device=device)
        self._places = torch.arange(drafts + 1, dtype=torch.int64, device=device)[:, None]
        # A row for each decode step, all of them aligned: a kernel is compiled anew for a pointer that is not.
        room = drafts + 1, -(-seats // ALIGNMENT) * ALIGNMENT
        columns = torch.zeros(4, *room, dtype=torch.int64, device=device)
        self._positions, self._slots, self._draws, self._drawn = columns
        self._lengths = torch.zeros(room, dtype=torch.int32, device=device)

    def remember(self, output: torch.Tensor) -> None:
        """It does not."""

    def follow(self, batch: Batch, rows: torch.Tensor | None) -> None:
        """Compute what the large model computes in a step without drafts, for the keys and values.

        Args:
            batch: the step, settled.
            rows: as the large model has them: behind the last layer's attention nothing is computed of the others.
        """
        inputs = batch.inputs
        metadata = dataclasses.replace(batch.metadata)  # what the large model binds to it is not of this cache
        self.model(inputs.input_ids, inputs.positions, metadata, self.cache, rows)

    def propose(self, step: DraftStep) -> None:
        """One decode step for each draft, and one more that stores the last draft's keys and values: the next step has
        need of them if all drafts are right, and its first decode would else be one of two tokens."""
        count, most = step.drafts.shape
        mine = slice(None), slice(count)
        slots, positions, lengths = self._slots[mine], self._positions[mine], self._lengths[mine]
        slots.copy_(step.metadata.slot_mapping.view(count, -1).t())
        positions.copy_(step.positions.t())
        lengths.copy_((positions + 1) * (slots >= 0))  # nothing is computed of sequences with fewer drafts
        draws, drawn = self._draws[mine], self._drawn[mine]
        draws.copy_(step.sampling.steps + self._places)
        tokens = step.ids[:, 0].contiguous()
        for place in range(most + 1):
            metadata = dataclasses.replace(
                step.metadata,
                segments=Segments(decodes(count)),
                slot_mapping=slots[place],
                seq_lens=lengths[place],
                verify_starts=None,
                decode_order=None,
            )
            hidden = self.model(tokens, positions[place], metadata, self.cache)
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
    """What the configuration's draft model is; ``None`` without one. Only its ``config.json`` is read.

    Args:
        spec: of the large model.
        limit: the longest sequence that may come.

    Raises:
        ValueError: a draft model that is not there, or that does not fit the large one.
    """
    speculative = config.speculative_config
    if speculative is None or speculative.method != "draft_model":
        return None
    name = f"speculative_config: model={speculative.model!r}"
    if not (spec.causal and spec.logits):
        raise ValueError(f"{name}: {spec.architecture} generates no text that could be drafted; leave it out")
    try:
        draft = read_spec(_folder(config))
    except ValueError as error:
        raise ValueError(f"{name} cannot be the draft model: {error}") from error
    if not isinstance(draft, ModelSpec) or not (draft.causal and draft.logits):
        raise ValueError(
            f"{name}: {draft.architecture} cannot draft; take a model that generates text and has a family here "
            "(docs/models.md)"
        )
    if draft.vocab_size != spec.vocab_size:
        raise ValueError(
            f"{name} has a vocabulary of {draft.vocab_size} tokens, the model one of {spec.vocab_size}: they must be "
            "the same; take a smaller model of the same series"
        )
    if draft.max_position_embeddings < limit:
        raise ValueError(
            f"{name} has max_position_embeddings={draft.max_position_embeddings}, and max_model_len is {limit}: set "
            f"max_model_len={draft.max_position_embeddings}, or take a draft model for longer texts"
        )
    return draft


def load_draft(
    config: EngineConfig, spec: ModelSpec | None, *, dtype: torch.dtype, device: torch.device, limit: int
) -> CausalLM | None:
    """The draft model that :func:`read_draft_spec` described, in the large one's dtype.

    Raises:
        ValueError: weights that do not match the configuration; the message names the model and a tensor.
    """
    if spec is None:
        return None
    model = config.model
    try:
        return load_model(
            _folder(config),
            spec,
            dtype=dtype,
            device=device,
            max_model_len=limit,
            load_format=model.load_format,
            seed=model.seed,
            allow_nan=model.allow_nan,
        )
    except ValueError as error:
        assert config.speculative_config is not None  # it has a draft model
        raise ValueError(f"speculative_config: model={config.speculative_config.model!r}: {error}") from error


def _folder(config: EngineConfig) -> Path:
    speculative = config.speculative_config
    assert speculative is not None and speculative.model is not None  # it was checked
    return checkpoint.resolve(speculative.model, speculative.revision)

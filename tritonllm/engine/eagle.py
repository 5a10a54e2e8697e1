"""Drafts of an EAGLE head (:mod:`tritonllm.models.eagle`), which goes on from the large model's hidden states.

In the slot of each token lie the head's keys and values of the pair of this token and the hidden state of the place
before. (Published code numbers pairs by the hidden state's place, one less: rotations know differences only.) So what
lies in a block follows from the tokens up to there, and a block that the prefix cache finds again is whole in both
caches. Where the hidden state of the place before is not known (a sequence's first token, the first one behind cached
blocks or of a further chunk of a prompt) zeros stand for it: these single places draft a little worse.

In a step that verifies, the head guesses from its own states, one decode step for each draft. Behind the large model's
pass it computes the same tokens once more from the true states, and replaces what it had stored.
"""

import dataclasses

import torch

from tritonllm.engine.draft_model import DraftModel
from tritonllm.engine.drafters import DraftStep
from tritonllm.engine.inputs import Batch
from tritonllm.layers.metadata import AttentionMetadata
from tritonllm.models.eagle import EagleHead
from tritonllm.models.interface import CausalLM

NOWHERE = -(1 << 30)  # a position from which none of a sequence is near


def make_draft(model: CausalLM | None, seats: int, drafts: int, device: torch.device) -> DraftModel | None:
    """What drafts with a model or a head, if there is one. Arguments as of :class:`DraftModel`."""
    if isinstance(model, EagleHead):
        return EagleDrafter(model, seats, drafts, device)
    return None if model is None else DraftModel(model, seats, drafts, device)


class EagleDrafter(DraftModel):
    """What :class:`DraftModel` is for a model of its own."""

    stores_last = False  # the true states come behind the large model's pass, for all tokens of the step
    wants_all = True

    def __init__(self, model: EagleHead, seats: int, drafts: int, device: torch.device) -> None:
        super().__init__(model, seats, drafts, device)
        self._head = model
        # Of each seat, and of padding's rows, hidden states from a position on: what the last step computed of it, and
        # the one before, so that the same step can run again.
        hidden = model.spec.hidden_size
        self._features = torch.zeros(seats + 1, drafts + 2, hidden, dtype=model.dtype, device=device)
        self._firsts = torch.full((seats + 1,), NOWHERE, dtype=torch.int64, device=device)

    def begin(self, step: DraftStep) -> torch.Tensor:
        """The states before the last tokens, ``[B, hidden]``."""
        return self._before(step.seats, step.ends)

    def compute(
        self, tokens: torch.Tensor, carried: torch.Tensor | None, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One decode step, whose states are those before the next one's tokens."""
        assert carried is not None  # the step has begun
        hidden = self._head.compute(tokens, carried, positions, metadata, self.cache)
        return hidden, hidden

    def follow(self, batch: Batch, rows: torch.Tensor | None, hidden: torch.Tensor) -> None:
        """Compute the step's tokens from the large model's states.

        Args:
            batch: the step, settled.
            rows: tokens that something is computed of behind the layer's attention; ``None`` for all.
            hidden: ``[T, hidden]``, of the large model.
        """
        inputs = batch.inputs
        verifies = batch.metadata.segments.verify.sequences > 0
        before = self._of_verified(batch, hidden) if verifies else self._of_others(batch, hidden)
        metadata = dataclasses.replace(batch.metadata)
        self._head.compute(inputs.input_ids, before, inputs.positions, metadata, self.cache, rows)

    def _of_verified(self, batch: Batch, hidden: torch.Tensor) -> torch.Tensor:
        """States before each token of a step with drafts; notes those of its tokens."""
        seats, ends = batch.inputs.seats, batch.inputs.starts
        mine = hidden.view(len(seats), -1, hidden.shape[1])
        states = torch.cat([self._before(seats, ends)[:, None], mine], 1)
        place = self._rows_of(seats)
        self._features[place] = states
        self._firsts[place] = ends.long() - 1
        return states[:, :-1].flatten(0, 1)

    def _of_others(self, batch: Batch, hidden: torch.Tensor) -> torch.Tensor:
        """The same of a step of decodes and of prompts."""
        inputs, (decode, _, chunk) = batch.inputs, batch.metadata.segments
        seats, at, ends, count = inputs.seats, inputs.logit_rows, inputs.starts, len(hidden)
        before = hidden.new_zeros(count + 1, hidden.shape[1])  # one more, for what is nobody's
        before[1:count] = hidden[: count - 1]
        if chunk.sequences:  # those of no tokens begin where the next one does, or behind all
            firsts = decode.tokens + inputs.cu_seqlens_q[:-1].long()
            before.index_fill_(0, firsts, 0.0)  # what assigning a number would copy from the host, a capture refuses
        if decode.tokens:
            mine = torch.where((seats >= 0) & (at < decode.tokens), at, count)
            before[mine] = self._before(seats, ends)
        place = self._rows_of(seats)
        self._features[place, 0] = before[at]
        self._features[place, 1] = hidden[at]
        self._firsts[place] = ends.long() - 1
        return before[:count]

    def _before(self, seats: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """States of the places before these positions ``[B]``, as far as they are known; else zeros."""
        row = self._rows_of(seats)
        at = positions.long() - 1 - self._firsts[row]
        known = (at >= 0) & (at < self._features.shape[1])
        return self._features[row, at.clamp(0, self._features.shape[1] - 1)] * known[:, None]

    def _rows_of(self, seats: torch.Tensor) -> torch.Tensor:
        return torch.where(seats < 0, len(self._firsts) - 1, seats).long()

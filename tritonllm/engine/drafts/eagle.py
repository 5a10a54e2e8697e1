"""Drafts of an EAGLE head (:mod:`tritonllm.models.eagle`), which goes on from the large model's hidden states.

What is said of these here holds as well of the features that an EAGLE-3 head has in their place.

In the slot of each token lie the head's keys and values of the pair of this token and the hidden state of the place
before. (Published code numbers pairs by the hidden state's place, one less: rotations know differences only.) So what
lies in a block follows from the tokens up to there, and a block that the prefix cache finds again is whole in both
caches. Zeros stand for the state before a sequence's first token.

The state before a step's first token was computed by a step before. It is kept by seat for what follows a sampled
token, for any of the drafts may have been accepted. And it is kept by block: of its last token, for those who find the
block in the prefix cache, perhaps in the step that computes it; and of the last token so far, for the next chunk of a
prompt. (Blocks that come back from the host bring keys and values only: the first token behind them drafts worse.)

In a step that verifies, the head guesses from its own states, one decode step for each draft. Behind the large model's
pass it computes the same tokens once more from the true states, and replaces what it had stored.
"""

import dataclasses
from collections.abc import Sequence

import torch

from tritonllm.engine.data.inputs import Batch
from tritonllm.engine.drafts.draft_model import DraftModel
from tritonllm.engine.drafts.draft_tree import DraftTree
from tritonllm.engine.drafts.drafters import DraftStep
from tritonllm.layers.metadata import AttentionMetadata, KVCacheView
from tritonllm.models.eagle import EagleHead
from tritonllm.models.interface import CausalLM

NOWHERE = -(1 << 30)  # a position from which none of a sequence is near


def make_draft(
    model: CausalLM | None, seats: int, drafts: int, device: torch.device, tree: DraftTree | None = None
) -> DraftModel | None:
    """What drafts with a model or a head, if there is one. Arguments as of :class:`DraftModel`."""
    if isinstance(model, EagleHead):
        return EagleDrafter(model, seats, drafts, device, tree)
    return None if model is None else DraftModel(model, seats, drafts, device, tree)


class EagleDrafter(DraftModel):
    """What :class:`DraftModel` is for a model of its own."""

    stores_last = False  # the true states come behind the large model's pass, for all tokens of the step

    def __init__(
        self, model: EagleHead, seats: int, drafts: int, device: torch.device, tree: DraftTree | None = None
    ) -> None:
        super().__init__(model, seats, drafts, device, tree)
        self._head = model
        # Of each seat, and of padding's rows, hidden states from a position on: what the last step computed of it, and
        # the one before, so that the same step can run again.
        hidden = model.spec.hidden_size
        self._features = torch.zeros(seats + 1, drafts + 2, hidden, dtype=model.dtype, device=device)
        self._firsts = torch.full((seats + 1,), NOWHERE, dtype=torch.int64, device=device)
        self.extra_bytes = 2 * hidden * model.dtype.itemsize
        self._block_tokens = 1  # as many as keys in a block of the head's cache: a head is whole on every rank
        self._of_blocks = torch.zeros(2, 1, hidden, dtype=model.dtype, device=device)

    def take_cache(self, cache: Sequence[KVCacheView]) -> None:
        super().take_cache(cache)
        blocks, self._block_tokens = cache[0].k.shape[:2] if cache else (0, 1)
        # states of each block's last token (0), and of the last one of an unfinished block (1); and of nobody's
        self._of_blocks = self._features.new_zeros(2, blocks + 1, self._features.shape[2])

    def begin(self, step: DraftStep) -> torch.Tensor:
        """The states before the last tokens, ``[B, hidden]``."""
        return self._before(step.seats, step.ends, step.metadata.block_tables)

    def compute(
        self, tokens: torch.Tensor, carried: torch.Tensor | None, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One decode step, whose states are those before the next one's tokens."""
        assert carried is not None  # the step has begun
        hidden = self._head.compute(tokens, carried, positions, metadata, self.cache)
        return hidden, hidden

    def advance(
        self, model: CausalLM, cache: Sequence[KVCacheView], batch: Batch, rows: torch.Tensor | None
    ) -> torch.Tensor:
        inputs = batch.inputs
        step = inputs.input_ids, inputs.positions, batch.metadata, cache
        wanted, features = self._head.observe(model, *step, rows)
        self.follow(batch, rows, features)
        return wanted

    def follow(self, batch: Batch, rows: torch.Tensor | None, hidden: torch.Tensor) -> None:
        """Compute the step's tokens from what the large model has computed.

        Args:
            batch: the step, settled.
            rows: tokens that something is computed of behind the layer's attention; ``None`` for all.
            hidden: ``[T, hidden]``, the features of all tokens.
        """
        inputs = batch.inputs
        self._note_blocks(batch.metadata.slot_mapping, hidden)
        verifies = batch.metadata.segments.verify.sequences > 0
        before = self._of_verified(batch, hidden) if verifies else self._of_others(batch, hidden)
        metadata = dataclasses.replace(batch.metadata)
        self._head.compute(inputs.input_ids, before, inputs.positions, metadata, self.cache, rows)

    def _of_verified(self, batch: Batch, hidden: torch.Tensor) -> torch.Tensor:
        """States before each token of a step with drafts; notes those of its tokens."""
        seats, ends = batch.inputs.seats, batch.inputs.starts
        mine = hidden.view(len(seats), -1, hidden.shape[1])
        first = self._before(seats, ends, batch.metadata.block_tables)
        states = torch.cat([first[:, None], mine], 1)
        place = self._rows_of(seats)
        self._features[place] = states
        self._firsts[place] = ends.long() - 1
        if self._tree is not None:
            return self._tree.states_before(first, hidden, mine.shape[1])
        return states[:, :-1].flatten(0, 1)

    def settle(self, batch: Batch, rows: int) -> None:
        """Noted are the states of the tree's tokens in their order, and those of blocks by the slots that they had."""
        assert self._tree is not None  # there is a verdict on one
        path, place = self._tree.path[:rows], self._rows_of(batch.inputs.seats[:rows])
        states = self._features[place]
        index = (path.clamp_min(0) + 1)[:, :, None].expand(-1, -1, states.shape[2])
        states = torch.cat([states[:, :1], states.gather(1, index)], 1)
        self._features[place] = states
        slots = batch.metadata.slot_mapping.view(-1, path.shape[1])[:rows]
        self._note_blocks(torch.where(path < 0, -1, slots).flatten(), states[:, 1:].flatten(0, 1))

    def _of_others(self, batch: Batch, hidden: torch.Tensor) -> torch.Tensor:
        """States before each token of a step of decodes and of prompts; notes those of its sequences' last tokens."""
        inputs, (decode, _, chunk) = batch.inputs, batch.metadata.segments
        seats, at, ends, count = inputs.seats, inputs.logit_rows, inputs.starts, len(hidden)
        before = hidden.new_zeros(count + 1, hidden.shape[1])  # one more, for what is nobody's
        before[1:count] = hidden[: count - 1]
        if chunk.sequences:
            self._continue_chunks(batch, before, hidden)
        if decode.tokens:
            mine = torch.where((seats >= 0) & (at < decode.tokens), at, count)
            tables = batch.metadata.block_tables[at.clamp_max(decode.sequences - 1)]
            before[mine] = self._before(seats, ends, tables)
        place = self._rows_of(seats)
        self._features[place, 0] = before[at]
        self._features[place, 1] = hidden[at]
        self._firsts[place] = ends.long() - 1
        return before[:count]

    def _note_blocks(self, slots: torch.Tensor, hidden: torch.Tensor) -> None:
        """States of tokens that end a block."""
        size, nobody = self._block_tokens, self._of_blocks.shape[1] - 1
        ends = (slots >= 0) & (slots % size == size - 1)
        self._of_blocks[0, torch.where(ends, slots // size, nobody)] = hidden

    def _continue_chunks(self, batch: Batch, before: torch.Tensor, hidden: torch.Tensor) -> None:
        """Write into ``before`` the states before the chunks' first tokens, and note those of their last ones."""
        inputs, (decode, _, _), size = batch.inputs, batch.metadata.segments, self._block_tokens
        count, nobody = len(hidden), self._of_blocks.shape[1] - 1
        bounds = decode.tokens + inputs.cu_seqlens_q.long()
        first, last = bounds[:-1], bounds[1:] - 1
        empty = last < first  # begins where the next one does, or behind all
        position = inputs.positions[first.clamp_max(count - 1)]
        states = self._behind_blocks(position, batch.metadata.block_tables[decode.sequences :])
        before[torch.where(empty, count, first)] = states
        last = last.clamp_min(0)
        slots = batch.metadata.slot_mapping[last]
        mine = torch.where(empty | (slots < 0), nobody, slots // size)
        self._of_blocks[1, mine] = hidden[last]

    def _before(self, seats: torch.Tensor, positions: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
        """States of the places before these positions ``[B]`` of sequences with these ``tables[B, M]``.

        Where a block begins, that of the block before it, which is right also for one that was found in the cache."""
        row, positions = self._rows_of(seats), positions.long()
        at = positions - 1 - self._firsts[row]
        known = (at >= 0) & (at < self._features.shape[1]) & (positions % self._block_tokens != 0)
        of_seats = self._features[row, at.clamp(0, self._features.shape[1] - 1)]
        return torch.where(known[:, None], of_seats, self._behind_blocks(positions, tables))

    def _behind_blocks(self, positions: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
        """States of the places before these positions, as far as they are kept with blocks; zeros for position 0."""
        place = (positions - 1).clamp(0, tables.shape[1] * self._block_tokens - 1) // self._block_tokens
        block = tables.gather(1, place[:, None])[:, 0].long()
        unfinished = (positions % self._block_tokens != 0).long()
        return self._of_blocks[unfinished, block] * (positions > 0)[:, None]

    def _rows_of(self, seats: torch.Tensor) -> torch.Tensor:
        return torch.where(seats < 0, len(self._firsts) - 1, seats).long()

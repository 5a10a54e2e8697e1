"""Drafts that form a tree: several for one place, of which one at most can be right.

The tree is static (``speculative_token_tree``), the same in each step. Its nodes stand level by level behind the last
token, where a chain of as many drafts would stand, and their keys and values lie in the slots of that chain. What
differs is the position, which is that of the last token plus the node's depth, and that a node sees its ancestors and
not all nodes before it. The verdict is a path through the tree. Behind it the path's keys and values, and whatever else
lies by position, are moved to where the tokens of a chain would have left them; so no later step knows of trees.

The drafter computes the tree level by level, each time from the last token on: the levels before are a few tokens more
of a pass that reads all weights either way, and nothing has to be kept between the passes.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch

from tritonllm.config.sampling_rows import SamplingRows
from tritonllm.engine.data.inputs import Batch
from tritonllm.engine.drafts.drafters import DraftStep
from tritonllm.kernels import sample
from tritonllm.layers.metadata import AttentionMetadata
from tritonllm.layers.segments import Segments, verified
from tritonllm.models.interface import CausalLM


class Level(NamedTuple):
    """Nodes of one depth that have children. Tokens are numbered from the last one, 0; node j is token j + 1.

    Attributes:
        tokens: up to and with this level.
        inner: ``[I]`` int64, the tokens of these nodes.
        ranks: for each child number, which of them have such a child ``[C]`` int64, and that child's token ``[C]``.
    """

    tokens: int
    inner: torch.Tensor
    ranks: list[tuple[torch.Tensor, torch.Tensor]]


class Grower(Protocol):
    """What of a draft model makes a tree, see :class:`~tritonllm.engine.drafts.draft_model.DraftModel`."""

    model: CausalLM
    stores_last: bool

    def begin(self, step: DraftStep) -> torch.Tensor | None: ...

    def compute(
        self, tokens: torch.Tensor, carried: torch.Tensor | None, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> tuple[torch.Tensor, torch.Tensor | None]: ...


class DraftTree:
    """One tree, on a device.

    Args:
        parents: for each node, the index of the node that it follows, an earlier one, or -1; level by level.
        seats: the most sequences of a step.
        device: the device that steps run on.
        attention_chunk: see :class:`~tritonllm.layers.attention.AttentionSpec`, of the model that verifies. Nodes in
            another chunk than the last token are no drafts: their ancestors' keys do not begin with a block.

    Attributes:
        depth: the depth of the deepest node; those behind the last token have 1.
        parents: ``[1, G]`` int32.
        parent_tokens: ``[G]`` int64, each node's parent counted as a token: 0 is the last token, node i is ``i + 1``.
        path: ``[seats, G + 1]`` int64, the tokens that the last verdict has gone through, 0 first, then -1.
    """

    def __init__(
        self, parents: Sequence[int], seats: int, device: torch.device, attention_chunk: int | None = None
    ) -> None:
        self._chunk = attention_chunk
        depths, masks = [0], [1]
        for node, parent in enumerate(parents):
            depths.append(depths[parent + 1] + 1)
            masks.append(masks[parent + 1] | 1 << node + 1)
        self.depth = max(depths)
        self.parents = torch.tensor([parents], dtype=torch.int32, device=device)
        self.parent_tokens = self.parents[0].long() + 1
        self.path = torch.full((seats, len(depths)), -1, dtype=torch.int64, device=device)
        self._depths = torch.tensor(depths, dtype=torch.int64, device=device)
        signed = [mask - (1 << 32 if mask >> 31 else 0) for mask in masks]
        self._masks = torch.tensor(signed, dtype=torch.int32, device=device)
        self._nodes = torch.arange(len(parents), dtype=torch.int32, device=device)
        self._places = torch.arange(len(depths), dtype=torch.int64, device=device)
        self._seats = torch.arange(seats, dtype=torch.int64, device=device)
        self._levels = [_level(parents, depths, depth, device) for depth in range(self.depth)]
        widest = max(len(level.inner) for level in self._levels)
        self._workspace = torch.zeros(seats * widest, dtype=torch.int32, device=device)

    def lay_out(self, batch: Batch) -> Batch:
        """A settled step with what its drafts see of each other; writes their positions, and how many there may be."""
        count = batch.metadata.segments.verify.sequences
        positions = batch.inputs.positions.view(count, -1)
        # those of a chain end where a sequence must, and no node is deeper than its place in the chain
        positions.copy_(torch.minimum(positions, positions[:, :1] + self._depths))
        if self._chunk is not None:  # level by level: those that remain are the first ones
            chunks, allowed = positions // self._chunk, batch.inputs.drafts
            allowed.copy_(torch.minimum(allowed, (chunks == chunks[:, :1]).sum(1) - 1))
        return replace(batch, metadata=replace(batch.metadata, tree_mask=self._masks.repeat(count)))

    def propose(self, drafter: Grower, step: DraftStep) -> None:
        """Write the step's drafts. The children of a node are what would be drawn behind it with the noise of that
        place, then what would be if that were not there, and so on: of greedy requests the likeliest tokens."""
        count, ids = len(step.drafts), step.ids
        ids[:, 1:] = 0
        first, states = drafter.begin(step), None
        for level in self._levels:
            before = None if first is None else self.states_before(first, states, level.tokens)
            hidden, states = self._compute(drafter, step, level.tokens, before)
            rows = hidden.view(count, level.tokens, -1).index_select(1, level.inner).flatten(0, 1)
            self._draw(drafter.model.compute_logits(rows), step.sampling, level, ids)
        step.drafts.copy_(torch.where(self._nodes < step.counts[:, None], ids[:, 1:], -1))
        ids[:, 1:].copy_(step.drafts.clamp_min(0))
        if drafter.stores_last:
            self._compute(drafter, step, ids.shape[1], None)

    def states_before(self, first: torch.Tensor, states: torch.Tensor | None, tokens: int) -> torch.Tensor:
        """``[B tokens, hidden]``, the states before the first so many tokens of each sequence: ``first[B, hidden]`` for
        the last token, and for each node that of its parent among ``states[B N, hidden]``, N tokens of each."""
        if states is None:
            return first
        known = states.view(len(first), -1, states.shape[1]).index_select(1, self.parent_tokens[: tokens - 1])
        return torch.cat([first[:, None], known], 1).flatten(0, 1)

    def begin(self, rows: int) -> torch.Tensor:
        """A path through the tree in torch, which :meth:`follow` goes on with: the tokens where so many rows are."""
        self.path[:rows].fill_(-1)
        self.path[:rows, 0] = 0
        return self._seats[:rows] * 0

    def follow(
        self, place: int, at: torch.Tensor, tokens: torch.Tensor, drafts: torch.Tensor, alive: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Go from the tokens ``at[R]``, that many places behind the last ones, to the children that are ``tokens[R]``.

        Returns:
            where each row is, and which of those ``alive[R]`` have such a child.
        """
        children = (self.parent_tokens == at[:, None]) & (drafts == tokens[:, None])
        alive = alive & children.any(1)
        at = torch.where(alive, children.int().argmax(1) + 1, 0)
        if place < self.depth:
            self.path[: len(at), place + 1] = torch.where(alive, at, -1)
        return at, alive

    def rows_of(self, logits: torch.Tensor, rows: int) -> torch.Tensor:
        """Those rows of ``logits[rows (G + 1), V]`` that the verdict's tokens were drawn from, in the order of a
        chain."""
        at = self.path[:rows].clamp_min(0) + self._seats[:rows, None] * self.path.shape[1]
        return logits.index_select(0, at.flatten())

    def moves(self, slots: torch.Tensor) -> torch.Tensor:
        """Where keys and values of the verdict's paths lie and belong: ``slots[R, G + 1]`` -> ``[depth, R, 2]``.

        The moves of one depth can run at the same time, those of the next one behind them: a token's place on the path
        is never behind its place in the tree, so nothing is overwritten that is still to be moved. -1: no move."""
        path = self.path[: len(slots)]
        moved = (path >= 0) & (path != self._places)
        sources = torch.where(moved, slots.gather(1, path.clamp_min(0)), -1)
        return torch.stack([sources, torch.where(moved, slots, -1)], -1)[:, 1 : self.depth + 1].transpose(0, 1)

    def no_moves(self) -> torch.Tensor:
        """Moves of no tokens, for the warm-up."""
        return torch.full((1, 1, 2), -1, dtype=torch.int64, device=self.path.device)

    def _compute(
        self, drafter: Grower, step: DraftStep, tokens: int, before: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The drafter's pass over the first tokens of each sequence."""
        count, all_tokens = step.ids.shape
        given = step.metadata
        metadata = replace(
            given,
            segments=Segments(verify=verified(count, tokens)),
            slot_mapping=_flat(given.slot_mapping.view(count, -1)[:, :tokens]),
            seq_lens=given.seq_lens - (all_tokens - tokens),
            verify_starts=torch.arange(count + 1, dtype=torch.int32, device=step.ids.device) * tokens,
            tree_mask=self._masks[:tokens].repeat(count),
        )
        return drafter.compute(_flat(step.ids[:, :tokens]), before, _flat(step.positions[:, :tokens]), metadata)

    def _draw(self, logits: torch.Tensor, sampling: SamplingRows, level: Level, ids: torch.Tensor) -> None:
        """Write the children of a level's nodes, whose logits ``[B I, V]`` are overwritten."""
        count, inner = len(ids), len(level.inner)
        rows = sampling.each(lambda column: _flat(column[:, None].expand(-1, inner)))
        rows = rows._replace(steps=_flat(sampling.steps[:, None] + self._depths[level.inner]))
        for rank, (which, into) in enumerate(level.ranks):
            drawn = sample(logits, *rows, workspace=self._workspace)
            ids.index_copy_(1, into, drawn.view(count, inner).index_select(1, which).to(ids.dtype))
            if rank + 1 < len(level.ranks):
                logits.scatter_(1, drawn[:, None], -torch.inf)


def _flat(columns: torch.Tensor) -> torch.Tensor:
    """Always in memory of its own: a view of one column may be flat already, with a stride that kernels do not take."""
    return columns.clone(memory_format=torch.contiguous_format).view(-1)


def _level(parents: Sequence[int], depths: Sequence[int], depth: int, device: torch.device) -> Level:
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        if depths[parent + 1] == depth:
            children.setdefault(parent + 1, []).append(node + 1)
    ranks = []
    for rank in range(max(map(len, children.values()))):
        pairs = [(place, mine[rank]) for place, mine in enumerate(children.values()) if rank < len(mine)]
        which, into = torch.tensor(pairs, dtype=torch.int64, device=device).unbind(1)
        ranks.append((which.contiguous(), into.contiguous()))
    tokens = sum(1 for d in depths if d <= depth)
    return Level(tokens, torch.tensor(list(children), dtype=torch.int64, device=device), ranks)

"""What a runner does about drafts: who proposes them, before a step verifies them, and what follows its verdict."""

from collections.abc import Sequence

import torch

from tritonllm.config.engine import EngineConfig
from tritonllm.dist.group import Group
from tritonllm.engine.cache.block_copies import BlockCopies
from tritonllm.engine.data.inputs import Batch, upload
from tritonllm.engine.data.step import SeatTokens
from tritonllm.engine.drafts.draft_model import DraftModel, draft_cost
from tritonllm.engine.drafts.draft_tree import DraftTree
from tritonllm.engine.drafts.drafters import Drafter, make_drafter
from tritonllm.engine.drafts.eagle import make_draft
from tritonllm.engine.schedule.speculation import most_verified
from tritonllm.engine.step.device_seats import DeviceSeats
from tritonllm.kernels.speculative.clock import note_time
from tritonllm.models.interface import CausalLM
from tritonllm.models.spec import ModelSpec


class StepDrafts:
    """Drafts of one runner's steps; without speculation it does nothing.

    Args:
        config: the configuration of the engine.
        model: the model whose tokens are drafted.
        draft: the draft model or head, loaded, if the configuration has one.
        max_model_len: the longest sequence that may come.
        device: the device that the models and drafts are on.
        proposes: whether this rank makes drafts; behind the first stage of a pipeline they come with a step.

    Attributes:
        most: how many drafts a sequence may have; 0 if there never are any.
        verified: the most sequences of a step that verifies drafts.
        tree: the tree that drafts form; ``None`` for a chain.
        model: a drafter that has weights and a cache of its own; ``None`` if there is none.
        drafter: proposes the drafts; ``None`` if this rank does not.
        cost: how long a decode step of the draft model takes, in decode steps of the model; 0 without one.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: CausalLM,
        draft: CausalLM | None,
        max_model_len: int,
        device: torch.device,
        *,
        proposes: bool,
    ) -> None:
        speculative, seats = config.speculative_config, config.scheduler.max_num_seqs
        self._device = device
        self.most = 0 if speculative is None else speculative.num_speculative_tokens
        self.verified = most_verified(speculative, config.scheduler)
        self.tree: DraftTree | None = None
        if speculative is not None and speculative.tree is not None:
            chunk = model.spec.attention_chunk if isinstance(model.spec, ModelSpec) else None
            self.tree = DraftTree(speculative.tree, seats, device, chunk)
        self.model: DraftModel | None = make_draft(draft, seats, self.most, device, self.tree)
        self.cost = 0.0 if draft is None else draft_cost(draft, model)
        self.drafter: Drafter | None = self.model
        if draft is None and proposes:
            self.drafter = make_drafter(speculative, max_model_len, model.spec.vocab_size, device)

    @property
    def look_back(self) -> bool:
        """The drafter wants all tokens of the sequences."""
        return self.most > 0 and self.model is None

    @property
    def remember(self) -> bool:
        """The drafter wants the outputs of requests that have ended."""
        return self.drafter is not None and self.drafter.remembers

    def propose(self, batch: Batch, seats: DeviceSeats, group: Group) -> Batch:
        """Put drafts into a step that verifies some, once its seats are settled; returns the step as it runs.

        Args:
            group: the ranks that share the model. The first one's drafts are taken, also of a draft model whose last
                bits differ between GPUs.
        """
        if not batch.metadata.segments.verify.sequences:
            return batch
        if self.tree is not None:
            batch = self.tree.lay_out(batch)
        if self.drafter is not None:
            note_time(seats.times, end=False)
            drafting = seats.draft_step(batch)
            self.drafter.propose(drafting)
            group.broadcast(drafting.drafts)
            group.broadcast(drafting.ids)
            note_time(seats.times, end=True)
        return batch

    def settle(self, batch: Batch, rows: int, copies: Sequence[BlockCopies]) -> None:
        """Leave behind a verdict on trees of so many rows what one on chains would have. Outside of captured steps,
        whose verdict may not be the last one, and before anything reads or copies a block of these sequences."""
        metadata = batch.metadata
        if self.tree is None or not metadata.segments.verify.sequences:
            return
        moves = self.tree.moves(metadata.slot_mapping.view(metadata.segments.verify.sequences, -1)[:rows])
        for of_model in copies:
            of_model.move_slots(moves)
        assert self.model is not None  # it has drafted them
        self.model.settle(batch, rows)

    def tell_tokens(self, new: Sequence[SeatTokens], seats: DeviceSeats) -> None:
        """Tell the drafter the tokens of requests that are new to their seats. In one copy: each takes a block of
        pinned memory, and a step may admit hundreds of requests."""
        past = [request.past for request in new if request.past is not None]
        there = upload([*(request.token_ids for request in new), *past], self._device)
        for request, tokens in zip(new, there, strict=False):
            seats.tell_tokens(request.seat, tokens)
        for output in there[len(new) :]:
            assert self.drafter is not None  # it remembers them
            self.drafter.remember(output)

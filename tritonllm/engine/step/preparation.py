"""What a runner does before the first request: it measures memory, runs every kernel once and captures steps."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from weakref import WeakMethod

import torch

from tritonllm.config.engine import EngineConfig
from tritonllm.dist.pipeline import Team
from tritonllm.engine.cache.caches import Caches
from tritonllm.engine.cache.layer_marks import LayerMarks
from tritonllm.engine.cache.memory_fit import blocks_that_fit
from tritonllm.engine.data.inputs import Batch, reserve_pinned
from tritonllm.engine.step.drawing import Drawing
from tritonllm.engine.step.graphs import GraphCapture, GraphLimits, StepGraphs
from tritonllm.engine.step.room_sizes import graph_sizes
from tritonllm.engine.step.stage_transfer import StageTransfer
from tritonllm.engine.step.step_drafts import StepDrafts
from tritonllm.engine.step.step_sizes import StepSizes
from tritonllm.engine.step.warm_up import Forward, StepLimits, ToTokens, WarmUp, Work
from tritonllm.layers.regime import Regimes
from tritonllm.models.fallback_decoder import TransformersDecoder
from tritonllm.models.interface import CausalLM


@contextmanager
def rehearsal_of(models: Sequence[CausalLM]) -> Iterator[None]:
    """Inside the block all of them rehearse."""
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(model.rehearsal())
        yield


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """The preparation of one runner, whose parts these are.

    It has methods of the runner, so the runner does not keep it: they would form a cycle, and a cycle keeps a dropped
    engine's memory until Python looks for it.

    Attributes:
        model: the model that the steps run.
        config: the configuration of the engine.
        device: the device that the model is on.
        team: the ranks that share the model.
        sizes: the bounds of the steps.
        regimes: the regimes of the lengths that steps can have.
        caches: the blocks of all models.
        drafts: tokens that are proposed, which steps verify.
        drawing: what follows the hidden states.
        stage_transfer: a stage's part of a step; ``None`` if there is one stage.
        passed_bytes: what is on its way to the next stage takes at most so many.
        advance: what this stage computes of a step: ``(batch, rows[R] or None) -> hidden``, ``[R, hidden]`` or all T.
        captured: a method of the runner: what a graph holds of a step.
        may_share: whether a step of so many decodes can come with a plan for their shared prefix.
    """

    model: CausalLM
    config: EngineConfig
    device: torch.device
    team: Team
    sizes: StepSizes
    regimes: Regimes
    caches: Caches
    drafts: StepDrafts
    drawing: Drawing
    stage_transfer: StageTransfer | None
    passed_bytes: int
    advance: Forward
    captured: Callable[[Batch], tuple[torch.Tensor, torch.Tensor | None]]
    may_share: Callable[[int], bool]

    def fit_num_blocks(self) -> int:
        """How many cache blocks fit: what the configuration grants, less what is in use once the largest step has run,
        less what graphs will take (docs/start.md).

        Raises:
            ValueError: not even one block fits.
        """
        cache, caches = self.config.cache, self.caches
        if cache.num_blocks is not None:
            return cache.num_blocks
        if self.device.type != "cuda":
            return max(1, cache.cpu_cache_bytes // caches.block_bytes)
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        caches.allocate(1)
        warm_up, deterministic = self.warm_up(), self.config.deterministic
        alone = deterministic and isinstance(self.model, TransformersDecoder)  # tokens run alone, one after the other
        with rehearsal_of(self.caches.models) if alone else nullcontext():
            warm_up.largest_steps(deterministic)
        captured = warm_up.captured_bytes(deterministic) if self.sizes.captures else 0
        caches.forget()
        reserved = captured + caches.reserved_bytes + self.passed_bytes
        also = "kv_offloading_size or the connector's max_bytes, which are of the GPU" if caches.tier_on_device else ""
        return blocks_that_fit(cache, caches.block_bytes, reserved, self.device, also)

    def warm_up(self) -> WarmUp:
        """The steps that are run before the first request."""
        scheduler, sizes = self.config.scheduler, self.sizes
        limits = StepLimits(
            block_tokens=sizes.block_tokens,
            max_model_len=sizes.max_model_len,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            padded=[scheduler.max_num_seqs + tokens for tokens in sizes.captured_tokens],
            drafts=sizes.drafts,
            verified=sizes.verified,
        )
        work = Work(*self._rehearsed, copy=self._warm_up_copies, may_share=self.may_share)
        return WarmUp(work, limits, self.regimes, self.device)

    @property
    def _rehearsed(self) -> tuple[Forward, ToTokens, ToTokens, Callable[[int], object]]:
        """What of :class:`Work` this stage has. The first of several draws from rows that the last one has made."""
        pipe, drawing = self.team.pipe, self.drawing
        if not pipe.first:
            return self.advance, len, len, int
        forward = self.advance if pipe.last else self._advance_and_pick
        return forward, drawing.warm_up, drawing.warm_up_drafts, drawing.warm_up_scores

    def _advance_and_pick(self, batch: Batch, rows: torch.Tensor | None) -> torch.Tensor:
        hidden = self.advance(batch, rows)
        return hidden if rows is None else hidden[rows]

    def _warm_up_copies(self) -> None:
        if self.stage_transfer is not None:
            self.stage_transfer.warm_up()
        self.caches.warm_up()
        if self.drafts.tree is not None:
            for copies in self.caches.copies:
                copies.move_slots(self.drafts.tree.no_moves())

    def _warm_up_draws(self) -> None:
        """The first of several stages draws outside of graphs, which visit these sizes elsewhere."""
        seats, sizes, each = self.config.scheduler.max_num_seqs, self.sizes, 1 + self.sizes.drafts
        shape = max(seats, sizes.verified * each), self.model.spec.hidden_size
        hidden = torch.zeros(shape, dtype=self.model.dtype, device=self.device)
        for rows in graph_sizes(seats):
            self.drawing.warm_up(hidden[:rows])
        for sequences in graph_sizes(sizes.verified) if sizes.drafts else []:
            self.drawing.warm_up_drafts(hidden[: sequences * each])

    def load_kernels(self) -> None:
        """Run every step of :meth:`warm_up` on the GPU, with one layer of each kind."""
        reserve_pinned()
        with rehearsal_of(self.caches.models):
            self.warm_up().run()
            if self.team.pipe.stages > 1 and self.team.pipe.first:
                self._warm_up_draws()

    def capture(self) -> StepGraphs:
        """Capture steps as CUDA graphs, once their kernels are loaded. They do not keep the runner."""
        sizes, team = self.sizes, self.team
        seats = self.config.scheduler.max_num_seqs
        drawn = sizes.drafts, sizes.verified, self.drawing.by_shards and team.pipe.stages == 1
        limits = GraphLimits(seats, sizes.captured_tokens, sizes.max_blocks, sizes.block_tokens, *drawn)
        rehearsal = partial(rehearsal_of, self.caches.models)
        capture = GraphCapture(rehearsal, self.device, threads=team.size * team.exchange.size > 1)
        weak = WeakMethod(self.captured)

        def work(batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
            captured = weak()
            assert captured is not None  # the runner has the graphs
            return captured(batch)

        layers = self.caches.marked_layers
        mark = partial(LayerMarks, layers) if layers else None
        return StepGraphs(work, limits, self.device, self.may_share, self.regimes, capture, mark)

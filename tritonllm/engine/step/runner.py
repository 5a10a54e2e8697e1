"""Runs steps on one device: owns the model and the paged cache, knows nothing of queues or text."""

import dataclasses
import time
from collections import deque
from contextlib import suppress
from functools import cache

import torch

from tritonllm.config.engine import EngineConfig
from tritonllm.dist.lockstep import Lockstep
from tritonllm.dist.pipeline import ALONE, Team
from tritonllm.engine.cache.caches import Caches
from tritonllm.engine.cache.engine_memory import EngineMemory
from tritonllm.engine.cache.host_copies import HostCopies
from tritonllm.engine.cache.kv_cache import block_bytes
from tritonllm.engine.data.agreement import AgreementSampler, Evidence
from tritonllm.engine.data.inputs import Batch, upload_step
from tritonllm.engine.data.orders import Order
from tritonllm.engine.data.plan import StepPlan
from tritonllm.engine.data.results import RunningStep
from tritonllm.engine.data.step import FREE, Restrictions, Step
from tritonllm.engine.step.builder import StepBuilder
from tritonllm.engine.step.common_steps import Need, room_for_rows
from tritonllm.engine.step.device_seats import DeviceSeats
from tritonllm.engine.step.drawing import Drawing, LaunchedStep
from tritonllm.engine.step.dummy_step import dummy_step
from tritonllm.engine.step.graphs import GraphKey, StepGraphs
from tritonllm.engine.step.pooler import Pooler
from tritonllm.engine.step.preparation import Preparation
from tritonllm.engine.step.processors import BatchProcessors
from tritonllm.engine.step.sampler import Sampler
from tritonllm.engine.step.shared_prefix import CascadePlanner
from tritonllm.engine.step.stage_transfer import StageTransfer
from tritonllm.engine.step.step_drafts import StepDrafts
from tritonllm.engine.step.step_sizes import StepSizes
from tritonllm.engine.step.warm_up import WarmUp
from tritonllm.layers.moe import MoESpec
from tritonllm.layers.regime import Regimes
from tritonllm.models.decoder import Decoder
from tritonllm.models.fallback_decoder import TransformersDecoder
from tritonllm.models.interface import CausalLM

NOTHING = dummy_step(0, [], rows=0, width=0)
ONE_OF_NOBODY = dummy_step(1, [], rows=0, width=1)  # kernels are loaded for that, but not for no token


class ModelRunner:
    """The model, its cache, its sampler and the captured steps.

    Args:
        model: the loaded model, on ``device``.
        config: the configuration of the engine.
        device: the device that the model is on.
        max_model_len: the longest sequence that may come.
        pooler: pools the prompts that are not continued; by default one without a head.
        draft: the draft model, loaded, on ``device``, if the configuration has one.
        memory: where the cache's memory is from; by default torch.
        team: the ranks that share the model. All run the same steps. Rank 0 draws, and the others of its stage get its
            tokens.

    Attributes:
        drafts: tokens that are proposed, which steps verify.
        caches: the blocks of all models, and the tier behind them.
    """

    def __init__(
        self,
        model: CausalLM,
        config: EngineConfig,
        device: torch.device,
        max_model_len: int,
        pooler: Pooler | None = None,
        draft: CausalLM | None = None,
        memory: EngineMemory | None = None,
        team: Team = ALONE,
    ) -> None:
        self._model = model
        self._team, self._group, self._pipe = team, team.group, team.pipe
        self._dtype = model.dtype
        self._config = config
        self._device = device
        self._block_tokens = config.block_tokens
        self._memory = memory
        self._graphs: StepGraphs | None = None
        self._undrawn: deque[LaunchedStep] = deque()
        seats = config.scheduler.max_num_seqs
        self.drafts = StepDrafts(config, model, draft, max_model_len, device, proposes=self._pipe.first)
        self.caches = Caches(model, self.drafts.model, config, device)
        history = max_model_len if self.drafts.look_back and self._pipe.first else 0
        self._seats = DeviceSeats(seats, self._block_tokens, device, most_drafts=self.drafts.most, history=history)
        vocab = model.spec.vocab_size
        self._processors: BatchProcessors | None = None
        if config.logits_processors and team.leads:
            self._processors = BatchProcessors(config.logits_processors, seats, vocab, device)
        tree, pooler = self.drafts.tree, pooler or Pooler(seats, model.spec.hidden_size, device)
        self._reports_processed = config.model.logprobs_mode == "processed_logprobs"
        how = {"reports_processed": self._reports_processed}
        sampler = Sampler(self._seats.drawn, vocab, self._processors, self._seats.verdict, tree, **how)
        self._drawing = Drawing(model, self._seats, sampler, pooler, self._group, device, tree)
        self._agreement = AgreementSampler(team.size)
        self._stage_transfer: StageTransfer | None = None
        if isinstance(model, Decoder | TransformersDecoder) and self._pipe.stages > 1:
            self._stage_transfer = StageTransfer(self._pipe, model, self._seats, team.size, device)
        self._sizes = StepSizes.of(config, model, self.drafts, max_model_len, self._pipe)
        self._planner: CascadePlanner | None = None
        shares = not (config.disable_cascade_attn or config.deterministic)  # a cascade merges two sums
        shares = shares and team.context.size == 1  # whose ranks merge theirs
        shares = shares and team.exchange.size == 1  # whose engines replay graphs of one room, shared prefix or not
        if config.cache.enable_prefix_caching and shares:  # else only siblings share
            each = block_bytes(model.spec, self.caches.dtype, self._block_tokens) // len(model.spec.caches)
            self._planner = CascadePlanner(self._block_tokens, each)
        self._builder = self._make_builder()
        if isinstance(model, Decoder):
            top_k = max((layer.mlp.top_k for layer in model.spec.layers if isinstance(layer.mlp, MoESpec)), default=0)
            team.exchange.reserve(model.spec.hidden_size, self._dtype, top_k, self._sizes.most_tokens)
        self._passed_bytes = (
            0 if self._stage_transfer is None else self._stage_transfer.reserve(self._sizes.most_tokens)
        )

    @property
    def stages(self) -> int:
        """How many stages the pipeline has: so many steps are launched before the first of them is drawn."""
        return self._pipe.stages

    @property
    def lockstep(self) -> Lockstep | None:
        """The engines with which this one takes its steps together; ``None`` if there are none."""
        return self._team.lockstep

    @property
    def undrawn(self) -> int:
        """Steps that were launched and not drawn."""
        return len(self._undrawn)

    @property
    def model(self) -> CausalLM:
        return self._model

    @property
    def num_graphs(self) -> int:
        """Steps captured as CUDA graphs."""
        return 0 if self._graphs is None else len(self._graphs)

    @property
    def _regimes(self) -> Regimes:
        if self._config.deterministic and self.drafts.most:  # its attention wants a bound that the device cannot pass
            return Regimes(lambda sequences: 0, self._sizes.max_model_len)
        return Regimes(cache(self._model.short_keys), self._sizes.max_model_len)  # captured steps ask in each step

    @property
    def host(self) -> HostCopies | None:
        """The cache's second tier; ``None`` without one, and before the start."""
        return self.caches.host

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, keys and values, the draft model's included."""
        return self.caches.block_bytes

    @property
    def host_slots(self) -> int:
        """Blocks that the cache's second tier keeps."""
        return self.caches.host_slots

    def _forward(self, batch: Batch, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Hidden states of these tokens ``[R]``, or of all."""
        inputs = batch.inputs
        return self._model(inputs.input_ids, inputs.positions, batch.metadata, self.caches.views, rows)

    def _make_builder(self) -> StepBuilder:
        seats = self._config.scheduler.max_num_seqs
        sizes, drafts = (seats, self._sizes.max_blocks, self._block_tokens), self.drafts
        wants = {"tell_tokens": drafts.look_back, "tell_past": drafts.remember}
        wants["finds_limits"] = (
            self._drawing.finds_limits and not self._reports_processed
        )  # a report asks for them, too
        tell = self._processors is not None
        return StepBuilder(*sizes, self._planner, tell_admitted=tell, drafts=drafts.most, **wants)

    def _may_share(self, sequences: int) -> bool:
        """Whether a step of so many decodes can come with a plan for their shared prefix."""
        return self._planner is not None and self._planner.may_plan(sequences, self._sizes.max_model_len)

    @property
    def _preparation(self) -> Preparation:
        return Preparation(
            model=self._model,
            config=self._config,
            device=self._device,
            team=self._team,
            sizes=self._sizes,
            regimes=self._regimes,
            caches=self.caches,
            drafts=self.drafts,
            drawing=self._drawing,
            stage_transfer=self._stage_transfer,
            passed_bytes=self._passed_bytes,
            advance=self._advance,
            captured=self._captured,
            may_share=self._may_share,
        )

    @torch.inference_mode()
    def fit_num_blocks(self) -> int:
        """How many cache blocks fit into the device's memory, or what the configuration says.

        Raises:
            ValueError: not even one block fits.
        """
        return self._preparation.fit_num_blocks()

    def warm_up(self) -> WarmUp:
        """The steps that are run before the first request."""
        return self._preparation.warm_up()

    @torch.inference_mode()
    def start(self, num_blocks: int, max_model_len: int) -> None:
        """Allocate the cache, compile the kernels and capture the decode steps.

        Args:
            num_blocks: how many blocks the cache gets, at most what :meth:`fit_num_blocks` said.
            max_model_len: the longest sequence that may come, if that is less than before.
        """
        if self._config.cache.calculate_kv_scales:  # by a prompt that does not depend on how many blocks fit
            self.caches.measure_scales(self._group, self._sizes.max_model_len)
        self._sizes = dataclasses.replace(self._sizes, max_model_len=max_model_len)
        self.caches.allocate(num_blocks, self._memory)
        self.caches.add_tier()
        self._builder = self._make_builder()
        if self._device.type != "cuda":
            return
        preparation = self._preparation
        preparation.load_kernels()
        if self._sizes.captures:
            self._graphs = preparation.capture()
        self._seats.times.zero_()

    def release_graphs(self, patience: float = 1.0) -> None:
        """Let go of captured steps, as this rank is about to leave the others: NCCL leaves no group while there is a
        graph with one of its collectives (:meth:`~tritonllm.dist.group.Group.shut`).

        Args:
            patience: seconds in which what was launched may end. What has not ended then waits for a rank that is gone,
                and keeps its graph.
        """
        until = time.monotonic() + patience
        with suppress(RuntimeError):  # the device is broken: nothing of it can be let go of
            while self._graphs is not None and not torch.cuda.current_stream(self._device).query():
                if time.monotonic() > until:
                    return
                time.sleep(1e-3)
            self._graphs = None

    def launch(self, plan: StepPlan) -> RunningStep | None:
        """Build a plan's step and start it; ``None`` if it is late: :meth:`draw` must follow before the next launch, as
        soon as the results of all steps before are taken in. With several stages every step is."""
        return self.begin(self.build(plan))

    def build(self, plan: StepPlan) -> Step:
        """A plan's step, once its new requests are known to processors of whole batches: they say whether they want to
        change its logits."""
        step = self._builder.build(plan)
        if step.shared is not None and self._graphs is not None and not step.segments.only_decodes:
            assert self._planner is not None  # who found it
            step = self._planner.unless_captured(step, self._graphs.key_for)
        if self._processors is not None:
            self._processors.admit(step.admitted)
            if self._processors.wanted(step):
                step = dataclasses.replace(step, redrawn=True)
        return step

    @torch.inference_mode()
    def begin(self, step: Step) -> RunningStep | None:
        """:meth:`run` it, but for the draw of a late one."""
        launched = self.compute(step)
        if not step.late and self.stages == 1:
            return self.finish(launched)
        self._undrawn.append(launched)
        return None

    @torch.inference_mode()
    def draw(self, late: Restrictions) -> RunningStep:
        """Draw the tokens of the oldest step that was launched and not drawn."""
        return self.finish(self._undrawn.popleft(), late)

    def tell(self, order: Order) -> None:
        """Does nothing: there are no other ranks."""

    def abandon(self) -> None:
        """Forget the steps that are not drawn, whose tokens nobody wants."""
        self._undrawn.clear()

    @torch.inference_mode()
    def follow(self, step: Step | None) -> Evidence | None:
        """What a rank that does not plan does with what it is sent.

        Args:
            step: the next one; ``None`` for the draw of the oldest, which several stages are told of.

        Returns:
            What is compared with rank 0's.
        """
        if step is None:
            if self._pipe.first:
                self.draw(FREE)
            return None
        if self._stage_transfer is None:
            return self.run(step).evidence
        launched = self.compute(step)
        if self._pipe.first:
            self._undrawn.append(launched)
        return self._stage_transfer.newest_evidence()

    @torch.inference_mode()
    def run(self, step: Step, late: Restrictions = FREE) -> RunningStep:
        """Start one step; its results can be waited for, and the next one may be started before."""
        return self.finish(self.compute(step), late)

    def compute(self, step: Step) -> LaunchedStep:
        """Start one step up to what its tokens are drawn from. But for several stages, no other may be started before
        :meth:`finish`. Both run in the inference mode of their callers: it takes 1.4 us to enter.

        Raises:
            LeftError, LockstepError: an engine with which this one takes its steps together did not come.
        """
        if step.parameters is not None:
            self._seats.tell(step.parameters)
        self.caches.run_copies(step)
        return self._compute(step, *self._room_for(step))

    @torch.inference_mode()
    def join(self) -> None:
        """Take the next step of the engines that wait for this one, without a request. Raises as :meth:`compute`."""
        key, rows = self._room_for(NOTHING)
        self._compute(NOTHING if key is not None else ONE_OF_NOBODY, key, rows)

    def _room_for(self, step: Step) -> tuple[GraphKey | None, int]:
        """The captured step that holds a step, if one does; else the room for the rows that engines exchange in it."""
        lockstep, graphs = self._team.lockstep, self._graphs
        if lockstep is None:
            return (None if graphs is None else graphs.key_for(step)), 0
        mine = Need.of(step, self._drawing.rows_of(step))
        need = Need.of_all(map(Need._make, lockstep.agree(mine)))
        key = None if graphs is None else graphs.key_for(step, need)
        return key, room_for_rows(need.rows, self._sizes.most_tokens) if key is None else 0

    def _compute(self, step: Step, key: GraphKey | None, exchange_rows: int) -> LaunchedStep:
        if self._graphs is not None and key is not None:
            captured = self._graphs.load(step, key)
            filled = self.caches.copies_of_filled(step, captured.marks)
            batch, narrowed = captured.batch, key.tokens > 0
            if self._stage_transfer is not None:
                self._stage_transfer.take_over(batch)
            captured.graph.replay()
            hidden, tokens = captured.hidden, captured.tokens
        else:
            batch, tokens, narrowed = self._upload(step).exchanging(exchange_rows), None, step.narrows
            filled = self.caches.copies_of_filled(step)
            if filled is not None and self.caches.tells_layers:
                batch = batch.telling(filled.computed)
            if self._stage_transfer is not None:
                self._stage_transfer.take_over(batch)
            hidden = self._advance(batch, batch.inputs.logit_rows if narrowed else None)
        if filled is not None:
            filled.end()
        drafted = self._seats.drafted(step.num_rows) if step.segments.verify.sequences else None
        launched = LaunchedStep(step, batch, hidden, tokens, drafted, narrowed, key is not None)
        return launched if self._stage_transfer is None else self._stage_transfer.pass_on(launched)

    def _upload(self, step: Step) -> Batch:
        bound = self._regimes.bound(step.segments, step.longest)
        return upload_step(step, self._drawing.rows_of(step), self._block_tokens, self._device, bound)

    def finish(self, launched: LaunchedStep, late: Restrictions = FREE) -> RunningStep:
        """Start what is left of a step.

        Args:
            late: what the host lets come next, if the step is late.
        """
        if self._stage_transfer is not None:
            launched = self._stage_transfer.take_back(launched)
        running, tokens = self._drawing.finish(launched, late)
        step, batch = launched.step, launched.batch
        if self._stage_transfer is None:
            running.evidence = self._agreement.of(step, batch, tokens)
        else:
            running.evidence = self._stage_transfer.settle()
        self.drafts.settle(batch, step.num_rows, self.caches.copies)
        if step.tokens:
            self.drafts.tell_tokens(step.tokens, self._seats)
        return running

    def _advance(self, batch: Batch, rows: torch.Tensor | None) -> torch.Tensor:
        """:meth:`_forward` from the state of the seats that the step before has left; behind the first stage they are
        not asked."""
        if not self._pipe.first:
            return self._forward(batch, rows)
        self._seats.advance(batch)
        batch, draft = self.drafts.propose(batch, self._seats, self._group), self.drafts.model
        if draft is None:
            return self._forward(batch, rows)
        return draft.advance(self._model, self.caches.views, batch, rows)

    def _captured(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What a graph holds of a step: of decodes alone all of it, from the last tokens to the next ones."""
        if batch.metadata.segments.chunk.tokens:
            return self._advance(batch, batch.inputs.logit_rows), None
        hidden = self._advance(batch, None)
        if not (self._model.spec.logits and batch.draws and self._pipe.stages == 1):
            return hidden, None
        return hidden, self._drawing.draw_captured(hidden, batch)

"""Runs steps on one device: owns the model and the paged cache, knows nothing of queues or text."""

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from weakref import WeakMethod

import torch

from tritonllm.config import EngineConfig
from tritonllm.dist.lockstep import Lockstep
from tritonllm.dist.pipeline import ALONE, Team
from tritonllm.engine.agreement import Evidence, Witness
from tritonllm.engine.builder import StepBuilder
from tritonllm.engine.caches import Caches
from tritonllm.engine.common_steps import Need, room_for_rows
from tritonllm.engine.device_seats import DeviceSeats
from tritonllm.engine.drawing import Drawing, LaunchedStep
from tritonllm.engine.dummy_step import dummy_step
from tritonllm.engine.graphs import GraphCapture, GraphKey, GraphLimits, StepGraphs
from tritonllm.engine.host_copies import HostCopies
from tritonllm.engine.inputs import Batch, reserve_pinned, upload_step
from tritonllm.engine.kv_cache import block_bytes
from tritonllm.engine.launch_policy import host_bound_tokens
from tritonllm.engine.layer_marks import LayerMarks
from tritonllm.engine.memory_fit import blocks_that_fit
from tritonllm.engine.passing import Passing
from tritonllm.engine.plan import StepPlan
from tritonllm.engine.pooler import Pooler
from tritonllm.engine.processors import BatchProcessors
from tritonllm.engine.results import RunningStep
from tritonllm.engine.room_sizes import graph_sizes, token_sizes
from tritonllm.engine.sampler import Sampler
from tritonllm.engine.shared_prefix import CascadePlanner
from tritonllm.engine.sleep import EngineMemory
from tritonllm.engine.step import FREE, Restrictions, Step
from tritonllm.engine.step_drafts import StepDrafts
from tritonllm.engine.warm_up import Forward, Limits, ToTokens, WarmUp, Work
from tritonllm.layers.moe import MoESpec
from tritonllm.layers.regime import Regimes
from tritonllm.models.decoder import Decoder
from tritonllm.models.interface import CausalLM

NOTHING = dummy_step(0, [], rows=0, width=0)
ONE_OF_NOBODY = dummy_step(1, [], rows=0, width=1)  # kernels are loaded for that, but not for no token


def _narrows(step: Step) -> bool:
    """Whether a step that is not captured computes only the rows that are sampled from to the end."""
    if step.wants_all or step.all_sampled or step.segments.verify.sequences:  # of drafts every token is sampled from
        return False
    return step.num_rows < step.segments.tokens  # else many continuations of few tokens: the start has seen these


@contextmanager
def rehearsal_of(models: Sequence[CausalLM]) -> Iterator[None]:
    """Inside the block all of them rehearse."""
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(model.rehearsal())
        yield


class ModelRunner:
    """The model, its cache, its sampler and the captured steps.

    Args:
        model: loaded, on ``device``.
        config: the engine's.
        device: where the model is.
        max_model_len: the longest sequence that may come.
        pooler: of prompts that are not continued; by default one without a head.
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
        self._block_size = config.block_tokens
        self._memory = memory
        self._graphs: StepGraphs | None = None
        self._undrawn: deque[LaunchedStep] = deque()
        self._max_model_len = max_model_len
        seats = config.scheduler.max_num_seqs
        self.drafts = StepDrafts(config, model, draft, max_model_len, device, proposes=self._pipe.first)
        self.caches = Caches(model, self.drafts.model, config, device)
        history = max_model_len if self.drafts.look_back and self._pipe.first else 0
        self._seats = DeviceSeats(seats, self._block_size, device, drafts=self.drafts.most, history=history)
        vocab = model.spec.vocab_size
        self._processors: BatchProcessors | None = None
        if config.logits_processors and team.leads:
            self._processors = BatchProcessors(config.logits_processors, seats, vocab, device)
        tree, pooler = self.drafts.tree, pooler or Pooler(seats, model.spec.hidden_size, device)
        sampler = Sampler(self._seats.drawn, vocab, self._processors, self._seats.verdict, tree)
        self._drawing = Drawing(model, self._seats, sampler, pooler, self._group, device, tree)
        self._witness = Witness(team.size)
        self._passing: Passing | None = None
        if isinstance(model, Decoder) and self._pipe.stages > 1:
            self._passing = Passing(self._pipe, model, self._seats, team.size, device)
        self._host_bound = self._pipe.least(host_bound_tokens(model.work))  # steps have equally many tokens everywhere
        self._planner: CascadePlanner | None = None
        shares = not (config.disable_cascade_attn or config.deterministic)  # a cascade merges two sums
        shares = shares and team.context.size == 1  # whose ranks merge theirs
        shares = shares and team.exchange.size == 1  # whose engines replay graphs of one room, shared prefix or not
        if config.cache.enable_prefix_caching and shares:  # else only siblings share
            each = block_bytes(model.spec, self._dtype, self._block_size) // model.spec.num_layers
            self._planner = CascadePlanner(self._block_size, each)
        self._builder = self._make_builder()
        if isinstance(model, Decoder):
            top_k = max((layer.mlp.top_k for layer in model.spec.layers if isinstance(layer.mlp, MoESpec)), default=0)
            team.exchange.reserve(model.spec.hidden_size, self._dtype, top_k, self._most_tokens)
        self._passed_bytes = 0 if self._passing is None else self._passing.reserve(self._most_tokens)

    @property
    def stages(self) -> int:
        """So many steps are launched before the first of them is drawn."""
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
    def _max_blocks(self) -> int:
        """Of a sequence, with what drafts behind its last token read."""
        return -(-(self._max_model_len + self.drafts.most) // self._block_size)

    @property
    def _regimes(self) -> Regimes:
        if self._config.deterministic and self.drafts.most:  # its attention wants a bound that the device cannot pass
            return Regimes(lambda sequences: 0, self._max_model_len)
        return Regimes(cache(self._model.short_keys), self._max_model_len)  # captured steps ask in each step

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

    @property
    def _most_tokens(self) -> int:
        """Of a step, padding included."""
        scheduler = self._config.scheduler
        captured = max(self._captured_tokens(), default=0)
        verified = self.drafts.verified * (1 + self.drafts.most)
        padded = scheduler.max_num_seqs + max(captured, 1)  # 1: the warm-up has a prompt's token beside all decodes
        return max(scheduler.max_num_batched_tokens, padded, verified)

    @torch.inference_mode()
    def fit_num_blocks(self) -> int:
        """How many cache blocks fit: what the configuration grants, less what is in use once the largest step has run,
        less what graphs will take (docs/start.md).

        Raises:
            ValueError: not even one block fits.
        """
        cache = self._config.cache
        if cache.num_blocks is not None:
            return cache.num_blocks
        if self._device.type != "cuda":
            return max(1, cache.cpu_cache_bytes // self.block_bytes)
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        self.caches.allocate(1)
        warm_up, deterministic = self.warm_up(), self._config.deterministic
        warm_up.largest_steps(deterministic)
        captures = self._model.supports_graphs and not self._config.enforce_eager
        captured = warm_up.captured_bytes(deterministic) if captures else 0
        self.caches.forget()
        reserved, on_device = captured + self.caches.reserved_bytes + self._passed_bytes, self.caches.tier_on_device
        also = "kv_offloading_size or the connector's max_bytes, which are of the GPU" if on_device else ""
        return blocks_that_fit(cache, self.block_bytes, reserved, self._device, also)

    def _captured_tokens(self) -> list[int]:
        """Room for prompt tokens in captured steps."""
        if not self._model.supports_graphs or self._config.enforce_eager:
            return []
        return token_sizes(self._config.scheduler.max_num_batched_tokens, self._host_bound)

    def _forward(self, batch: Batch, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Hidden states of these tokens ``[R]``, or of all."""
        inputs = batch.inputs
        return self._model(inputs.input_ids, inputs.positions, batch.metadata, self.caches.views, rows)

    def _make_builder(self) -> StepBuilder:
        seats = self._config.scheduler.max_num_seqs
        sizes, drafts = (seats, self._max_blocks, self._block_size), self.drafts
        wants = {"tell_tokens": drafts.look_back, "tell_past": drafts.remember}
        wants["finds_limits"] = self._drawing.finds_limits
        tell = self._processors is not None
        return StepBuilder(*sizes, self._planner, tell_admitted=tell, drafts=drafts.most, **wants)

    def warm_up(self) -> WarmUp:
        """The steps that are run before the first request."""
        scheduler = self._config.scheduler
        limits = Limits(
            block_size=self._block_size,
            max_model_len=self._max_model_len,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            padded=[scheduler.max_num_seqs + tokens for tokens in self._captured_tokens()],
            drafts=self.drafts.most,
            verified=self.drafts.verified,
        )
        work = Work(*self._rehearsed, copy=self._warm_up_copies, may_share=self._may_share)
        return WarmUp(work, limits, self._regimes, self._device)

    @property
    def _rehearsed(self) -> tuple[Forward, ToTokens, ToTokens, Callable[[int], object]]:
        """What of :class:`Work` this stage has. The first of several draws from rows that the last one has made."""
        if not self._pipe.first:
            return self._advance, len, len, int
        forward = self._advance if self._pipe.last else self._advance_and_pick
        return forward, self._drawing.warm_up, self._drawing.warm_up_drafts, self._drawing.warm_up_scores

    def _advance_and_pick(self, batch: Batch, rows: torch.Tensor | None) -> torch.Tensor:
        hidden = self._advance(batch, rows)
        return hidden if rows is None else hidden[rows]

    def _warm_up_copies(self) -> None:
        if self._passing is not None:
            self._passing.warm_up()
        self.caches.warm_up()
        if self.drafts.tree is not None:
            for copies in self.caches.copies:
                copies.move_slots(self.drafts.tree.no_moves())

    def _warm_up_draws(self) -> None:
        """The first of several stages draws outside of graphs, which visit these sizes elsewhere."""
        seats, each = self._config.scheduler.max_num_seqs, 1 + self.drafts.most
        size = max(seats, self.drafts.verified * each), self._model.spec.hidden_size
        hidden = torch.zeros(size, dtype=self._dtype, device=self._device)
        for rows in graph_sizes(seats):
            self._drawing.warm_up(hidden[:rows])
        for sequences in graph_sizes(self.drafts.verified) if self.drafts.most else []:
            self._drawing.warm_up_drafts(hidden[: sequences * each])

    def _may_share(self, sequences: int) -> bool:
        """Whether a step of so many decodes can come with a plan for their shared prefix."""
        return self._planner is not None and self._planner.may_plan(sequences, self._max_model_len)

    @torch.inference_mode()
    def start(self, num_blocks: int, max_model_len: int) -> None:
        """Allocate the cache, compile the kernels and capture the decode steps.

        Args:
            num_blocks: at most what :meth:`fit_num_blocks` said.
            max_model_len: the longest sequence that may come, if that is less than before.
        """
        self._max_model_len = max_model_len
        self.caches.allocate(num_blocks, self._memory)
        self.caches.add_tier()
        self._builder = self._make_builder()
        if self._device.type != "cuda":
            return
        reserve_pinned()
        with rehearsal_of(self.caches.models):
            self.warm_up().run()
            if self.stages > 1 and self._pipe.first:
                self._warm_up_draws()
        if self._model.supports_graphs and not self._config.enforce_eager:
            seats = self._config.scheduler.max_num_seqs
            drafts = self.drafts.most, self.drafts.verified
            drawn = *drafts, self._drawing.by_shards and self._pipe.stages == 1
            limits = GraphLimits(seats, self._captured_tokens(), self._max_blocks, self._block_size, *drawn)
            rehearsal = partial(rehearsal_of, self.caches.models)
            threads = self._team.size * self._team.exchange.size > 1
            capture = GraphCapture(rehearsal, self._device, threads=threads)
            weak = WeakMethod(self._captured)  # a cycle would keep a dropped engine's memory until Python looks for it

            def work(batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
                captured = weak()
                assert captured is not None  # the runner has the graphs
                return captured(batch)

            layers = self.caches.marked_layers
            mark = partial(LayerMarks, layers) if layers else None
            self._graphs = StepGraphs(work, limits, self._device, self._may_share, self._regimes, capture, mark)
        self._seats.times.zero_()

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

    def abandon(self) -> None:
        """Nobody wants the tokens of steps that are not drawn."""
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
        if self._passing is None:
            return self.run(step).evidence
        launched = self.compute(step)
        if self._pipe.first:
            self._undrawn.append(launched)
        return self._passing.newest_evidence()

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
        return key, room_for_rows(need.rows, self._most_tokens) if key is None else 0

    def _compute(self, step: Step, key: GraphKey | None, exchange_rows: int) -> LaunchedStep:
        if self._graphs is not None and key is not None:
            captured = self._graphs.load(step, key)
            filled = self.caches.copies_of_filled(step, captured.marks)
            batch, narrowed = captured.batch, key.tokens > 0
            if self._passing is not None:
                self._passing.take_over(batch)
            captured.graph.replay()
            hidden, tokens = captured.hidden, captured.tokens
        else:
            batch, tokens, narrowed = self._upload(step).exchanging(exchange_rows), None, _narrows(step)
            filled = self.caches.copies_of_filled(step)
            if filled is not None and self.caches.tells_layers:
                batch = batch.telling(filled.computed)
            if self._passing is not None:
                self._passing.take_over(batch)
            hidden = self._advance(batch, batch.inputs.logit_rows if narrowed else None)
        if filled is not None:
            filled.end()
        drafted = self._seats.drafted(step.num_rows) if step.segments.verify.sequences else None
        launched = LaunchedStep(step, batch, hidden, tokens, drafted, narrowed, key is not None)
        return launched if self._passing is None else self._passing.pass_on(launched)

    def _upload(self, step: Step) -> Batch:
        bound = self._regimes.bound(step.segments, step.longest)
        return upload_step(step, self._drawing.rows_of(step), self._block_size, self._device, bound)

    def finish(self, launched: LaunchedStep, late: Restrictions = FREE) -> RunningStep:
        """Start what is left of a step.

        Args:
            late: what the host lets come next, if the step is late.
        """
        if self._passing is not None:
            launched = self._passing.take_back(launched)
        running, tokens = self._drawing.finish(launched, late)
        step, batch = launched.step, launched.batch
        if self._passing is None:
            running.evidence = self._witness.of(step, batch, tokens)
        else:
            running.evidence = self._passing.settle()
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

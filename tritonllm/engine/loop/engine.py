"""The engine: requests in, one step at a time, outputs out.

With asynchronous scheduling the device always has the next step waiting: a step is planned and launched while the one
before it runs, and only then are the results of that one awaited. So what a call of :meth:`LLMEngine.step` returns was
launched by the call before. The device passes the new tokens on by itself (see
:mod:`tritonllm.engine.schedule.scheduler`).

An exception can come at any line of a step, Ctrl-C among them, and what the step had changed by then cannot be known.
So nothing of it is kept: the next call ends all requests with an error and begins with an empty pool and cache
(:meth:`LLMEngine._recover`). An error that belongs to one request ends that request only.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import torch

from tritonllm.config.beam_search_params import BeamSearchParams
from tritonllm.config.engine import EngineConfig, ModelConfig
from tritonllm.config.pooling_params import PoolingParams
from tritonllm.config.prompts import Prompt
from tritonllm.config.sampling_params import SamplingParams
from tritonllm.config.vllm_arguments import refuse
from tritonllm.dist.lockstep import ExpertPlace, Lockstep
from tritonllm.engine.cache.engine_memory import EngineMemory
from tritonllm.engine.data.orders import Order, weight_orders
from tritonllm.engine.data.outputs import EngineOutput
from tritonllm.engine.data.plan import describe
from tritonllm.engine.data.request import RequestStatus
from tritonllm.engine.data.stats import EngineStats
from tritonllm.engine.grammar.jump_forward import jump
from tritonllm.engine.grammar.restrictions import restrictions_of
from tritonllm.engine.loop.announcer import Announcer
from tritonllm.engine.loop.delivery import Delivery
from tritonllm.engine.loop.in_flight import InFlight
from tritonllm.engine.loop.new_requests import NewRequests, check_call
from tritonllm.engine.loop.readiness import BRIEF_WAIT, Unscheduled
from tritonllm.engine.loop.unfinished import Unfinished
from tritonllm.engine.ranks.backends import ranks_of
from tritonllm.engine.ranks.executor import GroupExecutor
from tritonllm.engine.ranks.served_model import model_executor
from tritonllm.engine.schedule.host_tier import HostTier
from tritonllm.engine.schedule.scheduler import Scheduler
from tritonllm.engine.start.arg_utils import EngineArgs
from tritonllm.engine.start.ranks import Executor
from tritonllm.engine.start.startup import load_parts
from tritonllm.engine.text.input_processor import InputProcessor, TokenizedPrompt
from tritonllm.engine.text.output_processor import RequestState, SequenceOutput
from tritonllm.engine.text.pooling import PoolingAbility
from tritonllm.engine.transfer.params import transfer_params
from tritonllm.engine.transfer.transfer import KVTransfer, TransferStats
from tritonllm.events import Present, Sink
from tritonllm.experts.load import ExpertLoad
from tritonllm.kernels.compile.monitor import MONITOR
from tritonllm.layers.expert_counts import ExpertCounts
from tritonllm.models.decoder import Decoder
from tritonllm.models.interface import CausalLM

logger = logging.getLogger(__name__)
STEP_FAILED = "the step failed"  # how the error begins of requests that were lost with a step


class LLMEngine:
    """Schedules, launches and reports; single-threaded, one step per call.

    Args:
        config: the configuration, see :class:`EngineConfig`; its values are resolved already.
        runner: a started model runner, or what runs steps on several ranks.
        scheduler: the scheduler, over the runner's cache.
        inputs: checks and tokenizes requests.
        pooling: what the model can pool; by default nothing.
        memory: the memory of weights and cache; by default that of an engine that cannot sleep.
        transfer: brings blocks that others have computed, and hands out its own; by default nothing does.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Executor,
        scheduler: Scheduler,
        inputs: InputProcessor,
        pooling: PoolingAbility | None = None,
        memory: EngineMemory | None = None,
        transfer: KVTransfer | None = None,
    ) -> None:
        self.config = config
        self.inputs = inputs
        self.pooling = pooling or PoolingAbility()
        self._runner = runner
        self._memory = memory or EngineMemory(None, config.model)
        self._scheduler = scheduler
        self._new = NewRequests(inputs, self.pooling, scheduler)
        sequences: dict[str, tuple[RequestState, SequenceOutput]] = {}
        self._events = Announcer(scheduler, sequences)
        self._unfinished = Unfinished(sequences, self._events)
        self._transfer = transfer
        self._unscheduled = Unscheduled()
        self._in_flight = InFlight(config.parallel.pipeline_parallel_size)
        self._ahead = config.parallel.pipeline_parallel_size - 1 + bool(config.scheduler.async_scheduling)
        self._whole = True  # no change is under way, and none was broken off
        self._failure = "the step was interrupted"  # why the last one was broken off
        self._prepared_at_ready = MONITOR.prepared
        self._steps = self._prompt_tokens = 0
        self._step_seconds = self._wait_seconds = 0.0
        self._jumps = not config.logits_processors  # those of whole batches may have to see each token drawn
        self._delivery = Delivery(scheduler, sequences, self.inputs.words, self._events)

    @classmethod
    def from_config(cls, config: EngineConfig, place: ExpertPlace | None = None) -> "LLMEngine":
        """Load the model and get ready to serve; see :func:`tritonllm.engine.start.startup.load_parts`.

        Args:
            place: among engines that share the model's experts, if there are others.

        Raises:
            ValueError: several engines are asked for, or as ``load_parts``.
        """
        if config.parallel.data_parallel_size > 1 and place is None:
            raise ValueError(
                f"data_parallel_size={config.parallel.data_parallel_size}: this is one engine; LLM, AsyncLLM and "
                "`tritonllm serve` run several"
            )
        return cls(*load_parts(config, ranks_of(config, place)))

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> "LLMEngine":
        """Load the model and get ready to serve, from arguments under vLLM's names."""
        return cls.from_config(engine_args.create_engine_config())

    @property
    def tokenizer(self) -> Any:
        return self.inputs.tokenizer

    def get_tokenizer(self) -> Any:
        return self.tokenizer

    @property
    def model_config(self) -> ModelConfig:
        return self.config.model

    @property
    def model(self) -> CausalLM:
        """The loaded model, to be looked at: of several ranks', the part of the first."""
        return self._runner.model

    @property
    def model_executor(self) -> SimpleNamespace:
        """vLLM's path to the model, ``model_executor.driver_worker.model_runner.model``, which takes weights."""
        return model_executor(self)

    def subscribe(self, sink: Sink) -> Callable[[], None]:
        """Call ``sink(event)`` in this thread with all that happens from now on (:mod:`tritonllm.events`). A sink that
        raises is dropped. Returns what ends the subscription."""
        return self._events.subscribe(sink)

    def present(self) -> Present:
        """What those who subscribe late have missed. Takes time in the number of cached blocks."""
        self._recover()
        return self._events.present()

    def add_request(
        self,
        request_id: str,
        prompt: Prompt | TokenizedPrompt,
        params: SamplingParams | BeamSearchParams | PoolingParams | None = None,
        *,
        lora_request: None = None,
        priority: int = 0,
    ) -> None:
        """Queue a request.

        Args:
            request_id: unique among the unfinished ones.
            prompt: text, token ids, or a dict of either; or what an :class:`InputProcessor` of the same engine has made
                of one, which is not checked again.
            params: how to continue it, by default as the model's ``generation_config.json`` says; or how to search for
                its best continuations, or to pool it. The engine keeps a copy.
            lora_request: none; there are no adapters yet.
            priority: lower is earlier, under the ``priority`` policy.

        Raises:
            ValueError: bad input; nothing was queued and nothing else is affected.
            AsleepError: the engine sleeps.
        """
        self._recover()
        self._memory.check_usable()
        if lora_request is not None:
            refuse("lora_request", lora_request)
        check_call(request_id, priority, self._scheduler.policy)
        self._unfinished.check_free(request_id)
        state = self._new.state(request_id, prompt, params, priority)
        self._unfinished.check_sequences(state)
        for sequence in state.sequences:
            self._scheduler.check(sequence.request)
        self._whole = False
        if self._transfer is not None:
            wishes = transfer_params(state.params)
            state.fetch = self._transfer.fetch(state.sequences[0].request, wishes, time.monotonic())
            state.offer = self._transfer.offer(wishes)
        if not self._unscheduled.take(state):
            self._schedule(state)
        self._unfinished.add(state)
        self._prompt_tokens += len(state.prompt_token_ids)
        if self._events.heard:
            self._events.added(state)
        self._whole = True

    def abort_request(self, request_ids: str | Iterable[str]) -> list[EngineOutput]:
        """End requests now and free their memory; unknown or finished ids are ignored. Returns their last outputs."""
        self._recover()
        outputs = []
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        self._whole = False
        for request_id in ids:
            output, state = self._unfinished.drop_lost(request_id), self._unfinished.get(request_id)
            if state is not None:
                if self._unscheduled.drop(request_id):
                    self._end_unscheduled(state, RequestStatus.FINISHED_ABORTED)
                for sequence in state.sequences:
                    self._scheduler.abort(sequence.request.request_id)
                output = self._unfinished.report(state)
            if output is not None:
                outputs.append(output)
        self._whole = True
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Whether :meth:`step` has something to run, or to report."""
        self._recover()
        return bool(self._unfinished)

    def get_num_unfinished_requests(self) -> int:
        """How many requests :meth:`step` has to run, or to report."""
        self._recover()
        return len(self._unfinished)

    def do_log_stats(self) -> None:
        """Write what the engine has counted to its log."""
        logger.info("%s", self.stats)

    def step(self) -> list[EngineOutput]:
        """Launch a step, if there is one, and wait for the oldest one if that leaves too many in flight.

        Returns:
            An output for each request that got a token or ended; nothing if no results were waited for.

        Raises:
            StepTimeoutError: the device did not finish a step within ``step_timeout`` seconds.
            Exception: whatever else stopped the step. All unfinished requests are lost with it; the next call returns
                their last outputs, with ``finish_reason="error"``. The engine can be used again, if the device can.
        """
        self._recover()
        lost = self._unfinished.take_lost()
        if lost:
            return lost
        self._whole, began = False, time.monotonic()
        try:
            outputs = self._advance()
        except BaseException as error:
            self._failure = f"{STEP_FAILED}: {type(error).__name__}: {error}"
            raise
        self._whole = True
        self._step_seconds += time.monotonic() - began
        return outputs

    @property
    def lockstep(self) -> Lockstep | None:
        """The engines with which this one takes its steps together; ``None`` if there are none. While it has no request
        it has to :meth:`join` them."""
        return self._runner.lockstep

    def join(self) -> None:
        """Take the step in which another engine waits for this one, without a request.

        Raises:
            LeftError, LockstepError: another did not come to it.
        """
        self._recover()
        self._runner.join()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prompts (the weights changed, say). ``False``: nothing was forgotten, as a request runs."""
        self._recover()
        stats = self._scheduler.stats
        if stats.num_free_blocks != stats.num_blocks:
            return False
        self._forget_cache()
        return True

    @property
    def is_sleeping(self) -> bool:
        """Whether weights or cache sleep."""
        return bool(self._memory.asleep)

    @property
    def takes_requests(self) -> bool:
        """Whether the engine is awake and has weights."""
        return not (self._memory.asleep or self._memory.weights_lost)

    def check_sleep(self, level: int = 1) -> None:
        """Check that the engine can sleep at this level, whatever runs.

        Raises:
            ValueError: :meth:`sleep` would refuse it.
        """
        self._memory.check_level(level)

    def sleep(self, level: int = 1) -> None:
        """Give the memory of weights and cache to others, until :meth:`wake_up`. Cached prompts are forgotten.

        Args:
            level: 1 keeps the weights on the host, 2 drops them.

        Raises:
            ValueError: the engine was made without ``enable_sleep_mode``, or there is no such level.
            RuntimeError: a request is unfinished, or the host has no room for the weights; the engine is awake.
        """
        self.check_sleep(level)
        self._require_idle("sleep")
        self._forget_cache()
        self._memory.sleep(level)

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Take the memory back. After level 1 the engine is as it was, but for its cached prompts.

        Args:
            tags: some of ``weights`` and ``kv_cache``; by default both.

        Raises:
            ValueError: an unknown tag.
            MemoryError: the device has not enough memory now; the engine sleeps on.
        """
        self._memory.wake_up(tags)

    def reload_weights(self, model: str | None = None) -> None:
        """Go on with other weights of the same architecture. Cached prompts are forgotten: their keys are old.

        Args:
            model: a folder or hub id; by default the engine's own, which is read again.

        Raises:
            ValueError: a model that does not fit or cannot be read; the old weights stay.
            RuntimeError: a request is unfinished, or the weights sleep.
        """
        self._require_idle("reload_weights")
        self._runner.tell(Order("reload", model or ""))
        self._memory.reload_weights(model)
        self._forget_cache()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Overwrite weights with those of a trainer, all of them or some. Cached prompts are forgotten.

        Args:
            weights: names, of files or of transformers' memory, and tensors, on any device. They may be made one at
                a time.

        Returns:
            The names.

        Raises:
            ValueError: a tensor that the model has no place for; those before it are written. Or the engine shares its
                experts with others.
            RuntimeError: a request is unfinished, or the weights sleep.
        """
        self._require_idle("load_weights")
        try:
            alone = self.config.parallel.world_size == 1
            return self._memory.load_weights(weights if alone else self._sent(weights))
        finally:
            self._forget_cache()

    def _sent(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights, each when the other ranks have got it, too."""
        for name, tensor in weights:
            self._memory.check_weight(name, tensor)
            for order in weight_orders(name, tensor):
                self._runner.tell(order)
            yield name, tensor

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        """Call a function with the worker of each rank, all at once: ``worker.rank``, and ``worker.model_runner.model``
        with the rank's part of the model and ``load_weights``. Of several ranks each loads its part there of whole
        tensors, and cached prompts are forgotten.

        Returns:
            What it returns, in the order of the ranks.

        Raises:
            ValueError: ranks that take no functions, or a function that other processes cannot import.
            RuntimeError: a request is unfinished, or the function failed on another rank.
        """
        self._recover()
        runner, kwargs = self._runner, kwargs or {}
        if not isinstance(runner, GroupExecutor):
            return [function(self.model_executor.driver_worker, *args, **kwargs)]
        self._require_idle("collective_rpc")
        try:
            return runner.call(function, args, kwargs)
        finally:
            self._forget_cache()

    def expert_load(self) -> ExpertLoad:
        """How many pairs (token, expert) each expert of each layer got since the start, or since
        :meth:`reset_expert_load`. Cached prompts are not computed, so they do not count; drafts do, accepted or not. In
        the last layer only the tokens count whose hidden states are wanted. Waits for the steps that were launched.

        Raises:
            ValueError: the engine does not count (``count_expert_load``).
        """
        return ExpertLoad(self.model.spec.architecture, self._expert_counts().read())

    def reset_expert_load(self) -> None:
        """Count from 0 again, behind the steps that were launched. Raises as :meth:`expert_load`."""
        self._expert_counts().reset()

    def _recover(self) -> None:
        """End all requests and begin anew if a change was broken off. May be broken off itself, and called again."""
        if self._whole:
            return
        self._unfinished.lose(self._failure)
        self._unscheduled.clear()
        if self._transfer is not None:
            self._transfer.reset()
        self._in_flight.clear()  # what they still write lies in blocks that later steps write before they read
        self._scheduler.reset()
        if self._scheduler.tier is not None and self._runner.host is not None:
            self._runner.host.give_up(self._scheduler.tier.last)
        self._runner.abandon()
        self._events.reset(self._failure)
        self._whole = True

    def _forget_cache(self) -> None:
        self._whole = False
        if self._scheduler.prefix_cache is not None:
            self._scheduler.prefix_cache.reset()
        if self._transfer is not None:
            self._transfer.rename()
        if self._events.heard:
            self._events.reset("the prefix cache was reset")
        self._whole = True

    def _require_idle(self, what: str) -> None:
        """Check that no request runs, and take in the steps that were launched ahead.

        Raises:
            RuntimeError: a request is unfinished.
        """
        if self.has_unfinished_requests():
            raise RuntimeError(f"{what}: requests are unfinished: let them end, or abort them")
        while self._in_flight:  # launched ahead of the ends of the last requests
            self.step()
        assert self._scheduler.stats.num_free_blocks == self._scheduler.stats.num_blocks

    def _expert_counts(self) -> ExpertCounts:
        """The counters of what the model's experts do.

        Raises:
            ValueError: the engine does not count.
        """
        model = self.model
        if not isinstance(model, Decoder) or model.expert_counts is None:
            raise ValueError(
                "this engine does not count what its experts do: make it with count_expert_load=True "
                "(--count-expert-load)"
            )
        return model.expert_counts

    def _schedule(self, state: RequestState) -> None:
        for sequence in state.sequences:
            self._scheduler.add(sequence.request)

    @staticmethod
    def _end_unscheduled(state: RequestState, status: RequestStatus) -> None:
        for sequence in state.sequences:
            sequence.request.status = status

    def _schedule_ready(self) -> list[EngineOutput]:
        """Hand requests to the scheduler that have what they waited for; wait for one if there is nothing else to do.
        Returns the last outputs of those whose grammars could not be compiled."""
        if not self._in_flight and not self._scheduler.num_running and not self._scheduler.num_waiting:
            if self.lockstep is None:
                self._unscheduled.wait()
            elif not self.lockstep.is_behind:
                self._unscheduled.wait(BRIEF_WAIT)
        if self._transfer is not None:
            self._transfer.follow(time.monotonic())
        failed = []
        for state, error in self._unscheduled.ready():
            if error is None:
                self._schedule(state)
                continue
            state.error = error
            self._end_unscheduled(state, RequestStatus.FINISHED_ERROR)
            failed.append(self._unfinished.report(state))
        return [output for output in failed if output is not None]

    def _advance(self) -> list[EngineOutput]:
        failed = self._schedule_ready() if self._unscheduled else []
        outputs = failed + self._run()
        if self._transfer is not None:
            idle = not self._scheduler.num_running
            self._transfer.after_step(self._runner.host, idle, time.monotonic())
        return outputs

    def _run(self) -> list[EngineOutput]:
        tier = self._scheduler.tier
        if tier is not None:
            self._follow_copies(tier)
        events, began = self._events, time.monotonic()
        plan = self._scheduler.schedule()
        if plan.scheduled:
            self._steps += 1
            if events.heard:
                events.planned(self._steps, plan, began)
                began = time.monotonic()
            running = self._runner.launch(plan)
            self._in_flight.add(plan, running)
            if events.heard:
                events.launched(self._steps, began, late=running is None)
        elif self.lockstep is not None and self.lockstep.is_behind:
            self._runner.join()
        self._draw(idle=not plan.scheduled)
        if len(self._in_flight) <= (self._ahead if plan.scheduled else 0):  # 0 if all wait for their grammars
            return []
        plan, step = self._in_flight.pop()
        began = time.monotonic()
        result = step.wait(self.config.step_timeout, lambda: describe(plan))
        ended = time.monotonic()
        self._wait_seconds += ended - began
        if tier is not None:
            tier.rates.took(plan.segments.chunk.tokens, time.monotonic())
        new_tokens = self._scheduler.update(plan, result.sampled)
        if events.heard:
            events.finished(self._steps - len(self._in_flight), plan, result, new_tokens, began, ended)
        touched, controlled = self._delivery.take(plan, result, new_tokens)
        self._draw()  # first, so that the device has work meanwhile
        if controlled and self._jumps:
            self._delivery.force(jump(controlled, self._scheduler), touched, self._steps)
        outputs = [self._unfinished.report(state) for state in touched.values()]
        return [output for output in outputs if output is not None]

    def _draw(self, idle: bool = False) -> None:
        """Draw the step that is due, if one is; there is nothing to launch if the engine is ``idle``."""
        undrawn = self._in_flight.due(idle)
        if undrawn is not None:
            restrictions = restrictions_of(undrawn.plan)
            if self._events.heard:
                self._events.restricted(self._steps - undrawn.behind, undrawn.plan, restrictions)
            self._in_flight.drawn(self._runner.draw(restrictions))

    def _follow_copies(self, tier: HostTier) -> None:
        assert self._runner.host is not None  # it has the tier's memory
        tier.done = self._runner.host.done
        if not self._in_flight:
            tier.rates.idle(time.monotonic())

    @property
    def is_saving(self) -> bool:
        """A connector takes blocks, of which :attr:`stats` will tell although no step is made."""
        return self._transfer is not None and self._transfer.is_saving

    @property
    def stats(self) -> EngineStats:
        self._recover()
        scheduler, drafts = self._scheduler.stats, self._delivery.drafts
        return EngineStats(
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._delivery.generated_tokens,
            forced_tokens=self._delivery.forced_tokens,
            prefix_cache_query_tokens=scheduler.prefix_cache_query_tokens,
            prefix_cache_hit_tokens=scheduler.prefix_cache_hit_tokens,
            preemptions=scheduler.preemptions,
            compilations_after_ready=MONITOR.prepared - self._prepared_at_ready,
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting + self._unscheduled.num_sequences,
            num_blocks=scheduler.num_blocks,
            num_free_blocks=scheduler.num_free_blocks,
            **scheduler.tier._asdict(),
            **(TransferStats() if self._transfer is None else self._transfer.stats)._asdict(),
            step_seconds=self._step_seconds,
            wait_seconds=self._wait_seconds,
            takes_requests=self.takes_requests,
            is_sleeping=self.is_sleeping,
            **asdict(drafts) | {"num_accepted_tokens_per_pos": tuple(drafts.num_accepted_tokens_per_pos)},
        )

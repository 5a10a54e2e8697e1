"""``AsyncLLM``: the engine in a process of its own, and an async generator for each request. Names are vLLM's."""

import asyncio
import functools
import operator
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tritonllm.config.beam_search_params import BeamSearchParams
from tritonllm.config.engine import EngineConfig
from tritonllm.config.pooling_params import PoolingParams
from tritonllm.config.prompts import Prompt
from tritonllm.config.sampling_params import SamplingParams
from tritonllm.config.vllm_arguments import no_adapter, only_false, only_none
from tritonllm.engine.data.asleep import AsleepError, check_rpc
from tritonllm.engine.data.outputs import PoolingRequestOutput, RequestOutput
from tritonllm.engine.data.request import AS_SAMPLING
from tritonllm.engine.data.stats import EngineStats
from tritonllm.engine.start.arg_utils import EngineArgs
from tritonllm.engine.text.chat import ChatOptions, Message
from tritonllm.engine.text.input_processor import InputProcessor, TokenizedPrompt
from tritonllm.engine.transfer.settings import check_connector
from tritonllm.experts.load import ExpertLoad
from tritonllm.serve.engines import request_messages
from tritonllm.serve.engines.collector import Collector
from tritonllm.serve.engines.engine_calls import EngineCalls
from tritonllm.serve.engines.engine_client import EngineDeadError, EngineLink
from tritonllm.serve.engines.inputs import import_tokenizers, input_processor
from tritonllm.serve.engines.messages import Abort, Add, News
from tritonllm.serve.engines.open_requests import Observer, OpenRequests
from tritonllm.serve.engines.pooling_messages import PoolingCollector
from tritonllm.serve.engines.profiling import ProfilerConfig
from tritonllm.serve.engines.replicas import Replicas, start_engines
from tritonllm.serve.engines.restarts import STARTING
from tritonllm.serve.engines.room import EngineRoom, QueueFullError, sequences_of
from tritonllm.serve.engines.shared_count import SharedCount
from tritonllm.serve.engines.tokenizing import Params, Tokenizing, numbered

__all__ = ["AsyncEngineArgs", "AsyncLLM", "EngineDeadError", "Observer", "QueueFullError", "StoppedError"]

T = TypeVar("T")
MAX_QUEUE = 1024  # sequences that may wait for a seat, by default


class StoppedError(RuntimeError):
    """The server ends, and does not wait for this request."""


@dataclass(kw_only=True, repr=False)
class AsyncEngineArgs(EngineArgs):
    """Arguments of :class:`AsyncLLM`, under vLLM's name; they are those of :class:`EngineArgs`."""


class AsyncLLM:
    """Serves requests of one event loop.

    A generator that is closed, or whose task is cancelled, aborts its request. At most ``max_num_seqs + max_queue``
    sequences are in the engine; a request beyond is refused with :class:`QueueFullError`.

    Args:
        config: the configuration of the engine.
        max_queue: how many sequences may wait for a seat.
        log_level: the level of the engine process's messages on stderr; ``None``: it writes none.
        link: a link to engines that were started already, by another process perhaps; by default they are started here.
        profiler_config: how the engine may write traces (:meth:`start_profile`), with vLLM's keys (docs/serving.md).
        sequences: counts those in the engine, with those of its other API processes; by default there are none.
        max_restarts: how often within ten minutes an engine that has died is started anew. Its requests end with
            :class:`EngineDeadError` all the same, as do those that come while no engine runs.

    Raises:
        ValueError: a bad value, or a model that cannot be loaded.
        RuntimeError: the engine process failed to start.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        max_queue: int = MAX_QUEUE,
        log_level: int | None = None,
        link: EngineLink | Replicas | None = None,
        profiler_config: str | Mapping[str, Any] | ProfilerConfig | None = None,
        sequences: SharedCount | None = None,
        max_restarts: int = 0,
    ) -> None:
        if not isinstance(max_queue, int) or isinstance(max_queue, bool) or max_queue < 0:
            raise ValueError(f"max_queue must be an integer of at least 0, got {max_queue!r}")
        if not isinstance(max_restarts, int) or isinstance(max_restarts, bool) or max_restarts < 0:
            raise ValueError(f"max_restarts must be an integer of at least 0, got {max_restarts!r}")
        self.config = config
        profiler = None if profiler_config is None else ProfilerConfig.of(profiler_config)
        if profiler is not None:
            profiler.check_folder()
        if link is None:
            check_connector(config)
        self._client = link or start_engines(config, log_level, import_tokenizers, profiler, max_restarts)
        try:
            inputs = input_processor(
                self._client.ready,
                takes_extra_args=bool(config.logits_processors),
                transfer=config.kv_transfer_config,
            )
        except BaseException:
            self._client.close()
            raise
        self.stats: EngineStats = self._client.ready.stats
        self.pooling = self._client.ready.pooling
        self.max_num_seqs = self._client.ready.max_num_seqs
        count = SharedCount() if sequences is None else sequences
        self._room = EngineRoom(self.max_num_seqs + max_queue, count)
        self._requests = OpenRequests(self._room, self._abort)
        self.on_death: Callable[[str], None] | None = None
        self._stopped: str | None = None  # why there are no requests any more
        self.inputs = inputs
        self._calls = EngineCalls(self._client.send)
        self._tokenizing = Tokenizing(inputs, causal=self.pooling.causal)
        self._loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, *, max_queue: int = MAX_QUEUE) -> "AsyncLLM":
        """From arguments under vLLM's names; returns when the engine is ready."""
        return cls(engine_args.create_engine_config(), max_queue=max_queue)

    @property
    def observer(self) -> Observer | None:
        """The observer that is told what happens to requests; ``None``: nobody is."""
        return self._requests.observer

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        self._requests.observer = observer

    @property
    def num_unfinished(self) -> int:
        """Sequences in the engine, of all its API processes."""
        return self._room.taken

    @property
    def max_sequences(self) -> int:
        """How many sequences may be in the engine at once, those that wait among them."""
        return self._room.most

    def attach(self) -> None:
        """Begin to listen to the engine, in the running event loop; the first request does it otherwise.

        Raises:
            RuntimeError: this serves another event loop already.
        """
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            self._client.attach(self._take, self._died)
        elif self._loop is not loop:
            raise RuntimeError("this AsyncLLM serves another event loop: make one for each loop")

    @property
    def errored(self) -> bool:
        """The engine process has died, and none will take its place."""
        return self._client.failure is not None

    @property
    def unavailable(self) -> EngineDeadError | None:
        """Why no request can be answered now; ``None`` if an engine lives."""
        if self.errored:
            return self.dead_error
        return None if any(self.replicas_living) else EngineDeadError(STARTING)

    @property
    def is_running(self) -> bool:
        return not self.errored

    @property
    def dead_error(self) -> EngineDeadError:
        return EngineDeadError(self._client.failure or "the engine runs")

    @property
    def engine_pid(self) -> int | None:
        return self._client.pid

    @property
    def replica_stats(self) -> list[EngineStats]:
        """The stats of each engine behind this; of one, if ``data_parallel_size`` is 1."""
        return list(self._client.stats) if isinstance(self._client, Replicas) else [self.stats]

    @property
    def replica_restarts(self) -> list[int]:
        """How often each of these engines was started anew."""
        return list(self._client.restarted)

    @property
    def replica_deaths(self) -> list[str]:
        """Which of these engines have died and why, the first one first."""
        return list(self._client.deaths)

    @property
    def replicas_living(self) -> list[bool]:
        """Which of these engines have not died."""
        return self._client.living

    async def check_health(self) -> None:
        """Check that the engine can answer.

        Raises:
            EngineDeadError: the engine process has died.
        """
        if self.unavailable is not None:
            raise self.unavailable

    @property
    def max_model_len(self) -> int:
        return self.inputs.max_model_len

    def get_default_sampling_params(self) -> SamplingParams:
        return self.inputs.default_params.clone()

    async def get_tokenizer(self) -> Any:
        return self.inputs.tokenizer

    @property
    def is_in_long_text(self) -> bool:
        """A thread works on a long text, which Python would wait for at the end of the process."""
        return self._tokenizing.is_in_long_text

    async def with_tokenizer(self, size: int, work: Callable[[InputProcessor], T]) -> T:
        """Run what uses the tokenizer, in a thread.

        Args:
            size: characters of the text, of which long ones wait for each other.
            work: is given what has the thread's tokenizer.

        Raises:
            StoppedError: the server ends.
            Exception: what ``work`` raises.
        """
        return await self._tokenizing.with_tokenizer(size, work)

    async def render_chat(
        self, conversation: Sequence[Message], options: ChatOptions, *, must_fit: bool = False
    ) -> Prompt:
        """The prompt of a conversation; errors as :func:`tritonllm.engine.text.chat.render`, and if it ``must_fit`` as
        :meth:`tritonllm.engine.text.input_processor.InputProcessor.encode_prompt`."""
        return await self._tokenizing.render_chat(conversation, options, must_fit=must_fit)

    async def check_prompts(
        self, prompts: Sequence[Prompt | TokenizedPrompt], params: Params, names: Sequence[str] | None = None
    ) -> list[TokenizedPrompt]:
        """The prompts of one body, checked before the first one runs; :meth:`generate` and its kin take the results.

        Args:
            names: what errors call each prompt; by default ``prompt``, with its index if there are several.

        Raises:
            ValueError: one of them is bad, and the message begins with its name; or the parameters are.
            QueueFullError, EngineDeadError, AsleepError: none could run now.
        """
        if isinstance(params, SamplingParams):
            params = self.inputs.take_params(params)
        elif isinstance(params, PoolingParams):
            params = params.checked()
        self._check_room(sequences_of(params))
        return await self._tokenizing.all_tokenized(prompts, params, names or numbered("prompt", len(prompts)))

    async def generate(
        self,
        prompt: Prompt | TokenizedPrompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: None = None,
        priority: int = 0,
        tokenization_kwargs: None = None,
        trace_headers: None = None,
        data_parallel_rank: None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue a prompt.

        Args:
            prompt: text, token ids, a dict of either, or what :meth:`check_prompts` has made of one.
            sampling_params: how to continue the prompt; by default the model's parameters. ``output_kind`` says what
                each output holds.
            request_id: unique among the unfinished ones.
            lora_request: none; there are no adapters yet.
            priority: lower is earlier; needs ``policy="priority"``.
            tokenization_kwargs, trace_headers, data_parallel_rank: none; only vLLM has them.

        Yields:
            An output whenever there is something new; the last one is ``finished``.

        Raises:
            ValueError: bad input.
            QueueFullError: too many requests wait.
            EngineDeadError: the engine process has died.
        """
        no_adapter(lora_request)
        only_none(
            tokenization_kwargs=tokenization_kwargs, trace_headers=trace_headers, data_parallel_rank=data_parallel_rank
        )
        request_id = _check_id(request_id)
        self.attach()
        params = self.inputs.take_params(sampling_params)
        self._check_room(params.n)
        tokenized = await self._tokenizing.with_bad_words(await self._tokenizing.tokenized(prompt, params), params)
        message, collector = request_messages.generation(request_id, tokenized, params, priority, self.inputs.tokenizer)
        self._submit(message, collector, params)
        finished = False
        try:
            while not finished:
                output = await collector.get()
                finished = output.finished
                yield output
        finally:
            if not finished:
                self._abort(request_id)

    async def encode(
        self,
        prompt: Prompt | TokenizedPrompt,
        pooling_params: PoolingParams,
        request_id: str,
        *,
        lora_request: None = None,
        priority: int = 0,
        tokenization_kwargs: None = None,
        trace_headers: None = None,
        data_parallel_rank: None = None,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Pool a prompt.

        Args:
            prompt: text, token ids, a dict of either, or what :meth:`check_prompts` has made of one.
            pooling_params: how to pool the prompt, with a ``task``.
            request_id: unique among the unfinished ones.
            lora_request: none; there are no adapters yet.
            priority: lower is earlier; needs ``policy="priority"``.
            tokenization_kwargs, trace_headers, data_parallel_rank: none; only vLLM has them.

        Yields:
            One output; its ``error`` says what ended the request before it was pooled.

        Raises:
            ValueError: bad input.
            QueueFullError: too many requests wait.
            EngineDeadError: the engine process has died.
        """
        no_adapter(lora_request)
        only_none(
            tokenization_kwargs=tokenization_kwargs, trace_headers=trace_headers, data_parallel_rank=data_parallel_rank
        )
        request_id = _check_id(request_id)
        if not isinstance(pooling_params, PoolingParams):
            raise ValueError(f"pooling_params must be PoolingParams, got {type(pooling_params).__name__}")
        params = pooling_params.checked()
        self.attach()
        self._check_room(sequences_of(params))
        tokenized = await self._tokenizing.tokenized(prompt, params)
        message, collector = request_messages.pooling(request_id, tokenized, params, priority)
        yield await self._only_output(message, collector, AS_SAMPLING)

    async def beam_search(
        self, prompt: Prompt | TokenizedPrompt, params: BeamSearchParams, request_id: str, *, priority: int = 0
    ) -> AsyncGenerator[RequestOutput, None]:
        """Search for the most likely continuations of a prompt.

        Args:
            prompt: text, token ids, a dict of either, or what :meth:`check_prompts` has made of one.
            params: how to search.
            request_id: unique among the unfinished ones.
            priority: lower is earlier; needs ``policy="priority"``.

        Yields:
            One output with ``beam_width`` continuations, the best first; each position has the log-probabilities that
            the search has seen.

        Raises:
            ValueError: bad input.
            QueueFullError: too many requests wait.
            EngineDeadError: the engine process has died.
        """
        request_id = _check_id(request_id)
        if not isinstance(params, BeamSearchParams):
            raise ValueError(f"params must be BeamSearchParams, got {type(params).__name__}")
        self.attach()
        self._check_room(sequences_of(params))
        tokenized = await self._tokenizing.tokenized(prompt, params)
        message, collector = request_messages.search(request_id, tokenized, params, priority)
        yield await self._only_output(message, collector, SamplingParams(n=params.beam_width))

    async def _only_output(self, message: Add, collector: Any, params: SamplingParams) -> Any:
        """The output of a request that has one; the request is aborted if nobody waits for it any more."""
        self._submit(message, collector, params)
        try:
            return await collector.get()
        except BaseException:
            self._abort(message.request_id)
            raise

    def _check_room(self, sequences: int) -> None:
        if self._stopped is not None:
            raise StoppedError(self._stopped)
        if self.errored:
            raise self.dead_error
        if not self.stats.takes_requests:
            raise AsleepError("the engine sleeps, or has no weights: wake it up, or reload them, and try again")
        self._room.check(sequences)

    async def wait_for_room(self, params: Params) -> None:
        """Wait while the queue is full. A request for a prompt that is tokenized is taken if it comes at once.

        Raises:
            ValueError, EngineDeadError, StoppedError, AsleepError: it is not taken anyway.
        """
        await self._room.wait(sequences_of(params), self._check_room)

    def _submit(self, message: Add, collector: Collector | PoolingCollector, params: SamplingParams) -> None:
        """Send the request to the engine. Nothing is awaited between the checks and the sending."""
        self._check_room(params.n)
        self._requests.check_free(message.request_id)
        self._client.send(message)
        self._requests.add(message, collector, params)

    async def abort(self, request_id: str | Sequence[str]) -> None:
        """End requests; their generators end with ``finish_reason="abort"``. Unknown ids are ignored."""
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        known = [one for one in ids if one in self._requests]
        if known and not self.errored:
            self._client.send(Abort(known))

    async def sleep(self, level: int = 1, mode: str = "wait") -> None:
        """Give the memory of weights and cache to others (:meth:`tritonllm.LLM.sleep`). Requests are refused from now
        on, with :class:`AsleepError`, until :meth:`wake_up`.

        Args:
            level: 1 keeps the weights on the host, 2 drops them.
            mode: ``wait`` lets the running requests end first, ``abort`` ends them.

        Raises:
            ValueError: the engine cannot sleep, or a bad argument.
            RuntimeError: it failed; the engine is awake.
        """
        if mode not in ("wait", "abort"):
            raise ValueError(f"mode must be wait or abort, got {mode!r}")
        await self._ask("sleep", abort=mode == "abort", level=level)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Take the memory back (:meth:`tritonllm.LLM.wake_up`).

        Raises:
            ValueError: an unknown tag.
            RuntimeError: there is not enough memory now; the engine sleeps on.
        """
        await self._ask("wake_up", tags=tags)

    async def is_sleeping(self) -> bool:
        return self.stats.is_sleeping

    async def reload_weights(self, model: str | None = None) -> None:
        """Go on with other weights (:meth:`tritonllm.LLM.reload_weights`), when the running requests have ended.

        Raises:
            ValueError: a model that does not fit or cannot be read; the old weights stay.
            RuntimeError: the weights sleep.
        """
        await self._ask("reload_weights", model=model)

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached prompts. ``False``: a request runs, and nothing was forgotten.

        Raises:
            ValueError: one of the arguments, which only vLLM has, is not ``False``.
        """
        only_false(reset_running_requests=reset_running_requests, reset_connector=reset_connector)
        return await self._ask("reset_prefix_cache")

    async def expert_load(self) -> ExpertLoad:
        """How many tokens went to each expert of each layer (:meth:`tritonllm.LLM.expert_load`); of several engines,
        the sum.

        Raises:
            ValueError: the engine does not count (``count_expert_load``).
            EngineDeadError: an engine has died.
        """
        replicas = range(len(self._client.living))
        answers = [await self._ask("expert_load", replica=number) for number in replicas]
        return functools.reduce(operator.add, map(ExpertLoad.of_json, answers))

    async def reset_expert_load(self) -> None:
        """Count from 0 again. Raises as :meth:`expert_load`."""
        await self._ask("reset_expert_load")

    async def start_profile(self, profile_prefix: str | None = None) -> dict[str, Any]:
        """Let the engine write a trace (docs/teach.md), from now to :meth:`stop_profile`.

        Args:
            profile_prefix: what the file's name begins with.

        Returns:
            ``file``: where it is written.

        Raises:
            ValueError: there is no ``profiler_config``, or a bad prefix.
            ProfileRefusedError: a trace is written already.
            RuntimeError: the file cannot be made.
        """
        return await self._ask("start_profile", profile_prefix=profile_prefix)

    async def stop_profile(self) -> dict[str, Any]:
        """End the trace.

        Returns:
            ``file``, its number of ``events``, and ``note``: why it ended, by this or before.

        Raises:
            ValueError: there is no ``profiler_config``.
            ProfileRefusedError: no trace is written.
            RuntimeError: the file could not be written.
        """
        return await self._ask("stop_profile")

    async def activity(self, view: Mapping[str, int], replica: int | None = None) -> dict[str, Any]:
        """What the engine has in its hands (:mod:`tritonllm.serve.engines.activity`).

        Args:
            view: fields of :class:`~tritonllm.telemetry.snapshot.View`.
            replica: the number of one of several engines; ``None``: the first that lives.

        Raises:
            ValueError: a number of the view is out of its range.
            EngineDeadError: that engine has died.
        """
        return await self._ask("activity", replica=replica, view=dict(view))

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[None]:
        """vLLM's way to reach :meth:`reload_weights`, the only method that there is.

        Raises:
            ValueError: another method; and as the method.
        """
        check_rpc(method, args, kwargs)
        await self.reload_weights(*args, **(kwargs or {}))
        return [None]

    async def _ask(self, method: str, **arguments: Any) -> Any:
        """As :meth:`EngineCalls.ask`, listening."""
        self.attach()
        return await self._calls.ask(method, **arguments)

    def _abort(self, request_id: str) -> None:
        """End a request that nobody reads any more."""
        if not self._requests.drop(request_id):
            return
        assert self._loop is not None
        if not self.errored and not self._loop.is_closed():
            self._requests.expect_end(request_id)
            self._client.send(Abort([request_id]))

    def _take(self, news: News) -> None:
        self.stats = news.stats
        self._calls.take(news.answers)
        for update in news.updates:
            self._requests.take(update)

    def _died(self, why: str) -> None:
        self._calls.fail(why)
        self._requests.lose(lambda: EngineDeadError(why))
        if self.on_death is not None:
            self.on_death(why)

    def end_requests(self, why: str) -> None:
        """Let unfinished requests, and those to come, end with a :class:`StoppedError`. The engine runs on."""
        self._stopped = why
        self._tokenizing.end_waits(StoppedError(why))
        self._requests.fail(lambda: StoppedError(why))

    def shutdown(self) -> None:
        """End the engine process; unfinished requests get :class:`EngineDeadError`. May be called again."""
        self._client.close()
        self._tokenizing.close()
        self._requests.lose(lambda: self.dead_error)


def _check_id(request_id: object) -> str:
    """Check the id of a request, and return it.

    Raises:
        ValueError: no string, or an empty one.
    """
    if not isinstance(request_id, str) or not request_id:
        raise ValueError(f"request_id must be a string that is not empty, got {request_id!r}")
    return request_id

"""``LLM(data_parallel_size=N)``: N engines, each in a process of its own with GPUs of its own, as one engine.

The processes, and which of them gets a request, are those of the server (:mod:`tritonllm.serve.engines.replicas`). An
:class:`AsyncLLM` talks to them, in an event loop that runs in a thread; the caller's thread hands requests over and
waits for results. So Ctrl-C interrupts a wait of the caller, and never the talk with the engines.

Not all requests are handed over at once. How long outputs become is not known before, and an engine that is done early
should still find some to do. So as many are in the engines as run at the same time, and as many again that wait there.
"""

import asyncio
import dataclasses
import heapq
import multiprocessing.util
import threading
from collections.abc import Callable, Collection, Coroutine, Iterable
from concurrent.futures import Future
from contextlib import aclosing
from functools import partial
from queue import SimpleQueue
from typing import Any

from tritonllm.config.beam_search_params import BeamSearchParams
from tritonllm.config.engine import EngineConfig, ModelConfig
from tritonllm.config.pooling_params import PoolingParams
from tritonllm.config.prompts import Prompt
from tritonllm.config.sampling_params import SamplingParams
from tritonllm.engine.data.asleep import AsleepError
from tritonllm.engine.data.outputs import EngineOutput
from tritonllm.engine.data.stats import EngineStats
from tritonllm.engine.loop.engine import STEP_FAILED
from tritonllm.engine.text.pooling import PoolingAbility
from tritonllm.experts.load import ExpertLoad
from tritonllm.offline.interface import RequestParams, RequestRefusedError
from tritonllm.serve.engines.async_llm import AsyncLLM
from tritonllm.serve.engines.engine_client import EngineDeadError
from tritonllm.serve.engines.messages import PoolingFacts
from tritonllm.serve.engines.replicas import Replicas

UNLIMITED = 1 << 40  # sequences that may wait for a seat: this module bounds them
AHEAD = 2  # times the sequences that run at once are in the engines
BEFORE_THEIR_END = 200  # exit priority: the engine processes have 100, and end kindly if this comes first

Result = Future[EngineOutput]


class Engines:
    """Several engines that have started. They end with this object, or with this process.

    Args:
        config: the configuration of all of the engines, with ``data_parallel_size``.
        link: a link to engines that were started already; by default they are started here.

    Raises:
        ValueError: a bad value, or a model that cannot be loaded.
        RuntimeError: an engine process failed to start. None is left.
    """

    def __init__(self, config: EngineConfig, link: Replicas | None = None) -> None:
        self._llm = AsyncLLM(config, max_queue=UNLIMITED, link=link)
        self.inputs = self._llm.inputs
        self.pooling = _ability(self._llm.pooling)
        self._most = AHEAD * self._llm.max_num_seqs
        self._waiting: list[tuple[int, int, str, Prompt, RequestParams]] = []  # a heap: the first has to go first
        self._arrivals = 0
        self._running: dict[str, tuple[Result, int]] = {}  # those in the engines, and their numbers of sequences
        self._ended: SimpleQueue[tuple[str, Result]] = SimpleQueue()  # of requests whose results are there
        self._failure: str | None = None
        self._talk = _Talk(self._llm)
        # At exit before multiprocessing joins its children, as for the engine processes themselves. Nothing that the
        # thread holds refers to this object, so its last reference may go at any time.
        self._end = multiprocessing.util.Finalize(self, self._talk.end, exitpriority=BEFORE_THEIR_END)

    @property
    def tokenizer(self) -> Any:
        return self.inputs.tokenizer

    @property
    def model_config(self) -> ModelConfig:
        """The configuration of the model as given, with the length that the engines found."""
        return dataclasses.replace(self._llm.config.model, max_model_len=self.inputs.max_model_len)

    @property
    def stats(self) -> EngineStats:
        """The sums over all engines."""
        return self._llm.stats

    @property
    def replica_stats(self) -> list[EngineStats]:
        """The statistics of each engine."""
        return self._llm.replica_stats

    @property
    def is_sleeping(self) -> bool:
        return self._llm.stats.is_sleeping

    def add_request(self, request_id: str, prompt: Prompt, params: RequestParams, *, priority: int = 0) -> None:
        """Queue a request here; :meth:`step` hands it over.

        Args:
            request_id: unique among the unfinished ones.
            prompt: text, token ids, or a dict of either.
            params: how to continue it, to search for its best continuations, or to pool it.
            priority: lower is earlier, under the ``priority`` policy.

        Raises:
            ValueError: bad input; what only an engine can tell (a prompt that its cache cannot hold, say) is said by
                :meth:`step`.
            AsleepError: the engines sleep.
            EngineDeadError: an engine process has died.
        """
        self._check_alive()
        if not self._llm.stats.takes_requests:
            raise AsleepError("the engines sleep, or have no weights: wake them up, or reload the weights")
        prepared = self._prepare(prompt, params)
        heapq.heappush(self._waiting, (priority, self._arrivals, request_id, prepared, params))
        self._arrivals += 1

    def _prepare(self, prompt: Prompt, params: RequestParams) -> Prompt:
        """The prompt as token ids, which with its parameters is checked as the engine will."""
        continued, separated, truncate = True, False, None
        if isinstance(params, PoolingParams):
            continued, separated = False, not self.pooling.causal
            truncate = params.checked().truncate_prompt_tokens
        elif isinstance(params, SamplingParams):
            if params.logits_processors:
                raise ValueError(
                    "logits_processors are functions, and the engines run in other processes: leave out "
                    "data_parallel_size, or give classes to LLM(logits_processors=[...])"
                )
            truncate = self.inputs.take_params(params).truncate_prompt_tokens
        tokenized = self.inputs.tokenize(prompt, truncate, continued=continued, separated=separated)
        parts = {
            "prompt": tokenized.text,
            "cache_salt": tokenized.cache_salt,
            "token_type_ids": tokenized.token_types,
        }
        given: Any = {name: value for name, value in parts.items() if value is not None}
        return {"prompt_token_ids": tokenized.token_ids, **given}

    def abort_request(self, request_ids: Iterable[str]) -> None:
        """End requests, or do not begin them; unknown ids are ignored. Nothing more is heard of them."""
        ids = set(request_ids)
        self._waiting = [one for one in self._waiting if one[2] not in ids]
        heapq.heapify(self._waiting)
        for request_id in ids & self._running.keys():
            self._running.pop(request_id)[0].cancel()

    def has_unfinished_requests(self) -> bool:
        return bool(self._waiting or self._running)

    def step(self) -> list[EngineOutput]:
        """Hand over what there is room for, and wait for the end of one request.

        Returns:
            Its output; nothing if it was aborted.

        Raises:
            RefusedError: an engine did not take it.
            EngineDeadError: an engine process has died; the others were ended.
            RuntimeError: its engine's step failed.
        """
        self._check_alive()
        self._hand_over()
        request_id, result = self._ended.get()
        if self._running.get(request_id, (None, 0))[0] is not result:
            return []  # aborted
        del self._running[request_id]
        if result.cancelled():
            raise EngineDeadError(self._failure or "the engines were shut down")
        error = result.exception()
        if isinstance(error, EngineDeadError):
            self._check_alive()
        if isinstance(error, ValueError):
            raise RequestRefusedError(request_id, str(error)) from error
        if error is not None:
            raise error
        output = result.result()
        if output.error is not None and output.error.startswith(STEP_FAILED):
            raise RuntimeError(output.error)
        return [output]

    def _hand_over(self) -> None:
        room = self._most - sum(size for _, size in self._running.values())
        while self._waiting:
            priority, _, request_id, prompt, params = self._waiting[0]
            size = _sequences(params)
            if self._running and size > room:
                break
            heapq.heappop(self._waiting)
            result = self._talk.begin(_output(self._llm, request_id, prompt, params, priority))
            self._running[request_id] = result, size
            room -= size
            result.add_done_callback(partial(_note, self._ended, request_id))

    def _check_alive(self) -> None:
        """Check that all engines live; if one has died, the others are ended.

        Raises:
            EngineDeadError: one has died, and so all have been ended; or :meth:`shutdown` has.
        """
        if self._failure is None and self._llm.replica_deaths:
            self._failure = f"{self._llm.replica_deaths[0]}; the others were ended with it: make a new LLM"
            self._end()
        if self._failure is not None:
            raise EngineDeadError(self._failure)

    def _ask(self, call: Coroutine[Any, Any, Any]) -> Any:
        """What all engines are told to do; waits for it."""
        try:
            self._check_alive()
        except EngineDeadError:
            call.close()
            raise
        return self._talk.begin(call).result()

    def reset_prefix_cache(self) -> bool:
        """``False``: at least one of them forgot nothing."""
        return self._ask(self._llm.reset_prefix_cache())

    def sleep(self, level: int = 1) -> None:
        """Let the engines sleep. Raises as :meth:`AsyncLLM.sleep`."""
        self._ask(self._llm.sleep(level))

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Wake the engines up. Raises as :meth:`AsyncLLM.wake_up`."""
        self._ask(self._llm.wake_up(None if tags is None else list(tags)))

    def reload_weights(self, model: str | None = None) -> None:
        """Load the weights anew, or others of the same shapes. Raises as :meth:`AsyncLLM.reload_weights`."""
        self._ask(self._llm.reload_weights(model))

    def expert_load(self) -> ExpertLoad:
        """The sum over the engines. Raises as :meth:`AsyncLLM.expert_load`."""
        return self._ask(self._llm.expert_load())

    def reset_expert_load(self) -> None:
        """Count the experts' load from 0 again. Raises as :meth:`AsyncLLM.expert_load`."""
        self._ask(self._llm.reset_expert_load())

    def shutdown(self) -> None:
        """End the engine processes. May be called again."""
        self._failure = self._failure or "the engines were shut down: make a new LLM"
        self._end()


class _Talk:
    """The thread that talks to the engines, until :meth:`end`.

    Args:
        llm: the client, which works in this event loop; it is shut down in the end.
    """

    def __init__(self, llm: AsyncLLM) -> None:
        begun = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(llm, begun)), name="engines", daemon=True)
        self._thread.start()
        begun.wait()

    async def _run(self, llm: AsyncLLM, begun: threading.Event) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        begun.set()
        try:
            llm.attach()
            await self._over.wait()
        finally:
            llm.shutdown()

    def begin(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def end(self) -> None:
        """End the thread. For any thread: a garbage collection may call it in this one, too."""
        self._loop.call_soon_threadsafe(self._over.set)
        if threading.current_thread() is not self._thread:
            self._thread.join()


async def _output(
    llm: AsyncLLM, request_id: str, prompt: Prompt, params: RequestParams, priority: int
) -> EngineOutput | None:
    """The last one of a request."""
    kind: Callable[..., Any] = llm.generate
    if isinstance(params, PoolingParams):
        kind = llm.encode
    elif isinstance(params, BeamSearchParams):
        kind = llm.beam_search
    last = None
    async with aclosing(kind(prompt, params, request_id, priority=priority)) as outputs:
        async for output in outputs:
            last = output
    return last


def _note(ended: SimpleQueue[tuple[str, Result]], request_id: str, result: Result) -> None:
    ended.put((request_id, result))


def _sequences(params: RequestParams) -> int:
    if isinstance(params, BeamSearchParams):
        return params.beam_width
    return params.n if isinstance(params, SamplingParams) else 1


def _ability(facts: PoolingFacts) -> PoolingAbility:
    return PoolingAbility(
        tasks=tuple(facts.tasks),
        causal=facts.causal,
        labels=facts.labels,
        label_names=tuple(facts.label_names),
        token_types=facts.token_types,
    )

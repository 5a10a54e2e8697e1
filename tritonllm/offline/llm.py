"""The offline interface: ``LLM(model).generate(prompts, SamplingParams(...))``, as in vLLM."""

import copy
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from tritonllm.config.beam_search_params import BeamSearchParams
from tritonllm.config.engine import EngineConfig, ModelConfig
from tritonllm.config.prompts import Prompt, as_list, is_array
from tritonllm.config.sampling_params import RequestOutputKind, SamplingParams
from tritonllm.config.vllm_arguments import no_adapter, only_false, only_none
from tritonllm.engine.data.asleep import check_rpc
from tritonllm.engine.data.outputs import BeamSearchOutput, PoolingRequestOutput, RequestOutput
from tritonllm.engine.data.stats import EngineStats
from tritonllm.engine.loop.beam_search import beam_search_output
from tritonllm.engine.loop.engine import LLMEngine
from tritonllm.engine.loop.metrics import Metric, metrics_of
from tritonllm.engine.text.chat import ChatOptions, Message, render
from tritonllm.experts.load import ExpertLoad
from tritonllm.offline.interface import OfflineEngine, RequestRefusedError
from tritonllm.offline.pooling import PoolingMethods, Progress
from tritonllm.offline.profiles import LLMProfiles
from tritonllm.system.extras import install

if TYPE_CHECKING:
    from tritonllm.offline.engines import Engines

EXTRA = f"data_parallel_size needs more packages ({{}}): {install('serve')}, or leave it out"


class LLM(PoolingMethods):
    """A model ready to generate, to embed or to classify: in this process, or with ``data_parallel_size`` above 1 in
    several others, among which requests are dealt out.

    Args:
        model: a folder in Hugging Face format, or a hub id.
        kwargs: the fields of :class:`ModelConfig`, :class:`CacheConfig`, :class:`SchedulerConfig`,
            :class:`ParallelConfig` and :class:`EngineConfig`, or vLLM's names for them (:class:`EngineArgs`). Arguments
            that only vLLM has take their neutral values (:mod:`tritonllm.config.vllm_arguments`).
        profiler_config: where and how :meth:`start_profile` writes traces, with vLLM's keys (docs/serving.md).

    Raises:
        ValueError: an unknown argument, a bad value, or a model that cannot be loaded; says which and what to do.
        ImportError: several engines need packages that are not installed.
        RuntimeError: one of several engines failed to start; none is left.
    """

    def __init__(self, model: str, *, profiler_config: Any = None, **kwargs: Any) -> None:
        config = EngineConfig.from_kwargs(model=model, **kwargs)
        if profiler_config is not None and config.parallel.data_parallel_size > 1:
            raise ValueError("profiler_config writes traces of one engine: leave out data_parallel_size")
        self._profiles = LLMProfiles(profiler_config, config.model.device)
        self._several = start_several(config) if config.parallel.data_parallel_size > 1 else None
        self._only = LLMEngine.from_config(config) if self._several is None else None
        if self._profiles.wanted:
            self._profiles.watch(self.engine)
        self._ids = itertools.count()

    @property
    def _engine(self) -> OfflineEngine:
        engine = self._several or self._only
        assert engine is not None  # one of both is there
        return engine

    @property
    def engine(self) -> LLMEngine:
        """The engine in this process.

        Raises:
            ValueError: there are several, in other processes.
        """
        if self._only is None:
            raise ValueError(
                "LLM.engine is the engine in this process, but data_parallel_size is above 1, and each engine has a "
                "process of its own: leave it out to look into one; counts are in LLM.stats and LLM.replica_stats"
            )
        return self._only

    @property
    def llm_engine(self) -> LLMEngine:
        """The engine, under vLLM's name. Raises as :attr:`engine`."""
        return self.engine

    @property
    def model_config(self) -> ModelConfig:
        """Which weights, and how they are held."""
        return self._engine.model_config

    @property
    def stats(self) -> EngineStats:
        """Counters and load of the engine, or the sums over several."""
        return self._engine.stats

    @property
    def replica_stats(self) -> list[EngineStats]:
        """Counters and load of each engine."""
        return [self.stats] if self._several is None else self._several.replica_stats

    def get_metrics(self) -> list[Metric]:
        """Counters and load of each engine as metrics with the names that the server's have:
        :class:`~tritonllm.engine.loop.metrics.Counter`, ``Gauge`` and ``Vector``, one of each name for each engine."""
        model = self.model_config.model
        return [metric for place, stats in enumerate(self.replica_stats) for metric in metrics_of(stats, model, place)]

    def shutdown(self) -> None:
        """End the processes of several engines, which otherwise end with this object, or with this process. An engine
        in this process goes on. May be called again."""
        if self._several is not None:
            self._several.shutdown()

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached prompts. ``False``: a request of the engine runs, and nothing was forgotten.

        Raises:
            ValueError: one of the arguments, which only vLLM has, is not ``False``.
        """
        only_false(reset_running_requests=reset_running_requests, reset_connector=reset_connector)
        return self._engine.reset_prefix_cache()

    def sleep(self, level: int = 1) -> None:
        """Give the memory of weights and cache to others; see :meth:`LLMEngine.sleep`, with its errors."""
        self._engine.sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Take the memory back; see :meth:`LLMEngine.wake_up`, with its errors."""
        self._engine.wake_up(tags)

    @property
    def is_sleeping(self) -> bool:
        return self._engine.is_sleeping

    def reload_weights(self, model: str | None = None) -> None:
        """Go on with other weights of the same architecture; see :meth:`LLMEngine.reload_weights`."""
        self._engine.reload_weights(model)

    def expert_load(self) -> ExpertLoad:
        """How many tokens went to each expert of each layer; of several engines, the sums. Its ``save(path)`` writes
        what ``tritonllm rebalance-experts`` reads; see :meth:`LLMEngine.expert_load`.

        Raises:
            ValueError: the engine does not count (``count_expert_load``).
        """
        return self._engine.expert_load()

    def reset_expert_load(self) -> None:
        """Count from 0 again. Raises as :meth:`expert_load`."""
        self._engine.reset_expert_load()

    def start_profile(self, profile_prefix: str | None = None) -> str:
        """Write a trace, or mark steps for NVIDIA's profilers, from now to :meth:`stop_profile`.

        Args:
            profile_prefix: what the file's name begins with.

        Returns:
            The file; ``tritonllm trace FILE`` reads it. An empty text with ``profiler="cuda"``.

        Raises:
            ValueError: the LLM was made without ``profiler_config``, or a bad prefix.
            RuntimeError: a trace is written already.
            OSError: the file cannot be made.
        """
        return self._profiles.start(profile_prefix)

    def stop_profile(self) -> str:
        """End the trace.

        Returns:
            The file, or an empty text.

        Raises:
            ValueError: the LLM was made without ``profiler_config``.
            RuntimeError: no trace is written.
            OSError: the file could not be written.
        """
        return self._profiles.stop()

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """Call a function with the engine's model, which has ``load_weights``
        (:class:`tritonllm.engine.ranks.served_model.ServedModel`). If it changes weights in another way, call
        :meth:`reset_prefix_cache` behind it.

        Returns:
            What it returns, once for each rank.

        Raises:
            ValueError, RuntimeError: as of :meth:`collective_rpc` with a function.
        """
        return self.collective_rpc(_OnModel(func))

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """vLLM's way to reach its workers: :meth:`reload_weights`, the only method that there is, or a function.

        Args:
            method: the method's name, or a function that is called with the worker, whose ``model_runner.model`` is
                that of :meth:`apply_model`.
            timeout: changes nothing.
            args, kwargs: further arguments.

        Returns:
            What it returns, once for each rank.

        Raises:
            ValueError: another method, or a function where there are several engines; and as the method, or as
                :meth:`LLMEngine.call`.
            RuntimeError: as :meth:`LLMEngine.call`.
        """
        if callable(method):
            return self.engine.call(method, args, kwargs)
        check_rpc(method, args, kwargs)
        self.reload_weights(*args, **(kwargs or {}))
        return [None]

    def get_default_sampling_params(self) -> SamplingParams:
        """A copy of what holds where none are given; from ``generation_config.json``, see ``generation_config=``."""
        return self._engine.inputs.default_params.clone()

    def get_tokenizer(self) -> Any:
        """The transformers tokenizer; ``None`` with ``skip_tokenizer_init``."""
        return self._engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Progress = True,
        lora_request: None = None,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt.

        Args:
            prompts: one or several of: text, a list, array or tensor of token ids, ``{"prompt": ...}``,
                ``{"prompt_token_ids": [...]}``.
            sampling_params: one for all, or one for each prompt; by default :meth:`get_default_sampling_params`.
            use_tqdm: show a progress bar with throughput; or what makes the bar, like tqdm.
            lora_request: none; there are no adapters yet.
            priority: one for each prompt (lower is earlier); needs ``policy="priority"``.
            tokenization_kwargs: none; only vLLM has them.

        Returns:
            One output per prompt, in their order.

        Raises:
            ValueError: bad input, naming the prompt by its index; nothing is returned.
            EngineDeadError: one of several engines has died, and the others were ended.
        """
        no_adapter(lora_request)
        only_none(tokenization_kwargs=tokenization_kwargs)
        params = self._engine.inputs.default_params if sampling_params is None else sampling_params
        return self._complete(SamplingParams, as_list(prompts), params, use_tqdm, priority)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: None = None,
        use_tqdm: Progress = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Search for the most likely continuations of each prompt.

        The result is that of transformers' ``generate(num_beams=..., do_sample=False)``: scores are divided by the
        length of the continuation alone, not with its prompt.

        Args:
            prompts, lora_request, use_tqdm: as for :meth:`generate`.
            params: how to search.
            concurrency_limit: most prompts that are searched for at the same time; by default as many as fit.

        Returns:
            One output per prompt, in their order, each with ``beam_width`` sequences, the best first.

        Raises:
            ValueError: bad input, naming the prompt by its index, or a search that does not fit this engine.
            RuntimeError: a search was ended by an error.
        """
        no_adapter(lora_request)
        if not isinstance(params, BeamSearchParams):
            raise ValueError(f"params must be BeamSearchParams, got {type(params).__name__}")
        if concurrency_limit is not None and (type(concurrency_limit) is not int or concurrency_limit < 1):
            raise ValueError(f"concurrency_limit must be an integer of at least 1, or None, got {concurrency_limit!r}")
        batch = as_list(prompts)
        outputs: list[RequestOutput] = []
        for begin in range(0, len(batch), concurrency_limit or max(len(batch), 1)):
            some = batch[begin : begin + (concurrency_limit or len(batch))]
            outputs += self._complete(BeamSearchParams, some, params, use_tqdm)
        for index, output in enumerate(outputs):
            if output.error is not None:
                raise RuntimeError(f"prompts[{index}] was not searched for: {output.error}")
        kept = params.include_stop_str_in_output
        return [beam_search_output(output, self.get_tokenizer(), keep_end=kept) for output in outputs]

    def _complete(
        self,
        kind: type,
        prompts: list[Prompt],
        params: Any,
        use_tqdm: Progress,
        priority: Sequence[int] | None = None,
    ) -> list[Any]:
        batch = prompts
        name = {SamplingParams: "sampling_params", BeamSearchParams: "params"}.get(kind, "pooling_params")
        params = _one_each(name, params, len(batch))
        priorities = [0] * len(batch)
        if priority is not None:
            given: Sequence[Any] = priority  # an array's are NumPy's own
            plain = [one.tolist() if is_array(one) else one for one in given]
            priorities = _one_each("priority", plain, len(batch))
        ids = [str(next(self._ids)) for _ in batch]
        try:
            for index, (request_id, prompt, wish, order) in enumerate(zip(ids, batch, params, priorities, strict=True)):
                where = f"prompts[{index}]: " if len(batch) > 1 else ""
                if not isinstance(wish, kind):
                    raise ValueError(f"{where}{name} must be {kind.__name__}, got {type(wish).__name__}")
                self._add(where, request_id, prompt, wish, order)
            outputs = self._run(len(ids), use_tqdm)
        except RequestRefusedError as error:
            self._engine.abort_request(ids)
            where = f"prompts[{ids.index(error.request_id)}]: " if len(batch) > 1 else ""
            raise ValueError(f"{where}{error}") from error
        except BaseException:  # Ctrl-C too: leave no request behind for the next call
            self._engine.abort_request(ids)
            raise
        return [outputs[request_id] for request_id in ids]

    def _add(self, where: str, request_id: str, prompt: Prompt, params: Any, priority: int) -> None:
        try:
            final = copy.copy(params)  # the engine checks it
            if isinstance(final, SamplingParams):
                final.output_kind = RequestOutputKind.FINAL_ONLY
            self._engine.add_request(request_id, prompt, final, priority=priority)
        except ValueError as error:
            raise ValueError(f"{where}{error}") from error

    def _run(self, total: int, use_tqdm: Progress) -> dict[str, RequestOutput | PoolingRequestOutput]:
        outputs: dict[str, RequestOutput | PoolingRequestOutput] = {}
        start, read, written = time.monotonic(), 0, 0
        make_bar = use_tqdm if callable(use_tqdm) else tqdm
        with make_bar(total=total, desc="Processed prompts", disable=not use_tqdm, dynamic_ncols=True) as bar:
            while self._engine.has_unfinished_requests():
                for output in self._engine.step():
                    outputs[output.request_id] = output
                    read += len(output.prompt_token_ids)
                    if isinstance(output, RequestOutput):
                        written += sum(len(completion.token_ids) for completion in output.outputs)
                    seconds = max(time.monotonic() - start, 1e-9)
                    rates = f"in {read / seconds:.0f} tok/s, out {written / seconds:.0f} tok/s"
                    bar.set_postfix_str(rates, refresh=False)
                    bar.update()
        return outputs

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Progress = True,
        lora_request: None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: None = None,
        tokenization_kwargs: None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, each a list of ``{"role": ..., "content": ...}``.

        Args:
            messages: content is text, or parts ``{"type": "text", "text": ...}``, which are joined by line ends.
            sampling_params, use_tqdm, lora_request, tokenization_kwargs: as for :meth:`generate`.
            chat_template, ...: see :class:`ChatOptions`.

        Raises:
            ValueError: no tokenizer, no chat template, a malformed conversation, or a template that fails on it.
        """
        options: dict[str, Any] = {
            "chat_template": chat_template,
            "chat_template_content_format": chat_template_content_format,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            "chat_template_kwargs": chat_template_kwargs,
            "mm_processor_kwargs": mm_processor_kwargs,
        }
        no_adapter(lora_request)
        only_none(tokenization_kwargs=tokenization_kwargs)
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            raise ValueError(f"messages must be a list of dicts, or a list of such lists, got {messages!r:.100}")
        conversations: list[Any] = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        prompts = [self.render_chat(conversation, **options) for conversation in conversations]
        return self.generate(prompts, sampling_params, use_tqdm)

    def render_chat(self, conversation: Sequence[Message], **options: Any) -> Prompt:
        """The prompt that :meth:`chat` makes of one conversation; same errors, options as :class:`ChatOptions`."""
        encode = partial(self._engine.inputs.encode, add_special_tokens=False)
        return render(self.get_tokenizer(), conversation, ChatOptions(**options), encode)


@dataclass(frozen=True)
class _OnModel:
    """A function of the model, as one of the worker. (A lambda could not be sent to other ranks.)"""

    function: Callable[[Any], Any]

    def __call__(self, worker: Any) -> Any:
        return self.function(worker.model_runner.model)


def start_several(config: EngineConfig) -> "Engines":
    """``data_parallel_size`` engines; arguments and errors as of :class:`Engines`.

    Raises:
        ImportError: packages are missing.
    """
    try:
        from tritonllm.offline.engines import Engines
    except ModuleNotFoundError as error:
        raise ImportError(EXTRA.format(error)) from error
    return Engines(config)


def _one_each(name: str, values: Any, count: int) -> list[Any]:
    if not isinstance(values, Sequence):
        return [values] * count
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} entries for {count} prompts: give one, or one for each")
    return list(values)

"""Runs steps on one device: owns the model and the paged cache, knows nothing of queues or text."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial

import numpy as np
import torch

from tritonllm.config import EngineConfig
from tritonllm.engine.batch import (
    HostBatch,
    SamplingInputs,
    build_batch,
    reserve_pinned,
    upload,
    upload_batch,
    upload_sampling,
)
from tritonllm.engine.cuda_graphs import DecodeGraphs, graph_sizes, padded
from tritonllm.engine.graph_capture import GraphCapture
from tritonllm.engine.launch_policy import host_bound_tokens
from tritonllm.engine.mixed_graphs import MixedGraphs, token_sizes
from tritonllm.engine.sampler import LogprobTensors, Sampler, TokenLogprobs
from tritonllm.engine.scheduler import StepPlan
from tritonllm.engine.seats import SeatTable
from tritonllm.engine.shared_prefix import CascadePlanner
from tritonllm.engine.warm_up import WarmUp
from tritonllm.kernels import token_logprobs
from tritonllm.kernels.attention.decode import WORKSPACE_SIZE
from tritonllm.layers.metadata import AttentionMetadata, KVCacheView
from tritonllm.models.interface import CausalLM
from tritonllm.sampling_params import SamplingParams

# Rows of logits made at once for prompt log-probabilities: 256 x 152k float32 is 156 MB.
PROMPT_LOGPROB_ROWS = 256
SHORT_WAIT = 0.05  # seconds: beyond it a step is so long that a millisecond more does not count
NAMED = 8  # requests of a step that does not end


class StepTimeoutError(RuntimeError):
    """The device did not finish a step in time; the message names the step and its requests."""


@dataclass(frozen=True)
class StepResult:
    """What a step produced, on the host.

    Attributes:
        sampled: for each scheduled request its new token, or ``None`` if its prompt is not finished.
        logprobs: of the sampled tokens, in the order of the requests that got one; ``None`` if nobody asked.
        prompt_logprobs: by request id, those of the prompt tokens that this step's chunk predicts, with the position
            of the first.
    """

    sampled: list[int | None]
    logprobs: TokenLogprobs | None
    prompt_logprobs: dict[str, tuple[int, TokenLogprobs]]


class RunningStep:
    """A step that was launched; its results are on their way to pinned memory.

    Args:
        plan: what was launched.
        tokens: ``[R]`` int64, one for each item of the plan that samples; ``None`` if there are none.
        logprobs: theirs, if any request wants them.
        prompt_logprobs: of prompt tokens, in parts: request id, position of the first, and the scores.
        device: where it runs.
    """

    def __init__(
        self,
        plan: StepPlan,
        tokens: torch.Tensor | None,
        logprobs: LogprobTensors | None,
        prompt_logprobs: Sequence[tuple[str, int, LogprobTensors]],
        device: torch.device,
    ) -> None:
        self.plan = plan
        self._tokens = None if tokens is None else _to_host(tokens)
        self._logprobs = None if logprobs is None else tuple(_to_host(t) for t in logprobs)
        self._prompt_logprobs = [(name, at, tuple(_to_host(t) for t in part)) for name, at, part in prompt_logprobs]
        self._done = torch.cuda.Event() if device.type == "cuda" else None
        if self._done is not None:
            self._done.record(torch.cuda.current_stream(device))

    def _await(self, event: torch.cuda.Event, timeout: float) -> None:
        """Wait as ``event.synchronize()`` does, spinning, but so that Ctrl-C and the end of patience come through."""
        begin = time.monotonic()
        while not event.query():
            waited = time.monotonic() - begin
            if waited > timeout:
                raise StepTimeoutError(
                    f"the GPU has not finished a step after {timeout:g} s (step_timeout): {describe(self.plan)}. It "
                    "may hang, and then only the end of this process frees it"
                )
            if waited < SHORT_WAIT:
                os.sched_yield()
            else:
                time.sleep(0.001)

    def wait(self, timeout: float) -> StepResult:
        """Wait for the device and return the results.

        Args:
            timeout: seconds.

        Raises:
            StepTimeoutError: it took longer.
        """
        if self._done is not None:
            self._await(self._done, timeout)
        tokens = iter([] if self._tokens is None else self._tokens.tolist())
        sampled = [next(tokens) if item.samples else None for item in self.plan.scheduled]
        logprobs = None if self._logprobs is None else TokenLogprobs(*(t.tolist() for t in self._logprobs))
        of_prompts: dict[str, tuple[int, TokenLogprobs]] = {}
        for name, at, part in self._prompt_logprobs:
            scores = of_prompts.setdefault(name, (at, TokenLogprobs([], [], [])))[1]
            more = TokenLogprobs(*(values.tolist() for values in part))
            scores.token_ids.extend(more.token_ids)
            scores.logprobs.extend(more.logprobs)
            scores.ranks.extend(more.ranks)
        return StepResult(sampled, logprobs, of_prompts)


def describe(plan: StepPlan) -> str:
    """What a step computes, for a message about it."""
    chunks = plan.num_tokens - plan.num_decodes
    named, default = [], SamplingParams()
    for request, start, count, *_ in plan.scheduled[:NAMED]:
        wishes = {field.name: getattr(request.params, field.name) for field in fields(request.params)}
        chosen = [f"{name}={value!r}" for name, value in wishes.items() if value != getattr(default, name)]
        named.append(f"{request.request_id!r} (tokens {start} to {start + count}; {', '.join(chosen)})")
    more = len(plan.scheduled) - len(named)
    of_all = "; ".join(named) + (f"; and {more} more" if more else "")
    return f"{plan.num_decodes} decodes and {chunks} prompt tokens of requests {of_all}"


def _to_host(values: torch.Tensor) -> torch.Tensor:
    """Begin to copy to pinned memory."""
    if not values.is_cuda:
        return values.clone()  # the next step may overwrite it
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


class ModelRunner:
    """The model, its cache, its sampler and the captured steps.

    Args:
        model: loaded, on ``device``.
        config: the engine's.
        device: where the model is.
        max_model_len: the longest sequence that may come.
    """

    def __init__(self, model: CausalLM, config: EngineConfig, device: torch.device, max_model_len: int) -> None:
        self._model = model
        self._dtype = model.dtype
        self._config = config
        self._device = device
        self._block_size = config.cache.block_size
        self._cache: list[KVCacheView] = []
        self._graphs: DecodeGraphs | None = None
        self._mixed: MixedGraphs | None = None
        self._max_model_len = max_model_len
        seats = config.scheduler.max_num_seqs
        self._seats = SeatTable(seats, self._max_blocks)
        self._sampled = graph_sizes(seats)
        self._sampler = Sampler(seats, model.spec.vocab_size, device)
        self._planner: CascadePlanner | None = None
        if config.cache.enable_prefix_caching and not config.disable_cascade_attn:  # else no blocks are shared
            self._planner = CascadePlanner(self._block_size, self.block_bytes // model.spec.num_layers)

    @property
    def num_graphs(self) -> int:
        """Steps captured as CUDA graphs."""
        return sum(len(graphs) for graphs in (self._graphs, self._mixed) if graphs is not None)

    @property
    def _max_blocks(self) -> int:
        return -(-self._max_model_len // self._block_size)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, keys and values."""
        spec = self._model.spec
        element = torch.empty(0, dtype=self._dtype).element_size()
        return 2 * spec.num_layers * self._block_size * spec.num_kv_heads * spec.head_size * element

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
        self._allocate(1)
        warm_up, scheduler = self.warm_up(), self._config.scheduler
        warm_up.prefill_step(scheduler.max_num_batched_tokens)  # its memory stays with the allocator, for later steps
        captured = 0
        if self._model.supports_graphs and not self._config.enforce_eager:  # two kinds, each with memory of its own
            sizes = (0, *self._captured_tokens()[-1:])
            captured = sum(self._peak(warm_up, scheduler.max_num_seqs + tokens) for tokens in sizes)
        self._cache = []
        free, total = torch.cuda.mem_get_info(self._device)
        granted = int(total * cache.gpu_memory_utilization) - (total - free) - captured
        if granted < self.block_bytes:
            raise ValueError(
                f"gpu_memory_utilization={cache.gpu_memory_utilization} leaves {granted / 1e9:.2f} GB for the KV "
                f"cache, less than a block ({self.block_bytes / 1e9:.3f} GB): raise it, or lower max_num_batched_tokens"
            )
        return granted // self.block_bytes

    def _captured_tokens(self) -> list[int]:
        """Room for prompt tokens in captured steps."""
        if not self._model.supports_graphs or self._config.enforce_eager:
            return []
        return token_sizes(self._config.scheduler.max_num_batched_tokens, host_bound_tokens(self._model.work))

    def _peak(self, warm_up: WarmUp, tokens: int) -> int:
        """Bytes that a step of so many tokens needs for itself."""
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        warm_up.prefill_step(tokens)
        return torch.cuda.max_memory_allocated(self._device) - before

    def _allocate(self, num_blocks: int) -> None:
        spec = self._model.spec
        shape = (spec.num_layers, 2, num_blocks, self._block_size, spec.num_kv_heads, spec.head_size)
        # zeros, not empty: a stale NaN beyond a sequence's length would be multiplied by a probability of zero
        pool = torch.zeros(shape, dtype=self._dtype, device=self._device)
        workspace = torch.zeros(WORKSPACE_SIZE, dtype=torch.int32, device=self._device)
        self._cache = [KVCacheView(layer[0], layer[1], workspace) for layer in pool]

    def _forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._model(input_ids, positions, metadata, self._cache, rows)

    def warm_up(self) -> WarmUp:
        """The steps that are run before the first request."""
        scheduler = self._config.scheduler
        return WarmUp(
            self._forward,
            self.sample_hidden,
            device=self._device,
            block_size=self._block_size,
            max_model_len=self._max_model_len,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            padded=[scheduler.max_num_seqs + tokens for tokens in self._captured_tokens()[-1:]],
            may_share=self._may_share,
        )

    def sample_hidden(self, hidden: torch.Tensor) -> None:
        """``hidden[R, hidden]`` to logits, through every kernel that sampling from them may need; for warm-up."""
        self._sampler.warm_up(self._model.compute_logits(hidden))

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
        self._allocate(num_blocks)
        self._seats = SeatTable(self._config.scheduler.max_num_seqs, self._max_blocks)
        if self._device.type != "cuda":
            return
        reserve_pinned()
        with self._model.rehearsal():
            self.warm_up().run()
        if self._model.supports_graphs and not self._config.enforce_eager:
            capture = partial(GraphCapture, self._model.rehearsal, self._device)  # each kind with memory of its own
            seats = self._config.scheduler.max_num_seqs
            self._graphs = DecodeGraphs(self._decode, seats, self._max_blocks, self._device, self._may_share, capture())
            size = seats, self._captured_tokens(), self._max_blocks, self._block_size
            self._mixed = MixedGraphs(self._forward_pending, *size, self._device, capture())

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> RunningStep:
        """Start one step; its results can be waited for, and the next one may be launched before."""
        host = build_batch(plan, self._seats, self._block_size, self._planner)
        tokens = logprobs = None
        prompt_logprobs: list[tuple[str, int, LogprobTensors]] = []
        if self._graphs is not None and plan.num_decodes == len(plan.scheduled):
            rows, tokens = self._graphs.run(host)
            inputs = self._graphs.sampling_inputs(len(host.sampled))
        else:
            at, inputs = upload_sampling(host, self._device, padded(len(host.sampled), self._sampled))
            rows = self._mixed_step(host, None if host.whole else at)
            if host.whole:
                prompt_logprobs = self._prompt_logprobs(plan, rows)
                rows = rows[at]
        if host.sampled and (tokens is None or not host.plain):
            logits = self._model.compute_logits(rows)[: len(host.sampled)]
            tokens, logprobs = self._sampler.sample(logits, inputs, host.sampled)
        return RunningStep(plan, tokens, logprobs, prompt_logprobs, self._device)

    def _mixed_step(self, host: HostBatch, rows: torch.Tensor | None) -> torch.Tensor:
        """Hidden states of these tokens (at least those that are wanted), or all, of a step not captured whole."""
        room = None if self._mixed is None else self._mixed.room_for(host)
        if self._mixed is not None and room is not None:
            return self._mixed.run(host, room)
        batch = upload_batch(host, self._device)
        everyone = len(host.logit_rows) == len(host.input_ids)  # then the rows are in their order already
        return self._forward_pending(batch.input_ids, batch.positions, batch.metadata, None if everyone else rows)

    def _forward_pending(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """:meth:`_forward` after the decodes got what the step before drew for them."""
        self._sampler.fill_pending(input_ids[: metadata.num_decodes])
        return self._forward(input_ids, positions, metadata, rows)

    def _decode(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        inputs: SamplingInputs,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What is captured of a decode step: from the last tokens to the next ones."""
        hidden = self._forward_pending(input_ids, positions, metadata)
        return hidden, self._sampler.draw(self._model.compute_logits(hidden), inputs)

    def _prompt_logprobs(self, plan: StepPlan, hidden: torch.Tensor) -> list[tuple[str, int, LogprobTensors]]:
        """For each chunk whose request asks: log-probabilities of the prompt tokens that follow the chunk's own."""
        found = []
        at = 0
        for item in plan.scheduled:
            first, top = item.start + 1, item.request.params.prompt_logprobs
            following = () if top is None else item.request.prompt_token_ids[first : item.start + item.num_tokens + 1]
            if top is not None and len(following):
                rows = hidden[at : at + len(following)]
                (chosen,) = upload([np.array(following, dtype=np.int64)], self._device)
                parts = zip(rows.split(PROMPT_LOGPROB_ROWS), chosen.split(PROMPT_LOGPROB_ROWS), strict=True)
                for part, ids in parts:
                    scores = token_logprobs(self._model.compute_logits(part), ids, top)
                    found.append((item.request.request_id, first, scores))
            at += item.num_tokens
        return found

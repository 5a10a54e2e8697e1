"""Runs steps on one device: owns the model and the paged cache, knows nothing of queues or text."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tritonllm.config import EngineConfig
from tritonllm.engine.batch import Batch, build_batch, sampling_batch
from tritonllm.engine.cuda_graphs import DecodeGraphs
from tritonllm.engine.request import Request
from tritonllm.engine.sampler import SamplerOutput, TokenLogprobs, gather_logprobs, sample_tokens
from tritonllm.engine.scheduler import StepPlan
from tritonllm.engine.shared_prefix import CascadePlanner
from tritonllm.kernels import plan_cascade
from tritonllm.kernels.attention_decode import WORKSPACE_SIZE
from tritonllm.layers.metadata import AttentionMetadata, KVCacheView
from tritonllm.models.interface import CausalLM
from tritonllm.sampling_params import SamplingParams

# Rows of logits made at once for prompt log-probabilities: 256 x 152k float32 is 156 MB.
PROMPT_LOGPROB_ROWS = 256


def warm_up_sizes(budget: int) -> list[int]:
    """Token counts of the steps that are run before the first request: launch configurations, and with them compiled
    kernels, change with the power of two."""
    return [*(1 << bit for bit in range(budget.bit_length()) if 1 << bit < budget), budget]


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


class ModelRunner:
    """The model, its cache and the captured decode steps.

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
        self._max_model_len = max_model_len
        self._planner: CascadePlanner | None = None
        if config.cache.enable_prefix_caching and not config.disable_cascade_attn:  # else no blocks are shared
            self._planner = CascadePlanner(self._block_size, self.block_bytes // model.spec.num_layers)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, keys and values."""
        spec = self._model.spec
        element = torch.empty(0, dtype=self._dtype).element_size()
        return 2 * spec.num_layers * self._block_size * spec.num_kv_heads * spec.head_size * element

    @torch.inference_mode()
    def fit_num_blocks(self) -> int:
        """How many cache blocks fit: what the configuration grants, less weights and the largest step's activations.

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
        torch.cuda.reset_peak_memory_stats(self._device)
        self._allocate(1)
        self._dummy_step(self._config.scheduler.max_num_batched_tokens)
        torch.cuda.synchronize(self._device)
        activations = torch.cuda.max_memory_allocated(self._device) - torch.cuda.memory_allocated(self._device)
        self._cache = []
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        granted = int(total * cache.gpu_memory_utilization) - (total - free) - activations
        if granted < self.block_bytes:
            raise ValueError(
                f"gpu_memory_utilization={cache.gpu_memory_utilization} leaves {granted / 1e9:.2f} GB for the KV "
                f"cache, less than a block ({self.block_bytes / 1e9:.3f} GB): raise it, or lower max_num_batched_tokens"
            )
        return granted // self.block_bytes

    def _allocate(self, num_blocks: int) -> None:
        spec = self._model.spec
        shape = (spec.num_layers, 2, num_blocks, self._block_size, spec.num_kv_heads, spec.head_size)
        # zeros, not empty: a stale NaN beyond a sequence's length would be multiplied by a probability of zero
        pool = torch.zeros(shape, dtype=self._dtype, device=self._device)
        workspace = torch.zeros(WORKSPACE_SIZE, dtype=torch.int32, device=self._device)
        self._cache = [KVCacheView(layer[0], layer[1], workspace) for layer in pool]

    def _forward(self, input_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        return self._model(input_ids, positions, metadata, self._cache)

    def _dummy_step(self, tokens: int) -> None:
        """A step of ``tokens`` prompt tokens, with logits for as many seats as it could fill. Writes no cache."""
        length = min(tokens, self._max_model_len)
        chunks = -(-tokens // length)
        device = self._device
        ends = torch.arange(chunks + 1, dtype=torch.int32, device=device) * length
        metadata = AttentionMetadata(
            slot_mapping=torch.full((tokens,), -1, dtype=torch.int64, device=device),
            block_tables=torch.zeros(chunks, -(-length // self._block_size), dtype=torch.int32, device=device),
            seq_lens=(ends[1:].clamp(max=tokens) - ends[:-1]),
            cu_seqlens_q=ends.clamp(max=tokens),
            num_decodes=0,
            max_seqlen_q=length,
        )
        ids = torch.zeros(tokens, dtype=torch.int32, device=device)
        hidden = self._forward(ids, torch.arange(tokens, device=device) % length, metadata)
        seats = min(self._config.scheduler.max_num_seqs, tokens)
        params = SamplingParams(top_k=50, top_p=0.9)
        request = Request(request_id="warm-up", prompt_token_ids=[0], params=params, max_total_tokens=2)
        sample_tokens(self._model.compute_logits(hidden[:seats]), sampling_batch([request] * seats, device))

    def _may_share(self, sequences: int) -> bool:
        """Whether a step of so many decodes can come with a plan for their shared prefix."""
        return self._planner is not None and self._planner.may_plan(sequences, self._max_model_len)

    def _dummy_decode(self, sequences: int) -> None:
        """Decode steps of empty sequences, with the narrowest and the widest block table: short sequences are not
        split, and the kernels for that are other ones. With a shared prefix and without."""
        device = self._device
        empty = torch.zeros(sequences, dtype=torch.int32, device=device)
        for width in (1, -(-self._max_model_len // self._block_size)):
            tables = torch.zeros(sequences, width, dtype=torch.int32, device=device)
            shared = plan_cascade(tables, empty, empty.bool(), width, self._block_size)
            for cascade in (None, shared) if self._may_share(sequences) else (None,):
                metadata = AttentionMetadata(
                    slot_mapping=torch.full((sequences,), -1, dtype=torch.int64, device=device),
                    block_tables=tables,
                    seq_lens=empty,
                    cu_seqlens_q=torch.zeros(1, dtype=torch.int32, device=device),
                    num_decodes=sequences,
                    max_seqlen_q=0,
                    cascade=cascade,
                )
                self._forward(empty, empty.long(), metadata)

    @torch.inference_mode()
    def start(self, num_blocks: int, max_model_len: int) -> None:
        """Allocate the cache, compile the kernels and capture the decode steps.

        Args:
            num_blocks: at most what :meth:`fit_num_blocks` said.
            max_model_len: the longest sequence that may come, if that is less than before.
        """
        self._max_model_len = max_model_len
        self._allocate(num_blocks)
        if self._device.type != "cuda":
            return
        for tokens in warm_up_sizes(self._config.scheduler.max_num_batched_tokens):
            self._dummy_step(tokens)
            self._dummy_decode(min(tokens, self._config.scheduler.max_num_seqs))
        if self._model.supports_graphs and not self._config.enforce_eager:
            max_blocks = -(-self._max_model_len // self._block_size)
            seats = self._config.scheduler.max_num_seqs
            self._graphs = DecodeGraphs(self._forward, seats, max_blocks, self._device, self._may_share)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step."""
        batch = build_batch(plan, self._block_size, self._device, self._planner)
        if self._graphs is not None and plan.num_decodes == len(plan.scheduled):
            hidden = self._graphs.run(batch)
        else:
            hidden = self._forward(batch.input_ids, batch.positions, batch.metadata)
        prompt_logprobs = self._prompt_logprobs(plan, hidden)
        output = self._sample(batch, hidden)
        tokens = iter(output.token_ids)
        sampled = [next(tokens) if item.samples else None for item in plan.scheduled]
        return StepResult(sampled, output.logprobs, prompt_logprobs)

    def _sample(self, batch: Batch, hidden: torch.Tensor) -> SamplerOutput:
        if not batch.sampling.requests:
            return SamplerOutput([], None)
        return sample_tokens(self._model.compute_logits(hidden[batch.logit_rows]), batch.sampling)

    def _prompt_logprobs(self, plan: StepPlan, hidden: torch.Tensor) -> dict[str, tuple[int, TokenLogprobs]]:
        """For each chunk whose request asks: log-probabilities of the prompt tokens that follow the chunk's own."""
        found = {}
        at = 0
        for item in plan.scheduled:
            request = item.request
            top = request.params.prompt_logprobs
            following = request.prompt_token_ids[item.start + 1 : item.start + item.num_tokens + 1]
            if top is not None and len(following):
                scores = self._score(hidden[at : at + len(following)], following, top)
                found[request.request_id] = item.start + 1, scores
            at += item.num_tokens
        return found

    def _score(self, hidden: torch.Tensor, tokens: Sequence[int], top: int) -> TokenLogprobs:
        chosen = torch.tensor(tokens, dtype=torch.int64, device=self._device)
        scores = TokenLogprobs([], [], [])
        for rows, ids in zip(hidden.split(PROMPT_LOGPROB_ROWS), chosen.split(PROMPT_LOGPROB_ROWS), strict=True):
            part = gather_logprobs(self._model.compute_logits(rows), ids, top)
            scores.token_ids.extend(part.token_ids)
            scores.logprobs.extend(part.logprobs)
            scores.ranks.extend(part.ranks)
        return scores

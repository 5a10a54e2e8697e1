"""What an engine is built from: frozen, checked at construction, passed as arguments.

A value that only the model or the machine can decide (length, dtype, device, number of blocks) is ``None`` or
``"auto"`` here and resolved once at start, in a new configuration (``dataclasses.replace``): nothing mutates.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tritonllm.config.checks import at_least, is_a, json_mapping, names_code, one_of
from tritonllm.config.kv_transfer import KVTransferConfig as KVTransferConfig
from tritonllm.config.parallel import EXECUTORS as EXECUTORS
from tritonllm.config.parallel import MOST_BLOCK_TOKENS
from tritonllm.config.parallel import ParallelConfig as ParallelConfig
from tritonllm.config.pooling_params import PoolerConfig
from tritonllm.config.speculative import OF_HEADS
from tritonllm.config.speculative import SpeculativeConfig as SpeculativeConfig
from tritonllm.config.vllm_arguments import translate

DTYPES = ("auto", "float32", "float16", "bfloat16")
KV_CACHE_DTYPES = (*DTYPES, "fp8", "fp8_e4m3", "fp8_e5m2")
LOAD_FORMATS = ("auto", "safetensors", "pt", "dummy")
MODEL_IMPLS = ("auto", "vllm", "transformers")
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
POLICIES = ("fcfs", "priority")
RUNNERS = ("auto", "generate", "pooling")
STRUCTURED_OUTPUTS_BACKENDS = ("auto", "xgrammar", "guidance")
CONVERSIONS = ("auto", "none", "embed", "classify")
NO_COMPILATION, COMPILATION = 0, 3
BACKENDS = ("inductor", "aot_eager", "eager")
# What weights are made when they are loaded, and names of how they are stored, with which users of vLLM ask for these.
MADE = ("fp8", "int8", "int4")
STORED = ("awq", "gptq", "compressed-tensors", "bitsandbytes", "modelopt", "mxfp4", "auto-round")
QUANTIZATIONS = MADE + STORED
_DEVICE = re.compile(r"auto|cpu(:0)?|cuda(:\d+)?")
_DOTTED = re.compile(r"\w+(\.\w+)*[.:]\w+")
_OWN_KWARGS = (
    "enforce_eager",
    "disable_cascade_attn",
    "deterministic",
    "count_expert_load",
    "compilation_config",
    "speculative_config",
    "kv_transfer_config",
    "kernel_cache",
    "step_timeout",
    "enable_sleep_mode",
    "logits_processors",
    "structured_outputs_backend",
)  # of EngineConfig itself, not of its parts


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which weights, and how they are held.

    Args:
        model: a folder in Hugging Face format, a hub id, or a GGUF file: here, or on the hub by its type
            (``owner/name:Q4_K_M``) or name (``owner/name/file.gguf``).
        tokenizer: folder, GGUF file or hub id of the tokenizer, if it is not the model's.
        skip_tokenizer_init: do without a tokenizer: token ids in and out, no text.
        revision: branch, tag or commit of a hub id.
        trust_remote_code: download and run Python code that comes with the model or the tokenizer.
        download_dir: the folder that keeps what comes from the hub; by default Hugging Face's own (``HF_HOME``).
        dtype: the dtype of weights and activations; ``auto`` takes the checkpoint's on a GPU and float32 on the CPU.
        device: the device of the model; ``auto`` takes CUDA if there is one.
        max_model_len: most tokens of prompt and output together; by default the model's own limit.
        load_format: ``safetensors`` files, ``pt`` (``pytorch_model*.bin``), ``auto`` for the first of them that is
            there; ``dummy`` fills the weights from ``seed`` instead of reading them.
        model_impl: what computes the model: ``vllm``, as vLLM calls it, one of our families; ``transformers`` with our
            attention; ``auto`` a family, and transformers where there is none.
        quantization: make the weights of the layers' products narrow when they are loaded: ``fp8`` (e4m3) or ``int8``,
            a byte an element with a scale for each row, or ``int4``, half a byte with a scale for each 128 columns of a
            row; embeddings and the output projection keep ``dtype``, and so do activations but for the rows of ``fp8``
            products, which a GPU rounds to float8, too. ``None`` leaves the weights as they are. Of
            a checkpoint that is stored narrow, its ``quant_method`` or ``None``.
        allow_nan: load weights that are NaN or infinite, which are an error otherwise.
        seed: the seed of dummy weights, and of requests that bring none.
        max_logprobs: the most log-probabilities a position that a request may ask for, in ``logprobs`` or
            ``prompt_logprobs``; -1: as many as the vocabulary has, for which requests ask with -1, too.
        logprobs_mode: of which distribution ``logprobs`` are: ``raw_logprobs``, the model's own; or
            ``processed_logprobs``, the one that tokens are drawn from, after penalties, processors, masks, temperature
            and limits (of greedy requests at temperature 1). Those of prompts are always the model's own.
        generation_config: where the defaults of sampling come from: ``auto`` is the model's ``generation_config.json``,
            ``vllm`` are those of :class:`SamplingParams`, anything else a folder with such a file.
        override_generation_config: entries that count more than those of that file, as ``{"temperature": 0.5}``;
            :meth:`EngineConfig.from_kwargs` takes JSON, too.
        runner: ``generate`` refuses pooling requests, ``pooling`` those that generate; ``auto`` takes both, as far as
            the architecture has them.
        convert: ``embed`` leaves a classifier's head away, ``classify`` looks for one in a causal model's files,
            ``none`` pools nothing; ``auto`` goes by the architecture.
        pooler_config: how to pool where the request does not say; :meth:`EngineConfig.from_kwargs` takes a dict, too.
    """

    model: str
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    revision: str | None = None
    trust_remote_code: bool = False
    download_dir: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    load_format: str = "auto"
    model_impl: Literal["auto", "vllm", "transformers"] = "auto"
    quantization: str | None = None
    allow_nan: bool = False
    seed: int = 0
    max_logprobs: int = 20
    logprobs_mode: str = "raw_logprobs"
    generation_config: str = "auto"
    override_generation_config: Mapping[str, Any] | None = None
    runner: Literal["auto", "generate", "pooling"] = "auto"
    convert: Literal["auto", "none", "embed", "classify"] = "auto"
    pooler_config: PoolerConfig = field(default_factory=PoolerConfig)

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model.strip():
            raise ValueError(f"model must be a folder or a hub id, got {self.model!r}")
        if not _DEVICE.fullmatch(str(self.device)):
            raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {self.device!r}")
        one_of("dtype", self.dtype, DTYPES)
        one_of("load_format", self.load_format, LOAD_FORMATS)
        one_of("model_impl", self.model_impl, MODEL_IMPLS)
        if self.quantization is not None:
            one_of("quantization", self.quantization, QUANTIZATIONS)
        one_of("runner", self.runner, RUNNERS)
        one_of("convert", self.convert, CONVERSIONS)
        if (self.runner, self.convert) in (("generate", "embed"), ("generate", "classify"), ("pooling", "none")):
            raise ValueError(f"runner={self.runner!r} contradicts convert={self.convert!r}: leave one out")
        is_a("pooler_config", self.pooler_config, PoolerConfig)
        at_least("max_model_len", self.max_model_len, 1)
        is_a("skip_tokenizer_init", self.skip_tokenizer_init, bool)
        is_a("trust_remote_code", self.trust_remote_code, bool)
        is_a("allow_nan", self.allow_nan, bool)
        is_a("seed", self.seed, int)
        is_a("max_logprobs", self.max_logprobs, int)
        at_least("max_logprobs", self.max_logprobs, -1)
        one_of("logprobs_mode", self.logprobs_mode, LOGPROBS_MODES)
        if self.download_dir is not None and (not isinstance(self.download_dir, str) or not self.download_dir):
            raise ValueError(f"download_dir must be a folder, got {self.download_dir!r}")
        if not isinstance(self.generation_config, str) or not self.generation_config:
            raise ValueError(f"generation_config must be auto, vllm or a folder, got {self.generation_config!r}")


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The paged KV cache.

    Args:
        block_size: keys in a block of one rank's cache. Where ranks split the keys of each sequence
            (``decode_context_parallel_size``), a block has so many tokens on each (``EngineConfig.block_tokens``).
        num_blocks: blocks in the pool; by default what fits ``gpu_memory_utilization`` (GPU) or ``cpu_cache_bytes``.
        gpu_memory_utilization: fraction of the GPU's memory for weights, activations and cache together.
        cpu_cache_bytes: size of the cache on the CPU path, bytes.
        enable_prefix_caching: reuse the blocks of prompts seen before.
        kv_offloading_size: GiB of the host's memory that keep blocks which the cache gives up, so that they come back
            by a copy. ``None`` or 0: they are computed again. With the connector ``CudaIpc`` of the GPU's memory.
        kv_cache_dtype: the dtype of keys and values in the cache: ``auto``, or the model's dtype by its name; ``fp8``
            (``fp8_e4m3`` is the same) rounds them to a byte each, after a division by the checkpoint's scales if it has
            some, so that the same memory holds twice the blocks of a 16-bit model. ``fp8_e5m2`` rounds to a bit less
            of mantissa, has the range of float16 and no scales, and runs on GPUs that do not convert e4m3.
        calculate_kv_scales: where the checkpoint has no scales, find some for ``kv_cache_dtype="fp8"`` at the start, by
            the keys and values of a fixed prompt.
    """

    block_size: int = 16
    num_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    cpu_cache_bytes: int = 1 << 28
    enable_prefix_caching: bool = True
    kv_offloading_size: float | None = None
    kv_cache_dtype: str = "auto"
    calculate_kv_scales: bool = False

    def __post_init__(self) -> None:
        at_least("block_size", self.block_size, 1)
        one_of("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        is_a("calculate_kv_scales", self.calculate_kv_scales, bool)
        if self.calculate_kv_scales and self.kv_cache_dtype not in ("fp8", "fp8_e4m3"):
            raise ValueError(
                f"calculate_kv_scales: a cache of kv_cache_dtype={self.kv_cache_dtype!r} has no scales: leave it out, "
                "or add kv_cache_dtype='fp8'"
            )
        if self.block_size > MOST_BLOCK_TOKENS:
            raise ValueError(f"block_size must be at most {MOST_BLOCK_TOKENS}, got {self.block_size}")
        at_least("num_blocks", self.num_blocks, 1)
        at_least("cpu_cache_bytes", self.cpu_cache_bytes, 1)
        fraction = self.gpu_memory_utilization
        if not isinstance(fraction, int | float) or isinstance(fraction, bool) or not 0.0 < fraction <= 1.0:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {fraction!r}")
        is_a("enable_prefix_caching", self.enable_prefix_caching, bool)
        size = self.kv_offloading_size
        if size is not None and (not isinstance(size, int | float) or isinstance(size, bool) or not 0 <= size < 1e9):
            raise ValueError(f"kv_offloading_size must be a number of GiB, at least 0, got {size!r}")


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """The limits of one step, and the order in which requests get into it.

    Args:
        max_num_seqs: most requests running at once.
        max_num_batched_tokens: most tokens, prefill chunks and decodes together, in one step.
        policy: ``fcfs``, or ``priority``: lower values first, then arrival; a request that waits preempts running ones
            of higher values where it needs their seats or blocks.
        scheduler_cls: another order, as a class of your own or its ``"module.Name"``
            (:class:`tritonllm.engine.schedule.policy.SchedulingPolicy`).
        enable_chunked_prefill: a prompt may be computed in chunks, by several steps. Without it each prompt is computed
            whole, by one step, which must hold ``max_model_len`` tokens.
        long_prefill_token_threshold: most tokens of one prompt in a step, so that others have the rest; 0: as many as
            the step has left.
        async_scheduling: plan and launch each step while the one before it still runs; by default on a GPU.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    policy: Literal["fcfs", "priority"] = "fcfs"
    scheduler_cls: str | type[Any] | None = None
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    async_scheduling: bool | None = None

    def __post_init__(self) -> None:
        at_least("max_num_seqs", self.max_num_seqs, 1)
        at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        one_of("policy", self.policy, POLICIES)
        own = self.scheduler_cls
        if own is not None and not isinstance(own, type) and not (isinstance(own, str) and _DOTTED.fullmatch(own)):
            raise ValueError(f"scheduler_cls must be a class or 'module.Name', got {own!r}")
        if own is not None and self.policy != "fcfs":
            raise ValueError(f"policy={self.policy!r} and scheduler_cls are both an order of requests: give one")
        is_a("enable_chunked_prefill", self.enable_chunked_prefill, bool)
        is_a("long_prefill_token_threshold", self.long_prefill_token_threshold, int)
        at_least("long_prefill_token_threshold", self.long_prefill_token_threshold, 0)
        if self.long_prefill_token_threshold and not self.enable_chunked_prefill:
            raise ValueError(
                f"long_prefill_token_threshold={self.long_prefill_token_threshold} cuts prompts, which "
                "enable_chunked_prefill=False forbids: leave one of them out"
            )
        if self.async_scheduling is not None:
            is_a("async_scheduling", self.async_scheduling, bool)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}), or some running requests could never decode"
            )


@dataclass(frozen=True, kw_only=True)
class CompilationConfig:
    """``torch.compile`` around the model (docs/start.md).

    Args:
        mode: 3 compiles all layers as one graph before the first request; 0 compiles nothing. ``None`` compiles a model
            that runs through transformers on a GPU, if torch can: its layers are hundreds of small operations. vLLM has
            two more modes.
        backend: the backend of ``torch.compile``. All but ``inductor`` compute as without a compiler: they are there
            for tests.
    """

    mode: int | None = None
    backend: str = "inductor"

    def __post_init__(self) -> None:
        if self.mode not in (None, NO_COMPILATION, COMPILATION) or isinstance(self.mode, bool):
            raise ValueError(
                f"compilation_config: mode must be {NO_COMPILATION} (off) or {COMPILATION} (torch.compile around the "
                f"model), got {self.mode!r}"
            )
        one_of("compilation_config: backend", self.backend, BACKENDS)

    @classmethod
    def of(cls, value: object) -> "CompilationConfig":
        """Make the configuration from what vLLM takes: a mode, or a dictionary of fields in which ``level`` is the
        mode's older name.

        Raises:
            ValueError: anything else.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, int):
            return cls(mode=value)
        if not isinstance(value, Mapping):
            raise ValueError(f"compilation_config must be 0, 3, a dict or a CompilationConfig, got {value!r}")
        fields = {"mode" if name == "level" else name: field for name, field in value.items()}
        known = [field.name for field in dataclasses.fields(cls)]
        for name in value:
            if name not in (*known, "level"):
                raise ValueError(f"compilation_config: {name!r} is not supported; there are {', '.join(known)}")
        if len(fields) < len(value):
            raise ValueError("compilation_config: mode and level are the same: give one")
        return cls(**fields)


def max_concurrency(num_blocks: int, block_tokens: int, max_model_len: int) -> float:
    """How many requests a cache holds at once if each has as many tokens as may be."""
    return num_blocks / -(-max_model_len // block_tokens)


PARTS: dict[str, type[Any]] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "parallel": ParallelConfig,
}  # of EngineConfig


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything an engine needs.

    Args:
        enforce_eager: no CUDA graphs.
        disable_cascade_attn: let every sequence read the keys of a prompt's beginning for itself, even where a step's
            sequences share them. Without it they are read once if that is faster.
        deterministic: a request's tokens and log-probabilities have the same bits alone and in any batch, however its
            prompt is cut, cached or preempted, with speculation and without (docs/determinism.md says what it costs).
        count_expert_load: steps count how many tokens go to each expert of each layer
            (:meth:`tritonllm.LLM.expert_load`).
        compilation_config: whether ``torch.compile`` compiles the model; :meth:`from_kwargs` takes a mode or a dict.
        speculative_config: how to guess tokens and verify several in a step; :meth:`from_kwargs` takes vLLM's
            dictionary or a string as ``"ngram:4"``. ``None``: one token a step.
        kv_transfer_config: where blocks of the cache go beyond this engine, and come from; :meth:`from_kwargs` takes
            vLLM's dictionary or its JSON. ``None``: nowhere.
        kernel_cache: a folder that ``tritonllm precompile`` made: kernels that are there are not compiled.
        step_timeout: seconds that a GPU may take for a step. If it takes longer, the engine raises an error that names
            the step and its requests, where it would wait for ever.
        enable_sleep_mode: weights and cache lie where their memory can be taken away and given back
            (:meth:`tritonllm.LLM.sleep`).
        logits_processors: make what changes the logits of whole steps, as functions or ``"module:name"``
            (:class:`tritonllm.engine.step.processors.BatchLogitsProcessor`).
        structured_outputs_backend: what makes the masks of structured outputs: ``"xgrammar"``, which ``"auto"`` means,
            or ``"guidance"`` (llguidance; docs/decoding.md compares them).
    """

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    enforce_eager: bool = False
    disable_cascade_attn: bool = False
    deterministic: bool = False
    count_expert_load: bool = False
    compilation_config: CompilationConfig = field(default_factory=CompilationConfig)
    speculative_config: SpeculativeConfig | None = None
    kv_transfer_config: KVTransferConfig | None = None
    kernel_cache: str | None = None
    step_timeout: float = 300.0
    enable_sleep_mode: bool = False
    logits_processors: Sequence[str | Callable[..., Any]] = ()
    structured_outputs_backend: str = "auto"

    def __post_init__(self) -> None:
        is_a("enforce_eager", self.enforce_eager, bool)
        is_a("disable_cascade_attn", self.disable_cascade_attn, bool)
        is_a("deterministic", self.deterministic, bool)
        if self.deterministic and self.model.quantization is not None:
            raise ValueError("quantization: products of narrow weights are not batch invariant: leave one out")
        if self.deterministic and self.compilation_config.mode:
            raise ValueError(
                "compilation_config: what torch.compile fuses is not batch invariant: leave it off with deterministic"
            )
        is_a("count_expert_load", self.count_expert_load, bool)
        if self.count_expert_load and self.compilation_config.mode:
            raise ValueError(
                "compilation_config: experts are not counted in what torch.compile makes: leave it off with "
                "count_expert_load"
            )
        is_a("enable_sleep_mode", self.enable_sleep_mode, bool)
        is_a("compilation_config", self.compilation_config, CompilationConfig)
        self.parallel.check_device(self.model.device)
        if self.parallel.world_size > 1:
            self._check_ranks()
        if self.parallel.shares_experts:
            self._check_shared_experts()
        self.parallel.check_block(self.cache.block_size)
        if self.speculative_config is not None:
            is_a("speculative_config", self.speculative_config, SpeculativeConfig)
            self._check_speculation(self.speculative_config)
        if self.kv_transfer_config is not None:
            is_a("kv_transfer_config", self.kv_transfer_config, KVTransferConfig)
            self._check_transfer(self.kv_transfer_config)
        if self.kernel_cache is not None:
            is_a("kernel_cache", self.kernel_cache, str)
        one_of("structured_outputs_backend", self.structured_outputs_backend, STRUCTURED_OUTPUTS_BACKENDS)
        makers = self.logits_processors
        if isinstance(makers, str) or not isinstance(makers, Sequence) or not all(names_code(m) for m in makers):
            raise ValueError(f"logits_processors must be a list of functions, classes or 'module:name', got {makers!r}")
        seconds = self.step_timeout
        if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not seconds > 0:
            raise ValueError(f"step_timeout must be a number of seconds greater than 0, got {seconds!r}")

    @property
    def block_tokens(self) -> int:
        """Tokens of a block, over all ranks that have some of its keys: what a scheduler counts with."""
        return self.cache.block_size * self.parallel.decode_context_parallel_size

    def _check_ranks(self) -> None:
        sizes, stages = self.parallel.sizes, self.parallel.pipeline_parallel_size
        if self.enable_sleep_mode:
            raise ValueError(f"enable_sleep_mode: ranks do not sleep yet; leave it out with {sizes}")
        if self.cache.kv_offloading_size:
            raise ValueError(f"kv_offloading_size: ranks do not offload; leave it out with {sizes}")
        if self.compilation_config.mode:
            raise ValueError(
                f"compilation_config: torch.compile does not know what ranks send each other: leave it off with {sizes}"
            )
        if stages > 1 and self.count_expert_load:
            raise ValueError(
                "count_expert_load: a stage knows the experts of its own layers alone; leave it out with "
                f"pipeline_parallel_size={stages}"
            )
        if self.cache.calculate_kv_scales and (stages > 1 or self.parallel.decode_context_parallel_size > 1):
            raise ValueError(
                "calculate_kv_scales: measured by one stage with all keys of a sequence; leave it out with "
                f"{sizes}, or use a checkpoint with scales"
            )
        if stages > 1 and self.logits_processors:
            raise ValueError(
                "logits_processors: those of whole batches want to see each step's tokens before the next step; leave "
                f"them out with pipeline_parallel_size={stages}, or give requests processors of their own"
            )

    def _check_shared_experts(self) -> None:
        lacking: dict[str, object] = {
            "deterministic": self.deterministic,
            "calculate_kv_scales": self.cache.calculate_kv_scales,
            "compilation_config": self.compilation_config.mode,
            "enable_sleep_mode": self.enable_sleep_mode,
            "speculative_config": self.speculative_config,
        }
        for name, given in lacking.items():
            if given:
                raise ValueError(
                    f"{name}: engines that share experts do not know it yet; leave it out with data_parallel_size="
                    f"{self.parallel.data_parallel_size} and enable_expert_parallel, or one of these"
                )

    def _check_transfer(self, transfer: KVTransferConfig) -> None:
        transfer.check_engines(self.parallel.data_parallel_size)
        if not self.cache.kv_offloading_size:
            raise ValueError(
                "kv_transfer_config needs kv_offloading_size: blocks come and go through that memory. Give "
                "it the GiB of the prompts that come at once, or more"
            )
        if not self.cache.enable_prefix_caching:
            raise ValueError("kv_transfer_config needs enable_prefix_caching, which names the blocks: leave that on")

    def _check_speculation(self, speculative: SpeculativeConfig) -> None:
        method = speculative.method
        if method in OF_HEADS and self.parallel.world_size > 1:
            raise ValueError(
                f"speculative_config: method={method!r} runs on one GPU so far: leave out {self.parallel.sizes}, or "
                "take method='draft_model'"
            )
        if method == "eagle3" and self.compilation_config.mode:
            raise ValueError(
                "compilation_config: a model that torch.compile has compiled does not give the states between its "
                "layers, which method='eagle3' reads: leave it off"
            )
        others = {
            "deterministic": self.deterministic,
            "compilation_config": self.compilation_config.mode,
            "pipeline_parallel_size": self.parallel.pipeline_parallel_size > 1,
            "decode_context_parallel_size": self.parallel.decode_context_parallel_size > 1,
        }
        other = next((name for name, given in others.items() if given), None)
        if speculative.tree is not None and other is not None:
            raise ValueError(
                f"speculative_config: speculative_token_tree does not go with {other}: leave one of them out"
            )
        if self.model.logprobs_mode != "raw_logprobs":
            raise ValueError(
                f"logprobs_mode={self.model.logprobs_mode!r} does not know drafts yet: leave out speculative_config"
            )
        most, length = speculative.num_speculative_tokens, self.model.max_model_len
        tokens = self.scheduler.max_num_batched_tokens
        if 1 + most > tokens:
            raise ValueError(
                f"speculative_config: num_speculative_tokens={most} and one token more must fit into a step of "
                f"max_num_batched_tokens={tokens}"
            )
        if length is not None and 1 + most >= length:
            raise ValueError(
                f"speculative_config: num_speculative_tokens={most} must be less than max_model_len={length} by 2"
            )

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> "EngineConfig":
        """Sort flat keyword arguments (vLLM's names, or ours) into their parts.

        Raises:
            ValueError: an argument that no part knows, one of vLLM's at a value that we lack, or a bad value.
        """
        kwargs = translate(kwargs, cls.known_kwargs())
        if "override_generation_config" in kwargs:
            name = "override_generation_config"
            kwargs[name] = json_mapping(name, kwargs[name])
        if "pooler_config" in kwargs:
            kwargs["pooler_config"] = PoolerConfig.of(kwargs["pooler_config"])
        parts: dict[str, Any] = {}
        for name, part in PARTS.items():
            names = {f.name for f in dataclasses.fields(part)}
            parts[name] = part(**{key: kwargs.pop(key) for key in list(kwargs) if key in names})
        own = {key: kwargs.pop(key) for key in _OWN_KWARGS if key in kwargs}
        if "compilation_config" in own:
            own["compilation_config"] = CompilationConfig.of(own["compilation_config"])
        if "speculative_config" in own:
            own["speculative_config"] = SpeculativeConfig.of(own["speculative_config"])
        if "kv_transfer_config" in own:
            own["kv_transfer_config"] = KVTransferConfig.of(own["kv_transfer_config"])
        return cls(**parts, **own)

    @classmethod
    def known_kwargs(cls) -> list[str]:
        return sorted([*(f.name for part in PARTS.values() for f in dataclasses.fields(part)), *_OWN_KWARGS])

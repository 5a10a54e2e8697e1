"""From a configuration to the parts of an engine that is ready to serve."""

import dataclasses
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tritonllm.config import NO_COMPILATION, EngineConfig, ModelConfig, SchedulerConfig
from tritonllm.engine.cpu_threads import SINGLE_THREAD_BELOW, granted_cores, threads_for
from tritonllm.engine.draft_model import load_draft, read_draft_spec
from tritonllm.engine.host_memory import check_offloading
from tritonllm.engine.host_tier import HostTier
from tritonllm.engine.input_processor import InputProcessor
from tritonllm.engine.pooler import Pooler
from tritonllm.engine.pooling import PoolingAbility
from tritonllm.engine.precompile import BackgroundCompiler, Target
from tritonllm.engine.rates import Rates
from tritonllm.engine.runner import ModelRunner
from tritonllm.engine.scheduler import Scheduler
from tritonllm.engine.sleep import EngineMemory
from tritonllm.engine.speculation import Drafting, most_verified
from tritonllm.engine.tokenizer import load_tokenizer
from tritonllm.kernels.compile.cache_folder import read_kernels_from
from tritonllm.kernels.compile.monitor import MONITOR
from tritonllm.kernels.dense.cpu import multiplies_bfloat16
from tritonllm.kernels.runtime.gpus import gpu_at
from tritonllm.kernels.runtime.tuning import name_in_tables
from tritonllm.models import checkpoint
from tritonllm.models.fallback_decoder import TransformersDecoder
from tritonllm.models.interface import CausalLM, ModelFacts
from tritonllm.models.loading import load_model, read_spec
from tritonllm.models.sentence_transformers import SentenceModules, read_modules
from tritonllm.models.spec import ModelSpec
from tritonllm.sampling_params import SamplingParams

logger = logging.getLogger(__name__)
DEFAULTED = {  # entry of generation_config.json: field of SamplingParams
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
}
TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def resolve_device(name: str) -> torch.device:
    """``auto`` is CUDA if there is one.

    Raises:
        ValueError: a device that is not there or not supported.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device={name!r}: there are {torch.cuda.device_count()} CUDA devices; try device='cpu'")
    return device


def resolve_dtype(
    name: str,
    device_type: str,
    capability: tuple[int, int],
    in_checkpoint: torch.dtype,
    *,
    bfloat16_on_cpu: bool = False,
) -> torch.dtype:
    """What ``name`` means here.

    ``auto`` is the checkpoint's own on a GPU. On the CPU it is float32, but for a checkpoint in bfloat16 with
    ``bfloat16_on_cpu``: see :func:`gains_from_bfloat16`.

    Raises:
        ValueError: bfloat16 on a GPU older than Ampere.
    """
    kept = device_type == "cuda" or (bfloat16_on_cpu and in_checkpoint is torch.bfloat16)
    auto = in_checkpoint if kept else torch.float32
    lacks_bf16 = device_type == "cuda" and capability < (8, 0)
    if name == "auto":
        return torch.float16 if lacks_bf16 and auto is torch.bfloat16 else auto
    dtype = TORCH_DTYPES[name]
    if lacks_bf16 and dtype is torch.bfloat16:
        raise ValueError(
            f"dtype='bfloat16' needs a GPU of compute capability 8.0, this one has {capability[0]}.{capability[1]}: "
            "use dtype='float16'"
        )
    return dtype


def length_limit(config: ModelConfig, spec: ModelFacts, modules: SentenceModules | None = None) -> int:
    """The longest sequence that model and user allow; of an encoder, by default, what its ``modules`` say.

    Raises:
        ValueError: the user asks for more than the model was made for.
    """
    if config.max_model_len is None:
        trained = None if modules is None or spec.causal else modules.max_seq_length
        return min(spec.max_position_embeddings, trained or spec.max_position_embeddings)
    if config.max_model_len > spec.max_position_embeddings:
        raise ValueError(
            f"max_model_len={config.max_model_len} is beyond the model's max_position_embeddings="
            f"{spec.max_position_embeddings}: lower it, or set rope scaling in the model's config.json"
        )
    return config.max_model_len


def length_that_fits(config: EngineConfig, limit: int, num_blocks: int) -> int:
    """``limit``, lowered to what the cache can hold for one request unless the user set it.

    Raises:
        ValueError: the user's own ``max_model_len`` does not fit.
    """
    room = num_blocks * config.cache.block_size
    if room >= limit:
        return limit
    if config.model.max_model_len is not None:
        needed = -(-limit // config.cache.block_size)
        raise ValueError(
            f"max_model_len={limit} needs {needed} cache blocks of {config.cache.block_size} tokens, but there are "
            f"{num_blocks}: lower max_model_len to {room}, or raise num_blocks (or the memory that decides it)"
        )
    if room < 2:
        raise ValueError(f"num_blocks={num_blocks} holds {room} token: a request needs at least a prompt and an output")
    return room


def for_encoder(config: EngineConfig, spec: ModelFacts, limit: int) -> EngineConfig:
    """The settings of a model whose tokens see those behind them: prompts come whole, and the keys of a prompt's
    beginning depend on its end. Other models keep theirs.

    Args:
        limit: the longest prompt.

    Raises:
        ValueError: a step cannot hold the longest prompt.
    """
    if spec.causal:
        return config
    if limit > config.scheduler.max_num_batched_tokens:
        raise ValueError(
            f"max_num_batched_tokens={config.scheduler.max_num_batched_tokens} must hold the longest prompt of an "
            f"encoder, max_model_len={limit}: raise the one or lower the other"
        )
    return dataclasses.replace(
        config, cache=dataclasses.replace(config.cache, enable_prefix_caching=False, kv_offloading_size=None)
    )


def most_blocks(config: EngineConfig, spec: ModelFacts) -> int:
    """Of which the cache makes use. An encoder's prompt has blocks for one step only, and two steps are in flight."""
    if spec.causal or config.cache.num_blocks is not None:
        return sys.maxsize
    scheduler, size = config.scheduler, config.cache.block_size
    return 2 * (-(-scheduler.max_num_batched_tokens // size) + scheduler.max_num_seqs) + scheduler.max_num_seqs


def resolve_async(config: SchedulerConfig, device_type: str) -> SchedulerConfig:
    """Unless the user says, plan ahead on a GPU only: on the CPU nothing runs beside the host, and a request that stops
    would have computed its last token for nothing."""
    ahead = device_type == "cuda" if config.async_scheduling is None else config.async_scheduling
    return dataclasses.replace(config, async_scheduling=ahead)


def gains_from_bfloat16(spec: ModelFacts) -> bool:
    """The CPU multiplies bfloat16 itself, and reading this model's weights is what takes the time: SmolLM2-135M decodes
    1.4 times as fast as in float32 (Zen 4). Elsewhere every product would convert them first."""
    return multiplies_bfloat16() and spec.hidden_size >= SINGLE_THREAD_BELOW


def end_tokens(spec: ModelFacts, generation_config: dict[str, Any], tokenizer: Any = None) -> frozenset[int]:
    """What ends an output: the ids of config.json and generation_config.json, and the tokenizer's ``eos_token``."""
    ids = generation_config.get("eos_token_id")
    more = [ids] if isinstance(ids, int) else list(ids or [])
    own = getattr(tokenizer, "eos_token_id", None)
    return frozenset(
        token
        for token in (*spec.eos_token_ids, *more, own)
        if isinstance(token, int) and 0 <= token < spec.vocab_size  # a tokenizer may know tokens that the model lacks
    )


def read_generation_config(source: str, model: Path) -> dict[str, Any]:
    """That of the model (``auto`` and ``vllm``), or of another folder.

    Raises:
        ValueError: no such folder, or no such file in it.
    """
    if source in ("auto", "vllm"):
        return checkpoint.read_generation_config(model)
    if not (Path(source) / "generation_config.json").is_file():
        raise ValueError(
            f"generation_config={source!r} must be auto, vllm, or a folder that holds generation_config.json"
        )
    return checkpoint.read_generation_config(Path(source))


def default_params(source: str, generation_config: dict[str, Any]) -> SamplingParams:
    """How a request is continued that brings no parameters; vLLM reads the same entries.

    Raises:
        ValueError: an entry outside its range.
    """
    if source == "vllm":
        return SamplingParams()
    values = {name: generation_config[entry] for entry, name in DEFAULTED.items() if entry in generation_config}
    try:
        return SamplingParams.from_optional(**{name: value for name, value in values.items() if value is not None})
    except ValueError as error:
        raise ValueError(f"generation_config.json: {error}; pass generation_config='vllm' to ignore it") from error


def background_compiler(
    spec: ModelFacts, config: EngineConfig, draft: ModelSpec | None
) -> AbstractContextManager[BackgroundCompiler | None]:
    """For a model whose kernels can be listed, if there may be a GPU."""
    if isinstance(spec, ModelSpec) and torch.version.cuda is not None and config.model.device != "cpu":
        return BackgroundCompiler(spec, config, draft)
    return nullcontext()


def compiled_if_asked(model: CausalLM, config: EngineConfig) -> CausalLM:
    """The model, with compiled steps if ``compilation_config`` says so.

    By default that is a model of transformers in CUDA graphs: one of OLMo-1B's shape takes 1.31 ms a token on an H200
    instead of 1.96. (A native model has hardly any small operations between its kernels.)

    Raises:
        ValueError: torch cannot compile it, and was asked to.
    """
    mode = config.compilation_config.mode
    gains = isinstance(model, TransformersDecoder) and model.supports_graphs and not config.enforce_eager
    if mode == NO_COMPILATION or (mode is None and not gains):
        return model
    try:
        return _compiled(model, config)
    except ValueError as error:
        if mode is not None:
            raise
        logger.warning("%s", error)
        return model


def _compiled(model: CausalLM, config: EngineConfig) -> CausalLM:
    from tritonllm.models.compiled import CompiledModel  # torch's compiler takes a second to import

    scheduler = config.scheduler
    return CompiledModel(
        model,
        config.compilation_config.backend,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
    )


def tokenizer_of(config: ModelConfig, folder: Path) -> Any:
    """That of the model in ``folder``, or what the user names; ``None`` for token ids only.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    if config.skip_tokenizer_init:
        return None
    revision = config.revision if config.tokenizer else None
    return load_tokenizer(
        config.tokenizer or str(folder), revision=revision, trust_remote_code=config.trust_remote_code
    )


@contextmanager
def named_convert(config: ModelConfig) -> Iterator[None]:
    """Inside the block, what is wrong with the weights may be due to ``convert='classify'``."""
    try:
        yield
    except ValueError as error:
        if config.convert == "classify":
            raise ValueError(f"convert='classify': the files must have a classifier: {error}") from error
        raise


def log_ready(
    spec: ModelFacts, config: EngineConfig, dtype: torch.dtype, device: torch.device, runner: ModelRunner, begin: float
) -> None:
    """Say in one line what was started; what a user asks first when an engine is slow or its cache is small.

    Args:
        config: with everything resolved.
        begin: when the start began, by ``time.monotonic``.
    """
    cache = config.cache
    assert cache.num_blocks is not None
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    logger.info(
        "%s (%s) is ready on %s after %.1f s: KV cache of %d blocks of %d tokens (%.2f GB), %d CUDA graphs, up to %d "
        "sequences of %d tokens, prefix cache %s",
        spec.architecture,
        str(dtype).removeprefix("torch."),
        name,
        time.monotonic() - begin,
        cache.num_blocks,
        cache.block_size,
        cache.num_blocks * runner.block_bytes / 1e9,
        runner.num_graphs,
        config.scheduler.max_num_seqs,
        config.model.max_model_len,
        "on" if cache.enable_prefix_caching else "off",
    )


def drafting_of(config: EngineConfig, draft_cost: float) -> Drafting:
    """What the scheduler is told of drafts."""
    speculative = config.speculative_config
    if speculative is None:
        return Drafting()
    verified = most_verified(speculative, config.scheduler)
    most, adaptive = speculative.num_speculative_tokens, speculative.adaptive
    return Drafting(most, verified, adaptive=adaptive, draft_cost=draft_cost)


class Parts(NamedTuple):
    """What an engine is made of."""

    config: EngineConfig  # its values are resolved
    runner: ModelRunner
    scheduler: Scheduler
    inputs: InputProcessor
    pooling: PoolingAbility
    memory: EngineMemory


def load_parts(config: EngineConfig) -> Parts:
    """Load a model and everything around it.

    Raises:
        ValueError: bad configuration, checkpoint, tokenizer or folder of kernels; the message names the argument or
            tensor and the fix.
    """
    begin = time.monotonic()
    MONITOR.serving = False
    check_offloading(config.cache.kv_offloading_size)
    if config.kernel_cache is not None:
        read_kernels_from(Path(config.kernel_cache))
    model_config = config.model
    trusted = model_config.trust_remote_code
    folder = checkpoint.resolve(model_config.model, model_config.revision, trust_remote_code=trusted)
    spec = read_spec(folder, trust_remote_code=trusted, as_classifier=model_config.convert == "classify")
    generation_config = read_generation_config(model_config.generation_config, folder)
    defaults = default_params(model_config.generation_config, generation_config)
    modules = None if model_config.runner == "generate" else read_modules(folder)
    pooling = PoolingAbility.of(model_config, spec, checkpoint.read_config(folder), modules)
    limit = length_limit(model_config, spec, modules)
    draft_spec = read_draft_spec(config, spec, limit)
    with background_compiler(spec, config, draft_spec) as compiler:  # leaving the block waits for it
        device = resolve_device(model_config.device)
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
        gains = device.type == "cpu" and gains_from_bfloat16(spec)
        dtype = resolve_dtype(model_config.dtype, device.type, capability, spec.dtype, bfloat16_on_cpu=gains)
        config = for_encoder(config, spec, limit)
        if compiler is not None and device.type == "cuda":
            gpu = gpu_at(device.index or 0)
            compiler.begin(Target(gpu.arch, name_in_tables(gpu), dtype, limit))
        tokenizer = tokenizer_of(model_config, folder)
        if device.type == "cpu":
            torch.set_num_threads(threads_for(spec.hidden_size, torch.get_num_threads(), granted_cores()))
        with named_convert(model_config):
            model = load_model(
                folder,
                spec,
                dtype=dtype,
                device=device,
                max_model_len=limit,
                load_format=model_config.load_format,
                seed=model_config.seed,
                trust_remote_code=trusted,
                allow_nan=model_config.allow_nan,
            )
        draft = load_draft(config, draft_spec, model, device, limit)
    memory = EngineMemory(model, model_config, device, config.enable_sleep_mode)
    model = compiled_if_asked(model, config)
    projection = None if modules is None else modules.projection(dtype=dtype, device=device)
    pooler = Pooler(config.scheduler.max_num_seqs, spec.hidden_size, device, model.classifier, projection)
    runner = ModelRunner(model, config, device, limit, pooler, draft, memory)
    num_blocks = min(runner.fit_num_blocks(), most_blocks(config, spec))
    max_model_len = length_that_fits(config, limit, num_blocks)
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(model_config, max_model_len=max_model_len),
        cache=dataclasses.replace(config.cache, num_blocks=num_blocks),
        scheduler=resolve_async(config.scheduler, device.type),
    )
    runner.start(num_blocks, max_model_len)
    tier = None
    if runner.host is not None:
        rates = Rates(runner.block_bytes, config.cache.block_size, runner.host.measure())
        tier = HostTier(runner.host_slots, rates)
    drafting = drafting_of(config, runner.draft_cost)
    scheduler = Scheduler(config.scheduler, config.cache, num_blocks, max_model_len, drafting, tier)
    eos = end_tokens(spec, generation_config, tokenizer)
    inputs = InputProcessor(
        *(tokenizer, spec.vocab_size, max_model_len, eos, model_config.seed, defaults),
        takes_extra_args=bool(config.logits_processors),
    )
    log_ready(spec, config, dtype, device, runner, begin)
    MONITOR.serving = True
    return Parts(config, runner, scheduler, inputs, pooling, memory)

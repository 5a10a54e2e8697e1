"""From a configuration to the parts of an engine that is ready to serve."""

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tritonllm.config.engine import EngineConfig, ModelConfig, max_concurrency
from tritonllm.dist.pipeline import Team
from tritonllm.engine.cache.engine_memory import EngineMemory
from tritonllm.engine.cache.kv_cache import block_bytes, cache_dtype
from tritonllm.engine.drafts.draft_model import load_draft, read_draft_spec
from tritonllm.engine.schedule.host_tier import HostTier
from tritonllm.engine.schedule.policy import policy_of
from tritonllm.engine.schedule.rates import Rates
from tritonllm.engine.schedule.scheduler import Scheduler
from tritonllm.engine.schedule.speculation import Drafting, most_verified
from tritonllm.engine.start.kv_start import check_blocks, make_transfer
from tritonllm.engine.start.precompile import Target
from tritonllm.engine.start.ranks import Executor, Ranks
from tritonllm.engine.start.resolve import (
    check_cache,
    gains_from_bfloat16,
    length_limit,
    length_that_fits,
    most_blocks,
    resolve_async,
    resolve_device,
    resolve_dtype,
    settings_for,
)
from tritonllm.engine.start.start_compilers import background_compiler, compiled_if_asked
from tritonllm.engine.step.pooler import Pooler
from tritonllm.engine.step.runner import ModelRunner
from tritonllm.engine.text.generation_config import default_params, end_tokens, read_generation_config
from tritonllm.engine.text.input_processor import InputProcessor
from tritonllm.engine.text.pooling import PoolingAbility
from tritonllm.engine.text.tokenizer import load_tokenizer
from tritonllm.engine.transfer.fingerprint import model_fingerprint
from tritonllm.engine.transfer.params import TransferParams
from tritonllm.engine.transfer.settings import check_connector, make_connector
from tritonllm.engine.transfer.transfer import KVTransfer
from tritonllm.kernels.compile.cache_folder import read_kernels_from
from tritonllm.kernels.compile.monitor import MONITOR
from tritonllm.kernels.runtime.gpus import gpu_at
from tritonllm.kernels.runtime.tuning import name_in_tables
from tritonllm.layers.attention_chunks import check_chunk_size
from tritonllm.models import checkpoint
from tritonllm.models.decoder import Decoder
from tritonllm.models.expert_checks import check_agreement, check_counted, dealt_out
from tritonllm.models.fallback_decoder import FallbackSpec, TransformersDecoder
from tritonllm.models.interface import CausalLM, ModelFacts
from tritonllm.models.invariance import check_invariance
from tritonllm.models.loading import load_model, read_spec, read_stages
from tritonllm.models.sentence_transformers import SentenceModules, read_modules
from tritonllm.models.spec import ModelSpec
from tritonllm.models.stages import Stage
from tritonllm.system.cpu_threads import granted_cores, threads_for
from tritonllm.system.host_memory import check_offloading

logger = logging.getLogger(__name__)


def tokenizer_of(config: ModelConfig, folder: Path) -> Any:
    """Load the tokenizer of the model in ``folder``, or the one that the user names; ``None`` for token ids only.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    if config.skip_tokenizer_init:
        return None
    revision = config.revision if config.tokenizer else None
    return load_tokenizer(
        config.tokenizer or str(folder),
        revision=revision,
        trust_remote_code=config.trust_remote_code,
        download_dir=config.download_dir,
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
    """Say what was started; what a user asks first when an engine is slow or its cache is small.

    Args:
        config: the configuration, with everything resolved.
        begin: when the start began, by ``time.monotonic``.
    """
    cache, length = config.cache, config.model.max_model_len
    assert cache.num_blocks is not None and length is not None
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    logger.info(
        "%s (%s) is ready on %s after %.1f s: KV cache of %d blocks of %d tokens (%.2f GB of %s), %d CUDA graphs, "
        "up to %d sequences of %d tokens, prefix cache %s",
        spec.architecture,
        str(dtype).removeprefix("torch."),
        name,
        time.monotonic() - begin,
        cache.num_blocks,
        config.block_tokens,
        cache.num_blocks * runner.block_bytes / 1e9,
        str(runner.caches.dtype).removeprefix("torch."),
        runner.num_graphs,
        config.scheduler.max_num_seqs,
        length,
        "on" if cache.enable_prefix_caching else "off",
    )
    most = max_concurrency(cache.num_blocks, config.block_tokens, length)
    logger.info("Maximum concurrency for %s tokens per request: %.2fx", f"{length:,}", most)


def drafting_of(config: EngineConfig, draft_cost: float) -> Drafting:
    """What the scheduler is told of drafts."""
    speculative = config.speculative_config
    if speculative is None:
        return Drafting()
    verified = most_verified(speculative, config.scheduler)
    most, adaptive = speculative.num_speculative_tokens, speculative.adaptive
    return Drafting(most, verified, adaptive=adaptive, draft_cost=draft_cost, depth=speculative.depth)


def tier_of(config: EngineConfig, runner: ModelRunner) -> HostTier | None:
    """What the scheduler is told of the cache's second tier, if there is one."""
    if runner.host is None:
        return None
    return HostTier(runner.host_slots, Rates(runner.block_bytes, config.block_tokens, runner.host.measure()))


class EngineParts(NamedTuple):
    """What an engine is made of."""

    config: EngineConfig  # its values are resolved
    runner: Executor
    scheduler: Scheduler
    inputs: InputProcessor
    pooling: PoolingAbility
    memory: EngineMemory
    transfer: KVTransfer | None


class Origin(NamedTuple):
    """What checkpoints say of themselves before their weights are read.

    Attributes:
        stages: which layers each stage of the pipeline has.
        limit: the longest sequence that model and user allow.
        draft: the draft model, if the configuration has one. It is whole on every rank.
    """

    folder: Path
    spec: ModelSpec | FallbackSpec
    stages: Sequence[Stage]
    modules: SentenceModules | None
    limit: int
    draft: ModelSpec | None


class Prepared(NamedTuple):
    """A rank before its weights. The configuration is the user's, or one for an encoder."""

    config: EngineConfig
    device: torch.device
    dtype: torch.dtype


def read_origin(config: EngineConfig) -> Origin:
    """Find the checkpoint, and read what the model is; no weights are loaded.

    Raises:
        ValueError: no checkpoint, a bad configuration, or a model that cannot be cut for so many ranks.
    """
    model, parallel, size = config.model, config.parallel, config.parallel.tensor_parallel_size
    folder = checkpoint.resolve(
        model.model,
        model.revision,
        trust_remote_code=model.trust_remote_code,
        load_format=model.load_format,
        download_dir=model.download_dir,
    )
    how: dict[str, Any] = {"as_classifier": model.convert == "classify", "model_impl": model.model_impl}
    spec = read_spec(folder, trust_remote_code=model.trust_remote_code, **how)
    if isinstance(spec, ModelSpec):
        spec = dealt_out(spec, parallel)
    stages = read_stages(folder, spec, parallel, trust_remote_code=model.trust_remote_code)
    if config.count_expert_load:
        check_counted(spec)
    if config.deterministic:
        check_invariance(spec, size)
    modules = None if model.runner == "generate" else read_modules(folder)
    limit = length_limit(model, spec, modules)
    origin = Origin(folder, spec, stages, modules, limit, read_draft_spec(config, spec, limit))
    for each in (spec, origin.draft):
        chunk = each.up_to(limit).attention_chunk if isinstance(each, ModelSpec) else None
        if chunk is not None:
            check_chunk_size(chunk, config.block_tokens)
    return origin


def prepare(config: EngineConfig, origin: Origin, device_index: int = 0) -> Prepared:
    """Resolve what model and machine decide.

    Args:
        device_index: which GPU, of several ranks' or engines'.

    Raises:
        ValueError: a bad value, or no such device.
    """
    spec, size = origin.spec, config.parallel.world_size
    device = resolve_device(config.model.device)
    if (size > 1 or config.parallel.shares_experts) and device.type == "cuda":
        if torch.cuda.device_count() < size and config.parallel.is_local:
            raise ValueError(
                f"{config.parallel.sizes} needs {size} GPUs, and there are {torch.cuda.device_count()}: lower it"
            )
        device = resolve_device(f"cuda:{device_index}")
        torch.cuda.set_device(device)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    gains = device.type == "cpu" and gains_from_bfloat16(spec)
    dtype = resolve_dtype(config.model.dtype, device.type, capability, spec.dtype, bfloat16_on_cpu=gains)
    check_cache(config.cache, dtype, device.type, capability)
    return Prepared(settings_for(config, spec, origin.limit), device, dtype)


def load_part(origin: Origin, prepared: Prepared, team: Team) -> tuple[CausalLM, CausalLM | None]:
    """Load this rank's part of the model, with its weights, and the draft model, which only the first stage has.

    Raises:
        ValueError: as :func:`load_model`, or the ranks have read different placements of experts.
    """
    model, spec = prepared.config.model, origin.spec
    check_agreement(prepared.config.parallel.expert_placement, spec, team.group)
    if prepared.device.type == "cpu":
        cores = max(1, granted_cores() // (team.size * team.exchange.size))
        torch.set_num_threads(threads_for(spec.hidden_size, torch.get_num_threads(), cores))
    with named_convert(model):
        loaded = load_model(
            origin.folder,
            spec,
            dtype=prepared.dtype,
            device=prepared.device,
            max_model_len=origin.limit,
            load_format=model.load_format,
            seed=model.seed,
            trust_remote_code=model.trust_remote_code,
            allow_nan=model.allow_nan,
            group=team.group,
            context=team.context,
            exchange=team.exchange,
            stage=origin.stages[team.pipe.stage],
            batch_invariant=prepared.config.deterministic,
            counts_experts=prepared.config.count_expert_load,
            quantization=model.quantization,
        )
    if isinstance(loaded, TransformersDecoder):  # what graphs hold decides what stages send each other
        loaded.supports_graphs = bool(team.least(int(loaded.supports_graphs)))
    if not team.pipe.first:
        return loaded, None
    return loaded, load_draft(prepared.config, origin.draft, loaded, prepared.device, origin.limit)


def start_runner(
    origin: Origin, prepared: Prepared, models: tuple[CausalLM, CausalLM | None], team: Team
) -> tuple[EngineConfig, ModelRunner, EngineMemory]:
    """Allocate the cache, compile and capture. All ranks do this at once, and have equally many blocks.

    Returns:
        The configuration with its values resolved, the runner, and the memory of weights and cache.
    """
    config, device, dtype = prepared
    spec, modules, limit = origin.spec, origin.modules, origin.limit
    model, draft = models
    memory = EngineMemory(model, config.model, device, config.enable_sleep_mode, draft, limit, team)
    team.least(0)  # none compiles what rank 0 has others compile
    model = compiled_if_asked(model, config)
    projection = None if modules is None else modules.projection(dtype=dtype, device=device)
    pooler = Pooler(config.scheduler.max_num_seqs, spec.hidden_size, device, model.classifier, projection)
    runner = ModelRunner(model, config, device, limit, pooler, draft, memory, team)
    num_blocks = team.least(min(runner.fit_num_blocks(), most_blocks(config, spec)))
    max_model_len = length_that_fits(config, limit, num_blocks)
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, max_model_len=max_model_len),
        cache=dataclasses.replace(config.cache, num_blocks=num_blocks),
        scheduler=resolve_async(config.scheduler, device.type),
    )
    runner.start(num_blocks, max_model_len)
    if isinstance(model, Decoder) and model.expert_counts is not None:
        model.expert_counts.reset()  # the start has run steps, too
    return config, runner, memory


class RankParts(NamedTuple):
    """What a rank other than the first has of an engine.

    Attributes:
        runner: its runner, started.
        memory: where its weights are.
    """

    runner: ModelRunner
    memory: EngineMemory
    device: torch.device
    team: Team


def load_rank(config: EngineConfig, join: Callable[[torch.device], Team], device_index: int) -> RankParts:
    """Load and start a rank other than the first.

    Args:
        join: meets the others.
        device_index: the index of the GPU that the rank uses.

    Raises:
        ValueError: as :func:`load_parts`.
    """
    if config.kernel_cache is not None:
        read_kernels_from(Path(config.kernel_cache))
    origin = read_origin(config)
    prepared = prepare(config, origin, device_index)
    team = join(prepared.device)
    models = load_part(origin, prepared, team)
    _, runner, memory = start_runner(origin, prepared, models, team)
    return RankParts(runner, memory, prepared.device, team)


def load_parts(config: EngineConfig, ranks: Ranks) -> EngineParts:
    """Load a model and everything around it.

    Args:
        ranks: the others, which are started here; they are ended if anything fails.

    Raises:
        ValueError: bad configuration, checkpoint, tokenizer or folder of kernels; the message names the argument or
            tensor and the fix.
        WorkerError: another rank failed.
    """
    begin = time.monotonic()
    MONITOR.serving = False
    transfer_config = config.kv_transfer_config
    if transfer_config is None or not transfer_config.on_device:
        check_offloading(config.cache.kv_offloading_size)
    check_connector(config)
    connector = None if transfer_config is None else make_connector(transfer_config)
    if config.kernel_cache is not None:
        read_kernels_from(Path(config.kernel_cache))
    policy = policy_of(config.scheduler)
    origin = read_origin(config)
    folder, spec, modules = origin.folder, origin.spec, origin.modules
    generation_config = read_generation_config(config.model.generation_config, folder)
    defaults = default_params(
        config.model.generation_config, generation_config, config.model.override_generation_config
    )
    pooling = PoolingAbility.of(config.model, spec, checkpoint.read_config(folder), modules)
    with ranks:
        with background_compiler(spec, config, origin.draft) as compiler:  # leaving the block waits for it
            ranks.begin()
            prepared = prepare(config, origin, ranks.device_index)
            device, dtype = prepared.device, prepared.dtype
            each = block_bytes(spec, cache_dtype(config.cache, dtype), config.block_tokens)
            check_blocks(prepared.config, connector, each)
            if compiler is not None and device.type == "cuda":
                gpu = gpu_at(device.index or 0)
                compiler.begin(Target(gpu.arch, name_in_tables(gpu), dtype, origin.limit))
            tokenizer = tokenizer_of(config.model, folder)
            team = ranks.join(device)
            models = load_part(origin, prepared, team)
        config, runner, memory = start_runner(origin, prepared, models, team)
        executor = ranks.lead(runner, memory)
    assert config.cache.num_blocks is not None and config.model.max_model_len is not None
    limits = config.cache.num_blocks, config.model.max_model_len
    drafting = drafting_of(config, runner.drafts.cost)
    tier, stages = tier_of(config, runner), team.pipe.stages
    how: dict[str, Any] = {"enable_prefix_caching": config.cache.enable_prefix_caching, "policy": policy}
    scheduler = Scheduler(config.scheduler, config.block_tokens, *limits, drafting, tier, stages, **how)
    identity = (
        checkpoint.read_config(folder),
        origin.limit,
        (dtype, runner.caches.layout, config.block_tokens, runner.block_bytes),
    )
    with_parts = [model for model in models if model is not None]
    fingerprint = model_fingerprint(with_parts, *identity, team.exchange.group)
    slots = [] if runner.host is None else runner.host.memory
    transfer = make_transfer(transfer_config, connector, scheduler, slots, fingerprint)
    eos = end_tokens(spec, generation_config, tokenizer)
    inputs = InputProcessor(
        *(tokenizer, spec.vocab_size, limits[1], eos, config.model.seed, defaults),
        takes_extra_args=bool(config.logits_processors),
        max_logprobs=config.model.max_logprobs,
        structured_outputs_backend=config.structured_outputs_backend,
        transfer_params=TransferParams(config.kv_transfer_config, tells=True),
    )
    log_ready(spec, config, dtype, device, runner, begin)
    MONITOR.serving = True
    return EngineParts(config, executor, scheduler, inputs, pooling, memory, transfer)

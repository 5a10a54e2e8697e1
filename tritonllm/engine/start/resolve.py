"""What only the model or the machine can decide of a configuration: device, dtype, lengths, blocks."""

import dataclasses
import sys

import torch

from tritonllm.config.engine import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from tritonllm.engine.cache.kv_cache import SCALED, cache_dtype
from tritonllm.kernels.dense.cpu import multiplies_bfloat16
from tritonllm.models.interface import ModelFacts
from tritonllm.models.sentence_transformers import SentenceModules
from tritonllm.system.cpu_threads import SINGLE_THREAD_BELOW

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


def check_cache(config: CacheConfig, dtype: torch.dtype, device_type: str, capability: tuple[int, int]) -> None:
    """Check that a model of ``dtype`` can have such a cache on the device.

    Raises:
        ValueError: ``kv_cache_dtype`` contradicts ``dtype``, or is e4m3 on a GPU that does not convert it.
    """
    if cache_dtype(config, dtype) is SCALED and device_type == "cuda" and capability < (8, 9):
        raise ValueError(
            f"kv_cache_dtype={config.kv_cache_dtype!r} needs a GPU of compute capability 8.9 or more, this one has "
            f"{capability[0]}.{capability[1]}: leave it out, or try 'fp8_e5m2'"
        )


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
            f"max_model_len={config.max_model_len} is beyond the model's max_position_embeddings (or keep_window_size, "
            f"if that is less), {spec.max_position_embeddings}: lower it, or set rope scaling in config.json"
        )
    return config.max_model_len


def length_that_fits(config: EngineConfig, limit: int, num_blocks: int) -> int:
    """``limit``, lowered to what the cache can hold for one request unless the user set it.

    Raises:
        ValueError: the user's own ``max_model_len`` does not fit.
    """
    room = num_blocks * config.block_tokens
    if room >= limit:
        return limit
    if config.model.max_model_len is not None:
        needed = -(-limit // config.block_tokens)
        raise ValueError(
            f"max_model_len={limit} needs {needed} cache blocks of {config.block_tokens} tokens, but there are "
            f"{num_blocks}: lower max_model_len to {room}, or raise num_blocks (or the memory that decides it)"
        )
    if room < 2:
        raise ValueError(f"num_blocks={num_blocks} holds {room} token: a request needs at least a prompt and an output")
    return room


def settings_for(config: EngineConfig, spec: ModelFacts, limit: int) -> EngineConfig:
    """The settings that a model can run with. Where its tokens see those behind them, prompts come whole, and the keys
    of a prompt's beginning depend on its end. Other models keep what the user says.

    Args:
        limit: the longest prompt.

    Raises:
        ValueError: prompts come whole, and a step cannot hold the longest.
    """
    whole = not spec.causal or not config.scheduler.enable_chunked_prefill
    if whole and limit > config.scheduler.max_num_batched_tokens:
        why = "with enable_chunked_prefill=False" if spec.causal else "of an encoder"
        raise ValueError(
            f"max_num_batched_tokens={config.scheduler.max_num_batched_tokens} must hold the longest prompt {why}, "
            f"max_model_len={limit}: raise the one or lower the other"
        )
    if spec.causal:
        return config
    cache = dataclasses.replace(config.cache, enable_prefix_caching=False, kv_offloading_size=None)
    return dataclasses.replace(config, cache=cache, kv_transfer_config=None)


def most_blocks(config: EngineConfig, spec: ModelFacts) -> int:
    """How many blocks the cache can make use of. An encoder's prompt has blocks for one step only, and two steps are in
    flight."""
    if spec.causal or config.cache.num_blocks is not None:
        return sys.maxsize
    scheduler, size = config.scheduler, config.block_tokens
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

"""vLLM's ``EngineArgs``: an engine's arguments as one value, which a command line can fill."""

import argparse
import dataclasses
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from tritonllm.config.engine import CompilationConfig, EngineConfig, KVTransferConfig, SpeculativeConfig
from tritonllm.config.pooling_params import PoolerConfig
from tritonllm.config.vllm_arguments import VllmEngine


@dataclass
class EngineArgs(VllmEngine):
    """Arguments of :class:`LLM` under vLLM's names; ``None`` leaves one to its default.

    ``LLM(**dataclasses.asdict(args))`` and ``LLMEngine.from_engine_args(args)`` take them. The configuration's parts
    say what each means; the inherited fields take their neutral values only. Nothing is checked before an engine is
    made.
    """

    model: str = "Qwen/Qwen3-0.6B"
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    revision: str | None = None
    trust_remote_code: bool = False
    download_dir: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    load_format: str = "auto"
    model_impl: str = "auto"
    quantization: str | None = None
    allow_nan: bool = False
    seed: int | None = None
    max_logprobs: int = 20
    logprobs_mode: str = "raw_logprobs"
    generation_config: str = "auto"
    override_generation_config: str | dict[str, Any] | None = None
    runner: str = "auto"
    convert: str = "auto"
    pooler_config: str | dict[str, Any] | PoolerConfig | None = None
    block_size: int | None = None
    num_gpu_blocks_override: int | None = None
    gpu_memory_utilization: float = 0.9
    cpu_cache_bytes: int | None = None
    enable_prefix_caching: bool | None = None
    kv_offloading_size: float | None = None
    kv_cache_dtype: str = "auto"
    calculate_kv_scales: bool = False
    swap_space: float | None = None
    kv_transfer_config: str | dict[str, Any] | KVTransferConfig | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    scheduling_policy: str = "fcfs"
    scheduler_cls: str | type[Any] | None = None
    enable_chunked_prefill: bool | None = None
    long_prefill_token_threshold: int = 0
    async_scheduling: bool | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    enable_expert_parallel: bool = False
    expert_placement: str | None = None
    decode_context_parallel_size: int = 1
    data_parallel_size: int = 1
    distributed_executor_backend: str | None = None
    worker_timeout: float | None = None
    disable_custom_all_reduce: bool = False
    enforce_eager: bool = False
    disable_cascade_attn: bool = False
    deterministic: bool = False
    count_expert_load: bool = False
    compilation_config: int | dict[str, Any] | CompilationConfig | None = None
    speculative_config: str | dict[str, Any] | SpeculativeConfig | None = None
    kernel_cache: str | None = None
    step_timeout: float | None = None
    enable_sleep_mode: bool = False
    logits_processors: list[Any] | None = None
    structured_outputs_backend: str | None = None
    structured_outputs_config: str | dict[str, Any] | None = None

    def create_engine_config(self) -> EngineConfig:
        """The engine's configuration that these arguments ask for.

        Raises:
            ValueError: a bad value, or one that we lack; the message names the argument.
        """
        return EngineConfig.from_kwargs(**{field.name: getattr(self, field.name) for field in dataclasses.fields(self)})

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Give the parser an option for each field: ``--max-model-len 1024``, ``--enforce-eager``."""
        hints = get_type_hints(EngineArgs)
        for field in dataclasses.fields(EngineArgs):
            hint = hints[field.name]
            kinds = [type(field.default)] if hint is Any else list(get_args(hint) or (hint,))
            kind = next((kind for kind in (bool, int, float) if kind in kinds), str)
            how: dict[str, Any] = {"action": argparse.BooleanOptionalAction} if kind is bool else {"type": kind}
            parser.add_argument(f"--{field.name.replace('_', '-')}", default=field.default, **how)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> "EngineArgs":
        """The fields that a parsed command line holds; its other entries are not ours."""
        names = (field.name for field in dataclasses.fields(cls))
        return cls(**{name: getattr(args, name) for name in names if hasattr(args, name)})

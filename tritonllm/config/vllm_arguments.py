"""Arguments of vLLM that change nothing here: each field's default is the value at which vLLM behaves as we do.

A script that passes one of them at that value runs; any other value is refused by name, never ignored.
"""

import dataclasses
import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

ALIASES = {  # vLLM's name: ours
    "num_gpu_blocks_override": "num_blocks",
    "scheduling_policy": "policy",
    "override_pooler_config": "pooler_config",
    "swap_space": "kv_offloading_size",
    "structured_outputs_config": "structured_outputs_backend",  # of its keys the one that there is here
}
DTYPE_NAMES = {"half": "float16", "float": "float32"}


@dataclass(slots=True, kw_only=True, repr=False)
class VllmSampling:
    """Fields of vLLM's ``SamplingParams`` that have no effect here."""

    best_of: Any = None
    use_beam_search: Any = False
    length_penalty: Any = 1.0
    early_stopping: Any = False
    output_text_buffer_length: Any = 0
    flat_logprobs: Any = False
    logprob_token_ids: Any = None
    stream_interval: Any = None
    skip_reading_prefix_cache: Any = None
    skip_clone: Any = False


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class VllmStructure:
    """Fields of vLLM's ``StructuredOutputsParams`` that have no effect here."""

    backend: Any = None
    disable_fallback: Any = False
    disable_additional_properties: Any = False
    whitespace_pattern: Any = None
    structural_tag: Any = None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class VllmStructuredOutputs:
    """Keys of vLLM's ``structured_outputs_config`` beside ``backend``. They have no effect here."""

    disable_fallback: Any = False
    disable_any_whitespace: Any = False
    disable_additional_properties: Any = False
    reasoning_parser: Any = ""
    reasoning_parser_plugin: Any = ""
    enable_in_reasoning: Any = False


@dataclass(kw_only=True, repr=False)
class VllmEngine:
    """Engine arguments of vLLM that have no effect here."""

    # tensor, pipeline and data parallelism alone
    prefill_context_parallel_size: Any = 1
    cp_kv_cache_interleave_size: Any = 1
    dcp_kv_cache_interleave_size: Any = 1
    nnodes: Any = 1
    node_rank: Any = 0
    enable_eplb: Any = False
    max_parallel_loading_workers: Any = None
    worker_use_ray: Any = False
    ray_workers_use_nsight: Any = False
    worker_cls: Any = "auto"
    worker_extension_cls: Any = None
    # the checkpoint
    task: Any = "auto"
    config_format: Any = "auto"
    hf_config_path: Any = None
    hf_overrides: Any = None
    hf_token: Any = None
    rope_scaling: Any = None
    rope_theta: Any = None
    code_revision: Any = None
    tokenizer_revision: Any = None
    tokenizer_mode: Any = "auto"
    ignore_patterns: Any = None
    model_loader_extra_config: Any = None
    safetensors_load_strategy: Any = None
    quantization_param_path: Any = None
    allow_deprecated_quantization: Any = False
    cpu_offload_gb: Any = 0
    # the cache and the schedule
    kv_cache_memory_bytes: Any = None
    prefix_caching_hash_algo: Any = None
    disable_sliding_window: Any = False
    disable_hybrid_kv_cache_manager: Any = None
    max_num_partial_prefills: Any = 1
    max_long_partial_prefills: Any = 1
    num_lookahead_slots: Any = 0
    num_scheduler_steps: Any = 1
    multi_step_stream_outputs: Any = True
    stream_interval: Any = 1
    scheduler_delay_factor: Any = 0.0
    preemption_mode: Any = None
    use_v2_block_manager: Any = True
    kv_offloading_backend: Any = None
    kv_events_config: Any = None
    # what is computed
    attention_backend: Any = None
    optimization_level: Any = None
    speculative_model: Any = None
    num_speculative_tokens: Any = None
    guided_decoding_backend: Any = None
    reasoning_parser: Any = None
    logits_processor_pattern: Any = None
    enable_prompt_embeds: Any = False
    additional_config: Any = None
    # adapters
    enable_lora: Any = False
    enable_lora_bias: Any = False
    max_loras: Any = 1
    max_lora_rank: Any = 16
    max_cpu_loras: Any = None
    lora_dtype: Any = "auto"
    lora_extra_vocab_size: Any = 256
    fully_sharded_loras: Any = False
    default_mm_loras: Any = None
    enable_prompt_adapter: Any = False
    # images and sound
    language_model_only: Any = True
    limit_mm_per_prompt: Any = None
    mm_processor_kwargs: Any = None
    mm_processor_cache_gb: Any = 4
    media_io_kwargs: Any = None
    skip_mm_profiling: Any = False
    interleave_mm_strings: Any = False
    allowed_local_media_path: Any = None
    allowed_media_domains: Any = None
    # reports and resources, of which any value is as good as another here
    max_seq_len_to_capture: Any = 8192
    served_model_name: Any = None
    disable_log_stats: Any = False
    disable_log_requests: Any = False
    enable_log_requests: Any = False
    use_tqdm_on_load: Any = True
    otlp_traces_endpoint: Any = None
    collect_detailed_traces: Any = None
    show_hidden_metrics_for_version: Any = None


ALSO_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "stream_interval": (None, 1),
    "skip_reading_prefix_cache": (False,),
    "skip_clone": (True,),
    "task": ("generate",),
    "config_format": ("hf",),
    "tokenizer_mode": ("hf",),
    "prefix_caching_hash_algo": ("builtin", "sha256", "xxhash"),
    "kv_offloading_backend": ("native",),
    "disable_hybrid_kv_cache_manager": (False,),
    "guided_decoding_backend": ("auto", "xgrammar"),
    "backend": ("auto", "xgrammar"),
    "disable_fallback": (True,),
    "preemption_mode": ("recompute",),
}
ANY_VALUE = {
    "language_model_only",  # it is all that there is
    "max_seq_len_to_capture",
    "served_model_name",
    "disable_log_stats",
    "disable_log_requests",
    "enable_log_requests",
    "use_tqdm_on_load",
}
ADVICE = {
    "task": "use runner='pooling', and convert='embed' or 'classify'",
    "best_of": "ask for n outputs and choose among them",
    "tokenizer_mode": "leave it at 'auto', the tokenizer that the files describe; transformers 5 has no slow ones",
    "max_num_partial_prefills": "as many prompts share a step as fit; long_prefill_token_threshold limits each one",
    "max_long_partial_prefills": "as many prompts share a step as fit; long_prefill_token_threshold limits each one",
    "kv_cache_memory_bytes": "use gpu_memory_utilization or num_gpu_blocks_override",
    "hf_overrides": "change the model's config.json",
    "rope_scaling": "change the model's config.json",
    "rope_theta": "change the model's config.json",
    "speculative_model": "use speculative_config",
    "num_speculative_tokens": "use speculative_config",
    "lora_request": "merge the adapter into the checkpoint",
    "enable_lora": "merge the adapters into the checkpoint",
    "disable_additional_properties": "write additionalProperties: false into the schema",
    "disable_any_whitespace": "ask for it in the structured_outputs of each request",
    "reasoning_parser": "give it to the server: tritonllm serve --reasoning-parser",
    "reasoning_parser_plugin": "give it to the server: tritonllm serve --reasoning-parser-plugin",
    "enable_in_reasoning": "a form holds behind the thought, or from the first token on",
    "whitespace_pattern": "leave it out, or use disable_any_whitespace",
    "tokenization_kwargs": "leave it out, use truncate_prompt_tokens, or pass token ids",
    "reset_running_requests": "abort the requests first",
}
_EMPTY: tuple[Any, ...] = ({}, [], (), "")  # as good as None


def is_neutral(name: str, value: Any, default: Any) -> bool:
    if value is default or name in ANY_VALUE:
        return True
    allowed = (default, *ALSO_NEUTRAL.get(name, ()), *(_EMPTY if default is None else ()))
    return any(type(value) is type(other) and value == other for other in allowed) or (
        type(default) in (int, float) and type(value) in (int, float) and value == default
    )


def refuse(name: str, value: Any) -> None:
    """Refuse a value of an argument that only vLLM has.

    Raises:
        ValueError: always; it says what to do without the argument.
    """
    advice = ADVICE.get(name.rpartition(".")[2], "leave it out")
    raise ValueError(f"{name}={value!r}: tritonllm does not have this; {advice}")


def no_adapter(lora_request: Any) -> None:
    """Refuse LoRA adapters.

    Raises:
        ValueError: there is one.
    """
    requests = lora_request if isinstance(lora_request, list | tuple) else [lora_request]
    for request in requests:
        if request is not None:
            refuse("lora_request", request)


def only_none(**arguments: Any) -> None:
    """Refuse values of a method's arguments that only vLLM has and that are ``None`` by default.

    Raises:
        ValueError: one is not at its neutral value, ``None``.
    """
    require_neutral(arguments, [(name, None) for name in arguments])


def only_false(**arguments: Any) -> None:
    """Refuse values of a method's arguments that only vLLM has and that are ``False`` by default."""
    require_neutral(arguments, [(name, False) for name in arguments])


def require_neutral(values: Mapping[str, Any], defaults: Iterable[tuple[str, Any]]) -> None:
    """Refuse values that ask for what is not here.

    Raises:
        ValueError: one of ``values`` asks for what is not here.
    """
    for name, default in defaults:
        if name in values and not is_neutral(name, values[name], default):
            refuse(name, values[name])


def defaults_of(kind: type) -> tuple[tuple[str, Any], ...]:
    """``(name, default)`` of the fields of a dataclass here."""
    return tuple((field.name, field.default) for field in dataclasses.fields(kind))


ENGINE_DEFAULTS = defaults_of(VllmEngine)
SAMPLING_DEFAULTS = defaults_of(VllmSampling)
STRUCTURE_DEFAULTS = defaults_of(VllmStructure)
STRUCTURED_OUTPUTS_DEFAULTS = defaults_of(VllmStructuredOutputs)


def _backend_of(config: Any) -> Any:
    """What vLLM's ``structured_outputs_config`` says of ``structured_outputs_backend``.

    Args:
        config: a dict, or one as JSON.

    Raises:
        ValueError: it is none, or has a key that vLLM has not, or one at a value that we lack.
    """
    if isinstance(config, str):
        try:
            config = json.loads(config)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"structured_outputs_config is no JSON: {config!r:.100}") from error
    if not isinstance(config, Mapping):
        raise ValueError(f"structured_outputs_config must be a dict or a JSON object, got {config!r:.100}")
    for name, value in config.items():
        if name != "backend" and name not in dict(STRUCTURED_OUTPUTS_DEFAULTS):
            known = ", ".join(["backend", *dict(STRUCTURED_OUTPUTS_DEFAULTS)])
            raise ValueError(f"structured_outputs_config has the unknown key {name!r}; known: {known}")
        if name != "backend" and not is_neutral(name, value, dict(STRUCTURED_OUTPUTS_DEFAULTS)[name]):
            refuse(f"structured_outputs_config.{name}", value)
    return config.get("backend") or "auto"


def translate(kwargs: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """Engine arguments under our names: aliases resolved, vLLM's own at their neutral values left out.

    ``None`` leaves an argument to its default, as in vLLM.

    Raises:
        ValueError: an unknown argument, two names for the same one, or a value that we lack.
    """
    require_neutral(kwargs, ENGINE_DEFAULTS)
    neutral = {name for name, _ in ENGINE_DEFAULTS}
    known = list(known)
    result: dict[str, Any] = {}
    for name, value in kwargs.items():
        if name not in neutral and name not in known and name not in ALIASES:
            near = difflib.get_close_matches(name, {*known, *neutral, *ALIASES}, n=3)
            hint = f" (did you mean {' or '.join(near)}?)" if near else ""
            raise ValueError(f"unknown argument {name!r}{hint}; known: {', '.join(known)}")
        if name in neutral or (value is None and name != "model"):
            continue
        if name in ALIASES and kwargs.get(ALIASES[name]) is not None:
            raise ValueError(f"{name} and {ALIASES[name]} are the same: give one")
        result[ALIASES.get(name, name)] = _backend_of(value) if name == "structured_outputs_config" else value
    if "dtype" in result:
        dtype = str(result["dtype"]).removeprefix("torch.")  # a torch.dtype is welcome, too
        result["dtype"] = DTYPE_NAMES.get(dtype, dtype)
    return result

import dataclasses
from enum import IntEnum
from pathlib import Path

import pytest

from tritonllm.config.engine import (
    CacheConfig,
    CompilationConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    max_concurrency,
)
from tritonllm.config.speculative import SpeculativeConfig
from tritonllm.engine.start.arg_utils import EngineArgs

DRAFT_MODEL = SpeculativeConfig(method="draft_model", model="m", num_speculative_tokens=2)


@pytest.mark.parametrize(
    ("blocks", "tokens", "length", "expected"), [(8, 16, 64, 2.0), (8, 16, 65, 1.6), (3, 4, 16, 0.75), (7, 256, 100, 7)]
)
def test_how_many_of_the_longest_requests_fit_at_once(blocks, tokens, length, expected):
    assert max_concurrency(blocks, tokens, length) == expected


@pytest.mark.parametrize(
    ("part", "kwargs", "message"),
    [
        (ModelConfig, {"model": ""}, "model must be a folder or a hub id"),
        (ModelConfig, {"model": Path("x")}, "model must be a folder or a hub id"),
        (ModelConfig, {"dtype": "int8"}, "dtype must be one of auto, float32"),
        (ModelConfig, {"model": " "}, "model must be a folder or a hub id"),
        (ModelConfig, {"device": "frob"}, "device must be auto, cpu, cuda or cuda:N, got 'frob'"),
        (ModelConfig, {"device": "cuda:x"}, "device must be"),
        (ModelConfig, {"allow_nan": 1}, "allow_nan must be of type bool"),
        (ModelConfig, {"load_format": "gguf"}, "load_format must be one of auto, safetensors"),
        (ModelConfig, {"model_impl": "terratorch"}, "model_impl must be one of auto, vllm, transformers"),
        (ModelConfig, {"max_model_len": 0}, "max_model_len must be an integer of at least 1"),
        (ModelConfig, {"max_model_len": 1.5}, "max_model_len"),
        (ModelConfig, {"max_model_len": True}, "max_model_len"),
        (ModelConfig, {"skip_tokenizer_init": "no"}, "skip_tokenizer_init must be of type bool"),
        (ModelConfig, {"trust_remote_code": 1}, "trust_remote_code must be of type bool"),
        (ModelConfig, {"seed": "1"}, "seed must be of type int"),
        (ModelConfig, {"seed": None}, "seed must be of type int"),
        (ModelConfig, {"logprobs_mode": "raw_logits"}, "logprobs_mode must be one of raw_logprobs, processed_logprobs"),
        (ModelConfig, {"max_logprobs": -2}, "max_logprobs must be an integer of at least -1"),
        (ModelConfig, {"max_logprobs": True}, "max_logprobs must be of type int"),
        (ModelConfig, {"download_dir": ""}, "download_dir must be a folder"),
        (ModelConfig, {"download_dir": Path("x")}, "download_dir must be a folder"),
        (CacheConfig, {"block_size": 0}, "block_size must be an integer of at least 1"),
        (CacheConfig, {"block_size": 257}, "block_size must be at most 256"),
        (
            CacheConfig,
            {"kv_cache_dtype": "int8"},
            "kv_cache_dtype must be one of auto, .*, fp8, fp8_e4m3, fp8_e5m2, got",
        ),
        (CacheConfig, {"num_blocks": 0}, "num_blocks must be an integer of at least 1"),
        (CacheConfig, {"cpu_cache_bytes": 0}, "cpu_cache_bytes must be an integer of at least 1"),
        (CacheConfig, {"gpu_memory_utilization": 0.0}, r"gpu_memory_utilization must be in \(0, 1\]"),
        (CacheConfig, {"gpu_memory_utilization": 1.01}, "gpu_memory_utilization"),
        (CacheConfig, {"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization"),
        (CacheConfig, {"gpu_memory_utilization": "0.9"}, "gpu_memory_utilization"),
        (CacheConfig, {"gpu_memory_utilization": True}, "gpu_memory_utilization"),
        (CacheConfig, {"enable_prefix_caching": "false"}, "enable_prefix_caching must be of type bool"),
        (SchedulerConfig, {"max_num_seqs": 0}, "max_num_seqs must be an integer of at least 1"),
        (SchedulerConfig, {"max_num_batched_tokens": -1}, "max_num_batched_tokens must be an integer of at least 1"),
        (SchedulerConfig, {"max_num_seqs": 9, "max_num_batched_tokens": 8}, r"max_num_batched_tokens \(8\) must be"),
        (SchedulerConfig, {"enable_chunked_prefill": 0}, "enable_chunked_prefill must be of type bool"),
        (SchedulerConfig, {"long_prefill_token_threshold": -1}, "long_prefill_token_threshold must be an integer of"),
        (
            SchedulerConfig,
            {"long_prefill_token_threshold": 8, "enable_chunked_prefill": False},
            "long_prefill_token_threshold=8 cuts prompts, which enable_chunked_prefill=False forbids",
        ),
        (SchedulerConfig, {"policy": "random"}, "policy must be one of fcfs, priority"),
        (EngineConfig, {"enforce_eager": 1}, "enforce_eager must be of type bool"),
        (EngineConfig, {"disable_cascade_attn": "no"}, "disable_cascade_attn must be of type bool"),
        (EngineConfig, {"compilation_config": 3}, "compilation_config must be of type CompilationConfig"),
        (CompilationConfig, {"mode": 2}, r"compilation_config: mode must be 0 \(off\) or 3 .*, got 2"),
        (CompilationConfig, {"mode": True}, "mode must be 0"),
        (CompilationConfig, {"mode": "3"}, "mode must be 0"),
        (CompilationConfig, {"backend": "nvfuser"}, "compilation_config: backend must be one of inductor, "),
        (EngineConfig, {"step_timeout": 0}, "step_timeout must be a number of seconds greater than 0"),
        (EngineConfig, {"step_timeout": "1"}, "step_timeout must be a number of seconds greater than 0"),
        (EngineConfig, {"step_timeout": float("nan")}, "step_timeout must be a number of seconds greater than 0"),
    ],
)
def test_bad_values_are_named(part, kwargs, message):
    if part is ModelConfig:
        kwargs = {"model": "m"} | kwargs
    if part is EngineConfig:
        kwargs = {"model": ModelConfig(model="m")} | kwargs
    with pytest.raises(ValueError, match=message):
        part(**kwargs)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, CompilationConfig()),
        (0, CompilationConfig(mode=0)),
        ({}, CompilationConfig()),
        (3, CompilationConfig(mode=3)),
        (IntEnum("Mode", {"ON": 3}).ON, CompilationConfig(mode=3)),
        ({"level": 3}, CompilationConfig(mode=3)),
        ({"mode": 3, "backend": "eager"}, CompilationConfig(mode=3, backend="eager")),
        (CompilationConfig(mode=3), CompilationConfig(mode=3)),
    ],
)
def test_compilation_configs(value, expected):
    assert EngineConfig.from_kwargs(model="m", compilation_config=value).compilation_config == expected
    assert EngineArgs(model="m", compilation_config=value).create_engine_config().compilation_config == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (1, "mode must be 0 .* or 3 .*, got 1"),
        (False, "mode must be 0"),
        ("3", "compilation_config must be 0, 3, a dict or a CompilationConfig, got '3'"),
        ([3], "compilation_config must be 0, 3, a dict"),
        ({"level": 2}, "mode must be 0"),
        ({"mode": 3, "level": 3}, "mode and level are the same: give one"),
        ({"mode": 3, "cudagraph_mode": "FULL"}, "'cudagraph_mode' is not supported; there are mode, backend"),
        ({3: 3}, "3 is not supported"),
    ],
)
def test_bad_compilation_configs(value, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig.from_kwargs(model="m", compilation_config=value)


def test_limits_themselves_are_allowed():
    CacheConfig(block_size=256, num_blocks=1, cpu_cache_bytes=1, gpu_memory_utilization=1)
    SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=8, policy="priority")
    ModelConfig(model="m", max_model_len=1, seed=-1)


def test_flat_arguments_find_their_parts():
    config = EngineConfig.from_kwargs(
        model="m", dtype="float32", block_size=8, max_num_seqs=3, policy="priority", disable_cascade_attn=True
    )
    assert config == EngineConfig(
        model=ModelConfig(model="m", dtype="float32"),
        cache=CacheConfig(block_size=8),
        scheduler=SchedulerConfig(max_num_seqs=3, policy="priority"),
        disable_cascade_attn=True,
    )


def test_an_unknown_argument_is_named_beside_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown argument 'blocksize' \(did you mean block_size"):
        EngineConfig.from_kwargs(model="m", blocksize=8)


def test_every_known_argument_is_taken():
    defaults = EngineConfig(model=ModelConfig(model="m"))
    values = dataclasses.asdict(defaults)
    for part in ("model", "cache", "scheduler", "parallel"):
        values |= values.pop(part)
    assert sorted(values) == EngineConfig.known_kwargs()
    assert EngineConfig.from_kwargs(**values) == defaults


def test_configurations_do_not_change():
    config = EngineConfig(model=ModelConfig(model="m"))
    for part, name in ((config, "model"), (config.model, "seed"), (config.cache, "block_size")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, name, 1)

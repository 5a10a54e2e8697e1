import argparse
import dataclasses
import json

import pytest
import torch

from tritonllm import EngineArgs
from tritonllm.config.engine import EngineConfig, ModelConfig
from tritonllm.config.vllm_arguments import (
    ADVICE,
    ALIASES,
    ALSO_NEUTRAL,
    ANY_VALUE,
    VllmEngine,
    VllmSampling,
    VllmStructure,
    VllmStructuredOutputs,
    only_false,
    only_none,
)

KINDS = (VllmEngine, VllmSampling, VllmStructure, VllmStructuredOutputs)
NAMES = {field.name for kind in KINDS for field in dataclasses.fields(kind)}
DEFAULT = EngineConfig(model=ModelConfig(model="m"))


def make(**kwargs):
    return EngineConfig.from_kwargs(model="m", **kwargs)


def test_tables_name_what_there_is():
    assert set(ALSO_NEUTRAL) | ANY_VALUE <= NAMES
    assert set(ADVICE) - NAMES == {"lora_request", "tokenization_kwargs", "reset_running_requests"}
    assert set(ALIASES.values()) <= set(EngineConfig.known_kwargs())
    assert not NAMES & {*EngineConfig.known_kwargs(), *ALIASES}


@pytest.mark.parametrize(
    "kwargs",
    [
        {field.name: field.default for field in dataclasses.fields(VllmEngine)},
        {name: values[0] for name, values in ALSO_NEUTRAL.items() if hasattr(VllmEngine, name)},
        {"quantization": None, "enable_chunked_prefill": True, "pipeline_parallel_size": 1, "tensor_parallel_size": 1},
        {"kv_offloading_backend": "native", "served_model_name": ["a"], "disable_log_stats": True},
        {"hf_overrides": {}, "limit_mm_per_prompt": {}, "cpu_offload_gb": 0.0, "rope_scaling": ""},
        {"block_size": None, "max_num_seqs": None, "enable_prefix_caching": None, "seed": None, "tokenizer": None},
    ],
)
def test_neutral_values_change_nothing(kwargs):
    assert make(**kwargs) == DEFAULT


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"quantization": "exl2"}, "quantization must be one of fp8, int8, int4, awq.*got 'exl2'"),
        ({"max_num_partial_prefills": 2}, "max_num_partial_prefills=2.*long_prefill_token_threshold limits"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be an integer of at least 1"),
        (
            {"tensor_parallel_size": 2, "distributed_executor_backend": "uni"},
            "is one process, but tensor_parallel_size=2",
        ),
        ({"tensor_parallel_size": 2, "device": "cuda:1"}, "device='cuda:1' is one device, but tensor_parallel_size=2"),
        ({"tensor_parallel_size": 2, "compilation_config": 3}, "compilation_config.*tensor_parallel_size=2"),
        ({"tensor_parallel_size": 2, "enable_sleep_mode": True}, "enable_sleep_mode.*tensor_parallel_size=2"),
        ({"tensor_parallel_size": 2, "swap_space": 1}, "kv_offloading_size.*tensor_parallel_size=2"),
        ({"worker_timeout": 0}, "worker_timeout must be a number of seconds greater than 0"),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size must be an integer of at least 1"),
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size=2 must divide tensor_parallel_size=1"),
        ({"decode_context_parallel_size": 0}, "decode_context_parallel_size must be an integer of at least 1"),
        (
            {"tensor_parallel_size": 4, "decode_context_parallel_size": 4, "block_size": 128},
            "decode_context_parallel_size=4 times block_size=128 are 512 tokens of a block",
        ),
        ({"cp_kv_cache_interleave_size": 16}, "cp_kv_cache_interleave_size=16"),
        ({"enable_lora": True}, "enable_lora=True"),
        ({"enable_lora": 1}, "enable_lora=1"),
        (
            {"kv_cache_dtype": "fp8_inc"},
            "kv_cache_dtype must be one of auto, .*, fp8, fp8_e4m3, fp8_e5m2, got 'fp8_inc'",
        ),
        ({"speculative_model": "x"}, "speculative_model="),
        ({"hf_overrides": {"a": 1}}, "hf_overrides=.*config.json"),
        ({"limit_mm_per_prompt": {"image": 2}}, "limit_mm_per_prompt="),
        ({"distributed_executor_backend": "frob"}, "distributed_executor_backend must be one of uni, mp"),
        ({"tokenizer_mode": "mistral"}, "tokenizer_mode='mistral'.*leave it at 'auto'"),
        ({"tokenizer_mode": "slow"}, "tokenizer_mode='slow'.*leave it at 'auto', .*transformers 5 has no slow ones"),
        ({"max_modellen": 3}, r"unknown argument 'max_modellen' \(did you mean max_model_len"),
        ({"quantisation": None}, r"unknown argument 'quantisation' \(did you mean quantization"),
        ({"xyzzy": 3}, "unknown argument 'xyzzy'; known: allow_nan, async_scheduling"),
        ({"policy": "fcfs", "scheduling_policy": "fcfs"}, "scheduling_policy and policy are the same"),
        ({"scheduling_policy": "random"}, "policy must be one of"),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"generation_config": ""}, "generation_config must be"),
    ],
)
def test_what_we_lack_is_refused_by_name(kwargs, message):
    with pytest.raises(ValueError, match=message):
        make(**kwargs)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("half", "float16"), ("float", "float32"), ("bfloat16", "bfloat16"), (torch.float16, "float16")],
)
def test_names_of_dtypes(name, dtype):
    assert make(dtype=name).model.dtype == dtype


def test_aliases():
    config = make(scheduling_policy="priority", num_gpu_blocks_override=7)
    assert (config.scheduler.policy, config.cache.num_blocks) == ("priority", 7)


@pytest.mark.parametrize(
    "config",
    [
        {"backend": "guidance"},
        '{"backend": "guidance", "disable_fallback": true}',
        {"backend": "guidance", **{field.name: field.default for field in dataclasses.fields(VllmStructuredOutputs)}},
    ],
)
def test_the_backend_of_structured_outputs_as_vllm_has_it(config):
    assert make(structured_outputs_config=config) == make(structured_outputs_backend="guidance")
    args = EngineArgs("m", structured_outputs_config=config)
    assert args.create_engine_config().structured_outputs_backend == "guidance"
    line = ["--structured-outputs-config", config if isinstance(config, str) else json.dumps(config)]
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    assert (
        EngineArgs.from_cli_args(parser.parse_args(line)).create_engine_config().structured_outputs_backend
        == "guidance"
    )
    assert make(structured_outputs_config={}) == make(structured_outputs_config={"backend": "auto"}) == DEFAULT


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"backends": "guidance"},
            "structured_outputs_config has the unknown key 'backends'; known: backend, disable_f",
        ),
        ({"backend": "outlines"}, "structured_outputs_backend must be one of auto, xgrammar, guidance"),
        ({"disable_any_whitespace": True}, "structured_outputs_config.disable_any_whitespace=True: .* of each request"),
        ({"disable_additional_properties": True}, "disable_additional_properties=True: .*into the schema"),
        ({"reasoning_parser": "qwen3"}, "structured_outputs_config.reasoning_parser='qwen3': .*--reasoning-parser"),
        ({"reasoning_parser_plugin": "own.py"}, "reasoning_parser_plugin='own.py': .*--reasoning-parser-plugin"),
        ({"enable_in_reasoning": True}, "structured_outputs_config.enable_in_reasoning=True"),
        ("{", "structured_outputs_config is no JSON"),
        ("[]", "structured_outputs_config must be a dict"),
        (3, "structured_outputs_config must be a dict"),
    ],
)
def test_what_it_lacks_is_refused_by_name(config, message):
    with pytest.raises(ValueError, match=message):
        make(structured_outputs_config=config)


def test_the_backend_is_given_once():
    with pytest.raises(ValueError, match="structured_outputs_config and structured_outputs_backend are the same"):
        make(structured_outputs_config={"backend": "guidance"}, structured_outputs_backend="xgrammar")


def test_engine_args_have_every_argument_and_its_default():
    fields = {field.name for field in dataclasses.fields(EngineArgs)}
    ours = {ALIASES.get(name, name) for name in fields - NAMES}
    assert ours == set(EngineConfig.known_kwargs())
    assert EngineArgs("m").create_engine_config() == DEFAULT
    assert EngineConfig.from_kwargs(**dataclasses.asdict(EngineArgs("m"))) == DEFAULT


def test_engine_args_from_a_command_line():
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    parser.add_argument("--other")
    line = "--model m --max-model-len 64 --enforce-eager --no-enable-prefix-caching --tensor-parallel-size 1 --other x"
    args = EngineArgs.from_cli_args(parser.parse_args([*line.split(), "--gpu-memory-utilization", "0.5"]))
    config = args.create_engine_config()
    assert (config.model.max_model_len, config.enforce_eager) == (64, True)
    assert (config.cache.enable_prefix_caching, config.cache.gpu_memory_utilization) == (False, 0.5)
    assert EngineArgs.from_cli_args(parser.parse_args(["--model", "m"])).create_engine_config() == DEFAULT
    with pytest.raises(ValueError, match=r"quantization must be one of fp8, int8, int4, .*, got 'exl2'"):
        EngineArgs.from_cli_args(parser.parse_args(["--quantization", "exl2"])).create_engine_config()


def test_arguments_of_methods():
    only_none(tokenization_kwargs=None, trace_headers={})
    only_false(reset_running_requests=False)
    with pytest.raises(ValueError, match=r"tokenization_kwargs=.*truncate_prompt_tokens, or pass token ids"):
        only_none(tokenization_kwargs={"truncation": True})
    for value in (True, 1, None):
        with pytest.raises(ValueError, match=f"reset_running_requests={value}.*abort the requests first"):
            only_false(reset_running_requests=value)

"""Nemotron 3, Nemotron 4 and Minitron, Arcee, Jais 2 and Persimmon: squared ReLU without a gate.

Nemotron's layer norms have weights that are stored minus 1.
"""

from typing import Any

from tritonllm.models.config_reader import ConfigReader
from tritonllm.models.families.common import (
    Family,
    always,
    attention,
    full_attention,
    head_size,
    layer_norm,
    mlp,
    rms_norm,
    same_layers,
)
from tritonllm.models.families.llama import COMMON
from tritonllm.models.spec import LayerSpec
from tritonllm.models.weight_names import WeightNames


def _layers(config: ConfigReader) -> tuple[LayerSpec, ...]:
    bias = config.flag("attention_bias")
    attends = attention(config, rope=config.rope(head_size(config)), qkv_bias=bias, o_bias=bias)
    return same_layers(config, attends, mlp(config, gated=False, bias=config.flag("mlp_bias")))


def _nemotron(config: ConfigReader) -> dict[str, Any]:
    return {"norm": layer_norm(config), "layers": _layers(config)}


def _arcee(config: ConfigReader) -> dict[str, Any]:
    return {"norm": rms_norm(config), "layers": _layers(config)}


def _persimmon(config: ConfigReader) -> dict[str, Any]:
    norm = layer_norm(config)
    attends = full_attention(
        config,
        rope=config.rope(head_size(config)),
        qkv_bias=True,
        o_bias=True,
        qk_norm=norm if config.flag("qk_layernorm") else None,
    )
    return {"norm": norm, "layers": same_layers(config, attends, mlp(config, gated=False, bias=True))}


_PERSIMMON_NAMES = WeightNames(
    norm="model.final_layernorm",
    qkv=("self_attn.query_key_value",),
    qkv_by_group=True,
    o="self_attn.dense",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
)


FAMILIES: dict[str, Family] = {
    "NemotronForCausalLM": Family(
        model_type="nemotron",
        axes=_nemotron,
        names=always(WeightNames(up=("mlp.up_proj",), norm_weights_minus_one=True)),
        defaults={
            **COMMON,
            "layer_norm_eps": 1e-5,
            "hidden_act": "relu2",
            "max_position_embeddings": 4096,
            "partial_rotary_factor": 0.5,
            "intermediate_size": 24576,
            "eos_token_id": 3,
        },
        renames={"norm_eps": "layer_norm_eps", "rope_percent": "partial_rotary_factor"},
    ),
    "ArceeForCausalLM": Family(
        model_type="arcee",
        axes=_arcee,
        names=always(WeightNames(up=("mlp.up_proj",))),
        defaults={
            **COMMON,
            "rms_norm_eps": 1e-5,
            "hidden_act": "relu2",
            "max_position_embeddings": 4096,
            "eos_token_id": 128001,
        },
    ),
    "Jais2ForCausalLM": Family(
        model_type="jais2",
        axes=_nemotron,
        names=always(WeightNames(up=("mlp.up_proj",))),
        defaults={
            **COMMON,
            "layer_norm_eps": 1e-5,
            "hidden_act": "relu2",
            "max_position_embeddings": 8192,
            "attention_bias": True,
            "mlp_bias": True,
            "eos_token_id": 150024,
        },
    ),
    "PersimmonForCausalLM": Family(
        model_type="persimmon",
        axes=_persimmon,
        names=always(_PERSIMMON_NAMES),
        defaults={
            **COMMON,
            "layer_norm_eps": 1e-5,
            "hidden_act": "relu2",
            "max_position_embeddings": 16384,
            "partial_rotary_factor": 0.5,
            "qk_layernorm": True,
            "eos_token_id": 2,
        },
    ),
}

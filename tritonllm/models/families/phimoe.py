"""Phi-3.5-MoE: experts by SparseMixer, layer norms and biases."""

import dataclasses
from typing import Any

from tritonllm.layers.moe import MoESpec
from tritonllm.models.config_reader import ConfigReader
from tritonllm.models.families.common import (
    STACKED,
    Family,
    always,
    attention,
    check_fixed,
    head_size,
    layer_norm,
    same_layers,
)
from tritonllm.models.families.experts import MIXTRAL_NAMES
from tritonllm.models.families.llama import COMMON


def _phimoe(config: ConfigReader) -> dict[str, Any]:
    check_fixed(config, num_experts_per_tok=(2,), router_jitter_noise=(0.01,))
    bias = config.flag("attention_bias")
    rope = config.rope(head_size(config))
    attends = attention(config, rope=rope, window=config.window(), qkv_bias=bias, o_bias=bias)
    experts = MoESpec(
        num_experts=config.size("num_local_experts"),
        top_k=2,
        intermediate_size=config.size("intermediate_size"),
        activation=config.activation(),
        scoring="sparsemixer",
        renormalize=False,
    )
    layers = same_layers(config, attends, experts)
    return {"norm": layer_norm(config), "layers": layers, "logit_bias": config.flag("lm_head_bias")}


FAMILIES: dict[str, Family] = {
    "PhimoeForCausalLM": Family(
        model_type="phimoe",
        axes=_phimoe,
        names=always(MIXTRAL_NAMES),
        in_memory=always(dataclasses.replace(STACKED, router="mlp.router")),
        aliases=("PhiMoEForCausalLM",),  # as published
        defaults={
            **COMMON,
            "layer_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "eos_token_id": 2,
            "sliding_window": None,
            "intermediate_size": 6400,
            "num_local_experts": 16,
            "lm_head_bias": False,
        },
        renames={"rms_norm_eps": "layer_norm_eps"},
        reads=frozenset({"num_local_experts"}),
    ),
}

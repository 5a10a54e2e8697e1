"""Laguna: layers with different numbers of query heads, a softplus gate of attention's output, and sigmoid experts."""

import dataclasses
from typing import Any

from tritonllm.layers.attention import AttentionSpec
from tritonllm.layers.mlp import MLPSpec
from tritonllm.layers.moe import MoESpec
from tritonllm.models.config_reader import ConfigReader
from tritonllm.models.families.common import STACKED, Family, always, attention, check_fixed, rms_norm, rotations
from tritonllm.models.families.llama import COMMON
from tritonllm.models.families.sigmoid_experts import blocks
from tritonllm.models.spec import LayerSpec
from tritonllm.models.weight_names import WeightNames

_ROTATIONS: dict[str, Any] = {
    "full_attention": {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
}
_GATES = {True: "head", "per-head": "head", "per-element": "element"}


def _laguna(config: ConfigReader) -> dict[str, Any]:
    check_fixed(config, gating=tuple(_GATES), moe_apply_router_weight_on_input=(False,))
    norm, activation = rms_norm(config), config.activation()
    experts = MoESpec(
        num_experts=config.size("n_routed_experts"),
        top_k=config.size("num_experts_per_tok"),
        intermediate_size=config.size("moe_intermediate_size"),
        activation=activation,
        scoring="sigmoid",
        correction_bias=True,
        router_softcap=max(0.0, config.number("moe_router_logit_softcapping", positive=False)),
        scale=config.number("moe_routed_scaling_factor"),
        shared=MLPSpec(intermediate_size=config.size("shared_expert_intermediate_size"), activation=activation),
    )
    pairs = zip(_attentions(config), blocks(config, experts), strict=True)
    return {"norm": norm, "layers": tuple(LayerSpec(attention=attends, mlp=block) for attends, block in pairs)}


def _attentions(config: ConfigReader) -> list[AttentionSpec]:
    heads = config.size_of_layers("num_attention_heads_per_layer", config.size("num_attention_heads"))
    windows, bias = config.windows([False] * len(heads)), config.flag("attention_bias")
    given = config.get("rope_parameters") or _ROTATIONS
    ropes = rotations(ConfigReader({**config, "rope_parameters": given}), windows)
    return [
        attention(
            ConfigReader({**config, "num_attention_heads": count}),
            window=window,
            rope=ropes[window],
            qkv_bias=bias,
            o_bias=bias,
            qk_norm=rms_norm(config),
            output_gate="softplus",
            output_gate_over=_GATES[config["gating"]],
        )
        for count, window in zip(heads, windows, strict=True)
    ]


FAMILIES: dict[str, Family] = {
    "LagunaForCausalLM": Family(
        model_type="laguna",
        axes=_laguna,
        names=always(
            WeightNames(
                gate="self_attn.g_proj",
                correction_bias="mlp.experts.e_score_correction_bias",
                shared="mlp.shared_expert",
            )
        ),
        in_memory=always(dataclasses.replace(STACKED, gate="self_attn.g_proj")),
        defaults={
            **COMMON,
            "max_position_embeddings": 131072,
            "num_attention_heads": 48,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 8192,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "moe_routed_scaling_factor": 1.0,
            "moe_router_logit_softcapping": 0.0,
            "first_k_dense_replace": 1,
            "sliding_window": 512,
            "gating": True,
            "eos_token_id": None,
        },
        renames={"num_experts": "n_routed_experts"},
        reads=frozenset({"num_experts"}),
    ),
}

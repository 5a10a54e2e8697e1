"""The text model of Aria: Llama's attention, Mixtral's routing and shared experts in every layer."""

import dataclasses
from typing import Any

from tritonllm.layers.mlp import MLPSpec
from tritonllm.layers.moe import MoESpec
from tritonllm.models.config_reader import ConfigReader
from tritonllm.models.families.common import Family, always, attention, head_size, rms_norm, same_layers
from tritonllm.models.families.llama import COMMON
from tritonllm.models.weight_names import WeightNames


def _aria_text(config: ConfigReader) -> dict[str, Any]:
    """The activation of experts is SiLU, whatever the shared ones have."""
    bias, inner = config.flag("attention_bias"), config.size("intermediate_size")
    attends = attention(config, rope=config.rope(head_size(config)), qkv_bias=bias, o_bias=bias)
    experts = MoESpec(
        num_experts=config.size("moe_num_experts"),
        top_k=config.size("moe_topk"),
        intermediate_size=inner,
        shared=MLPSpec(
            intermediate_size=config.size("moe_num_shared_experts") * inner,
            activation=config.activation(),
            bias=config.flag("mlp_bias"),
        ),
    )
    return {"norm": rms_norm(config), "layers": same_layers(config, attends, experts)}


_IN_MEMORY = WeightNames(router="mlp.router", expert_up=(), stacked_transposed=True)

FAMILIES: dict[str, Family] = {
    "AriaTextForCausalLM": Family(
        model_type="aria_text",
        axes=_aria_text,
        names=always(
            dataclasses.replace(_IN_MEMORY, stacked_up="mlp.experts.fc1.weight", stacked_down="mlp.experts.fc2.weight")
        ),
        in_memory=always(_IN_MEMORY),
        defaults={
            **COMMON,
            "max_position_embeddings": 2048,
            "moe_num_experts": 8,
            "moe_topk": 2,
            "moe_num_shared_experts": 2,
            "eos_token_id": 2,
        },
    ),
}

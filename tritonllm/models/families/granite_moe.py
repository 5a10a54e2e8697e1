"""Granite with experts, with and without a shared MLP: the multipliers of Granite over Mixtral's routing."""

from typing import Any

from tritonllm.layers.mlp import MLPSpec
from tritonllm.layers.moe import MoESpec
from tritonllm.models.config_reader import ConfigReader
from tritonllm.models.families.common import Family, always, attention, head_size, rms_norm, same_layers
from tritonllm.models.families.llama import COMMON
from tritonllm.models.weight_names import WeightNames


def _granite_moe(config: ConfigReader) -> dict[str, Any]:
    bias, activation = config.flag("attention_bias"), config.activation()
    attends = attention(
        config,
        rope=config.rope(head_size(config)),
        scale=config.number("attention_multiplier"),
        qkv_bias=bias,
        o_bias=bias,
    )
    shared = config.size("shared_intermediate_size", low=0)
    experts = MoESpec(
        num_experts=config.size("num_local_experts"),
        top_k=config.size("num_experts_per_tok"),
        intermediate_size=config.size("intermediate_size"),
        activation=activation,
        shared=MLPSpec(intermediate_size=shared, activation=activation) if shared else None,
    )
    return {
        "norm": rms_norm(config),
        "layers": same_layers(config, attends, experts),
        "embedding_multiplier": config.number("embedding_multiplier"),
        "residual_multiplier": config.number("residual_multiplier"),
        "logit_scale": 1.0 / config.number("logits_scaling"),
    }


_NAMES = WeightNames(
    router="block_sparse_moe.router.layer",
    expert_up=(),
    stacked_up="block_sparse_moe.input_linear.weight",
    stacked_down="block_sparse_moe.output_linear.weight",
    shared="shared_mlp",
    shared_up=("input_linear",),
    shared_down="output_linear",
)
_GRANITE_MOE: dict[str, Any] = {
    **COMMON,
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "logits_scaling": 1.0,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 0,
}
_READS = frozenset({"embedding_multiplier", "residual_multiplier", "num_local_experts"})

FAMILIES: dict[str, Family] = {
    "GraniteMoeForCausalLM": Family(
        model_type="granitemoe", axes=_granite_moe, names=always(_NAMES), defaults=_GRANITE_MOE, reads=_READS
    ),
    "GraniteMoeSharedForCausalLM": Family(
        model_type="granitemoeshared", axes=_granite_moe, names=always(_NAMES), defaults=_GRANITE_MOE, reads=_READS
    ),
}

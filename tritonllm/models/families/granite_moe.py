"""Granite with experts, with and without a shared MLP or windows: the multipliers of Granite over Mixtral's routing."""

import dataclasses
from typing import Any

from tritonllm.layers.mlp import MLPSpec
from tritonllm.layers.moe import MoESpec
from tritonllm.models.config_reader import ConfigReader
from tritonllm.models.families.common import Family, always
from tritonllm.models.families.granite import windowed
from tritonllm.models.families.llama import COMMON, granite
from tritonllm.models.spec import LayerSpec
from tritonllm.models.weight_names import WeightNames


def _experts(config: ConfigReader) -> MoESpec:
    shared, activation = config.size("shared_intermediate_size", low=0), config.activation()
    return MoESpec(
        num_experts=config.size("num_local_experts"),
        top_k=config.size("num_experts_per_tok"),
        intermediate_size=config.size("intermediate_size"),
        activation=activation,
        shared=MLPSpec(intermediate_size=shared, activation=activation) if shared else None,
    )


def _granite_moe(config: ConfigReader) -> dict[str, Any]:
    axes, experts = granite(config), _experts(config)
    return {**axes, "layers": tuple(dataclasses.replace(layer, mlp=experts) for layer in axes["layers"])}


def _granite_moe_swa(config: ConfigReader) -> dict[str, Any]:
    """The attention of Granite with sliding windows."""
    experts = _experts(config)
    layers = tuple(LayerSpec(attention=attends, mlp=experts) for attends in windowed(config))
    return {**granite(config), "layers": layers}


_NAMES = WeightNames(
    router="block_sparse_moe.router.layer",
    expert_up=(),
    stacked_up="block_sparse_moe.input_linear.weight",
    stacked_down="block_sparse_moe.output_linear.weight",
    shared="shared_mlp",
    shared_up=("input_linear",),
    shared_down="output_linear",
)
_IN_MEMORY = dataclasses.replace(
    _NAMES,
    router="block_sparse_moe.router",
    stacked_up="block_sparse_moe.experts.gate_up_proj",
    stacked_down="block_sparse_moe.experts.down_proj",
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
        model_type="granitemoe",
        axes=_granite_moe,
        names=always(_NAMES),
        in_memory=always(_IN_MEMORY),
        defaults=_GRANITE_MOE,
        reads=_READS,
    ),
    "GraniteMoeSharedForCausalLM": Family(
        model_type="granitemoeshared",
        axes=_granite_moe,
        names=always(_NAMES),
        in_memory=always(_IN_MEMORY),
        defaults=_GRANITE_MOE,
        reads=_READS,
    ),
    "GraniteMoeSWAForCausalLM": Family(
        model_type="granitemoe_swa",
        axes=_granite_moe_swa,
        names=always(_IN_MEMORY),
        defaults={**_GRANITE_MOE, "sliding_window": 128},
        reads=_READS,
    ),
}

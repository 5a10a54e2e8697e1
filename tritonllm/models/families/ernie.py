"""ERNIE 4.5, dense and with experts: neighbours rotate, one flag for all biases.

A checkpoint that reads images, too, has experts for them behind those for text, which are not loaded.
"""

import dataclasses
import re
from typing import Any

from tritonllm.layers.mlp import MLPSpec
from tritonllm.layers.moe import MoESpec
from tritonllm.models.config_reader import ConfigReader
from tritonllm.models.families.common import (
    Family,
    always,
    attention,
    head_size,
    mlp,
    rms_norm,
    same_layers,
    sparse_layers,
)
from tritonllm.models.families.llama import COMMON
from tritonllm.models.spec import LayerSpec, ModelSpec
from tritonllm.models.weight_names import WeightNames

NORM_MIN = 1e-12  # of the sum of a token's weights


def _dense(config: ConfigReader) -> dict[str, Any]:
    bias = config.flag("use_bias")
    attends = attention(config, rope=config.rope(head_size(config), interleaved=True), qkv_bias=bias, o_bias=bias)
    return {"norm": rms_norm(config), "layers": same_layers(config, attends, mlp(config, bias=bias))}


def _with_experts(config: ConfigReader) -> dict[str, Any]:
    """By ``mlp_layer_types``, or every ``moe_layer_interval``-th layer from ``moe_layer_start_index`` to
    ``moe_layer_end_index`` has experts."""
    sizes = config.get("moe_intermediate_size")
    if isinstance(sizes, list) and len(sizes) == 2:  # of text and of images
        config = ConfigReader({**config, "moe_intermediate_size": sizes[0]})
    if config.number("moe_norm_min") != NORM_MIN:
        raise ValueError(
            f"config.json: moe_norm_min other than {NORM_MIN} is not supported, got {config['moe_norm_min']}"
        )
    inner, activation = config.size("moe_intermediate_size"), config.activation()
    shared = config.size("moe_num_shared_experts", low=0) * inner
    bias = config.flag("use_bias")
    experts = MoESpec(
        num_experts=config.size("num_experts"),
        top_k=config.size("num_experts_per_tok"),
        intermediate_size=inner,
        activation=activation,
        correction_bias=True,
        router_float32=True,
        shared=MLPSpec(intermediate_size=shared, activation=activation, bias=bias) if shared else None,
    )
    dense = _dense(config)
    first, last = config.size("moe_layer_start_index", low=0), config.size("moe_layer_end_index", low=-1)
    every, count = config.size("moe_layer_interval"), config.size("num_hidden_layers")
    within = range(first, count if last == -1 else last + 1)
    sparse = [i in within and (i + 1) % every == 0 for i in range(count)]
    if config.get("mlp_layer_types") is not None:
        sparse = sparse_layers(config)
    layers = [
        LayerSpec(attention=layer.attention, mlp=experts if has_experts else layer.mlp)
        for layer, has_experts in zip(dense["layers"], sparse, strict=True)
    ]
    return {**dense, "layers": tuple(layers), "logit_bias": bias}


_MOE_NAMES = WeightNames(correction_bias="mlp.moe_statics.e_score_correction_bias", correction_bias_rows=1)
_NAMES_BESIDE_IMAGES = dataclasses.replace(_MOE_NAMES, correction_bias_rows=2, router_transposed=True)
_IN_MEMORY = WeightNames(correction_bias="mlp.gate.moe_statics.e_score_correction_bias", correction_bias_rows=1)
_IN_MEMORY_BESIDE_IMAGES = WeightNames(
    router="mlp.text_moe.gate",
    expert_up=(),
    stacked_up="mlp.text_moe.experts.gate_up_proj",
    stacked_down="mlp.text_moe.experts.down_proj",
    correction_bias="mlp.text_moe.gate.moe_statics.e_score_correction_bias",
    correction_bias_rows=1,
)
_OF_IMAGES = re.compile(r"\.mlp\.(?:gate\.weight_1|experts\.(\d+)\.\w+\.\w+|vision_moe\..*)$")


def _is_of_images(spec: ModelSpec, name: str) -> bool:
    """The experts behind those for text, and their router."""
    found = _OF_IMAGES.search(name) if spec.text_of else None
    return found is not None and (found[1] is None or int(found[1]) >= max(spec.experts.values()))


_ERNIE: dict[str, Any] = {
    **COMMON,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "use_bias": False,
    "eos_token_id": 2,
}

FAMILIES: dict[str, Family] = {
    "Ernie4_5ForCausalLM": Family(
        model_type="ernie4_5",
        axes=_dense,
        names=always(WeightNames()),
        defaults={**_ERNIE, "num_key_value_heads": 2, "head_dim": 128},
    ),
    "Ernie4_5_MoeForCausalLM": Family(
        model_type="ernie4_5_moe",
        axes=_with_experts,
        names=lambda spec: _NAMES_BESIDE_IMAGES if spec.text_of else _MOE_NAMES,
        in_memory=lambda spec: _IN_MEMORY_BESIDE_IMAGES if spec.text_of else _IN_MEMORY,
        defaults={
            **_ERNIE,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 1536,
            "num_experts": 64,
            "num_experts_per_tok": 6,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
            "moe_norm_min": NORM_MIN,
        },
        renames={"moe_num_experts": "num_experts", "moe_k": "num_experts_per_tok"},
        extra_names=("model.mtp_",),
        is_extra=_is_of_images,
    ),
}

"""ERNIE 4.5, dense and with experts: neighbours rotate, one flag for all biases."""

from typing import Any

from tritonllm.layers.mlp import MLPSpec
from tritonllm.layers.moe import MoESpec
from tritonllm.models.config_reader import ConfigReader
from tritonllm.models.families.common import Family, always, attention, head_size, mlp, rms_norm, same_layers
from tritonllm.models.families.llama import COMMON
from tritonllm.models.spec import LayerSpec
from tritonllm.models.weight_names import WeightNames

NORM_MIN = 1e-12  # of the sum of a token's weights


def _dense(config: ConfigReader) -> dict[str, Any]:
    bias = config.flag("use_bias")
    attends = attention(config, rope=config.rope(head_size(config), interleaved=True), qkv_bias=bias, o_bias=bias)
    return {"norm": rms_norm(config), "layers": same_layers(config, attends, mlp(config, bias=bias))}


def _with_experts(config: ConfigReader) -> dict[str, Any]:
    """Every ``moe_layer_interval``-th layer from ``moe_layer_start_index`` to ``moe_layer_end_index`` has experts."""
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
    sparse = range(first, count if last == -1 else last + 1)
    layers = [
        LayerSpec(attention=layer.attention, mlp=experts if i in sparse and (i + 1) % every == 0 else layer.mlp)
        for i, layer in enumerate(dense["layers"])
    ]
    return {**dense, "layers": tuple(layers), "logit_bias": bias}


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
        names=always(
            WeightNames(correction_bias="mlp.moe_statics.e_score_correction_bias", correction_bias_is_row=True)
        ),
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
    ),
}

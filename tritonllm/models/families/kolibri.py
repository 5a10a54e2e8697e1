"""Kolibri 1: experts by logits and a correction bias, weighed by sigmoids; norms before and after each block."""

import dataclasses
from typing import Any

from tritonllm.layers.mlp import MLPSpec
from tritonllm.layers.moe import MoESpec
from tritonllm.models.config_reader import ConfigReader
from tritonllm.models.families.common import STACKED, Family, always, attention, head_size, rms_norm
from tritonllm.models.families.llama import COMMON
from tritonllm.models.spec import LayerSpec
from tritonllm.models.weight_names import WeightNames


def _kolibri1(config: ConfigReader) -> dict[str, Any]:
    """Four of five layers have a window and rotate."""
    config.size("sliding_window")  # without windows layers would rotate that do not here
    norm, rope, activation = rms_norm(config), config.rope(head_size(config)), config.activation()
    every = [(i + 1) % 5 != 0 for i in range(config.size("num_hidden_layers"))]
    windows = config.windows(every)
    kinds = {
        window: attention(config, window=window, rope=None if window is None else rope, qk_norm=norm)
        for window in set(windows)
    }
    experts = MoESpec(
        num_experts=config.size("num_experts"),
        top_k=config.size("num_experts_per_tok"),
        intermediate_size=config.size("moe_intermediate_size"),
        activation=activation,
        scoring="late_sigmoid",
        renormalize=config.flag("norm_topk_prob"),
        correction_bias=True,
        shared=MLPSpec(intermediate_size=config.size("shared_expert_intermediate_size"), activation=activation),
    )
    layers = tuple(LayerSpec(attention=kinds[window], mlp=experts) for window in windows)
    return {"norm": norm, "norm_position": "sandwich", "layers": layers}


FAMILIES: dict[str, Family] = {
    "Kolibri1ForCausalLM": Family(
        model_type="kolibri1",
        axes=_kolibri1,
        names=always(
            WeightNames(
                attention_post_norm="post_attn_norm",
                mlp_norm="post_attention_layernorm",
                mlp_post_norm="post_ffn_norm",
                correction_bias="moe.router.expert_bias",
            )
        ),
        in_memory=always(
            dataclasses.replace(
                STACKED, attention_post_norm="post_self_attn_layernorm", mlp_post_norm="post_mlp_layernorm"
            )
        ),
        defaults={
            **COMMON,
            "max_position_embeddings": 262144,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "sliding_window": 513,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts": 384,
            "num_experts_per_tok": 6,
            "norm_topk_prob": False,
        },
        renames={"num_local_experts": "num_experts"},
        reads=frozenset({"num_experts", "num_local_experts"}),
    ),
}

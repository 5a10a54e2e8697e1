"""Doge: keys with a bias that is computed from values, and blocks that multiply the stream before they add to it."""

from typing import Any

from tritonllm.models.config_reader import ConfigReader
from tritonllm.models.families.common import (
    Family,
    always,
    attention,
    check_fixed,
    head_size,
    mlp,
    rms_norm,
    same_layers,
)
from tritonllm.models.families.llama import COMMON
from tritonllm.models.weight_names import WeightNames


def _doge(config: ConfigReader) -> dict[str, Any]:
    """Doge without experts: transformers chooses those of a token by the logits of others of its batch.

    Of sequences longer than ``keep_window_size`` a token would see the keys of the largest bias alone.
    """
    check_fixed(config, is_moe=(False,))
    size, norm, bias = head_size(config), rms_norm(config), config.flag("attention_bias")
    rope = config.rope(size)
    attends = attention(
        config,
        rope=rope,
        scale=size**-0.5,
        window=config.window(),
        qk_norm=norm,
        qkv_bias=bias,
        o_bias=bias,
        key_bias=config.size_or("num_key_value_heads", config.size("num_attention_heads")),
    )
    return {
        "norm": norm,
        "layers": same_layers(config, attends, mlp(config, bias=config.flag("mlp_bias"))),
        "residual_weights": True,
        "max_position_embeddings": min(config.longest(rope), config.size("keep_window_size")),
    }


FAMILIES: dict[str, Family] = {
    "DogeForCausalLM": Family(
        model_type="doge",
        axes=_doge,
        names=always(
            WeightNames(
                key_bias="self_attn.dt_proj",
                key_bias_strength="self_attn.A",
                attention_residual="input_residual",
                mlp_residual="post_attention_residual",
            )
        ),
        defaults={**COMMON, "max_position_embeddings": 2048, "keep_window_size": 2048, "sliding_window": None},
        reads=frozenset({"num_experts"}),  # of files without experts, too
    ),
}

"""MiMo V2: values narrower than keys, twice the key heads and sinks in layers with a window, and sigmoid experts."""

from typing import Any

from tritonllm.models.config_reader import ConfigReader
from tritonllm.models.families.common import (
    STACKED,
    Family,
    always,
    attention,
    check_fixed,
    head_size,
    rms_norm,
    rotations,
)
from tritonllm.models.families.llama import COMMON
from tritonllm.models.families.sigmoid_experts import blocks, sigmoid_experts
from tritonllm.models.spec import LayerSpec
from tritonllm.models.weight_names import WeightNames


def _mimo_v2_flash(config: ConfigReader) -> dict[str, Any]:
    config = _as_transformers_writes_it(config)
    count, heads = config.size("num_hidden_layers"), config.size("num_attention_heads")
    keys, values = head_size(config), config.size("v_head_dim")
    check_fixed(config, n_shared_experts=(0,), scoring_func=("sigmoid",), topk_method=("noaux_tc",))
    check_fixed(config, swa_num_attention_heads=(heads,), swa_head_dim=(keys,), swa_v_head_dim=(values,))
    check_fixed(config, add_swa_attention_sink_bias=(True,), add_full_attention_sink_bias=(False,))
    scale = config.number_or_none("attention_value_scale")
    axes: dict[str, Any] = {
        "qkv_bias": config.flag("attention_bias"),
        "value_size": None if values == keys else values,
        "value_scale": 1.0 if scale is None else scale,
    }
    windows = config.windows([i > 0 and (i + 1) % 6 != 0 for i in range(count)])
    ropes, kv_heads = rotations(config, windows), config.size("num_key_value_heads")
    more = config.size_or("swa_num_key_value_heads", 2 * kv_heads)
    kinds = {
        window: attention(
            config,
            num_kv_heads=kv_heads if window is None else more,
            window=window,
            rope=ropes[window],
            sinks=window is not None,
            **axes,
        )
        for window in set(windows)
    }
    pairs = zip(windows, blocks(config, sigmoid_experts(config)), strict=True)
    layers = tuple(LayerSpec(attention=kinds[window], mlp=block) for window, block in pairs)
    return {"norm": rms_norm(config), "layers": layers}


def _as_transformers_writes_it(config: ConfigReader) -> ConfigReader:
    """The fields of transformers in place of those that published files have for the same."""
    fields: dict[str, Any] = dict(config)
    if fields.get("hybrid_layer_pattern") is not None:
        flags = config.layer_flags("hybrid_layer_pattern")
        fields["layer_types"] = ["sliding_attention" if flag else "full_attention" for flag in flags]
    if fields.get("moe_layer_freq") is not None:
        flags = config.layer_flags("moe_layer_freq")
        fields["mlp_layer_types"] = ["sparse" if flag else "dense" for flag in flags]
    if fields.get("sliding_window_size") is not None:  # of the keys before a token
        fields["sliding_window"] = config.size("sliding_window_size") + 1
    if fields.get("routed_scaling_factor") is None:
        fields["routed_scaling_factor"] = 1.0
    if fields.get("rope_parameters") is None:
        part = config.number("partial_rotary_factor")
        bases = {"full_attention": "rope_theta", "sliding_attention": "swa_rope_theta"}
        fields["rope_parameters"] = {
            kind: {"rope_type": "default", "rope_theta": config.number(base), "partial_rotary_factor": part}
            for kind, base in bases.items()
        }
    return ConfigReader(fields)


FAMILIES: dict[str, Family] = {
    "MiMoV2FlashForCausalLM": Family(
        model_type="mimo_v2_flash",
        axes=_mimo_v2_flash,
        names=always(WeightNames(sinks="self_attn.attention_sink_bias")),
        in_memory=always(STACKED),
        defaults={
            **COMMON,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5000000.0,
            "swa_rope_theta": 10000.0,
            "partial_rotary_factor": 0.334,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 4,
            "head_dim": 192,
            "v_head_dim": 128,
            "attention_value_scale": 0.707,
            "sliding_window": 129,
            "intermediate_size": 16384,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
        },
        renames={"layernorm_epsilon": "rms_norm_eps", "num_local_experts": "n_routed_experts"},
        reads=frozenset({"num_local_experts"}),
        extra_names=("model.mtp.",),
    ),
}

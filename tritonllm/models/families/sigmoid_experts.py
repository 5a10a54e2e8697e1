"""Experts that are chosen by a sigmoid and a correction bias (DeepSeek-V3's rule): GLM-4.5, Sarvam, dots.llm1, Solar
Open, Hy3, MiniMax M2 and AFMoE."""

import dataclasses
from typing import Any

from tritonllm.layers.mlp import MLPSpec
from tritonllm.layers.moe import MoESpec
from tritonllm.models.config_reader import ConfigReader
from tritonllm.models.families.common import (
    STACKED,
    Family,
    always,
    attention,
    check_fixed,
    head_size,
    mlp,
    rms_norm,
    same_layers,
    sparse_layers,
)
from tritonllm.models.families.llama import COMMON
from tritonllm.models.spec import LayerSpec
from tritonllm.models.weight_names import WeightNames


def sigmoid_experts(config: ConfigReader, *, shared: str = "n_shared_experts", **axes: Any) -> MoESpec:
    """A :class:`MoESpec` with the usual field names.

    Args:
        shared: the field that says how many times as wide as an expert the shared MLP is.
        axes: what differs.

    Raises:
        ValueError: a bad field.
    """
    inner, activation = config.size("moe_intermediate_size"), config.activation()
    of_shared = 0 if config.get(shared) is None else config.size(shared, low=0) * inner
    fields: dict[str, Any] = {
        "num_experts": config.size("n_routed_experts"),
        "top_k": config.size("num_experts_per_tok"),
        "intermediate_size": inner,
        "activation": activation,
        "scoring": "sigmoid",
        "renormalize": config.flag("norm_topk_prob"),
        "correction_bias": True,
        "num_groups": config.size("n_group"),
        "top_k_groups": config.size("topk_group"),
        "scale": config.number("routed_scaling_factor"),
        "shared": MLPSpec(intermediate_size=of_shared, activation=activation) if of_shared else None,
    }
    return MoESpec(**{**fields, **axes})


def blocks(config: ConfigReader, experts: MoESpec) -> list[MLPSpec | MoESpec]:
    """What follows attention in each layer: by ``mlp_layer_types``, or experts from ``first_k_dense_replace`` on.

    Raises:
        ValueError: a bad field.
    """
    return [experts if sparse else mlp(config) for sparse in sparse_layers(config)]


def _layers(config: ConfigReader, experts: MoESpec, **axes: Any) -> tuple[LayerSpec, ...]:
    attends = attention(config, rope=config.rope(head_size(config)), **axes)
    return tuple(LayerSpec(attention=attends, mlp=block) for block in blocks(config, experts))


def _glm4_moe(config: ConfigReader) -> dict[str, Any]:
    norm = rms_norm(config)
    qk_norm = norm if config.flag("use_qk_norm") else None
    bias = config.flag("attention_bias")
    return {"norm": norm, "layers": _layers(config, sigmoid_experts(config), qkv_bias=bias, qk_norm=qk_norm)}


def _sarvam_moe(config: ConfigReader) -> dict[str, Any]:
    check_fixed(config, use_bias=(False,), moe_router_enable_expert_bias=(True,))
    return _glm4_moe(config)


def _dots1(config: ConfigReader) -> dict[str, Any]:
    """Without ``layer_types``, layers from ``max_window_layers`` on have a window."""
    norm, bias, rope = rms_norm(config), config.flag("attention_bias"), config.rope(head_size(config))
    first = config.size("max_window_layers", low=0)
    sliding = [i >= first and config.window() is not None for i in range(config.size("num_hidden_layers"))]
    axes: dict[str, Any] = {"rope": rope, "qkv_bias": bias, "o_bias": bias, "qk_norm": norm}
    layers = [
        LayerSpec(attention=attention(config, window=window, **axes), mlp=block)
        for window, block in zip(config.windows(sliding), blocks(config, sigmoid_experts(config)), strict=True)
    ]
    return {"norm": norm, "layers": tuple(layers)}


def _solar_open(config: ConfigReader) -> dict[str, Any]:
    check_fixed(config, first_k_dense_replace=(0,), use_qk_norm=(False,))
    attends = attention(config, rope=config.rope(head_size(config)), qkv_bias=config.flag("attention_bias"))
    return {"norm": rms_norm(config), "layers": same_layers(config, attends, sigmoid_experts(config))}


def _hy_v3(config: ConfigReader) -> dict[str, Any]:
    """The router is float32. ``enable_moe_fp32_combine`` is a matter of rounding: the shared MLP's output is added as
    everywhere."""
    check_fixed(config, mlp_bias=(False,), qk_norm=(True,), route_norm=(True,))
    check_fixed(config, moe_router_use_sigmoid=(True,), moe_router_enable_expert_bias=(True,))
    norm, bias = rms_norm(config), config.flag("attention_bias")
    experts = sigmoid_experts(config, shared="num_shared_experts", router_float32=True)
    return {"norm": norm, "layers": _layers(config, experts, qkv_bias=bias, o_bias=bias, qk_norm=norm)}


def _minimax_m2(config: ConfigReader) -> dict[str, Any]:
    """Files say with ``rotary_dim`` how much of a head rotates; the router is float32 in them."""
    count = config.size("num_hidden_layers")
    check_fixed(config, use_qk_norm=(True,), qk_norm_type=("per_layer",), attn_type_list=([1] * count,))
    check_fixed(config, scoring_func=("sigmoid",), use_routing_bias=(True,), shared_intermediate_size=(0,))
    norm, head = rms_norm(config), head_size(config)
    if config.get("rotary_dim") is not None:
        config = ConfigReader({"partial_rotary_factor": config.size("rotary_dim") / head, **config})
    experts = MoESpec(
        num_experts=config.size("num_local_experts"),
        top_k=config.size("num_experts_per_tok"),
        intermediate_size=config.size("intermediate_size"),
        activation=config.activation(),
        scoring="sigmoid",
        correction_bias=True,
        router_float32=True,
    )
    attends = attention(config, rope=config.rope(head), qk_norm=norm, qk_norm_over="all")
    return {"norm": norm, "layers": same_layers(config, attends, experts)}


def _afmoe(config: ConfigReader) -> dict[str, Any]:
    """Layers with a window rotate, every fourth sees everything and does not; attention's output is gated."""
    check_fixed(config, score_func=("sigmoid",), route_norm=(True,), n_group=(1,), topk_group=(1,))
    norm, bias, rope = rms_norm(config), config.flag("attention_bias"), config.rope(head_size(config))
    every, count = config.size("global_attn_every_n_layers"), config.size("num_hidden_layers")
    axes: dict[str, Any] = {"qkv_bias": bias, "o_bias": bias, "qk_norm": norm, "output_gate": "sigmoid"}
    attends = [
        attention(config, window=window, rope=None if window is None else rope, **axes)
        for window in config.windows([(i + 1) % every != 0 for i in range(count)])
    ]
    experts = sigmoid_experts(config, renormalize=True, num_groups=1, top_k_groups=1)
    pairs = zip(attends, blocks(config, experts), strict=True)
    scale = config.size("hidden_size") ** 0.5 if config.flag("mup_enabled") else 1.0
    return {
        "norm": norm,
        "norm_position": "sandwich",
        "embedding_multiplier": scale,
        "layers": tuple(LayerSpec(attention=attends, mlp=block) for attends, block in pairs),
    }


_GROUPS: dict[str, Any] = {"routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1}
_BIAS_OF_BLOCK = dataclasses.replace(STACKED, correction_bias="mlp.e_score_correction_bias")
_NEW_NAME = {"num_local_experts": "n_routed_experts"}  # transformers 5 knows both

FAMILIES: dict[str, Family] = {
    "Glm4MoeForCausalLM": Family(
        model_type="glm4_moe",
        axes=_glm4_moe,
        names=always(WeightNames()),
        defaults={
            **COMMON,
            **_GROUPS,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "partial_rotary_factor": 0.5,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_routed_experts": 128,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "use_qk_norm": False,
        },
        extra_layers=1,
    ),
    "SarvamMoEForCausalLM": Family(
        model_type="sarvam_moe",
        axes=_sarvam_moe,
        names=always(
            WeightNames(
                embed="model.word_embeddings",
                qkv=("attention.query_key_value",),
                o="attention.dense",
                q_norm="attention.query_layernorm",
                k_norm="attention.key_layernorm",
                correction_bias="mlp.gate.expert_bias",
            )
        ),
        in_memory=always(STACKED),
        defaults={
            **COMMON,
            **_GROUPS,
            "rope_theta": 8000000.0,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "intermediate_size": 8192,
            "moe_intermediate_size": 1024,
            "num_experts_per_tok": 6,
            "n_shared_experts": 1,
            "n_routed_experts": 128,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "use_qk_norm": True,
            "eos_token_id": 1,
        },
        renames={
            "num_experts": "n_routed_experts",
            "num_local_experts": "n_routed_experts",
            "num_shared_experts": "n_shared_experts",
            "use_qkv_bias": "attention_bias",
        },
        reads=frozenset({"num_experts", "num_local_experts"}),
        written_as="Glm4MoeForCausalLM",
    ),
    "Dots1ForCausalLM": Family(
        model_type="dots1",
        axes=_dots1,
        names=always(WeightNames()),
        defaults={
            **COMMON,
            **_GROUPS,
            "max_position_embeddings": 2048,
            "num_key_value_heads": 32,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "sliding_window": 4096,
            "max_window_layers": 62,
        },
        renames=_NEW_NAME,
        reads=frozenset({"num_local_experts"}),
    ),
    "SolarOpenForCausalLM": Family(
        model_type="solar_open",
        axes=_solar_open,
        names=always(WeightNames()),
        defaults={
            **COMMON,
            **_GROUPS,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "moe_intermediate_size": 1280,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_routed_experts": 128,
            "norm_topk_prob": True,
        },
        renames=_NEW_NAME,
        reads=frozenset({"num_local_experts"}),
    ),
    "HYV3ForCausalLM": Family(
        model_type="hy_v3",
        axes=_hy_v3,
        names=always(WeightNames(router="mlp.router.gate", correction_bias="mlp.expert_bias", shared="mlp.shared_mlp")),
        in_memory=always(_BIAS_OF_BLOCK),
        defaults={
            **COMMON,
            **_GROUPS,
            "rms_norm_eps": 1e-5,
            "rope_theta": 11158840.0,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "n_routed_experts": 192,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "moe_intermediate_size": 1536,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.826,
            "first_k_dense_replace": 1,
        },
        renames={
            "num_experts": "n_routed_experts",
            "num_local_experts": "n_routed_experts",
            "router_scaling_factor": "routed_scaling_factor",
        },
        reads=frozenset({"num_experts", "num_local_experts"}),
        extra_layers=1,
    ),
    "MiniMaxM2ForCausalLM": Family(
        model_type="minimax_m2",
        axes=_minimax_m2,
        names=always(
            WeightNames(
                router="block_sparse_moe.gate",
                correction_bias="block_sparse_moe.e_score_correction_bias",
                experts="block_sparse_moe.experts",
                expert_up=("w1", "w3"),
                expert_down="w2",
                stacked_up="block_sparse_moe.experts.gate_up_proj",
                stacked_down="block_sparse_moe.experts.down_proj",
            )
        ),
        in_memory=always(_BIAS_OF_BLOCK),
        defaults={
            **COMMON,
            "rope_theta": 5000000.0,
            "max_position_embeddings": 196608,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "eos_token_id": 200020,
        },
        renames={"num_experts": "num_local_experts"},
        reads=frozenset({"num_experts", "num_local_experts"}),
        extra_layers=3,
    ),
    "AfmoeForCausalLM": Family(
        model_type="afmoe",
        axes=_afmoe,
        names=always(
            WeightNames(
                attention_post_norm="post_attention_layernorm",
                mlp_norm="pre_mlp_layernorm",
                mlp_post_norm="post_mlp_layernorm",
                router="mlp.router.gate",
                correction_bias="mlp.expert_bias",
            )
        ),
        defaults={
            **COMMON,
            **_GROUPS,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 16384,
            "head_dim": 128,
            "intermediate_size": 6144,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 64,
            "num_experts_per_tok": 6,
            "n_shared_experts": 2,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
            "sliding_window": 1024,
            "global_attn_every_n_layers": 4,
            "mup_enabled": False,
        },
        renames={
            "num_experts": "n_routed_experts",
            "num_shared_experts": "n_shared_experts",
            "num_dense_layers": "first_k_dense_replace",
            "route_scale": "routed_scaling_factor",
        },
        reads=frozenset({"num_experts", "num_local_experts"}),
    ),
}

"""Mixtures of experts: Mixtral, Qwen2-MoE, Qwen3-MoE, Mellum 2, Flint and GPT-OSS."""

import dataclasses
from typing import Any

from tritonllm.layers.attention import AttentionSpec
from tritonllm.layers.mlp import MLPSpec
from tritonllm.layers.moe import MoESpec
from tritonllm.models.config_reader import ConfigReader
from tritonllm.models.families.common import (
    STACKED,
    Family,
    always,
    attention,
    head_size,
    mlp,
    rms_norm,
    rotations,
    same_layers,
    sparse_layers,
)
from tritonllm.models.families.llama import COMMON, QWEN, qwen_windows
from tritonllm.models.spec import LayerSpec, ModelSpec
from tritonllm.models.weight_names import WeightNames

SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0  # of the activation that the kernel calls "swigluoai"


def _mixtral(config: ConfigReader) -> dict[str, Any]:
    attends = attention(config, rope=config.rope(head_size(config)), window=config.window())
    experts = MoESpec(
        num_experts=config.size("num_local_experts"),
        top_k=config.size("num_experts_per_tok"),
        intermediate_size=config.size("intermediate_size"),
        activation=config.activation(),
    )
    return {"norm": rms_norm(config), "layers": same_layers(config, attends, experts)}


def _is_sparse(config: ConfigReader) -> list[bool]:
    """Which layers of a Qwen have experts."""
    count, step = config.size("num_hidden_layers"), config.size("decoder_sparse_step")
    dense = config.get("mlp_only_layers") or []
    return [i not in dense and (i + 1) % step == 0 for i in range(count)]


def _qwen_layers(config: ConfigReader, experts: MoESpec, **axes: Any) -> tuple[LayerSpec, ...]:
    dense = mlp(config)
    rope = config.rope(head_size(config))

    def attends(window: int | None) -> AttentionSpec:
        return attention(config, rope=rope, window=window, **axes)

    kinds = zip(qwen_windows(config), _is_sparse(config), strict=True)
    return tuple(LayerSpec(attention=attends(window), mlp=experts if sparse else dense) for window, sparse in kinds)


def _qwen_experts(config: ConfigReader, **axes: Any) -> MoESpec:
    return MoESpec(
        num_experts=config.size("num_experts"),
        top_k=config.size("num_experts_per_tok"),
        intermediate_size=config.size("moe_intermediate_size"),
        activation=config.activation(),
        renormalize=config.flag("norm_topk_prob"),
        **axes,
    )


def _qwen2_moe(config: ConfigReader) -> dict[str, Any]:
    shared = MLPSpec(intermediate_size=config.size("shared_expert_intermediate_size"), activation=config.activation())
    experts = _qwen_experts(config, shared=shared, shared_gate=True)
    return {"norm": rms_norm(config), "layers": _qwen_layers(config, experts, qkv_bias=config.flag("qkv_bias"))}


def _qwen3_moe(config: ConfigReader) -> dict[str, Any]:
    bias, norm = config.flag("attention_bias"), rms_norm(config)
    layers = _qwen_layers(config, _qwen_experts(config), qkv_bias=bias, o_bias=bias, qk_norm=norm)
    return {"norm": norm, "layers": layers}


def _mellum(config: ConfigReader) -> dict[str, Any]:
    """Layers with a window have a rotation of their own. The class reads ``rope_parameters`` alone."""
    config = ConfigReader({**config, "rope_parameters": config.get("rope_parameters") or _ROTATIONS_OF_MELLUM})
    bias, norm = config.flag("attention_bias"), rms_norm(config)
    windows = config.windows([False] * config.size("num_hidden_layers"))
    ropes, experts, dense = rotations(config, windows), _qwen_experts(config), mlp(config)
    axes: dict[str, Any] = {"qkv_bias": bias, "o_bias": bias, "qk_norm": norm}
    layers = [
        LayerSpec(
            attention=attention(config, rope=ropes[window], window=window, **axes), mlp=experts if sparse else dense
        )
        for window, sparse in zip(windows, sparse_layers(config), strict=True)
    ]
    return {"norm": norm, "layers": tuple(layers)}


def _flint(config: ConfigReader) -> dict[str, Any]:
    """The first two layers, every fourth and the last see everything and do not rotate; the first two are dense."""
    if config.get("mlp_only_layers") is None:
        config = ConfigReader({**config, "mlp_only_layers": [0, 1]})
    bias, norm, count = config.flag("attention_bias"), rms_norm(config), config.size("num_hidden_layers")
    rope, dense = config.rope(head_size(config)), mlp(config)
    shared = MLPSpec(intermediate_size=config.size("shared_expert_intermediate_size"), activation=config.activation())
    experts = _qwen_experts(config, scoring="sigmoid", router_float32=True, shared=shared)
    windows = config.windows([i >= 2 and i % 4 != 1 and i < count - 1 for i in range(count)])
    layers = [
        LayerSpec(
            attention=attention(
                config,
                rope=None if window is None else rope,
                window=window,
                qk_norm=norm,
                sinks=True,
                qkv_bias=bias,
                o_bias=bias,
            ),
            mlp=experts if sparse else dense,
        )
        for window, sparse in zip(windows, _is_sparse(config), strict=True)
    ]
    return {"norm": norm, "layers": tuple(layers)}


def _gpt_oss(config: ConfigReader) -> dict[str, Any]:
    """Every other layer has a window, the first one first."""
    for name, value in (("swiglu_alpha", SWIGLU_ALPHA), ("swiglu_limit", SWIGLU_LIMIT)):
        if config.number(name) != value:
            raise ValueError(f"config.json: {name} other than {value} is not supported, got {config[name]!r}")
    bias = config.flag("attention_bias")
    experts = MoESpec(
        num_experts=config.size("num_local_experts"),
        top_k=config.size("num_experts_per_tok"),
        intermediate_size=config.size("intermediate_size"),
        activation="swigluoai",
        bias=True,
        router_bias=True,
    )
    rope = config.rope(head_size(config))
    layers = [
        LayerSpec(
            attention=attention(config, rope=rope, window=window, qkv_bias=bias, o_bias=bias, sinks=True), mlp=experts
        )
        for window in config.windows([i % 2 == 0 for i in range(config.size("num_hidden_layers"))])
    ]
    return {"norm": rms_norm(config), "layers": tuple(layers)}


_QWEN_MOE: dict[str, Any] = {
    **QWEN,
    "decoder_sparse_step": 1,
    "norm_topk_prob": False,
    "mlp_only_layers": None,
}
_ROTATIONS_OF_MELLUM = {"full_attention": {"rope_theta": 500000.0}, "sliding_attention": {"rope_theta": 10000.0}}
MIXTRAL_NAMES = WeightNames(
    router="block_sparse_moe.gate",
    experts="block_sparse_moe.experts",
    expert_up=("w1", "w3"),
    expert_down="w2",
    stacked_up="block_sparse_moe.experts.gate_up_proj",
    stacked_down="block_sparse_moe.experts.down_proj",
)
_YARN_OF_GPT_OSS = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _qwen3_moe_names(spec: ModelSpec) -> WeightNames:
    return WeightNames(stacked_either_way=spec.text_of == "Qwen3VLMoeForConditionalGeneration")


FAMILIES: dict[str, Family] = {
    "MixtralForCausalLM": Family(
        model_type="mixtral",
        axes=_mixtral,
        names=always(MIXTRAL_NAMES),
        in_memory=always(STACKED),
        defaults={
            **COMMON,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "eos_token_id": 2,
            "sliding_window": None,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
        },
        reads=frozenset({"num_local_experts"}),
    ),
    "Qwen2MoeForCausalLM": Family(
        model_type="qwen2_moe",
        axes=_qwen2_moe,
        names=always(WeightNames(shared="mlp.shared_expert")),
        defaults={
            **_QWEN_MOE,
            "num_key_value_heads": 16,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts_per_tok": 4,
            "num_experts": 60,
            "qkv_bias": True,
        },
        renames={"num_local_experts": "num_experts"},
        reads=frozenset({"num_experts", "num_local_experts"}),
    ),
    "Qwen3MoeForCausalLM": Family(
        model_type="qwen3_moe",
        axes=_qwen3_moe,
        names=_qwen3_moe_names,
        defaults={
            **_QWEN_MOE,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "num_experts": 128,
        },
        renames={"num_local_experts": "num_experts"},
        reads=frozenset({"num_experts", "num_local_experts"}),
    ),
    "MellumForCausalLM": Family(
        model_type="mellum",
        axes=_mellum,
        names=always(WeightNames()),
        defaults={
            **COMMON,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "sliding_window": 1024,
            "first_k_dense_replace": 0,
            "moe_intermediate_size": 896,
            "num_experts_per_tok": 8,
            "num_experts": 64,
            "norm_topk_prob": True,
        },
        renames={"num_local_experts": "num_experts"},
        reads=frozenset({"num_experts", "num_local_experts"}),
        extra_names=("mtp.",),
    ),
    "FlintForCausalLM": Family(
        model_type="flint",
        axes=_flint,
        names=always(WeightNames(sinks="self_attn.softmax_offset", shared="mlp.shared_expert")),
        in_memory=always(dataclasses.replace(STACKED, shared="mlp.shared_expert")),
        defaults={
            **COMMON,
            "intermediate_size": 6144,
            "max_position_embeddings": 262144,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "sliding_window": 513,
            "decoder_sparse_step": 1,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 1024,
            "num_experts_per_tok": 6,
            "num_experts": 256,
            "norm_topk_prob": True,
        },
        reads=frozenset({"num_experts"}),
    ),
    "GptOssForCausalLM": Family(
        model_type="gpt_oss",
        axes=_gpt_oss,
        names=always(WeightNames(router="mlp.router", stacked_transposed=True, stacked_interleaved=True)),
        defaults={
            **COMMON,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "rope_scaling": _YARN_OF_GPT_OSS,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "attention_bias": True,
            "sliding_window": 128,
            "num_experts_per_tok": 4,
            "num_local_experts": 128,
            "swiglu_alpha": SWIGLU_ALPHA,
            "swiglu_limit": SWIGLU_LIMIT,
        },
        reads=frozenset({"num_local_experts"}),
    ),
}

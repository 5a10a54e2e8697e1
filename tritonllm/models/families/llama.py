"""Llama and what followed it: RMS norm, rotary positions, a gated MLP."""

import math
from typing import Any

from tritonllm.layers.attention import AttentionSpec
from tritonllm.models.config_reader import ConfigReader
from tritonllm.models.families.common import (
    Family,
    always,
    attention,
    head_size,
    layer_norm,
    mlp,
    rms_norm,
    same_layers,
    windowed_layers,
)
from tritonllm.models.families.heads import QWEN2_REWARDS
from tritonllm.models.spec import LayerSpec, ModelSpec
from tritonllm.models.weight_names import WeightNames

COMMON: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "eos_token_id": None,
}
FUSED = WeightNames(qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",))


def llama(config: ConfigReader) -> dict[str, Any]:
    bias = config.flag("attention_bias")
    rope = config.rope(head_size(config))
    attends = attention(config, rope=rope, qkv_bias=bias, o_bias=bias)
    return {
        "norm": rms_norm(config),
        "layers": same_layers(config, attends, mlp(config, bias=config.flag("mlp_bias"))),
    }


def _seed_oss(config: ConfigReader) -> dict[str, Any]:
    attends = attention(
        config,
        rope=config.rope(head_size(config)),
        qkv_bias=config.flag("attention_bias"),
        o_bias=config.flag("attention_out_bias"),
    )
    return {
        "norm": rms_norm(config),
        "layers": same_layers(config, attends, mlp(config, bias=config.flag("mlp_bias"))),
    }


def _mistral(config: ConfigReader) -> dict[str, Any]:
    attends = attention(config, rope=config.rope(head_size(config)), window=config.window())
    return {"norm": rms_norm(config), "layers": same_layers(config, attends, mlp(config))}


def qwen_windows(config: ConfigReader) -> tuple[int | None, ...]:
    """Qwen has a window only if ``use_sliding_window`` says so; without ``layer_types``, in its last layers."""
    count = config.size("num_hidden_layers")
    if not config.flag("use_sliding_window"):
        return ConfigReader({**config, "sliding_window": None}).windows([False] * count)
    first = config.size("max_window_layers", low=0)
    return config.windows([i >= first for i in range(count)])


def _qwen2(config: ConfigReader) -> dict[str, Any]:
    rope = config.rope(head_size(config))
    layers = windowed_layers(config, qwen_windows(config), mlp(config), rope=rope, qkv_bias=True)
    return {"norm": rms_norm(config), "layers": layers}


def _qwen3(config: ConfigReader) -> dict[str, Any]:
    bias, norm = config.flag("attention_bias"), rms_norm(config)
    rope = config.rope(head_size(config))
    axes = {"rope": rope, "qkv_bias": bias, "o_bias": bias, "qk_norm": norm}
    return {"norm": norm, "layers": windowed_layers(config, qwen_windows(config), mlp(config), **axes)}


def _phi3(config: ConfigReader) -> dict[str, Any]:
    scaling = config.get("rope_scaling")
    if scaling and scaling.get("type") == "yarn":  # what early files call longrope
        config = ConfigReader({**config, "rope_scaling": {**scaling, "type": "longrope"}})
    attends = attention(config, rope=config.rope(head_size(config)), window=config.window())
    return {"norm": rms_norm(config), "layers": same_layers(config, attends, mlp(config))}


def _glm(config: ConfigReader) -> dict[str, Any]:
    rope = config.rope(head_size(config), interleaved=True)
    attends = attention(config, rope=rope, qkv_bias=config.flag("attention_bias"))
    return {"norm": rms_norm(config), "layers": same_layers(config, attends, mlp(config))}


def _glm4(config: ConfigReader) -> dict[str, Any]:
    return {**_glm(config), "norm_position": "sandwich"}


def _helium(config: ConfigReader) -> dict[str, Any]:
    bias = config.flag("attention_bias")
    attends = attention(config, rope=config.rope(head_size(config), interleaved=True), qkv_bias=bias)
    return {"norm": rms_norm(config), "layers": same_layers(config, attends, mlp(config, bias=config.flag("mlp_bias")))}


def granite(config: ConfigReader) -> dict[str, Any]:
    bias = config.flag("attention_bias")
    attends = attention(
        config,
        rope=config.rope(head_size(config)),
        scale=config.number("attention_multiplier"),
        qkv_bias=bias,
        o_bias=bias,
    )
    return {
        "norm": rms_norm(config),
        "layers": same_layers(config, attends, mlp(config, bias=config.flag("mlp_bias"))),
        "embedding_multiplier": config.number("embedding_multiplier"),
        "residual_multiplier": config.number("residual_multiplier"),
        "logit_scale": 1.0 / config.number("logits_scaling"),
    }


def _minicpm(config: ConfigReader) -> dict[str, Any]:
    """Scaled as its training was, by the maximal update parametrization (Hu et al., "MiniCPM", 2024)."""
    depth = config.size("num_hidden_layers")
    return {
        **llama(config),
        "embedding_multiplier": config.number("scale_emb"),
        "residual_multiplier": config.number("scale_depth") / math.sqrt(depth),
        "logit_scale": config.number("dim_model_base") / config.size("hidden_size"),
    }


def _smollm3(config: ConfigReader) -> dict[str, Any]:
    """Every fourth layer does not rotate."""
    bias, count = config.flag("attention_bias"), config.size("num_hidden_layers")
    rope = config.rope(head_size(config))
    if config["no_rope_layers"] is None:
        interval = config.size("no_rope_layer_interval")
        rotates = [(i + 1) % interval != 0 for i in range(count)]
    else:
        rotates = config.layer_flags("no_rope_layers")  # where the flag is 1 there is a rotation
    windows: tuple[int | None, ...] = (None,) * count
    if config.flag("use_sliding_window"):
        windows = config.windows([not rotate for rotate in rotates])
    block = mlp(config, bias=config.flag("mlp_bias"))

    def attends(rotate: bool, window: int | None) -> AttentionSpec:
        return attention(config, rope=rope if rotate else None, window=window, qkv_bias=bias, o_bias=bias)

    layers = [LayerSpec(attention=attends(*kind), mlp=block) for kind in zip(rotates, windows, strict=True)]
    return {"norm": rms_norm(config), "layers": tuple(layers)}


def _stablelm(config: ConfigReader) -> dict[str, Any]:
    qk_norm = layer_norm(config, bias=False) if config.flag("qk_layernorm") else None
    attends = attention(
        config,
        rope=config.rope(head_size(config)),
        qkv_bias=config.flag("use_qkv_bias"),
        qk_norm=qk_norm,
        qk_norm_over="heads",
    )
    return {
        "norm": layer_norm(config),
        "parallel": "one norm" if config.flag("use_parallel_residual") else None,
        "layers": same_layers(config, attends, mlp(config)),
    }


def _cohere(config: ConfigReader) -> dict[str, Any]:
    bias, norm = config.flag("attention_bias"), layer_norm(config, bias=False)
    attends = attention(
        config,
        rope=config.rope(head_size(config), interleaved=True),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=norm if config.flag("use_qk_norm") else None,
        qk_norm_over="heads",
    )
    return {
        "norm": norm,
        "parallel": "one norm",
        "layers": same_layers(config, attends, mlp(config)),
        "logit_scale": config.number("logit_scale"),
    }


def _cohere2(config: ConfigReader) -> dict[str, Any]:
    """Layers with a window rotate, those without do not."""
    bias, count = config.flag("attention_bias"), config.size("num_hidden_layers")
    pattern = config.size("sliding_window_pattern")
    rope = config.rope(head_size(config), interleaved=True)
    block = mlp(config)

    def attends(window: int | None) -> AttentionSpec:
        return attention(config, window=window, rope=None if window is None else rope, qkv_bias=bias, o_bias=bias)

    windows = config.windows([(i + 1) % pattern != 0 for i in range(count)])
    return {
        "norm": layer_norm(config, bias=False),
        "parallel": "one norm",
        "layers": tuple(LayerSpec(attention=attends(window), mlp=block) for window in windows),
        "logit_scale": config.number("logit_scale"),
    }


def _stablelm_names(spec: ModelSpec) -> WeightNames:
    return WeightNames(q_norm="self_attn.q_layernorm", k_norm="self_attn.k_layernorm", qk_norm_by_head=True)


QWEN: dict[str, Any] = {
    **COMMON,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GLM: dict[str, Any] = {
    **COMMON,
    "rms_norm_eps": 1.5625e-07,
    "attention_bias": True,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
    "max_position_embeddings": 131072,
    "eos_token_id": [151329, 151336, 151338],
}
_LLAMA: dict[str, Any] = {**COMMON, "max_position_embeddings": 2048, "eos_token_id": 2}
COHERE: dict[str, Any] = {
    **COMMON,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "eos_token_id": 255001,
    "use_qk_norm": False,
}

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(model_type="llama", axes=llama, names=always(WeightNames()), defaults=_LLAMA),
    "SeedOssForCausalLM": Family(
        model_type="seed_oss",
        axes=_seed_oss,
        names=always(WeightNames()),
        defaults={
            **COMMON,
            "max_position_embeddings": 524288,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attention_bias": True,
            "attention_out_bias": False,
            "eos_token_id": 2,
        },
    ),
    "MistralForCausalLM": Family(
        model_type="mistral",
        axes=_mistral,
        names=always(WeightNames()),
        defaults={
            **COMMON,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "eos_token_id": 2,
            "sliding_window": 4096,
        },
    ),
    "Qwen2ForCausalLM": Family(
        model_type="qwen2", axes=_qwen2, names=always(WeightNames()), defaults=QWEN, heads=QWEN2_REWARDS
    ),
    "Qwen3ForCausalLM": Family(
        model_type="qwen3", axes=_qwen3, names=always(WeightNames()), defaults={**QWEN, "head_dim": 128}
    ),
    "Phi3ForCausalLM": Family(
        model_type="phi3",
        axes=_phi3,
        names=always(FUSED),
        defaults={
            **COMMON,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "eos_token_id": 32000,
            "sliding_window": None,
        },
    ),
    "GlmForCausalLM": Family(
        model_type="glm", axes=_glm, names=always(WeightNames(up=("mlp.gate_up_proj",))), defaults=_GLM
    ),
    "Glm4ForCausalLM": Family(
        model_type="glm4",
        axes=_glm4,
        names=always(
            WeightNames(
                up=("mlp.gate_up_proj",),
                attention_post_norm="post_self_attn_layernorm",
                mlp_post_norm="post_mlp_layernorm",
            )
        ),
        defaults=_GLM,
    ),
    "HeliumForCausalLM": Family(
        model_type="helium",
        axes=_helium,
        names=always(WeightNames()),
        defaults={
            **COMMON,
            "rms_norm_eps": 1e-8,
            "rope_theta": 100000.0,
            "max_position_embeddings": 4096,
            "num_key_value_heads": 20,
            "head_dim": 128,
            "eos_token_id": 2,
        },
    ),
    "GraniteForCausalLM": Family(
        model_type="granite",
        axes=granite,
        names=always(WeightNames()),
        defaults={
            **_LLAMA,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
        reads=frozenset({"embedding_multiplier", "residual_multiplier"}),
    ),
    "MiniCPMForCausalLM": Family(
        model_type="minicpm",
        axes=_minicpm,
        names=always(WeightNames()),
        defaults={**_LLAMA, "tie_word_embeddings": True, "scale_emb": 1, "scale_depth": 1, "dim_model_base": 1},
    ),
    "SmolLM3ForCausalLM": Family(
        model_type="smollm3",
        axes=_smollm3,
        names=always(WeightNames()),
        defaults={
            **COMMON,
            "rope_theta": 2000000.0,
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "eos_token_id": 128001,
            "use_sliding_window": False,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
        },
    ),
    "StableLmForCausalLM": Family(
        model_type="stablelm",
        axes=_stablelm,
        names=_stablelm_names,
        defaults={
            **COMMON,
            "layer_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "num_key_value_heads": 32,
            "partial_rotary_factor": 0.25,
            "use_qkv_bias": False,
            "qk_layernorm": False,
            "use_parallel_residual": False,
            "eos_token_id": 0,
        },
    ),
    "CohereForCausalLM": Family(
        model_type="cohere",
        axes=_cohere,
        names=always(WeightNames()),
        defaults={**COHERE, "rope_theta": 500000.0},
        reads=frozenset({"logit_scale"}),
    ),
    "Cohere2ForCausalLM": Family(
        model_type="cohere2",
        axes=_cohere2,
        names=always(WeightNames()),
        defaults={**COHERE, "sliding_window": 4096, "sliding_window_pattern": 4},
        reads=frozenset({"logit_scale"}),
    ),
}

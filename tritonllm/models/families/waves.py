"""CTRL and XGLM: positions are waves, embeddings are scaled, norms come before each block, an MLP without a gate."""

import dataclasses
from typing import Any

from tritonllm.layers.norm import NormSpec
from tritonllm.models.config_reader import ConfigReader
from tritonllm.models.families.common import Family, always, check_fixed, full_attention, mlp, same_layers
from tritonllm.models.families.gpt import OPT_NAMES, OPT_OFFSET
from tritonllm.models.families.heads import BY_SUFFIX
from tritonllm.models.weight_names import WeightNames

_BASE = 10000.0


def _waves(config: ConfigReader, base: float, eps: float) -> dict[str, Any]:
    attends = full_attention(config, qkv_bias=True, o_bias=True)
    return {
        "norm": NormSpec(kind="layer", eps=eps, bias=True),
        "layers": same_layers(config, attends, mlp(config, gated=False, bias=True)),
        "wave_positions": base,
        "embedding_multiplier": config.size("hidden_size") ** 0.5,
    }


def _ctrl(config: ConfigReader) -> dict[str, Any]:
    """Its layers' norms have an epsilon of their own, whatever ``layer_norm_epsilon`` says."""
    check_fixed(config, layer_norm_epsilon=(1e-6,))
    return {**_waves(config, _BASE, 1e-6), "logit_bias": True}


def _xglm(config: ConfigReader) -> dict[str, Any]:
    """The slowest wave is 10,000 times as slow as the first; the first two rows are not positions' (as OPT's)."""
    half = config.size("hidden_size") // 2
    axes = _waves(config, _BASE ** (half / (half - 1)), 1e-5)
    multiplier = axes["embedding_multiplier"] if config.flag("scale_embedding") else 1.0
    return {**axes, "position_offset": OPT_OFFSET, "embedding_multiplier": multiplier}


_CTRL_CLASSIFIER = dataclasses.replace(BY_SUFFIX["ForSequenceClassification"], names=("classifier",))
_XGLM_NAMES = dataclasses.replace(
    OPT_NAMES, embed="model.embed_tokens", norm="model.layer_norm", layer="model.layers.{}"
)
FAMILIES: dict[str, Family] = {
    "CTRLLMHeadModel": Family(
        model_type="ctrl",
        axes=_ctrl,
        names=always(
            WeightNames(
                embed="transformer.w",
                norm="transformer.layernorm",
                layer="transformer.h.{}",
                attention_norm="layernorm1",
                mlp_norm="layernorm2",
                qkv=tuple(f"multi_head_attention.W{part}" for part in "qkv"),
                o="multi_head_attention.dense",
                up=("ffn.0",),
                down="ffn.2",
            )
        ),
        defaults={
            "max_position_embeddings": 256,
            "num_attention_heads": 16,
            "intermediate_size": 8192,
            "hidden_act": "relu",
            "tie_word_embeddings": True,
            "eos_token_id": None,
        },
        renames={
            "n_embd": "hidden_size",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "n_positions": "max_position_embeddings",
            "dff": "intermediate_size",
        },
        heads={"CTRLForSequenceClassification": _CTRL_CLASSIFIER},
    ),
    "XGLMForCausalLM": Family(
        model_type="xglm",
        axes=_xglm,
        names=always(_XGLM_NAMES),
        defaults={
            "max_position_embeddings": 2048,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
            "hidden_act": "gelu",
            "scale_embedding": True,
            "tie_word_embeddings": True,
            "eos_token_id": 2,
        },
        renames={
            "d_model": "hidden_size",
            "num_layers": "num_hidden_layers",
            "attention_heads": "num_attention_heads",
            "ffn_dim": "intermediate_size",
            "activation_function": "hidden_act",
        },
    ),
}

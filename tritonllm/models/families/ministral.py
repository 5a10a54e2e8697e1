"""Ministral, Ministral 3 and CWM: Mistral with windows in some layers, or with queries that grow with position."""

from collections.abc import Mapping
from typing import Any

from tritonllm.layers.attention import QueryScaling
from tritonllm.models.config_reader import ConfigReader
from tritonllm.models.families.common import (
    Family,
    always,
    attention,
    head_size,
    mlp,
    rms_norm,
    same_layers,
    windowed_layers,
)
from tritonllm.models.families.llama import COMMON
from tritonllm.models.weight_names import WeightNames

_ROTATION = ("rope_parameters", "rope_scaling")
_GROWTH = "llama_4_scaling_beta"
_DEFAULTS: dict[str, dict[str, Any]] = {  # rotations that their classes take where a file has none
    "ministral3": {
        "rope_type": "yarn",
        "rope_theta": 1000000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        _GROWTH: 0.1,
    },
    "cwm": {
        "rope_type": "llama3",
        "rope_theta": 1000000.0,
        "factor": 16.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    },
}


def _ministral(config: ConfigReader) -> dict[str, Any]:
    everywhere = [config.window() is not None] * config.size("num_hidden_layers")
    rope = config.rope(head_size(config))
    return {
        "norm": rms_norm(config),
        "layers": windowed_layers(config, config.windows(everywhere), mlp(config), rope=rope),
    }


def _with_rotation(config: ConfigReader, kind: str) -> ConfigReader:
    """The configuration with the rotation that the class has by default, if it has none."""
    given = any(config.get(name) for name in _ROTATION)
    return config if given else ConfigReader({**config, "rope_parameters": _DEFAULTS[kind]})


def _ministral3(config: ConfigReader) -> dict[str, Any]:
    config = _with_rotation(config, "ministral3")
    growth = None
    for name in _ROTATION:
        given = config.get(name)
        if isinstance(given, Mapping) and _GROWTH in given:
            rotation = {key: value for key, value in given.items() if key not in (_GROWTH, "max_position_embeddings")}
            beta = ConfigReader(given).number(_GROWTH, positive=False)
            length = ConfigReader(given).size("original_max_position_embeddings")
            growth = QueryScaling(every=length, factor=beta) if beta else None
            config = ConfigReader({**config, name: rotation})
    attends = attention(config, rope=config.rope(head_size(config)), window=config.window(), query_scaling=growth)
    return {"norm": rms_norm(config), "layers": same_layers(config, attends, mlp(config))}


def _cwm(config: ConfigReader) -> dict[str, Any]:
    """One layer of four sees everything, the first one first."""
    config = _with_rotation(config, "cwm")
    windows = config.windows([i % 4 != 0 for i in range(config.size("num_hidden_layers"))])
    rope = config.rope(head_size(config))
    return {"norm": rms_norm(config), "layers": windowed_layers(config, windows, mlp(config), rope=rope)}


FAMILIES: dict[str, Family] = {
    "MinistralForCausalLM": Family(
        model_type="ministral",
        axes=_ministral,
        names=always(WeightNames()),
        defaults={
            **COMMON,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            "eos_token_id": 2,
        },
    ),
    "Ministral3ForCausalLM": Family(
        model_type="ministral3",
        axes=_ministral3,
        names=always(WeightNames()),
        defaults={
            **COMMON,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 262144,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "sliding_window": None,
            "eos_token_id": 2,
        },
    ),
    "CwmForCausalLM": Family(
        model_type="cwm",
        axes=_cwm,
        names=always(WeightNames()),
        defaults={
            **COMMON,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "sliding_window": 8192,
            "eos_token_id": [128001, 128008, 128009],
        },
    ),
}

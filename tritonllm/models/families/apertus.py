"""Apertus: a norm of each head, and a plain MLP whose activation is learned (xIELU)."""

from typing import Any

from tritonllm.models.config_reader import ConfigReader
from tritonllm.models.families.common import Family, always, attention, head_size, mlp, rms_norm, same_layers
from tritonllm.models.families.llama import COMMON
from tritonllm.models.weight_names import WeightNames

_ROTATION: dict[str, Any] = {  # where a file has none
    "rope_type": "llama3",
    "rope_theta": 12000000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def _apertus(config: ConfigReader) -> dict[str, Any]:
    if not any(config.get(name) for name in ("rope_parameters", "rope_scaling")):
        config = ConfigReader({**config, "rope_parameters": _ROTATION})
    bias, norm = config.flag("attention_bias"), rms_norm(config)
    attends = attention(config, rope=config.rope(head_size(config)), qkv_bias=bias, o_bias=bias, qk_norm=norm)
    return {"norm": norm, "layers": same_layers(config, attends, mlp(config, gated=False))}


_NAMES = WeightNames(
    attention_norm="attention_layernorm", mlp_norm="feedforward_layernorm", up=("mlp.up_proj",), xielu="mlp.act_fn"
)
_APERTUS: dict[str, Any] = {
    **COMMON,
    "rms_norm_eps": 1e-5,
    "hidden_act": "xielu",
    "max_position_embeddings": 65536,
    "eos_token_id": 2,
}

FAMILIES: dict[str, Family] = {
    "ApertusForCausalLM": Family(model_type="apertus", axes=_apertus, names=always(_NAMES), defaults=_APERTUS),
    "Apertus1p5TextForCausalLM": Family(
        model_type="apertus1p5_text", axes=_apertus, names=always(_NAMES), defaults=_APERTUS
    ),
}

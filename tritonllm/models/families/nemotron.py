"""Nemotron 3, Nemotron 4 and Minitron: layer norms whose weights are stored minus 1, squared ReLU without a gate."""

from typing import Any

from tritonllm.models.config_reader import ConfigReader
from tritonllm.models.families.common import Family, always, attention, head_size, layer_norm, mlp, same_layers
from tritonllm.models.families.llama import COMMON
from tritonllm.models.weight_names import WeightNames


def _nemotron(config: ConfigReader) -> dict[str, Any]:
    bias = config.flag("attention_bias")
    attends = attention(config, rope=config.rope(head_size(config)), qkv_bias=bias, o_bias=bias)
    block = mlp(config, gated=False, bias=config.flag("mlp_bias"))
    return {"norm": layer_norm(config), "layers": same_layers(config, attends, block)}


FAMILIES: dict[str, Family] = {
    "NemotronForCausalLM": Family(
        model_type="nemotron",
        axes=_nemotron,
        names=always(WeightNames(up=("mlp.up_proj",), norm_weights_minus_one=True)),
        defaults={
            **COMMON,
            "layer_norm_eps": 1e-5,
            "hidden_act": "relu2",
            "max_position_embeddings": 4096,
            "partial_rotary_factor": 0.5,
            "intermediate_size": 24576,
            "eos_token_id": 3,
        },
        renames={"norm_eps": "layer_norm_eps", "rope_percent": "partial_rotary_factor"},
    ),
}

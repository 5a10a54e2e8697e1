"""BLOOM and MPT: positions as biases that grow with the distance, ALiBi.

Press et al., "Train Short, Test Long: Attention with Linear Biases" (2022).
"""

import math
from typing import Any

from tritonllm.layers.mlp import MLPSpec
from tritonllm.models.config_reader import ConfigReader
from tritonllm.models.families.common import Family, always, full_attention, layer_norm, same_layers
from tritonllm.models.weight_names import WeightNames


def alibi_slopes(heads: int, bias_max: float = 8.0) -> tuple[float, ...]:
    """Of each head: a geometric series down to ``2 ** -bias_max``.

    If ``heads`` is no power of two, that of the power below, then every other one of the next power's.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-bias_max * i / power) for i in range(1, power + 1)]
    return (*slopes, *(2.0 ** (-bias_max / 2 * i / power) for i in range(1, 2 * (heads - power), 2)))


def _bloom(config: ConfigReader) -> dict[str, Any]:
    slopes = alibi_slopes(config.size("num_attention_heads"))
    attends = full_attention(config, alibi_slopes=slopes, qkv_bias=True, o_bias=True)
    block = MLPSpec(intermediate_size=4 * config.size("hidden_size"), activation="gelu_tanh", gated=False, bias=True)
    return {"norm": layer_norm(config), "embedding_norm": True, "layers": same_layers(config, attends, block)}


_BLOOM_NAMES = WeightNames(
    embed="transformer.word_embeddings",
    embedding_norm="transformer.word_embeddings_layernorm",
    norm="transformer.ln_f",
    layer="transformer.h.{}",
    qkv=("self_attention.query_key_value",),
    qkv_by_group=True,
    o="self_attention.dense",
    up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
)

FAMILIES: dict[str, Family] = {
    "BloomForCausalLM": Family(
        model_type="bloom",
        axes=_bloom,
        names=always(_BLOOM_NAMES),
        defaults={
            # of no consequence to the model: what it was trained on, which files may leave out
            "max_position_embeddings": 2048,
            "layer_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "eos_token_id": 2,
        },
        renames={
            "n_embed": "hidden_size",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "seq_length": "max_position_embeddings",
            "layer_norm_epsilon": "layer_norm_eps",
        },
    ),
}

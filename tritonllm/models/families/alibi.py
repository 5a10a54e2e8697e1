"""BLOOM and MPT: positions as biases that grow with the distance, ALiBi.

Press et al., "Train Short, Test Long: Attention with Linear Biases" (2022).
"""

import math
from collections.abc import Mapping
from typing import Any

from tritonllm.layers.mlp import MLPSpec
from tritonllm.models.config_reader import ConfigReader
from tritonllm.models.families.common import Family, always, full_attention, layer_norm, same_layers
from tritonllm.models.weight_names import WeightNames


def alibi_slopes(heads: int, bias_max: float = 8.0) -> tuple[float, ...]:
    """The slope of each head: a geometric series down to ``2 ** -bias_max``.

    If ``heads`` is no power of two, the slopes are those of the power below, then every other one of the next power's.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-bias_max * i / power) for i in range(1, power + 1)]
    return (*slopes, *(2.0 ** (-bias_max / 2 * i / power) for i in range(1, 2 * (heads - power), 2)))


def _bloom(config: ConfigReader) -> dict[str, Any]:
    slopes = alibi_slopes(config.size("num_attention_heads"))
    attends = full_attention(config, alibi_slopes=slopes, qkv_bias=True, o_bias=True)
    block = MLPSpec(intermediate_size=4 * config.size("hidden_size"), activation="gelu_tanh", gated=False, bias=True)
    return {"norm": layer_norm(config), "embedding_norm": True, "layers": same_layers(config, attends, block)}


def _mpt(config: ConfigReader) -> dict[str, Any]:
    """The axes of MPT: nothing has a bias, and fields of attention are in an object of their own."""
    options = config.nested("attn_config", {"alibi_bias_max": 8})
    _refuse_others("", config, _MPT_COMPUTES)
    _refuse_others("attn_config: ", options, _MPT_ATTENTION_COMPUTES)
    attends = full_attention(
        config,
        alibi_slopes=alibi_slopes(config.size("num_attention_heads"), options.number("alibi_bias_max")),
        scale=options.number_or_none("softmax_scale"),
        clip_qkv=options.number_or_none("clip_qkv"),
    )
    inner = config.size("expansion_ratio") * config.size("hidden_size")
    block = MLPSpec(intermediate_size=inner, activation="gelu", gated=False)
    return {"norm": layer_norm(config, bias=False), "layers": same_layers(config, attends, block)}


# Fields of MPT's own code that would change what is computed, and their values here; transformers ignores them.
_MPT_COMPUTES: dict[str, tuple[Any, ...]] = {
    "no_bias": (True,),
    "norm_type": ("low_precision_layernorm", "layernorm"),
}
_MPT_ATTENTION_COMPUTES: dict[str, tuple[Any, ...]] = {
    "alibi": (True,),
    "attn_type": ("multihead_attention",),
    "prefix_lm": (False,),
    "qk_ln": (False,),
}


def _refuse_others(where: str, given: Mapping[str, Any], computed: Mapping[str, tuple[Any, ...]]) -> None:
    for name, values in computed.items():
        if given.get(name, values[0]) not in values:
            raise ValueError(f"config.json: {where}{name}={given[name]!r} is not supported")


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

_MPT_NAMES = WeightNames(
    embed="transformer.wte",
    norm="transformer.norm_f",
    layer="transformer.blocks.{}",
    attention_norm="norm_1",
    mlp_norm="norm_2",
    qkv=("attn.Wqkv",),
    o="attn.out_proj",
    up=("ffn.up_proj",),
    down="ffn.down_proj",
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
    "MPTForCausalLM": Family(
        model_type="mpt",
        aliases=("MptForCausalLM",),  # transformers' own name
        axes=_mpt,
        names=always(_MPT_NAMES),
        defaults={
            "hidden_size": 2048,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "max_position_embeddings": 2048,
            "expansion_ratio": 4,
            "layer_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "eos_token_id": None,
        },
        renames={
            "d_model": "hidden_size",
            "n_layers": "num_hidden_layers",
            "n_heads": "num_attention_heads",
            "max_seq_len": "max_position_embeddings",
            "layer_norm_epsilon": "layer_norm_eps",
        },
    ),
}

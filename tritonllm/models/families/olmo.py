"""OLMo 1: layer norms without weights. OLMo 2 and 3, OLMoE and FlexOlmo: one norm over all query heads and one over all
key heads."""

from typing import Any

from tritonllm.layers.attention import AttentionSpec
from tritonllm.layers.moe import MoESpec
from tritonllm.layers.norm import NormSpec
from tritonllm.models.config_reader import ConfigReader
from tritonllm.models.families.common import Family, always, attention, head_size, mlp, rms_norm, same_layers
from tritonllm.models.families.llama import COMMON
from tritonllm.models.spec import LayerSpec
from tritonllm.models.weight_names import WeightNames


def _olmo(config: ConfigReader) -> dict[str, Any]:
    bias = config.flag("attention_bias")
    attends = attention(
        config,
        rope=config.rope(head_size(config)),
        qkv_bias=bias,
        o_bias=bias,
        clip_qkv=config.number_or_none("clip_qkv"),
    )
    norm = NormSpec(kind="layer", eps=1e-5, weight=False, bias=False)
    return {"norm": norm, "layers": same_layers(config, attends, mlp(config))}


def _attention(config: ConfigReader) -> AttentionSpec:
    bias, rope = config.flag("attention_bias"), config.rope(head_size(config))
    return attention(config, rope=rope, qkv_bias=bias, o_bias=bias, qk_norm=rms_norm(config), qk_norm_over="all")


def _olmo2(config: ConfigReader) -> dict[str, Any]:
    """Norms after each block."""
    layers = same_layers(config, _attention(config), mlp(config))
    return {"norm": rms_norm(config), "norm_position": "post", "layers": layers}


def _olmoe(config: ConfigReader) -> dict[str, Any]:
    experts = MoESpec(
        num_experts=config.size("num_experts"),
        top_k=config.size("num_experts_per_tok"),
        intermediate_size=config.size("intermediate_size"),
        activation=config.activation(),
        renormalize=config.flag("norm_topk_prob"),
    )
    return {"norm": rms_norm(config), "layers": same_layers(config, _attention(config), experts)}


def _flex_olmo(config: ConfigReader) -> dict[str, Any]:
    return {**_olmoe(config), "norm_position": "post"}


def _olmo3(config: ConfigReader) -> dict[str, Any]:
    """Three layers with a window, then one without; only the latter scale their rotation."""
    bias, norm, head, block = config.flag("attention_bias"), rms_norm(config), head_size(config), mlp(config)
    windows = config.windows([(i + 1) % 4 != 0 for i in range(config.size("num_hidden_layers"))])
    local = ConfigReader({**config, "rope_scaling": None})
    ropes = {False: config.rope(head, kind="full_attention"), True: local.rope(head, kind="sliding_attention")}
    axes: dict[str, Any] = {"qkv_bias": bias, "o_bias": bias, "qk_norm": norm, "qk_norm_over": "all"}
    kinds = {
        window: LayerSpec(attention=attention(config, rope=ropes[window is not None], window=window, **axes), mlp=block)
        for window in set(windows)
    }
    return {"norm": norm, "norm_position": "post", "layers": tuple(kinds[window] for window in windows)}


# Exaone 4 has these names, too.
NAMES_OF_POST_NORMS = WeightNames(
    attention_post_norm="post_attention_layernorm", mlp_post_norm="post_feedforward_layernorm"
)
_OLMO: dict[str, Any] = {**COMMON, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "eos_token_id": 50279}

FAMILIES: dict[str, Family] = {
    "OlmoForCausalLM": Family(
        model_type="olmo",
        axes=_olmo,
        names=always(WeightNames()),
        defaults={**COMMON, "max_position_embeddings": 2048, "clip_qkv": None, "eos_token_id": 50279},
        reads=frozenset({"clip_qkv"}),
    ),
    "Olmo2ForCausalLM": Family(model_type="olmo2", axes=_olmo2, names=always(NAMES_OF_POST_NORMS), defaults=_OLMO),
    "Olmo3ForCausalLM": Family(
        model_type="olmo3",
        axes=_olmo3,
        names=always(NAMES_OF_POST_NORMS),
        defaults={**_OLMO, "rope_theta": 500000.0, "sliding_window": 4096},
    ),
    "OlmoeForCausalLM": Family(
        model_type="olmoe",
        axes=_olmoe,
        names=always(WeightNames()),
        defaults={
            **_OLMO,
            "max_position_embeddings": 4096,
            "num_experts_per_tok": 8,
            "num_experts": 64,
            "norm_topk_prob": False,
        },
        renames={"num_local_experts": "num_experts"},
        reads=frozenset({"num_experts", "num_local_experts"}),
    ),
    "FlexOlmoForCausalLM": Family(
        model_type="flex_olmo",
        axes=_flex_olmo,
        names=always(NAMES_OF_POST_NORMS),
        defaults={
            **_OLMO,
            "rms_norm_eps": 1e-6,
            "rope_theta": 500000.0,
            "max_position_embeddings": 4096,
            "num_experts_per_tok": 5,
            "num_experts": 7,
            "norm_topk_prob": False,
            "eos_token_id": 100257,
        },
        renames={"num_local_experts": "num_experts"},
        reads=frozenset({"num_experts", "num_local_experts"}),
    ),
}

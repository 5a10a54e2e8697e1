"""The text model of Gemma 4: layers with a window, and layers that see everything with larger and fewer heads.

The last layers may read the keys of earlier ones, and each layer may have an input beside the stream.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from tritonllm.layers.attention import AttentionSpec
from tritonllm.layers.layer_inputs import LayerInputSpec
from tritonllm.layers.mlp import MLPSpec
from tritonllm.layers.moe import MoESpec
from tritonllm.layers.norm import NormSpec
from tritonllm.models.config_reader import ConfigReader
from tritonllm.models.families.common import Family, always, attention, check_fixed, head_size, mlp, rms_norm
from tritonllm.models.spec import LayerSpec
from tritonllm.models.weight_names import WeightNames

_FULL, _SLIDING = "full_attention", "sliding_attention"
_ROTATIONS: dict[str, Any] = {
    _SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}


def _gemma4(config: ConfigReader) -> dict[str, Any]:
    check_fixed(config, use_bidirectional_attention=(False, "vision"))  # of images alone
    norm, count = rms_norm(config), config.size("num_hidden_layers")
    windows = config.windows([(i + 1) % 6 != 0 and i + 1 < count for i in range(count)])
    if windows[-1] is not None:  # transformers makes the last layer see everything, whatever the file says
        windows = (*windows[:-1], None)
    attends = [_attention(config, place, window, norm) for place, window in enumerate(windows)]
    shared = config.size("num_kv_shared_layers", low=0)
    inner = {True: mlp(config), False: mlp(config)}
    if config.flag("use_double_wide_mlp"):
        inner[False] = dataclasses.replace(inner[False], intermediate_size=2 * inner[False].intermediate_size)
    layers, experts = [], config.flag("enable_moe_block")
    for place, attends_here in enumerate(attends):
        back = 0 if place < count - shared else _distance(windows, place, count - shared)
        attends_here = dataclasses.replace(attends_here, own_keys=back == 0)
        block = inner[back == 0]
        mixed = _experts(config, norm, block) if experts else block
        layers.append(LayerSpec(attention=attends_here, mlp=mixed, keys_from=back))
    return {
        "norm": norm,
        "norm_position": "sandwich",
        "layers": tuple(layers),
        "embedding_multiplier": config.size("hidden_size") ** 0.5,
        "logit_softcap": config.cap("final_logit_softcapping"),
        "layer_scalars": True,
        "layer_inputs": _layer_inputs(config, norm),
    }


def _experts(config: ConfigReader, norm: NormSpec, shared: MLPSpec) -> MoESpec:
    return MoESpec(
        num_experts=config.size("num_experts"),
        top_k=config.size("top_k_experts"),
        intermediate_size=config.size("moe_intermediate_size"),
        activation=config.activation(),
        expert_scales=True,
        shared=shared,
        apart=norm,
    )


def _attention(config: ConfigReader, place: int, window: int | None, norm: NormSpec) -> AttentionSpec:
    config = ConfigReader({**config, "rope_parameters": config.get("rope_parameters") or _ROTATIONS})
    of_layer = _heads(config, place) if window is None else config
    return attention(
        of_layer,
        window=window,
        rope=of_layer.rope(head_size(of_layer), kind=_FULL if window is None else _SLIDING),
        scale=1.0,
        qkv_bias=config.flag("attention_bias"),
        o_bias=config.flag("attention_bias"),
        qk_norm=norm,
        v_norm=dataclasses.replace(norm, weight=False),
        values_are_keys=window is None and config.flag("attention_k_eq_v"),
    )


def _heads(config: ConfigReader, place: int) -> ConfigReader:
    """The configuration of a layer that sees everything: files of transformers 5 have ``per_layer_config``, others
    ``global_head_dim`` and ``num_global_key_value_heads``."""
    if config.get("per_layer_config") is None:
        found = {"head_dim": config.get("global_head_dim")}
        if config.flag("attention_k_eq_v") and config.get("num_global_key_value_heads") is not None:
            found["num_key_value_heads"] = config["num_global_key_value_heads"]
        return ConfigReader({**config, **found})
    found = {str(key): value for key, value in config.nested("per_layer_config").items()}.get(str(place), {})
    if not isinstance(found, Mapping) or not set(found) <= {"head_dim", "num_key_value_heads"}:
        raise ValueError(
            f"config.json: per_layer_config must have head_dim and num_key_value_heads of layer {place}, got {found!r}"
        )
    return ConfigReader({**config, **found})


def _distance(windows: tuple[int | None, ...], place: int, own: int) -> int:
    """How many layers before ``place`` the last of the first ``own`` layers is that sees as far.

    Raises:
        ValueError: there is none.
    """
    for source in reversed(range(own)):
        if windows[source] == windows[place]:
            return place - source
    raise ValueError(
        f"config.json: num_kv_shared_layers leaves none of the first {own} layers with keys that layer {place} reads"
    )


def _layer_inputs(config: ConfigReader, norm: NormSpec) -> LayerInputSpec | None:
    size = config.size("hidden_size_per_layer_input", low=0) if config.get("hidden_size_per_layer_input") else 0
    if size == 0:
        return None
    rows, vocab = config.size("vocab_size_per_layer_input"), config.size("vocab_size")
    if rows < vocab:
        raise ValueError(f"config.json: vocab_size_per_layer_input must be at least vocab_size={vocab}, got {rows}")
    return LayerInputSpec(rows=rows, size=size, activation=config.activation(), norm=norm)


_NAMES = WeightNames(
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
    router="router.proj",
    router_norm="router.scale",
    expert_scale="router.per_expert_scale",
    experts_norm="pre_feedforward_layernorm_2",
    experts_post_norm="post_feedforward_layernorm_2",
    shared_post_norm="post_feedforward_layernorm_1",
    expert_up=(),
    stacked_up="experts.gate_up_proj",
    stacked_down="experts.down_proj",
    shared="mlp",
)
_GEMMA4: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "hidden_act": "gelu_pytorch_tanh",
    "head_dim": 256,
    "global_head_dim": 512,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "max_position_embeddings": 131072,
    "sliding_window": 512,
    "eos_token_id": 1,
    "num_kv_shared_layers": 0,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
}
_READS = frozenset({"final_logit_softcapping", "use_bidirectional_attention", "num_experts"})

FAMILIES: dict[str, Family] = {
    "Gemma4ForCausalLM": Family(
        model_type="gemma4_text",
        axes=_gemma4,
        names=always(_NAMES),
        defaults=_GEMMA4,
        renames={"hidden_activation": "hidden_act"},
        reads=_READS,
    ),
    "Gemma4UnifiedForCausalLM": Family(
        model_type="gemma4_unified_text",
        axes=_gemma4,
        names=always(_NAMES),
        defaults={
            **_GEMMA4,
            "max_position_embeddings": 262144,
            "sliding_window": 1024,
            "hidden_size_per_layer_input": 0,
        },
        renames={"hidden_activation": "hidden_act"},
        reads=_READS,
    ),
}

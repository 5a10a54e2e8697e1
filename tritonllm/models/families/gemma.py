"""Gemma 1, 2 and 3 and VaultGemma: norms with weights stored as differences from 1, scaled embeddings, gated GELU.

Gemma 2 and 3 have norms after each block, too, and windows; Gemma 2 and VaultGemma have soft caps.
"""

from typing import Any

from tritonllm.models.config_reader import ConfigReader
from tritonllm.models.families.common import Family, always, attention, head_size, mlp, rms_norm, same_layers
from tritonllm.models.families.heads import BY_SUFFIX
from tritonllm.models.spec import LayerSpec
from tritonllm.models.weight_names import WeightNames


def _gemma(config: ConfigReader) -> dict[str, Any]:
    bias = config.flag("attention_bias")
    if config["hidden_act"] == "gelu":  # what early files say, and the tanh approximation is meant
        config = ConfigReader({**config, "hidden_act": "gelu_pytorch_tanh"})
    attends = attention(config, rope=config.rope(head_size(config)), qkv_bias=bias, o_bias=bias)
    return {
        "norm": rms_norm(config, weight_offset=1.0),
        "layers": same_layers(config, attends, mlp(config)),
        "embedding_multiplier": config.size("hidden_size") ** 0.5,
    }


def _gemma_with_windows(
    config: ConfigReader, windows: tuple[int | None, ...], ropes: dict[bool, Any], **axes: Any
) -> dict[str, Any]:
    """``ropes`` by whether a layer has a window."""
    bias, block = config.flag("attention_bias"), mlp(config)
    if config.get("use_bidirectional_attention"):  # EmbeddingGemma; its window counts both sides
        windows = tuple(None if window is None else window // 2 + 1 for window in windows)
        axes["causal"] = False
    kinds = {
        window: LayerSpec(
            attention=attention(
                config,
                rope=ropes[window is not None],
                window=window,
                scale=config.number("query_pre_attn_scalar") ** -0.5,
                qkv_bias=bias,
                o_bias=bias,
                **axes,
            ),
            mlp=block,
        )
        for window in set(windows)
    }
    return {
        "norm": rms_norm(config, weight_offset=1.0),
        "norm_position": "sandwich",
        "layers": tuple(kinds[window] for window in windows),
        "embedding_multiplier": config.size("hidden_size") ** 0.5,
        "logit_softcap": config.cap("final_logit_softcapping"),
        "logits": axes.get("causal", True),
    }


def _gemma2(config: ConfigReader) -> dict[str, Any]:
    """Every other layer has a window, the first one first."""
    windows = config.windows([i % 2 == 0 for i in range(config.size("num_hidden_layers"))])
    rope = config.rope(head_size(config))
    return _gemma_with_windows(config, windows, {True: rope, False: rope}, softcap=config.cap("attn_logit_softcapping"))


def _vaultgemma(config: ConfigReader) -> dict[str, Any]:
    """Gemma 2 without the norms after its blocks."""
    return {**_gemma2(config), "norm_position": "pre"}


def _gemma3(config: ConfigReader) -> dict[str, Any]:
    """Five layers with a window and short wavelengths, then one without and with long ones."""
    pattern = config.size("sliding_window_pattern")
    windows = config.windows([(i + 1) % pattern != 0 for i in range(config.size("num_hidden_layers"))])
    head = head_size(config)
    local = ConfigReader({**config, "rope_scaling": None, "rope_theta": config["rope_local_base_freq"]})
    ropes = {False: config.rope(head, kind="full_attention"), True: local.rope(head, kind="sliding_attention")}
    return _gemma_with_windows(config, windows, ropes, qk_norm=rms_norm(config, weight_offset=1.0))


_NAMES = WeightNames(
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)
_GEMMA: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "hidden_act": "gelu_pytorch_tanh",
    "head_dim": 256,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "eos_token_id": 1,
}

_GEMMA2: dict[str, Any] = {
    **_GEMMA,
    "max_position_embeddings": 8192,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}

FAMILIES: dict[str, Family] = {
    "GemmaForCausalLM": Family(
        model_type="gemma",
        axes=_gemma,
        names=always(WeightNames()),
        defaults={**_GEMMA, "max_position_embeddings": 8192, "num_key_value_heads": 16},
    ),
    "VaultGemmaForCausalLM": Family(
        model_type="vaultgemma",
        axes=_vaultgemma,
        names=always(WeightNames(mlp_norm="pre_feedforward_layernorm")),
        defaults=_GEMMA2,
        renames={"hidden_activation": "hidden_act"},
        reads=frozenset({"attn_logit_softcapping", "final_logit_softcapping"}),
    ),
    "Gemma2ForCausalLM": Family(
        model_type="gemma2",
        axes=_gemma2,
        names=always(_NAMES),
        defaults=_GEMMA2,
        renames={"hidden_activation": "hidden_act"},
        reads=frozenset({"attn_logit_softcapping", "final_logit_softcapping"}),
    ),
    "Gemma3ForCausalLM": Family(
        model_type="gemma3_text",
        axes=_gemma3,
        names=always(_NAMES),
        defaults={
            **_GEMMA,
            "max_position_embeddings": 131072,
            "sliding_window_pattern": 6,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
            "final_logit_softcapping": None,
            "use_bidirectional_attention": False,
        },
        renames={"hidden_activation": "hidden_act", "_sliding_window_pattern": "sliding_window_pattern"},
        reads=frozenset({"final_logit_softcapping", "use_bidirectional_attention"}),
        heads={
            "Gemma3TextForSequenceClassification": BY_SUFFIX["ForSequenceClassification"],
            "Gemma3TextModel": BY_SUFFIX["Model"],
        },
    ),
}

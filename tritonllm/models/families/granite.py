"""What followed Granite 3: sinks and windows (Granite with sliding windows), norms after each block (HyperCLOVA X)."""

import dataclasses
from typing import Any

from tritonllm.layers.attention import AttentionSpec
from tritonllm.models.config_reader import ConfigReader
from tritonllm.models.families.common import Family, always, attention, head_size, mlp, rms_norm
from tritonllm.models.families.llama import COMMON, granite
from tritonllm.models.spec import LayerSpec
from tritonllm.models.weight_names import WeightNames


def windowed(config: ConfigReader) -> list[AttentionSpec]:
    """The attention of each layer: one of four sees everything, and each has a rotation of its own, or none."""
    bias, count = config.flag("attention_bias"), config.size("num_hidden_layers")
    windows = config.windows([i % 4 != 0 for i in range(count)])
    plain = config.rope(head_size(config))
    bases = config.get("layer_rope_theta")
    if bases is None:
        bases = [plain.base] * count
    if not isinstance(bases, list) or len(bases) != count or not all(_is_base(base) for base in bases):
        raise ValueError(f"config.json: layer_rope_theta must be a list of {count} numbers, 0 for none, got {bases!r}")
    return [
        attention(
            config,
            rope=dataclasses.replace(plain, base=float(base)) if base else None,
            window=window,
            scale=config.number("attention_multiplier"),
            sinks=True,
            qkv_bias=bias,
            o_bias=bias,
        )
        for base, window in zip(bases, windows, strict=True)
    ]


def _granite_swa(config: ConfigReader) -> dict[str, Any]:
    block = mlp(config, bias=config.flag("mlp_bias"))
    layers = tuple(LayerSpec(attention=attends, mlp=block) for attends in windowed(config))
    return {**granite(config), "layers": layers}


def _is_base(base: object) -> bool:
    """A base of wavelengths, or what says that there is no rotation."""
    return base is None or (isinstance(base, int | float) and not isinstance(base, bool) and base >= 0)


def _hyperclovax(config: ConfigReader) -> dict[str, Any]:
    """Its ``logits_scaling`` multiplies, Granite's divides."""
    scale = config.get("attention_multiplier")
    scaled = {"attention_multiplier": head_size(config) ** -0.5} if scale is None else {}
    return {
        **granite(ConfigReader({**config, **scaled})),
        "norm": rms_norm(config),
        "norm_position": "sandwich" if config.flag("use_post_norm") else "pre",
        "logit_scale": config.number("logits_scaling"),
    }


_MULTIPLIERS: dict[str, Any] = {"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0}

FAMILIES: dict[str, Family] = {
    "GraniteSWAForCausalLM": Family(
        model_type="granite_swa",
        axes=_granite_swa,
        names=always(WeightNames()),
        defaults={
            **COMMON,
            **_MULTIPLIERS,
            "attention_multiplier": 1.0,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 8192,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "sliding_window": 128,
            "eos_token_id": 100257,
        },
        reads=frozenset({"embedding_multiplier", "residual_multiplier"}),
    ),
    "HyperCLOVAXForCausalLM": Family(
        model_type="hyperclovax",
        axes=_hyperclovax,
        names=always(WeightNames(attention_post_norm="post_norm1", mlp_post_norm="post_norm2")),
        defaults={
            **COMMON,
            **_MULTIPLIERS,
            "attention_multiplier": None,
            "max_position_embeddings": 2048,
            "use_post_norm": True,
            "eos_token_id": 2,
        },
        reads=frozenset({"embedding_multiplier", "residual_multiplier"}),
    ),
}

"""The text model of a checkpoint that reads images or sound, too: its configuration, and which tensors are its own.

Such a ``config.json`` has the text model's in ``text_config`` (``llm_config`` in InternVL's own form), or its fields
beside ``vision_config`` (Qwen2-VL's first form). Positions of text are the same in all three sections of Qwen's and
GLM's multimodal rotary embedding, so the plain rotation computes it. Where a configuration leaves out what its class
has by default, transformers fills it in. Towers and projectors are not loaded.
"""

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]
# Types of text models that compute what another one does, when there is text alone.
SAME_AS = {
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "glm4v_text": "glm4",
    "glm4v_moe_text": "glm4_moe",
    "ernie4_5_vl_moe_text": "ernie4_5_moe",
}
# What their classes do without a field for it.
FIXED: dict[str, dict[str, Any]] = {
    "qwen3_vl_moe_text": {"norm_topk_prob": True},
    "glm4v_text": {"attention_bias": True},
    "glm4v_moe_text": {"use_qk_norm": False},
}
# What they make of fields that a file leaves out, where the other text model makes something else of them.
LEFT_OUT: dict[str, dict[str, Any]] = {"glm4v_text": {"head_dim": None, "partial_rotary_factor": 1.0}}
# Whose text is computed in another way than the text model's class does: without logit_scale, and (PaliGemma) with
# prompts whose tokens see those behind them.
UNCLEAR = {"aya_vision", "cohere2_vision", "paligemma"}
# Of the whole checkpoint, and said there rather than in the text model's part.
OUTER = ("eos_token_id", "tie_word_embeddings", "dtype", "torch_dtype", "quantization_config")
ROTARY = ("rope_parameters", "rope_scaling")
SECTIONS = ("mrope_section", "mrope_interleaved")
# What stands before the names of the text model's tensors, and what these begin with without it.
PREFIXES = {
    "language_model.model.": "model.",
    "model.language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.text_model.": "model.",
}
TOWERS = {
    "vision_tower",
    "vision_model",
    "visual",
    "vision_embed_tokens",
    "multi_modal_projector",
    "mlp1",  # InternVL's projector
    "connector",
    "resampler_model",
    "image_newline",
    "audio_tower",
    "embed_vision",  # Gemma 4's projectors
    "embed_audio",
    "audio_projector",
}


def has_text_part(config: Config) -> bool:
    """The configuration describes more than a text model."""
    parts = config.get("text_config"), config.get("llm_config"), config.get("vision_config")
    return any(isinstance(part, Mapping) for part in parts)


def text_part(config: Config, by_type: Mapping[str, str]) -> dict[str, Any] | None:
    """The configuration of the text model alone, as ``config.json`` of such a model would say it.

    Args:
        by_type: architectures that there are, by ``model_type``.

    Returns:
        ``None``: there is no family for it.

    Raises:
        ValueError: a bad field of it.
    """
    found = [config[name] for name in ("text_config", "llm_config") if isinstance(config.get(name), Mapping)]
    part = dict(found[0]) if found else {key: value for key, value in config.items() if key not in OUTER}
    kind = str(part.get("model_type", config.get("model_type")))
    family = SAME_AS.get(kind, kind)
    if family not in by_type or config.get("model_type") in UNCLEAR:
        return None
    part = LEFT_OUT.get(kind, {}) | (_with_defaults(kind, part) if found else part)
    part |= {name: config[name] for name in OUTER if config.get(name) is not None}
    for name in ROTARY:
        if isinstance(part.get(name), Mapping):
            part[name] = _plain_rotation(part[name])
    return part | FIXED.get(kind, {}) | {"model_type": family, "architectures": [by_type[family]]}


def _plain_rotation(rope: Config) -> dict[str, Any]:
    plain = {key: value for key, value in rope.items() if key not in SECTIONS}
    return {key: value for key, value in plain.items() if not (key in ("type", "rope_type") and value == "mrope")}


def _with_defaults(kind: str, part: Config) -> dict[str, Any]:
    """What the class of this type makes of it.

    Raises:
        ValueError: transformers refuses a field.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoConfig

    if kind not in CONFIG_MAPPING:  # of an older transformers: what the file says has to do
        return dict(part)
    fields = {key: value for key, value in part.items() if key != "model_type"}
    try:
        return AutoConfig.for_model(kind, **fields).to_dict()
    except (ValueError, TypeError, KeyError, StrictDataclassError) as error:
        raise ValueError(f"config.json: the text model's part ({kind}) has a bad field: {error}") from error


def names_in_files(name: str) -> list[str]:
    """What a checkpoint of more than text may call a tensor of the text model."""
    return [prefix + name.removeprefix(begins) for prefix, begins in PREFIXES.items() if name.startswith(begins)]


def is_of_a_tower(name: str) -> bool:
    """A tensor that reads or projects images or sound."""
    return not TOWERS.isdisjoint(name.split(".")[:2])

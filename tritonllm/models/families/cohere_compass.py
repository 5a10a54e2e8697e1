"""The text model of Cohere Compass: as Cohere 2, with a rotation of halves for each kind of layer."""

from collections.abc import Mapping
from typing import Any

from tritonllm.layers.head import HeadSpec
from tritonllm.models.config_reader import ConfigReader
from tritonllm.models.families.common import (
    Family,
    always,
    attention,
    check_fixed,
    layer_norm,
    mlp,
    rotations,
)
from tritonllm.models.families.heads import BY_SUFFIX, FamilyHead
from tritonllm.models.families.llama import COHERE
from tritonllm.models.spec import LayerSpec
from tritonllm.models.weight_names import WeightNames

_SECTIONS = ("mrope_section", "mrope_interleaved")  # positions of text are the same in all of them


def _without_sections(rotation: Any) -> Any:
    if not isinstance(rotation, Mapping):
        return rotation
    return {key: _without_sections(value) for key, value in rotation.items() if key not in _SECTIONS}


def _cohere_compass(config: ConfigReader) -> dict[str, Any]:
    config = ConfigReader({**config, "rope_parameters": _without_sections(config.get("rope_parameters"))})
    bias, block = config.flag("attention_bias"), mlp(config)
    windows = config.windows([False] * config.size("num_hidden_layers"))
    ropes = rotations(config, windows)
    kinds = {
        window: LayerSpec(
            attention=attention(config, window=window, rope=ropes[window], qkv_bias=bias, o_bias=bias), mlp=block
        )
        for window in ropes
    }
    return {
        "norm": layer_norm(config, bias=False),
        "parallel": "one norm",
        "layers": tuple(kinds[window] for window in windows),
        "logit_scale": 1.0 if config.get("logit_scale") is None else config.number("logit_scale"),
    }


def _score(config: ConfigReader) -> HeadSpec:
    check_fixed(config, pooling=("eos",))
    usual = BY_SUFFIX["ForSequenceClassification"].spec
    assert usual is not None
    return usual(config)


FAMILIES: dict[str, Family] = {
    "CohereCompassForCausalLM": Family(
        model_type="cohere_compass_text",
        axes=_cohere_compass,
        names=always(WeightNames()),
        defaults={**COHERE, "logit_scale": None, "sliding_window": 4096},
        reads=frozenset({"logit_scale"}),
        heads={
            "CohereCompassTextForSequenceClassification": FamilyHead(spec=_score, names=("score",)),
            "CohereCompassTextModel": BY_SUFFIX["Model"],
        },
    ),
}

"""Exaone 4: norms after each block, a norm of each head; where some layers have a window, the others do not rotate."""

from typing import Any

from tritonllm.layers.attention import AttentionSpec
from tritonllm.models.config_reader import ConfigReader
from tritonllm.models.families.common import Family, always, attention, head_size, mlp, rms_norm
from tritonllm.models.families.llama import COMMON
from tritonllm.models.families.olmo import NAMES_OF_POST_NORMS
from tritonllm.models.spec import LayerSpec


def _sliding(config: ConfigReader) -> list[bool]:
    """Which layers have a window, for a file without ``layer_types``.

    ``sliding_window_pattern`` is a number, every so many layers one has none, or letters that repeat, L for a layer
    with a window; then the last layer has none.
    """
    count, pattern = config.size("num_hidden_layers"), config["sliding_window_pattern"]
    if config.window() is None or config.get("layer_types") is not None:
        return [False] * count
    if isinstance(pattern, str):
        if not pattern or not set(pattern) <= {"L", "G"}:
            raise ValueError(f"config.json: sliding_window_pattern must be of the letters L and G, got {pattern!r}")
        return [pattern[i % len(pattern)] == "L" and i < count - 1 for i in range(count)]
    every = config.size("sliding_window_pattern")
    return [(i + 1) % every != 0 for i in range(count)]


def _exaone4(config: ConfigReader) -> dict[str, Any]:
    norm, rope, block = rms_norm(config), config.rope(head_size(config)), mlp(config)
    hybrid = config.window() is not None

    def attends(window: int | None) -> AttentionSpec:
        return attention(config, window=window, rope=None if hybrid and window is None else rope, qk_norm=norm)

    layers = tuple(LayerSpec(attention=attends(window), mlp=block) for window in config.windows(_sliding(config)))
    return {"norm": norm, "norm_position": "post", "layers": layers}


FAMILIES: dict[str, Family] = {
    "Exaone4ForCausalLM": Family(
        model_type="exaone4",
        axes=_exaone4,
        names=always(NAMES_OF_POST_NORMS),
        defaults={
            **COMMON,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 2048,
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "eos_token_id": 2,
        },
    ),
}

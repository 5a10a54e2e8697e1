"""Supported architectures as data: ``config.json`` -> :class:`ModelSpec`, and where each checkpoint tensor goes.

Field names and defaults are those of Hugging Face's configuration files, of transformers 4 (``rope_theta``,
``rope_scaling``, ``torch_dtype``) and of transformers 5 (``rope_parameters``, ``dtype``). A field that would change
the computation in a way the decoder does not know is an error: a wrong model that runs is worse than none.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tritonllm.models.spec import ModelSpec, RopeSpec

Config = Mapping[str, Any]

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}

# Fields that other architectures compute with, and the values at which they do nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "partial_rotary_factor": (None, 1, 1.0),
    "use_mrope": (None, False),
    "alibi": (None, False),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "clip_qkv": (None,),
    "logit_scale": (None, 1, 1.0),
    "embedding_multiplier": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
}


@dataclass(frozen=True)
class Family:
    """One architecture.

    Attributes:
        model_type: its name in configurations that give no ``architectures``.
        defaults: fields that configuration files may leave out.
        axes: what this architecture adds to the common fields of :class:`ModelSpec`.
    """

    model_type: str
    defaults: Config
    axes: Callable[[Config], dict[str, Any]]


def _llama(config: Config) -> dict[str, Any]:
    bias = bool(config["attention_bias"])
    return {
        "qkv_bias": bias,
        "o_bias": bias,
        "mlp_bias": bool(config["mlp_bias"]),
        "sliding_window": (None,) * config["num_hidden_layers"],
    }


def _mistral(config: Config) -> dict[str, Any]:
    return {"sliding_window": (_window(config),) * config["num_hidden_layers"]}


def _qwen2(config: Config) -> dict[str, Any]:
    return {"qkv_bias": True, "sliding_window": _qwen_windows(config)}


def _qwen3(config: Config) -> dict[str, Any]:
    bias = bool(config["attention_bias"])
    return {"qkv_bias": bias, "o_bias": bias, "qk_norm": True, "sliding_window": _qwen_windows(config)}


_COMMON: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "head_dim": None,
    "num_key_value_heads": None,
    "eos_token_id": None,
}
_LLAMA: dict[str, Any] = {**_COMMON, "max_position_embeddings": 2048, "eos_token_id": 2}
_MISTRAL: dict[str, Any] = {
    **_COMMON,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "eos_token_id": 2,
    "sliding_window": 4096,
}
_QWEN: dict[str, Any] = {
    **_COMMON,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", _LLAMA, _llama),
    "MistralForCausalLM": Family("mistral", _MISTRAL, _mistral),
    "Qwen2ForCausalLM": Family("qwen2", _QWEN, _qwen2),
    "Qwen3ForCausalLM": Family("qwen3", {**_QWEN, "head_dim": 128}, _qwen3),
}


def spec_from_config(config: Config) -> ModelSpec:
    """Read the contents of a ``config.json``.

    Raises:
        ValueError: an architecture that is not supported, a field missing or with a bad value, or a field that would
            change the computation in a way the decoder does not know.
    """
    architecture = _architecture(config)
    family = FAMILIES[architecture]
    config = {**family.defaults, **config}
    for name, neutral in _NEUTRAL.items():
        if config.get(name) not in neutral:
            raise ValueError(f"{architecture} with {name}={config[name]!r} is not supported")
    num_heads = _size(config, "num_attention_heads")
    hidden_size = _size(config, "hidden_size")
    num_layers = _size(config, "num_hidden_layers")
    head_size = hidden_size // num_heads if config["head_dim"] is None else _size(config, "head_dim")
    rope, max_positions = _rope(config, head_size)
    return ModelSpec(
        architecture=architecture,
        vocab_size=_size(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_size(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads if config["num_key_value_heads"] is None else _size(config, "num_key_value_heads"),
        head_size=head_size,
        max_position_embeddings=max_positions,
        norm_eps=_epsilon(config, "rms_norm_eps"),
        rope=rope,
        activation=_choice(config, "hidden_act", _ACTIVATIONS),
        tie_word_embeddings=bool(config["tie_word_embeddings"]),
        eos_token_ids=_token_ids(config, "eos_token_id"),
        dtype=_dtype(config),
        **family.axes(config),
    )


def _architecture(config: Config) -> str:
    named = config.get("architectures") or [
        name for name, family in FAMILIES.items() if family.model_type == config.get("model_type")
    ]
    for name in named:
        if name in FAMILIES:
            return name
    what = ", ".join(named) or config.get("model_type")
    raise ValueError(f"architecture {what} is not supported; supported: {', '.join(sorted(FAMILIES))}")


def _size(config: Config, name: str, low: int = 1) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ValueError(f"config.json: {name} must be an integer of at least {low}, got {value!r}")
    return value


def _epsilon(config: Config, name: str) -> float:
    value = config[name]
    if not isinstance(value, int | float) or not 0.0 <= value < 1.0:
        raise ValueError(f"config.json: {name} must be a number in [0, 1), got {value!r}")
    return float(value)


def _choice(config: Config, name: str, choices: Mapping[str, Any]) -> Any:
    value = config[name]
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"config.json: {name} must be one of {', '.join(choices)}, got {value!r}")
    return choices[value]


def _dtype(config: Config) -> torch.dtype:
    name = "dtype" if config.get("dtype") is not None else "torch_dtype"
    if config.get(name) is None:
        return torch.float32
    return _choice(config, name, _DTYPES)


def _token_ids(config: Config, name: str) -> tuple[int, ...]:
    value = config[name]
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) for i in ids):
        raise ValueError(f"config.json: {name} must be a token id or a list of them, got {value!r}")
    return tuple(ids)


def _window(config: Config) -> int | None:
    return None if config["sliding_window"] is None else _size(config, "sliding_window")


def _qwen_windows(config: Config) -> tuple[int | None, ...]:
    num_layers = config["num_hidden_layers"]
    window = _window(config) if config["use_sliding_window"] else None
    kinds = config["layer_types"]
    if kinds is None:
        first = _size(config, "max_window_layers", low=0)
        return tuple(window if i >= first else None for i in range(num_layers))
    if len(kinds) != num_layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"config.json: layer_types must be full_attention or sliding_attention for each of {num_layers} layers, "
            f"got {kinds}"
        )
    if window is None and "sliding_attention" in kinds:
        raise ValueError(
            "config.json: layer_types has sliding_attention, but use_sliding_window or sliding_window is off"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope(config: Config, head_size: int) -> tuple[RopeSpec, int]:
    """The rotation, and the most positions it is meant for."""
    length = _size(config, "max_position_embeddings")
    field = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    scaling = {key: value for key, value in (config.get(field) or {}).items() if value is not None}
    base = float(scaling.pop("rope_theta", None) or config.get("rope_theta") or 10000.0)
    if scaling.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"config.json: {field} with partial_rotary_factor is not supported, got {config[field]}")
    if config.get("original_max_position_embeddings"):
        scaling["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    rope = RopeSpec(base=base, rotary_dim=head_size, trained_length=length, scaling=scaling)
    try:
        rope.table(1)
    except ValueError as error:
        raise ValueError(f"config.json: {field}: {error}, got {config.get(field)}") from error
    if "yarn" in (scaling.get("rope_type"), scaling.get("type")):
        # some files keep the trained length in max_position_embeddings, some have the extended one there
        trained = scaling.get("original_max_position_embeddings", length)
        length = max(length, int(scaling.get("factor", 1.0) * trained))
    return rope, length


@dataclass(frozen=True)
class Slot:
    """Where a checkpoint tensor goes: rows of a decoder parameter, beginning with ``start``."""

    parameter: str
    start: int
    shape: tuple[int, ...]


def weight_map(spec: ModelSpec) -> dict[str, Slot]:
    """Checkpoint tensor name -> :class:`Slot`, for every tensor that a checkpoint of ``spec`` must have."""
    hidden, inner, head = spec.hidden_size, spec.intermediate_size, spec.head_size
    q, kv = spec.num_heads * head, spec.num_kv_heads * head
    slots = {
        "model.embed_tokens.weight": Slot("embed.weight", 0, (spec.vocab_size, hidden)),
        "model.norm.weight": Slot("norm.weight", 0, (hidden,)),
    }
    if not spec.tie_word_embeddings:
        slots["lm_head.weight"] = Slot("lm_head.weight", 0, (spec.vocab_size, hidden))

    def linear(theirs: str, ours: str, start: int, rows: int, columns: int, bias: bool) -> None:
        slots[f"{theirs}.weight"] = Slot(f"{ours}.weight", start, (rows, columns))
        if bias:
            slots[f"{theirs}.bias"] = Slot(f"{ours}.bias", start, (rows,))

    for i in range(spec.num_layers):
        theirs, ours = f"model.layers.{i}", f"layers.{i}"
        slots[f"{theirs}.input_layernorm.weight"] = Slot(f"{ours}.attention_norm.weight", 0, (hidden,))
        slots[f"{theirs}.post_attention_layernorm.weight"] = Slot(f"{ours}.mlp_norm.weight", 0, (hidden,))
        for name, start, rows in (("q", 0, q), ("k", q, kv), ("v", q + kv, kv)):
            linear(f"{theirs}.self_attn.{name}_proj", f"{ours}.attention.qkv", start, rows, hidden, spec.qkv_bias)
        linear(f"{theirs}.self_attn.o_proj", f"{ours}.attention.o", 0, hidden, q, spec.o_bias)
        if spec.qk_norm:
            for name in ("q_norm", "k_norm"):
                slots[f"{theirs}.self_attn.{name}.weight"] = Slot(f"{ours}.attention.{name}.weight", 0, (head,))
        linear(f"{theirs}.mlp.gate_proj", f"{ours}.mlp.gate_up", 0, inner, hidden, spec.mlp_bias)
        linear(f"{theirs}.mlp.up_proj", f"{ours}.mlp.gate_up", inner, inner, hidden, spec.mlp_bias)
        linear(f"{theirs}.mlp.down_proj", f"{ours}.mlp.down", 0, hidden, inner, spec.mlp_bias)
    return slots

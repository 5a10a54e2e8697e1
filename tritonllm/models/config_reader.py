"""Checked access to the fields of a ``config.json``: every bad value is an error that names the field."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tritonllm.layers.rope import RopeSpec

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
}

_LAYER_KINDS = {"full_attention", "sliding_attention"}


class ConfigReader(Mapping[str, Any]):
    """A configuration with defaults for the fields it leaves out.

    Args:
        config: contents of ``config.json``.
        defaults: values of fields that may be missing.
        renames: this architecture's name of a field -> the usual one.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        defaults: Mapping[str, Any] | None = None,
        renames: Mapping[str, str] | None = None,
    ) -> None:
        self._names = {ours: theirs for theirs, ours in (renames or {}).items() if theirs in config}
        renamed = {ours: config[theirs] for ours, theirs in self._names.items()}
        self._fields = {**(defaults or {}), **config, **renamed}

    def __getitem__(self, name: str) -> Any:
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def _bad(self, name: str, what: str) -> ValueError:
        return ValueError(f"config.json: {self._names.get(name, name)} must be {what}, got {self.get(name)!r}")

    def size(self, name: str, low: int = 1) -> int:
        """An integer of at least ``low``."""
        value = self.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise self._bad(name, f"an integer of at least {low}")
        return value

    def size_or(self, name: str, default: int) -> int:
        """A size that ``null`` or absence leaves to ``default``."""
        return default if self.get(name) is None else self.size(name)

    def size_of_layers(self, name: str, default: int | None = None) -> list[int]:
        """A size for each layer: a list of them, or one for all. ``null`` or absence leaves it to ``default``."""
        value, count = self.get(name), self.size("num_hidden_layers")
        value = default if value is None else value
        values: list[Any] = value if isinstance(value, list) else [value] * count
        if len(values) < count or not all(isinstance(v, int) and not isinstance(v, bool) and v > 0 for v in values):
            raise self._bad(name, f"an integer of at least 1, or a list of one for each of {count} layers")
        return values[:count]

    def number(self, name: str, *, positive: bool = True) -> float:
        """A finite number, above zero unless ``positive`` is off."""
        value = self.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < float("inf"):
            raise self._bad(name, "a number")
        if positive and value <= 0:
            raise self._bad(name, "a number above 0")
        return float(value)

    def cap(self, name: str) -> float:
        """A soft cap: ``null`` is none, 0 here."""
        return 0.0 if self.get(name) is None else self.number(name)

    def epsilon(self, name: str) -> float:
        """A number in [0, 1)."""
        value = self.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0.0 <= value < 1.0:
            raise self._bad(name, "a number in [0, 1)")
        return float(value)

    def number_or_none(self, name: str) -> float | None:
        """A number above zero, or ``None`` where the file has ``null`` or nothing."""
        return None if self.get(name) is None else self.number(name)

    def nested(self, name: str, defaults: Mapping[str, Any] | None = None) -> "ConfigReader":
        """The fields of an object in this one; ``null`` or absence leaves all of them to ``defaults``."""
        given = self.get(name) or {}
        if not isinstance(given, Mapping):
            raise self._bad(name, "an object")
        return ConfigReader(given, defaults)

    def flag(self, name: str) -> bool:
        """``true`` or ``false``; ``null`` is false."""
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise self._bad(name, "true or false")
        return bool(value)

    def activation(self, name: str = "hidden_act") -> str:
        """Our name of an activation."""
        value = self.get(name)
        if not isinstance(value, str) or value not in _ACTIVATIONS:
            raise self._bad(name, f"one of {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[value]

    def dtype(self) -> torch.dtype:
        """The dtype of the checkpoint: float32 if the file does not say."""
        name = "dtype" if self.get("dtype") is not None else "torch_dtype"
        value = self.get(name)
        if value is None:
            return torch.float32
        if not isinstance(value, str) or value not in _DTYPES:
            raise self._bad(name, f"one of {', '.join(_DTYPES)}")
        return _DTYPES[value]

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One token id, several or none."""
        value = self.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise self._bad(name, "a token id or a list of them")
        return tuple(ids)

    def window(self) -> int | None:
        """``sliding_window``, or ``None`` without one."""
        return None if self.get("sliding_window") is None else self.size("sliding_window")

    def layer_flags(self, name: str) -> list[bool]:
        """A list with a 0 or 1 for each layer, as a list of whether it is 1."""
        value, count = self.get(name), self.size("num_hidden_layers")
        if not isinstance(value, list) or len(value) < count or not set(value) <= {0, 1}:
            raise self._bad(name, f"a list of 0 or 1 for each of {count} layers")
        return [bool(flag) for flag in value[:count]]

    def windows(self, sliding: list[bool]) -> tuple[int | None, ...]:
        """The window of each layer: by ``layer_types``, or ``sliding`` where the file has none."""
        kinds, count = self.get("layer_types"), self.size("num_hidden_layers")
        if kinds is not None:
            if not isinstance(kinds, list) or len(kinds) != count or not set(kinds) <= _LAYER_KINDS:
                raise self._bad("layer_types", f"full_attention or sliding_attention for each of {count} layers")
            sliding = [kind == "sliding_attention" for kind in kinds]
        window = self.window()
        if window is None and kinds is not None and any(sliding):
            raise ValueError("config.json: layer_types has sliding_attention, but sliding_window or its use is off")
        return tuple(window if slides else None for slides in sliding)

    def rope(self, head_size: int, *, kind: str | None = None, interleaved: bool = False) -> RopeSpec:
        """The rotation of heads of ``head_size``.

        Reads ``rope_theta``, ``rope_scaling`` and ``partial_rotary_factor`` (transformers 4) or ``rope_parameters``
        (transformers 5), which may hold one set for each ``kind`` of layer.
        """
        field = "rope_parameters" if self.get("rope_parameters") else "rope_scaling"
        given = self.get(field) or {}
        if not isinstance(given, Mapping):
            raise self._bad(field, "an object")
        if kind is not None and kind in given:
            given = given[kind] or {}
        scaling = {key: value for key, value in given.items() if value is not None}
        if "type" in scaling:  # the older name
            scaling.setdefault("rope_type", scaling.pop("type"))
        if scaling.get("rope_type") == "default":
            scaling.pop("rope_type")
        base = scaling.pop("rope_theta", None) or self.get("rope_theta") or 10000.0
        part = scaling.pop("partial_rotary_factor", None) or self.get("partial_rotary_factor") or 1.0
        for name, value in (("rope_theta", base), ("partial_rotary_factor", part)):
            if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
                raise ValueError(f"config.json: {name} must be a number above 0, got {value!r}")
        if self.get("original_max_position_embeddings") and "rope_type" in scaling:
            scaling.setdefault("original_max_position_embeddings", self["original_max_position_embeddings"])
        if scaling.get("rope_type") == "proportional":  # then the table says which part stands still
            scaling["partial_rotary_factor"], part = part, 1.0
        rope = RopeSpec(
            base=float(base),
            rotary_dim=int(head_size * part),
            trained_length=self.size("max_position_embeddings"),
            scaling=scaling,
            interleaved=interleaved,
        )
        try:
            rope.table(1)
        except ValueError as error:
            raise ValueError(f"config.json: {field}: {error}, got {self.get(field)}") from error
        return rope

    def longest(self, rope: RopeSpec | None) -> int:
        """The most positions that a model with this rotation is meant for."""
        length = self.size("max_position_embeddings")
        if rope is None or rope.scaling.get("rope_type") != "yarn":
            return length
        # some files keep the trained length in max_position_embeddings, some have the extended one there
        trained = rope.scaling.get("original_max_position_embeddings", length)
        return max(length, int(rope.scaling.get("factor", 1.0) * trained))

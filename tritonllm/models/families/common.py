"""Pieces that the families share: from checked config fields to parts of a :class:`ModelSpec`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tritonllm.layers.attention import AttentionSpec, check_head_size
from tritonllm.layers.mlp import MLPSpec
from tritonllm.layers.moe import MoESpec
from tritonllm.layers.norm import NormSpec
from tritonllm.layers.rope import RopeSpec
from tritonllm.models.config_reader import ConfigReader
from tritonllm.models.families.heads import FamilyHead
from tritonllm.models.spec import LayerSpec, ModelSpec
from tritonllm.models.weight_names import WeightNames


@dataclass(frozen=True, kw_only=True)
class Family:
    """How an architecture's configuration and weights are read.

    Attributes:
        model_type: the architecture's name in configurations that give no ``architectures``.
        axes: from the configuration, the fields of :class:`ModelSpec` that this architecture decides: ``norm`` and
            ``layers`` at least.
        names: what checkpoints call the weights; may depend on the spec.
        in_memory: what transformers' model calls them in memory, and so a trainer, where that differs.
        defaults: values of fields that configuration files may leave out.
        renames: this architecture's name of a field -> the usual one.
        reads: fields that other architectures do not know and that ``axes`` computes with.
        aliases: other names in ``architectures``.
        written_as: its name in ``architectures`` of files that transformers 5 writes, where that is another family's;
            ``model_type`` tells them apart.
        extra_layers: how many layers beyond the model's own may be in the files at most: they draft tokens for it.
        extra_names: beginnings of the names of other tensors that are not part of the model, for the same reason.
        is_extra: whether another tensor, by its name, is not part of this model.
        heads: architectures that have something else for the output projection; beside those of ``BY_SUFFIX`` in
            :mod:`~tritonllm.models.families.heads`.
    """

    model_type: str
    axes: Callable[[ConfigReader], dict[str, Any]]
    names: Callable[[ModelSpec], WeightNames]
    in_memory: Callable[[ModelSpec], WeightNames] | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    renames: Mapping[str, str] = field(default_factory=dict)
    reads: frozenset[str] = frozenset()
    aliases: tuple[str, ...] = ()
    written_as: str = ""
    extra_layers: int = 0
    extra_names: tuple[str, ...] = ()
    is_extra: Callable[[ModelSpec, str], bool] = lambda spec, name: False
    heads: Mapping[str, FamilyHead] = field(default_factory=dict)


# What transformers' memory has of a model with experts: tensors of all of them.
STACKED = WeightNames(expert_up=())


def always(names: WeightNames) -> Callable[[ModelSpec], WeightNames]:
    """Names that do not depend on the spec."""
    return lambda spec: names


def check_fixed(config: ConfigReader, **values: tuple[Any, ...]) -> None:
    """Check that fields that are there, and not null, have one of the values that a family computes.

    Raises:
        ValueError: one has another; the message names it.
    """
    for name, known in values.items():
        value = config.get(name)
        if value is not None and value not in known:
            raise ValueError(
                f"config.json: {name} other than {' or '.join(map(repr, known))} is not supported, got {value!r}"
            )


def rms_norm(config: ConfigReader, *, weight_offset: float = 0.0) -> NormSpec:
    return NormSpec(kind="rms", eps=config.epsilon("rms_norm_eps"), weight_offset=weight_offset)


def layer_norm(config: ConfigReader, *, weight: bool = True, bias: bool = True) -> NormSpec:
    return NormSpec(kind="layer", eps=config.epsilon("layer_norm_eps"), weight=weight, bias=bias)


def head_size(config: ConfigReader) -> int:
    """Elements of a head: ``head_dim``, or what the hidden size leaves to each.

    Raises:
        ValueError: a bad field, or heads of a size that no kernel knows.
    """
    heads = config.size("num_attention_heads")
    size = config.size_or("head_dim", config.size("hidden_size") // heads)
    try:
        check_head_size(size)
    except ValueError as error:
        raise ValueError(f"config.json: head_dim, or else hidden_size / num_attention_heads: {error}") from error
    return size


def attention(config: ConfigReader, *, num_kv_heads: int | None = None, **axes: Any) -> AttentionSpec:
    """An :class:`AttentionSpec` with the usual field names; ``num_key_value_heads`` is read unless it is given."""
    heads = config.size("num_attention_heads")
    if num_kv_heads is None:
        num_kv_heads = config.size_or("num_key_value_heads", heads)
    return AttentionSpec(num_heads=heads, num_kv_heads=num_kv_heads, head_size=head_size(config), **axes)


def full_attention(config: ConfigReader, **axes: Any) -> AttentionSpec:
    """Attention whose query heads have a key head each: for architectures from before grouped queries."""
    return attention(config, num_kv_heads=config.size("num_attention_heads"), **axes)


def mlp(config: ConfigReader, *, gated: bool = True, bias: bool = False) -> MLPSpec:
    """An :class:`MLPSpec` with the usual field names; without a gate, four times as wide as the model by default."""
    inner = (
        config.size("intermediate_size") if gated else config.size_or("intermediate_size", 4 * config["hidden_size"])
    )
    return MLPSpec(intermediate_size=inner, activation=config.activation(), gated=gated, bias=bias)


def sparse_layers(config: ConfigReader) -> list[bool]:
    """Which layers have experts: by ``mlp_layer_types``, or those from ``first_k_dense_replace`` on.

    Raises:
        ValueError: a bad field.
    """
    kinds, count = config.get("mlp_layer_types"), config.size("num_hidden_layers")
    if kinds is None:
        dense = config.size("first_k_dense_replace", low=0)
        return [i >= dense for i in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count or not set(kinds) <= {"dense", "sparse"}:
        raise ValueError(
            f"config.json: mlp_layer_types must be dense or sparse for each of {count} layers, got {kinds!r}"
        )
    return [kind == "sparse" for kind in kinds]


def rotations(config: ConfigReader, windows: tuple[int | None, ...]) -> dict[int | None, RopeSpec | None]:
    """The rotation of the layers with each window.

    ``rope_parameters`` has a set for each kind of layer, or ``null`` for one that does not rotate.

    Raises:
        ValueError: a bad field, or no set for a kind of layer that there is.
    """
    given, ropes = config.get("rope_parameters"), {}
    for window in set(windows):
        kind = "full_attention" if window is None else "sliding_attention"
        if not isinstance(given, Mapping) or not isinstance(given.get(kind, ...), Mapping | None):
            raise ValueError(f"config.json: rope_parameters must have an object or null for {kind}, got {given!r}")
        ropes[window] = None if given[kind] is None else config.rope(head_size(config), kind=kind)
    return ropes


def same_layers(config: ConfigReader, attention: AttentionSpec, mlp: MLPSpec | MoESpec) -> tuple[LayerSpec, ...]:
    """Layers that do not differ."""
    return (LayerSpec(attention=attention, mlp=mlp),) * config.size("num_hidden_layers")


def windowed_layers(
    config: ConfigReader, windows: tuple[int | None, ...], mlp: MLPSpec | MoESpec, **axes: Any
) -> tuple[LayerSpec, ...]:
    """Layers that differ in their window."""
    kinds = {window: LayerSpec(attention=attention(config, window=window, **axes), mlp=mlp) for window in set(windows)}
    return tuple(kinds[window] for window in windows)

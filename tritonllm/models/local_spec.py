"""The model as one of several ranks computes it: fewer heads, narrower MLPs, some of the experts; and whether it can be
cut for so many. Which part of each parameter a rank has then, :mod:`tritonllm.models.shards` says.
"""

import dataclasses
from typing import Any

from tritonllm.experts.placement import ExpertPlacement
from tritonllm.layers.mlp import MLPSpec
from tritonllm.layers.moe import MoESpec
from tritonllm.models.shards import Section
from tritonllm.models.spec import LayerSpec, ModelSpec


def check(spec: ModelSpec, size: int) -> None:
    """Check that a model can be cut for so many ranks.

    Raises:
        ValueError: the model cannot be cut for so many ranks; says which of its sizes does not divide.
    """
    for place, layer in enumerate(spec.layers):
        wrong = _uneven(layer, size)
        if wrong is not None:
            fit = [n for n in range(1, 65) if all(_uneven(other, n) is None for other in spec.layers)]
            raise ValueError(
                f"tensor_parallel_size={size} must divide {wrong} in layer {place}; this model can have "
                f"{', '.join(map(str, fit))}"
            )


def check_context(spec: ModelSpec, size: int, context: int) -> None:
    """Whether ``context`` of the ``size`` ranks can split the keys of each sequence (``decode_context_parallel_size``).

    Raises:
        ValueError: they do not share key heads, or a layer's attention asks for a key's place in the sequence.
    """
    if context == 1:
        return
    name = f"decode_context_parallel_size={context}"
    for place, layer in enumerate(spec.layers):
        attention = layer.attention
        copies = max(1, size // attention.num_kv_heads)
        if copies % context:
            raise ValueError(
                f"{name} must divide the number of ranks that share a key head, which is {copies} in layer {place} "
                f"(tensor_parallel_size={size}, {attention.num_kv_heads} key/value heads): lower it, or raise "
                "tensor_parallel_size"
            )
        lacks = {
            "tokens that see those behind them": not attention.causal,
            "a sliding window": attention.window is not None,
            "chunks, of which a token sees its own (attention_chunk_size)": attention.attention_chunk is not None,
            "ALiBi": attention.alibi_slopes is not None,
            "attention sinks": attention.sinks,
        }
        lacking = next((what for what, there in lacks.items() if there), None)
        if lacking is not None:
            raise ValueError(f"{name}: layer {place} has {lacking}, which split keys cannot do yet: leave it out")


def by_expert(spec: ModelSpec, placement: ExpertPlacement | None = None) -> ModelSpec:
    """A copy of a model's description whose experts are dealt out whole (``enable_expert_parallel``).

    Args:
        placement: which rank has which experts, for this model; ``None``: in their order, without copies.

    Raises:
        ValueError: the model has no experts.
    """
    if not spec.experts:
        raise ValueError(f"enable_expert_parallel: {spec.architecture} has no experts: leave it out")
    layers, turns = list(spec.layers), 1 if placement is None else placement.turns
    for place, layer in enumerate(layers):
        if isinstance(layer.mlp, MoESpec):
            slots = None if placement is None else placement.layers[place]
            mlp = dataclasses.replace(layer.mlp, by_expert=True, slots=slots, turns=turns)
            layers[place] = dataclasses.replace(layer, mlp=mlp)
    return dataclasses.replace(spec, layers=tuple(layers))


def _uneven(layer: LayerSpec, size: int) -> str | None:
    """What of a layer cannot be dealt out to so many ranks."""
    attention, mlp = layer.attention, layer.mlp
    dealt_out = isinstance(mlp, MoESpec) and mlp.by_expert
    if isinstance(mlp, MoESpec) and dealt_out and mlp.num_slots % size:
        return f"the number of experts, which is {mlp.num_slots}"
    widths = [] if dealt_out else [mlp.intermediate_size]
    if isinstance(mlp, MoESpec) and mlp.shared is not None:
        widths.append(mlp.shared.intermediate_size)
    if attention.num_heads % size:
        return f"the number of attention heads, which is {attention.num_heads}"
    kv_heads = attention.num_kv_heads
    if kv_heads % size and size % kv_heads:
        return f"the number of key/value heads (or be a multiple of it), which is {kv_heads}"
    return next((f"the intermediate size, which is {width}" for width in widths if width % size), None)


def local_spec(spec: ModelSpec, rank: int, size: int) -> ModelSpec:
    """The model as one rank computes it: fewer heads and narrower MLPs, the same vocabulary.

    Raises:
        ValueError: as :func:`check`.
    """
    if size == 1:
        return spec
    check(spec, size)
    return dataclasses.replace(spec, layers=tuple(_local_layer(layer, rank, size) for layer in spec.layers))


def _local_layer(layer: LayerSpec, rank: int, size: int) -> LayerSpec:
    attention, mlp = layer.attention, layer.mlp
    mine = Section(attention.num_heads).of(rank, size)
    slopes = attention.alibi_slopes
    attention = dataclasses.replace(
        attention,
        num_heads=len(mine),
        num_kv_heads=len(Section(attention.num_kv_heads).of(rank, size)),
        alibi_slopes=None if slopes is None else slopes[mine.start : mine.stop],
    )
    if isinstance(mlp, MLPSpec):
        return dataclasses.replace(layer, attention=attention, mlp=_narrow(mlp, size))
    shared = None if mlp.shared is None else _narrow(mlp.shared, size)
    if mlp.by_expert:
        part: dict[str, Any] = {"held": Section(mlp.num_slots).of(rank, size)}
    else:
        part = {"intermediate_size": mlp.intermediate_size // size}
    return dataclasses.replace(layer, attention=attention, mlp=dataclasses.replace(mlp, shared=shared, **part))


def _narrow(mlp: MLPSpec, size: int) -> MLPSpec:
    return dataclasses.replace(mlp, intermediate_size=mlp.intermediate_size // size)


def local_experts(spec: ModelSpec, rank: int, size: int) -> ModelSpec:
    """The model as one of ``size`` engines computes it that share its experts (``data_parallel_size`` with
    ``enable_expert_parallel``): all of it, but of the experts its own.

    Raises:
        ValueError: there are none, or they cannot be dealt out evenly.
    """
    if size == 1:
        return spec
    name, experts = f"data_parallel_size={size} with enable_expert_parallel", spec.experts
    if not experts:
        raise ValueError(f"{name}: {spec.architecture} has no experts to share: leave enable_expert_parallel out")
    for place, count in experts.items():
        if count % size:
            fit = [n for n in range(1, 65) if not any(other % n for other in experts.values())]
            raise ValueError(
                f"{name}: data_parallel_size must divide the number of experts, which is {count} in layer {place}; "
                f"this model can have {', '.join(map(str, fit))}"
            )
    layers = list(spec.layers)
    for place, layer in enumerate(layers):
        if isinstance(layer.mlp, MoESpec):
            assert layer.mlp.slots is None  # the configuration refuses a placement
            held = Section(layer.mlp.num_experts).of(rank, size)
            layers[place] = dataclasses.replace(layer, mlp=dataclasses.replace(layer.mlp, held=held, exchanged=True))
    return dataclasses.replace(spec, layers=tuple(layers))

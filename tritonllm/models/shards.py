"""Tensor parallelism as data: which part of each parameter a rank has, and which part of a checkpoint tensor fills it.

It is said once, of the decoder's own parameters, so it holds for every family and every spelling of a checkpoint:

- **columns**: the projections to queries, keys and values, and to gate and up, are cut by heads and by intermediate
  columns. Each part of a stacked projection (queries, keys, values; gate, up) is cut by itself.
- **rows**: the projections back (``o``, ``down``) are cut along their input, so a rank computes an addend of the
  result. Their biases are rank 0's alone.
- **heads with replication**: with more ranks than key heads, the ranks that share one each have a copy of it.
- **experts**: each rank has a part of the intermediate columns of all of them; or, by
  :func:`~tritonllm.models.local_spec.by_expert`, equally many whole experts (Lepikhin et al., "GShard", 2020), some of
  them perhaps as copies (:mod:`tritonllm.experts.placement`). Either way a rank routes every token and computes an
  addend.
- **shared experts**: engines that have requests of their own share nothing but the experts
  (:func:`~tritonllm.models.local_spec.local_experts`): each has equally many whole ones, and all else whole.
- **vocabulary**: the output projection is cut by rows. The embedding table is whole everywhere: a lookup then needs no
  sum over the ranks and stays exact, for a table's share of memory (1 GB of Llama-3.1-8B's 16). A table that is also
  the output projection is whole, too, and each rank multiplies by its rows of it.

The rest (norms, routers, positions) is whole on every rank. After Shoeybi et al., "Megatron-LM" (2019).
"""

import dataclasses
from dataclasses import dataclass

import torch

from tritonllm.dist.group import share_of
from tritonllm.layers.mlp import MLPSpec
from tritonllm.layers.moe import MoESpec
from tritonllm.models.slots import Slot
from tritonllm.models.spec import LayerSpec, ModelSpec

_EXPERTS = ("mlp.gate_up", "mlp.gate_up_bias", "mlp.down", "mlp.down_bias")  # parameters with a part of each expert


@dataclass(frozen=True)
class Section:
    """A part of a dimension that is dealt out: ``units`` of ``size`` elements.

    Attributes:
        uneven: the first ranks have as many as :func:`share_of` says, and the last ones the rest. Otherwise all have
            equally many, or, of fewer units than ranks, neighbouring ranks have the same one.
    """

    units: int
    size: int = 1
    uneven: bool = False

    def of(self, rank: int, size: int) -> range:
        """The elements of a rank."""
        if self.uneven:
            each = share_of(self.units, size)
            first, last = min(rank * each, self.units), min((rank + 1) * each, self.units)
        elif self.units >= size:
            assert self.units % size == 0  # `local_spec.check` has said so
            each = self.units // size
            first, last = rank * each, (rank + 1) * each
        else:
            assert size % self.units == 0
            first = rank // (size // self.units)
            last = first + 1
        return range(first * self.size, last * self.size)


@dataclass(frozen=True)
class Split:
    """How one parameter is cut.

    Attributes:
        axis: the dimension along which the parameter is cut.
        sections: the sections that this dimension consists of, one after the other.
        elements: the element in each place of the one section; it may be in several. ``None``: each is in its own.
    """

    axis: int
    sections: tuple[Section, ...]
    elements: tuple[int, ...] | None = None

    def held(self, rank: int, size: int) -> list[range]:
        """The elements of a rank along ``axis``, in the order in which it has them."""
        if self.elements is not None:
            (section,) = self.sections
            return [range(self.elements[place], self.elements[place] + 1) for place in section.of(rank, size)]
        held, begin = [], 0
        for section in self.sections:
            mine = section.of(rank, size)
            held.append(range(begin + mine.start, begin + mine.stop))
            begin += section.units * section.size
        return held


class Once:
    """A parameter that rank 0 has and that is zero elsewhere: it is added once to a sum over the ranks."""


@dataclass(frozen=True)
class Cut:
    """A part of a checkpoint tensor, and its place.

    Attributes:
        slot: where it goes in the rank's parameter.
        part: dimension of the checkpoint tensor, first and last (exclusive) element; ``None``: it is taken whole.
    """

    slot: Slot
    part: tuple[int, int, int] | None = None

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part, as a view."""
        if self.part is None:
            return tensor
        axis, begin, end = self.part
        return tensor.narrow(axis, begin, end - begin)


def splits(spec: ModelSpec) -> dict[str, Split | Once]:
    """The shard spec: parameter name -> how it is cut. Parameters that are not there are whole everywhere."""
    found: dict[str, Split | Once] = {}
    if spec.logits and not spec.tie_word_embeddings:
        found["lm_head.weight"] = Split(0, (Section(spec.vocab_size, uneven=True),))
    for place, layer in enumerate(spec.layers):
        found |= {f"layers.{place}.{name}": split for name, split in _of_layer(layer).items()}
    return found


def expert_splits(spec: ModelSpec) -> dict[str, Split | Once]:
    """As :func:`splits`, where only the experts are dealt out (:func:`~tritonllm.models.local_spec.local_experts`)."""
    return {
        f"layers.{place}.{name}": split
        for place, layer in enumerate(spec.layers)
        if isinstance(layer.mlp, MoESpec)
        for name, split in _whole_experts(layer.mlp).items()
    }


def _of_layer(layer: LayerSpec) -> dict[str, Split | Once]:
    attention, mlp = layer.attention, layer.mlp
    size, given = attention.head_size, attention.output_size
    stacked = Split(0, tuple(Section(*projected) for projected in attention.projections))
    found: dict[str, Split | Once] = {
        "attention.qkv.weight": stacked,
        "attention.qkv.bias": stacked,
        "attention.o.weight": Split(1, (Section(attention.num_heads, given),)),
        "attention.o.bias": Once(),
        "attention.gate.weight": Split(0, (Section(attention.num_heads, given // attention.gate_size),)),
        "attention.sinks": Split(0, (Section(attention.num_heads),)),
        "attention.key_bias.of_values.weight": Split(1, (Section(attention.num_kv_heads, size),)),
        "attention.key_bias.strength": Split(0, (Section(attention.num_kv_heads),)),
        "attention.key_bias.shift": Split(0, (Section(attention.num_kv_heads),)),
    }
    if attention.qk_norm_over != "head":  # weights of each head
        unit = size if attention.qk_norm_over == "all" else 1
        for name, heads in (("q_norm", attention.num_heads), ("k_norm", attention.num_kv_heads)):
            found |= {f"attention.{name}.{kind}": Split(0, (Section(heads, unit),)) for kind in ("weight", "bias")}
    if isinstance(mlp, MLPSpec):
        return found | _of_mlp(mlp, "mlp")
    inner = Section(mlp.intermediate_size)
    if mlp.by_expert:
        found |= _whole_experts(mlp)
    else:
        stacked = Split(1, (inner, inner))
        found |= dict(zip(_EXPERTS, (stacked, stacked, Split(2, (inner,)), Once()), strict=True))
    return found if mlp.shared is None else found | _of_mlp(mlp.shared, "mlp.shared")


def _whole_experts(mlp: MoESpec) -> dict[str, Split | Once]:
    return dict.fromkeys(_EXPERTS, Split(0, (Section(mlp.num_slots),), mlp.slots))


def _of_mlp(mlp: MLPSpec, name: str) -> dict[str, Split | Once]:
    inner = Section(mlp.intermediate_size)
    up = Split(0, (inner, inner) if mlp.gated else (inner,))
    return {
        f"{name}.up.weight": up,
        f"{name}.up.bias": up,
        f"{name}.down.weight": Split(1, (inner,)),
        f"{name}.down.bias": Once(),
    }


def local_shape(shape: tuple[int, ...], split: Split | Once | None, rank: int, size: int) -> tuple[int, ...]:
    """A rank's part of a parameter of this shape."""
    if not isinstance(split, Split):
        return shape
    mine = sum(map(len, split.held(rank, size)))
    return (*shape[: split.axis], mine, *shape[split.axis + 1 :])


def keep_part(parameter: torch.Tensor, whole: torch.Tensor, split: Split | Once, rank: int, size: int) -> None:
    """Overwrite a rank's ``parameter`` with its part of the whole one, which may have another dtype and device."""
    if isinstance(split, Split):
        at = 0
        for mine in split.held(rank, size):
            parameter.narrow(split.axis, at, len(mine)).copy_(whole.narrow(split.axis, mine.start, len(mine)))
            at += len(mine)
    elif rank == 0:
        parameter.copy_(whole)
    else:
        parameter.zero_()


def cuts(slot: Slot, split: Split | Once | None, rank: int, size: int) -> list[Cut]:
    """What a rank reads of the tensor that fills ``slot`` of a whole parameter."""
    if size == 1 or split is None:
        return [Cut(slot)]
    if isinstance(split, Once):
        return [Cut(slot)] if rank == 0 else []
    if slot.flat_experts:
        return _of_flat_experts(slot, split, rank, size)
    held = split.held(rank, size)
    axis = split.axis - (slot.expert is not None)  # of the tensor, in our orientation
    if axis < 0:  # a tensor of one head: which of them are here?
        assert slot.expert is not None
        return [Cut(dataclasses.replace(slot, expert=to)) for _, to, _ in _runs([(0, slot.expert, 1)], held)]
    extent, last = slot.own_shape[axis], len(slot.own_shape) - 1
    there = {last: last - 1, last - 1: last}.get(axis, axis) if slot.transposed else axis  # in the checkpoint's
    if split.elements is not None:  # a tensor of all experts, of which some are here, in an order of their own
        return [Cut(_of_one(slot, to), (0, begin, begin + 1)) for begin, to, _ in _runs([(0, 0, extent)], held)]
    if axis != slot.axis:  # the slot's rows are all here, and of each the columns that this rank has
        ((begin, to, count),) = _runs([(0, 0, extent)], held)
        assert to == 0
        return [Cut(_resized(slot, there, count), (there, begin, begin + count))]
    block = extent // len(slot.order or (0,))
    blocks = [(i * block, slot.start + place * block, block) for i, place in enumerate(slot.order or (0,))]
    runs = _runs(blocks, held)
    found = _in_one_piece(slot, runs, there)
    if found is not None:
        return [found]
    return [
        Cut(dataclasses.replace(_resized(slot, there, count), start=to, order=None), (there, begin, begin + count))
        for begin, to, count in _joined(runs)
    ]


def _of_flat_experts(slot: Slot, split: Split, rank: int, size: int) -> list[Cut]:
    """Each expert is a tensor of its own, which begins at a row of this one."""
    rows, found = slot.shape[0] // slot.flat_experts, []
    for expert in range(slot.flat_experts):
        first = expert * rows
        for cut in cuts(slot.of_expert(expert), split, rank, size):
            axis, begin, end = cut.part or (0, 0, rows)
            assert axis == 0  # an expert's rows are the columns between its two products
            found.append(Cut(cut.slot, (0, first + begin, first + end)))
    return found


def _of_one(slot: Slot, expert: int) -> Slot:
    """The place of one expert's part, cut out of a tensor that holds all of them."""
    return dataclasses.replace(slot.of_expert(expert), shape=(1, *slot.shape[1:]), is_row=True)


def _resized(slot: Slot, axis: int, count: int) -> Slot:
    return dataclasses.replace(slot, shape=(*slot.shape[:axis], count, *slot.shape[axis + 1 :]))


def _runs(blocks: list[tuple[int, int, int]], held: list[range]) -> list[tuple[int, int, int]]:
    """Where runs ``(begin, place, count)`` of a tensor go among the held elements: ``(begin, place there, count)``."""
    runs = []
    for begin, place, count in blocks:
        to = 0
        for mine in held:
            first, last = max(place, mine.start), min(place + count, mine.stop)
            if first < last:
                runs.append((begin + first - place, to + first - mine.start, last - first))
            to += len(mine)
    return runs


def _in_one_piece(slot: Slot, runs: list[tuple[int, int, int]], axis: int) -> Cut | None:
    """Blocks in another order that lie side by side in the tensor, and side by side in the parameter: one cut with an
    order of its own. (The gates and ups of GPT-OSS alternate: else each would be a cut.)"""
    if slot.order is None or not runs:
        return None
    begin, _, block = runs[0]
    places = [to // block for _, to, _ in runs]
    even = all(run == (begin + i * block, places[i] * block, block) for i, run in enumerate(runs))
    if not even or sorted(places) != list(range(len(runs))):
        return None
    resized = _resized(slot, axis, block * len(runs))
    return Cut(dataclasses.replace(resized, start=0, order=tuple(places)), (axis, begin, begin + block * len(runs)))


def _joined(runs: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Neighbours in both the tensor and the parameter are one run."""
    joined: list[tuple[int, int, int]] = []
    for begin, to, count in runs:
        if joined:
            at, place, length = joined[-1]
            if (at + length, place + length) == (begin, to):
                joined[-1] = (at, place, length + count)
                continue
        joined.append((begin, to, count))
    return joined

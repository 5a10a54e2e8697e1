"""Where a checkpoint tensor goes in the decoder, as data: one vocabulary for every layout that files use."""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

# Elements written at a time: what a change of dtype or layout needs beside the two tensors is this much, not one more
# tensor (GPT-OSS-120B has one of 4 GB).
PIECE = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Slot:
    """The place of one checkpoint tensor.

    Attributes:
        parameter: name of the decoder's parameter.
        shape: the shape of the checkpoint tensor; a number, without dimensions, is a row of the parameter.
        expert: index into the parameter's first dimension, for a tensor that holds one expert; ``None`` otherwise.
        axis: dimension of the parameter (of its expert) along which the tensor is a run of rows: 1 for tensors that
            hold all experts, else 0.
        start: first of those rows.
        transposed: the checkpoint has the last two dimensions the other way round (GPT-2's ``Conv1D``).
        either_way: a checkpoint may as well have these the other way round; of a square tensor it has not.
        is_row: the checkpoint has one dimension more, the first, of which the first row is meant.
        flat_experts: the checkpoint has so many experts one below the other, in one dimension less (DBRX); 0 for no
            such tensor.
        minus: the checkpoint has the values minus this (Nemotron's norms: minus 1). Added in the parameter's dtype.
        order: the rows are cut into ``len(order)`` equal blocks, and block ``i`` goes to place ``order[i]`` of the
            parameter, counted in blocks from ``start``; ``None`` leaves them in place. (GPT-NeoX keeps query, key and
            value of a head together.)
    """

    parameter: str
    shape: tuple[int, ...]
    expert: int | None = None
    axis: int = 0
    start: int = 0
    transposed: bool = False
    either_way: bool = False
    is_row: bool = False
    flat_experts: int = 0
    minus: float = 0.0
    order: tuple[int, ...] | None = None

    @property
    def own_shape(self) -> tuple[int, ...]:
        """The shape in the decoder's orientation."""
        shape = (self.shape[1:] if self.is_row else self.shape) or (1,)
        if self.flat_experts:
            shape = (self.flat_experts, shape[0] // self.flat_experts, *shape[1:])
        return (*shape[:-2], shape[-1], shape[-2]) if self.transposed else shape

    def as_in(self, shape: tuple[int, ...]) -> "Slot":
        """This slot for a tensor of that shape, where it is ``either_way``."""
        turned = (*self.shape[:-2], *reversed(self.shape[-2:]))
        if not self.either_way or shape == self.shape or shape != turned:
            return self
        return dataclasses.replace(self, shape=turned, transposed=not self.transposed)

    def place(self, parameter: torch.Tensor) -> torch.Tensor:
        """The view of ``parameter`` that the tensor fills, in the decoder's own orientation and order."""
        part = parameter if self.expert is None else parameter[self.expert]
        return part.narrow(self.axis, self.start, self.own_shape[self.axis])

    def reach(self) -> tuple[int, ...]:
        """The smallest parameter that has the place."""
        part = list(self.own_shape)
        part[self.axis] += self.start
        return tuple(part) if self.expert is None else (self.expert + 1, *part)

    def of_expert(self, index: int) -> "Slot":
        """The place of one expert of a tensor that holds all of them (``axis`` 1)."""
        shape = (self.shape[0] // self.flat_experts, *self.shape[1:]) if self.flat_experts else self.shape[1:]
        return dataclasses.replace(self, shape=shape, expert=index, axis=self.axis - 1, flat_experts=0)

    def without_row(self) -> "Slot":
        """The same place in the parameter, for a tensor without that first dimension."""
        return dataclasses.replace(self, shape=self.shape[1:], is_row=False)

    def write(self, parameter: torch.Tensor, tensor: torch.Tensor) -> None:
        """Copy a checkpoint tensor to its place, converting dtype and device, ``PIECE`` elements at a time."""
        source = tensor[0] if self.is_row else tensor
        source = source.unflatten(0, (self.flat_experts, -1)) if self.flat_experts else source
        target, source = self.place(parameter), source.mT if self.transposed else source
        across = 0 if self.order is None or self.axis > 0 else 1  # not the dimension that is reordered
        if across == source.dim():
            self._write_piece(target, source)
        else:
            step = max(1, PIECE * source.shape[across] // max(1, source.numel()))
            for part, piece in zip(target.split(step, across), source.split(step, across), strict=True):
                self._write_piece(part, piece)
        if self.minus:
            target += self.minus

    def _write_piece(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self.order is None:
            target.copy_(source)
            return
        # moved as it is and sorted there: a GPU does that faster
        source = source.to(target.device, target.dtype).unflatten(self.axis, (len(self.order), -1))
        index = torch.tensor(self.order, device=target.device)
        target.unflatten(self.axis, (len(self.order), -1)).index_copy_(self.axis, index, source)

    def read(self, parameter: torch.Tensor) -> torch.Tensor:
        """The tensor as the checkpoint has it: a view, or a copy if there is an ``order``, a ``minus`` or
        ``flat_experts``. Of ``is_row`` all rows are the first."""
        part = self.place(parameter)
        if self.order is not None:
            index = torch.tensor(self.order, device=part.device)
            blocks = part.unflatten(self.axis, (len(self.order), -1))
            part = blocks.index_select(self.axis, index).flatten(self.axis, self.axis + 1)
        part = part.mT if self.transposed else part
        part = part - self.minus if self.minus else part
        part = part.flatten(0, 1) if self.flat_experts else part
        return part.expand(self.shape) if self.is_row else part.view(self.shape) if not self.shape else part


def parameter_shape(slots: Iterable[Slot]) -> tuple[int, ...]:
    """The shape of the parameter that these slots fill."""
    return tuple(map(max, zip(*(slot.reach() for slot in slots), strict=True)))


def unfilled(slots: Mapping[str, Slot], present: Mapping[str, str]) -> list[str]:
    """The slots that are still to be written, so that every element of every parameter is written once.

    Slots that share a place are spellings of it (experts one by one, or stacked). Where nothing is present of a place,
    its first spelling in ``slots`` is returned; where something is, the spelling that completes it. So with nothing
    present these are the slots of the first spelling of everything.

    Args:
        slots: the slots of all spellings, by name.
        present: names of the slots that are written, and what to call each in a message.

    Raises:
        ValueError: two of those present share a place.
    """
    by_parameter: dict[str, list[str]] = {}
    for name, slot in slots.items():
        by_parameter.setdefault(slot.parameter, []).append(name)
    missing = {name for names in by_parameter.values() for name in _unfilled(slots, names, present)}
    return [name for name in slots if name in missing]


def _unfilled(slots: Mapping[str, Slot], names: list[str], present: Mapping[str, str]) -> list[str]:
    """:func:`unfilled` for the slots of one parameter."""
    rows = max(slots[name].axis + (slots[name].expert is not None) for name in names) + 1
    owner = torch.full(parameter_shape(slots[name] for name in names)[:rows], -1, dtype=torch.int32)
    for i, name in enumerate(names):
        if name in present:
            place = slots[name].place(owner)
            other = int(place.max())
            if other >= 0:
                raise ValueError(
                    f"tensors {present[names[other]]} and {present[name]} hold the same weights in two spellings; "
                    "a checkpoint must have one of them"
                )
            place.fill_(i)
    missing = []
    # a spelling that fits beside what is there; where spellings are mixed so that none fits, the first one
    for fits in (lambda place: place.max() < 0, lambda place: place.min() < 0):
        if int(owner.min()) >= 0:
            break
        for i, name in enumerate(names):
            if fits(place := slots[name].place(owner)):
                missing.append(name)
                place.fill_(i)
    if int(owner.min()) < 0:
        raise ValueError(f"the weight map has no tensor for a part of {slots[names[0]].parameter}")
    return missing

"""Which rank has which experts, where some have several copies: made by the rebalancer, read by an engine.

A rank has a number of slots in each layer, the same number on all ranks, and each slot holds one expert. The slots of a
layer are numbered through: those of rank 0 first.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from tritonllm.experts.files import read_object, whole_numbers, write_object

# Rows of the table that says which copy a token takes. More would be exact for experts with odd numbers of copies, too;
# with so many, shares of equal copies differ by less than 5% if there are up to 3 of them.
MOST_TURNS = 64


@dataclass(frozen=True, kw_only=True)
class ExpertPlacement:
    """The experts in the slots of every layer that has some.

    Attributes:
        architecture: the architecture of the model, as its ``config.json`` names it.
        tensor_parallel_size: how many ranks there are.
        num_experts: how many experts a layer has.
        layers: number of a layer -> the expert in each slot.

    Raises:
        ValueError: an expert that is in no slot, or that there is not; layers with different numbers of slots, or ranks
            that cannot have equally many.
    """

    architecture: str
    tensor_parallel_size: int
    num_experts: int
    layers: Mapping[int, tuple[int, ...]]

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("there are no layers")
        ranks, slots, every = self.tensor_parallel_size, self.num_slots, set(range(self.num_experts))
        for place, experts in self.layers.items():
            if len(experts) != slots:
                raise ValueError(f"layer {place} has {len(experts)} slots, and another layer {slots}")
            if unknown := sorted(set(experts) - every):
                raise ValueError(
                    f"layer {place} has a slot for expert {unknown[0]}: there are {self.num_experts}, from 0"
                )
            if missing := sorted(every - set(experts)):
                raise ValueError(f"layer {place} has no slot for expert {missing[0]}")
        if slots % ranks:
            raise ValueError(f"{slots} slots cannot be dealt out evenly to tensor_parallel_size={ranks}")

    @property
    def num_slots(self) -> int:
        """How many slots all ranks have together in one layer."""
        return len(next(iter(self.layers.values())))

    @property
    def num_redundant_experts(self) -> int:
        """Slots with a further copy, in one layer."""
        return self.num_slots - self.num_experts

    @property
    def turns(self) -> int:
        """Rows of the table by which tokens take copies in turns (:func:`taken_slots`), the same for all layers."""
        copies = {count for experts in self.layers.values() for count in Counter(experts).values()}
        return min(math.lcm(*copies), MOST_TURNS)

    def as_json(self) -> dict[str, Any]:
        """The placement as a JSON object, as the file holds it."""
        return {
            "architecture": self.architecture,
            "tensor_parallel_size": self.tensor_parallel_size,
            "num_experts": self.num_experts,
            "layers": {str(place): list(experts) for place, experts in self.layers.items()},
        }

    def save(self, path: str | Path) -> None:
        """Write it as JSON; a file that is there is replaced as a whole.

        Raises:
            OSError: the file cannot be written.
        """
        write_object(Path(path), self.as_json())

    @classmethod
    def read(cls, path: str | Path) -> "ExpertPlacement":
        """Read the placement that :meth:`save` wrote.

        Raises:
            OSError: there is no such file, or it cannot be read.
            ValueError: it holds something else, or a bad placement; the message names the file.
        """
        value = read_object(Path(path))
        numbers: list[Any] = [value.get(name) for name in ("tensor_parallel_size", "num_experts")]
        architecture, layers = value.get("architecture"), value.get("layers")
        counted = all(type(number) is int and number >= 1 for number in numbers)
        if not counted or not isinstance(architecture, str) or not isinstance(layers, dict):
            raise ValueError(f"{path}: this is no placement as `tritonllm rebalance-experts` writes it")
        found = {}
        for name, experts in layers.items():
            if not name.isdecimal():
                raise ValueError(f"{path}: layers must be named by their numbers, got {name!r}")
            found[int(name)] = whole_numbers(f"{path}: layer {name}", experts)
        ranks, num_experts = numbers
        try:
            return cls(
                architecture=architecture,
                tensor_parallel_size=ranks,
                num_experts=num_experts,
                layers=dict(sorted(found.items())),
            )
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def taken_slots(slots: Sequence[int], experts: int, turns: int) -> list[list[int]]:
    """The slot that a token takes for each expert: ``[turns][experts]``; token t of a step goes by row ``t % turns``.

    Copies of an expert take turns, so tokens share them evenly if ``turns`` is a multiple of their number. Experts
    begin with different copies: else a single token would always take the first.

    Args:
        slots: the expert in each slot of a layer.
        experts: how many there are; each has a slot.
        turns: how many rows the table has.
    """
    copies: list[list[int]] = [[] for _ in range(experts)]
    for slot, expert in enumerate(slots):
        copies[expert].append(slot)
    return [[own[(turn + expert) % len(own)] for expert, own in enumerate(copies)] for turn in range(turns)]


def rank_loads(slots: Sequence[int], load: Sequence[int], ranks: int) -> list[Fraction]:
    """How much of a layer's load each rank has, if the copies of an expert share its load evenly.

    Args:
        slots: the expert in each slot.
        load: the load of each expert.
        ranks: how many ranks there are; they have equally many slots.
    """
    copies, each = Counter(slots), len(slots) // ranks
    parts = [Fraction(load[expert], copies[expert]) for expert in slots]
    return [sum(parts[begin : begin + each], Fraction(0)) for begin in range(0, len(slots), each)]

"""How many tokens went to each expert of each layer: an engine counts, the rebalancer reads it from a file."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tritonllm.experts.files import read_object, whole_numbers, write_object


@dataclass(frozen=True)
class ExpertLoad:
    """Pairs (token, expert) that were computed, padding left out.

    Attributes:
        architecture: the architecture of the model, as its ``config.json`` names it.
        layers: number of a layer that has experts -> how many pairs each of its experts got, from expert 0 on.
    """

    architecture: str
    layers: Mapping[int, tuple[int, ...]]

    def __add__(self, other: "ExpertLoad") -> "ExpertLoad":
        """The sum of two engines' counts, or of two runs'.

        Raises:
            ValueError: they are of different models.
        """
        sizes = [{place: len(counts) for place, counts in load.layers.items()} for load in (self, other)]
        if self.architecture != other.architecture or sizes[0] != sizes[1]:
            raise ValueError("expert loads of different models cannot be added up")
        layers = {
            place: tuple(a + b for a, b in zip(counts, other.layers[place], strict=True))
            for place, counts in self.layers.items()
        }
        return ExpertLoad(self.architecture, layers)

    def as_json(self) -> dict[str, Any]:
        """The counts as a JSON object, as the file holds it."""
        layers = {str(place): list(counts) for place, counts in self.layers.items()}
        return {"architecture": self.architecture, "layers": layers}

    def save(self, path: str | Path) -> None:
        """Write it as JSON; a file that is there is replaced as a whole.

        Raises:
            OSError: the file cannot be written.
        """
        write_object(Path(path), self.as_json())

    @classmethod
    def of_json(cls, value: Mapping[str, Any], where: str = "expert load") -> "ExpertLoad":
        """The opposite of :meth:`as_json`; ``where`` begins the message.

        Raises:
            ValueError: something else.
        """
        architecture, layers = value.get("architecture"), value.get("layers")
        if not isinstance(architecture, str) or not isinstance(layers, Mapping) or not layers:
            raise ValueError(
                f"{where}: there must be an architecture and layers, as LLM.expert_load().save() writes them"
            )
        found: dict[int, tuple[int, ...]] = {}
        for name, counts in layers.items():
            if not name.isdecimal():
                raise ValueError(f"{where}: layers must be named by their numbers, got {name!r}")
            found[int(name)] = whole_numbers(f"{where}: layer {name}", counts)
        return cls(architecture, dict(sorted(found.items())))

    @classmethod
    def read(cls, path: str | Path) -> "ExpertLoad":
        """Read the counts that :meth:`save` wrote.

        Raises:
            OSError: there is no such file, or it cannot be read.
            ValueError: it holds something else.
        """
        return cls.of_json(read_object(Path(path)), str(path))

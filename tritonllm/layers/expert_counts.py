"""How often each expert is chosen, counted on the device while steps run (``count_expert_load``).

Each layer adds to counters of its own, in one small launch behind its routing. Nothing waits for them, and captured
steps hold their addresses. Every rank routes all tokens, so each has the counts of all of them; of engines that share
experts each routes its own tokens, and counts them.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from tritonllm.layers.metadata import AttentionMetadata


class LayerCounter(NamedTuple):
    """Where one layer counts the experts of one step's tokens.

    Attributes:
        counts: ``[experts]`` int64.
        marks: ``[tokens]`` int32 or int64; of padding negative.
    """

    counts: torch.Tensor
    marks: torch.Tensor


class ExpertCounts:
    """The counters of a model's layers.

    Args:
        experts: number of a layer -> how many experts it has, of those that have some.
        device: where the layers are.
    """

    def __init__(self, experts: Mapping[int, int], device: torch.device) -> None:
        self._places = {place: at for at, place in enumerate(experts)}
        self._experts = dict(experts)
        most = max(experts.values())
        most += most % 2  # all rows begin at multiples of 16 bytes: for others another kernel would be compiled
        # the last row is of rehearsals: they run real steps once more
        self._counts = torch.zeros(len(experts) + 1, most, dtype=torch.int64, device=device)

    def of_layer(self, place: int, metadata: AttentionMetadata, *, rows: bool, rehearses: bool) -> LayerCounter | None:
        """What a layer takes for a step; ``None`` if it has no experts.

        Args:
            metadata: the attention metadata of the step.
            rows: whether the layer's experts compute only the rows that are wanted of the step.
            rehearses: whether this step counts nothing.
        """
        if place not in self._places:
            return None
        counts = self._counts[-1 if rehearses else self._places[place]]
        return LayerCounter(counts[: self._experts[place]], metadata.marks(wanted=rows))

    def reset(self) -> None:
        """Begin at 0 again, behind the steps that were launched."""
        self._counts.zero_()

    def read(self) -> dict[int, tuple[int, ...]]:
        """The counts of each layer, when the steps that were launched have ended: waits for them."""
        rows = self._counts.tolist()
        return {place: tuple(rows[at][: self._experts[place]]) for place, at in self._places.items()}

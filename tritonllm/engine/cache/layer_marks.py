"""Where the layers of a captured step end: events that each replay records, for those who go on with these layers.

A replay launches all layers at once, so the host cannot put anything between them. Events that are recorded during the
capture as external ones become nodes of the graph (CUDA's ``cudaEventRecordExternal``): each replay records them anew,
and another stream that waits for one behind the replay goes on when these layers are computed, not all.
"""

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch


class Marks(Protocol):
    """What a captured step says of its layers."""

    @property
    def events(self) -> Mapping[int, torch.cuda.Event]:
        """The recorded events, by the layer behind which they are."""

    def note(self, layer: int) -> None:
        """The launches that compute this layer are made, or captured."""


class LayerMarks:
    """The events behind the layers of one captured step, or of the last pass through it. If its layers are not launched
    in ascending order, there is no event from the first that is out of order on.

    Args:
        layers: the numbers of the layers behind which there is an event.
    """

    def __init__(self, layers: Iterable[int]) -> None:
        self._layers = frozenset(layers)
        self._next = 0  # layer that is to be captured
        self.events: dict[int, torch.cuda.Event] = {}

    def note(self, layer: int) -> None:
        if layer == 0:
            self._next, self.events = 0, {}
        if layer != self._next:
            self._next = -1
            return
        self._next += 1
        if layer in self._layers:
            self.events[layer] = event = torch.cuda.Event(external=True)
            event.record()

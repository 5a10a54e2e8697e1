"""The order in which the blocks that a step fills leave the device: groups of layers, each as soon as the step has
computed it. No torch.

A layer of a block is whole when the step has stored its keys and values, long before the step has ended. So layers are
copied in groups while the step goes on, and when it ends only the last group is left. Groups are small at both ends:
the first so that copying begins early (of a small model copying takes longer than computing, and then the end is the
beginning plus all copies), the last so that little is left. In the middle they are large, for each takes launches of
its own: of 32 layers there are nine, of 1, 2, 4, 8, 2, 8, 4, 2 and 1.

Behind a layer means: behind an event of the stream that computes it. If the step is launched layer by layer, the event
is recorded when the layer has been launched. A captured step records its events itself
(:mod:`tritonllm.engine.cache.layer_marks`).

Beside a draft model, which would tell of its own layers by number, all is copied behind the whole step, in one piece
for each model. So it is into slots in the device's memory, where all takes less than a millisecond, and if it is little
(:data:`~tritonllm.engine.cache.host_copies.STREAMED_BYTES`).
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

MOST_LAYERS = 8  # of a group


class LayerGroup(NamedTuple):
    """Some layers of all blocks of a batch.

    Attributes:
        after: the layer of the first model behind whose launches the group is copied; ``None``: behind the whole step.
        model: the number of the model that the layers belong to.
        layers: the numbers of the layers.
    """

    after: int | None
    model: int
    layers: range


def group_sizes(num_layers: int, most: int = MOST_LAYERS) -> list[int]:
    """Sizes of groups, growing from 1 and shrinking to 1, none above ``most``."""
    front: list[int] = []
    back: list[int] = []
    left, size = num_layers, 1
    while left >= 2 * size:
        front.append(size)
        back.append(size)
        left -= 2 * size
        size = min(2 * size, most)
    middle = [left // 2, left - left // 2] if left > most else [left] if left else []
    return [*front, *middle, *reversed(back)]


def copies_of(num_layers: Sequence[int], by_layer: bool) -> list[LayerGroup]:
    """The groups of a step, in the order in which they are copied.

    Args:
        num_layers: for each model that has blocks, how many layers it has.
        by_layer: whether the launch of each layer of the first model is announced.
    """
    groups, begin = [], 0
    for size in group_sizes(num_layers[0]) if by_layer else []:
        begin += size
        groups.append(LayerGroup(begin - 1, 0, range(begin - size, begin)))
    return groups + [LayerGroup(None, i, range(n)) for i, n in enumerate(num_layers) if i or not by_layer]


class LayerCopies:
    """The copies of one step, which begin as it is launched.

    Args:
        groups: the groups of layers, in the order in which they are copied.
        copy: begins the copy of a group, behind all that is launched.
        ended: is called when all copies have begun.
    """

    def __init__(
        self, groups: Sequence[LayerGroup], copy: Callable[[LayerGroup], None], ended: Callable[[], None]
    ) -> None:
        self._left = deque(groups)
        self._copy, self._ended = copy, ended
        self._next = 0  # layer that is to be launched

    def computed(self, layer: int) -> None:
        """What computes this layer of the first model is launched. If layers come in another order than theirs, the
        rest waits for :meth:`end`."""
        if layer != self._next:
            self._next = -1
            return
        self._next += 1
        while self._left and self._left[0].after == layer:
            self._copy(self._left.popleft())

    def end(self) -> None:
        """Copy what is left; called when all of the step is launched."""
        while self._left:
            self._copy(self._left.popleft())
        self._ended()

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
for each pool. So it is into slots in the device's memory, where all takes less than a millisecond, and if it is little
(:data:`~tritonllm.engine.cache.host_copies.STREAMED_BYTES`).
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

MOST_LAYERS = 8  # of a group


class LayerGroup(NamedTuple):
    """Some layers of all blocks of a batch.

    Attributes:
        after: the layer of the first model behind whose launches the group is copied; ``None``: behind the whole step.
        pool: the number of the pool that the layers' blocks are in.
        rows: the places of the layers in that pool.
    """

    after: int | None
    pool: int
    rows: range


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


def copies_of(num_layers: Sequence[int], announced: Sequence[Sequence[int]] = ()) -> list[LayerGroup]:
    """The groups of a step, in the order in which they are copied.

    Args:
        num_layers: for each pool, how many layers it has.
        announced: for each of the first pools, the numbers of its layers, ascending, as their launches are announced;
            nothing where launches are not.
    """
    order = sorted(layer for layers in announced for layer in layers)
    groups, begin = [], 0
    for size in group_sizes(len(order)) if order else []:
        first, last = order[begin], order[begin + size - 1]
        begin += size
        for pool, layers in enumerate(announced):
            rows = range(bisect_left(layers, first), bisect_right(layers, last))
            if rows:
                groups.append(LayerGroup(last, pool, rows))
    return groups + [LayerGroup(None, i, range(n)) for i, n in enumerate(num_layers) if i >= len(announced)]


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

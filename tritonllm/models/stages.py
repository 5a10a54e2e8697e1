"""Pipeline parallelism as data: which of a model's layers a stage has, and which of its parameters.

The first stage has what comes before the layers, and also the output projection: the last stage sends the normalised
hidden states of the rows that are drawn from back to it. So the rank that plans draws as well, an embedding table that
is also the output projection is there once, and only the first stage knows of sampling. After Huang et al., "GPipe"
(2019), and Narayanan et al., "PipeDream" (SOSP 2019).
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tritonllm.models.spec import ModelSpec

_LAYER = re.compile(r"layers\.(\d+)\.")
_LAST = "norm."  # the only parameters behind the layers that the last stage needs


@dataclass(frozen=True)
class Stage:
    """A stage of a model.

    Attributes:
        index: the stage's index, from 0 on.
        layers: which of the whole model's layers the stage has.
        first, last: whether it is the first stage, or the last one.
    """

    index: int
    layers: range
    first: bool = True
    last: bool = True

    @classmethod
    def whole(cls, spec: ModelSpec) -> "Stage":
        """The one stage of a model that is not cut."""
        return cls(0, range(spec.num_layers))

    def of(self, spec: ModelSpec) -> ModelSpec:
        """The model with this stage's layers alone."""
        return dataclasses.replace(spec, layers=spec.layers[self.layers.start : self.layers.stop])

    def holds(self, parameter: str) -> bool:
        """Whether this stage has a parameter of the whole model."""
        layer = _LAYER.match(parameter)
        if layer is not None:
            return int(layer[1]) in self.layers
        return self.last if parameter.startswith(_LAST) else self.first

    def whole_name(self, parameter: str) -> str:
        """What the whole model calls a parameter of the stage."""
        layer = _LAYER.match(parameter)
        if layer is None:
            return parameter
        return f"layers.{int(layer[1]) + self.layers.start}.{parameter[layer.end() :]}"


def stages_of(spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]], count: int) -> list[Stage]:
    """Cut a model so that the stage with the most weights to read for a token has as few as possible.

    A layer that reads the keys of another is on one stage with it.

    Args:
        spec: the whole model.
        shapes: the shapes of the model's parameters, by name.
        count: how many stages there are.

    Raises:
        ValueError: there are fewer layers than stages, or layers that must be together leave too few places to cut.
    """
    costs, head = [0] * spec.num_layers, 0
    for name, shape in shapes.items():
        layer = _LAYER.match(name)
        if layer is not None:
            costs[int(layer[1])] += math.prod(shape)
    if spec.logits:
        head = math.prod(shapes["embed.weight" if spec.tie_word_embeddings else "lm_head.weight"])
    joined = {at for place, layer in enumerate(spec.layers) for at in range(place - layer.keys_from + 1, place + 1)}
    between = [at for at in range(1, spec.num_layers) if at not in joined]
    return stages_by_cost(spec.architecture, costs, head, count, between)


def stages_by_cost(
    architecture: str, costs: Sequence[int], head: int, count: int, between: Sequence[int] | None = None
) -> list[Stage]:
    """As :func:`stages_of`, of a model that is known by what is read of it for a token.

    Args:
        architecture: the model's name, for the error.
        costs: the number of weights of each layer.
        head: the number of weights of the output projection.
        between: the layers with which a stage may begin; by default all but the first.

    Raises:
        ValueError: there are fewer layers than stages, or layers that must be together leave too few places to cut.
    """
    between = range(1, len(costs)) if between is None else between
    if count > len(costs):
        raise ValueError(
            f"pipeline_parallel_size={count} must be at most {len(costs)}, the number of layers of "
            f"{architecture}: each stage needs one"
        )
    if count > len(between) + 1:
        raise ValueError(
            f"pipeline_parallel_size={count} must be at most {len(between) + 1} for {architecture}: layers that "
            "read the keys of another are on one stage with it"
        )
    ends = _cut(costs, count, head, between)
    ranges = [range(*pair) for pair in zip([0, *ends[:-1]], ends, strict=True)]
    return [Stage(i, layers, first=i == 0, last=i == count - 1) for i, layers in enumerate(ranges)]


def _cut(costs: Sequence[int], count: int, head: int, between: Sequence[int]) -> list[int]:
    """Where ``count`` runs of ``costs`` end, none empty and all but the last at one of ``between``, so that the largest
    sum is smallest; the first has ``head`` more. Of several such cuts the one whose earlier runs are shorter: what is
    drawn from waits for the first stage."""
    total = [0]
    for cost in costs:
        total.append(total[-1] + cost)
    never = total[-1] + head + 1
    best = [[head + total[end] for end in range(len(total))]]  # [runs - 1][end] -> the largest sum
    for runs in range(1, count):
        before = best[-1]
        best.append(
            [
                min((max(before[at], total[end] - total[at]) for at in between if runs <= at < end), default=never)
                for end in range(len(total))
            ]
        )
    ends, end = [len(costs)], len(costs)
    for runs in range(count - 1, 0, -1):
        places = [at for at in between if runs <= at < end]
        end = min(places, key=lambda at: (max(best[runs - 1][at], total[end] - total[at]), at))
        ends.append(end)
    return ends[::-1]

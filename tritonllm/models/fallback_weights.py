"""New weights for a model that runs through transformers, into the tensors that it has: each rank takes its part.

Names are those that transformers' model has in memory (``named_parameters()``): that is what a trainer has. A folder's
files may have others; transformers reads them, and hands its model over.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tritonllm.dist.group import Group
from tritonllm.models.shards import Once, Split, keep_part

# What of a configuration changes nothing of what a model computes.
_NOTES = frozenset(
    {"_name_or_path", "architectures", "bos_token_id", "dtype", "eos_token_id", "pad_token_id", "transformers_version"}
)


def differing_field(ours: Any, theirs: Any) -> str | None:
    """The first field in which the configurations of two models differ, if that changes what they compute."""
    one, other = ours.to_dict(), theirs.to_dict()
    names = (one.keys() | other.keys()) - _NOTES
    return min((name for name in names if one.get(name) != other.get(name)), default=None)


class LiveWeights:
    """The weights that one rank has, by the names of the whole model.

    Args:
        lm: the whole model, before anything is cut or let go of.
        splits: how parameters are cut for the ranks of ``group``, by name.
    """

    def __init__(self, lm: Any, splits: Mapping[str, Split | Once], group: Group) -> None:
        self._shapes = {name: tuple(tensor.shape) for name, tensor in lm.state_dict().items()}
        self._splits, self._group = dict(splits), group
        self._here: dict[str, torch.Tensor] = {}

    def find(self, lm: Any) -> None:
        """Note what of the model is here, once it is cut."""
        found = lm.state_dict(keep_vars=True)
        self._here = {name: found[name] for name in self._shapes if name in found}

    @property
    def places(self) -> dict[int, list[str]]:
        """The parameters that are here, each with its names: a tied one has several."""
        names: dict[int, list[str]] = {}
        for name, tensor in self._here.items():
            if isinstance(tensor, nn.Parameter):
                names.setdefault(id(tensor), []).append(name)
        return names

    def check(self, name: str, tensor: torch.Tensor) -> None:
        """Check that a tensor has a place in the whole model.

        Raises:
            ValueError: no such name, another shape, or a type that needs more than a cast.
        """
        if name not in self._shapes:
            raise ValueError(
                f"tensor {name} has no place in the model; its names are those of transformers' model in memory "
                f"(named_parameters()), as {min(self._shapes)}"
            )
        if tuple(tensor.shape) != self._shapes[name]:
            raise ValueError(
                f"tensor {name} has shape {list(tensor.shape)}, the model's has {list(self._shapes[name])}"
            )
        if not tensor.is_floating_point():
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ValueError(f"tensor {name} is {kind}: weights are floating point, and quantized ones not supported")

    @torch.no_grad()
    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Overwrite this rank's part of a tensor that :meth:`check` takes; nothing if another stage has it."""
        target, split = self._here.get(name), self._splits.get(name)
        if target is None:
            return
        if split is None:
            target.copy_(tensor)
        else:
            keep_part(target, tensor, split, self._group.rank, self._group.size)

    def take(self, lm: Any) -> None:
        """Take all weights of another model of this shape, whole and on the host.

        Raises:
            ValueError: a name or shape differs; nothing has been written then.
        """
        tensors = lm.state_dict()
        differing = min(
            (name for name in tensors.keys() | self._shapes if not self._has(name, tensors.get(name))), default=None
        )
        if differing is not None:
            raise ValueError(f"the new model is another one: its {differing} differs")
        for name, tensor in tensors.items():
            self.write(name, tensor)

    def _has(self, name: str, tensor: torch.Tensor | None) -> bool:
        return tensor is not None and self._shapes.get(name) == tuple(tensor.shape)


class LiveWriter:
    """Overwrites weights of a model that runs through transformers one by one, as
    :class:`~tritonllm.models.weights.WeightWriter` does those of our families.

    Args:
        weights: the model's weights.
        allow_nan: take NaN and infinite values, too.
    """

    def __init__(self, weights: LiveWeights, *, allow_nan: bool = False) -> None:
        self._weights, self._allow_nan = weights, allow_nan
        self._written: set[str] = set()

    @property
    def complete(self) -> bool:
        """Whether every weight was written since :meth:`forget`."""
        return all(self._written.intersection(names) for names in self._weights.places.values())

    def forget(self) -> None:
        """Count anew what was written."""
        self._written.clear()

    def check(self, name: str, tensor: torch.Tensor) -> None:
        """Check that a weight can be written.

        Raises:
            ValueError: no place for it, a wrong shape or type, or NaN or infinite values.
        """
        self._weights.check(name, tensor)
        if not self._allow_nan and not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"tensor {name} has values that are NaN or infinite: allow_nan=True takes them")

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Overwrite one weight. Raises as :meth:`check`; nothing has changed then."""
        self.check(name, tensor)
        self._weights.write(name, tensor)
        self._written.add(name)

"""From the tensors of files to the weights that they are of: each format says which tensors belong together."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tritonllm.kernels.dense.weight import Groups
from tritonllm.models.formats.narrow_tensor import NarrowTensor
from tritonllm.models.tensor_files import StoredTensor, open_tensors

Part = tuple[str, StoredTensor]
SCALE_TYPES = ("F32", "BF16", "F16")

# Scales of activations, which are not made narrow here, and of keys and values, which have the cache's own type.
_UNUSED = (
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "activation_scale",
    "output_scale",
    "output_zero_point",
)
_OF_THE_CACHE = re.compile(r"\.(q|k|v|kv|prob)_(scale|zero_point)$")


@dataclass(frozen=True)
class Headers:
    """The tensors of a checkpoint, before any is read."""

    stored: Mapping[str, StoredTensor]

    def part(
        self, of: str, scheme: str, name: str, types: Iterable[str], shapes: Iterable[Sequence[int]]
    ) -> tuple[str, StoredTensor]:
        """A part that a weight needs.

        Args:
            of: the tensor of its numbers.
            scheme: what messages call its scheme.
            name: of the part.
            types, shapes: those that fit.

        Raises:
            ValueError: it is missing, or another.
        """
        found, types, shapes = self.stored.get(name), tuple(types), [tuple(shape) for shape in shapes]
        if found is None or found.dtype not in types or found.shape not in shapes:
            asked = f"type {' or '.join(types)} and shape {' or '.join(str(list(shape)) for shape in shapes)}"
            what = "is missing" if found is None else f"is {found.dtype} {list(found.shape)}"
            raise bad(self.stored[of], of, f"is {scheme} and needs {name} of {asked}, which {what}")
        return name, found

    def optional(
        self, of: str, scheme: str, name: str, types: Iterable[str], shapes: Iterable[Sequence[int]]
    ) -> dict[str, Part]:
        """As :meth:`part`, where it is there: ``{}`` or ``{last part of its name: the part}``."""
        return {name: self.part(of, scheme, name, types, shapes)} if name in self.stored else {}

    def read(self, name: str) -> torch.Tensor:
        """A small tensor."""
        stored = self.stored[name]
        assert stored.path is not None
        with open_tensors(stored.path) as file:
            return file.get(name).clone()


def bad(stored: StoredTensor, name: str, what: str) -> ValueError:
    """An error about a tensor."""
    return ValueError(f"{stored.path}: tensor {name} {list(stored.shape)} {what}")


def groups_of(
    shape: Sequence[int], scales: Sequence[int], *, block: Sequence[int] | None = None, columns: int = 0
) -> Groups | None:
    """What the scales of a weight ``[N, K]``, or of experts ``[E, N, K]``, are of, by their shape.

    Args:
        shape: of the weight.
        scales: their shape: of the whole, of each row, of ``block``, or of so many ``columns`` of a row.
    """
    *experts, n, k = shape
    if len(scales) < len(experts) or list(scales[: len(experts)]) != experts:
        return None
    of_one = tuple(scales[len(experts) :])
    known = [(Groups(n), ((), (1,), (1, 1))), (Groups(), ((n,), (n, 1)))]
    if columns:
        known.append((Groups(1, columns), (Groups(1, columns).shape(n, k),)))
    if block is not None:
        known.append((Groups(*block), (Groups(*block).shape(n, k),)))
    if experts and n % 2 == 0:
        known.append((Groups(n // 2), ((2, 1),)))  # gate and up
    return next((groups for groups, shapes in known if of_one in shapes), None)


class CheckpointFormat(Protocol):
    """A format, as ``config.json`` of one checkpoint describes it."""

    def claim(self, name: str, tensor: StoredTensor, headers: Headers) -> tuple[str, NarrowTensor] | None:
        """The weight whose numbers a tensor holds, and its name; ``None``: the tensor holds no such numbers.

        Raises:
            ValueError: a part is missing, or another than the format has; the message names the tensor.
        """


def join(stored: Mapping[str, StoredTensor], form: CheckpointFormat) -> dict[str, StoredTensor | NarrowTensor]:
    """The weights of a checkpoint: those that are narrow, and all other tensors as they are.

    Scales of activations and of the cache's keys and values are left out: nothing computes with them.

    Raises:
        ValueError: as :meth:`CheckpointFormat.claim`; or a weight is there narrow and as it is.
    """
    headers = Headers(stored)
    claims = {name: form.claim(name, tensor, headers) for name, tensor in stored.items()}
    found = {name: claim for name, claim in claims.items() if claim is not None}
    used = {part for _, narrow in found.values() for part, _ in narrow.parts.values()}
    for weight, _ in found.values():
        stem = weight.removesuffix("weight") if weight.endswith(".weight") else f"{weight}_"
        used |= {stem + end for end in _UNUSED}
    joined: dict[str, StoredTensor | NarrowTensor] = {}
    for name, tensor in stored.items():
        if name in found:
            weight, narrow = found[name]
            if weight in joined or (weight in stored and weight not in used):
                raise ValueError(f"tensors {weight} and {name} hold the same weights; a checkpoint must have one")
            joined[weight] = narrow
        elif name not in used and not (found and _OF_THE_CACHE.search(name)):
            joined[name] = tensor
    return joined

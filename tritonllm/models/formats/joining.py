"""From the tensors of files to the weights that they are of: each format says which tensors belong together."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import torch

from tritonllm.kernels.dense.weight import Groups
from tritonllm.models.formats.narrow_tensor import NarrowTensor
from tritonllm.models.tensor_files import StoredTensor, TensorFile, open_tensors

SCALE_TYPES = ("F32", "BF16", "F16")

# Of activations, which are not made narrow here.
_UNUSED = (
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "activation_scale",
    "output_scale",
    "output_zero_point",
)


class Headers:
    """The tensors of a checkpoint, before those of any size are read."""

    def __init__(self, stored: Mapping[str, StoredTensor], files: ExitStack) -> None:
        self.stored, self._files = stored, files
        self._open: dict[Path, TensorFile] = {}

    def part(
        self, of: str, scheme: str, name: str, types: Iterable[str], shapes: Iterable[Sequence[int]]
    ) -> tuple[str, StoredTensor]:
        """A part that a weight needs.

        Args:
            of: the tensor of its numbers.
            scheme: what messages call its scheme.
            name: what the part is called.
            types, shapes: what it may have.

        Raises:
            ValueError: it is missing, or another.
        """
        found, types, shapes = self.stored.get(name), tuple(types), [tuple(shape) for shape in shapes]
        if found is None or found.dtype not in types or found.shape not in shapes:
            asked = f"type {' or '.join(types)} and shape {' or '.join(str(list(shape)) for shape in shapes)}"
            what = "is missing" if found is None else f"is {found.dtype} {list(found.shape)}"
            raise bad(self.stored[of], of, f"is {scheme} and needs {name} of {asked}, which {what}")
        return name, found

    def scales(
        self,
        of: str,
        scheme: str,
        name: str,
        types: Iterable[str],
        shape: Sequence[int],
        *,
        block: tuple[int, int] | None = None,
        columns: int = 0,
    ) -> tuple[tuple[str, StoredTensor], Groups]:
        """The scales of a weight, and what shares one.

        Args:
            of, scheme, name, types: as of :meth:`part`.
            shape: the shape of the weight, ``[N, K]`` or ``[E, N, K]``.
            block: rows and columns of a block that may share a scale.
            columns: so many of a row may share one.

        Raises:
            ValueError: they are missing, or of another type or shape.
        """
        found, types = self.stored.get(name), tuple(types)
        if found is None or found.dtype not in types:
            what = "is missing" if found is None else f"is {found.dtype}"
            raise bad(self.stored[of], of, f"is {scheme} and needs {name} of type {' or '.join(types)}, which {what}")
        groups = _groups_of(shape, found.shape, block, columns)
        if groups is None:
            known = ["the whole", "rows", *([f"{columns} columns"] if columns else [])]
            known += [] if block is None else [f"blocks of {block[0]} x {block[1]}"]
            what = f"is {scheme}, but {name} has shape {list(found.shape)}: not one of {', of '.join(known)}"
            raise bad(self.stored[of], of, what)
        return (name, found), groups

    def order(self, of: str, scheme: str, name: str, columns: int, groups: int) -> tuple[str, StoredTensor]:
        """The group of each column of a weight; arguments as of :meth:`part`.

        Raises:
            ValueError: it is missing, of another type or shape, or names groups that there are not.
        """
        part = self.part(of, scheme, name, ["I32", "I64"], [(columns,)])
        values = self.read(name)
        if not bool((values == -1).all() | ((values >= 0) & (values < groups)).all()):
            what = f"from {int(values.min())} to {int(values.max())}"
            raise bad(self.stored[of], of, f"has {groups} groups, but {name} gives its columns groups {what}")
        return part

    def read(self, name: str) -> torch.Tensor:
        """A small tensor. Its file stays open: a checkpoint may have one for each weight of each expert."""
        path = self.stored[name].path
        assert path is not None
        if path not in self._open:
            self._open[path] = self._files.enter_context(open_tensors(path))
        return self._open[path].get(name).clone()


def bad(stored: StoredTensor, name: str, what: str) -> ValueError:
    """An error about a tensor."""
    return ValueError(f"{stored.path}: tensor {name} {list(stored.shape)} {what}")


def _groups_of(
    shape: Sequence[int], scales: Sequence[int], block: tuple[int, int] | None, columns: int
) -> Groups | None:
    """What scales of a shape are of."""
    *experts, n, k = shape
    if list(scales[: len(experts)]) != experts:
        return None
    of_one = tuple(scales[len(experts) :])
    known = [(Groups(n), ((), (1,), (1, 1))), (Groups(), ((n,), (n, 1)))]
    known += [(groups, (groups.shape(n, k),)) for groups in ([Groups(1, columns)] if columns else [])]
    known += [(groups, (groups.shape(n, k),)) for groups in ([] if block is None else [Groups(*block)])]
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

    Scales of activations are left out: nothing computes with them.

    Raises:
        ValueError: as :meth:`CheckpointFormat.claim`; or a weight is there narrow and as it is.
    """
    with ExitStack() as files:
        headers = Headers(stored, files)
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
        elif name not in used:
            joined[name] = tensor
    return joined

"""A weight that a checkpoint holds as several tensors: numbers, scales and what else its format has."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from tritonllm.models.formats.piece import NarrowPiece
from tritonllm.models.tensor_files import StoredTensor, TensorFile, open_tensors


class Parts(Protocol):
    """What a scheme reads of the tensors of a weight, on the device where the weight goes."""

    def __contains__(self, role: str) -> bool:
        """Whether the checkpoint has the part."""

    def __call__(self, role: str, *index: int | slice) -> torch.Tensor:
        """A window of a part; nothing else of it is read. It must not be written to."""


class Scheme(Protocol):
    """How the parts of a weight lie, and what they stand for."""

    @property
    def name(self) -> str:
        """What messages call it."""

    def piece(self, parts: Parts, expert: int | None, rows: range, columns: range) -> NarrowPiece:
        """A rectangle of a weight ``[N, K]``, or of the one of an expert."""


@dataclass(frozen=True)
class NarrowTensor:
    """One weight, of which a checkpoint has several tensors.

    Attributes:
        shape: the weight's shape: ``[N, K]``, or of all experts ``[E, N, K]``.
        scheme: how its parts are read.
        parts: by what the scheme calls a part, its name and its header; the numbers first.
        turned: ``shape`` has the last two dimensions the other way round (GPT-OSS).
    """

    shape: tuple[int, ...]
    scheme: Scheme
    parts: Mapping[str, tuple[str, StoredTensor]]
    turned: bool = False

    @property
    def path(self) -> Path | None:
        """The file of the numbers."""
        return next(iter(self.parts.values()))[1].path

    @property
    def dtype(self) -> str:
        return self.scheme.name

    @property
    def num_bytes(self) -> int:
        return sum(stored.num_bytes for _, stored in self.parts.values())

    def piece(
        self, file: TensorFile, expert: int | None, part: tuple[int, int, int] | None, device: torch.device
    ) -> NarrowPiece:
        """A matrix, or a part of it, from the open file ``path``; other files are opened for the parts that they hold.

        Args:
            expert: which matrix, of a weight of all experts.
            part: dimension of the matrix, as in ``shape``, first and last (exclusive) element; ``None`` for all of it.
            device: where the numbers go, before they are unpacked.
        """
        sizes = self.shape[-2:]
        ranges = [range(size) for size in sizes]
        if part is not None:
            ranges[part[0]] = range(part[1], part[2])
        rows, columns = reversed(ranges) if self.turned else ranges
        return self.scheme.piece(_PartsInFiles(self, file, device), expert, rows, columns)


@dataclass(frozen=True)
class _PartsInFiles:
    tensor: NarrowTensor
    file: TensorFile
    device: torch.device

    def __contains__(self, role: str) -> bool:
        return role in self.tensor.parts

    def __call__(self, role: str, *index: int | slice) -> torch.Tensor:
        name, stored = self.tensor.parts[role]
        if stored.path is None or stored.path == self.tensor.path:
            return self.file.window(name, index).to(self.device)
        with open_tensors(stored.path) as other:
            return other.window(name, index).clone().to(self.device)

"""The tensors of one GGUF file under Hugging Face's names, in Hugging Face's order, with their blocks converted.

A tensor is converted when it is read, a piece after the other, and of a part only the blocks that it touches: what the
host holds beside the model is one tensor in float32. The types that :mod:`tritonllm.models.gguf.blocks` has not, the
package ``gguf`` converts.
"""

import math
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tritonllm.models.gguf.blocks import CONVERTERS, convert
from tritonllm.models.gguf.families import GGUFFamily, family_of
from tritonllm.models.gguf.header import GGUFHeader, GGUFTensor, library, read_header, shards

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PIECE = 1 << 20  # elements in work at a time: what stays in a processor's cache
_PAIRED = re.compile(r"\.attn_(?P<which>[qk])\.")


@dataclass(frozen=True)
class _Place:
    """Where a tensor of Hugging Face's name lies.

    Attributes:
        tensor: what the file has.
        expert: of which only this one; ``None``: all of it.
        order: the row of the file for each row of Hugging Face's; ``None``: they are the same.
        plus: what the file has added to the values.
    """

    tensor: GGUFTensor
    expert: int | None = None
    order: np.ndarray | None = None
    plus: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape if self.expert is None else self.tensor.shape[1:]

    @property
    def code(self) -> str:
        """As safetensors calls the type of what is read."""
        return self.tensor.kind if self.tensor.kind in _PLAIN and not self.plus else "F32"


class GGUFTensors:
    """An open file.

    Args:
        path: one of a model's files.

    Raises:
        ValueError: the model cannot be read (:func:`~tritonllm.models.gguf.header.read_header`), a tensor has no place
            in its architecture, or a type that the package ``gguf`` does not convert.
    """

    def __init__(self, path: Path) -> None:
        files = shards(path)
        header = read_header(path)
        first = header if files[0] == path else read_header(files[0])
        self._places = dict(_places(header, first, family_of(first)))
        self._library = library()
        for kind in {place.tensor.kind for place in self._places.values()} - set(_PLAIN):
            self._check_kind(path, kind)
        self._content = np.memmap(path, np.uint8, "c")  # private: torch asks for memory that can be written

    def headers(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and type of what is read, by name."""
        return {name: (place.shape, place.code) for name, place in self._places.items()}

    def get(self, name: str) -> torch.Tensor:
        """A tensor."""
        place = self._places[name]
        if len(place.shape) == 1:
            row = self._converted(self._blocks(place), place)[0]
            return row if place.order is None else row[torch.from_numpy(place.order)]
        return self._read(place, range(len(self._blocks(place))), range(place.shape[-1])).view(place.shape)

    def window(self, name: str, index: tuple[int | slice, ...]) -> torch.Tensor:
        """What ``tensor[index]`` is of it; of a matrix, nothing else is read."""
        place = self._places[name]
        slices = [part for part in index if isinstance(part, slice) and part.step in (None, 1)]
        if len(place.shape) != 2 or len(slices) < len(index):
            return self.get(name)[index]
        rows, columns = (
            range(size)[part] for size, part in zip(place.shape, [*slices, *[slice(None)] * 2], strict=False)
        )
        return self._read(place, rows, columns)

    def _check_kind(self, path: Path, kind: str) -> None:
        number = self._library.GGMLQuantizationType[kind]
        try:
            self._library.dequantize(np.zeros((1, self._library.GGML_QUANT_SIZES[number][1]), np.uint8), number)
        except NotImplementedError as error:
            name = next(name for name, place in self._places.items() if place.tensor.kind == kind)
            raise ValueError(
                f"{path}: tensor {name} has the type {kind}, which the package gguf does not convert; convert the "
                "model to another type, such as Q4_K, Q8_0 or BF16"
            ) from error

    def _blocks(self, place: _Place) -> np.ndarray:
        """``[rows, bytes]``: what the file has of a tensor, a view."""
        tensor, (elements, num_bytes) = place.tensor, self._sizes(place)
        blocks = self._content[tensor.begin : tensor.begin + tensor.num_bytes]
        blocks = blocks.reshape(-1, tensor.shape[-1] // elements * num_bytes)
        if place.expert is None:
            return blocks
        each = math.prod(place.shape[:-1])
        return blocks[place.expert * each : (place.expert + 1) * each]

    def _sizes(self, place: _Place) -> tuple[int, int]:
        """Elements and bytes of a block."""
        return self._library.GGML_QUANT_SIZES[self._library.GGMLQuantizationType[place.tensor.kind]]

    def _read(self, place: _Place, rows: range, columns: range) -> torch.Tensor:
        """``[rows, columns]`` of a matrix, of which the blocks are read that these touch."""
        elements, num_bytes = self._sizes(place)
        left, right = columns.start // elements, -(-columns.stop // elements)
        some = slice(rows.start, rows.stop) if place.order is None else place.order[rows.start : rows.stop]
        found = self._converted(self._blocks(place)[some, left * num_bytes : right * num_bytes], place)
        return found[:, columns.start - left * elements : columns.stop - left * elements]

    def _converted(self, blocks: np.ndarray, place: _Place) -> torch.Tensor:
        """``[rows, bytes]`` of blocks as ``[rows, columns]``, without what the file has added."""
        found = self._numbers(blocks, place)
        return found.float() - place.plus if place.plus else found

    def _numbers(self, blocks: np.ndarray, place: _Place) -> torch.Tensor:
        """``[rows, bytes]`` of blocks as ``[rows, columns]``."""
        if place.tensor.kind in _PLAIN:
            return torch.from_numpy(np.ascontiguousarray(blocks)).view(_PLAIN[place.tensor.kind])
        kind = place.tensor.kind
        number, (elements, num_bytes) = self._library.GGMLQuantizationType[kind], self._sizes(place)
        found = torch.empty(len(blocks), blocks.shape[1] // num_bytes * elements)
        step = max(1, _PIECE // max(1, found.shape[1]))
        pieces = (np.ascontiguousarray(blocks[begin : begin + step]) for begin in range(0, len(blocks), step))
        if kind in CONVERTERS:
            for piece, into in zip(pieces, found.split(step), strict=True):
                into.copy_(convert(kind, torch.from_numpy(piece).view(-1, num_bytes)).view(into.shape))
            return found

        def by_package(piece: np.ndarray) -> np.ndarray:
            with np.errstate(all="ignore"):  # NaN and infinite values are refused later
                return self._library.dequantize(piece, number)

        with ThreadPoolExecutor(torch.get_num_threads()) as threads:  # torch has threads of its own
            for numbers, into in zip(threads.map(by_package, pieces), found.split(step), strict=True):
                into.copy_(torch.from_numpy(numbers))
        return found


def _places(header: GGUFHeader, first: GGUFHeader, family: GGUFFamily) -> Iterator[tuple[str, _Place]]:
    """Hugging Face's names of what a file has; experts one by one."""
    for theirs, tensor in header.tensors.items():
        try:
            name = family.name(theirs)
        except ValueError as error:
            raise ValueError(f"{header.path}: {error}; such a file is not supported") from error
        if name is None:
            continue
        if not tensor.shape:
            raise ValueError(f"{header.path}: tensor {theirs} has no dimensions; download the file again")
        if "{}" in name:
            yield from ((name.format(expert), _Place(tensor, expert)) for expert in range(tensor.shape[0]))
        else:
            plus = 1.0 if family.norms_plus_one and theirs.endswith("norm.weight") else 0.0
            yield name, _Place(tensor, order=_order(theirs, tensor, first, family), plus=plus)


def _order(theirs: str, tensor: GGUFTensor, first: GGUFHeader, family: GGUFFamily) -> np.ndarray | None:
    """The row of the file for each of Hugging Face's: there a head has the first elements of all pairs, then the second
    ones, here pair after pair."""
    paired = _PAIRED.search(theirs) if family.pairs_rows else None
    if paired is None:
        return None
    arch = first.metadata["general.architecture"]
    heads = first.metadata.get(f"{arch}.attention.head_count")
    if paired["which"] == "k":
        heads = first.metadata.get(f"{arch}.attention.head_count_kv", heads)
    heads = heads[0] if isinstance(heads, list) and heads else heads
    rows = tensor.shape[0]
    if not isinstance(heads, int) or heads < 1 or rows % (2 * heads):
        raise ValueError(f"{first.path}: tensor {theirs} has {rows} rows, which are not those of {heads} heads")
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).ravel()

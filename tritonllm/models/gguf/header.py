"""The header of a GGUF file: metadata by key, and where each tensor lies.

Read by our own parser after the format's specification (ggml's docs/gguf.md, versions 2 and 3): a start reads the
header several times, and the package ``gguf`` makes arrays of each string, which takes 3.6 s for a vocabulary of 49,152
tokens where this takes 0.1 s. The sizes of blocks and their conversion are that package's.
"""

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tritonllm.system.extras import install

SUFFIX = ".gguf"
_SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MOST_ENTRIES, _MOST_TENSORS, _MOST_DIMENSIONS, _MOST_SHARDS = 1 << 16, 1 << 20, 4, 1 << 10
# The types of values by their number: struct's letters of those of fixed size, then strings and arrays.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY, _FLOAT = 8, 9, 6


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies.

    Attributes:
        shape: as torch counts: rows first; the file has it the other way round.
        kind: the name of its type, such as ``Q4_K``.
        begin: offset in the file.
        num_bytes: the bytes of all its blocks.
    """

    shape: tuple[int, ...]
    kind: str
    begin: int
    num_bytes: int


@dataclass(frozen=True)
class GGUFHeader:
    """What stands before the data.

    Attributes:
        path: the file.
        metadata: values by key; arrays are lists.
        tensors: by the names that the file has.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]


def is_gguf(path: Path) -> bool:
    """Whether a path names a GGUF file."""
    return path.suffix == SUFFIX and not path.is_dir()


def library() -> Any:
    """The package ``gguf``.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        raise ValueError(f"GGUF files need the package gguf, which is not installed: {install('gguf')}") from error
    return gguf


def shards(path: Path) -> list[Path]:
    """The files of a model of which ``path`` is one: ``NAME-00001-of-00003.gguf`` is one of three.

    Raises:
        ValueError: one is absent.
    """
    named = _SHARD.match(path.name)
    if named is None:
        return [path]
    count = int(named["count"])
    if not 0 < count <= _MOST_SHARDS:
        raise ValueError(f"{path}: a model has 1 to {_MOST_SHARDS} files, this name says {count}")
    files = [path.with_name(f"{named['stem']}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    for file in files:
        if not file.is_file():
            raise ValueError(f"{file} does not exist, one of {count} files of a model; download the missing file")
    return files


def read_header(path: Path) -> GGUFHeader:
    """The header of one file; none of the data is read.

    Raises:
        ValueError: it cannot be read, is no GGUF file or a truncated one, or has a tensor of an unknown type; or the
            package ``gguf`` is not installed.
    """
    gguf = library()
    kinds = {int(kind): (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType}
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Parser(path, content).header(kinds)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, struct.error, OverflowError) as error:
        if str(error).startswith(str(path)):
            raise
        raise ValueError(f"{path} is not a complete GGUF file ({error}); download it again") from error


class _Parser:
    """Reads values one after the other; ``struct.error`` where the file ends before one does."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self._path, self._content, self._at = path, content, 0

    def header(self, kinds: Mapping[int, tuple[str, int, int]]) -> GGUFHeader:
        """``kinds``: name, elements and bytes of a block, by the type's number."""
        if self._content[: len(_MAGIC)] != _MAGIC:
            raise ValueError(f"{self._path} is not a GGUF file: it does not begin with {_MAGIC.decode()}")
        self._at = len(_MAGIC)
        version = self._one("I")
        if version not in _VERSIONS:
            raise ValueError(
                f"{self._path} has version {version} of GGUF; versions {' and '.join(map(str, _VERSIONS))} of little "
                "endian are supported: convert it again"
            )
        num_tensors, num_entries = self._one("Q"), self._one("Q")
        if num_tensors > _MOST_TENSORS or num_entries > _MOST_ENTRIES:
            raise ValueError(f"it says that it has {num_tensors} tensors and {num_entries} entries")
        metadata = {self._string(): self._value(self._one("I")) for _ in range(num_entries)}
        found = [self._tensor(kinds) for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
            raise ValueError(f"general.alignment is {alignment!r}")
        begin = -(-self._at // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, kind, offset, num_bytes in found:
            if name in tensors:
                raise ValueError(f"tensor {name} is there twice")
            if begin + offset + num_bytes > len(self._content):
                raise ValueError(f"tensor {name} ends behind the file's {len(self._content)} bytes")
            tensors[name] = GGUFTensor(shape, kind, begin + offset, num_bytes)
        return GGUFHeader(self._path, metadata, tensors)

    def _tensor(self, kinds: Mapping[int, tuple[str, int, int]]) -> tuple[str, tuple[int, ...], str, int, int]:
        name, dimensions = self._string(), self._one("I")
        if dimensions > _MOST_DIMENSIONS:
            raise ValueError(f"tensor {name} has {dimensions} dimensions")
        shape = tuple(reversed(self._many("Q", dimensions)))
        number, offset = self._one("I"), self._one("Q")
        if number not in kinds:
            raise ValueError(
                f"{self._path}: tensor {name} has the type {number}, which the installed package gguf does not know: "
                f"{install('gguf', options='-U')}, or convert the model to another type"
            )
        kind, elements, num_bytes = kinds[number]
        if shape and shape[-1] % elements:
            raise ValueError(f"tensor {name} of type {kind} has rows of {shape[-1]}, no multiple of {elements}")
        return name, shape, kind, offset, math.prod(shape) // elements * num_bytes

    def _one(self, letter: str) -> Any:
        return self._many(letter, 1)[0]

    def _many(self, letter: str, count: int) -> tuple[Any, ...]:
        if count * struct.calcsize(letter) > len(self._content) - self._at:
            raise ValueError(f"it ends after {len(self._content)} bytes, within its header")
        values = struct.unpack_from(f"<{count}{letter}", self._content, self._at)
        self._at += count * struct.calcsize(f"<{letter}")
        return values

    def _string(self) -> str:
        size = self._one("Q")
        if size > len(self._content) - self._at:
            raise ValueError(f"it ends after {len(self._content)} bytes, within its header")
        self._at += size
        return self._content[self._at - size : self._at].decode("utf-8", "replace")

    def _value(self, kind: int) -> Any:
        if kind == _FLOAT:
            return float(f"{self._one('f'):.7g}")  # the number that was meant: 1e-05, not 9.999999747378752e-06
        if kind in _SCALARS:
            return self._one(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise ValueError(f"an entry has a value of the unknown type {kind}")
        of, count = self._one("I"), self._one("Q")
        if of in _SCALARS:
            return list(self._many(_SCALARS[of], count))
        if of != _STRING or count > len(self._content) - self._at:
            raise ValueError(f"an entry has an array of {count} values of type {of}")
        return self._strings(count)

    def _strings(self, count: int) -> list[str]:
        """As :meth:`_string`, so many times: vocabularies have 400,000 strings, with their merges."""
        content, at, found = self._content, self._at, []
        unpack, size_of = struct.Struct("<Q").unpack_from, len(self._content)
        for _ in range(count):
            begin = at + 8
            at = begin + unpack(content, at)[0]
            if at > size_of:
                raise ValueError(f"it ends after {size_of} bytes, within its header")
            found.append(content[begin:at].decode("utf-8", "replace"))
        self._at = at
        return found

"""The files of a checkpoint: which there are, what their headers say, and one tensor at a time from them.

Headers are read without the data, and tensors are memory maps of an open file: what the process holds of a file is the
pages that it has touched, and closing the file gives those back. (PyTorch files from before version 1.6 are not zip
archives, cannot be mapped and are read whole.) PyTorch files are unpickled by torch's restricted unpickler, which
builds tensors and calls nothing else.
"""

import math
import pickle
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from tritonllm.models.checkpoint import read_json
from tritonllm.models.gguf.header import is_gguf, shards
from tritonllm.models.gguf.tensors import GGUFTensors

# An index and the single file, by the load format that asks for them; "auto" reads the first kind that is there.
FILES = {
    "safetensors": ("model.safetensors.index.json", "model.safetensors"),
    "pt": ("pytorch_model.bin.index.json", "pytorch_model.bin"),
}

BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16}  # of an element, for types that are weights as they are
# Types that parts of narrow weights have (tritonllm.models.formats).
_NARROW = {"F8_E4M3": 8, "F8_E8M0": 8, "I8": 8, "U8": 8, "I32": 32, "I64": 64}
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_ZIP = b"PK\x03\x04"
# What torch's unpickler raises where bytes of a file are wrong or missing.
_DAMAGE = (
    RuntimeError,
    OSError,
    EOFError,
    ValueError,
    LookupError,
    AttributeError,
    TypeError,
    AssertionError,
    struct.error,
)


@dataclass(frozen=True)
class StoredTensor:
    """What is known of a tensor before it is read.

    Attributes:
        shape: the tensor's shape.
        dtype: as safetensors calls it.
        path: file that holds it; ``None`` for one in memory.
    """

    shape: tuple[int, ...]
    dtype: str
    path: Path | None = None

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * (BITS | _NARROW)[self.dtype] // 8


class TensorFile(Protocol):
    """An open file of tensors."""

    def headers(self) -> dict[str, StoredTensor]:
        """The header of every tensor by its name, in the order of the file."""

    def get(self, name: str) -> torch.Tensor:
        """A tensor, to be let go before the file is closed."""

    def window(self, name: str, index: tuple[int | slice, ...]) -> torch.Tensor:
        """What ``tensor[index]`` is of it; nothing else of it is read."""


class _SafetensorsFile:
    def __init__(self, path: Path, file: Any) -> None:
        self._path = path
        self._file = file

    def headers(self) -> dict[str, StoredTensor]:
        slices = {name: self._file.get_slice(name) for name in self._file.keys()}  # noqa: SIM118 (not a mapping)
        return {
            name: StoredTensor(tuple(header.get_shape()), header.get_dtype(), self._path)
            for name, header in slices.items()
        }

    def get(self, name: str) -> torch.Tensor:
        return self._file.get_tensor(name)

    def window(self, name: str, index: tuple[int | slice, ...]) -> torch.Tensor:
        return self._file.get_slice(name)[index] if index else self._file.get_tensor(name)


class _PytorchFile:
    def __init__(self, path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        self._path = path
        self._tensors = tensors

    def headers(self) -> dict[str, StoredTensor]:
        return {name: describe(tensor, self._path) for name, tensor in self._tensors.items()}

    def get(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def window(self, name: str, index: tuple[int | slice, ...]) -> torch.Tensor:
        return self._tensors[name][index]


class _GGUFFile:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = GGUFTensors(path)
        self.get, self.window = self._file.get, self._file.window

    def headers(self) -> dict[str, StoredTensor]:
        return {name: StoredTensor(shape, code, self._path) for name, (shape, code) in self._file.headers().items()}


def describe(tensor: torch.Tensor, path: Path | None = None) -> StoredTensor:
    """What the header of a file would say."""
    code = str(tensor.dtype).removeprefix("torch.")
    if tensor.layout is torch.strided:
        return StoredTensor(tuple(tensor.shape), _CODES.get(tensor.dtype, code), path)
    return StoredTensor(tuple(tensor.shape), f"{tensor.layout} {code}", path)


@contextmanager
def open_tensors(path: Path) -> Iterator[TensorFile]:
    """Open one file.

    Raises:
        ValueError: it is damaged, a PyTorch file that holds more than tensors, or a GGUF file that is not supported.
    """
    if is_gguf(path):
        yield _GGUFFile(path)
        return
    if path.suffix == ".safetensors":
        try:
            file = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{path} is not a complete safetensors file ({error}); it may be truncated: download it again"
            ) from error
        with file:
            yield _SafetensorsFile(path, file)
        return
    tensors = _load_pytorch(path)
    try:
        yield _PytorchFile(path, tensors)
    finally:
        tensors.clear()


def _load_pytorch(path: Path) -> dict[str, torch.Tensor]:
    try:
        with path.open("rb") as file:
            is_zip = file.read(len(_ZIP)) == _ZIP
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} is damaged or holds more than tensors, and code in a file is never run: download it again, or "
            "convert it to safetensors where you trust it"
        ) from error
    except _DAMAGE as error:
        what = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"{path} is not a complete PyTorch file ({what}); download it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a dictionary of tensors, got {type(content).__name__}")
    for name, tensor in content.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{path} must hold tensors by name, but {name!r} is {type(tensor).__name__}")
    return content


def weight_files(folder: Path, load_format: str = "auto", *, single_first: bool = False) -> list[Path]:
    """The files that make up the checkpoint: those an index names, or the single one.

    Args:
        folder: the folder, or one of a model's GGUF files.
        load_format: ``safetensors``, ``pt``, or ``auto`` for the first of them that is there.
        single_first: where there are both, the single file counts and the index is not read, as in transformers.

    Raises:
        ValueError: there are none, one is absent, or the index cannot be read.
    """
    if is_gguf(folder):
        if load_format != "auto":
            raise ValueError(f"load_format={load_format!r}: {folder} is a GGUF file: leave load_format out")
        return shards(folder)
    wanted = list(FILES.values()) if load_format == "auto" else [FILES[load_format]]
    for index, single in wanted:
        has_single = (folder / single).exists()
        if (folder / index).exists() and not (single_first and has_single):
            return _indexed(folder / index)
        if has_single:
            return [folder / single]
    expected = ", or ".join(f"{single}, or {index} with the files it names" for index, single in wanted)
    raise ValueError(f"{folder} has no weights for load_format={load_format!r}: expected {expected}")


def _indexed(index: Path) -> list[Path]:
    home = read_json(index).get("weight_map")
    if not isinstance(home, dict) or not all(isinstance(file, str) for file in home.values()):
        raise ValueError(f"{index} does not say where the tensors are; download it again")
    files = [index.parent / name for name in sorted(set(home.values()))]
    for file in files:
        if not file.exists():
            raise ValueError(f"{file}, named by {index.name}, does not exist; download the missing file")
    return files


def stored_tensors(folder: Path, load_format: str = "auto", *, single_first: bool = False) -> dict[str, StoredTensor]:
    """What the files' headers say: file after file, each in its own order.

    Arguments are those of :func:`weight_files`.

    Raises:
        ValueError: as :func:`weight_files` and :func:`open_tensors`; a tensor in two files.
    """
    stored: dict[str, StoredTensor] = {}
    for path in weight_files(folder, load_format, single_first=single_first):
        with open_tensors(path) as file:
            for name, tensor in file.headers().items():
                if name in stored:
                    raise ValueError(f"tensor {name} is in both {stored[name].path} and {path}")
                stored[name] = tensor
    return stored


def read(file: TensorFile, name: str, part: tuple[int, int, int] | None = None) -> torch.Tensor:
    """A tensor of an open file.

    Args:
        part: dimension, first and last (exclusive) element; ``None`` for all of it.
    """
    if part is None:
        return file.get(name)
    axis, begin, end = part
    return file.window(name, (*[slice(None)] * axis, slice(begin, end)))

"""A safetensors file that is written tensor by tensor: the header first, then each tensor when it is there.

The library's own function needs all tensors of a file at once. The file (Hugging Face, "safetensors format") is eight
bytes with the length of the header, the header in JSON, and the tensors' bytes without gaps. Types with larger elements
come first, so that every element lies at a multiple of its size, as readers that map the file need it.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from tritonllm.models.tensor_files import DTYPES, StoredTensor, describe

_ALIGNMENT = 8  # of the first tensor


class TensorWriter:
    """A file of tensors that are known by type and shape before they are there. Use it in a ``with`` block.

    Args:
        path: the file, which is overwritten.
        headers: what will be written, by name.

    Raises:
        ValueError: a type that safetensors cannot have here; and where the block ends, a tensor that was not written.
    """

    def __init__(self, path: Path, headers: Mapping[str, StoredTensor]) -> None:
        for name, header in headers.items():
            if header.dtype not in DTYPES:
                raise ValueError(f"tensor {name} is {header.dtype}, not one of {', '.join(DTYPES)}")
        self._headers, self._missing, begin = headers, set(headers), 0
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for name in sorted(headers, key=lambda name: (-DTYPES[headers[name].dtype].itemsize, name)):
            size = math.prod(headers[name].shape) * DTYPES[headers[name].dtype].itemsize
            places = [begin, begin + size]
            entries[name] = {
                "dtype": headers[name].dtype,
                "shape": list(headers[name].shape),
                "data_offsets": places,
            }
            begin += size
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self._begins = {name: 8 + len(text) + entries[name]["data_offsets"][0] for name in headers}
        self.num_bytes = begin
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor to its place; in any order."""
        header, found = self._headers[name], describe(tensor)
        assert (found.dtype, found.shape) == (header.dtype, header.shape), name
        self._file.seek(self._begins[name])
        self._file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
        self._missing.remove(name)

    def __enter__(self) -> "TensorWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()
        if kind is None and self._missing:
            raise ValueError(f"tensor {min(self._missing)} was not written")

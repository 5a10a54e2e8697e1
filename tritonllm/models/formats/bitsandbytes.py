"""Checkpoints of bitsandbytes: 4 bits (NF4 and FP4), and int8.

- 4 bits (Dettmers et al., "QLoRA", 2023): ``X.weight`` uint8 ``[N * K / 2, 1]``, the weight row after row, the first of
  two in the high half of a byte; ``X.weight.quant_map`` float32 ``[16]``, what each number stands for;
  ``X.weight.absmax``, a scale for each run of elements (64 by default), float32, or uint8 with ``nested_quant_map``,
  ``nested_absmax`` and an offset (double quantization); ``X.weight.quant_state.bitsandbytes__nf4``, the bytes of a JSON
  object with the weight's shape and the sizes of runs.
- int8 (Dettmers et al., "LLM.int8()", 2022): ``X.weight`` int8 ``[N, K]``, ``X.SCB`` float32 ``[N]``, scales times 127.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tritonllm.kernels.dense.weight import Groups
from tritonllm.models.formats.bits import nibbles
from tritonllm.models.formats.joining import Headers, bad
from tritonllm.models.formats.narrow_tensor import NarrowTensor, Parts
from tritonllm.models.formats.piece import NarrowPiece, cut_out
from tritonllm.models.formats.row_major import RowMajor
from tritonllm.models.tensor_files import StoredTensor

NAME = "bitsandbytes"
KINDS = ("nf4", "fp4")
_STATE = ".quant_state.bitsandbytes__"


@dataclass(frozen=True)
class _FourBits:
    """A scheme of numbers of 4 bits that lie in one row, with a scale for each run of elements.

    Attributes:
        name: what messages call it.
        size: N and K.
        run: how many elements share a scale.
        nested_run: how many scales share a scale of their own; 0: they have none.
        offset: what is added to scales that have one.
    """

    name: str
    size: tuple[int, int]
    run: int
    nested_run: int
    offset: float

    def piece(self, parts: Parts, expert: int | None, rows: range, columns: range) -> NarrowPiece:
        """As :class:`~tritonllm.models.formats.narrow_tensor.Scheme` says."""
        assert expert is None
        n, k = self.size
        begin, end = rows.start * k, rows.stop * k
        read = nibbles(parts("numbers", slice(begin // 2, -(-end // 2))).flatten(), high_first=True)
        numbers = read[begin % 2 :][: end - begin].view(len(rows), k)[:, columns.start : columns.stop]
        scales, values = self._scales(parts), parts("values").float()
        if k % self.run == 0:
            scales = scales.view(n, k // self.run)
            return cut_out(numbers, scales, Groups(1, self.run), rows, columns, values=values)
        places = torch.arange(begin, end, device=scales.device).view(len(rows), k)[:, columns.start : columns.stop]
        return NarrowPiece(numbers, scales[places // self.run], Groups(1, 1), values=values)

    def _scales(self, parts: Parts) -> torch.Tensor:
        scales = parts("scales")
        if not self.nested_run:
            return scales.float()
        outer = parts("nested scales").float().repeat_interleave(self.nested_run)[: len(scales)]
        return parts("nested values").float()[scales.int()] * outer + self.offset


class BitsAndBytes:
    """The narrow weights of a checkpoint of bitsandbytes; tensors say which have 4 bits, and which 8."""

    def claim(self, name: str, tensor: StoredTensor, headers: Headers) -> tuple[str, NarrowTensor] | None:
        """As :class:`~tritonllm.models.formats.joining.CheckpointFormat` says."""
        if not name.endswith(".weight") or len(tensor.shape) != 2 or tensor.dtype not in ("U8", "I8"):
            return None
        return name, _eight_bits(name, tensor, headers) if tensor.dtype == "I8" else _four_bits(name, tensor, headers)


def _eight_bits(name: str, tensor: StoredTensor, headers: Headers) -> NarrowTensor:
    module, (n, k) = name.removesuffix("weight"), tensor.shape
    parts = {"numbers": (name, tensor)}
    parts["scales"] = headers.part(name, NAME, f"{module}SCB", ["F32", "F16", "BF16"], [(n,)])
    layout = f"{module}weight_format"
    if layout in headers.stored:
        parts["layout"] = headers.part(name, NAME, layout, ["U8"], [(), (1,)])
        if int(headers.read(layout)) != 0:
            raise bad(tensor, name, f"lies in the order {int(headers.read(layout))} of {layout}; supported: 0, by rows")
    return NarrowTensor((n, k), RowMajor(NAME, (n, k), Groups(), times=1 / 127), parts)


def _four_bits(name: str, tensor: StoredTensor, headers: Headers) -> NarrowTensor:
    kind = next((kind for kind in KINDS if f"{name}{_STATE}{kind}" in headers.stored), KINDS[0])
    state_name = f"{name}{_STATE}{kind}"
    if state_name not in headers.stored:
        raise bad(tensor, name, f"is {NAME} and needs {state_name}, which is missing")
    state = _state(state_name, headers.read(state_name))
    (n, k), run = state["shape"], state["blocksize"]
    count, nested = -(-n * k // run), state.get("nested_blocksize", 0)
    parts = {"numbers": (name, tensor)}
    if -(-n * k // 2) != tensor.shape[0] * tensor.shape[1] or tensor.shape[1] != 1:
        raise bad(tensor, name, f"does not hold the {[n, k]} of {state_name}, two numbers to a byte")
    parts["scales"] = headers.part(name, NAME, f"{name}.absmax", ["U8" if nested else "F32"], [(count,)])
    parts["values"] = headers.part(name, NAME, f"{name}.quant_map", ["F32"], [(16,)])
    if nested:
        outer = -(-count // nested)
        parts["nested scales"] = headers.part(name, NAME, f"{name}.nested_absmax", ["F32"], [(outer,)])
        parts["nested values"] = headers.part(name, NAME, f"{name}.nested_quant_map", ["F32"], [(256,)])
    parts["state"] = state_name, headers.stored[state_name]
    scheme = _FourBits(NAME, (n, k), run, nested, float(state.get("nested_offset", 0.0)))
    return NarrowTensor((n, k), scheme, parts)


def _state(name: str, content: torch.Tensor) -> dict[str, Any]:
    """What the JSON of a weight says."""
    try:
        state = json.loads(bytes(content.flatten().tolist()))
        sizes = [state["blocksize"], state.get("nested_blocksize", 1), *state["shape"]]
        offset = state.get("nested_offset", 0.0)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"tensor {name} must be the bytes of a JSON object with blocksize and shape") from error
    good = len(state["shape"]) == 2 and isinstance(offset, int | float)
    if not good or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ValueError(f"tensor {name} must give two sizes and lengths of runs above 0, got {state}")
    return state


def bitsandbytes(config: Mapping[str, Any]) -> BitsAndBytes:
    """The format of ``"quant_method": "bitsandbytes"``.

    Raises:
        ValueError: the weights are stored in another way.
    """
    storage = config.get("bnb_4bit_quant_storage") or "uint8"
    if storage != "uint8":
        raise ValueError(
            f"config.json: quantization_config ({NAME}): bnb_4bit_quant_storage {storage!r} is not supported; "
            "supported: uint8"
        )
    return BitsAndBytes()

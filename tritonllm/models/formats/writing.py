"""Weights and ``quantization_config`` of a checkpoint of compressed-tensors, as this package writes it.

The names of tensors, and how they lie, are those of :mod:`tritonllm.models.formats.compressed_tensors`, which reads
what is written here. Numbers are those of :func:`tritonllm.kernels.quantize_weight`, with which a model is made narrow
when it is loaded; those of MXFP4 are :func:`tritonllm.models.formats.mxfp4.quantize_mxfp4`'s.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tritonllm.kernels import quantize_weight, widen_weight
from tritonllm.kernels.dense.narrow import unpack_nibbles
from tritonllm.kernels.dense.weight import FP8, INT4, INT8, Groups
from tritonllm.models.formats.bits import pack_words
from tritonllm.models.formats.compressed_tensors import NAME
from tritonllm.models.formats.mxfp4 import COLUMNS, quantize_mxfp4
from tritonllm.models.tensor_files import StoredTensor

Parts = dict[str, torch.Tensor]
Headers = dict[str, StoredTensor]
_PIECE = 1 << 20  # elements that are made narrow at a time, each with some 30 bytes beside the result


def _bytes_of(format: str) -> Callable[[torch.Tensor, int], Parts]:
    def rows(weight: torch.Tensor, group_size: int) -> Parts:
        narrow = quantize_weight(weight, format)
        assert narrow.scales is not None
        return {"weight": narrow.data, "weight_scale": narrow.scales}

    return rows


def _nibbles_of(weight: torch.Tensor, group_size: int) -> Parts:
    groups = Groups(1, group_size)
    narrow = quantize_weight(weight, INT4, groups)
    assert narrow.scales is not None
    return {"weight_packed": pack_words(unpack_nibbles(narrow.data, groups), 4), "weight_scale": narrow.scales}


def _rounded_to_nibbles(weight: torch.Tensor, group_size: int) -> torch.Tensor:
    return widen_weight(quantize_weight(weight, INT4, Groups(1, group_size)), torch.float32)


def _floats4_of(weight: torch.Tensor, group_size: int) -> Parts:
    return dict(zip(("weight_packed", "weight_scale"), quantize_mxfp4(weight), strict=True))


@dataclass(frozen=True, kw_only=True)
class WrittenFormat:
    """A format that is written.

    Attributes:
        layout: what compressed-tensors calls how the tensors lie.
        rows: makes rows of a weight ``[R, K]`` narrow: tensors ``[R, ...]``, by what follows the module's name.
        headers: the types and shapes of these, of a weight ``[N, K]`` with groups of so many columns.
        group_size: how many columns of a row share a scale, unless the user says otherwise; 0 for all of them.
        other_sizes: whether the user may choose another group size.
        weights: what the configuration says of weights, beside their groups.
        activations: what it says of activations, which products round so, in this engine those on a GPU.
        rounded: what a weight ``[N, K]`` is when it is read again, float32; ``None`` for formats of bytes and of
            floats, whose numbers get no finer where a column is scaled (:mod:`tritonllm.models.activation_aware`).
    """

    layout: str
    rows: Callable[[torch.Tensor, int], Parts]
    headers: Callable[[int, int, int], Headers]
    group_size: int = 0
    other_sizes: bool = False
    weights: Mapping[str, Any]
    activations: Mapping[str, Any] | None = None
    rounded: Callable[[torch.Tensor, int], torch.Tensor] | None = None


def _of_elements(code: str) -> Callable[[int, int, int], Headers]:
    return lambda n, k, group_size: {
        "weight": StoredTensor((n, k), code),
        "weight_scale": StoredTensor((n, 1), "F32"),
    }


def _of_words(n: int, k: int, group_size: int) -> Headers:
    return {
        "weight_packed": StoredTensor((n, k // 8), "I32"),
        "weight_scale": StoredTensor((n, k // group_size), "F32"),
        "weight_shape": StoredTensor((2,), "I64"),
    }


def _of_floats4(n: int, k: int, group_size: int) -> Headers:
    return {
        "weight_packed": StoredTensor((n, k // 2), "U8"),
        "weight_scale": StoredTensor((n, k // group_size), "U8"),
    }


def _tokens(kind: str) -> dict[str, Any]:
    """Activations of 8 bits whose scale each token finds."""
    return {"num_bits": 8, "type": kind, "strategy": "token", "symmetric": True, "dynamic": True}


_E8M0 = {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
WRITTEN = {
    "fp8": WrittenFormat(
        layout="float-quantized",
        rows=_bytes_of(FP8),
        headers=_of_elements("F8_E4M3"),
        weights={"num_bits": 8, "type": "float", "strategy": "channel"},
        activations=_tokens("float"),
    ),
    "int8": WrittenFormat(
        layout="int-quantized",
        rows=_bytes_of(INT8),
        headers=_of_elements("I8"),
        weights={"num_bits": 8, "type": "int", "strategy": "channel"},
        activations=_tokens("int"),
    ),
    "w4a16": WrittenFormat(
        layout="pack-quantized",
        rows=_nibbles_of,
        headers=_of_words,
        group_size=128,
        other_sizes=True,
        weights={"num_bits": 4, "type": "int", "strategy": "group"},
        rounded=_rounded_to_nibbles,
    ),
    "mxfp4": WrittenFormat(
        layout="mxfp4-pack-quantized",
        rows=_floats4_of,
        headers=_of_floats4,
        group_size=COLUMNS,
        weights={"num_bits": 4, "type": "float", "strategy": "group", **_E8M0},
    ),
}


def narrow_parts(weight: torch.Tensor, form: WrittenFormat, group_size: int) -> Parts:
    """The tensors of a weight ``[N, K]``, by what follows the module's name, as :attr:`WrittenFormat.headers` says.

    Args:
        weight: floating point, K in whole groups. It is made narrow some rows at a time.

    Raises:
        ValueError: a value is NaN or infinite.
    """
    n, k = weight.shape
    pieces = [
        form.rows((rows.float() if rows.dtype == torch.float64 else rows).contiguous(), group_size)
        for rows in weight.split(max(1, _PIECE // max(1, k)))
    ]
    parts = {end: torch.cat([piece[end] for piece in pieces]) for end in pieces[0]}
    if "weight_shape" in form.headers(n, k, group_size):
        parts["weight_shape"] = torch.tensor([n, k])
    return parts


def quantization_config(form: WrittenFormat, group_size: int, ignore: Iterable[str]) -> dict[str, Any]:
    """What ``config.json`` says of the weights.

    Args:
        ignore: modules whose weights are not narrow.
    """
    weights = {**form.weights, "symmetric": True, "dynamic": False, "group_size": group_size or None}
    group = {
        "targets": ["Linear"],
        "format": form.layout,
        "weights": weights,
        "input_activations": None if form.activations is None else dict(form.activations),
        "output_activations": None,
    }
    return {
        "quant_method": NAME,
        "format": form.layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
        "kv_cache_scheme": None,
    }

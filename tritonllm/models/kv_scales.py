"""The scales of a narrow cache that a checkpoint has: two numbers for each layer, measured when it was made.

A key is stored divided by its layer's ``k_scale``, a value by ``v_scale``, so that the largest that was measured is
about the largest number of float8. They are used where the cache is narrow, and read and checked anyway.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping

import torch

from tritonllm.layers.metadata import UNSCALED, KVScales
from tritonllm.models.tensor_files import StoredTensor

# vLLM reads them under these names, too; the second is that of older files of compressed-tensors.
_NAMES = (
    re.compile(r"(?:^|\.)(\d+)\.(?:\w+\.)*(k|v|kv)_scale$"),
    re.compile(r"(?:^|\.)(\d+)\.(?:\w+\.)*(k|v)_proj\.output_scale$"),
)
# Of what is not rounded here, or not with zero points: what is divided may lie anywhere beside 0.
_OTHERS = re.compile(r"(?:^|\.)\d+\.(?:\w+\.)*((q|prob|prob_output)_scale|(q|k|v|kv|prob)_zero_point)$")


def is_kv_scale(name: str) -> bool:
    """Whether a tensor of this name is a scale of the cache; or of queries or probabilities, which keep their dtype."""
    return _named(name) is not None or _OTHERS.search(name) is not None


def without_kv_scales(stored: Mapping[str, StoredTensor]) -> tuple[dict[str, StoredTensor], list[str]]:
    """The tensors of a checkpoint that are weights, and the names of the others."""
    weights = {name: tensor for name, tensor in stored.items() if not is_kv_scale(name)}
    return weights, [name for name in stored if name not in weights]


def kv_scales_of(names: Iterable[str], read: Callable[[str], torch.Tensor], layers: int) -> dict[int, KVScales]:
    """The scales of the layers that have some.

    Args:
        names: the names that :func:`without_kv_scales` gives.
        read: what gives a tensor by its name.
        layers: how many layers the model has; what comes behind them is no part of it.

    Raises:
        ValueError: a scale that is not positive, there twice, or without its partner; the message names it.
    """
    found: dict[tuple[int, str], tuple[str, float]] = {}
    for name in names:
        place = _named(name)
        if place is None or place[0] >= layers:
            continue
        layer, kinds = place
        for kind in kinds:
            if (layer, kind) in found:
                raise ValueError(f"tensors {found[layer, kind][0]} and {name} are two names of one")
            found[layer, kind] = name, kv_scale(name, read(name))
    for (layer, kind), (name, _) in found.items():
        if (layer, "v" if kind == "k" else "k") not in found:
            raise ValueError(f"tensor {name}: layer {layer} has no scale of its {'values' if kind == 'k' else 'keys'}")
    return {layer: KVScales(found[layer, "k"][1], found[layer, "v"][1]) for layer, kind in found if kind == "k"}


def kv_scale(name: str, tensor: torch.Tensor) -> float:
    """The number in a scale's tensor; of a scale for each head the largest, with which no head's numbers are too large.

    Raises:
        ValueError: it is not of positive numbers.
    """
    if not tensor.numel() or not tensor.is_floating_point():
        raise ValueError(f"tensor {name} must be a scale in floating point, got {tensor.dtype} {list(tensor.shape)}")
    for bound in (float(tensor.min()), float(tensor.max())):
        if not 0 < bound < math.inf:
            raise ValueError(f"tensor {name} must be positive and finite, got {bound}")
    return float(tensor.max())


def check_same_scale(name: str, tensor: torch.Tensor, scales: Mapping[int, KVScales]) -> None:
    """Check that a new scale is the one that the cache has: captured steps hold it as a number.

    Raises:
        ValueError: another number, or none.
    """
    place, number = _named(name), kv_scale(name, tensor)
    for kind in () if place is None else place[1]:
        current = UNSCALED if place is None else scales.get(place[0], UNSCALED)
        if number != (current.k_scale if kind == "k" else current.v_scale):
            raise ValueError(f"tensor {name}: scales of the cache stay as the engine was started with: start another")


def _named(name: str) -> tuple[int, str] | None:
    """The layer whose scale it is, and ``"k"``, ``"v"`` or, of both, ``"kv"``."""
    found = next((match for pattern in _NAMES if (match := pattern.search(name))), None)
    return None if found is None else (int(found[1]), found[2])

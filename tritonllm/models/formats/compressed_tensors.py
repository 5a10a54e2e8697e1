"""Checkpoints of compressed-tensors (LLM Compressor): W8A8, W8A16, W4A16, NVFP4 and MXFP4, mixed by module.

Of a module ``X``, by the ``format`` of its ``config_groups``:

- ``float-quantized``, ``int-quantized``, ``naive-quantized``: ``X.weight`` ``[N, K]``, float8_e4m3fn or int8;
- ``pack-quantized``: ``X.weight_packed`` int32 ``[N, ceil(K / (32 / bits))]``, each number plus half of the range, the
  first in the lowest bits; ``X.weight_shape`` (N and K);
- ``nvfp4-pack-quantized`` and ``mxfp4-pack-quantized``: ``X.weight_packed`` uint8 ``[N, K / 2]`` of 4-bit floats, the
  first in the low half.

``X.weight_scale`` is of the whole, of rows, of groups of a row, or of blocks: float; of NVFP4 float8 of 16 columns, to
be divided by ``X.weight_global_scale``; of MXFP4 powers of two (E8M0) of 32 columns. ``X.weight_zero_point`` is there
where it is not symmetric (of packed weights packed, too, along N), ``X.weight_g_idx`` where columns are grouped out of
order.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tritonllm.kernels.dense.weight import Groups
from tritonllm.models.formats.fp8 import two_sizes
from tritonllm.models.formats.joining import SCALE_TYPES, Headers, bad
from tritonllm.models.formats.narrow_tensor import NarrowTensor
from tritonllm.models.formats.row_major import ELEMENTS, FLOATS4, Packing, RowMajor, signed_words
from tritonllm.models.tensor_files import StoredTensor

NAME = "compressed-tensors"
FORMATS = (
    "float-quantized",
    "int-quantized",
    "naive-quantized",
    "pack-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mixed-precision",
    "dense",
)
_PACKED_BITS = (2, 4, 8)
_WHERE = f"config.json: quantization_config ({NAME})"


@dataclass(frozen=True)
class _Rule:
    """How the weights of some modules are narrow.

    Attributes:
        targets: names of modules, regular expressions of them behind ``re:``, or ``Linear`` for all.
        bits: how many bits a number has.
        columns: how many columns a group has; 0 for no groups.
        block: rows and columns of a block; ``None`` for no blocks.
        rounds_rows: products round their rows, too (``input_activations``).
    """

    targets: tuple[str, ...]
    bits: int
    columns: int
    block: tuple[int, int] | None
    rounds_rows: bool


@dataclass(frozen=True)
class CompressedTensors:
    """The narrow weights of a checkpoint of compressed-tensors.

    Attributes:
        rules: for modules that they target.
        ignore: modules that have 16-bit weights, spelled as targets.
    """

    rules: tuple[_Rule, ...]
    ignore: tuple[str, ...]

    def claim(self, name: str, tensor: StoredTensor, headers: Headers) -> tuple[str, NarrowTensor] | None:
        """As :class:`~tritonllm.models.formats.joining.CheckpointFormat` says."""
        stem, _, end = name.rpartition(".")
        plain = end == "weight" and tensor.dtype in ("F8_E4M3", "I8")
        if len(tensor.shape) != 2 or not (plain or (end == "weight_packed" and tensor.dtype in ("I32", "U8"))):
            return None
        rule = self._rule(name, tensor, stem)
        if plain:
            return f"{stem}.weight", _weight(
                name, tensor, headers, stem, rule, (tensor.shape[0], tensor.shape[1]), ELEMENTS
            )
        if tensor.dtype == "U8":
            return f"{stem}.weight", _floats4(name, tensor, headers, stem)
        packing = _packing(name, tensor, rule)
        shape = _shape(name, tensor, headers, f"{stem}.weight_shape", packing.unit)
        return f"{stem}.weight", _weight(name, tensor, headers, stem, rule, shape, packing)

    def _rule(self, name: str, tensor: StoredTensor, module: str) -> _Rule:
        if any(is_target(module, target) for target in self.ignore):
            raise bad(tensor, name, f"is narrow, but {_WHERE} ignores {module}")
        exact = lambda target: target == module  # noqa: E731
        pattern = lambda target: target.startswith("re:") and is_target(module, target)  # noqa: E731
        for fits in (exact, pattern, lambda target: target == "Linear"):
            for rule in self.rules:
                if any(map(fits, rule.targets)):
                    return rule
        if len(self.rules) != 1:  # names may begin otherwise than those of the class: one rule is for all
            raise bad(tensor, name, f"is narrow, but no group of {_WHERE} has {module} as a target")
        return self.rules[0]


def is_target(module: str, target: str) -> bool:
    """Whether a target, spelled as in a ``quantization_config``, is this module: its name, or behind ``re:`` a regular
    expression that its name begins with."""
    return bool(re.match(target[3:], module)) if target.startswith("re:") else target == module


def _packing(name: str, tensor: StoredTensor, rule: _Rule) -> Packing:
    if rule.bits not in _PACKED_BITS:
        known = ", ".join(map(str, _PACKED_BITS))
        raise bad(tensor, name, f"has {rule.bits} bits by {_WHERE}; supported in packed weights: {known}")
    return signed_words(rule.bits)


def _shape(name: str, tensor: StoredTensor, headers: Headers, shape_name: str, unit: int) -> tuple[int, int]:
    """N and K of a packed weight."""
    n, words = tensor.shape
    if shape_name not in headers.stored:
        return n, words * unit
    headers.part(name, NAME, shape_name, ["I64", "I32"], [(2,)])
    shape = tuple(headers.read(shape_name).tolist())
    if shape[0] != n or -(-shape[1] // unit) != words:
        raise bad(tensor, name, f"does not hold the {list(shape)} of {shape_name}, {unit} numbers to a word")
    return shape[0], shape[1]


def _weight(
    name: str,
    tensor: StoredTensor,
    headers: Headers,
    stem: str,
    rule: _Rule,
    shape: tuple[int, int],
    packing: Packing,
) -> NarrowTensor:
    """Integers or float8 with scales, and perhaps zero points and an order."""
    (n, k), parts = shape, {"numbers": (name, tensor)}
    parts["scales"], groups = headers.scales(
        *(name, NAME, f"{stem}.weight_scale", SCALE_TYPES, shape), block=rule.block, columns=rule.columns
    )
    zeros, order, zero_bits = f"{stem}.weight_zero_point", f"{stem}.weight_g_idx", 0
    if zeros in headers.stored:
        packed = packing is not ELEMENTS and headers.stored[zeros].dtype == "I32"
        down, across = groups.shape(n, k)
        zero_shape = (-(-down // packing.unit), across) if packed else parts["scales"][1].shape
        parts["zeros"] = headers.part(name, NAME, zeros, ["I32"] if packed else ["I8", "F8_E4M3"], [zero_shape])
        zero_bits = rule.bits if packed else 0
    if order in headers.stored:
        parts["order"] = headers.order(name, NAME, order, k, groups.shape(n, k)[1])
    if f"{stem}.weight_shape" in headers.stored:
        parts["shape"] = f"{stem}.weight_shape", headers.stored[f"{stem}.weight_shape"]
    scheme = RowMajor(NAME, (n, k), groups, packing, zero_bits, rounds_rows=rule.rounds_rows)
    return NarrowTensor((n, k), scheme, parts)


def _floats4(name: str, tensor: StoredTensor, headers: Headers, stem: str) -> NarrowTensor:
    """NVFP4, or MXFP4: their scales say which."""
    n, k = tensor.shape[0], 2 * tensor.shape[1]
    parts, scales = {"numbers": (name, tensor)}, f"{stem}.weight_scale"
    found = headers.stored.get(scales)
    columns = 32 if found is not None and found.dtype in ("U8", "F8_E8M0") else 16
    groups = Groups(1, columns)
    types = ["U8", "F8_E8M0"] if columns == 32 else ["F8_E4M3"]
    parts["scales"] = headers.part(name, NAME, scales, types, [groups.shape(n, k)])
    if columns == 16:
        parts["divisor"] = headers.part(name, NAME, f"{stem}.weight_global_scale", ["F32"], [(), (1,)])
    return NarrowTensor((n, k), RowMajor(NAME, (n, k), groups, FLOATS4), parts)


def compressed_tensors(config: Mapping[str, Any]) -> CompressedTensors:
    """The format of ``"quant_method": "compressed-tensors"``.

    Raises:
        ValueError: a format that is not supported, or a bad field.
    """
    groups = config.get("config_groups") or {}
    if not isinstance(groups, Mapping):
        raise ValueError(f"{_WHERE}: config_groups must be an object, got {groups!r}")
    sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
    formats = [config.get("format"), *(group.get("format") for group in groups.values())]
    for form in (*formats, sparsity):
        if form is not None and form not in FORMATS:
            raise ValueError(f"{_WHERE}: format {form!r} is not supported; supported: {', '.join(FORMATS)}")
    rules = [_rule_of(group) for group in groups.values() if group.get("weights") is not None]
    return CompressedTensors(tuple(rules), tuple(config.get("ignore") or ()))


def _rule_of(group: Mapping[str, Any]) -> _Rule:
    weights, targets = group["weights"], group.get("targets") or []
    bits, columns = weights.get("num_bits", 8), weights.get("group_size") or 0
    if not isinstance(bits, int) or not isinstance(columns, int):
        raise ValueError(f"{_WHERE}: num_bits and group_size must be integers, got {bits!r} and {columns!r}")
    block = two_sizes(weights.get("block_structure"), "block_structure")
    return _Rule(tuple(targets), bits, max(columns, 0), block, group.get("input_activations") is not None)

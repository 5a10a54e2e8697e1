"""GPTQ (Frantar et al., 2022), as AutoGPTQ, GPTQModel and AutoRound store it.

Of a module ``X`` with a weight ``[N, K]``: ``X.qweight`` int32 ``[K * bits / 32, N]``, down each column a stream of
bits, the lowest of a word first (3 bits: 32 numbers in 3 words); ``X.scales`` ``[groups, N]``; ``X.qzeros`` int32
``[groups, N * bits / 32]``, packed along N, in the format ``gptq`` minus 1, in ``gptq_v2`` as they are; ``X.g_idx``
int32 ``[K]``, the group of each column: with ``desc_act``, groups are not in their order.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tritonllm.models.formats.column_major import ColumnMajor
from tritonllm.models.formats.joining import SCALE_TYPES, Headers, bad
from tritonllm.models.formats.narrow_tensor import NarrowTensor
from tritonllm.models.tensor_files import StoredTensor

NAME = "gptq"
BITS = (2, 3, 4, 8)
ZEROS_MINUS = {"gptq": 1, "gptq_v2": 0}  # by checkpoint_format
_PACKINGS = ("auto_round:auto_gptq", "auto_round:gptq", "auto_gptq", "gptq")  # of AutoRound
_WHERE = "config.json: quantization_config"


@dataclass(frozen=True)
class _Sizes:
    """What is said of modules.

    Attributes:
        bits: how many bits a number has.
        group_size: how many columns share a scale; -1 for all.
    """

    bits: int
    group_size: int


@dataclass(frozen=True)
class Gptq:
    """The narrow weights of a checkpoint of GPTQ.

    Attributes:
        sizes: bits and group size of most modules.
        minus: zero points are stored minus this.
        out_of_order: groups are, so the group of each column must be there.
        rules: regular expressions of modules with other sizes, or (``None``) with 16-bit weights; the first one counts.
    """

    sizes: _Sizes
    minus: int
    out_of_order: bool = False
    rules: tuple[tuple[str, _Sizes | None], ...] = ()

    def claim(self, name: str, tensor: StoredTensor, headers: Headers) -> tuple[str, NarrowTensor] | None:
        """As :class:`~tritonllm.models.formats.joining.CheckpointFormat` says."""
        module, _, end = name.rpartition(".")
        if end != "qweight" or len(tensor.shape) != 2:
            return None
        sizes = next((sizes for rule, sizes in self.rules if re.match(rule, module)), self.sizes)
        if sizes is None:
            raise bad(tensor, name, f"is narrow, but a rule of {_WHERE} leaves {module} out")
        words, n = tensor.shape
        k = words * 32 // sizes.bits
        columns = max(sizes.group_size, 0)
        groups = -(-k // columns) if columns else 1
        if tensor.dtype != "I32" or words * 32 % sizes.bits or n * sizes.bits % 32:
            raise bad(tensor, name, f"({tensor.dtype}) does not hold numbers of {sizes.bits} bits in words of type I32")
        parts = {
            "numbers": (name, tensor),
            "scales": headers.part(name, NAME, f"{module}.scales", SCALE_TYPES, [(groups, n)]),
            "zeros": headers.part(name, NAME, f"{module}.qzeros", ["I32"], [(groups, n * sizes.bits // 32)]),
        }
        if self.out_of_order or f"{module}.g_idx" in headers.stored:
            parts["order"] = headers.order(name, NAME, f"{module}.g_idx", k, groups)
        scheme = ColumnMajor(NAME, sizes.bits, columns, minus=self.minus)
        return f"{module}.weight", NarrowTensor((n, k), scheme, parts)


def gptq(config: Mapping[str, Any]) -> Gptq:
    """The format of ``"quant_method": "gptq"``.

    Raises:
        ValueError: bits or a variant that are not supported, or a bad field.
    """
    form = str(config.get("checkpoint_format") or config.get("format") or "gptq")
    if form not in ZEROS_MINUS:
        raise ValueError(f"{_WHERE}: checkpoint_format {form!r} is not supported; supported: {', '.join(ZEROS_MINUS)}")
    sizes = _sizes({}, config)
    rules = [
        # "-:" before a pattern leaves modules out, "+:" and nothing change what is said of these
        (re.sub(r"^[+-]:", "", rule), None if rule.startswith("-:") else _sizes(config, others))
        for rule, others in (config.get("dynamic") or {}).items()
    ]
    return Gptq(sizes, ZEROS_MINUS[form], bool(config.get("desc_act")), tuple(rules))


def auto_round(config: Mapping[str, Any]) -> Gptq:
    """The format of ``"quant_method": "auto-round"``, where it packs as GPTQ does.

    Raises:
        ValueError: another packing, or a bad field.
    """
    packing = config.get("packing_format", _PACKINGS[0])
    if packing not in _PACKINGS:
        raise ValueError(f"{_WHERE}: packing_format {packing!r} is not supported; supported: {', '.join(_PACKINGS)}")
    rules = [(f"{module}$", _sizes(config, others)) for module, others in (config.get("extra_config") or {}).items()]
    return Gptq(_sizes({}, config), ZEROS_MINUS["gptq"], rules=tuple(rules))


def _sizes(general: Mapping[str, Any], special: Mapping[str, Any]) -> _Sizes:
    bits, group_size = (special.get(field, general.get(field)) for field in ("bits", "group_size"))
    if group_size is None:
        group_size = 128
    if bits not in BITS:
        raise ValueError(f"{_WHERE}: bits {bits!r} are not supported; supported: {', '.join(map(str, BITS))}")
    if not isinstance(group_size, int) or (group_size < 1 and group_size != -1):
        raise ValueError(f"{_WHERE}: group_size must be a number of columns, or -1 for all, got {group_size!r}")
    return _Sizes(bits, group_size)

"""AWQ (Lin et al., 2023), as AutoAWQ's version ``gemm`` stores it.

Of a module ``X`` with a weight ``[N, K]``: ``X.qweight`` int32 ``[K, N / 8]``, ``X.qzeros`` int32 ``[groups, N / 8]``
and ``X.scales`` ``[groups, N]``. Of eight numbers along N, a word has, from its lowest four bits on, number 0, 2, 4, 6,
1, 3, 5 and 7.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tritonllm.models.formats.column_major import ColumnMajor
from tritonllm.models.formats.joining import SCALE_TYPES, Headers, bad
from tritonllm.models.formats.narrow_tensor import NarrowTensor
from tritonllm.models.tensor_files import StoredTensor

NAME = "awq"
BITS = 4
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of the numbers in a word
_WHERE = f"config.json: quantization_config ({NAME})"


@dataclass(frozen=True)
class Awq:
    """The narrow weights of a checkpoint of AWQ.

    Attributes:
        group_size: how many columns share a scale; -1 for all.
    """

    group_size: int

    def claim(self, name: str, tensor: StoredTensor, headers: Headers) -> tuple[str, NarrowTensor] | None:
        """As :class:`~tritonllm.models.formats.joining.CheckpointFormat` says."""
        module, _, end = name.rpartition(".")
        if end != "qweight" or len(tensor.shape) != 2:
            return None
        if tensor.dtype != "I32":
            raise bad(tensor, name, f"is {tensor.dtype}; {NAME} has words of type I32")
        k, words = tensor.shape
        n, columns = words * 8, max(self.group_size, 0)
        groups = -(-k // columns) if columns else 1
        parts = {
            "numbers": (name, tensor),
            "scales": headers.part(name, NAME, f"{module}.scales", SCALE_TYPES, [(groups, n)]),
            "zeros": headers.part(name, NAME, f"{module}.qzeros", ["I32"], [(groups, words)]),
        }
        scheme = ColumnMajor(NAME, BITS, columns, along_rows=True, places=_PLACES)
        return f"{module}.weight", NarrowTensor((n, k), scheme, parts)


def awq(config: Mapping[str, Any]) -> Awq:
    """The format of ``"quant_method": "awq"``.

    Raises:
        ValueError: bits or a version that are not supported, or a bad field.
    """
    bits = config.get("bits", config.get("w_bit", BITS))
    group_size = config.get("group_size", config.get("q_group_size", 128))
    version = str(config.get("version") or config.get("format") or "gemm").lower()
    for field, value, known in (("bits", bits, BITS), ("version", version, "gemm")):
        if value != known:
            raise ValueError(f"{_WHERE}: {field} {value!r} is not supported; supported: {known}")
    if config.get("zero_point") is False:
        raise ValueError(f"{_WHERE}: zero_point false is not supported; supported: true")
    if not isinstance(group_size, int) or (group_size < 1 and group_size != -1):
        raise ValueError(f"{_WHERE}: group_size must be a number of columns, or -1 for all, got {group_size!r}")
    return Awq(group_size)

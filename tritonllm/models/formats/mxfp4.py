"""Weights stored as MXFP4 (OCP Microscaling Formats (MX) Specification v1.0): 4-bit floats in blocks of 32.

An element is E2M1 (section 5.3.3) and a block shares a scale in E8M0, a power of two (section 5.4.1).
``openai/gpt-oss`` stores its experts so: ``mlp.experts.gate_up_proj_blocks`` ``[E, 2I, hidden / 32, 16]``, the low half
of a byte first, and ``..._scales`` ``[E, 2I, hidden / 32]``; the same for ``down_proj``.
"""

from collections.abc import Mapping
from typing import Any

from tritonllm.kernels.dense.weight import Groups
from tritonllm.models.formats.joining import Headers, bad
from tritonllm.models.formats.narrow_tensor import NarrowTensor
from tritonllm.models.formats.row_major import BLOCKS, RowMajor
from tritonllm.models.tensor_files import StoredTensor

NAME = "MXFP4"
_BLOCKS, _SCALES, _BYTES = "_blocks", "_scales", 16


class Mxfp4:
    """Tensors ``X_blocks`` and ``X_scales`` are one tensor ``X``, with rows and columns the other way round."""

    def claim(self, name: str, tensor: StoredTensor, headers: Headers) -> tuple[str, NarrowTensor] | None:
        """As :class:`~tritonllm.models.formats.joining.CheckpointFormat` says."""
        if not name.endswith(_BLOCKS) or tensor.dtype != "U8" or len(tensor.shape) != 4:
            return None
        weight, (experts, n, groups, size) = name.removesuffix(_BLOCKS), tensor.shape
        if size != _BYTES:
            raise bad(tensor, name, f"is not {NAME}: that has {_BYTES} bytes in a block")
        scales = headers.part(name, NAME, weight + _SCALES, ["U8"], [(experts, n, groups)])
        scheme = RowMajor(NAME, (n, 32 * groups), Groups(1, 32), BLOCKS)
        parts = {"numbers": (name, tensor), "scales": scales}
        return weight, NarrowTensor((experts, 32 * groups, n), scheme, parts, turned=True)


def mxfp4(config: Mapping[str, Any]) -> Mxfp4:
    """The format of ``"quant_method": "mxfp4"``."""
    return Mxfp4()

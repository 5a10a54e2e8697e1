"""Weights stored as MXFP4 (OCP Microscaling Formats (MX) Specification v1.0): 4-bit floats in blocks of 32.

An element is E2M1 (section 5.3.3) and a block shares a scale in E8M0, a power of two (section 5.4.1).
``openai/gpt-oss`` stores its experts so: ``mlp.experts.gate_up_proj_blocks`` ``[E, 2I, hidden / 32, 16]``, the low half
of a byte first, and ``..._scales`` ``[E, 2I, hidden / 32]``; the same for ``down_proj``.
"""

from collections.abc import Mapping
from typing import Any

import torch

from tritonllm.kernels.dense.narrow import SMALLEST, e2m1_codes, e2m1_values
from tritonllm.kernels.dense.weight import Groups
from tritonllm.models.formats.joining import Headers, bad
from tritonllm.models.formats.narrow_tensor import NarrowTensor
from tritonllm.models.formats.row_major import BLOCKS, RowMajor
from tritonllm.models.tensor_files import StoredTensor

NAME = "MXFP4"
_BLOCKS, _SCALES, _BYTES = "_blocks", "_scales", 16
COLUMNS = 32  # of a block
_LARGEST_EXPONENT = 2  # of E2M1
_BIAS = 127  # of E8M0


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
        scheme = RowMajor(NAME, (n, COLUMNS * groups), Groups(1, COLUMNS), BLOCKS)
        parts = {"numbers": (name, tensor), "scales": scales}
        return weight, NarrowTensor((experts, COLUMNS * groups, n), scheme, parts, turned=True)


def mxfp4(config: Mapping[str, Any]) -> Mxfp4:
    """The format of ``"quant_method": "mxfp4"``."""
    return Mxfp4()


def quantize_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight as 4-bit floats with a power of two for each 32 columns.

    The specification's exponent (section 6.3: the largest magnitude's, less 2) cuts off magnitudes above 6 times the
    scale. Of it and the next one a block takes that which leaves the smaller sum of squared errors.

    Args:
        weight: ``[N, K]`` float16, bfloat16 or float32, finite; K a multiple of 32.

    Returns:
        uint8 ``[N, K / 2]``, two numbers to a byte, the first in the low half, and uint8 ``[N, K / 32]``, exponents
        plus 127.
    """
    blocks = weight.float().unflatten(-1, (-1, COLUMNS))
    _, exponent = torch.frexp(blocks.abs().amax(-1).clamp(min=SMALLEST))
    least = exponent - 1 - _LARGEST_EXPONENT
    values, tries = e2m1_values(weight.device), []
    for exponents in (least, least + 1):
        scales = torch.ldexp(torch.ones_like(blocks[..., 0]), exponents)[..., None]
        codes = e2m1_codes(blocks / scales)
        tries.append((codes, exponents, (values[codes.int()] * scales - blocks).square().sum(-1)))
    (codes, exponents, error), (others, greater, error_of_others) = tries
    better = error_of_others < error
    codes = torch.where(better[..., None], others, codes).flatten(-2)
    exponents = torch.where(better, greater, exponents) + _BIAS
    return codes[..., ::2] | codes[..., 1::2] << 4, exponents.to(torch.uint8)

"""Weights stored as MXFP4 (OCP Microscaling Formats (MX) Specification v1.0): 4-bit floats in blocks of 32.

An element is E2M1 (sign, two bits of exponent, one of mantissa; section 5.3.3) and a block shares a scale in E8M0, a
power of two (section 5.4.1). ``openai/gpt-oss`` stores its experts so: ``mlp.experts.gate_up_proj_blocks``
``[E, 2I, hidden / 32, 16]`` and ``..._scales`` ``[E, 2I, hidden / 32]``; the same for ``down_proj``.
"""

import math

import torch

from tritonllm.kernels.runtime.checks import FLOATS, check_tensor, require

BLOCK_BYTES = 16  # 32 elements
SCALE_BIAS = 127
SCALE_NAN = 255

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_PIECE = 1 << 20  # bytes of blocks in work at a time


def _pairs(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``[256]``: the two elements of each byte, low nibble first, packed in one integer: half the time of a row."""
    values = (*_MAGNITUDES, *(-m for m in _MAGNITUDES))
    pairs = torch.tensor([(values[byte & 15], values[byte >> 4]) for byte in range(256)], dtype=dtype, device=device)
    return pairs.view(torch.int32 if pairs.itemsize == 2 else torch.int64).flatten()


def _powers(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``[256]``: the factor of each scale. All are exact in float32 and bfloat16, but few in float16."""
    powers = [2.0 ** (scale - SCALE_BIAS) for scale in range(SCALE_NAN)]
    return torch.tensor([*powers, math.nan], dtype=torch.float32 if dtype is torch.float16 else dtype, device=device)


def dequantize_mxfp4(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values of an MXFP4 tensor, on its device.

    Nothing is rounded in float32 and bfloat16 (a product beyond their range is infinite); float16 rounds once. Blocks
    are converted 1 MiB at a time, or one index of the leading dimension if that is more; beyond the result that takes
    4 times their memory (float16: 17 times).

    Args:
        blocks: ``[..., G, 16]`` uint8, two elements a byte, the low nibble first.
        scales: ``[..., G]`` uint8: ``2^(scale - 127)``; 255 is NaN.
        dtype: the dtype of the result: float16, bfloat16 or float32.

    Returns:
        ``[..., G * 32]``.

    Raises:
        ValueError: a wrong shape, dtype or device, named in the message.
    """
    require(dtype in FLOATS, f"dtype must be float16, bfloat16 or float32, got {dtype}")
    require(blocks.dim() >= 2, f"blocks must have shape [..., G, {BLOCK_BYTES}], got {list(blocks.shape)}")
    check_tensor("blocks", blocks, [None] * (blocks.dim() - 1) + [BLOCK_BYTES], dtype=torch.uint8)
    check_tensor("scales", scales, blocks.shape[:-1], dtype=torch.uint8, like=blocks)
    out = torch.empty((*scales.shape, 2 * BLOCK_BYTES), dtype=dtype, device=blocks.device)
    pairs, powers = _pairs(dtype, blocks.device), _powers(dtype, blocks.device)
    step = max(1, _PIECE * len(blocks) // max(1, blocks.numel()))
    for piece, scale, values in zip(blocks.split(step), scales.split(step), out.split(step), strict=True):
        torch.index_select(pairs, 0, piece.flatten().int(), out=values.view(pairs.dtype).view(-1))
        values.mul_(powers[scale.int()].unsqueeze(-1))
    return out.flatten(-2)

"""Descriptors of what Hopper's bulk copy engine fetches: boxes of 16-bit elements, 64 of them a row."""

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

BLOCK_K = 64  # 128 bytes: a row of a tile is one line of the copy engine's swizzle


def descriptor(t: torch.Tensor, shape: list[int], strides: list[int], box: list[int]) -> TensorDescriptor:
    """The descriptor of a 16-bit tensor, for copies of boxes whose rows are 64 elements long."""
    return TensorDescriptor(t, shape, strides, box, gl.NVMMASharedLayout(128, 16, rank=len(box)))


def weight_descriptor(weight: torch.Tensor, rows: int, gated: bool) -> TensorDescriptor:
    """The descriptor of a weight that is copied ``rows`` rows at a time; of a gated one 8 rows of gate and 8 of up in
    turn."""
    (n, k), step = weight.shape, weight.stride(0)
    if not gated:
        return descriptor(weight, [n, k], [step, 1], [rows, BLOCK_K])
    return descriptor(weight, [n // 16, 2, 8, k], [8 * step, n // 2 * step, step, 1], [rows // 16, 2, 8, BLOCK_K])

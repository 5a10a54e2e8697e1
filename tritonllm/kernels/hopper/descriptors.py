"""Descriptors of what Hopper's bulk copy engine fetches: boxes whose rows are 128 bytes, 64 elements of 16 bits."""

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

LINE = 128  # bytes: a row of a tile is one line of the copy engine's swizzle
BLOCK_K = LINE // 2  # of 16-bit elements


def descriptor(t: torch.Tensor, shape: list[int], strides: list[int], box: list[int]) -> TensorDescriptor:
    """The descriptor of a tensor of 16 or 8 bits an element, for copies of boxes whose rows are a line long."""
    return TensorDescriptor(t, shape, strides, box, gl.NVMMASharedLayout(LINE, 8 * t.element_size(), rank=len(box)))


def weight_descriptor(weight: torch.Tensor, rows: int, gated: bool) -> TensorDescriptor:
    """The descriptor of a weight that is copied ``rows`` rows at a time; of a gated one 8 rows of gate and 8 of up in
    turn."""
    (n, k), step, line = weight.shape, weight.stride(0), LINE // weight.element_size()
    if not gated:
        return descriptor(weight, [n, k], [step, 1], [rows, line])
    return descriptor(weight, [n // 16, 2, 8, k], [8 * step, n // 2 * step, step, 1], [rows // 16, 2, 8, line])

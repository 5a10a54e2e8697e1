"""Tensors whose parts lie 2^30 elements apart, so that of three the last has an offset of 2^31.

On a CPU they take no memory: what nobody touches of an allocation is not there. On a GPU a tensor takes 8 GiB.
"""

import torch

APART = 2**30


def far_apart(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The 16-bit values of ``x``, with ``APART`` elements from each of dimension ``dim`` to the next; others compact.

    There is room before them, where an offset that wrapped around would lead to zeros instead of out of the tensor.
    """
    assert x.itemsize == 2 and x.shape[dim] == 3 and dim % x.dim() != x.dim() - 1
    sizes = [size for at, size in enumerate(x.shape) if at != dim % x.dim()]
    compact = list(torch.empty(sizes, device="meta").stride())
    strides = [*compact[: dim % x.dim()], APART, *compact[dim % x.dim() :]]
    room = torch.empty(2 * APART + 2 * APART + x.numel(), dtype=x.dtype, device=x.device)
    y = room.as_strided(x.shape, strides, 2 * APART)
    y.copy_(x)
    return y

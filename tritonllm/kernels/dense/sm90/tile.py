"""What the Hopper kernels ask of their operands, and how they are cut; without Gluon, which not every GPU has."""

from typing import NamedTuple

import torch

from tritonllm.kernels.runtime.checks import aligned


class HopperTile(NamedTuple):
    """What a program of the Hopper kernel computes at a time, and takes of a processor.

    Attributes:
        block_m: rows of ``x``, 64 or 128.
        block_n: rows of the weight: a power of two or the sum of two, in multiples of 16 if gated.
        stages: steps of 64 along K that are under way; 3 or more, and even for 64 rows of ``x``.
        registers: how many registers a thread has, on average.
        prefetch: whether to ask for the rest of the weights, too, before the kernel before has ended.
    """

    block_m: int
    block_n: int
    stages: int
    registers: int
    prefetch: bool


def fits(x: torch.Tensor, weight: torch.Tensor, gated: bool) -> bool:
    """16-bit operands that the copy engine can fetch; halves of a gated weight in whole turns of 8 rows."""
    if x.dtype == torch.float32 or x.shape[1] == 0 or (gated and weight.shape[0] % 16):
        return False
    return all(t.stride(0) % 8 == 0 for t in (x, weight)) and aligned(x, weight)

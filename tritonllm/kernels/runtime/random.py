"""Counter-based random numbers: what a request draws depends on nothing but who draws it and what for.

Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011) turns a 128-bit
counter and a 64-bit key into random words. The key is the request's seed; the counter is (index, low half of the step,
high half of the step, stream). There is no state, so neither the batch, nor the place in it, nor the launch
configuration can change a draw, and the torch code below repeats the words bit by bit.
"""

import torch
import triton
import triton.language as tl

# What a draw is for. The streams of one seed and step are independent.
STREAM_GROUP = tl.constexpr(0)  # which group of tokens
STREAM_TOKEN = tl.constexpr(1)  # which token of the group
STREAM_ACCEPT = tl.constexpr(2)  # whether a draft token is accepted
STREAM_RESIDUAL_GROUP = tl.constexpr(3)  # the same two choices in place of a rejected draft token
STREAM_RESIDUAL_TOKEN = tl.constexpr(4)

_LOG2E = tl.constexpr(1.4426950408889634)
_TO_UNIT = tl.constexpr((1 - 2**-23) / 2**32)  # the largest words round to 2^32 and still stay below 1
_HALF_STEP = tl.constexpr(2**-33)
_SMALL = tl.constexpr(2**-5)


@triton.jit
def uniform(b_index, seed, step, stream):
    """One float32 in (0, 1) for each int32 index; ``seed`` and ``step`` are int64 scalars, ``stream`` any integer.

    Small values have a float's full resolution, down to 2^-33; values near 1 are multiples of 2^-24.
    """
    step_low, step_high = step.to(tl.uint32), (step >> 32).to(tl.uint32)
    stream = (tl.zeros((), tl.int32) + stream).to(tl.uint32)
    b_word, _, _, _ = tl.philox(seed, b_index.to(tl.uint32), step_low, step_high, stream)
    return b_word.to(tl.float32) * _TO_UNIT + _HALF_STEP


@triton.jit
def gumbel(b_index, seed, step, stream):
    """Gumbel noise for weights in units of log 2, up to a constant: -log2(-log2(1 - u)).

    The largest noise comes from the smallest u, where a float is finest. With -log2(-log2(u)) the likely winners would
    be known to 24 bits, and tokens of probability 1e-7 never drawn.
    """
    b_u = uniform(b_index, seed, step, stream)
    # 1 - u drops digits of a small u: there the series of log2(1 - u), exact to 2e-7 of its value
    b_series = b_u * (_LOG2E + b_u * (_LOG2E / 2 + b_u * (_LOG2E / 3 + b_u * (_LOG2E / 4))))
    return -tl.log2(tl.where(b_u < _SMALL, b_series, -tl.log2(1.0 - b_u)))


def philox_ref(
    index: torch.Tensor, seeds: torch.Tensor, steps: torch.Tensor, stream: torch.Tensor | int
) -> torch.Tensor:
    """The first word of Philox4x32-10 in torch integers.

    Args:
        index: int64, below 2^32; broadcasts with ``seeds`` and ``steps``, int64, of as many dimensions.

    Returns:
        int64 values in [0, 2^32), of the broadcast shape.
    """
    low = 0xFFFFFFFF
    zeros = torch.zeros_like(index + seeds + steps)
    even = torch.stack([zeros + index, zeros + ((steps >> 32) & low)])  # words 0 and 2
    odd = torch.stack([zeros + steps, zeros + stream])  # words 1 and 3; only their low halves count
    keys = torch.stack([seeds, seeds >> 32])
    pair = (2, *[1] * zeros.dim())
    multipliers = torch.tensor([0xD2511F53, 0xCD9E8D57], device=index.device).view(pair)
    raises = torch.tensor([0x9E3779B9, 0xBB67AE85], device=index.device).view(pair)
    for turn in range(10):
        product = (even * multipliers).flip(0)  # wraps, but the bits are those of the unsigned product
        even = ((product >> 32) ^ odd).bitwise_xor_(keys + turn * raises).bitwise_and_(low)
        odd = product
    return even[0]


def uniform_ref(
    index: torch.Tensor, seeds: torch.Tensor, steps: torch.Tensor, stream: torch.Tensor | int
) -> torch.Tensor:
    """:func:`uniform` in torch, for arguments that broadcast."""
    return philox_ref(index, seeds, steps, stream).float() * _TO_UNIT.value + _HALF_STEP.value


def gumbel_ref(
    index: torch.Tensor, seeds: torch.Tensor, steps: torch.Tensor, stream: torch.Tensor | int
) -> torch.Tensor:
    """:func:`gumbel` in torch, for arguments that broadcast."""
    u = uniform_ref(index, seeds, steps, stream)
    return -torch.log2(torch.log1p(-u) * -_LOG2E.value)

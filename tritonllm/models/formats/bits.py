"""Small integers that lie several to a byte or to a word."""

import math

import torch

# E2M1 (OCP Microscaling Formats (MX) Specification v1.0, section 5.3.3): sign, two bits of exponent, one of mantissa.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e2m1_values(device: torch.device) -> torch.Tensor:
    """``[16]`` float32: what the bits of a 4-bit float stand for."""
    return torch.tensor([*_MAGNITUDES, *(-m for m in _MAGNITUDES)], dtype=torch.float32, device=device)


def e2m1_codes(values: torch.Tensor) -> torch.Tensor:
    """uint8 from 0 to 15: the bits of the 4-bit float nearest to each value (float32), of two the even one, at most 6
    in magnitude."""
    sizes = values.abs().clamp(max=_MAGNITUDES[-1])
    octave = (sizes >= 2).float() + (sizes >= 4)  # in which steps are 0.5, 1 and 2, and codes even where these are
    codes = torch.round(sizes * torch.exp2(1 - octave)) + 2 * octave
    return (codes + 8 * (values < 0)).to(torch.uint8)


def nibbles(packed: torch.Tensor, *, high_first: bool = False) -> torch.Tensor:
    """``[..., 2 * B]`` uint8 of bytes ``[..., B]``, by default the low half of a byte first."""
    low, high = packed & 15, packed >> 4
    return torch.stack((high, low) if high_first else (low, high), -1).flatten(-2)


def unpack(words: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Integers of ``bits`` bits from 32-bit words along a dimension: one stream of bits, the lowest of a word first.

    Args:
        words: int32, a number of words along ``dim`` in which the integers fill the last one.
        bits: 1 to 8.

    Returns:
        uint8, with ``32 / bits`` times as many elements along ``dim``.
    """
    words = words.movedim(dim, 0)
    count, each = 32 // math.gcd(bits, 32), bits // math.gcd(bits, 32)  # integers that fill so many words
    words = words.unflatten(0, (-1, each))
    out = torch.empty((len(words), count, *words.shape[2:]), dtype=torch.uint8, device=words.device)
    for i in range(count):
        word, shift = divmod(i * bits, 32)
        here = min(bits, 32 - shift)
        value = (words[:, word] >> shift) & ((1 << here) - 1)
        if here < bits:
            value |= (words[:, word + 1] & ((1 << (bits - here)) - 1)) << here
        out[:, i] = value
    return out.flatten(0, 1).movedim(0, dim)


def pack_words(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """What :func:`unpack` makes integers of, along the last dimension.

    Args:
        numbers: uint8 ``[..., K]`` below ``2**bits``, that fill whole words.
        bits: 1, 2, 4 or 8.

    Returns:
        int32 ``[..., K * bits / 32]``.
    """
    places = torch.arange(0, 32, bits, dtype=torch.int32, device=numbers.device)
    return (numbers.unflatten(-1, (-1, len(places))).int() << places).sum(-1).int()

"""Small integers in bytes and words."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tritonllm.kernels.dense.narrow import e2m1_codes, e2m1_values
from tritonllm.models.formats.bits import nibbles, pack_words, unpack


@given(bits=st.integers(1, 8), dim=st.sampled_from([0, 1, -1]), data=st.data())
def test_a_stream_of_bits(bits, dim, data):
    """32 integers are ``bits`` words: integer i has bits ``i * bits`` to ``(i + 1) * bits`` of a long number."""
    streams, times = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    numbers = torch.randint(1 << bits, (streams, 32 * times))
    words = []
    for stream in numbers.tolist():
        long = sum(value << bits * i for i, value in enumerate(stream))
        words.append([(long >> 32 * i & 0xFFFFFFFF) for i in range(bits * times)])
    packed = torch.tensor(words)
    packed = torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()
    turned = (packed, numbers) if dim else (packed.T, numbers.T)
    assert torch.equal(unpack(turned[0], bits, dim).long(), turned[1])


def test_halves_of_bytes():
    packed = torch.tensor([[0x21, 0x43]], dtype=torch.uint8)
    assert nibbles(packed).tolist() == [[1, 2, 3, 4]]
    assert nibbles(packed, high_first=True).tolist() == [[2, 1, 4, 3]]


def test_four_bit_floats():
    values = e2m1_values(torch.device("cpu"))
    assert values[:8].tolist() == [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert torch.equal(values[8:], -values[:8]) and bool(values[8:].signbit().all())


def test_the_nearest_four_bit_float():
    """Of two equally near the one whose code is even; beyond the largest, the largest."""
    values = e2m1_values(torch.device("cpu"))
    wanted = torch.cat([torch.arange(-448, 449) / 64, torch.tensor([100.0, -100.0, 0.24999, 5.0001])])
    distances = (wanted[:, None] - values[:8] * torch.where(wanted < 0, -1, 1)[:, None]).abs()
    nearest = distances == distances.amin(1, keepdim=True)
    codes = torch.where(
        nearest.sum(1) == 1, nearest.int().argmax(1), (nearest * (torch.arange(8) % 2 == 0)).int().argmax(1)
    )
    assert (nearest.sum(1) == 2).sum() == 14  # midpoints of both signs
    assert torch.equal(e2m1_codes(wanted), (codes + 8 * (wanted < 0)).to(torch.uint8))


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_words_are_read_as_they_were_packed(bits):
    numbers = torch.randint(1 << bits, (3, 64), dtype=torch.uint8)
    assert torch.equal(unpack(pack_words(numbers, bits), bits, -1), numbers)

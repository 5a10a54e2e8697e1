"""Small integers in bytes and words."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tritonllm.kernels.dense.narrow import e2m1_values
from tritonllm.models.formats.bits import nibbles, unpack


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

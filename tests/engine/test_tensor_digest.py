"""Equal bytes have equal digests wherever they are; others have others."""

import random

import numpy as np
import pytest
import torch

from tritonllm.engine.transfer import tensor_digest
from tritonllm.engine.transfer.tensor_digest import digest_of

WRAP = (1 << 64) - 1


def of(*tensors):
    return digest_of(iter(tensors))


def some_bytes(count, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8))


def mixed(word):
    """The same steps with Python's integers."""
    word ^= word >> 32
    word = word * (tensor_digest._FIRST & WRAP) & WRAP
    word ^= word >> 32
    word = word * (tensor_digest._SECOND & WRAP) & WRAP
    return word ^ word >> 29


def test_sums_are_those_of_integers_without_a_sign():
    words = some_bytes(8 * 50).view(torch.int64)
    first, second = tensor_digest._numbers(torch.device("cpu"))
    found = tensor_digest._sums(words[None], first, second)[0].tolist()
    one = two = 0
    for at, word in enumerate(words.tolist()):
        value = mixed((word & WRAP) ^ mixed(1 + at))
        one, two = one + value, two + value * (mixed(tensor_digest.ROW + 1 + at) | 1)
    assert [value & WRAP for value in found] == [one & WRAP, two & WRAP]


@pytest.mark.parametrize("row, rows", [(1, 1), (4, 1), (4, 3), (512, 64)])
def test_every_bit_and_every_place_counts(monkeypatch, row, rows):
    monkeypatch.setattr(tensor_digest, "ROW", row)
    monkeypatch.setattr(tensor_digest, "ROWS", rows)
    data = some_bytes(101)
    whole, seen = of(data), set()
    for at in range(data.numel()):
        for bit in range(8):
            data[at] ^= 1 << bit
            seen.add(of(data))
            data[at] ^= 1 << bit
    assert len(seen) == 8 * 101 and whole not in seen and of(data) == whole
    for at in range(0, 88, 8):  # neighbours that change places
        swapped = torch.cat([data[:at], data[at + 8 : at + 16], data[at : at + 8], data[at + 16 :]])
        assert of(swapped) != whole
    signs = data.clone()
    signs[7::8] ^= 128  # the upper bit of all words
    assert of(signs) != whole


def test_signs_of_two_places_count_in_each_sum():
    """The highest bit of a word is a float's sign. Each pair of 512 flips of it has first sums of its own."""
    words = torch.zeros(512, 512, dtype=torch.int64)
    words.fill_diagonal_(torch.iinfo(torch.int64).min)
    first, second = tensor_digest._numbers(torch.device("cpu"))
    changes = tensor_digest._sums(words, first, second) - tensor_digest._sums(torch.zeros_like(words), first, second)
    for change in changes.T:
        pairs = (change[:, None] + change)[torch.ones(512, 512, dtype=torch.bool).triu(1)]
        assert len(pairs.unique()) == len(pairs) and (pairs != 0).all()


def test_lengths_and_borders_count():
    nothing = torch.zeros(0, dtype=torch.uint8)
    zeros = [torch.zeros(count, dtype=torch.uint8) for count in (0, 1, 7, 8, 9, 8 * tensor_digest.ROW, 1 << 20)]
    assert len({of(one) for one in zeros}) == len(zeros)
    data = some_bytes(32)
    assert len({of(data), of(data[:16], data[16:]), of(data, nothing), of(nothing, data), of()}) == 5


def test_form_does_not_count():
    data = some_bytes(4 * 24).view(torch.float32).view(4, 6)
    assert of(data) == of(data.t().contiguous().t()) == of(data.view(-1).view(torch.bfloat16))
    apart = some_bytes(200)
    for offset in (1, 4, 8, 99):  # words that begin anywhere
        assert of(apart[offset : offset + 100]) == of(apart[offset : offset + 100].clone())
    assert of(torch.tensor(2.0)) == of(torch.tensor([2.0]))


def test_how_many_rows_at_a_time_does_not_count(monkeypatch):
    monkeypatch.setattr(tensor_digest, "ROW", 4)
    data = some_bytes(random.Random(1).randint(900, 1000))
    found = set()
    for rows in (1, 2, 7, 1000):
        first, second = tensor_digest._numbers(data.device)
        sums = [tensor_digest._sums(words, first, second) for words in tensor_digest._words(data, rows)]
        found.add(torch.cat(sums).numpy().tobytes())
    assert len(found) == 1


@pytest.mark.gpu
def test_a_gpu_finds_the_same():
    for count in (0, 1, 1000, 8 * tensor_digest.ROW, 50_000_003):
        data = some_bytes(count)
        assert of(data.cuda()) == of(data)
        assert of(data.cuda()[1:]) == of(data[1:])

import pytest
import torch
import triton
import triton.language as tl
from support.statistics import p_value

from tritonllm.kernels.runtime import random
from tritonllm.kernels.runtime.random import gumbel, gumbel_ref, philox_ref, uniform, uniform_ref


@triton.jit
def _draw_kernel(uniform_ptr, gumbel_ptr, seeds_ptr, steps_ptr, N: tl.constexpr, STREAM: tl.constexpr):
    row = tl.program_id(0)
    b_index = tl.arange(0, N)
    seed, step = tl.load(seeds_ptr + row), tl.load(steps_ptr + row)
    tl.store(uniform_ptr + row * N + b_index, uniform(b_index, seed, step, STREAM))
    tl.store(gumbel_ptr + row * N + b_index, gumbel(b_index, seed, step, STREAM))


def signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


@pytest.mark.parametrize(
    ("counter", "key", "word"),
    [
        ((0, 0, 0, 0), (0, 0), 0x6627E8D5),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, 0x408F276D),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), 0xD16CFE09),
    ],
)
def test_known_answers(counter, key, word):
    """The known-answer vectors that its authors publish with Philox4x32-10."""
    index, step_low, step_high, stream = counter
    seed, step = torch.tensor([signed(key[0] | key[1] << 32)]), torch.tensor([signed(step_low | step_high << 32)])
    assert philox_ref(torch.tensor([index]), seed, step, stream).item() == word


def test_kernel_repeats_reference(device):
    n, stream = 256, random.STREAM_RESIDUAL_TOKEN.value
    seeds = torch.tensor([0, 2**63 - 1, -(2**63), -123456789012345], device=device)
    steps = torch.tensor([0, -1, 5 << 33 | 1 << 31 | 77, 2**40], device=device)
    u, g = torch.empty(4, n, device=device), torch.empty(4, n, device=device)
    _draw_kernel[(4,)](u, g, seeds, steps, N=n, STREAM=stream)
    index = torch.arange(n, device=device)[None]
    # the same words; a GPU rounds the multiply-add to [0, 1) once, the reference twice
    wanted = uniform_ref(index, seeds[:, None], steps[:, None], stream)
    torch.testing.assert_close(u, wanted, rtol=2**-23, atol=0)
    torch.testing.assert_close(g, gumbel_ref(index, seeds[:, None], steps[:, None], stream), rtol=0, atol=4e-6)


def test_range(monkeypatch):
    """All words give values inside (0, 1) and finite noise; the likely winners are told apart finely."""
    words = torch.tensor([0, 1, 2, 1 << 31, (1 << 32) - 2, (1 << 32) - 1])
    monkeypatch.setattr(random, "philox_ref", lambda *_: words)
    u, g = uniform_ref(words, words, words, 0), gumbel_ref(words, words, words, 0)
    assert u.min() > 0 and u.max() < 1 and g.isfinite().all()
    torch.testing.assert_close(u[:3] * 2**32, torch.tensor([0.5, 1.5, 2.5]), rtol=1e-6, atol=0)
    torch.testing.assert_close(g[0], torch.tensor(33 - 0.5287664), rtol=1e-6, atol=0)  # -log2(2^-33 / ln 2)


def test_distribution():
    """Uniform values, and the Gumbel law of the noise: exp(-E) is uniform for E = ln 2 * 2^-g."""
    index, zero = torch.arange(200_000)[None], torch.zeros(1, 1, dtype=torch.int64)
    flat = torch.ones(100)
    for values in (
        uniform_ref(index, zero + 7, zero, 0),
        torch.exp(-0.6931471805599453 * torch.exp2(-gumbel_ref(index, zero + 8, zero, 0))),
    ):
        assert p_value(torch.histc(values, 100, 0, 1), flat) > 1e-3
        tail = values[values < 0.01] * 100  # also near 0, where the winners are
        assert p_value(torch.histc(tail, 20, 0, 1), torch.ones(20)) > 1e-3


@pytest.mark.parametrize(
    "neighbour", ["index", "seed", "step", "stream", "high half of the seed", "high half of the step"]
)
def test_neighbours_are_independent(neighbour):
    """Pairs of draws that differ by one in one argument fill the square evenly."""
    index = torch.arange(400)[None]
    seeds, steps = torch.arange(1000)[:, None] * 2, torch.zeros(1000, 1, dtype=torch.int64)
    first = uniform_ref(index * 2, seeds, steps, 0)
    second = {
        "index": lambda: uniform_ref(index * 2 + 1, seeds, steps, 0),
        "seed": lambda: uniform_ref(index * 2, seeds + 1, steps, 0),
        "step": lambda: uniform_ref(index * 2, seeds, steps + 1, 0),
        "stream": lambda: uniform_ref(index * 2, seeds, steps, 1),
        "high half of the seed": lambda: uniform_ref(index * 2, seeds + (1 << 32), steps, 0),
        "high half of the step": lambda: uniform_ref(index * 2, seeds, steps + (1 << 32), 0),
    }[neighbour]()
    cell = (first * 16).long() * 16 + (second * 16).long()
    assert p_value(torch.bincount(cell.flatten(), minlength=256), torch.ones(256)) > 1e-3

"""The Hopper kernel computes what the references do (`test_medium` tests when it is taken)."""

from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.compare import assert_close, poisoned, with_row_padding
from support.examples import examples

from tritonllm.kernels.dense import medium
from tritonllm.kernels.dense.linear import GATED
from tritonllm.kernels.dense.medium import (
    HopperTile,
    Unnormed,
    add_linear,
    add_linear_ref,
    linear_unnormed,
    linear_unnormed_ref,
)
from tritonllm.kernels.dense.sm90 import tiles as sm90

BF16, FP16 = torch.bfloat16, torch.float16
SUMS = [
    HopperTile(64, 16, 10, 80, True),
    HopperTile(64, 32, 4, 88, True),
    HopperTile(128, 64, 4, 88, True),
    HopperTile(128, 32, 3, 80, False),
]
SECONDS = [
    HopperTile(64, 96, 4, 88, True),
    HopperTile(64, 32, 4, 104, True),
    HopperTile(128, 64, 4, 88, True),
    HopperTile(128, 96, 4, 88, True),
    HopperTile(128, 48, 8, 104, False),
]


@contextmanager
def hopper(first=None, second=None):
    """Calls take the Hopper kernel, the first product and the second with such tiles; what they write is poisoned."""
    usual = medium.tile_of

    def tile_of(m, n, adds):
        return (first if adds else second) or usual(m, n, adds)

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with patch.object(medium, "takes", return_value=True), patch.object(medium, "tile_of", tile_of):
            yield
    finally:
        torch.use_deterministic_algorithms(before)


def check(device, m, n, k, rows, dtype, tiles, *, padding=0, bias=False, activation="silu", gated=True):
    """``stream[m, n] += x[m, k] @ ...``, then a product with ``rows`` rows; compared, and twice the same bits."""
    x = with_row_padding(torch.randn(m, k, device=device).to(dtype), padding)
    stream = with_row_padding(torch.randn(m, n, device=device).to(dtype), padding)
    first = with_row_padding((torch.randn(n, k, device=device) / k**0.5).to(dtype), padding)
    second = with_row_padding((torch.randn(rows, n, device=device) / n**0.5).to(dtype), padding)
    biases = [torch.randn(size, device=device).to(dtype) if bias else None for size in (n, rows)]
    exact = [None if b is None else b.float() for b in biases]
    norm = torch.randn(n, device=device), {"norm_eps": 1e-5, "norm_weight_offset": 0.5, "scale": 0.5}
    want, before = stream.float(), stream.clone()
    add_linear_ref(x.float(), first.float(), exact[0], want, norm[0], **norm[1])
    results = []
    for constant in (False, True):
        stream.copy_(before)
        with hopper(*tiles):
            left = add_linear(x, first, biases[0], stream, norm[0], **norm[1], constant_weight=constant)
            options = {"activation": activation, "gated": gated, "constant_weight": constant}
            results.append((stream.clone(), *left[:2], linear_unnormed(left, second, biases[1], **options)))
    assert all(torch.equal(*both) for both in zip(*results, strict=True))
    assert_close(stream, want)
    assert_close(left.scaled, stream.float() * (norm[0] + 0.5))
    assert_close(left.squares.sum(0), stream.float().square().sum(1), torch.float32)
    exact_left = Unnormed(left.scaled.float(), left.squares, left.eps)
    expected = linear_unnormed_ref(exact_left, second.float(), exact[1], activation=activation, gated=gated)
    assert_close(results[0][-1], expected, dtype)


@pytest.mark.gpu
@settings(max_examples=examples(8))  # each is two kernels to compile
@given(
    first=st.sampled_from(SUMS),
    second=st.sampled_from(SECONDS),
    m=st.integers(1, 300),
    k=st.integers(1, 50).map(lambda k: 8 * k),
    rows=st.integers(1, 20).map(lambda n: 16 * n),
    dtype=st.sampled_from([FP16, BF16]),
    bias=st.booleans(),
    activation=st.sampled_from([None, "silu", "gelu"]),
    gated=st.booleans(),
    padding=st.sampled_from([0, 8]),
)
def test_matches_reference(device, first, second, m, k, rows, dtype, bias, activation, gated, padding):
    gated = gated and activation in GATED
    more = {"padding": padding, "bias": bias, "activation": activation, "gated": gated}
    check(device, m, 1024, k, rows, dtype, (first, second), **more)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [65, 80, 128, 129, 192, 256])
@pytest.mark.parametrize(("n", "k", "rows"), [(1024, 2048, 6144), (1024, 3072, 4096)])
def test_real_shapes(device, m, n, k, rows):
    """Qwen3-0.6B's o with gate and up, down with q, k and v; the tiles that are used."""
    gated = rows == 6144
    check(device, m, n, k, rows, BF16, (), gated=gated, activation="silu" if gated else None)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "tiles",
    [
        (HopperTile(64, 64, 6, 80, True), HopperTile(64, 16, 8, 104, True)),
        (HopperTile(128, 64, 4, 88, True), HopperTile(128, 48, 4, 104, True)),
    ],
)
def test_more_tiles_than_programs(device, tiles):
    """Programs take several, and the stream has an odd size."""
    check(device, 800, 4096 + 8, 512, 6144 + 16, BF16, tiles)


@pytest.mark.gpu
def test_a_row_does_not_depend_on_the_others(device):
    """Bit for bit, also if another row is not finite, and in any number of rows that has the same tile."""
    x, weight = torch.randn(200, 512, device=device).to(BF16), torch.randn(1024, 512, device=device).to(BF16)
    stream, norm_weight = torch.randn(200, 1024, device=device).to(BF16), torch.ones(1024, device=device)
    second = torch.randn(4096 + 16, 1024, device=device).to(BF16)

    def run(rows):
        result = stream[:rows].clone()
        left = add_linear(x[:rows], weight, None, result, norm_weight)
        return result, linear_unnormed(left, second)

    with hopper(SUMS[0], SECONDS[2]):
        whole, some = run(200), run(77)
        x[0] = float("nan")
        third = run(200)
    for a, b, c in zip(whole, some, third, strict=True):
        assert torch.equal(a[:77], b) and c[0].isnan().all() and torch.equal(a[1:], c[1:])


@pytest.mark.gpu
@pytest.mark.parametrize("m", [100, 256])
def test_a_captured_chain_waits_for_what_it_reads(device, m):
    """Products that depend on each other and overwrite each other's inputs, 40 in a row and started early: the same
    bits as with a wait after each."""
    k = 1024
    ups = [torch.randn(4096, k, device=device).to(BF16) / 32 for _ in range(20)]
    downs = [torch.randn(k, 2048, device=device).to(BF16) / 64 for _ in range(20)]
    start, norm_weight = torch.randn(m, k, device=device).to(BF16), torch.ones(k, device=device)
    stream = start.clone()

    def chain(wait: bool) -> None:
        left = Unnormed(start, torch.ones(1, m, device=device), 0.0)
        for up, down in zip(ups, downs, strict=True):
            inner = linear_unnormed(left, up, activation="silu", gated=True, constant_weight=True)
            if wait:
                torch.cuda.synchronize()
            left = add_linear(inner, down, None, stream, norm_weight, constant_weight=True)
            if wait:
                torch.cuda.synchronize()

    chain(wait=True)
    expected = stream.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream.copy_(start)
        chain(wait=False)
    for _ in range(20):
        stream.copy_(poisoned(m, k, dtype=BF16, device=device))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(stream, expected)


@pytest.mark.gpu
def test_it_is_taken_on_hopper(device):
    """And nowhere else."""
    x, weight = torch.randn(100, 64, device=device).to(BF16), torch.randn(1024, 64, device=device).to(BF16)
    with patch.object(sm90, "launch", wraps=sm90.launch) as launch:
        add_linear(x, weight, None, torch.zeros(100, 1024, device=device).to(BF16), torch.ones(1024, device=device))
    assert launch.called == bool(medium.MEDIUM.own_rows(device))

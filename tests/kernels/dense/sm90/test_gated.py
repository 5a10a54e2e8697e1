"""The Hopper kernel of gated products: when it is taken, and that it computes what the reference does."""

from functools import partial
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.captured_chain import assert_waits_for_what_it_reads
from support.chips import chosen_for
from support.compare import assert_close, poisoned, with_row_padding
from support.examples import examples

from tritonllm.kernels import linear, linear_ref
from tritonllm.kernels.dense.linear import GATED, GATED_LINEAR
from tritonllm.kernels.dense.sm90 import gated as sm90

BF16, FP16 = torch.bfloat16, torch.float16


def make(m, i, k, dtype=BF16, device="cpu", padding=0):
    """``x`` and a weight for ``i`` columns of the result."""
    x, weight = torch.randn(m, k, device=device), torch.randn(2 * i, k, device=device) / k**0.5
    return with_row_padding(x.to(dtype), padding), with_row_padding(weight.to(dtype), padding)


def product(x, weight, bias=None, activation="silu"):
    """By the kernel, however few rows."""
    out = poisoned(len(x), len(weight) // 2, dtype=x.dtype, device=x.device)
    sm90.launch(x, weight, bias, out, activation)
    return out


def taken(x, weight, out):
    with chosen_for(90):
        return GATED_LINEAR.own(x.device, x, weight, out) is not None


@pytest.mark.parametrize(
    ("changes", "takes"),
    [
        ({}, True),
        ({"dtype": FP16}, True),
        ({"m": sm90.MIN_M - 1}, False),
        ({"dtype": torch.float32}, False),
        ({"out_dtype": torch.float32}, False),
        ({"k": 72}, True),
        ({"k": 68}, False),
        ({"k": 0}, False),
        ({"i": 8}, True),
        ({"i": 20}, False),
    ],
)
def test_shapes(changes, takes):
    m, i, k = (changes.get(name, size) for name, size in (("m", sm90.MIN_M), ("i", 64), ("k", 64)))
    dtype = changes.get("dtype", BF16)
    x, weight = torch.empty(m, k, dtype=dtype), torch.empty(2 * i, k, dtype=dtype)
    assert taken(x, weight, torch.empty(m, i, dtype=changes.get("out_dtype", dtype))) == takes


def test_layouts():
    """Addresses and strides that the copy engine needs, and a result without gaps."""
    (x, weight), out = make(sm90.MIN_M, 64, 64), torch.empty(sm90.MIN_M, 64, dtype=BF16)
    assert taken(with_row_padding(x, 8), with_row_padding(weight, 16), out)
    assert not taken(with_row_padding(x, 4), weight, out)
    assert not taken(x, with_row_padding(weight, 4), out)
    assert not taken(x, weight, with_row_padding(out, 8))
    shifted = torch.empty(weight.numel() + 1, dtype=BF16)[1:].view(weight.shape)
    assert taken(x, shifted, out) == (shifted.data_ptr() % 16 == 0)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(
    ("m", "gated", "hopper", "taken"),
    [(1025, True, True, True), (1024, True, True, False), (1025, False, True, False), (1025, True, False, False)],
)
def test_when_it_is_taken(device, m, gated, hopper, taken, add):
    """And what comes before and after it is done all the same."""
    x, weight = make(m, 8, 16, device=device)
    residual, norm_weight = torch.randn(m, 8 if gated else 16, device=device), torch.rand(16, device=device)
    options = {"norm_weight": norm_weight, "activation": "silu", "gated": gated}

    def stand_in(x, weight, bias, out, activation, constant_weight):
        linear_ref(x, weight, bias, activation=activation, gated=True, out=out)

    with (
        chosen_for(90 if hopper else 80),
        patch.object(sm90, "launch", side_effect=stand_in) as launch,
    ):
        out = linear(x, weight, **options, **({"residual": residual.clone(), "scale": 0.5} if add else {}))
    assert launch.called == taken
    exact = {"residual": residual.clone(), "scale": 0.5} if add else {}
    assert_close(out, linear_ref(x.float(), weight.float(), **options, **exact), BF16)


@pytest.mark.gpu
@settings(max_examples=examples(30))
@given(
    m=st.integers(1, 1500),
    i=st.integers(1, 90).map(lambda i: 8 * i),
    k=st.integers(1, 60).map(lambda k: 8 * k),
    dtype=st.sampled_from([FP16, BF16]),
    bias=st.booleans(),
    activation=st.sampled_from(GATED),
    padding=st.sampled_from([0, 8]),
    wide=st.booleans(),
)
def test_matches_reference(device, m, i, k, dtype, bias, activation, padding, wide):
    """Blocks of rows, tiles of the weight and steps along K that are not whole; fewer of them than stages."""
    x, weight = make(m, i, k, dtype, device, padding)
    b = torch.randn(2 * i, device=device).to(dtype) if bias else None
    exact = linear_ref(x.float(), weight.float(), b if b is None else b.float(), activation=activation, gated=True)
    with patch.object(sm90, "NARROW_WEIGHT", 0 if wide else sm90.NARROW_WEIGHT):
        out = product(x, weight, b, activation)
        assert torch.equal(out, product(x, weight, b, activation))
    assert_close(out, exact, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1025, 2049, 8192])
@pytest.mark.parametrize(("i", "k"), [(3072, 1024), (14336, 4096)])
def test_real_shapes(device, m, i, k):
    """Qwen3-0.6B's and Llama-3.1-8B's, asked for as a layer does: norms, and a stream to add to, are no obstacle."""
    x, weight = make(m, i, k, device=device)
    with patch.object(sm90, "launch", wraps=sm90.launch) as launch:
        out = linear(x, weight, activation="silu", gated=True)
        stream = torch.ones(m, i, device=device, dtype=BF16)
        linear(x, weight, activation="silu", gated=True, residual=stream, scale=0.5)
    assert launch.call_count == (2 if GATED_LINEAR.own_rows(device) else 0)
    exact = linear_ref(x.float(), weight.float(), activation="silu", gated=True)
    assert_close(out, exact)
    assert_close(stream, 1 + 0.5 * exact)


@pytest.mark.gpu
@pytest.mark.parametrize(("i", "k"), [(1000, 512), (6000, 1024)], ids=["narrow", "wide"])
def test_a_row_does_not_depend_on_the_others(device, i, k):
    """Bit for bit, also if another row is not finite, and in any number of rows."""
    x, weight = make(3000, i, k, device=device)
    whole, some = product(x, weight), product(x[:777], weight)
    x[0] = float("nan")
    third = product(x, weight)
    assert torch.equal(whole[:777], some) and third[0].isnan().all() and torch.equal(whole[1:], third[1:])


@pytest.mark.gpu
def test_offsets_beyond_int32(device):
    """A result of 2^31 elements and more: its last rows are right."""
    m, i = 2**17 + 300, 2**14
    x, weight = make(m, i, 64, device=device)
    out = product(x, weight)
    assert_close(out[-300:], linear_ref(x[-300:].float(), weight.float(), activation="silu", gated=True), BF16)


@pytest.mark.gpu
def test_a_captured_chain_waits_for_what_it_reads(device):
    """Norms and products that depend on each other and overwrite each other's inputs, 20 in a row and started early:
    the same bits as with a wait after each."""
    start = torch.randn(1500, 1024, device=device).to(BF16)
    weights = [make(1, 1024, 1024, device=device)[1] for _ in range(20)]
    options = {"norm_weight": torch.ones(1024, device=device), "activation": "gelu", "gated": True}
    places = [start.clone(), torch.empty_like(start)]

    def link(n: int) -> None:
        linear(places[n % 2], weights[n], **options, out=places[1 - n % 2], constant_weight=True)

    assert_waits_for_what_it_reads(start, places, [partial(link, n) for n in range(len(weights))])

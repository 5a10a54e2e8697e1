"""The Hopper kernel of 2 to 16 rows: when it is taken, and that it computes what the reference does."""

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
from tritonllm.kernels.dense import linear as dense_linear
from tritonllm.kernels.dense.invariant import SMALL
from tritonllm.kernels.dense.linear import ACTIVATIONS, GATED
from tritonllm.kernels.dense.sm90 import few
from tritonllm.kernels.runtime import tuning

BF16, FP16 = torch.bfloat16, torch.float16


def make(m, n, k, dtype=BF16, device="cpu", *, gated=False, padding=0, std=1.0):
    """``x`` and a weight for ``n`` columns of the result."""
    x = torch.randn(m, k, device=device) * std
    weight = torch.randn(2 * n if gated else n, k, device=device) / k**0.5
    return with_row_padding(x.to(dtype), padding), with_row_padding(weight.to(dtype), padding)


@pytest.fixture
def hopper():
    with chosen_for(90):
        yield


def taken(x, weight, norm_weight, together):
    return dense_linear.LINEAR.own(x.device, x, weight, norm_weight, together) is not None


@pytest.mark.parametrize(
    ("changes", "takes"),
    [
        ({}, True),
        ({"m": few.MIN_ROWS - 1}, False),
        ({"m": few.MAX_ROWS}, True),
        ({"m": few.MAX_ROWS + 1}, False),
        ({"m": 2}, False),
        ({"m": 2, "n": SMALL // 64 + 8}, True),
        ({"dtype": torch.float32}, False),
        ({"dtype": FP16}, True),
        ({"dtype": FP16, "norm": True}, False),
        ({"norm": True}, True),
        ({"k": 72}, False),
        ({"k": 16}, True),
        ({"k": few.MAX_K}, True),
        ({"k": few.MAX_K + 16}, False),
        ({"k": 0}, False),
        ({"together": few.LIGHT}, True),
        ({"together": few.LIGHT + 1}, False),
    ],
)
def test_what_it_takes(hopper, changes, takes):
    m, n, k = (changes.get(name, size) for name, size in (("m", 5), ("n", 64), ("k", 64)))
    dtype = changes.get("dtype", BF16)
    x, weight = torch.empty(m, k, dtype=dtype), torch.empty(n, k, dtype=dtype)
    norm = torch.ones(k, dtype=dtype) if changes.get("norm") else None
    assert taken(x, weight, norm, changes.get("together", 0)) == takes


def test_layouts(hopper):
    """Addresses and strides of 16 bytes."""
    x, weight = make(5, 64, 64)
    assert taken(with_row_padding(x, 8), with_row_padding(weight, 16), None, 0)
    assert not taken(with_row_padding(x, 4), weight, None, 0)
    assert not taken(x, with_row_padding(weight, 4), None, 0)
    shifted = torch.empty(weight.numel() + 1, dtype=BF16)[1:].view(weight.shape)
    assert taken(x, shifted, None, 0) == (shifted.data_ptr() % 16 == 0)


@pytest.mark.parametrize(("together", "taken"), [(0, True), (few.LIGHT, True), (few.LIGHT + 1, False)])
def test_a_layer_has_it_for_all_products_or_for_none(device, hopper, together, taken):
    x, weight = make(5, 24, 64, device=device)
    with (
        patch.object(few, "launch") as launch,
        tuning.override("linear", dense_linear.TORCH),
    ):
        linear(x, weight, together=together)
    assert launch.called == taken


def test_without_a_layer_four_of_the_weight_count(device, hopper):
    x = torch.empty(5, 2048, dtype=BF16, device=device)
    with patch.object(few, "launch") as launch:
        for rows, taken in ((few.LIGHT // 4 // 2048, True), (few.LIGHT // 4 // 2048 + 8, False)):
            weight = torch.empty(rows, 2048, dtype=BF16, device=device)
            with tuning.override("linear", dense_linear.TORCH):
                linear(x, weight)
            assert launch.called == taken
            launch.reset_mock()


@pytest.mark.parametrize("n", [8, 1024, 4096, 9728, 151936])
@pytest.mark.parametrize("k", [16, 1024, 8192, 9728, few.MAX_K])
@pytest.mark.parametrize("gated", ["yes", "no"])
def test_configurations(n, k, gated):
    """Registers hold what is under way, and the unrolled turns stay few."""
    config = few.default_config(n, k, gated)
    per_turn = config["COLUMNS"] // 8 * config["STEP"] // 8 * (2 if gated == "yes" else 1)
    assert per_turn * config["DEPTH"] <= 128
    assert -(-k // (config["num_warps"] * config["STEP"])) <= few.MAX_TURNS and config["num_warps"] <= 8


@pytest.mark.gpu
@settings(max_examples=examples(60))
@given(
    m=st.integers(2, 16),
    n=st.integers(1, 300),
    k=st.integers(1, 200).map(lambda k: 16 * k),
    dtype=st.sampled_from([FP16, BF16]),
    out_dtype=st.sampled_from([None, torch.float32]),
    std=st.sampled_from([1e-3, 1.0, 50.0]),
    bias=st.booleans(),
    norm=st.sampled_from([None, BF16, torch.float32]),
    offset=st.sampled_from([0.0, 1.0]),
    activation=st.sampled_from([None, *ACTIVATIONS]),
    gated=st.booleans(),
    add=st.booleans(),
    padding=st.sampled_from([0, 8]),
    constant=st.booleans(),
)
def test_matches_reference(
    device, m, n, k, dtype, out_dtype, std, bias, norm, offset, activation, gated, add, padding, constant
):
    """Columns and turns along K that are not whole, with whatever is fused; the same bits each time."""
    gated = gated and activation in GATED
    norm = None if dtype == FP16 else norm
    x, weight = make(m, n, k, dtype, device, gated=gated, padding=padding, std=std)
    fused = {
        "bias": torch.randn(len(weight), device=device).to(dtype) if bias else None,
        "norm_weight": None if norm is None else torch.randn(k, device=device).to(norm),
        "norm_weight_offset": offset if norm else 0.0,
        "activation": activation,
        "gated": gated,
    }
    exact = {name: value.float() if isinstance(value, torch.Tensor) else value for name, value in fused.items()}
    before = torch.randn(m, n, device=device)
    scaled = {"scale": 0.5} if add else {}

    def product():
        out = with_row_padding(poisoned(m, n, dtype=out_dtype or dtype, device=device), padding)
        where = {"residual": out.copy_(before), **scaled} if add else {"out": out}
        with patch.object(few, "SMALL", 0):  # 2 rows, too
            return linear(x, weight, **fused, **where, constant_weight=constant)

    with patch.object(few, "launch", wraps=few.launch) as launch:
        out = product()
        assert torch.equal(out, product())
    assert launch.call_count == (2 if dense_linear.LINEAR.own_rows(device) else 0)
    if add:
        exact |= {"residual": before.to(out.dtype).float(), **scaled}
    assert_close(out, linear_ref(x.float(), weight.float(), **exact), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [2, 8, 9, 16])
@pytest.mark.parametrize(("n", "k", "gated"), [(4096, 1024, False), (3072, 1024, True), (2560, 9728, False)])
def test_a_row_does_not_depend_on_the_others(device, m, n, k, gated):
    """Bit for bit, also if another row is not finite; of up to 8 rows and of more, whatever their number."""
    x, weight = make(16, n, k, device=device, gated=gated)
    options = {"norm_weight": torch.ones(k, device=device, dtype=BF16), "gated": gated}
    options["activation"] = "silu" if gated else None
    with patch.object(few, "SMALL", 0), patch.object(few, "launch", wraps=few.launch) as launch:
        whole = linear(x, weight, **options)
        some = linear(x[:m], weight, **options)
        x[0] = float("nan")
        third = linear(x, weight, **options)
    assert launch.call_count == (3 if dense_linear.LINEAR.own_rows(device) else 0)
    assert torch.equal(some, whole[:m])
    assert third[0].isnan().all() and torch.equal(whole[1:], third[1:])


@pytest.mark.gpu
def test_offsets_beyond_int32(device):
    """A weight of 2^31 elements and more: its last rows are right."""
    n, k = 2**21 + 8, 1024
    weight = torch.zeros(n, k, device=device, dtype=BF16)
    weight[-64:] = torch.randn(64, k, device=device)
    x = torch.randn(5, k, device=device).to(BF16)
    with patch.object(few, "launch", wraps=few.launch) as launch:
        out = linear(x, weight, together=1)
    assert launch.called == bool(dense_linear.LINEAR.own_rows(device))
    assert_close(out[:, -64:], x.float() @ weight[-64:].float().T, BF16)
    assert not out[:, :-64].any()


@pytest.mark.gpu
def test_a_captured_chain_waits_for_what_it_reads(device):
    """Norms and products that depend on each other and overwrite each other's inputs, 40 in a row and started early:
    the same bits as with a wait after each."""
    start = torch.randn(7, 1024, device=device).to(BF16)
    weights = [make(1, 1024, 1024, device=device, gated=n % 2 == 1)[1] for n in range(40)]
    norm = torch.ones(1024, device=device, dtype=BF16)
    places = [start.clone(), torch.empty_like(start)]

    def link(n: int) -> None:
        options = {"activation": "gelu", "gated": True} if n % 2 else {}
        more = {"out": places[1 - n % 2], "constant_weight": True}
        linear(places[n % 2], weights[n], norm_weight=norm, **options, **more)

    assert_waits_for_what_it_reads(start, places, [partial(link, n) for n in range(len(weights))])

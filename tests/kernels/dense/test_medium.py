"""Two products with the norm between them left to the second; and which of them the Hopper kernel computes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.chips import chosen_for
from support.compare import FLOATS, assert_close, with_row_padding
from torch.nn import functional as F

from tritonllm.kernels import add_linear, add_linear_ref, linear_ref, linear_unnormed, linear_unnormed_ref, rms_norm_ref
from tritonllm.kernels.dense import medium
from tritonllm.kernels.dense.linear import ACTIVATIONS, GATED
from tritonllm.kernels.dense.medium import Unnormed

BF16, FP16 = torch.bfloat16, torch.float16


@given(
    m=st.integers(0, 20),
    n=st.integers(1, 70),
    k=st.integers(1, 100),
    columns=st.integers(1, 40),
    dtype=st.sampled_from(FLOATS),
    std=st.sampled_from([1e-2, 1.0, 50.0]),
    bias=st.booleans(),
    activation=st.sampled_from([None, *ACTIVATIONS]),
    gated=st.booleans(),
    padding=st.sampled_from([0, 1, 8]),
)
def test_matches_reference(device, m, n, k, columns, dtype, std, bias, activation, gated, padding):
    """Where the Hopper kernel does not run; the second product begins from what the first one left."""
    gated = gated and activation in GATED
    columns = 2 * columns if gated else columns
    x = with_row_padding((torch.randn(m, k) * std).to(device, dtype), padding)
    stream = with_row_padding((torch.randn(m, n) * std).to(device, dtype), padding)
    first = with_row_padding((torch.randn(n, k) / k**0.5).to(device, dtype), padding)
    second = (torch.randn(columns, n) / n**0.5).to(device, dtype)
    biases = [torch.randn(size).to(device, dtype) if bias else None for size in (n, columns)]
    norm_weight = torch.randn(n, device=device)
    options = {"norm_eps": 1e-5, "norm_weight_offset": 1.0, "scale": 0.5}
    want = stream.float().clone()
    exact = [None if b is None else b.float() for b in biases]
    left_ref = add_linear_ref(x.float(), first.float(), exact[0], want, norm_weight, **options)
    left = add_linear(x, first, biases[0], stream, norm_weight, **options, constant_weight=bool(m % 2))
    assert_close(stream, want)
    assert_close(left.scaled, left_ref.scaled)
    assert_close(left.squares.sum(0), left_ref.squares.sum(0), dtype)
    out = linear_unnormed(left, second, biases[1], activation=activation, gated=gated)
    rows = rms_norm_ref(stream.float(), norm_weight, 1e-5, weight_offset=1.0)
    assert_close(linear_unnormed(left, torch.eye(n, device=device, dtype=dtype)), rows, dtype)
    exact_left = Unnormed(left.scaled.float(), left.squares, left.eps)
    rounded = linear_unnormed_ref(exact_left, torch.eye(n, device=device)).to(dtype)  # between norm and product
    expected = linear_ref(rounded.float(), second.float(), exact[1], activation=activation, gated=gated)
    assert_close(out, expected, dtype)


def test_reference_matches_torch(device):
    """The references themselves, against torch's operations in turn."""
    x, first, stream, norm_weight = (torch.randn(*s, device=device) for s in ((3, 20), (8, 20), (3, 8), (8,)))
    second, bias = torch.randn(12, 8, device=device), torch.randn(12, device=device)
    expected = stream + 0.3 * F.linear(x, first)
    left = add_linear_ref(x, first, None, stream, norm_weight, norm_eps=1e-5, norm_weight_offset=1.0, scale=0.3)
    assert_close(stream, expected)
    gate, up = F.linear(F.rms_norm(stream, (8,), norm_weight + 1.0, 1e-5), second, bias).chunk(2, -1)
    assert_close(linear_unnormed_ref(left, second, bias, activation="silu", gated=True), F.silu(gate) * up)


def test_squares_in_parts(device):
    left = Unnormed(torch.randn(3, 8, device=device), torch.rand(5, 3, device=device), 1e-6)
    whole = left._replace(squares=left.squares.sum(0, keepdim=True))
    weight = torch.randn(4, 8, device=device)
    assert_close(linear_unnormed(left, weight), linear_unnormed_ref(whole, weight))


ADD = {
    "x": torch.zeros(2, 8),
    "weight": torch.zeros(6, 8),
    "bias": None,
    "stream": torch.zeros(2, 6),
    "norm_weight": torch.zeros(6),
}


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"x": torch.zeros(8)}, r"x must have shape \[M, None\]|x must have 2 dimensions|x must"),
        ({"weight": torch.zeros(6, 7)}, "weight must have shape"),
        ({"weight": torch.zeros(6, 8).half()}, "weight must have the dtype of x"),
        ({"bias": torch.zeros(5)}, r"bias must have shape \[6\]"),
        ({"bias": torch.zeros(6).half()}, "bias must have the dtype of x"),
        ({"stream": torch.zeros(2, 5)}, r"stream must have shape \[2, 6\]"),
        ({"stream": torch.zeros(2, 6).half()}, "stream must have the dtype of x"),
        ({"norm_weight": torch.zeros(8)}, r"norm_weight must have shape \[6\]"),
    ],
)
@pytest.mark.parametrize("function", [add_linear, add_linear_ref])
def test_errors_of_the_first(device, function, changes, names):
    args = {name: None if t is None else t.to(device) for name, t in (ADD | changes).items()}
    with pytest.raises(ValueError, match=names):
        function(*args.values())


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"scaled": torch.zeros(2, 7)}, "weight must have shape"),
        ({"squares": torch.zeros(3, 4)}, "squares must have shape"),
        ({"squares": torch.zeros(2, 3).t()}, "squares must be contiguous"),
        ({"squares": torch.zeros(0, 2)}, "squares must .* have a row"),
        ({"squares": torch.zeros(1, 2).half()}, "squares must be torch.float32"),
        ({"weight": torch.zeros(6, 8).half()}, "weight must have the dtype of scaled"),
        ({"bias": torch.zeros(5)}, r"bias must have shape \[6\]"),
        ({"activation": "swish"}, "activation must be one of"),
        ({"gated": True, "activation": "relu"}, "activation must be silu or gelu or gelu_tanh if gated"),
        ({"gated": True, "activation": "silu", "weight": torch.zeros(5, 8)}, "even number of rows if gated"),
    ],
)
@pytest.mark.parametrize("function", [linear_unnormed, linear_unnormed_ref])
def test_errors_of_the_second(device, function, changes, names):
    args = {"scaled": torch.zeros(2, 8), "squares": torch.zeros(1, 2), "weight": torch.zeros(6, 8)} | changes
    args = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in args.items()}
    left = Unnormed(args.pop("scaled"), args.pop("squares"), 1e-6)
    with pytest.raises(ValueError, match=names):
        function(left, **args)


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        ({}, True),
        ({"dtype": FP16}, True),
        ({"dtype": torch.float32}, False),
        ({"k": 72}, True),
        ({"k": 68}, False),
        ({"k": 0}, False),
        ({"n": 33}, True),
        ({"n": 40, "gated": True}, False),
        ({"n": 48, "gated": True}, True),
    ],
)
def test_what_the_copy_engine_can_fetch(changes, fits):
    k, n, dtype = changes.get("k", 64), changes.get("n", 32), changes.get("dtype", BF16)
    x, weight = torch.empty(100, k, dtype=dtype), torch.empty(n, k, dtype=dtype)
    assert medium.fits(x, weight, changes.get("gated", False)) == fits


def test_layouts():
    """Addresses and strides that the copy engine needs."""
    x, weight = torch.empty(100, 64, dtype=BF16), torch.empty(32, 64, dtype=BF16)
    assert medium.fits(with_row_padding(x, 8), with_row_padding(weight, 16), False)
    assert not medium.fits(with_row_padding(x, 4), weight, False)
    assert not medium.fits(x, with_row_padding(weight, 4), False)
    shifted = torch.empty(weight.numel() + 1, dtype=BF16)[1:].view(weight.shape)
    assert medium.fits(x, shifted, False) == (shifted.data_ptr() % 16 == 0)


@pytest.mark.parametrize(
    ("rows", "n", "hopper", "taken"),
    [(64, 1024, True, False), (65, 1024, True, True), (256, 1024, True, True), (256, 1024, False, False),
     (257, 1024, True, False), (100, 2**17 + 8, True, False), (100, 128, True, False)],
)  # fmt: skip
def test_when_it_is_taken(rows, n, hopper, taken):
    """And who decides what is fused hears the same of these sizes."""
    x, weight = torch.empty(rows, 64, dtype=BF16), torch.empty(n, 64, dtype=BF16, device="meta")
    with chosen_for(90 if hopper else 80):
        assert (medium.MEDIUM.own(x.device, x, weight, False) is not None) == taken
        rows_fit = len(x) in medium.rows_that_begin_norms(x.device)
        assert (rows_fit and medium.begins_norms(weight)) == taken
        assert not medium.begins_norms(weight.half())

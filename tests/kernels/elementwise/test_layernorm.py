import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.compare import FLOATS, assert_close, poisoned, with_row_padding

from tritonllm.kernels import fused_add_layer_norm, fused_add_layer_norm_ref, layer_norm, layer_norm_ref
from tritonllm.kernels.runtime import tuning

dtypes = st.sampled_from(FLOATS)
scales = st.sampled_from([1e-3, 1.0, 1e4])  # 1e-3: eps counts; 1e4: squares beyond float16
SMALL_BLOCKS = {"BLOCK": 32, "ROWS": 2, "num_warps": 1}  # rows of more than one block


def affine(shape, device, dtype, *, weight=True, bias=True):
    return (
        torch.randn(shape).to(device, dtype) if weight else None,
        torch.randn(shape).to(device, dtype) if bias else None,
    )


def in_double(x, weight, bias, eps=1e-5):
    """torch's own, in float64."""
    weight, bias = (None if t is None else t.double() for t in (weight, bias))
    return torch.nn.functional.layer_norm(x.double(), x.shape[-1:], weight, bias, eps)


@given(
    rows=st.integers(0, 5),
    n=st.integers(2, 300),
    dtype=dtypes,
    affine_dtype=dtypes,
    weight=st.booleans(),
    bias=st.booleans(),
    scale=scales,
    padding=st.integers(0, 3),
)
def test_matches_reference_and_torch(device, rows, n, dtype, affine_dtype, weight, bias, scale, padding):
    x = with_row_padding((torch.randn(rows, n) * scale).to(device, dtype), padding)
    weight, bias = affine(n, device, affine_dtype, weight=weight, bias=bias)
    out = poisoned(rows, n, dtype=dtype, device=device)
    assert layer_norm(x, weight, bias, 1e-5, out=out) is out
    assert_close(out, in_double(x, weight, bias))
    assert_close(layer_norm_ref(x, weight, bias), in_double(x, weight, bias))


@given(
    tokens=st.integers(0, 3),
    heads=st.integers(1, 5),
    n=st.integers(2, 40),
    dtype=dtypes,
    per_head=st.booleans(),
    weight=st.booleans(),
    bias=st.booleans(),
)
def test_heads_of_a_fused_projection_in_place(device, tokens, heads, n, dtype, per_head, weight, bias):
    """Rows with two strides, normalised where they are; what lies around them stays."""
    qkv = torch.randn(tokens, (heads + 2) * n).to(device, dtype)
    before = qkv.clone()
    weight, bias = affine((heads, n) if per_head else (n,), device, dtype, weight=weight, bias=bias)
    q = qkv[:, n : (heads + 1) * n].view(tokens, heads, n)
    expected = in_double(q, None, None)
    expected = expected if weight is None else expected * weight.double()
    expected = expected if bias is None else expected + bias.double()
    assert layer_norm(q, weight, bias, out=q) is q
    assert_close(q, expected)
    assert torch.equal(qkv[:, :n], before[:, :n])
    assert torch.equal(qkv[:, (heads + 1) * n :], before[:, (heads + 1) * n :])


@given(
    rows=st.integers(0, 5),
    n=st.integers(2, 300),
    dtype=dtypes,
    residual_dtype=dtypes,
    weight=st.booleans(),
    bias=st.booleans(),
    scale=scales,
    x_scale=st.sampled_from([1.0, 0.22, -3.0]),
    padding=st.integers(0, 3),
)
def test_fused_add_matches_reference(device, rows, n, dtype, residual_dtype, weight, bias, scale, x_scale, padding):
    x = with_row_padding((torch.randn(rows, n) * scale).to(device, dtype), padding)
    residual = with_row_padding((torch.randn(rows, n) * scale).to(device, residual_dtype), padding + 1)
    weight, bias = affine(n, device, torch.float32, weight=weight, bias=bias)
    total = (x.double() * x_scale + residual.double()).to(residual_dtype)
    expected = fused_add_layer_norm_ref(x.clone(), residual.clone(), weight, bias, x_scale=x_scale)
    normed, added = fused_add_layer_norm(x, residual, weight, bias, x_scale=x_scale)
    assert normed is x
    assert added is residual
    assert_close(residual, total)
    assert_close(x, in_double(residual, weight, bias))
    assert_close(expected[1], total)
    assert_close(expected[0], in_double(expected[1], weight, bias))


@given(rows=st.integers(1, 5), n=st.integers(2, 100), dtype=dtypes, bias=st.booleans())
def test_rows_of_several_blocks(device, rows, n, dtype, bias):
    x, residual = torch.randn(2, rows, n).to(device, dtype).unbind()
    weight, bias = affine(n, device, dtype, bias=bias)
    total = x + residual
    out = poisoned(rows, n, dtype=dtype, device=device)
    with tuning.override("layer_norm", SMALL_BLOCKS), tuning.override("fused_add_layer_norm", SMALL_BLOCKS):
        layer_norm(x, weight, bias, out=out)
        assert_close(out, in_double(x, weight, bias))
        fused_add_layer_norm(x, residual, weight, bias)
    assert torch.equal(residual, total)
    assert_close(x, in_double(total, weight, bias))


@pytest.mark.parametrize("mean", [1e3, -2.5e4])
@pytest.mark.parametrize("block", [16, 32, 64])
def test_large_mean(device, mean, block):
    """Values of mean +- 1: the variance of E[x^2] - E[x]^2 would have few digits left, or none.

    The values are multiples of 1/8 whose mean is exact, and a sum of 64 of them fits 24 bits: no order of summation
    rounds, so the usual tolerance holds.
    """
    half = torch.randint(-8, 9, (3, 32)) / 8
    x = (mean + torch.cat([half, -half], dim=1)).to(device)
    weight, bias = affine(64, device, torch.float32)
    config = {"BLOCK": block, "ROWS": 2, "num_warps": 1}
    with tuning.override("layer_norm", config), tuning.override("fused_add_layer_norm", config):
        assert_close(layer_norm(x, weight, bias), in_double(x, weight, bias))
        normed, residual = fused_add_layer_norm(torch.zeros_like(x), x.clone(), weight, bias)
    assert torch.equal(residual, x)
    assert_close(normed, in_double(x, weight, bias))
    assert_close(layer_norm_ref(x, weight, bias), in_double(x, weight, bias))


@pytest.mark.parametrize("scale", [1e-18, 1e18])
def test_tiny_and_huge_values(device, scale):
    x = torch.randn(3, 64, device=device) * scale
    weight = torch.randn(64, device=device)
    assert_close(layer_norm(x, weight), in_double(x, weight, None))


@pytest.mark.parametrize("shape", [(6,), (0, 4), (2, 3, 8), (2, 0, 8), (2, 0), (2, 3, 2, 8)])
def test_leading_dimensions(device, shape):
    x, residual = torch.randn(2, *shape, device=device).unbind()
    weight, bias = affine(shape[-1], device, torch.float32)
    out = layer_norm(x, weight, bias)
    assert out.shape == shape
    assert_close(out, layer_norm_ref(x, weight, bias))
    expected = layer_norm_ref(x + residual, weight, bias)
    fused_add_layer_norm(x, residual, weight, bias)
    assert_close(x, expected)


def test_weights_per_head_of_four_dimensions(device):
    x = torch.randn(3, 2, 4, 8, device=device).transpose(0, 1)
    weight, bias = affine((4, 8), device, torch.float32)
    assert_close(layer_norm(x, weight, bias), in_double(x, None, None) * weight + bias)


def test_rows_of_one_value_are_the_bias(device):
    x = torch.randn(5, 1, device=device)
    bias = torch.randn(1, device=device)
    assert torch.equal(layer_norm(x, torch.ones(1, device=device), bias), bias.expand(5, 1))


def test_rows_are_independent(device):
    x = torch.randn(6, 16, device=device)
    x[2] = float("nan")
    x[3] = 7.0
    weight, bias = affine(16, device, torch.float32)
    out = layer_norm(x, weight, bias)
    assert out[2].isnan().all()
    assert torch.equal(out[3], bias)
    clean = [0, 1, 4, 5]
    assert_close(out[clean], layer_norm_ref(x[clean], weight, bias))


@given(rows=st.integers(1, 4), n=st.integers(2, 200))
def test_fused_is_two_steps(device, rows, n):
    """Bit for bit: the norm is of the sum as it is stored, not of the one before it was rounded."""
    x, residual = torch.randn(2, rows, n).to(device, torch.bfloat16).unbind()
    weight, bias = affine(n, device, torch.float32)
    total = x + residual
    config = {"BLOCK": 256, "ROWS": 1, "num_warps": 1}
    with tuning.override("layer_norm", config), tuning.override("fused_add_layer_norm", config):
        expected = layer_norm(total, weight, bias)
        fused_add_layer_norm(x, residual, weight, bias)
    assert torch.equal(x, expected)


@pytest.mark.parametrize(
    ("x", "weight", "bias", "kwargs", "names"),
    [
        (torch.zeros(()), torch.zeros(1), None, {}, "x must have shape"),
        (torch.zeros(4, 2).t(), torch.zeros(4), None, {}, "x must be contiguous"),
        (torch.zeros(2, 4), torch.zeros(5), None, {}, r"weight must have shape \[4\]"),
        (torch.zeros(2, 4), torch.zeros(2, 4), None, {}, r"weight must have shape \[4\]"),
        (torch.zeros(2, 4), torch.zeros(4), torch.zeros(3), {}, r"bias must have shape \[4\]"),
        (torch.zeros(2, 4), torch.zeros(4), torch.zeros(4).int(), {}, "bias must be torch.float16"),
        (torch.zeros(2, 4), None, torch.zeros(4, device="meta"), {}, "bias must be on cpu"),
        (torch.zeros(1, 2, 4), torch.zeros(4), torch.zeros(2, 4), {}, r"bias must have shape \[4\]"),
        (torch.zeros(1, 2, 4), torch.zeros(2, 4), torch.zeros(4), {}, r"bias must have shape \[2, 4\]"),
        (torch.zeros(1, 2, 4), None, torch.zeros(2, 5)[:, :4], {}, "bias must be contiguous if it has a row"),
        (torch.zeros(2, 4), None, None, {"out": torch.zeros(2, 5)}, r"out must have shape \[2, 4\]"),
    ],
)
def test_bad_arguments(x, weight, bias, kwargs, names):
    with pytest.raises(ValueError, match=names):
        layer_norm(x, weight, bias, **kwargs)


@pytest.mark.parametrize(
    ("residual", "bias", "names"),
    [
        (torch.zeros(2, 5), None, "residual must have shape"),
        (None, None, "residual must be a torch.Tensor"),
        (torch.zeros(2, 4), torch.zeros(5), r"bias must have shape \[4\]"),
    ],
)
def test_bad_arguments_of_fused_add(residual, bias, names):
    with pytest.raises(ValueError, match=names):
        fused_add_layer_norm(torch.zeros(2, 4), residual, torch.zeros(4), bias)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "n"), [(1, 768), (64, 2560), (4096, 4096), (1000, 8192), (4, 12288), (4, 20000)])
def test_real_shapes(device, dtype, rows, n):
    x, residual = torch.randn(2, rows, n, device=device, dtype=dtype).unbind()
    weight, bias = torch.randn(2, n, device=device, dtype=dtype).unbind()
    out = poisoned(rows, n, dtype=dtype, device=device)
    assert_close(layer_norm(x, weight, bias, out=out), in_double(x, weight, bias))
    total = x + residual
    fused_add_layer_norm(x, residual, weight, bias)
    assert torch.equal(residual, total)
    assert_close(x, in_double(total, weight, bias))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4096])
def test_head_norm_at_real_shapes(device, tokens):
    """Command-R+: 96 query and 8 key and value heads of 128, a row of weights for each query head."""
    qkv = torch.randn(tokens, 112 * 128, device=device, dtype=torch.bfloat16)
    weight = torch.randn(96, 128, device=device, dtype=torch.bfloat16)
    q = qkv[:, : 96 * 128].view(tokens, 96, 128)
    expected = in_double(q, None, None) * weight
    layer_norm(q, weight, out=q)
    assert_close(q, expected)


@pytest.mark.gpu
def test_fullgraph_compile(device):
    x, residual, bias = torch.randn(3, 8, 64, device=device).unbind()
    weight, bias = bias[:2].unbind()

    def block(x, residual):
        normed, residual = fused_add_layer_norm(x.clone(), residual.clone(), weight, bias)
        return layer_norm(normed, None, bias, out=normed) + residual

    assert_close(torch.compile(block, fullgraph=True)(x, residual), block(x, residual))

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.compare import FLOATS, assert_close, poisoned, with_row_padding
from transformers.activations import ACT2FN

from tritonllm.kernels import (
    apply_activation,
    apply_activation_ref,
    gelu_and_mul,
    gelu_and_mul_ref,
    silu_and_mul,
    silu_and_mul_ref,
)

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
OPS = {
    "silu": (silu_and_mul, silu_and_mul_ref),
    "gelu": (gelu_and_mul, gelu_and_mul_ref),
    "gelu_tanh": (
        lambda x, **k: gelu_and_mul(x, approximate="tanh", **k),
        lambda x, **k: gelu_and_mul_ref(x, approximate="tanh", **k),
    ),
}


@given(
    op=st.sampled_from(sorted(OPS)),
    rows=st.integers(0, 5),
    n=st.integers(1, 300),
    dtype=st.sampled_from(FLOATS),
    scale=st.sampled_from([1e-2, 1.0, 60.0]),  # 1e-2: the product of smaller values is subnormal in float16
    padding=st.integers(0, 3),
)
def test_matches_reference(device, op, rows, n, dtype, scale, padding):
    fn, ref = OPS[op]
    x = with_row_padding((torch.randn(rows, 2 * n) * scale).to(device, dtype), padding)
    out = poisoned(rows, n, dtype=dtype, device=device)
    assert fn(x, out=out) is out
    assert_close(out, ref(x.float()))


@given(
    activation=st.sampled_from(ACTIVATIONS),
    rows=st.integers(0, 5),
    n=st.integers(0, 300),
    dtype=st.sampled_from(FLOATS),
    out_dtype=st.sampled_from(FLOATS),
    scale=st.sampled_from([1e-2, 1.0, 60.0]),
    padding=st.integers(0, 3),
)
def test_apply_matches_reference(device, activation, rows, n, dtype, out_dtype, scale, padding):
    x = with_row_padding((torch.randn(rows, n) * scale).to(device, dtype), padding)
    out = with_row_padding(poisoned(rows, n, dtype=out_dtype, device=device), padding)
    assert apply_activation(x, activation, out=out) is out
    assert_close(out, apply_activation_ref(x.float(), activation))


@given(activation=st.sampled_from(ACTIVATIONS), n=st.integers(1, 40), dtype=st.sampled_from(FLOATS))
def test_apply_in_place(device, activation, n, dtype):
    """The first columns of wider rows; those beside them stay."""
    wide = torch.randn(3, n + 5).to(device, dtype)
    before = wide.clone()
    x = wide[:, :n]
    assert apply_activation(x, activation, out=x) is x
    assert_close(x, apply_activation_ref(before[:, :n].float(), activation))
    assert torch.equal(wide[:, n:], before[:, n:])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_special_values(device, activation):
    """NaN and infinity stay, large values pass or vanish."""
    x = torch.tensor([float("nan"), 1e18, -1e18, 1e-30, -1e-30, 0.0, 88.0, -88.0, -104.0], device=device)
    expected = apply_activation_ref(x, activation)
    torch.testing.assert_close(apply_activation(x, activation), expected, rtol=1e-5, atol=1e-30, equal_nan=True)
    assert expected[0].isnan()
    infinity = torch.full((3,), float("inf"), device=device)
    assert torch.equal(apply_activation(infinity, activation), infinity)


@pytest.mark.parametrize("shape", [(6,), (0, 4), (2, 3, 8), (2, 0, 8), (2, 0), (2, 3, 2, 8)])
def test_leading_dimensions(device, shape):
    x = torch.randn(shape, device=device)
    out = silu_and_mul(x)
    assert out.shape == (*shape[:-1], shape[-1] // 2)
    assert_close(out, silu_and_mul_ref(x))
    out = apply_activation(x, "relu")
    assert out.shape == shape
    assert_close(out, x.clamp_min(0))


def test_strides_of_the_outer_dimensions(device):
    x = torch.randn(3, 2, 8, device=device).transpose(0, 1)
    assert_close(apply_activation(x, "silu"), torch.nn.functional.silu(x))
    assert_close(silu_and_mul(x), silu_and_mul_ref(x))


@pytest.mark.parametrize(
    ("activation", "theirs"),
    [("silu", "silu"), ("gelu", "gelu"), ("gelu_tanh", "gelu_new"), ("relu", "relu"), ("relu2", "relu2")],
)
def test_reference_matches_transformers(device, activation, theirs):
    x = torch.randn(3, 64, device=device)
    assert_close(apply_activation_ref(x, activation), ACT2FN[theirs](x))


def test_matches_torch(device):
    """The reference itself, against torch's own activations."""
    x = torch.randn(3, 64, device=device)
    gate, up = x.chunk(2, -1)
    assert_close(silu_and_mul_ref(x), torch.nn.functional.silu(gate) * up)
    assert_close(gelu_and_mul_ref(x), torch.nn.functional.gelu(gate) * up)


@pytest.mark.parametrize(
    ("x", "kwargs", "names"),
    [
        (torch.zeros(2, 5), {}, "even last dimension"),
        (torch.zeros(2, 4, dtype=torch.int32), {}, "x must be torch.float16"),
        (torch.zeros(4, 2).t(), {}, "x must be contiguous"),
        (torch.zeros(2, 4), {"out": torch.zeros(2, 4)}, r"out must have shape \[2, 2\]"),
        (torch.zeros(2, 4), {"out": torch.zeros(2, 2, dtype=torch.int64)}, "out must be"),
    ],
)
def test_bad_arguments(x, kwargs, names):
    with pytest.raises(ValueError, match=names):
        silu_and_mul(x, **kwargs)


@pytest.mark.parametrize(
    ("x", "activation", "out", "names"),
    [
        (torch.zeros(2, 4), "swish", None, "activation must be one of silu, gelu, gelu_tanh, relu, relu2, got 'swish'"),
        (torch.zeros(()), "silu", None, "x must have shape"),
        (torch.zeros(2, 4, dtype=torch.int32), "silu", None, "x must be torch.float16"),
        (torch.zeros(4, 2).t(), "silu", None, "x must be contiguous"),
        (torch.zeros(2, 4), "silu", torch.zeros(2, 2), r"out must have shape \[2, 4\]"),
        (torch.zeros(2, 4), "silu", torch.zeros(2, 4, device="meta"), "out must be on cpu"),
        (torch.zeros(2, 2, 4), "silu", torch.zeros(2, 2, 5)[..., :4], "out must be contiguous"),
    ],
)
def test_bad_arguments_of_apply(x, activation, out, names):
    with pytest.raises(ValueError, match=names):
        apply_activation(x, activation, out=out)


def test_bad_approximate():
    with pytest.raises(ValueError, match="approximate"):
        gelu_and_mul(torch.zeros(2, 4), approximate="fast")


def test_operator(device):
    """Registered well enough for torch.compile: schema, fake tensors and functionalisation."""
    x, out = torch.randn(3, 8, device=device), torch.empty(3, 4, device=device)
    torch.library.opcheck(torch.ops.tritonllm.activation.default, (x, out, "silu", True))
    torch.library.opcheck(torch.ops.tritonllm.activation.default, (x, x, "relu2", False))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 64, 4096])
def test_real_shapes(device, dtype, tokens):
    x = torch.randn(tokens, 2 * 14336, device=device, dtype=dtype)
    out = poisoned(tokens, 14336, dtype=dtype, device=device)
    assert_close(silu_and_mul(x, out=out), silu_and_mul_ref(x.float()))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("tokens", [1, 4096])
def test_apply_at_real_shapes(device, activation, dtype, tokens):
    """Falcon-7B."""
    x = torch.randn(tokens, 18176, device=device, dtype=dtype)
    expected = apply_activation_ref(x.float(), activation)
    out = poisoned(tokens, 18176, dtype=dtype, device=device)
    assert_close(apply_activation(x, activation, out=out), expected)
    assert_close(apply_activation(x, activation, out=x), expected)


@pytest.mark.gpu
def test_offsets_beyond_int32(device):
    """2^31 elements and more: the last row is right."""
    n = 4096
    x = torch.zeros(2**31 // (2 * n) + 3, 2 * n, device=device, dtype=torch.bfloat16)
    x[-1].normal_()
    assert_close(silu_and_mul(x)[-1], silu_and_mul_ref(x[-1].float()))
    expected = apply_activation_ref(x[-1].float(), "gelu_tanh")
    assert_close(apply_activation(x, "gelu_tanh", out=x)[-1], expected)
    del x


@pytest.mark.gpu
def test_fullgraph_compile(device):
    x = torch.randn(8, 64, device=device)
    compiled = torch.compile(lambda x: silu_and_mul(x) + 1, fullgraph=True)
    assert_close(compiled(x), silu_and_mul_ref(x) + 1)

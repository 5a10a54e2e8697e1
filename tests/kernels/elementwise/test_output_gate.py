import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.compare import FLOATS, assert_close, poisoned, with_row_padding

from tritonllm.kernels import output_gate, output_gate_ref


@given(
    rows=st.integers(0, 5),
    gates=st.integers(0, 300),
    each=st.sampled_from([1, 1, 8, 24]),
    function=st.sampled_from(["sigmoid", "softplus"]),
    dtypes=st.tuples(*[st.sampled_from(FLOATS)] * 3),
    scale=st.sampled_from([1e-2, 1.0, 1e4]),
    paddings=st.tuples(*[st.integers(0, 3)] * 3),
)
def test_matches_reference(device, rows, gates, each, function, dtypes, scale, paddings):
    """The sigmoid of huge values is 0 or 1."""
    scale = scale if function == "sigmoid" else min(scale, 30.0)  # float16 ends at 65504
    gates, n = (gates, gates) if each == 1 else (gates // 50, gates // 50 * each)
    x, gate = (
        with_row_padding((torch.randn(rows, columns) * scale).to(device, dtype), padding)
        for columns, dtype, padding in zip((n, gates), dtypes[:2], paddings[:2], strict=True)
    )
    out = with_row_padding(poisoned(rows, n, dtype=dtypes[2], device=device), paddings[2])
    assert output_gate(x, gate, function=function, out=out) is out
    assert_close(out, output_gate_ref(x.float(), gate.float(), function=function))


@pytest.mark.parametrize("gate", [-60.0, -16.0, -7.0, -6.5, 0.0, 3.0, 19.0, 200.0])
def test_small_and_large_softplus(device, gate):
    """To the last digits where the exponential is small beside 1, and no overflow where it is large."""
    want = math.log1p(math.exp(gate)) if gate < 100 else gate
    found = output_gate(torch.ones(1, device=device), torch.tensor([gate], device=device), function="softplus")
    assert float(found) == pytest.approx(want, rel=1e-6)


def test_reference_is_the_formula(device):
    x, gate = torch.randn(2, 3, 7, device=device), torch.randn(2, 3, 7, device=device)
    assert_close(output_gate_ref(x, gate), x * torch.sigmoid(gate))
    heads, of_heads = torch.randn(3, 4, 8, device=device), torch.randn(3, 4, device=device)
    want = heads * torch.log1p(torch.exp(of_heads))[..., None]
    assert_close(output_gate_ref(heads.flatten(1), of_heads, function="softplus"), want.flatten(1))


@pytest.mark.parametrize("of_gate", [False, True])
def test_in_place(device, of_gate):
    """The first columns of wider rows; those beside them stay."""
    wide = torch.randn(2, 3, 40, device=device)
    before = wide.clone()
    x, gate = wide[0, :, :33], wide[1, :, :33]
    out = gate if of_gate else x
    assert output_gate(x, gate, out=out) is out
    assert_close(out, output_gate_ref(before[0, :, :33], before[1, :, :33]))
    assert torch.equal(wide[:, :, 33:], before[:, :, 33:])


def test_extremes(device):
    x = torch.tensor([1.0, 1.0, 0.0, float("nan"), 1.0], device=device)
    gate = torch.tensor([1e30, -1e30, 3.0, 0.0, float("nan")], device=device)
    torch.testing.assert_close(output_gate(x, gate), output_gate_ref(x, gate), equal_nan=True)


@pytest.mark.parametrize("shape", [(6,), (0, 4), (2, 3, 8), (2, 0, 8)])
def test_leading_dimensions(device, shape):
    x, gate = torch.randn(shape, device=device), torch.randn(shape, device=device)
    out = output_gate(x, gate)
    assert out.shape == shape
    assert_close(out, output_gate_ref(x, gate))


@pytest.mark.parametrize(
    ("x", "gate", "out", "names"),
    [
        (torch.zeros(2, 4), torch.zeros(2, 3), None, "gate must have a divisor of x's 4 columns, got 3"),
        (torch.zeros(2, 4), torch.zeros(2, 0), None, "gate must have a divisor of x's 4 columns, got 0"),
        (torch.zeros(2, 4), torch.zeros(3, 4), None, r"gate must have shape \[2, G\]"),
        (torch.zeros(2, 4), torch.zeros(2, 4, dtype=torch.int32), None, "gate must be torch.float16"),
        (torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, 4), None, "x must be torch.float16"),
        (torch.zeros(4, 2).t(), torch.zeros(2, 4), None, "x must be contiguous"),
        (torch.zeros(2, 4), torch.zeros(2, 4), torch.zeros(2, 2), r"out must have shape \[2, 4\]"),
        (torch.zeros(2, 2, 4), torch.zeros(2, 2, 4), torch.zeros(2, 2, 5)[..., :4], "out must be contiguous"),
    ],
)
def test_bad_arguments(x, gate, out, names):
    with pytest.raises(ValueError, match=names):
        output_gate(x, gate, out=out)


def test_another_function():
    with pytest.raises(ValueError, match="function must be one of sigmoid, softplus, got 'tanh'"):
        output_gate(torch.zeros(2, 4), torch.zeros(2, 4), function="tanh")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 4096])
def test_real_shapes(device, dtype, tokens):
    """Trinity Mini: 32 heads of 128."""
    x, gate = (torch.randn(tokens, 4096, device=device, dtype=dtype) for _ in range(2))
    expected = output_gate_ref(x.float(), gate.float())
    out = poisoned(tokens, 4096, dtype=dtype, device=device)
    assert_close(output_gate(x, gate, out=out), expected)
    assert_close(output_gate(x, gate, out=x), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4096])
def test_real_heads(device, tokens):
    """Laguna XS: 48 heads of 128."""
    x, gate = (torch.randn(tokens, n, device=device, dtype=torch.bfloat16) for n in (48 * 128, 48))
    expected = output_gate_ref(x.float(), gate.float(), function="softplus")
    assert_close(output_gate(x, gate, function="softplus", out=x), expected)


@pytest.mark.gpu
def test_offsets_beyond_int32(device):
    """2^31 elements and more: the last row is right."""
    x = torch.zeros(2**31 // 8192 + 3, 8192, device=device, dtype=torch.bfloat16)
    x[-1].normal_()
    expected = output_gate_ref(x[-1].float(), x[-1].float())
    assert_close(output_gate(x, x, out=x)[-1], expected)

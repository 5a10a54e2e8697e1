import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.compare import FLOATS, assert_close, poisoned, with_row_padding
from transformers.activations import XIELUActivation

from tritonllm.kernels import xielu, xielu_ref

PARAMETERS = [-0.3, 1.2, 0.5, -1e-6]


def parameters(device, dtype=torch.float32, values=PARAMETERS):
    return torch.tensor(values, device=device, dtype=dtype)


@given(
    rows=st.integers(0, 5),
    n=st.integers(0, 300),
    dtype=st.sampled_from(FLOATS),
    out_dtype=st.sampled_from(FLOATS),
    scale=st.sampled_from([1e-2, 1.0, 30.0]),
    alphas=st.tuples(st.floats(-4, 4), st.floats(-4, 4)),
    padding=st.integers(0, 3),
)
def test_matches_reference(device, rows, n, dtype, out_dtype, scale, alphas, padding):
    x = with_row_padding((torch.randn(rows, n) * scale).to(device, dtype), padding)
    out = with_row_padding(poisoned(rows, n, dtype=out_dtype, device=device), padding)
    learned = parameters(device, dtype, [*alphas, *PARAMETERS[2:]])
    assert xielu(x, learned, out=out) is out
    assert_close(out, xielu_ref(x.float(), learned))


@given(n=st.integers(1, 40), dtype=st.sampled_from(FLOATS))
def test_in_place(device, n, dtype):
    """The first columns of wider rows; those beside them stay."""
    wide = torch.randn(3, n + 5).to(device, dtype)
    before = wide.clone()
    x = wide[:, :n]
    assert xielu(x, parameters(device), out=x) is x
    assert_close(x, xielu_ref(before[:, :n].float(), parameters(device)))
    assert torch.equal(wide[:, n:], before[:, n:])


def test_near_zero_and_far_away(device):
    """Below zero an exponential minus a line: its digits near zero, its line far away, NaN as NaN."""
    x = torch.tensor([float("nan"), 1e18, -1e18, 1e-6, -1e-6, -0.2, -0.1999, -0.01, 0.0, -104.0], device=device)
    expected = xielu_ref(x.double().float(), parameters(device))
    torch.testing.assert_close(xielu(x, parameters(device)), expected, rtol=1e-5, atol=1e-12, equal_nan=True)
    assert expected[0].isnan()


def test_reference_matches_transformers(device):
    theirs = XIELUActivation(dtype=torch.float32)
    learned = torch.stack([theirs.alpha_p[0], theirs.alpha_n[0], theirs.beta, theirs.eps]).detach()
    x = torch.randn(3, 64)
    assert_close(xielu_ref(x.to(device), learned.to(device)).cpu(), theirs(x).detach())


@pytest.mark.parametrize("shape", [(6,), (0, 4), (2, 3, 8), (2, 0, 8)])
def test_leading_dimensions(device, shape):
    x = torch.randn(shape, device=device)
    out = xielu(x, parameters(device))
    assert out.shape == shape
    assert_close(out, xielu_ref(x, parameters(device)))


@pytest.mark.parametrize(
    ("x", "learned", "out", "names"),
    [
        (torch.zeros(2, 4), torch.zeros(3), None, r"parameters must have shape \[4\]"),
        (torch.zeros(2, 4), torch.zeros(4, dtype=torch.int32), None, "parameters must be torch.float16"),
        (torch.zeros(2, 4, dtype=torch.int32), torch.zeros(4), None, "x must be torch.float16"),
        (torch.zeros(4, 2).t(), torch.zeros(4), None, "x must be contiguous"),
        (torch.zeros(2, 4), torch.zeros(4), torch.zeros(2, 2), r"out must have shape \[2, 4\]"),
        (torch.zeros(2, 2, 4), torch.zeros(4), torch.zeros(2, 2, 5)[..., :4], "out must be contiguous"),
    ],
)
def test_bad_arguments(x, learned, out, names):
    with pytest.raises(ValueError, match=names):
        xielu(x, learned, out=out)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 4096])
def test_real_shapes(device, dtype, tokens):
    """Apertus-8B."""
    x = torch.randn(tokens, 21504, device=device, dtype=dtype)
    learned = parameters(device, dtype)
    expected = xielu_ref(x.float(), learned)
    out = poisoned(tokens, 21504, dtype=dtype, device=device)
    assert_close(xielu(x, learned, out=out), expected)
    assert_close(xielu(x, learned, out=x), expected)


@pytest.mark.gpu
def test_offsets_beyond_int32(device):
    """2^31 elements and more: the last row is right."""
    x = torch.zeros(2**31 // 8192 + 3, 8192, device=device, dtype=torch.bfloat16)
    x[-1].normal_()
    expected = xielu_ref(x[-1].float(), parameters(device))
    assert_close(xielu(x, parameters(device), out=x)[-1], expected)

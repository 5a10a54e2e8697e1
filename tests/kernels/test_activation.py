import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.compare import FLOATS, assert_close, poisoned, with_row_padding

from tritonllm.kernels import gelu_and_mul, gelu_and_mul_ref, silu_and_mul, silu_and_mul_ref

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


@pytest.mark.parametrize("shape", [(6,), (0, 4), (2, 3, 8), (2, 0, 8)])
def test_leading_dimensions(device, shape):
    x = torch.randn(shape, device=device)
    out = silu_and_mul(x)
    assert out.shape == (*shape[:-1], shape[-1] // 2)
    assert_close(out, silu_and_mul_ref(x))


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


def test_bad_approximate():
    with pytest.raises(ValueError, match="approximate"):
        gelu_and_mul(torch.zeros(2, 4), approximate="fast")


def test_operator(device):
    """Registered well enough for torch.compile: schema, fake tensors and functionalisation."""
    x, out = torch.randn(3, 8, device=device), torch.empty(3, 4, device=device)
    torch.library.opcheck(torch.ops.tritonllm.act_and_mul.default, (x, out, "silu"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 64, 4096])
def test_real_shapes(device, dtype, tokens):
    x = torch.randn(tokens, 2 * 14336, device=device, dtype=dtype)
    out = poisoned(tokens, 14336, dtype=dtype, device=device)
    assert_close(silu_and_mul(x, out=out), silu_and_mul_ref(x.float()))


@pytest.mark.gpu
def test_offsets_beyond_int32(device):
    """2^31 elements and more: the last row is right."""
    n = 4096
    x = torch.zeros(2**31 // (2 * n) + 3, 2 * n, device=device, dtype=torch.bfloat16)
    x[-1].normal_()
    assert_close(silu_and_mul(x)[-1], silu_and_mul_ref(x[-1].float()))
    del x


@pytest.mark.gpu
def test_fullgraph_compile(device):
    x = torch.randn(8, 64, device=device)
    compiled = torch.compile(lambda x: silu_and_mul(x) + 1, fullgraph=True)
    assert_close(compiled(x), silu_and_mul_ref(x) + 1)

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.compare import FLOATS, assert_close, with_row_padding

from tritonllm.kernels import (
    fused_add_rms_norm,
    fused_add_rms_norm_quantize,
    fused_add_rms_norm_quantize_ref,
    quantize_rows,
    quantize_rows_ref,
    rms_norm_ref,
    silu_and_mul,
    silu_and_mul_quantize,
    silu_and_mul_quantize_ref,
    silu_and_mul_ref,
)
from tritonllm.kernels.runtime import float8, tuning
from tritonllm.kernels.runtime.chip import Chip
from tritonllm.kernels.runtime.float8 import LARGEST, empty_rows

dtypes = st.sampled_from(FLOATS)
SMALL_BLOCKS = {"BLOCK": 32, "num_warps": 1}


def assert_quantized(q: torch.Tensor, scale: torch.Tensor, y: torch.Tensor) -> None:
    """About ``y``, in all of the range: the largest of each row that is not tiny is at the end of it."""
    assert q.dtype in (torch.float8_e4m3fn, torch.int8) and q.shape == y.shape
    assert scale.dtype == torch.float32 and scale.shape == y.shape[:-1]
    if q.dtype == torch.int8:
        assert ((q.float() * scale[..., None] - y).abs() <= scale[..., None] * 0.51 + y.abs() / 128).all()
    else:
        assert_close(q.float() * scale[..., None], y, torch.float8_e4m3fn)
    if y.numel():
        largest = q.float().abs().amax(-1)
        assert (largest[y.abs().amax(-1) > 1e-20] == (127 if q.dtype == torch.int8 else LARGEST)).all()


@given(
    rows=st.integers(0, 5),
    n=st.integers(1, 200),
    dtype=dtypes,
    scale=st.sampled_from([1e-2, 1.0, 60.0]),
    padding=st.integers(0, 3),
    small=st.booleans(),
)
def test_silu_matches_reference(device, rows, n, dtype, scale, padding, small):
    x = with_row_padding((torch.randn(rows, 2 * n) * scale).to(device, dtype), padding)
    config = SMALL_BLOCKS if small else {"BLOCK": 256, "num_warps": 1}
    with tuning.override("silu_and_mul_quantize", config):
        assert_quantized(*silu_and_mul_quantize(x), silu_and_mul_ref(x.float()))
        for of in (torch.float8_e4m3fn, torch.int8):
            assert_quantized(*quantize_rows(x, of), x.float())
        for of in (torch.float8_e4m3fn, torch.int8):
            assert_quantized(*quantize_rows(x, of), x.float())


@given(
    rows=st.integers(0, 5),
    n=st.integers(1, 200),
    dtype=dtypes,
    residual_dtype=dtypes,
    scale=st.sampled_from([1e-3, 1.0, 1e3]),
    offset=st.sampled_from([0.0, 1.0]),
    x_scale=st.sampled_from([1.0, 0.22]),
    padding=st.integers(0, 3),
)
def test_norm_matches_reference(device, rows, n, dtype, residual_dtype, scale, offset, x_scale, padding):
    x = with_row_padding((torch.randn(rows, n) * scale).to(device, dtype), padding)
    residual = with_row_padding((torch.randn(rows, n) * scale).to(device, residual_dtype), padding + 1)
    weight, before = torch.randn(n, device=device), x.clone()
    total = (x.double() * x_scale + residual.double()).to(residual_dtype)
    q, scales, added = fused_add_rms_norm_quantize(x, residual, weight, weight_offset=offset, x_scale=x_scale)
    assert added is residual and torch.equal(x, before)
    assert_close(residual, total)
    assert_quantized(q, scales, rms_norm_ref(residual.float(), weight, weight_offset=offset))


def test_is_two_steps(device):
    """Bit for bit the rounded result, quantised: nothing that a reader of two kernels would not see."""
    x, residual = torch.randn(2, 4, 96, device=device).bfloat16()
    weight = torch.randn(96, device=device)
    for y, (q, scale) in (
        (x, quantize_rows(x)),
        (silu_and_mul(x), silu_and_mul_quantize(x)),
        (
            fused_add_rms_norm(x.clone(), residual.clone(), weight)[0],
            fused_add_rms_norm_quantize(x, residual.clone(), weight)[:2],
        ),
    ):
        assert torch.equal(scale, y.float().abs().amax(-1) * (1.0 / LARGEST))
        assert torch.equal(q.float(), (y.float() * scale.reciprocal()[:, None]).to(torch.float8_e4m3fn).float())


def test_references(device):
    x, residual = torch.randn(2, 3, 64, device=device).bfloat16()
    weight = torch.randn(64, device=device)
    assert_quantized(*silu_and_mul_quantize_ref(x), silu_and_mul_ref(x.float()))
    for of in (torch.float8_e4m3fn, torch.int8):
        assert_quantized(*quantize_rows_ref(x, of), x.float())
        assert torch.equal(quantize_rows_ref(x, of)[0].float(), quantize_rows(x, of)[0].float())
    q, scale, total = fused_add_rms_norm_quantize_ref(x, residual.clone(), weight)
    assert torch.equal(total, x + residual)
    assert_quantized(q, scale, rms_norm_ref(total.float(), weight))


@pytest.mark.parametrize("function", [silu_and_mul_quantize, silu_and_mul_quantize_ref])
def test_special_rows(device, function):
    """Zeros, numbers too small for an inverse, and NaN: the other rows are as they would be without them."""
    x = torch.ones(4, 16, device=device)
    x[0] = 0.0
    x[1] = 1e-20
    x[2, 0] = float("nan")
    q, scale = function(x)
    assert (q[0].float() == 0).all() and (q[1].float() == 0).all()
    assert scale.isfinite().all() and (scale > 0).all()
    assert q[2, 0].float().isnan() and q[2, 1:].float().isfinite().all()
    assert (q[3].float() == LARGEST).all()


@pytest.mark.parametrize("shape", [(8,), (0, 8), (2, 3, 8), (2, 3, 2, 8)])
def test_leading_dimensions(device, shape):
    x, residual = torch.randn(2, *shape, device=device)
    weight = torch.randn(8, device=device)
    total = x + residual
    assert_quantized(*fused_add_rms_norm_quantize(x, residual, weight)[:2], rms_norm_ref(total, weight))
    assert_quantized(*silu_and_mul_quantize(x), silu_and_mul_ref(x))
    assert_quantized(*quantize_rows(x), x)


@pytest.mark.parametrize(
    ("x", "residual", "weight", "message"),
    [
        (torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, 4), torch.zeros(4), "x must be torch.float16"),
        (torch.zeros(2, 20000), torch.zeros(2, 20000), torch.zeros(20000), "rows of 1 to 16384 elements"),
        (torch.zeros(2, 0), torch.zeros(2, 0), torch.zeros(0), "rows of 1 to 16384 elements"),
        (torch.zeros(2, 4), torch.zeros(2, 5), torch.zeros(4), "residual must have shape"),
        (torch.zeros(2, 4), torch.zeros(2, 4), torch.zeros(5), "weight must have shape"),
    ],
)
def test_bad_norm_arguments(x, residual, weight, message):
    for function in (fused_add_rms_norm_quantize, fused_add_rms_norm_quantize_ref):
        with pytest.raises(ValueError, match=message):
            function(x, residual, weight)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(2, 5), "x must have an even last dimension"),
        (torch.zeros(2, 0), "x must have an even last dimension"),
        (torch.zeros(2, 4, dtype=torch.int32), "x must be torch.float16"),
        (torch.zeros(4, 2).t(), "x must be contiguous"),
    ],
)
def test_bad_silu_arguments(x, message):
    for function in (silu_and_mul_quantize, silu_and_mul_quantize_ref):
        with pytest.raises(ValueError, match=message):
            function(x)
    if "even" not in message or not x.shape[-1]:
        for function in (quantize_rows, quantize_rows_ref):
            with pytest.raises(ValueError, match=message.replace("an even last dimension", "rows of an element")):
                function(x)


def test_needs_a_gpu_that_knows_float8(monkeypatch):
    monkeypatch.setattr(float8, "chip_of", lambda device: Chip("cuda", 86, 84))
    with pytest.raises(ValueError, match=r"what is made of x is float8, .* this one has 8\.6: do not quantize there"):
        empty_rows(SimpleNamespace(device=torch.device("cuda"), shape=(2, 4)), 4)


def test_operators(device):
    """Into float32, since opcheck itself knows no float8."""
    x, q, scale = torch.randn(3, 16, device=device), torch.zeros(3, 8, device=device), torch.zeros(3, device=device)
    torch.library.opcheck(torch.ops.tritonllm.act_and_mul_quantize.default, (x, q, scale, "silu"))
    torch.library.opcheck(torch.ops.tritonllm.quantize_rows.default, (x[:, :8], q, scale))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 64, 4096])
def test_real_shapes(device, dtype, tokens):
    for n in (1024, 4096, 8192, 16384):
        x, residual = torch.randn(2, tokens, n, device=device, dtype=dtype)
        weight = torch.randn(n, device=device, dtype=dtype)
        q, scale, total = fused_add_rms_norm_quantize(x, residual, weight)
        assert_quantized(q, scale, rms_norm_ref(total.float(), weight))
    for n in (3072, 14336, 53248):
        x = torch.randn(tokens, 2 * n, device=device, dtype=dtype)
        assert_quantized(*silu_and_mul_quantize(x), silu_and_mul_ref(x.float()))
        for of in (torch.float8_e4m3fn, torch.int8):
            assert_quantized(*quantize_rows(x, of), x.float())

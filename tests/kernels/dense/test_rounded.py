"""Products that round their rows to what their weights are, float8 or int8: one meaning for any number of rows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.compare import FLOATS, assert_close, poisoned, with_row_padding

from tritonllm.kernels import (
    Groups,
    Weight,
    linear,
    linear_ref,
    linear_workspace_size,
    quantize_rows,
    quantize_weight,
    rms_norm_ref,
)
from tritonllm.kernels.dense.arguments import Fused, Operands
from tritonllm.kernels.dense.choice import MANY
from tritonllm.kernels.dense.linear import GATED, multiply
from tritonllm.kernels.dense.narrow import scales_of
from tritonllm.kernels.elementwise import ACTIVATIONS
from tritonllm.kernels.runtime import tuning

TILES = {"kernel": "tiles", "BLOCK_N": 32, "BLOCK_K": 32, "SPLIT_K": 3, "num_warps": 4, "num_stages": 3}
CONFIGS = {
    "parts": TILES,
    "parts, turned": TILES | {"TURNED": True, "SPLIT_K": 2, "BLOCK_K": 64},
    "blocks of rows": MANY | {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 64},
    "default": None,
}
# A product of rows that are not rounded differs from one of rows that are by 0.026 of its norm; of int8 by 0.007.
DIFFERENT = {"fp8": 0.01, "int8": 0.003}
SAME = 1e-3  # the matrix unit adds up float8 with fewer bits than float32 has


def narrow(n, k, rows, device, format="fp8"):
    """A weight whose rows differ in size."""
    weight = torch.randn(n, k) * torch.logspace(-2, 1, n)[:, None] / k**0.5
    return quantize_weight(weight.to(device), format, Groups(rows))._replace(rounds_rows=True)


def rounded(x, format):
    """In float64: the nearest numbers of the format, of which each row's largest is the largest."""
    x = x.double()
    scale = x.abs().amax(1, keepdim=True).clamp(min=1e-30) / (448 if format == "fp8" else 127)
    return ((x / scale).to(torch.float8_e4m3fn).double() if format == "fp8" else (x / scale).round()) * scale


def relative(result, expected):
    return ((result.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


@given(
    format=st.sampled_from(sorted(DIFFERENT)),
    config=st.sampled_from(sorted(CONFIGS)),
    m=st.integers(0, 40),
    n=st.integers(1, 70),
    k=st.integers(1, 300),
    rows=st.sampled_from([1, 3, 128]),
    dtype=st.sampled_from(FLOATS),
    out_dtype=st.sampled_from([None, torch.float32]),
    bias=st.booleans(),
    norm=st.booleans(),
    activation=st.sampled_from([None, *ACTIVATIONS]),
    gated=st.booleans(),
    add=st.booleans(),
    padding=st.sampled_from([0, 1, 16]),
    scale=st.sampled_from([1e-3, 1.0, 1e3]),
)
def test_products(
    device, format, config, m, n, k, rows, dtype, out_dtype, bias, norm, activation, gated, add, padding, scale
):
    """Whatever is fused, against the widened weight and rows that are rounded apart."""
    m = min(m, 16) if "parts" in config else m
    gated = gated and activation in GATED
    of = narrow(2 * n if gated else n, k, rows, device, format)
    x = with_row_padding((torch.randn(m, k) * (scale if norm else 1.0)).to(device, dtype), padding)
    fused = {
        "bias": torch.randn(len(of.data)).to(device, dtype) if bias else None,
        "norm_weight": torch.rand(k, device=device) + 0.5 if norm else None,
        "activation": activation,
        "gated": gated,
    }
    workspace = torch.zeros(linear_workspace_size(len(of.data)), dtype=torch.int32, device=device)
    target = with_row_padding(poisoned(m, n, dtype=out_dtype or dtype, device=device), padding)
    where, exact = {"out": target}, {}
    if add:
        exact = {"residual": target.copy_(torch.randn(m, n)).float(), "scale": 0.5}
        where = {"residual": target, "scale": 0.5}
    expected = linear_ref(x, of, **fused, **(exact or {"out": torch.empty(m, n, device=device)}))
    with tuning.override("linear_rounded", CONFIGS[config]) if CONFIGS[config] else torch.no_grad():
        assert linear(x, of, **fused, **where, workspace=workspace, constant_weight=bool(m % 2)) is target
    if norm:  # a norm's last bit moves a number between two of float8
        assert relative(target, expected.double()) < max(DIFFERENT[format], 0.2 / k**0.5)
    else:
        assert_close(target, expected, dtype)
    assert not workspace.any()


@pytest.mark.parametrize("format", DIFFERENT)
def test_the_reference_is_a_product_of_rounded_rows(device, format):
    of, x = narrow(48, 512, 1, device, format), torch.randn(7, 512, device=device)
    x[3] = 0.0
    wide = of.data.double() * of.scales.double()
    assert relative(linear_ref(x, of), rounded(x, format) @ wide.T) < 1e-6
    assert relative(linear_ref(x, of), x.double() @ wide.T) > DIFFERENT[format]
    weight = torch.rand(512, device=device)
    normed = rounded(rms_norm_ref(x, weight), format) @ wide.T
    assert relative(linear_ref(x, of, norm_weight=weight), normed) < DIFFERENT[format] / 2


@pytest.mark.parametrize("format", DIFFERENT)
@pytest.mark.parametrize("m", [1, 2, 17, 64, 129, 300])
def test_any_number_of_rows_means_the_same(device, m, format):
    """A row's product does not depend on how many others there are; nor on who rounds it."""
    of, x = narrow(64, 256, 1, device, format), torch.randn(300, 256, device=device)
    expected = linear_ref(x, of)[:m].double()
    assert relative(linear(x[:m], of), expected) < SAME
    q, scales = quantize_rows(x[:m], of.data.dtype)
    out = torch.empty(m, 64, device=device)
    fused = Fused(0.0, 0.0, None, False, False, 1.0, True)
    multiply(Operands(q, of.data, None, None, out, None), fused, scales_of(of)._replace(of_rows=scales))
    assert relative(out, expected) < SAME


@pytest.mark.parametrize(
    ("of", "x"),
    [
        (quantize_weight(torch.ones(8, 128), "int4"), torch.ones(2, 128)),
        (quantize_weight(torch.ones(8, 32), "fp8", Groups(1, 16)), torch.ones(2, 32)),
    ],
)
def test_of_other_weights_it_is_refused(of, x):
    with pytest.raises(ValueError, match=r"weight\.rounds_rows is of a product of 'fp8' or 'int8' whose groups have"):
        linear(x, of._replace(rounds_rows=True))
    with pytest.raises(ValueError, match=r"weight\.rounds_rows must be False for the format 'plain'"):
        linear(x, Weight(torch.ones(8, x.shape[1]), rounds_rows=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", DIFFERENT)
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (6144, 4096), (4096, 14336), (28672, 4096)])
def test_defaults_of_large_weights(n, k, format, dtype):
    """Every number of rows that has a kernel or a configuration of its own, twice with one workspace. What is added up
    with the bits that the matrix unit has for float8 differs by up to 0.3%."""
    workspace = torch.zeros(linear_workspace_size(n), dtype=torch.int32, device="cuda")
    of = narrow(n, k, 1, "cuda", format)
    for m in (1, 2, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 1024):
        x = torch.randn(m, k, device="cuda").to(dtype)
        norm = torch.rand(k, device="cuda").to(dtype) + 0.5
        for gated in (False, True):
            for norm_weight in (None, norm):
                fused = {"activation": "silu" if gated else None, "gated": gated, "norm_weight": norm_weight}
                columns = n // 2 if gated else n
                expected = linear_ref(x, of, **fused, out=torch.empty(m, columns, device="cuda")).double()
                for _ in range(2):
                    out = poisoned(m, columns, dtype=dtype, device="cuda")
                    linear(x, of, **fused, out=out, workspace=workspace, constant_weight=True)
                    error = relative(out, expected)
                    assert error < 8e-3, (m, gated, norm_weight is None, error)
        before = torch.randn(m, n, device="cuda").to(dtype)
        after = before.clone()
        linear(x, of, residual=after, workspace=workspace)
        assert relative(after.float() - before.float(), linear_ref(x, of).double()) < 2e-2
    assert not workspace.any()

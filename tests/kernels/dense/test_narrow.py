"""Narrow weights: what a format rounds, what products make of it, and what is refused."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from support.compare import FLOATS, assert_close, poisoned, with_row_padding

from tritonllm.kernels import (
    Groups,
    Weight,
    add_linear,
    linear,
    linear_ref,
    linear_workspace_size,
    quantize_weight,
    widen_weight,
    widen_weight_ref,
)
from tritonllm.kernels.dense.choice import TORCH
from tritonllm.kernels.dense.linear import GATED, MAX_M, MAX_NARROW_M
from tritonllm.kernels.dense.narrow import BY_ROW, e2m1_values, unit_of, unpack_nibbles
from tritonllm.kernels.dense.portable.rows import MAX_ROWS
from tritonllm.kernels.dense.weight import PACKED
from tritonllm.kernels.elementwise import ACTIVATIONS
from tritonllm.kernels.runtime import tuning

FORMATS = ("fp8", "int8", "int4", "fp4")
GROUPS = st.builds(Groups, rows=st.sampled_from([1, 3, 128]), columns=st.sampled_from([0, 16, 64, 128]))
ROWS = {"kernel": "rows", "LATE": False, "BLOCK_N": 4, "BLOCK_K": 64, "num_warps": 4}
TILES = {"kernel": "tiles", "BLOCK_N": 32, "BLOCK_K": 32, "SPLIT_K": 3, "num_warps": 4, "num_stages": 3}
CONFIGS = {
    "rows": ROWS,
    "rows, one tile": ROWS | {"LATE": True, "BLOCK_K": 256, "BLOCK_N": 2},
    "tiles": TILES,
    "tiles, whole": TILES | {"SPLIT_K": 1, "BLOCK_K": 64},
    "tiles, turned": TILES | {"TURNED": True, "SPLIT_K": 2, "BLOCK_K": 64},
    "torch": TORCH,
}


def narrow(n, k, format, groups, device, *, std=1.0, padding=0, scale_dtype=torch.float32):
    """A weight whose groups differ in size, its rows apart in memory."""
    weight = torch.randn(n, k) * torch.logspace(-2, 1, max(n, 1))[:n, None] * std / max(k, 1) ** 0.5
    of = quantize_weight(weight.to(device), format, groups)
    scales, zeros, row_scales = of.scales, None, None
    if format == "fp4" and scale_dtype != torch.float32:  # as NVFP4 has them
        scales = (0.01 + 400 * torch.rand(scales.shape) / max(k, 1)).to(device, torch.float8_e4m3fn)
        row_scales = torch.logspace(-2, 1, max(n, 1))[:n].to(device)
    elif format != "fp4":
        scales = scales.to(scale_dtype)
    if format == "int4" and k % 3:
        zeros = with_padding((torch.arange(scales.numel(), device=device) % 16).byte().view(scales.shape), padding)
    data = with_padding(of.data, padding)
    bytes_ = with_padding(scales.view(torch.uint8), padding) if scales.itemsize == 1 else None
    scales = with_row_padding(scales, padding) if bytes_ is None else bytes_.view(scales.dtype)
    return of._replace(data=data, scales=scales, zeros=zeros, row_scales=row_scales)


def in_units(format, groups, k):
    """The least number of columns from ``k`` on that the format has."""
    assume(format != "int4" or groups.columns != 16)
    unit = unit_of(groups) if format in PACKED else 1
    return -(-k // unit) * unit


def numbers_of(of):
    """The numbers before scales, as float64 on the CPU."""
    if of.format not in PACKED:
        return of.data.cpu().double()
    if of.format == "fp4":
        return e2m1_values(torch.device("cpu"))[unpack_nibbles(of.data.cpu(), of.groups).int()].double()
    zeros = 8 if of.zeros is None else spread(of._replace(scales=of.zeros), len(of.data), of.columns).double()
    return unpack_nibbles(of.data.cpu(), of.groups).double() - zeros


def with_padding(data, padding):
    """As :func:`with_row_padding`, whose poison no integer has."""
    wide = torch.full((len(data), data.shape[1] + padding), 77, device=data.device).to(data.dtype)
    wide[:, : data.shape[1]] = data
    return wide[:, : data.shape[1]]


def spread(of, n, k):
    """The scale of each element."""
    rows = torch.arange(n) // of.groups.rows
    columns = torch.arange(k) // of.groups.columns if of.groups.columns else torch.zeros(k, dtype=torch.long)
    scales = of.scales.cpu()
    if scales.itemsize == 1 and of.format == "fp4":
        scales = scales.float()
    scales = scales[rows[:, None], columns]
    return scales if of.row_scales is None else scales * of.row_scales.cpu()[:, None]


@given(
    format=st.sampled_from(FORMATS),
    groups=GROUPS,
    n=st.integers(0, 140),
    k=st.integers(0, 200),
    dtype=st.sampled_from(FLOATS),
    std=st.sampled_from([0.0, 1e-20, 1e-2, 1.0, 1e4]),
)
def test_each_number_is_the_nearest_of_its_group(device, format, groups, n, k, dtype, std):
    """Half a step away at most, and what float32 rounds: of integers the scale is a step; of float8 a step is a
    sixteenth to an eighth of the number, or the smallest number; of four bits a quarter to a half, or that."""
    k = in_units(format, groups, k)
    weight = (torch.randn(n, k, dtype=torch.float64) * std).clamp(-6e4, 6e4).to(device, dtype)
    of = quantize_weight(weight, format, groups)
    assert of.format == format and of.scales.shape == groups.shape(n, k) and (len(of.data), of.columns) == (n, k)
    scale, exact = spread(of, n, k).double(), weight.cpu().double()
    error = (numbers_of(of) * scale - exact).abs()
    if format == "fp4":
        assert (error <= (exact.abs() / 4).maximum(scale / 4) * 1.0000001).all()
        assert (of.scales.float().log2() % 1 == 0).all()
    elif format != "fp8":
        assert (error <= scale * (0.5 + 2e-5)).all()
    else:
        assert (error <= (exact.abs() / 16).maximum(scale * 2.0**-10) * 1.0000001).all()
        assert (torch.frexp(of.scales)[0] == 0.5).all()
    widened = widen_weight(of, torch.float32)
    assert torch.equal(widened.cpu().double(), (numbers_of(of).float() * scale.float()).double())


@given(
    format=st.sampled_from(FORMATS),
    groups=GROUPS,
    n=st.integers(0, 40),
    k=st.integers(0, 700),
    dtype=st.sampled_from(FLOATS),
    padding=st.sampled_from([0, 1, 8]),
    scale_dtype=st.sampled_from(FLOATS),
)
def test_widened(device, format, groups, n, k, dtype, padding, scale_dtype):
    k = in_units(format, groups, k)
    of = narrow(n, k, format, groups, device, padding=padding, scale_dtype=scale_dtype)
    out = with_row_padding(poisoned(n, k, dtype=dtype, device=device), padding)
    assert widen_weight(of, dtype, out=out) is out
    assert torch.equal(out, widen_weight_ref(of, dtype))
    exact = numbers_of(of).float() * spread(of, n, k).float()
    assert torch.equal(out.cpu(), exact.to(dtype))


@given(
    format=st.sampled_from(FORMATS),
    groups=GROUPS,
    config=st.sampled_from(sorted(CONFIGS)),
    m=st.integers(0, 20),
    n=st.integers(1, 70),
    k=st.integers(1, 300),
    dtype=st.sampled_from(FLOATS),
    out_dtype=st.sampled_from([None, torch.float32]),
    bias=st.booleans(),
    norm=st.booleans(),
    activation=st.sampled_from([None, *ACTIVATIONS]),
    gated=st.booleans(),
    add=st.booleans(),
    padding=st.sampled_from([0, 1, 8]),
    scale_dtype=st.sampled_from(FLOATS),
)
def test_products(
    device, format, groups, config, m, n, k, dtype, out_dtype, bias, norm, activation, gated, add, padding, scale_dtype
):
    """Every kernel, with whatever is fused, against the widened weight in float32."""
    config = CONFIGS[config]
    m = min(m, MAX_ROWS) if config["kernel"] == "rows" else m
    gated = gated and activation in GATED
    rows = 2 * n if gated else n
    k = in_units(format, groups, k)
    of = narrow(rows, k, format, groups, device, padding=padding, scale_dtype=scale_dtype)
    x = with_row_padding(torch.randn(m, k).to(device, dtype), padding)
    fused = {
        "bias": torch.randn(rows).to(device, dtype) if bias else None,
        "norm_weight": torch.randn(k).to(device, dtype) if norm else None,
        "activation": activation,
        "gated": gated,
    }
    exact = {name: value.float() if isinstance(value, torch.Tensor) else value for name, value in fused.items()}
    workspace = torch.zeros(linear_workspace_size(rows), dtype=torch.int32, device=device)
    target = with_row_padding(poisoned(m, n, dtype=out_dtype or dtype, device=device), padding)
    where = {"out": target}
    if add:
        exact |= {"residual": target.copy_(torch.randn(m, n)).float(), "scale": 0.5}
        where = {"residual": target, "scale": 0.5}
    expected = linear_ref(x.float(), widen_weight_ref(of, torch.float32), **exact)
    with tuning.override("linear_narrow", config):
        assert linear(x, of, **fused, **where, workspace=workspace, constant_weight=bool(m % 2)) is target
    assert_close(target, expected, dtype)
    assert not workspace.any()


@pytest.mark.parametrize("m", [1, 16, 32, MAX_M, MAX_NARROW_M, MAX_NARROW_M + 1])
@pytest.mark.parametrize(
    ("format", "groups"), [("fp8", BY_ROW), ("fp8", Groups(128, 128)), ("int4", Groups(1, 128)), ("fp4", Groups(1, 32))]
)
def test_defaults_and_more_rows(device, format, groups, m):
    """What a table or a default gives, and the rows that take the weight widened."""
    of, x = narrow(48, 256, format, groups, device), torch.randn(m, 256, device=device)
    assert_close(linear(x, of), x @ widen_weight_ref(of, torch.float32).T)
    gated = linear(x, of, activation="silu", gated=True)
    assert_close(gated, linear_ref(x, widen_weight_ref(of, torch.float32), activation="silu", gated=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (6144, 4096), (4096, 14336), (28672, 4096)])
def test_defaults_of_large_weights(n, k, format, dtype):
    """Every number of rows that has a configuration of its own, launched twice with one workspace; by rows and in
    groups of 128 columns, and as MXFP4 and NVFP4 have them."""
    workspace = torch.zeros(linear_workspace_size(n), dtype=torch.int32, device="cuda")
    for groups in (Groups(1, 32), Groups(1, 16)) if format == "fp4" else (BY_ROW, Groups(1, 128)):
        of = narrow(n, k, format, groups, "cuda", scale_dtype=dtype if groups.columns == 16 else torch.float32)
        wide = widen_weight_ref(of, torch.float32)
        for m in (1, 2, 16, 17, 32, 33, 64, 65, 128, 129):
            x = torch.randn(m, k, device="cuda").to(dtype)
            for gated in (False, True):
                fused = {"activation": "silu" if gated else None, "gated": gated}
                expected = linear_ref(x.float(), wide, **fused)
                for _ in range(2):
                    out = poisoned(*expected.shape, dtype=dtype, device="cuda")
                    linear(x, of, **fused, out=out, workspace=workspace, constant_weight=True)
                    error = (out.float() - expected).norm() / expected.norm()
                    assert error < 4e-3, (m, gated, groups, error.item())
        assert not workspace.any()


def test_sums_of_nothing(device):
    of, bias = quantize_weight(torch.ones(6, 0, device=device), "int8"), torch.arange(6.0, device=device)
    assert torch.equal(linear(torch.ones(2, 0, device=device), of, bias), bias.expand(2, 6))


def wrong(**changed):
    return quantize_weight(torch.ones(8, 32), "fp8", Groups(1, 16))._replace(**changed)


@pytest.mark.parametrize(
    ("of", "message"),
    [
        (wrong(scales=None), "weight.scales must be there for the format 'fp8'"),
        (wrong(scales=torch.ones(8, 3)), r"weight.scales must have shape \[8, 2\], got \[8, 3\]"),
        (wrong(scales=torch.ones(8, 2).double()), "weight.scales must be torch.float16 or .*, got torch.float64"),
        (wrong(zeros=torch.ones(8, 2).byte()), "weight.zeros must be None for the format 'fp8'"),
        (wrong(format="int8"), "weight.data must be torch.int8, got torch.float8_e4m3fn"),
        (wrong(format="onednn"), "weight must be a plain weight here, got one of the format 'onednn'"),
        (wrong(groups=Groups(0, 16)), "groups.rows must be 1 or more, got 0"),
        (wrong(groups=Groups(1, 24)), r"groups.columns must be 0 \(all\) or a power of two from 16 to 4096, got 24"),
        (
            wrong(data=torch.ones(8, 31).to(torch.float8_e4m3fn)),
            r"weight.data must have shape \[N, 32\], got \[8, 31\]",
        ),
    ],
)
def test_what_does_not_fit_is_refused(of, message):
    with pytest.raises(ValueError, match=message):
        linear(torch.ones(2, 32), of)


def test_refused_before_anything_is_rounded():
    for number in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="weight must be finite"):
            quantize_weight(torch.full((2, 16), number), "fp8")
    with pytest.raises(ValueError, match="format must be one of fp8, int8, int4, fp4, got 'int3'"):
        quantize_weight(torch.ones(2, 16), "int3")
    with pytest.raises(ValueError, match=r"groups\.columns must be"):
        quantize_weight(torch.ones(2, 16), "fp8", Groups(1, 8192))
    with pytest.raises(ValueError, match="32 or more for the format 'int4'"):
        quantize_weight(torch.ones(2, 96), "int4", Groups(1, 16))
    with pytest.raises(ValueError, match="weight must have a multiple of 64 columns in the format 'int4', got 96"):
        quantize_weight(torch.ones(2, 96), "int4", Groups(1, 64))
    with pytest.raises(ValueError, match="weight must have shape"):
        quantize_weight(torch.ones(16), "fp8")


def test_operations_that_read_plain_weights_refuse_a_narrow_one():
    of, x = quantize_weight(torch.ones(16, 16), "int8"), torch.ones(2, 16)
    with pytest.raises(ValueError, match="weight must be a plain weight here, got one of the format 'int8'"):
        add_linear(x, of, None, x.clone(), torch.ones(16))
    assert torch.equal(widen_weight(Weight(x), torch.float16), x.half())

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.compare import FLOATS, assert_close, poisoned, with_row_padding

from tritonllm.kernels import batch_invariant_linear, batch_invariant_linear_ref
from tritonllm.kernels.dense.invariant import default_config
from tritonllm.kernels.elementwise.activation import ACTIVATIONS
from tritonllm.kernels.runtime import tuning

SMALL = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 32, "num_warps": 4, "STAGES": 2}


def make(device, m, n, k, dtype, padding=0, std=1.0):
    x = with_row_padding((torch.randn(m, k) * std).to(device, dtype), padding)
    return x, with_row_padding((torch.randn(n, k) / max(k, 1) ** 0.5).to(device, dtype), padding)


@given(
    m=st.integers(0, 70),
    n=st.integers(1, 90),
    k=st.integers(0, 130),
    dtype=st.sampled_from(FLOATS),
    out_dtype=st.sampled_from([None, torch.float32]),
    std=st.sampled_from([1e-2, 1.0, 50.0]),
    bias=st.booleans(),
    padding=st.sampled_from([0, 1, 8]),
)
def test_matches_reference(device, m, n, k, dtype, out_dtype, std, bias, padding):
    x, weight = make(device, m, n, k, dtype, padding, std)
    added = torch.randn(n).to(device, dtype) if bias else None
    out = with_row_padding(poisoned(m, n, dtype=out_dtype or dtype, device=device), padding)
    with tuning.override("batch_invariant_linear", SMALL):
        assert batch_invariant_linear(x, weight, added, out=out) is out
    expected = batch_invariant_linear_ref(x.float(), weight.float(), None if added is None else added.float())
    assert_close(out, expected, dtype)


@given(
    m=st.integers(0, 70),
    n=st.integers(1, 40),
    k=st.integers(0, 130),
    dtype=st.sampled_from(FLOATS),
    activation=st.sampled_from(["silu", "gelu_tanh"]),
    bias=st.booleans(),
)
def test_a_gated_product_matches_reference(device, m, n, k, dtype, activation, bias):
    x, weight = make(device, m, 2 * n, k, dtype)
    added = torch.randn(2 * n).to(device, dtype) if bias else None
    out = poisoned(m, n, dtype=dtype, device=device)
    with tuning.override("batch_invariant_linear", SMALL):
        assert batch_invariant_linear(x, weight, added, activation=activation, out=out) is out
    wide = None if added is None else added.float()
    assert_close(out, batch_invariant_linear_ref(x.float(), weight.float(), wide, activation=activation), dtype)
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if added is None else added.double())
    gate, up = exact.chunk(2, dim=-1)
    assert_close(out, (ACTIVATIONS[activation](gate) * up).float(), dtype)


@pytest.mark.parametrize("k", [31, 64, 100])
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_reference_keeps_rows_apart(device, dtype, k):
    """Of 16 rows at once the same row had other bits at other places, where rows are of odd length."""
    x, weight = make(device, 40, 8, k, dtype)
    whole = batch_invariant_linear_ref(x, weight)
    for first, end in ((0, 1), (39, 40), (3, 20), (17, 34), (5, 40)):
        assert torch.equal(batch_invariant_linear_ref(x[first:end], weight), whole[first:end])


@pytest.mark.gpu  # the interpreter multiplies with numpy, whose rows depend on their place
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_row_has_the_same_bits_among_any_others(device, dtype):
    x, weight = make(device, 70, 48, 96, dtype)
    bias = torch.randn(48).to(device, dtype)
    with tuning.override("batch_invariant_linear", SMALL):
        whole = batch_invariant_linear(x, weight, bias)
        for first, end in ((0, 1), (69, 70), (3, 20), (17, 34), (5, 70)):
            part = batch_invariant_linear(x[first:end], weight, bias)
            assert torch.equal(part, whole[first:end])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1024, 2048), (6144, 4096), (4096, 14336), (50257, 336), (1000, 1016)])
def test_no_size_of_a_step_changes_a_bit(device, shape, dtype):
    """Every kind of tile that the sizes of steps choose, and rows at every place of it."""
    x, weight = make(device, 1500, *shape, dtype)
    whole = batch_invariant_linear(x, weight)
    for rows in (1, 2, 16, 17, 31, 33, 64, 65, 100, 128, 129, 160, 256, 257, 512, 1000):
        for first in (0, 1, 1500 - rows):
            part = batch_invariant_linear(x[first : first + rows], weight)
            assert torch.equal(part, whole[first : first + rows]), (rows, first)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1024, 2048), (28672, 4096), (6144, 1024), (2000, 336), (1016, 1000)])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_no_size_of_a_step_changes_a_bit_of_a_gated_product(device, shape, dtype, activation):
    """Hopper's kernel has more than 1024 rows."""
    x, weight = make(device, 2500, *shape, dtype)
    whole = batch_invariant_linear(x, weight, activation=activation)
    for rows in (1, 17, 33, 65, 129, 160, 256, 1000, 1024, 1025, 2048):
        for first in (0, 1, 2500 - rows):
            part = batch_invariant_linear(x[first : first + rows], weight, activation=activation)
            assert torch.equal(part, whole[first : first + rows]), (rows, first)


@pytest.mark.gpu
def test_the_test_above_would_see_another_order(device):
    """cuBLAS sums up in another order for few rows."""
    x, weight = make(device, 512, 4096, 14336, torch.bfloat16)
    assert not torch.equal(torch.mm(x[:1], weight.t()), torch.mm(x, weight.t())[:1])


@pytest.mark.gpu
def test_rows_beyond_32_bits(device):
    x, weight = torch.ones(70000, 32, device=device).bfloat16(), torch.ones(32768, 32, device=device).bfloat16()
    out = batch_invariant_linear(x, weight)
    assert bool((out == 32).all())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 3, 4)}, "x must have shape"),
        ({"weight": torch.zeros(5, 7)}, "weight"),
        ({"weight": torch.zeros(5, 4, dtype=torch.float16)}, "weight"),
        ({"bias": torch.zeros(4)}, "bias"),
        ({"out": torch.zeros(2, 4)}, "out"),
    ],
)
def test_bad_arguments_are_named(change, message):
    given = {"x": torch.zeros(2, 4), "weight": torch.zeros(5, 4), "bias": None, "out": None} | change
    with pytest.raises(ValueError, match=message):
        batch_invariant_linear(given["x"], given["weight"], given["bias"], out=given["out"])


@pytest.mark.parametrize("gated", ["no", "yes"])
@pytest.mark.parametrize("arch", ["sm90", "any"])
def test_tiles_fit_shared_memory(arch, gated):
    most = 227 * 1024 if arch == "sm90" else 99 * 1024  # of consumers' Ampere and Ada
    for itemsize in (2, 4):
        for m in (1, 16, 32, 64, 128, 256, 512, 8192):
            for n in (512, 1024, 4096, 6144, 28672, 151936):
                tile = default_config(m, n, 4096, itemsize, arch, gated)
                weights = tile["BLOCK_N"] * (2 if gated == "yes" else 1)
                used = (tile["BLOCK_M"] + weights) * tile["BLOCK_K"] * itemsize * tile["STAGES"]
                assert used <= most, (m, n, tile)

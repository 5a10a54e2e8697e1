import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.compare import FLOATS, assert_close, with_row_padding

from tritonllm.kernels import moe_logits, moe_logits_ref
from tritonllm.kernels.runtime import tuning


def problem(tokens, experts, k, dtype, device, size=1.0):
    x = (size * torch.randn(tokens, k)).to(device, dtype)
    weight = (torch.randn(experts, k) / k**0.5).to(device, dtype)
    return x, weight, torch.randn(k, device=device)


def check(args, dtype, **kwargs):
    logits, normed = moe_logits(*args, **kwargs)
    assert (logits.dtype, normed.dtype) == (torch.float32, dtype)
    expected = moe_logits_ref(*(None if t is None else t.float() for t in args), **kwargs)
    assert_close(logits, expected[0], torch.float32, "logits")
    assert_close(normed, expected[1], dtype, "normed")


@given(
    tokens=st.integers(0, 3),
    experts=st.integers(1, 20),
    k=st.integers(1, 100),
    dtype=st.sampled_from(FLOATS),
    size=st.sampled_from([1e-3, 1.0, 1e3]),
    offset=st.sampled_from([0.0, 1.0]),
    has_bias=st.booleans(),
    padding=st.integers(0, 3),
    constant_weight=st.booleans(),
)
def test_matches_reference(device, tokens, experts, k, dtype, size, offset, has_bias, padding, constant_weight):
    """Tiles that cut rows and experts."""
    x, weight, norm_weight = problem(tokens, experts, k, dtype, device, size)
    bias = torch.randn(experts, device=device) if has_bias else None
    args = (with_row_padding(x, padding), with_row_padding(weight, padding), norm_weight, bias)
    numbers = {"norm_eps": 1e-5, "norm_weight_offset": offset, "constant_weight": constant_weight}
    with tuning.override("moe_logits", {"BLOCK_N": 4, "BLOCK_K": 32, "num_warps": 1}):
        check(args, dtype, **numbers)


def test_nan_stays_in_its_row(device):
    x, weight, norm_weight = problem(3, 8, 16, torch.float32, device)
    clean = moe_logits(x, weight, norm_weight)
    x[1] = float("nan")
    for out, before in zip(moe_logits(x, weight, norm_weight), clean, strict=True):
        assert out[1].isnan().all()
        assert torch.equal(out[::2], before[::2])


@pytest.mark.parametrize(
    ("kwargs", "names"),
    [
        ({"x": torch.zeros(8)}, "x must have shape"),
        ({"weight": torch.zeros(4, 7)}, r"weight must have shape \[E, 8\]"),
        ({"weight": torch.zeros(4, 8, dtype=torch.float16)}, "weight must have the dtype of x"),
        ({"norm_weight": torch.zeros(7)}, r"norm_weight must have shape \[8\]"),
        ({"bias": torch.zeros(5)}, r"bias must have shape \[4\]"),
    ],
)
def test_bad_arguments(kwargs, names):
    good = {"x": torch.zeros(2, 8), "weight": torch.zeros(4, 8), "norm_weight": torch.zeros(8)}
    with pytest.raises(ValueError, match=names):
        moe_logits(**{**good, **kwargs})


def test_operator(device):
    """Registered well enough for torch.compile: schema, fake tensors and functionalisation."""
    x, weight, norm_weight = problem(2, 8, 16, torch.bfloat16, device)
    outputs = torch.empty(2, 8, device=device), torch.empty_like(x)
    op = torch.ops.tritonllm.moe_logits.default
    torch.library.opcheck(op, (x, norm_weight, weight, None, *outputs, 1e-6, 0.0, True))
    torch.library.opcheck(op, (x, norm_weight, weight, torch.rand(8, device=device), *outputs, 1e-6, 1.0, False))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 2, 5])
@pytest.mark.parametrize(("experts", "k"), [(128, 2048), (8, 4096), (32, 2880), (256, 7168), (60, 1000)])
def test_real_shapes(device, dtype, tokens, experts, k):
    x, weight, norm_weight = problem(tokens, experts, k, dtype, device)
    check((x, weight, norm_weight, None), dtype)
    check((x, weight, norm_weight.to(dtype), torch.randn(experts, device=device)), dtype, constant_weight=True)


@pytest.mark.gpu
def test_more_tokens_than_an_axis_holds(device):
    x, weight, norm_weight = problem(70_000, 16, 64, torch.bfloat16, device)
    check((x, weight, norm_weight, None), torch.bfloat16)


@pytest.mark.gpu
def test_in_a_graph(device):
    """Where kernels overlap, the row that the kernel before writes is waited for."""
    x, weight, norm_weight = problem(1, 128, 2048, torch.bfloat16, device)
    graph = torch.cuda.CUDAGraph()
    moe_logits(x, weight, norm_weight, constant_weight=True)
    with torch.cuda.graph(graph):
        row = x
        for _ in range(5):
            logits, row = moe_logits(row + 1, weight, norm_weight, constant_weight=True)
    x.mul_(2)
    graph.replay()
    expected = x
    for _ in range(5):
        expected_logits, expected = moe_logits(expected + 1, weight, norm_weight)
    assert torch.equal(logits, expected_logits)
    assert torch.equal(row, expected)

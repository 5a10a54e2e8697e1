import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.compare import FLOATS, assert_close, poisoned, with_row_padding
from torch.nn import functional as F

from tritonllm.kernels import linear, linear_ref, linear_workspace_size, rms_norm_ref
from tritonllm.kernels.dense.choice import TORCH
from tritonllm.kernels.dense.linear import ACTIVATIONS, GATED, MAX_M
from tritonllm.kernels.dense.portable.rows import MAX_ROWS
from tritonllm.kernels.runtime import tuning

ROWS = {"kernel": "rows", "LATE": False, "BLOCK_N": 4, "BLOCK_K": 64, "num_warps": 4}
TILES = {"kernel": "tiles", "BLOCK_N": 32, "BLOCK_K": 32, "SPLIT_K": 3, "num_warps": 4, "num_stages": 3}
CONFIGS = {
    "rows": ROWS,
    "rows, one tile": ROWS | {"LATE": True, "BLOCK_K": 256, "BLOCK_N": 2},
    "tiles": TILES,
    "tiles, whole": TILES | {"SPLIT_K": 1},
    "torch": TORCH,
}


def make(device, m, n, k, dtype, *, padding=0, std=1.0, gated=False):
    """``x`` and a weight for ``n`` columns of the result."""
    rows = 2 * n if gated else n
    x = with_row_padding((torch.randn(m, k) * std).to(device, dtype), padding)
    return x, with_row_padding((torch.randn(rows, k) / max(k, 1) ** 0.5).to(device, dtype), padding)


@given(
    config=st.sampled_from(sorted(CONFIGS)),
    m=st.integers(0, 20),
    n=st.integers(1, 70),
    k=st.integers(1, 200),
    dtype=st.sampled_from(FLOATS),
    out_dtype=st.sampled_from([None, torch.float32]),
    std=st.sampled_from([1e-2, 1.0, 50.0]),
    bias=st.booleans(),
    norm=st.booleans(),
    activation=st.sampled_from([None, *ACTIVATIONS]),
    gated=st.booleans(),
    add=st.booleans(),
    padding=st.sampled_from([0, 1, 8]),
)
def test_matches_reference(device, config, m, n, k, dtype, out_dtype, std, bias, norm, activation, gated, add, padding):
    """Every kernel, with whatever is fused; where torch computes the product, its result is rounded in between."""
    config = CONFIGS[config]
    m = min(m, MAX_ROWS) if config["kernel"] == "rows" else m
    gated = gated and activation in GATED
    x, weight = make(device, m, n, k, dtype, padding=padding, std=std, gated=gated)
    fused = {
        "bias": torch.randn(len(weight)).to(device, dtype) if bias else None,
        "norm_weight": torch.randn(k).to(device, dtype) if norm else None,
        "norm_weight_offset": 1.0,
        "activation": activation,
        "gated": gated,
    }
    exact = {name: value.float() if isinstance(value, torch.Tensor) else value for name, value in fused.items()}
    workspace = torch.zeros(linear_workspace_size(len(weight)), dtype=torch.int32, device=device)
    target = with_row_padding(poisoned(m, n, dtype=out_dtype or dtype, device=device), padding)
    where = {"out": target}
    if add:
        exact |= {"residual": target.copy_(torch.randn(m, n)).float(), "scale": 0.5}
        where = {"residual": target, "scale": 0.5}
    expected = linear_ref(x.float(), weight.float(), **exact)
    with tuning.override("linear", config):
        constant = bool(m % 2)
        assert linear(x, weight, **fused, **where, workspace=workspace, constant_weight=constant) is target
    assert_close(target, expected, dtype)
    assert not workspace.any()


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("k", [1, 63, 100, 256])
def test_a_norm_of_columns_that_fill_no_tile(device, config, k):
    x, weight = make(device, MAX_ROWS, 10, k, torch.float32)
    norm = torch.randn(k, device=device)
    with tuning.override("linear", CONFIGS[config]):
        out = linear(x, weight, norm_weight=norm)
    assert_close(out, linear_ref(x, weight, norm_weight=norm))


@pytest.mark.parametrize("config", [ROWS, TILES, TORCH], ids=lambda config: config["kernel"])
@pytest.mark.parametrize("shape", [(24,), (2, 24), (0, 24), (1, 2, 24), (2, 0, 24)])
def test_leading_dimensions(device, config, shape):
    x, weight = torch.randn(shape, device=device), torch.randn(10, 24, device=device)
    with tuning.override("linear", config):
        out = linear(x, weight)
    assert out.shape == (*shape[:-1], 10)
    assert_close(out, F.linear(x, weight))


@pytest.mark.parametrize("config", [ROWS, TILES, TORCH], ids=lambda config: config["kernel"])
@pytest.mark.parametrize(("n", "k"), [(6, 0), (0, 8), (0, 0)])
def test_nothing_to_sum_or_to_write(device, config, n, k):
    """A sum of nothing is 0; no columns are no work."""
    x, weight = torch.ones(2, 3, k, device=device), torch.ones(n, k, device=device)
    bias, norm_weight = torch.arange(float(n), device=device), torch.ones(k, device=device)
    with tuning.override("linear", config):
        for fn in (linear, linear_ref):
            assert torch.equal(fn(x, weight), torch.zeros(2, 3, n, device=device))
            assert torch.equal(fn(x, weight, bias, norm_weight=norm_weight), bias.expand(2, 3, n))
            assert torch.equal(fn(x, weight, bias, activation="silu", gated=True), gate_of(bias).expand(2, 3, n // 2))
            residual = torch.ones(2, 3, n, device=device)
            assert torch.equal(fn(x, weight, bias, residual=residual, scale=0.5), 1 + 0.5 * bias.expand(2, 3, n))


def gate_of(bias):
    gate, up = bias.chunk(2)
    return F.silu(gate) * up


def test_reference_matches_torch(device):
    """The reference itself, against torch's operations in turn."""
    x, weight, bias = (torch.randn(*shape, device=device) for shape in ((3, 20), (16, 20), (16,)))
    norm_weight, residual = torch.randn(20, device=device), torch.randn(3, 8, device=device)
    gate, up = F.linear(F.rms_norm(x, (20,), norm_weight + 1.0, 1e-5), weight, bias).chunk(2, -1)
    expected = residual + 0.3 * (F.silu(gate) * up)
    fused = {"norm_weight": norm_weight, "norm_weight_offset": 1.0, "norm_eps": 1e-5, "activation": "silu"}
    got = linear_ref(x, weight, bias, **fused, gated=True, residual=residual, scale=0.3)
    assert got is residual
    assert_close(got, expected)
    assert_close(linear_ref(x, weight, norm_weight=norm_weight), F.linear(rms_norm_ref(x, norm_weight), weight))


@pytest.mark.parametrize("config", [ROWS, TILES, TILES | {"SPLIT_K": 1}], ids=["rows", "split", "whole"])
def test_a_row_does_not_depend_on_the_others(device, config):
    """Bit for bit, also if another row is not finite; and twice the same."""
    x, weight = make(device, 2, 40, 96, torch.bfloat16)
    norm_weight = torch.randn(96, device=device)
    with tuning.override("linear", config):
        first = linear(x, weight, norm_weight=norm_weight)
        assert torch.equal(first, linear(x, weight, norm_weight=norm_weight))
        x[0] = float("nan")
        second = linear(x, weight, norm_weight=norm_weight)
    assert second[0].isnan().all() and torch.equal(first[1], second[1])


@pytest.mark.parametrize("config", [ROWS, TILES, TORCH], ids=lambda config: config["kernel"])
def test_large_values(device, config):
    """Squares and sums beyond float16's range, and infinity, which stays."""
    x, weight = make(device, 2, 20, 64, torch.float16)
    x *= 10000.0
    norm_weight = torch.ones(64, device=device, dtype=torch.float16)
    with tuning.override("linear", config):
        assert_close(linear(x, weight, norm_weight=norm_weight), linear_ref(x, weight, norm_weight=norm_weight).float())
        weight[0, 0] = float("inf")
        out = linear(x, weight)
    assert out[:, 0].isinf().all() and out[:, 1:].isfinite().all()


ZEROS = {"x": torch.zeros(2, 8), "weight": torch.zeros(6, 8)}


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"x": torch.zeros(2, 8, dtype=torch.int32)}, "x must be torch.float16"),
        ({"x": torch.zeros(8, 2).t()}, "x must be contiguous"),
        ({"weight": torch.zeros(6, 7)}, r"weight must have shape \[N, 8\], got \[6, 7\]"),
        ({"weight": torch.zeros(6, 8).half()}, "weight must have the dtype of x"),
        ({"bias": torch.zeros(5)}, r"bias must have shape \[6\]"),
        ({"bias": torch.zeros(6).half()}, "bias must have the dtype of x"),
        ({"norm_weight": torch.zeros(6)}, r"norm_weight must have shape \[8\]"),
        ({"activation": "swish"}, "activation must be one of silu, gelu, gelu_tanh, relu, relu2, got 'swish'"),
        ({"gated": True}, "activation must be silu or gelu or gelu_tanh if gated, got None"),
        ({"gated": True, "activation": "relu"}, "activation must be .* if gated, got 'relu'"),
        ({"gated": True, "activation": "silu", "weight": torch.zeros(5, 8)}, "even number of rows if gated"),
        ({"out": torch.zeros(2, 5)}, r"out must have shape \[2, 6\]"),
        ({"residual": torch.zeros(2, 5)}, r"residual must have shape \[2, 6\]"),
        ({"residual": torch.zeros(2, 6), "out": torch.zeros(2, 6)}, "out must be None if there is a residual"),
        ({"residual": torch.zeros(2, 6, device="meta")}, "residual must be on cpu"),
        ({"x": torch.zeros(1, 2, 8), "out": torch.zeros(1, 2, 7)[..., :6]}, "out must be contiguous if it has more"),
        ({"workspace": torch.zeros(0, dtype=torch.int32)}, "workspace must have 1 elements or more, got 0"),
        ({"workspace": torch.zeros(9)}, "workspace must be torch.int32"),
        ({"scale": 0.5}, r"scale=0\.5 needs residual"),
    ],
)
def test_bad_arguments(changes, names):
    with pytest.raises(ValueError, match=names):
        linear(**ZEROS | changes)


def test_operator(device):
    """Registered well enough for torch.compile: schema, fake tensors and functionalisation."""
    x, weight, out = (torch.randn(*shape, device=device) for shape in ((2, 8), (6, 8), (2, 6)))
    rest = (None, 1e-6, 0.0, None, False, True, 1.0, False, 0, None, 1, 0, None, None, False, None)
    torch.library.opcheck(torch.ops.tritonllm.linear.default, (x, weight, None, None, out, *rest))


# Qwen3-0.6B and Llama-3.1-8B, halves and quarters of larger models; an odd vocabulary
SHAPES = [(4096, 1024), (1024, 2048), (1024, 3072), (4096, 14336), (14336, 4096), (50257, 768)]
SHAPES += [(3072, 4096), (5120, 8192), (2560, 8192), (8192, 2048), (1536, 4096)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("m", [1, 2, 3, 16, 32, MAX_M, MAX_M + 1])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_real_shapes(device, m, n, k, dtype):
    x, weight = make(device, m, n, k, dtype)
    norm_weight = torch.randn(k, device=device, dtype=dtype)
    out = poisoned(m, n, dtype=torch.float32, device=device)
    assert_close(
        linear(x, weight, norm_weight=norm_weight, out=out), linear_ref(x, weight, norm_weight=norm_weight), dtype
    )
    residual = torch.randn(m, n, device=device).to(dtype)
    expected = linear_ref(x.float(), weight.float(), residual=residual.float())
    assert_close(linear(x, weight, residual=residual), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 2, 16, MAX_M])
@pytest.mark.parametrize(("inner", "k"), [(3072, 1024), (14336, 4096)])
def test_real_gates(device, m, inner, k):
    x, weight = make(device, m, inner, k, torch.bfloat16, gated=True)
    fused = {"norm_weight": torch.randn(k, device=device), "activation": "silu", "gated": True}
    assert_close(linear(x, weight, **fused), linear_ref(x.float(), weight.float(), **fused))


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 16])
def test_offsets_beyond_int32(device, m):
    """A weight of 2^31 elements and more: its last row is right."""
    k = 4096
    weight = torch.zeros(2**31 // k + 5, k, device=device, dtype=torch.bfloat16)
    weight[-1].normal_()
    x = torch.randn(m, k, device=device).to(torch.bfloat16)
    assert_close(linear(x, weight)[:, -1], linear_ref(x, weight[-1:]).float()[:, 0])


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "k"), [(1, 1024), (2, 1024), (16, 1024), (MAX_M, 1024), (1, 4096), (1, 6144)])
def test_a_captured_chain_waits_for_what_it_reads(device, m, k):
    """Products that depend on each other and overwrite each other's inputs, 40 in a row and started early: the same
    bits as with a wait after each. Weights of 1, 17 and 38 million elements let the next product start differently."""
    weights = [torch.randn(k, k, device=device).to(torch.bfloat16) / k**0.5 for _ in range(40)]
    start = torch.randn(m, k, device=device).to(torch.bfloat16)
    norm_weight = torch.ones(k, device=device)
    workspace = torch.zeros(linear_workspace_size(k), dtype=torch.int32, device=device)
    stream, inner = start.clone(), torch.empty_like(start)

    def chain(wait: bool) -> None:
        for i, weight in enumerate(weights):
            if i % 2 == 0:
                linear(stream, weight, norm_weight=norm_weight, out=inner, workspace=workspace, constant_weight=True)
            else:
                linear(inner, weight, residual=stream, workspace=workspace, constant_weight=True)
            if wait:
                torch.cuda.synchronize()

    chain(wait=True)
    expected = stream.clone(), inner.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream.copy_(start)
        chain(wait=False)
    for _ in range(20):
        stream.fill_(float("nan"))
        inner.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(stream, expected[0]) and torch.equal(inner, expected[1])


@pytest.mark.gpu
def test_fullgraph_compile(device):
    x, weight = torch.randn(2, 64, device=device), torch.randn(32, 64, device=device)
    compiled = torch.compile(lambda x: linear(x, weight, activation="silu") + 1, fullgraph=True)
    assert_close(compiled(x), linear_ref(x, weight, activation="silu") + 1)

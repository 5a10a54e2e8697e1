"""The kernels for a few tokens, at sizes that the launcher would leave to the grouped products as well."""

from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.compare import FLOATS, assert_close, with_row_padding

from tritonllm.kernels import fused_moe, fused_moe_ref, moe_route
from tritonllm.kernels.elementwise import GATED_ACTIVATIONS
from tritonllm.kernels.moe.portable import direct as moe_direct
from tritonllm.kernels.runtime import tuning

TILE = {"kernel": "portable", "BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16, "GROUP_M": 2, "num_warps": 1}


@contextmanager
def direct(early=3, ahead=0):
    """Every call takes the direct kernels, with tiles that small shapes cut in several."""
    tile = {"BLOCK_N": 4, "BLOCK_K": 16, "num_warps": 1}
    with ExitStack() as stack:
        stack.enter_context(tuning.override("fused_moe", {"kernel": "direct"}))
        stack.enter_context(tuning.override("moe_direct_up", {**tile, "AHEAD": ahead}))
        stack.enter_context(tuning.override("moe_direct_down", {**tile, "EARLY": early, "AHEAD": ahead}))
        before = torch.are_deterministic_algorithms_enabled()
        stack.callback(torch.use_deterministic_algorithms, before)
        torch.use_deterministic_algorithms(True)  # poisons the scratch
        yield


def problem(tokens, experts, top_k, n, i, dtype, device):
    """Random arguments; ids may repeat or lie outside."""
    x = torch.randn(tokens, n).to(device, dtype)
    w_gate_up = (torch.randn(experts, 2 * i, n) / n**0.5).to(device, dtype)
    w_down = (torch.randn(experts, n, i) / i**0.5).to(device, dtype)
    ids = torch.randint(-1, experts + 2, (tokens, top_k), dtype=torch.int32)
    return [x, w_gate_up, w_down, torch.rand(tokens, top_k, device=device), ids.to(device)]


def reference(x, w_gate_up, w_down, weights, ids, **kwargs):
    return fused_moe_ref(x.float(), w_gate_up.float(), w_down.float(), weights.float(), ids, **kwargs)


@given(
    tokens=st.integers(0, 5),
    experts=st.integers(1, 6),
    top_k=st.integers(1, 4),
    n=st.integers(1, 50),
    i=st.integers(1, 50),
    dtype=st.sampled_from(FLOATS),
    activation=st.sampled_from(GATED_ACTIVATIONS),
    early=st.sampled_from([0, 3, 100]),
    ahead=st.sampled_from([0, 2, 100]),
    padding=st.integers(0, 3),
)
def test_matches_reference(device, tokens, experts, top_k, n, i, dtype, activation, early, ahead, padding):
    args = [with_row_padding(t, padding) for t in problem(tokens, experts, top_k, n, i, dtype, device)]
    with direct(early, ahead):
        out = fused_moe(*args, activation=activation)
    assert out.dtype == dtype
    assert_close(out, reference(*args, activation=activation))


@given(
    tokens=st.integers(1, 4),
    global_experts=st.integers(1, 8),
    here=st.integers(1, 4),
    n=st.integers(1, 40),
    i=st.integers(1, 40),
    rows=st.integers(0, 3),
    dtype=st.sampled_from(FLOATS),
)
def test_biases_and_experts_elsewhere(device, tokens, global_experts, here, n, i, rows, dtype):
    x, w_gate_up, w_down, weights, _ = problem(tokens, here, 3, n, i, dtype, device)
    ids = torch.randint(-1, global_experts + 2, (tokens, 3), device=device)
    expert_map = torch.full((global_experts,), -1, dtype=torch.int32)
    expert_map[torch.randperm(global_experts)[:here]] = torch.arange(min(here, global_experts), dtype=torch.int32)
    if rows:  # copies, which tokens take in turns
        expert_map = torch.stack([expert_map.roll(row) for row in range(rows)])
    kwargs = {
        "expert_map": expert_map.to(device),
        "gate_up_bias": torch.randn(here, 2 * i, device=device),
        "down_bias": torch.randn(here, n).to(device, dtype),
    }
    with direct():
        out = fused_moe(x, w_gate_up, w_down, weights, ids, **kwargs)
    assert_close(out, reference(x, w_gate_up, w_down, weights, ids, **kwargs))


@given(
    tokens=st.integers(0, 4),
    n=st.integers(1, 40),
    i=st.integers(1, 40),
    dtype=st.sampled_from(FLOATS),
    of_itself=st.booleans(),
    grouped=st.booleans(),
    padding=st.integers(0, 3),
)
def test_addition(device, tokens, n, i, dtype, of_itself, grouped, padding):
    """In both ways to compute; the residual may be the input, as it is in a decoder."""
    x, *rest = problem(tokens, 4, 3, n, i, dtype, device)
    x = with_row_padding(x, padding)
    residual = x if of_itself else with_row_padding(torch.randn(tokens, n).to(device, dtype), padding)
    expected = reference(x, *rest, residual=residual.float().clone(), scale=0.7)
    with tuning.override("fused_moe", TILE) if grouped else direct():
        out = fused_moe(x, *rest, residual=residual, scale=0.7)
    assert out is residual
    assert_close(out, expected)


def test_only_what_was_hit_is_read(device):
    """Experts without a token, rows of other tokens, and weights of pairs without an expert may hold anything."""
    x, w_gate_up, w_down, weights, _ = problem(3, 4, 2, 16, 16, torch.float32, device)
    ids = torch.tensor([[1, 2], [-1, 9], [2, -1]], dtype=torch.int32, device=device)
    expected = reference(x, w_gate_up, w_down, weights, ids)
    w_gate_up[0] = w_gate_up[3] = w_down[0] = w_down[3] = x[1] = float("nan")
    weights[ids.remainder(4) == 3] = float("nan")
    weights[1] = float("nan")
    with direct():
        out = fused_moe(x, w_gate_up, w_down, weights, ids)
    assert (out[1] == 0).all()
    assert_close(out, expected)


def test_taken_where_pairs_hardly_share_experts(device):
    with patch.object(moe_direct, "launch") as launch:
        for tokens, experts, calls in ((1, 4, 1), (2, 8, 1), (3, 128, 2), (4, 60, 2)):
            fused_moe(*problem(tokens, experts, 2, 8, 8, torch.float32, device))
            assert launch.call_count == calls


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 2, 4])
@pytest.mark.parametrize(
    ("experts", "top_k", "n", "i"), [(128, 8, 2048, 768), (8, 2, 4096, 14336), (32, 4, 2880, 2880), (64, 6, 1000, 90)]
)
def test_real_shapes(device, dtype, tokens, experts, top_k, n, i):
    """Eagerly, and in a graph, where the kernels overlap and must give the same bits for new inputs."""
    x = torch.randn(tokens, n, device=device, dtype=dtype)
    w_gate_up = torch.randn(experts, 2 * i, n, device=device, dtype=dtype).div_(n**0.5)
    w_down = torch.randn(experts, n, i, device=device, dtype=dtype).div_(i**0.5)
    logits = torch.randn(tokens, experts, device=device)
    with tuning.override("fused_moe", {"kernel": "direct"}):
        weights, ids = moe_route(logits, top_k)
        out = fused_moe(x, w_gate_up, w_down, weights, ids)
        assert_close(out, fused_moe_ref(x, w_gate_up, w_down, weights, ids).float())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(3):
                captured = fused_moe(x, w_gate_up, w_down, *moe_route(logits, top_k))
        x.mul_(2)
        logits.copy_(logits.flip(1))
        graph.replay()
        weights, ids = moe_route(logits, top_k)
        assert torch.equal(captured, fused_moe(x, w_gate_up, w_down, weights, ids))
        added = fused_moe(x, w_gate_up, w_down, weights, ids, residual=x.clone())
        assert_close(added, fused_moe_ref(x, w_gate_up, w_down, weights, ids, residual=x.clone()).float())
    assert_close(captured, fused_moe_ref(x, w_gate_up, w_down, weights, ids).float())

from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.compare import FLOATS, assert_close, with_row_padding
from support.examples import examples

from tritonllm.kernels import fused_moe, moe_from_logits, moe_from_logits_ref, moe_route
from tritonllm.kernels.elementwise import GATED_ACTIVATIONS
from tritonllm.kernels.moe import experts as moe_experts
from tritonllm.kernels.moe.arguments import Experts
from tritonllm.kernels.moe.portable import direct as moe_direct
from tritonllm.kernels.runtime import tuning

GROUPED = {"kernel": "portable", "BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16, "GROUP_M": 2, "num_warps": 1}


@contextmanager
def kernels(direct, early=3, ahead=0, warps=1):
    """Tiles that small shapes cut in several."""
    tile = {"BLOCK_N": 4, "BLOCK_K": 16, "num_warps": warps}
    with ExitStack() as stack:
        stack.enter_context(tuning.override("fused_moe", {"kernel": "direct"} if direct else GROUPED))
        stack.enter_context(tuning.override("moe_direct_up", {**tile, "AHEAD": ahead}))
        stack.enter_context(tuning.override("moe_direct_down", {**tile, "EARLY": early, "AHEAD": ahead}))
        yield


def problem(tokens, experts, n, i, dtype, device):
    x = torch.randn(tokens, n).to(device, dtype)
    w_gate_up = (torch.randn(experts, 2 * i, n) / n**0.5).to(device, dtype)
    w_down = (torch.randn(experts, n, i) / i**0.5).to(device, dtype)
    return [x, torch.randn(tokens, experts, device=device), w_gate_up, w_down]


def reference(x, logits, w_gate_up, w_down, top_k, **kwargs):
    return moe_from_logits_ref(x.float(), logits, w_gate_up.float(), w_down.float(), top_k, **kwargs)


@given(
    data=st.data(),
    tokens=st.sampled_from([1, 1, 1, 0, 3]),  # of one, every program chooses
    dtype=st.sampled_from(FLOATS),
    activation=st.sampled_from(GATED_ACTIVATIONS),
    scoring=st.sampled_from(["softmax", "sigmoid", "late_sigmoid", "sparsemixer"]),
    renormalize=st.booleans(),
    direct=st.booleans(),
    has_biases=st.booleans(),
    early=st.sampled_from([0, 3, 100]),
    ahead=st.sampled_from([0, 2, 100]),
    padding=st.integers(0, 3),
)
def test_matches_reference(
    device, data, tokens, dtype, activation, scoring, renormalize, direct, has_biases, early, ahead, padding
):
    """Every kind of routing, in both ways to compute, with an addition at the end or without."""
    plain = scoring == "sparsemixer"
    groups = 1 if plain else data.draw(st.sampled_from([1, 1, 3]), "groups")
    size = data.draw(st.integers(1, 5), "size")
    best = data.draw(st.integers(1, groups), "best groups")
    top_k = data.draw(st.integers(1, best * size), "top_k")
    # wide enough for a sum with the residual that is not all cancellation
    experts, n, i = groups * size, data.draw(st.integers(8, 40), "n"), data.draw(st.integers(1, 40), "i")
    args = [with_row_padding(t, padding) for t in problem(tokens, experts, n, i, dtype, device)]
    options = {"num_groups": groups, "top_k_groups": best, "scoring": scoring, "renormalize": renormalize}
    options |= {"routing_scale": 2.5, "activation": activation}
    if has_biases:
        options["correction_bias"] = None if plain else torch.randn(experts, device=device)
        options["gate_up_bias"] = torch.randn(experts, 2 * i, device=device)
        options["down_bias"] = torch.randn(experts, n).to(device, dtype)
    residual = args[0] if data.draw(st.booleans(), "residual") else None
    before = None if residual is None else residual.float().clone()
    scale = 1.0 if residual is None else 0.7
    expected = reference(*args, top_k, **options, residual=before, scale=scale)
    with kernels(direct, early, ahead):
        out = moe_from_logits(*args, top_k, **options, residual=residual, scale=scale)
    assert residual is None or out is residual
    assert out.dtype == dtype
    assert_close(out, expected)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_ranks_with_whole_experts_add_up(device, tokens, direct):
    """Each computes the pairs of its experts, of logits of all of them; some tokens have none there."""
    x, logits, w_gate_up, w_down = problem(tokens, 6, 24, 16, torch.float32, device)
    bias = torch.randn(6, 24, device=device)
    with kernels(direct):
        whole = moe_from_logits(x, logits, w_gate_up, w_down, 2, down_bias=bias)
        total = torch.zeros_like(whole)
        for held in (range(1), range(1, 4), range(4, 6)):
            places = torch.full((6,), -1, dtype=torch.int32)
            places[held.start : held.stop] = torch.arange(len(held), dtype=torch.int32)
            here = slice(held.start, held.stop)
            given = x, logits, w_gate_up[here], w_down[here], 2
            total += moe_from_logits(*given, down_bias=bias[here], expert_map=places.to(device))
    assert_close(total, whole)


def test_an_expert_map_is_of_the_logits(device):
    x, logits, w_gate_up, w_down = problem(2, 4, 16, 16, torch.float32, device)
    for places, message in (
        (torch.zeros(3, dtype=torch.int32, device=device), "logits must have shape"),
        (torch.zeros(4, dtype=torch.int64, device=device), "expert_map must be torch.int32"),
    ):
        with pytest.raises(ValueError, match=message):
            moe_from_logits(x, logits, w_gate_up[:2], w_down[:2], 2, expert_map=places)


@settings(max_examples=examples(30))
@given(
    tokens=st.sampled_from([0, 1, 2, 5]),
    n=st.integers(8, 40),  # a norm magnifies the error of a row that cancels out
    dtype=st.sampled_from(FLOATS),
    direct=st.booleans(),
    residual=st.booleans(),
    at_once=st.booleans(),
    offset=st.sampled_from([0.0, 1.0]),
    padding=st.integers(0, 3),
)
def test_norm_of_what_follows(device, tokens, n, dtype, direct, residual, at_once, offset, padding):
    """By what sums up the experts where that has whole rows, and else by a kernel of its own."""
    args = [with_row_padding(t, padding) for t in problem(tokens, 5, n, 8, dtype, device)]
    stream = with_row_padding(torch.randn(tokens, n).to(device, dtype), padding) if residual else None
    exact = None if stream is None else stream.float().clone()
    norm = {"norm_weight": torch.rand(n).to(device, dtype), "norm_eps": 1e-3, "norm_weight_offset": offset}
    scale = 0.7 if residual else 1.0
    with kernels(direct), patch.object(moe_experts, "MAX_NORMED", 64 if at_once else 0):
        out, normed = moe_from_logits(*args, 2, residual=stream, scale=scale, **norm)
    assert residual == (out is stream)
    expected, expected_norm = reference(*args, 2, residual=exact, scale=scale, **norm)
    assert_close(out, expected)
    assert_close(normed, expected_norm)


def test_the_same_as_in_two_steps(device):
    """The same experts, ties and NaN included."""
    x, logits, w_gate_up, w_down = problem(3, 6, 16, 16, torch.float32, device)
    logits[0] = 0.0
    logits[1] = float("nan")
    with kernels(direct=True, warps=2):
        out = torch.cat([moe_from_logits(x[t, None], logits[t, None], w_gate_up, w_down, 3) for t in range(3)])
        expected = fused_moe(x, w_gate_up, w_down, *moe_route(logits, 3))
    assert out[1].isnan().all()
    assert_close(out[::2], expected[::2])


@pytest.mark.parametrize(
    ("tokens", "n", "groups", "chooses"), [(1, 16, 1, True), (2, 16, 1, False), (1, 2064, 1, False), (1, 16, 2, False)]
)
def test_programs_choose_for_one_token(device, tokens, n, groups, chooses):
    args = problem(tokens, 8, n, 8, torch.float32, device)
    with kernels(direct=True), patch.object(moe_direct, "launch", wraps=moe_direct.launch) as launch:
        moe_from_logits(*args, 2, num_groups=groups)
    assert isinstance(launch.call_args.args[2], moe_direct.Routing) == chooses


@pytest.mark.parametrize(
    ("kwargs", "names"),
    [
        ({"logits": torch.zeros(2, 5)}, r"logits must have shape \[2, 4\]"),
        ({"logits": torch.zeros(2, 4, dtype=torch.int32)}, "must be torch.float16"),
        ({"top_k": 5}, "top_k must be from 1 to the 4 experts"),
        ({"scoring": "relu"}, "scoring must be one of softmax, sigmoid"),
        ({"num_groups": 3}, "num_groups must divide the 4 experts"),
        ({"correction_bias": torch.zeros(3)}, r"bias must have shape \[4\]"),
        ({"w_down": torch.zeros(4, 8, 5)}, "w_gate_up must have shape"),
        ({"activation": "relu"}, "activation must be one of"),
        ({"scale": 0.5}, r"scale=0\.5 needs residual"),
        ({"residual": torch.zeros(3, 8)}, "residual must have shape"),
        ({"norm_weight": torch.zeros(6)}, r"norm_weight must have shape \[8\]"),
        ({"norm_weight": torch.zeros(8, dtype=torch.int32)}, "norm_weight must be torch.float16"),
    ],
)
def test_bad_arguments(kwargs, names):
    good = {"x": torch.zeros(2, 8), "logits": torch.zeros(2, 4), "top_k": 2}
    weights = {"w_gate_up": torch.zeros(4, 12, 8), "w_down": torch.zeros(4, 8, 6)}
    with pytest.raises(ValueError, match=names):
        moe_from_logits(**{**good, **weights, **kwargs})


def test_operator(device):
    """Registered well enough for torch.compile: schema, fake tensors and functionalisation."""
    x, logits, *experts = problem(2, 4, 16, 16, torch.float32, device)
    out = torch.rand(2, 16, device=device)
    op = torch.ops.tritonllm.moe_from_logits.default
    rule, experts = (True, "softmax", 1, 1, 1.0, False), Experts(*experts, None, None, "silu")
    for norm in ((None, None), (torch.empty(2, 16, device=device), torch.rand(16, device=device))):
        torch.library.opcheck(op, (x, logits, None, None, 2, *rule, *experts, out, True, 1.0, *norm, 1e-6, 0.0))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 2, 16])
@pytest.mark.parametrize(
    ("experts", "top_k", "n", "i"), [(128, 8, 2048, 768), (8, 2, 4096, 14336), (32, 4, 2880, 2880), (60, 6, 1000, 90)]
)
def test_real_shapes(device, dtype, tokens, experts, top_k, n, i):
    """Eagerly, and in a graph, where the kernels overlap and must give the same bits for new inputs."""
    x = torch.randn(tokens, n, device=device, dtype=dtype)
    w_gate_up = torch.randn(experts, 2 * i, n, device=device, dtype=dtype).div_(n**0.5)
    w_down = torch.randn(experts, n, i, device=device, dtype=dtype).div_(i**0.5)
    logits = torch.randn(tokens, experts, device=device)
    args = (x, logits, w_gate_up, w_down, top_k)
    assert_close(moe_from_logits(*args), moe_from_logits_ref(*args).float())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            captured = moe_from_logits(*args, residual=x.clone())
    x.mul_(2)
    logits.copy_(logits.flip(1))
    graph.replay()
    assert torch.equal(captured, moe_from_logits(*args, residual=x.clone()))
    assert_close(captured, moe_from_logits_ref(*args, residual=x.clone()).float())

import math
from contextlib import contextmanager, nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.compare import FLOATS, assert_close, poisoned, with_row_padding
from support.examples import examples
from transformers import GptOssConfig, MixtralConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from tritonllm.kernels import fused_moe, fused_moe_ref, moe_from_logits, moe_route
from tritonllm.kernels.elementwise import GATED_ACTIVATIONS
from tritonllm.kernels.moe.arguments import Experts, Result
from tritonllm.kernels.runtime import tuning

SMALL_TILE = {"kernel": "portable", "BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16, "GROUP_M": 2, "num_warps": 1}


@contextmanager
def poisoned_memory():
    """`torch.empty` gives NaN and the largest integers: scratch that is read before it is written shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextmanager
def small_tiles():
    """Many tiles and blocks at small shapes, and loops with and without a remainder."""
    with tuning.override("fused_moe", SMALL_TILE):
        yield


def problem(tokens, experts, top_k, n, i, dtype, device, out_of_range=False):
    """Random (x, w_gate_up, w_down, weights, ids); the experts of a token may repeat."""
    x = torch.randn(tokens, n).to(device, dtype)
    w_gate_up = (torch.randn(experts, 2 * i, n) / n**0.5).to(device, dtype)
    w_down = (torch.randn(experts, n, i) / i**0.5).to(device, dtype)
    ids = torch.randint(-1 if out_of_range else 0, experts + 2 * out_of_range, (tokens, top_k), dtype=torch.int32)
    return x, w_gate_up, w_down, torch.rand(tokens, top_k, device=device), ids.to(device)


def random_biases(w_down, dtype, scale=1.0):
    """Keyword arguments."""
    experts, n, i = w_down.shape
    gate_up, down = torch.randn(experts, 2 * i) * scale, torch.randn(experts, n) * scale
    return {"gate_up_bias": gate_up.to(w_down.device, dtype), "down_bias": down.to(w_down.device, dtype)}


def reference(x, w_gate_up, w_down, weights, ids, **kwargs):
    return fused_moe_ref(x.float(), w_gate_up.float(), w_down.float(), weights.float(), ids, **kwargs)


def checked(*args, **kwargs):
    with poisoned_memory():
        out = fused_moe(*args, **kwargs)
    assert_close(out, reference(*args, **kwargs))
    return out


@pytest.mark.parametrize("few", [False, True])
def test_norm_of_what_follows(device, few):
    """As :func:`moe_from_logits` does, whose tests have more of it."""
    args = problem(1 if few else 9, 8, 2, 24, 16, torch.float32, device)
    norm = {"norm_weight": torch.rand(24, device=device), "norm_eps": 1e-3, "norm_weight_offset": 1.0}
    with small_tiles() if not few else tuning.override("fused_moe", {"kernel": "direct"}):
        out, normed = fused_moe(*args, **norm)
    expected, expected_norm = reference(*args, **norm)
    assert_close(out, expected)
    assert_close(normed, expected_norm)


@pytest.mark.parametrize("way", ["direct", "portable"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_written_where_it_is_asked_for(device, way, dtype):
    """A token without experts gets zeros there, whatever its weights and its row are."""
    x, w_gate_up, w_down, weights, ids = problem(5, 4, 2, 24, 16, dtype, device)
    ids[1] = -1
    expected = reference(x, w_gate_up, w_down, weights, ids)
    x[1], weights[1] = float("nan"), float("nan")
    out = poisoned(5, 24, dtype=dtype, device=device)
    with tuning.override("fused_moe", {"kernel": "direct"}) if way == "direct" else small_tiles():
        assert fused_moe(x, w_gate_up, w_down, weights, ids, out=out) is out
        _, normed = fused_moe(x, w_gate_up, w_down, weights, ids, norm_weight=x[0], out=out)
    assert_close(out, expected)
    assert (out[1] == 0).all() and (normed[1] == 0).all()


@given(
    tokens=st.integers(0, 20),
    experts=st.integers(1, 5),
    top_k=st.integers(1, 3),
    n=st.integers(1, 40),
    i=st.integers(1, 40),
    dtype=st.sampled_from(FLOATS),
    activation=st.sampled_from(GATED_ACTIVATIONS),
    small=st.booleans(),
    batch_invariant=st.booleans(),
)
def test_matches_reference(device, tokens, experts, top_k, n, i, dtype, activation, small, batch_invariant):
    args = problem(tokens, experts, top_k, n, i, dtype, device, out_of_range=True)
    with small_tiles() if small else nullcontext():
        out = checked(*args, activation=activation, batch_invariant=batch_invariant)
    assert out.shape == (tokens, n)
    assert out.dtype == dtype


@given(
    tokens=st.integers(0, 12),
    n=st.integers(1, 40),
    i=st.integers(1, 40),
    dtype=st.sampled_from(FLOATS),
    bias_dtype=st.sampled_from(FLOATS),
    names=st.sets(st.sampled_from(["gate_up_bias", "down_bias"])),
    activation=st.sampled_from(GATED_ACTIVATIONS),
    padding=st.integers(0, 3),
)
def test_biases_match_reference(device, tokens, n, i, dtype, bias_dtype, names, activation, padding):
    """Either, both or none, with padded rows; experts without a token and tokens without an expert included."""
    args = problem(tokens, 4, 2, n, i, dtype, device, out_of_range=True)
    biases = random_biases(args[2], bias_dtype)
    biases = {name: with_row_padding(biases[name], padding) for name in sorted(names)}
    with small_tiles():
        checked(*args, **biases, activation=activation)


@pytest.mark.parametrize("name", ["gate_up_bias", "down_bias"])
def test_each_bias_is_added(device, name):
    """A comparison with a reference that ignored it as well would not show."""
    x, w_gate_up, w_down, weights, ids = problem(5, 3, 2, 16, 8, torch.float32, device)
    bias = random_biases(w_down, torch.float32)[name]
    ones = torch.ones(5, 1, device=device)
    if name == "gate_up_bias":  # one more input that is always 1
        expected = fused_moe(
            torch.cat((x, ones), 1),
            torch.cat((w_gate_up, bias[:, :, None]), 2),
            torch.cat((w_down, torch.zeros(3, 1, 8, device=device)), 1),
            *(weights, ids),
        )[:, :16]
    else:
        expected = fused_moe(x, w_gate_up, w_down, weights, ids) + (bias[ids.long()] * weights[..., None]).sum(1)
    assert_close(fused_moe(x, w_gate_up, w_down, weights, ids, **{name: bias}), expected)


def test_biases_of_experts_that_were_not_hit_are_not_read(device):
    args = problem(3, 4, 2, 16, 16, torch.float32, device)
    args[-1].remainder_(2).add_(1)
    biases = random_biases(args[2], torch.float32)
    expected = reference(*args, **biases)
    for bias in biases.values():
        bias[0] = bias[3] = float("nan")
    assert_close(fused_moe(*args, **biases), expected)


def test_swigluoai_limits(device):
    """Beyond the limits nothing changes, but the gate has none below; NaN in either stays."""
    values = torch.tensor([7.0, 9.0, 1e30, -7.0, -8.0, -20.0, float("nan")], device=device)
    ids = torch.arange(7, dtype=torch.int32, device=device)[:, None]  # each token has an expert with biases of its own
    zero, weights = torch.zeros(7, 2, 1, device=device), torch.ones(7, 1, device=device)

    def act(gate, up):
        bias = torch.stack((gate, up), 1)
        down = torch.ones(7, 1, 1, device=device)
        return fused_moe(weights, zero, down, weights, ids, activation="swigluoai", gate_up_bias=bias)[:, 0].tolist()

    of_gate, of_up = act(values, torch.ones_like(values)), act(torch.ones_like(values), values)
    assert of_gate[0] == of_gate[1] == of_gate[2] > 13.9
    assert of_gate[3] < of_gate[4] < of_gate[5] < 0
    assert of_up[0] == of_up[1] == of_up[2] > 0
    assert of_up[3] == of_up[4] == of_up[5] < 0
    assert math.isnan(of_gate[6]) and math.isnan(of_up[6])


@pytest.mark.parametrize("dtype", FLOATS)
def test_tiles_without_a_remainder(device, dtype):
    args = problem(40, 2, 2, 32, 48, dtype, device)
    with small_tiles():
        checked(*args)


@pytest.mark.parametrize("dtype", FLOATS)
def test_strides_and_other_dtypes(device, dtype):
    """Rows with padding everywhere, int64 ids, weights of the dtype of x."""
    x, w_gate_up, w_down, weights, ids = problem(4, 3, 2, 20, 12, dtype, device)
    args = [with_row_padding(t, 3) for t in (x, w_gate_up, w_down, weights.to(dtype), ids.long())]
    checked(*args)


@pytest.mark.parametrize("experts", [1, 3])
def test_all_tokens_to_one_expert(device, experts):
    x, w_gate_up, w_down, weights, ids = problem(35, experts, 1, 16, 16, torch.float32, device)
    checked(x, w_gate_up, w_down, weights, torch.full_like(ids, experts - 1))


def test_pairs_without_expert_add_nothing(device):
    x, w_gate_up, w_down, weights, ids = problem(3, 2, 2, 16, 16, torch.float32, device)
    ids[1] = -1
    out = checked(x, w_gate_up, w_down, weights, ids)
    assert (out[1] == 0).all()
    assert (fused_moe(x, w_gate_up, w_down, weights, torch.full_like(ids, -1)) == 0).all()


def test_only_experts_that_were_hit_are_read(device):
    x, w_gate_up, w_down, weights, ids = problem(3, 4, 2, 16, 16, torch.float32, device)
    ids = ids % 2 + 1
    expected = reference(x, w_gate_up, w_down, weights, ids)
    for expert in (0, 3):
        w_gate_up[expert] = w_down[expert] = float("nan")
    assert_close(fused_moe(x, w_gate_up, w_down, weights, ids), expected)


@pytest.mark.parametrize("activation", GATED_ACTIVATIONS)
def test_nan_stays_in_its_row(device, activation):
    x, w_gate_up, w_down, weights, ids = problem(5, 2, 2, 16, 16, torch.float32, device)
    expected = reference(x, w_gate_up, w_down, weights, ids, activation=activation)
    x[2] = float("nan")
    out = fused_moe(x, w_gate_up, w_down, weights, ids, activation=activation)
    assert out[2].isnan().all()
    others = [0, 1, 3, 4]
    assert_close(out[others], expected[others])


@settings(max_examples=examples(8))
@given(tokens=st.integers(1, 6), experts=st.integers(2, 6), ranks=st.integers(1, 3))
def test_expert_maps_split_the_sum(device, tokens, experts, ranks):
    """Expert parallelism: what the ranks compute with their own experts adds up to the whole."""
    x, w_gate_up, w_down, weights, ids = problem(tokens, experts, 2, 16, 8, torch.float32, device)
    biases = random_biases(w_down, torch.float32)
    total = torch.zeros_like(x)
    for rank in range(min(ranks, experts)):
        own = torch.arange(rank, experts, min(ranks, experts), device=device)
        expert_map = torch.full((experts,), -1, dtype=torch.int32, device=device)
        expert_map[own] = torch.arange(len(own), dtype=torch.int32, device=device)
        of_rank = {name: bias[own] for name, bias in biases.items()}
        total += checked(x, w_gate_up[own], w_down[own], weights, ids, **of_rank, expert_map=expert_map)
    assert_close(total, fused_moe(x, w_gate_up, w_down, weights, ids, **biases))


def copied(copies, rows):
    """Experts with so many copies each, one rank a copy: each rank's experts, and its map ``[rows, experts]``."""
    ranks = []
    for rank in range(max(copies)):
        own = [expert for expert, count in enumerate(copies) if rank < count]
        turns = [[own.index(e) if e in own and row % n == rank else -1 for e, n in enumerate(copies)] for row in rows]
        ranks.append((own, torch.tensor(turns, dtype=torch.int32)))
    return ranks


@settings(max_examples=examples(8))
@given(tokens=st.integers(0, 9), copies=st.lists(st.integers(1, 3), min_size=2, max_size=5), rows=st.integers(1, 6))
def test_copies_of_experts_share_the_tokens(device, tokens, copies, rows):
    """Each pair is computed once, by the copy whose turn it is."""
    x, w_gate_up, w_down, weights, ids = problem(tokens, len(copies), 2, 16, 8, torch.float32, device)
    biases = random_biases(w_down, torch.float32)
    total = torch.zeros_like(x)
    for own, turns in copied(copies, range(rows)):
        of_rank = {name: bias[own] for name, bias in biases.items()}
        places = turns.to(device)
        total += checked(x, w_gate_up[own], w_down[own], weights, ids, **of_rank, expert_map=places)
    assert_close(total, fused_moe(x, w_gate_up, w_down, weights, ids, **biases))


@pytest.mark.parametrize("hidden_act", ["silu", "gelu"])
def test_reference_matches_transformers(device, hidden_act):
    config = MixtralConfig(hidden_size=16, intermediate_size=24, num_local_experts=4, hidden_act=hidden_act)
    config._experts_implementation = "eager"
    x, w_gate_up, w_down, weights, ids = problem(9, 4, 2, 16, 24, torch.float32, device)
    theirs = MixtralExperts(config).to(device)
    theirs.gate_up_proj.data.copy_(w_gate_up)
    theirs.down_proj.data.copy_(w_down)
    with torch.no_grad():
        expected = theirs(x, ids.long(), weights)
    assert_close(fused_moe_ref(x, w_gate_up, w_down, weights, ids, activation=hidden_act), expected)


def test_reference_matches_gpt_oss(device):
    """Whose gate and up rows take turns and whose weights are stored transposed; values beyond the limits included."""
    config = GptOssConfig(hidden_size=16, intermediate_size=24, num_local_experts=4, num_experts_per_tok=2)
    config._experts_implementation = "eager"
    x, w_gate_up, w_down, weights, ids = problem(9, 4, 2, 16, 24, torch.float32, device)
    x *= 4
    biases = random_biases(w_down, torch.float32, scale=5.0)
    theirs = GptOssExperts(config).to(device)
    interleaved = [w.unflatten(1, (2, 24)).transpose(1, 2).flatten(1, 2) for w in (w_gate_up, biases["gate_up_bias"])]
    theirs.gate_up_proj.data.copy_(interleaved[0].mT)
    theirs.gate_up_proj_bias.data.copy_(interleaved[1])
    theirs.down_proj.data.copy_(w_down.mT)
    theirs.down_proj_bias.data.copy_(biases["down_bias"])
    with torch.no_grad():
        expected = theirs(x, ids.long(), weights)
    assert_close(fused_moe_ref(x, w_gate_up, w_down, weights, ids, activation="swigluoai", **biases), expected)


GOOD = {
    "x": torch.zeros(2, 8),
    "w_gate_up": torch.zeros(3, 12, 8),
    "w_down": torch.zeros(3, 8, 6),
    "weights": torch.zeros(2, 2),
    "ids": torch.zeros(2, 2, dtype=torch.int32),
}


@pytest.mark.parametrize(
    ("kwargs", "names"),
    [
        ({"x": torch.zeros(2, 1, 8)}, "x must have shape"),
        ({"x": torch.zeros(2, 8, dtype=torch.int32)}, "x must be torch.float16"),
        ({"x": torch.zeros(2, 8, dtype=torch.float16)}, "w_gate_up must have the dtype of x"),
        ({"w_down": torch.zeros(3, 8, 6, dtype=torch.float16)}, "w_down must have the dtype of x"),
        ({"w_down": torch.zeros(3, 7, 6)}, r"w_down must have shape \[E, 8, I\]"),
        ({"w_gate_up": torch.zeros(3, 6, 8)}, r"w_gate_up must have shape \[3, 12, 8\]"),
        ({"w_gate_up": torch.zeros(3, 8, 12).mT}, "w_gate_up must be contiguous"),
        ({"w_gate_up": torch.zeros(0, 12, 8), "w_down": torch.zeros(0, 8, 6)}, "w_down must not be empty"),
        ({"ids": torch.zeros(2, 2)}, "ids must be torch.int32"),
        ({"ids": torch.zeros(3, 2, dtype=torch.int32)}, r"ids must have shape \[2, k\]"),
        ({"ids": torch.zeros(2, 0, dtype=torch.int32)}, "ids must have at least one expert"),
        ({"weights": torch.zeros(2, 3)}, r"weights must have shape \[2, 2\]"),
        ({"weights": torch.zeros(2, 2, device="meta")}, "weights must be on cpu"),
        ({"activation": "relu"}, "activation must be one of silu, gelu, gelu_tanh, swigluoai, got 'relu'"),
        ({"gate_up_bias": torch.zeros(3, 6)}, r"gate_up_bias must have shape \[3, 12\], got \[3, 6\]"),
        ({"gate_up_bias": torch.zeros(3, 12, dtype=torch.int32)}, "gate_up_bias must be torch.float16"),
        ({"gate_up_bias": torch.zeros(12, 3).T}, "gate_up_bias must be contiguous"),
        ({"down_bias": torch.zeros(2, 8)}, r"down_bias must have shape \[3, 8\], got \[2, 8\]"),
        ({"down_bias": torch.zeros(3, 8, device="meta")}, "down_bias must be on cpu"),
        ({"expert_map": torch.zeros(5)}, "expert_map must be torch.int32"),
        ({"expert_map": torch.zeros(0, 5, dtype=torch.int32)}, "expert_map must have at least one row"),
        ({"expert_map": torch.zeros(4, 8, dtype=torch.int32)[:, :5]}, "expert_map must be contiguous"),
        (
            {"expert_map": torch.zeros(4, 5, dtype=torch.int32), "batch_invariant": True},
            "expert_map must have one row with batch_invariant: with 4, a token's place",
        ),
        ({"scale": 0.5}, r"scale=0\.5 needs residual"),
        ({"residual": torch.zeros(3, 8)}, r"residual must have shape \[2, 8\], got \[3, 8\]"),
        ({"residual": torch.zeros(2, 8, dtype=torch.float16)}, "residual must have the dtype of x"),
        ({"out": torch.zeros(3, 8)}, r"out must have shape \[2, 8\], got \[3, 8\]"),
        ({"out": torch.zeros(2, 8, dtype=torch.float16)}, "out must be torch.float32"),
        ({"out": torch.zeros(2, 9)[:, :8]}, "out must be contiguous"),
        ({"out": torch.zeros(2, 8), "residual": torch.zeros(2, 8)}, "out must not come together with residual"),
    ],
)
def test_bad_arguments(kwargs, names):
    with pytest.raises(ValueError, match=names):
        fused_moe(**{**GOOD, **kwargs})


def test_operator(device):
    """Registered well enough for torch.compile: schema, fake tensors and functionalisation."""
    x, w_gate_up, w_down, weights, ids = problem(3, 2, 2, 16, 16, torch.float32, device)
    expert_map = torch.tensor([0, -1, 1], dtype=torch.int32, device=device)
    biases = random_biases(w_down, torch.bfloat16).values()
    op = torch.ops.tritonllm.fused_moe.default
    experts, result = (
        Experts(w_gate_up, w_down, None, None, "silu"),
        Result(torch.empty_like(x), False, 1.0, None, None, 0.0, 0.0),
    )
    torch.library.opcheck(op, (x, *experts, weights, ids, None, *result, False))
    experts = Experts(w_gate_up, w_down, *biases, "swigluoai")
    norm = (torch.empty_like(x), torch.rand(16, device=device), 1e-6, 1.0)
    torch.library.opcheck(op, (x, *experts, weights, ids, expert_map, torch.rand_like(x), True, 0.5, *norm, True))


def real_problem(tokens, experts, top_k, n, i, dtype, device):
    x = torch.randn(tokens, n, device=device, dtype=dtype)
    w_gate_up = torch.randn(experts, 2 * i, n, device=device, dtype=dtype).div_(n**0.5)
    w_down = torch.randn(experts, n, i, device=device, dtype=dtype).div_(i**0.5)
    weights, ids = moe_route(torch.randn(tokens, experts, device=device), top_k)
    return x, w_gate_up, w_down, weights, ids


def reference_by_expert(x, w_gate_up, w_down, weights, ids, **kwargs):
    """The float32 reference without a float32 copy of all experts."""
    return fused_moe_ref(x, w_gate_up, w_down, weights, ids, **kwargs).float()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 16, 256, 640, 1024])
@pytest.mark.parametrize(("experts", "top_k", "n", "i"), [(128, 8, 2048, 768), (8, 2, 4096, 14336)])
def test_real_shapes(device, dtype, tokens, experts, top_k, n, i):
    """Every tile; twice, because the same input must give the same bits."""
    args = real_problem(tokens, experts, top_k, n, i, dtype, device)
    with poisoned_memory():
        out, again = fused_moe(*args), fused_moe(*args)
    assert_close(out, reference_by_expert(*args))
    assert torch.equal(out, again)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("experts", "top_k", "n", "i", "activation"),
    [
        (128, 8, 2048, 768, "silu"),
        (8, 2, 4096, 14336, "gelu"),
        (32, 4, 2880, 2880, "swigluoai"),
        (6, 2, 1000, 90, "silu"),
    ],
)
def test_a_token_has_the_same_bits_among_any_others(device, dtype, experts, top_k, n, i, activation):
    """Every tile, and tokens at every place of it; of the choice of experts too."""
    x, w_gate_up, w_down, _, _ = real_problem(1500, experts, top_k, n, i, dtype, device)
    logits = torch.randn(1500, experts, device=device)
    residual = torch.randn_like(x)

    def run(rows):
        given = x[rows], logits[rows], w_gate_up, w_down, top_k
        options = {"activation": activation, "residual": residual[rows].clone(), "batch_invariant": True}
        return moe_from_logits(*given, **options)

    whole = run(slice(None))
    for count in (1, 2, 3, 16, 17, 64, 100, 128, 257, 512, 1100):
        for first in (0, 1, 1500 - count):
            rows = slice(first, first + count)
            assert torch.equal(run(rows), whole[rows]), (count, first)


@pytest.mark.gpu
def test_the_test_above_would_see_another_order(device):
    """Otherwise the kernel follows the number of tokens."""
    args = real_problem(256, 128, 8, 2048, 768, torch.bfloat16, device)
    x, w_gate_up, w_down, weights, ids = args
    assert not torch.equal(fused_moe(*args)[:1], fused_moe(x[:1], w_gate_up, w_down, weights[:1], ids[:1]))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 256, 640, 1024])
def test_gpt_oss(device, tokens):
    """gpt-oss-20b."""
    args = real_problem(tokens, 32, 4, 2880, 2880, torch.bfloat16, device)
    kwargs = {"activation": "swigluoai", **random_biases(args[2], torch.bfloat16)}
    with poisoned_memory():
        out, again = fused_moe(*args, **kwargs), fused_moe(*args, **kwargs)
    assert_close(out, reference_by_expert(*args, **kwargs))
    assert torch.equal(out, again)


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "i"), [(2048, 704), (1000, 96), (2880, 720)])
def test_shapes_that_no_tile_divides(device, n, i):
    for tokens in (3, 200, 1500):
        args = real_problem(tokens, 16, 4, n, i, torch.bfloat16, device)
        with poisoned_memory():
            out = fused_moe(*args)
        assert_close(out, reference_by_expert(*args))


@pytest.mark.gpu
def test_weight_offsets_beyond_int32(device):
    """The last expert begins beyond 2^31 elements."""
    n, i = 4096, 8192
    experts = 2**31 // (2 * i * n) + 8
    w_gate_up = torch.zeros(experts, 2 * i, n, device=device, dtype=torch.bfloat16)
    w_down = torch.zeros(experts, n, i, device=device, dtype=torch.bfloat16)
    w_gate_up[-1].normal_(std=n**-0.5)
    w_down[-1].normal_(std=i**-0.5)
    x = torch.randn(5, n, device=device, dtype=torch.bfloat16)
    ids = torch.full((5, 1), experts - 1, device=device, dtype=torch.int32)
    weights = torch.rand(5, 1, device=device)
    assert_close(fused_moe(x, w_gate_up, w_down, weights, ids), reference_by_expert(x, w_gate_up, w_down, weights, ids))


@pytest.mark.gpu
def test_row_offsets_beyond_int32(device):
    """The weighted rows of all pairs are more than 2^31 elements."""
    tokens = 2**31 // (8 * 2048) + 5
    x, w_gate_up, w_down, _, _ = problem(1, 2, 8, 2048, 16, torch.bfloat16, device)
    x = torch.randn(tokens, 2048, device=device, dtype=torch.bfloat16)
    ids = torch.randint(0, 2, (tokens, 8), device=device, dtype=torch.int32)
    weights = torch.rand(tokens, 8, device=device)
    out = fused_moe(x, w_gate_up, w_down, weights, ids)[-9:]
    assert_close(out, reference_by_expert(x[-9:], w_gate_up, w_down, weights[-9:], ids[-9:]))


@pytest.mark.gpu
def test_cuda_graph(device):
    """Nothing waits for the device: a captured call follows new routing."""
    x, w_gate_up, w_down, weights, ids = real_problem(16, 16, 4, 256, 128, torch.bfloat16, device)
    fused_moe(x, w_gate_up, w_down, weights, ids)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fused_moe(x, w_gate_up, w_down, weights, ids)
    x.normal_()
    ids.copy_((ids + 5) % 16)
    graph.replay()
    assert_close(out, reference_by_expert(x, w_gate_up, w_down, weights, ids))


@pytest.mark.gpu
def test_fullgraph_compile(device):
    x, w_gate_up, w_down, _, _ = problem(8, 4, 2, 64, 32, torch.float32, device)
    logits = torch.randn(8, 4, device=device)

    def block(x, logits):
        return fused_moe(x * 2, w_gate_up, w_down, *moe_route(logits, 2)) + x

    assert_close(torch.compile(block, fullgraph=True)(x, logits), block(x, logits))

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.compare import FLOATS, assert_close, with_row_padding
from transformers import Kolibri1Config, MixtralConfig
from transformers.models.kolibri1.modeling_kolibri1 import Kolibri1TopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.phimoe.modeling_phimoe import sparsemixer

from tritonllm.kernels import moe_route, moe_route_ref

dtypes = st.sampled_from(FLOATS)
scorings = st.sampled_from(["softmax", "sigmoid", "late_sigmoid"])


def assert_same(out, ref):
    assert out[0].dtype == torch.float32
    assert out[1].dtype == torch.int32
    assert torch.equal(out[1], ref[1]), f"ids {out[1].tolist()} != {ref[1].tolist()}"
    assert_close(out[0], ref[0], torch.float32, "weights")


@given(
    tokens=st.integers(0, 6),
    experts=st.integers(1, 40),
    top_k=st.integers(1, 10),
    dtype=dtypes,
    scoring=scorings | st.just("sparsemixer"),
    renormalize=st.booleans(),
    scale=st.sampled_from([1.0, 2.5]),
    padding=st.integers(0, 3),
)
def test_matches_reference(device, tokens, experts, top_k, dtype, scoring, renormalize, scale, padding):
    logits = with_row_padding((3 * torch.randn(tokens, experts)).to(device, dtype), padding)
    options = {"renormalize": renormalize, "scoring": scoring, "scale": scale}
    assert_same(
        moe_route(logits, min(top_k, experts), **options), moe_route_ref(logits, min(top_k, experts), **options)
    )


@given(data=st.data(), dtype=dtypes, scoring=scorings, has_bias=st.booleans(), renormalize=st.booleans())
def test_groups_and_bias_match_reference(device, data, dtype, scoring, has_bias, renormalize):
    groups, size = data.draw(st.integers(1, 5), "groups"), data.draw(st.integers(1, 7), "size")
    best = data.draw(st.integers(1, groups), "best groups")
    top_k = data.draw(st.integers(1, best * size), "top_k")
    logits = torch.randn(4, groups * size).to(device, dtype)
    options = {
        "bias": torch.randn(groups * size, device=device) if has_bias else None,
        "num_groups": groups,
        "top_k_groups": best,
        "scoring": scoring,
        "renormalize": renormalize,
    }
    weights, ids = moe_route(logits, top_k, **options)
    assert_same((weights, ids), moe_route_ref(logits, top_k, **options))
    assert all(len(set(row)) == top_k and len({e // size for e in row}) <= best for row in ids.tolist())


@pytest.mark.parametrize("num_groups", [None, 3])
def test_ties_go_to_the_lowest_expert(device, num_groups):
    top_k_groups = None if num_groups is None else 2
    for logits in (torch.zeros(2, 12), torch.full((2, 12), -1e30)):
        weights, ids = moe_route(logits.to(device), 5, num_groups=num_groups, top_k_groups=top_k_groups)
        assert ids.tolist() == [[0, 1, 2, 3, 4]] * 2
        assert_close(weights, torch.full((2, 5), 0.2, device=device))


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # numpy's, in the interpreter
@pytest.mark.parametrize(
    ("scoring", "bias", "groups"),
    [
        *(
            (scoring, bias, {"num_groups": 4, "top_k_groups": 2})
            for scoring in ("softmax", "sigmoid")
            for bias in (None, torch.linspace(0, 1, 8))
        ),
        ("sparsemixer", None, {}),
    ],
)
def test_nan_stays_in_its_row(device, scoring, bias, groups):
    """A row of NaN gives valid, distinct experts (an id out of range would be read as memory) and NaN weights."""
    logits = torch.randn(3, 8, device=device)
    clean = logits.clone()
    logits[1] = float("nan")
    options = {"scoring": scoring, "bias": None if bias is None else bias.to(device), **groups}
    weights, ids = moe_route(logits, 3, **options)
    assert ids[1].tolist() == [0, 1, 2]
    assert weights[1].isnan().all()
    expected = moe_route_ref(clean, 3, **options)
    assert_same((weights[::2], ids[::2]), (expected[0][::2], expected[1][::2]))


def test_experts_at_minus_infinity_come_last(device):
    logits = torch.full((1, 6), float("-inf"), device=device)
    logits[0, 4] = 1.0
    weights, ids = moe_route(logits, 3)
    assert ids.tolist() == [[4, 0, 1]]
    assert weights.tolist() == [[1.0, 0.0, 0.0]]


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_sigmoids_that_vanish(device):
    """All scores 0: the weights are 0, not 0 / 0."""
    weights, _ = moe_route(torch.full((1, 4), -200.0, device=device), 2, scoring="sigmoid")
    assert weights.tolist() == [[0.0, 0.0]]


def test_reference_matches_mixtral(device):
    router = MixtralTopKRouter(MixtralConfig(hidden_size=16, num_local_experts=8, num_experts_per_tok=3)).to(device)
    torch.nn.init.normal_(router.weight)
    with torch.no_grad():
        logits, weights, ids = router(torch.randn(20, 16, device=device))
    assert_same(moe_route_ref(logits, 3), (weights, ids.int()))


def test_reference_matches_qwen3_moe_without_normalisation(device):
    logits = torch.randn(20, 8, device=device)
    weights, ids = logits.softmax(-1).topk(3, dim=-1)
    assert_same(moe_route_ref(logits, 3, renormalize=False), (weights, ids.int()))


def test_reference_matches_phimoe(device):
    logits = torch.randn(200, 16, device=device) / 9 - 1.0
    weights, ids = sparsemixer(logits, jitter_eps=0.01, training=False)
    assert 0.1 < (weights < 1.0).float().mean() < 0.9  # of some, others are near
    assert_same(moe_route_ref(logits, 2, scoring="sparsemixer", renormalize=False), (weights, ids.int()))


def test_reference_matches_kolibri(device):
    config = Kolibri1Config(hidden_size=16, num_experts=8, num_experts_per_tok=3, norm_topk_prob=True)
    router = Kolibri1TopKRouter(config).to(device)
    torch.nn.init.normal_(router.weight)
    router.e_score_correction_bias.normal_()
    with torch.no_grad():
        logits, weights, ids = router(torch.randn(20, 16, device=device))
    bias = router.e_score_correction_bias
    assert_same(moe_route_ref(logits, 3, scoring="late_sigmoid", bias=bias), (weights, ids.int()))


def deepseek_v3(logits, bias, num_groups, top_k_groups, top_k, scale):
    """One token, as section 2.1.2 of the DeepSeek-V3 report says it, with sorted lists."""
    scores = [1 / (1 + pow(2.718281828459045, -x)) for x in logits]
    biased = [s + b for s, b in zip(scores, bias, strict=True)]
    size = len(logits) // num_groups
    groups = [range(g * size, (g + 1) * size) for g in range(num_groups)]
    groups.sort(key=lambda group: -sum(sorted((biased[e] for e in group), reverse=True)[:2]))
    allowed = [e for group in groups[:top_k_groups] for e in group]
    ids = sorted(allowed, key=lambda e: -biased[e])[:top_k]
    total = sum(scores[e] for e in ids)
    return [scale * scores[e] / total for e in ids], ids


def test_reference_matches_deepseek_v3(device):
    logits, bias = torch.randn(20, 24, dtype=torch.float64), torch.randn(24, dtype=torch.float64) / 4
    weights, ids = zip(*[deepseek_v3(row, bias.tolist(), 6, 3, 5, 2.5) for row in logits.tolist()], strict=True)
    options = {"scoring": "sigmoid", "num_groups": 6, "top_k_groups": 3, "scale": 2.5}
    ours = moe_route_ref(logits.float().to(device), 5, bias=bias.float().to(device), **options)
    assert_same(ours, (torch.tensor(weights, device=device), torch.tensor(ids, device=device, dtype=torch.int32)))


@pytest.mark.parametrize(
    ("kwargs", "names"),
    [
        ({"router_logits": torch.zeros(8)}, "router_logits must have shape"),
        ({"router_logits": torch.zeros(2, 8, dtype=torch.int32)}, "router_logits must be torch.float16"),
        ({"top_k": 0}, "top_k must be from 1 to the 8 experts"),
        ({"top_k": 9}, "top_k must be from 1 to the 8 experts"),
        ({"scoring": "relu"}, "scoring must be one of softmax, sigmoid, late_sigmoid, sparsemixer, got 'relu'"),
        ({"scoring": "sparsemixer", "bias": torch.zeros(8)}, "'sparsemixer' with a bias or groups is not supported"),
        ({"scoring": "sparsemixer", "num_groups": 2, "top_k_groups": 1}, "with a bias or groups is not supported"),
        ({"bias": torch.zeros(7)}, r"bias must have shape \[8\]"),
        ({"num_groups": 2}, "must be given together"),
        ({"top_k_groups": 2}, "must be given together"),
        ({"num_groups": 3, "top_k_groups": 1}, "num_groups must divide the 8 experts"),
        ({"num_groups": 0, "top_k_groups": 1}, "num_groups must divide the 8 experts"),
        ({"num_groups": 2, "top_k_groups": 3}, "top_k_groups must be from 1 to num_groups=2"),
        ({"num_groups": 4, "top_k_groups": 1, "top_k": 3}, "top_k must be from 1 to the 2 experts"),
    ],
)
def test_bad_arguments(kwargs, names):
    with pytest.raises(ValueError, match=names):
        moe_route(**{"router_logits": torch.zeros(2, 8), "top_k": 2, **kwargs})


def test_operator(device):
    """Registered well enough for torch.compile: schema, fake tensors and functionalisation."""
    logits, bias = torch.randn(3, 8, device=device), torch.randn(8, device=device)
    weights, ids = torch.empty(3, 2, device=device), torch.empty(3, 2, device=device, dtype=torch.int32)
    op = torch.ops.tritonllm.moe_route.default
    torch.library.opcheck(op, (logits, bias, weights, ids, True, "sigmoid", 4, 2, 1.0, True))
    torch.library.opcheck(op, (logits, None, weights, ids, False, "softmax", 1, 1, 1.0, False))


@pytest.mark.gpu
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("experts", "top_k", "groups"), [(8, 2, 1), (60, 4, 1), (256, 8, 8), (512, 10, 1)])
def test_a_token_has_the_same_bits_among_any_others(device, scoring, experts, top_k, groups):
    logits, bias = torch.randn(9000, experts, device=device), torch.randn(experts, device=device) / 10
    options = {"scoring": scoring, "bias": bias, "num_groups": groups, "top_k_groups": max(1, groups // 2)}
    weights, ids = moe_route(logits, top_k, **options, batch_invariant=True)
    for count in (1, 3, 64, 4095, 4096):
        part = moe_route(logits[5 : 5 + count], top_k, **options, batch_invariant=True)
        assert torch.equal(part[0], weights[5 : 5 + count]) and torch.equal(part[1], ids[5 : 5 + count])


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 1024, 16384])
@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (60, 4), (128, 8), (512, 10)])
def test_real_shapes(device, tokens, experts, top_k):
    logits = torch.randn(tokens, experts, device=device, dtype=torch.bfloat16)
    assert_same(moe_route(logits, top_k), moe_route_ref(logits, top_k))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 1024, 16384])
def test_deepseek_v3_at_real_shapes(device, tokens):
    """Scores in their last bit may differ from torch's, so a choice may too, if both are as good."""
    logits, bias = torch.randn(tokens, 256, device=device), torch.randn(256, device=device) / 10
    options = {"scoring": "sigmoid", "bias": bias, "num_groups": 8, "top_k_groups": 4, "scale": 2.5}
    weights, ids = moe_route(logits, 8, **options)
    expected_weights, expected_ids = moe_route_ref(logits, 8, **options)
    same = (ids == expected_ids).all(1)
    assert same.float().mean() > 0.999
    assert_close(weights[same], expected_weights[same])
    biased = logits.sigmoid() + bias
    reached, best = biased.gather(1, ids.long()), biased.gather(1, expected_ids.long())
    assert (reached - best).abs().max() < 1e-6


@pytest.mark.gpu
def test_fullgraph_compile(device):
    logits = torch.randn(8, 16, device=device)
    compiled = torch.compile(lambda x: moe_route(x * 2, 3), fullgraph=True)
    assert_same(compiled(logits), moe_route_ref(logits * 2, 3))

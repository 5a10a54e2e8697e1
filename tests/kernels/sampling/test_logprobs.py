import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.compare import FLOATS, with_row_padding
from support.examples import examples

from tritonllm.kernels import token_logprobs, token_logprobs_ref
from tritonllm.kernels.sampling.logprobs import MOST_SELECTED


def assert_same(got, wanted, *, ordered=True):
    """Equal ids and ranks; log-probabilities within float32 rounding of the logits and of their logarithmic sum."""
    assert [t.dtype for t in got] == [torch.int64, torch.float32, torch.int64]
    if ordered:
        assert torch.equal(got[0], wanted[0])
    torch.testing.assert_close(got[1], wanted[1], rtol=1e-6, atol=4e-6)
    assert torch.equal(got[2], wanted[2])


@settings(max_examples=examples(20))
@given(
    rows=st.integers(0, 3),
    vocab=st.sampled_from([1, 5, 130, 300]),
    top_n=st.sampled_from([0, 1, 7]),
    dtype=st.sampled_from(FLOATS),
    kind=st.sampled_from(["normal", "ties", "infinities", "huge"]),
    padding=st.integers(0, 2),
    seed=st.integers(0, 2**20),
)
def test_matches_reference(device, rows, vocab, top_n, dtype, kind, padding, seed):
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=g) * 4
    if kind == "ties":
        logits = logits.round()
    elif kind == "infinities":
        logits[torch.rand(rows, vocab, generator=g) < 0.5] = -torch.inf
    elif kind == "huge":
        logits *= 1e4 if dtype != torch.float16 else 1e3
    chosen = torch.randint(-1, vocab + 1, (rows,), generator=g).to(device)
    logits = with_row_padding(logits.to(device, dtype), padding)
    got, wanted = token_logprobs(logits, chosen, top_n), token_logprobs_ref(logits, chosen, top_n)
    assert got[0].shape == (rows, 1 + min(top_n, vocab))
    if kind == "huge":  # float32 holds such a logarithmic sum to 1e-7 of itself
        assert torch.equal(got[0], wanted[0]) and torch.equal(got[2], wanted[2])
        torch.testing.assert_close(got[1], wanted[1], rtol=1e-6, atol=4e-3)
    else:
        assert_same(got, wanted)


def test_is_log_softmax_and_topk(device):
    logits = torch.randn(2, 300, device=device)
    chosen = torch.tensor([7, 299], device=device)
    ids, logprobs, ranks = token_logprobs(logits, chosen, 4)
    wanted = logits.log_softmax(-1)
    best = wanted.topk(4)
    assert torch.equal(ids, torch.cat([chosen[:, None], best.indices], -1))
    torch.testing.assert_close(logprobs, torch.cat([wanted.gather(1, chosen[:, None]), best.values], -1))
    assert torch.equal(ranks, (wanted > wanted.gather(1, chosen[:, None])).sum(-1) + 1)


@pytest.mark.parametrize("fn", [token_logprobs, token_logprobs_ref])
def test_order_among_equals(device, fn):
    """The lower id comes first, also where whole groups of tokens are equal; ranks count only larger logits."""
    logits = torch.zeros(1, 520, device=device)
    logits[0, [400, 130, 3]] = 1.0
    ids, _, ranks = fn(logits, torch.tensor([519], device=device), 6)
    assert ids.tolist() == [[519, 3, 130, 400, 0, 1, 2]] and ranks.tolist() == [4]


@pytest.mark.parametrize("fn", [token_logprobs, token_logprobs_ref])
def test_order_among_few_equals(device, fn):
    """Few enough to be compared with each other."""
    logits = torch.linspace(-2.0, -1.0, 520, device=device)[None].contiguous()
    logits[0, [400, 130, 3]] = 1.0
    ids, _, _ = fn(logits, torch.tensor([519], device=device), 3)
    assert ids.tolist() == [[519, 3, 130, 400]]


@pytest.mark.parametrize("fn", [token_logprobs, token_logprobs_ref])
def test_rows_without_a_number(device, fn):
    """What cannot occur has log-probability -inf, as has every token of a row of -inf, and an id of no token."""
    logits = torch.full((3, 150), -torch.inf, device=device)
    logits[1, 149] = 2.0
    logits[2, :2] = torch.nan
    logits[2, 5] = torch.inf
    ids, logprobs, ranks = fn(logits, torch.tensor([0, 149, -1], device=device), 2)
    assert ids.tolist() == [[0, 0, 1], [149, 149, 0], [-1, 5, 0]]
    assert logprobs.tolist() == [[-torch.inf] * 3, [0.0, 0.0, -torch.inf], [-torch.inf, 0.0, -torch.inf]]
    assert ranks.tolist() == [1, 1, 2]


@pytest.mark.parametrize("top_n", [MOST_SELECTED, MOST_SELECTED + 1, 299, 1000])
def test_many(device, top_n):
    """Beyond the tokens that the kernel selects, torch does."""
    logits = torch.randperm(300, device=device).float()[None] / 16
    chosen = torch.tensor([11], device=device)
    assert_same(token_logprobs(logits, chosen, top_n), token_logprobs_ref(logits, chosen, top_n))


@given(
    vocab=st.sampled_from([33, 130, 300]),
    beyond=st.integers(1, 90),
    dtype=st.sampled_from(FLOATS),
    few_values=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_many_with_ties_and_no_numbers(device, vocab, beyond, dtype, few_values, seed):
    """Beyond the tokens that the kernel selects, too, the lower of equals comes first, NaN is -inf and +inf finite."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, vocab, generator=g) * 4
    logits = logits.round().clamp(-1, 1) if few_values else logits  # with 0 and -0, which are equal
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf])[torch.randint(3, (2, vocab), generator=g)]
    logits[0] = torch.where(torch.rand(vocab, generator=g) < 0.3, odd[0], logits[0])
    arguments = logits.to(device, dtype), torch.tensor([7, 32], device=device), MOST_SELECTED + beyond
    assert_same(token_logprobs(*arguments), token_logprobs_ref(*arguments))


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"logits": torch.zeros(8)}, r"logits must have shape \[R, V\]"),
        ({"logits": torch.zeros(2, 0)}, "logits must have at least one column"),
        ({"logits": torch.zeros(8, 2).t()}, "logits must be contiguous"),
        ({"logits": torch.zeros(2, 8, dtype=torch.int32)}, "logits must be torch.float16"),
        ({"chosen": torch.zeros(3, dtype=torch.int64)}, r"chosen must have shape \[2\]"),
        ({"chosen": torch.zeros(2, dtype=torch.int32)}, "chosen must be torch.int64"),
        ({"top_n": -1}, "top_n must be 0 or more, got -1"),
    ],
)
def test_bad_arguments(change, names):
    arguments = {"logits": torch.zeros(2, 8), "chosen": torch.zeros(2, dtype=torch.int64), "top_n": 1, **change}
    with pytest.raises(ValueError, match=names):
        token_logprobs(**arguments)


@pytest.mark.parametrize("top_n", [0, 3, 40])
def test_operator(device, top_n):
    ids = torch.empty(2, 1 + top_n, dtype=torch.int64, device=device)
    ranks = torch.empty(2, dtype=torch.int64, device=device)
    arguments = (
        torch.randn(2, 50, device=device),
        ranks.clone().zero_(),
        top_n,
        ids,
        torch.empty_like(ids).float(),
        ranks,
    )
    torch.library.opcheck(torch.ops.tritonllm.token_logprobs.default, arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "vocab"), [(1, 151936), (64, 151936), (256, 128256), (3, 50257)])
@pytest.mark.parametrize("top_n", [0, 5, 20, 100])
def test_real_shapes(device, dtype, rows, vocab, top_n):
    logits = (torch.randn(rows, vocab, device=device) * 4).to(dtype)
    chosen = torch.randint(vocab, (rows,), device=device)
    chosen[::2] = logits[::2].argmax(-1)
    wanted = token_logprobs_ref(logits, chosen, top_n)
    assert_same(token_logprobs(logits, chosen, top_n), wanted, ordered=top_n <= MOST_SELECTED)


@pytest.mark.gpu
def test_rows_beyond_2_31_elements(device):
    logits = torch.randn(2, 2**31 + 1000, device=device, dtype=torch.bfloat16)[:, :500]
    chosen = torch.tensor([3, 400], device=device)
    assert_same(token_logprobs(logits, chosen, 5), token_logprobs_ref(logits, chosen, 5))


@pytest.mark.gpu
@pytest.mark.parametrize("top_n", [5, 40])
def test_cuda_graph(device, top_n):
    """A captured call follows the values in its tensors."""
    logits, chosen = torch.randn(8, 5000, device=device), torch.randint(5000, (8,), device=device)
    token_logprobs(logits, chosen, top_n)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = token_logprobs(logits, chosen, top_n)
    for _ in range(3):
        logits.normal_()
        chosen.random_(5000)
        graph.replay()
        assert_same(got, token_logprobs_ref(logits, chosen, top_n))

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.compare import FLOATS, poisoned, with_row_padding
from support.draws import assert_same_draws
from support.statistics import assert_drawn_from

from tritonllm.kernels import sample, sample_ref
from tritonllm.kernels.runtime import tuning

TEMPERATURES = [0.0, 1e-6, 0.4, 1.0, 30.0]
TOP_K = [0, -1, 1, 2, 40, 10**6]
TOP_P = [1.0, 0.95, 0.5, 1e-6]
MIN_P = [0.0, 0.1, 1.0]


def parameters(device, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, *, rows=1, seed=0, step=0):
    """Sampling parameters of `rows` rows with consecutive seeds."""
    return (
        torch.full((rows,), temperature, device=device),
        torch.full((rows,), top_k, dtype=torch.int32, device=device),
        torch.full((rows,), top_p, device=device),
        torch.full((rows,), min_p, device=device),
        torch.arange(seed, seed + rows, device=device),
        torch.full((rows,), step, dtype=torch.int64, device=device),
    )


def mixed(rows, device, g):
    """Parameters chosen anew for each row; every other row has no limits."""

    def choose(values, dtype):
        return torch.tensor(values, dtype=dtype)[torch.randint(len(values), (rows,), generator=g)].to(device)

    temperature, top_p, min_p = (choose(values, torch.float32) for values in (TEMPERATURES, TOP_P, MIN_P))
    top_k = choose(TOP_K, torch.int32)
    top_k[::2], top_p[::2], min_p[::2] = 0, 1, 0
    seeds, steps = torch.randint(-(2**62), 2**62, (2, rows), generator=g).to(device)
    return temperature, top_k, top_p, min_p, seeds, steps


def make_logits(rows, vocab, spread, g, *, masked=0.0):
    logits = torch.randn(rows, vocab, generator=g) * spread
    where = torch.rand(rows, vocab, generator=g)
    return logits.masked_fill(where < masked, -torch.inf).masked_fill(where < masked / 4, torch.nan)


@given(
    rows=st.integers(0, 4),
    vocab=st.sampled_from([1, 7, 128, 129, 300, 520]),
    dtype=st.sampled_from(FLOATS),
    spread=st.sampled_from([0.0, 1.0, 10.0, 1e30]),
    masked=st.sampled_from([0.0, 0.5, 1.0]),
    padding=st.integers(0, 3),
    seed=st.integers(0, 2**20),
)
def test_matches_reference(device, rows, vocab, dtype, spread, masked, padding, seed):
    g = torch.Generator().manual_seed(seed)
    logits = make_logits(rows, vocab, spread, g, masked=masked).to(device, dtype)
    params = mixed(rows, device, g)
    out = poisoned(rows, dtype=torch.int64, device=device)
    assert sample(with_row_padding(logits, padding), *params, out=out) is out
    assert_same_draws(out, sample_ref(logits, *params), logits, *params)


def test_greedy(device):
    """The argmax, the lowest id among equals; NaN and -inf never, +inf always; token 0 if there is nothing else."""
    logits = torch.zeros(7, 300, device=device)
    logits[0, [299, 140, 141]] = 2.0
    logits[1, 0] = torch.nan
    logits[2] = -torch.inf
    logits[3] = torch.nan
    logits[4, :130] = -torch.inf
    logits[5, [20, 288]] = torch.inf
    logits[6] = torch.finfo(torch.float32).min
    wanted = torch.tensor([140, 1, 0, 0, 130, 20, 0], device=device)
    for temperature, top_k in ((0.0, 0), (-1.0, 5), (torch.nan, 0), (1.0, 1)):
        params = parameters(device, temperature, top_k, rows=7)
        assert torch.equal(sample(logits, *params), wanted)
        assert torch.equal(sample_ref(logits, *params), wanted)


def test_rows_without_a_choice(device):
    """Rows of -inf and NaN give token 0 whatever the parameters; a row with one token gives that."""
    logits = torch.full((3, 300), -torch.inf, device=device)
    logits[1] = torch.nan
    logits[2, 200] = -1e38
    for limits in ({}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.5}, {"top_k": 3, "top_p": 0.1, "min_p": 0.1}):
        params = parameters(device, 0.7, **limits, rows=3)
        for ids in (sample(logits, *params), sample_ref(logits, *params)):
            assert ids.tolist() == [0, 0, 200]


@pytest.mark.parametrize(
    ("parameter", "value", "nearest"),
    [
        ("temperature", torch.inf, 1e30),
        ("top_k", -7, 0),
        ("top_p", -1.0, 1e-9),
        ("top_p", 0.0, 1e-9),
        ("top_p", 7.0, 1.0),
        ("top_p", torch.nan, 1.0),
        ("min_p", -1.0, 0.0),
        ("min_p", 2.0, 1.0),
        ("min_p", torch.nan, 0.0),
    ],
)
def test_values_out_of_range(device, parameter, value, nearest):
    """Values on the device are not checked: they count as the nearest sensible one, and never as an address."""
    logits = make_logits(2, 300, 3.0, torch.Generator().manual_seed(0), masked=0.5).to(device)
    wanted = sample_ref(logits, *parameters(device, **{parameter: nearest}, rows=2))
    for fn in (sample, sample_ref):
        assert torch.equal(fn(logits, *parameters(device, **{parameter: value}, rows=2)), wanted)


def test_none_means_no_limit(device):
    logits = make_logits(3, 200, 2.0, torch.Generator().manual_seed(0)).to(device)
    temperature, *off, seeds, steps = parameters(device, rows=3)
    wanted = sample(logits, temperature, *off, seeds, steps)
    assert torch.equal(sample(logits, temperature, None, None, None, seeds, steps), wanted)
    assert torch.equal(sample_ref(logits, temperature, None, None, None, seeds, steps), wanted)


def test_draw_is_the_row_s_own(device):
    """A row's token does not depend on the batch, its place in it, or the launch configuration."""
    g = torch.Generator().manual_seed(3)
    logits, params = make_logits(5, 700, 3.0, g).to(device), mixed(5, device, g)
    together = sample(logits, *params)
    alone = [sample(logits[i : i + 1], *(p[i : i + 1] for p in params)) for i in range(5)]
    assert torch.equal(torch.cat(alone), together)
    order = torch.tensor([3, 1, 4, 0, 2], device=device)
    for config in ({"TILES": 1, "num_warps": 1}, {"TILES": 3, "num_warps": 2}, {"TILES": 8, "num_warps": 1}):
        with tuning.override("sample_draw", config):
            assert torch.equal(sample(logits[order], *(p[order] for p in params)), together[order])


def test_workspace_is_zero_again(device):
    """However many programs share a row, and whichever rows have limits: the next call finds zeros."""
    g = torch.Generator().manual_seed(9)
    logits, params = make_logits(6, 1000, 3.0, g).to(device), mixed(6, device, g)
    workspace = torch.zeros(8, dtype=torch.int32, device=device)
    wanted = sample(logits, *params)
    with tuning.override("sample_draw", {"TILES": 1, "num_warps": 1}):
        for _ in range(2):
            assert torch.equal(sample(logits, *params, workspace=workspace), wanted)
            assert not workspace.any()


def test_seed_and_step_matter(device):
    logits = torch.zeros(1, 500, device=device).expand(40, 500)
    params = list(parameters(device, rows=40))
    by_seed = sample_ref(logits, *params)
    params[4], params[5] = torch.full_like(params[4], 7), torch.arange(40, device=device)
    by_step = sample_ref(logits, *params)
    assert by_seed.unique().numel() > 30 and by_step.unique().numel() > 30


LIMITS = [
    {},
    {"temperature": 0.5},
    {"top_k": 5},
    {"top_p": 0.7},
    {"min_p": 0.1},
    {"temperature": 2.0, "top_k": 30, "top_p": 0.8, "min_p": 0.05},
]


def truncated(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The distribution that should be drawn from, by a sort in float64."""
    probs = torch.softmax(logits.double().cpu() / temperature, 0)
    sorted_probs, order = probs.sort(descending=True, stable=True)
    kept = sorted_probs >= min_p * sorted_probs[0]
    kept &= torch.arange(len(probs)) < (top_k or len(probs))
    sorted_probs = sorted_probs * kept / (sorted_probs * kept).sum()
    before = sorted_probs.cumsum(0) - sorted_probs
    return torch.zeros_like(probs).scatter(0, order, sorted_probs * (before < top_p))


def check_statistics(fn, device, limits, vocab, rows):
    logits = make_logits(1, vocab, 2.0, torch.Generator().manual_seed(4))[0].to(device)
    tokens = fn(logits.expand(rows, vocab), *parameters(device, **limits, rows=rows, seed=10**12, step=5))
    assert_drawn_from(tokens.cpu(), truncated(logits, **limits))


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("vocab", [8, 400])
def test_reference_statistics(device, limits, vocab):
    check_statistics(sample_ref, device, limits, vocab, 8_000)


def test_noise_of_the_two_levels_is_independent(device):
    """Group i and token i do not share noise: the first tokens are as likely as the others."""
    tokens = sample_ref(torch.zeros(8_000, 512, device=device), *parameters(device, rows=8_000))
    assert_drawn_from(tokens.cpu(), torch.ones(512))
    assert_drawn_from((tokens < 4).long().cpu(), torch.tensor([508.0, 4.0]))


def test_kernel_statistics(device):
    """Few draws, where kernels run slowly: the reference's, and groups in proportion to their weights."""
    logits = make_logits(1, 384, 3.0, torch.Generator().manual_seed(1))[0].to(device)
    params = parameters(device, rows=200)
    tokens = sample(logits.expand(200, 384), *params)
    assert_same_draws(tokens, sample_ref(logits.expand(200, 384), *params), logits.expand(200, 384), *params)
    assert_drawn_from(tokens.cpu() // 128, truncated(logits).view(3, 128).sum(-1))


@pytest.mark.gpu
@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_kernel_statistics_in_full(device, limits):
    check_statistics(sample, device, limits, 400, 400_000)


@pytest.mark.gpu
def test_unlikely_tokens_are_drawn(device):
    """Half of the probability in 2^17 tokens of 2^-18 each, and one likely token: the noise has no floor."""
    logits = torch.zeros(2**17 + 1, device=device)
    logits[0] = 17 * 0.6931471805599453
    tokens = torch.cat([sample(logits.expand(500, -1), *parameters(device, rows=500, step=s)) for s in range(40)])
    assert_drawn_from((tokens > 0).long(), torch.tensor([0.5, 0.5]))
    assert_drawn_from(tokens[tokens > 0] // 2**13, torch.ones(16))


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"logits": torch.zeros(2, 3, 4)}, r"logits must have shape \[B, V\]"),
        ({"logits": torch.zeros(2, 0)}, "logits must have at least one column"),
        ({"logits": torch.zeros(2, 8, dtype=torch.int32)}, "logits must be torch.float16"),
        ({"logits": torch.zeros(8, 2).t()}, "logits must be contiguous"),
        ({"temperature": torch.zeros(3)}, r"temperature must have shape \[2\]"),
        ({"temperature": torch.zeros(2, dtype=torch.float64)}, "temperature must be torch.float32"),
        ({"top_k": torch.zeros(2, dtype=torch.int64)}, "top_k must be torch.int32"),
        ({"top_p": torch.zeros(1)}, r"top_p must have shape \[2\]"),
        ({"min_p": 0.1}, "min_p must be a torch.Tensor"),
        ({"seeds": torch.zeros(2, dtype=torch.int32)}, "seeds must be torch.int64"),
        ({"steps": torch.zeros(2, device="meta", dtype=torch.int64)}, "steps must be on cpu"),
        ({"out": torch.zeros(2)}, "out must be torch.int64"),
        ({"workspace": torch.zeros(1, dtype=torch.int32)}, "workspace must have at least 2 elements"),
        ({"seats": torch.zeros(2, dtype=torch.int32)}, "edits and seats must be given together"),
    ],
)
def test_bad_arguments(change, names):
    names_of = ("temperature", "top_k", "top_p", "min_p", "seeds", "steps")
    arguments = {"logits": torch.zeros(2, 8), **dict(zip(names_of, parameters("cpu", rows=2), strict=True)), **change}
    with pytest.raises(ValueError, match=names):
        sample(**arguments)


@pytest.mark.parametrize("limits", [True, False])
def test_operator(device, limits):
    temperature, *optional, seeds, steps = parameters(device, top_k=3, rows=2)
    optional = optional if limits else [None] * 3
    out = torch.empty(2, dtype=torch.int64, device=device)
    workspace = torch.zeros(3, dtype=torch.int32, device=device) if limits else None
    arguments = (torch.randn(2, 9, device=device), workspace, out, temperature, *optional, seeds, steps)
    torch.library.opcheck(torch.ops.tritonllm.sample.default, arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rows", [1, 16, 64, 256])
@pytest.mark.parametrize("spread", [0.02, 4.0])
def test_real_shapes(device, dtype, rows, spread):
    g = torch.Generator().manual_seed(rows)
    logits, params = make_logits(rows, 151936, spread, g).to(device, dtype), mixed(rows, device, g)
    out = poisoned(rows, dtype=torch.int64, device=device)
    sample(logits, *params, out=out)
    assert_same_draws(out, sample_ref(logits, *params), logits, *params)
    some = torch.randperm(rows, generator=g)[:5].to(device)
    assert torch.equal(sample(logits[some], *(p[some] for p in params)), out[some])


@pytest.mark.gpu
def test_offsets_beyond_int32(device):
    """More than 2^31 logits: the last row is right."""
    logits = torch.zeros(2**31 // 151936 + 2, 151936, device=device, dtype=torch.bfloat16)
    logits[-1, 151935] = 9
    params = parameters(device, temperature=0.1, top_p=0.9, rows=len(logits))
    assert sample(logits, *params)[-1] == 151935


@pytest.mark.gpu
def test_fullgraph_compile(device):
    logits, params = torch.randn(8, 1000, device=device), parameters(device, top_k=20, top_p=0.9, rows=8)
    compiled = torch.compile(lambda x: sample(x * 2, *params) + 1, fullgraph=True)
    assert torch.equal(compiled(logits), sample(logits * 2, *params) + 1)


@pytest.mark.gpu
def test_cuda_graph(device):
    """A captured launch follows the values in its tensors: parameters and logits may change between replays."""
    g = torch.Generator().manual_seed(5)
    logits, params = make_logits(16, 5000, 3.0, g).to(device), mixed(16, device, g)
    out = torch.empty(16, dtype=torch.int64, device=device)
    sample(logits, *params, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample(logits, *params, out=out)
    for _ in range(3):
        for static, new in zip(params, mixed(16, device, g), strict=True):
            static.copy_(new)
        logits.copy_(make_logits(16, 5000, 3.0, g))
        out.fill_(-1)
        graph.replay()
        assert torch.equal(out, sample(logits, *params))


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [32000, 151936, 262144])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [0.3, 2.0])
def test_a_flat_nucleus_has_its_edge_where_float64_has_it(device, vocab, dtype, spread, record_property):
    """At temperature 3 thousands of tokens lie within rounding of the edge of top_p. The probability before a drawn
    token is at most top_p, give or take 1e-5 of it (sums are float32); 32,768 draws of 64 rows."""
    rows, top_p = 64, 0.5
    g = torch.Generator().manual_seed(vocab)
    logits = (spread * torch.randn(rows, vocab, generator=g)).to(dtype).to(device)
    order = (logits.double() / 3.0).sort(dim=-1, descending=True, stable=True)
    probs = torch.softmax(order.values, -1)
    before = torch.empty_like(probs).scatter_(1, order.indices, probs.cumsum(-1) - probs)
    params = [torch.full((rows,), value, device=device) for value in (3.0, top_p)]
    seeds, most = torch.arange(rows, device=device), torch.zeros((), dtype=torch.float64, device=device)
    for step in range(512):
        steps = torch.full((rows,), step, device=device)
        drawn = sample(logits, params[0], None, params[1], None, seeds, steps)
        most = torch.maximum(most, before.gather(1, drawn[:, None]).max())
    record_property("beyond_the_edge", most.item() / top_p - 1)
    assert 0.99 * top_p < most <= top_p * (1 + 1e-5)

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.compare import FLOATS, with_row_padding
from support.examples import examples
from support.statistics import assert_drawn_from
from support.verdicts import TARGETS, parameters, target_probs

from tritonllm.kernels import rejection_sample, rejection_sample_ref, sample, sample_ref
from tritonllm.kernels.runtime import tuning


def make_case(batch, drafts, vocab, seed, device, *, temperatures=(0.0, 0.7, 1.0)):
    """Targets, drafters near them, drafts from those (some missing), and parameters that differ between sequences."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, drafts + 1, vocab, generator=g) * 2
    probs = torch.softmax(logits[:, :-1] + torch.randn(batch, drafts, vocab, generator=g) * 0.5, -1)
    ids = (
        torch.multinomial(probs.view(-1, vocab), 1, generator=g).view(batch, drafts)
        if drafts * batch
        else probs[..., 0]
    )
    ids = torch.where(torch.rand(batch, drafts, generator=g) < 0.15, -1, ids.long())

    def choose(values, dtype):
        return torch.tensor(values, dtype=dtype)[torch.randint(len(values), (batch,), generator=g)].to(device)

    limits = (choose([0, 3, 20], torch.int32), choose([1.0, 0.8], torch.float32))
    numbers = torch.randint(0, 2**40, (2, batch), generator=g).to(device)
    params = (choose(temperatures, torch.float32), *limits, *numbers)
    return ids.to(device), probs.to(device), logits.to(device), params


def assert_same_verdicts(got, wanted, *, most_different=0):
    """The same tokens, but for `most_different` sequences in which rounding may have decided a near-tie."""
    assert got[0].dtype == got[1].dtype == torch.int64
    different = (got[0] != wanted[0]).any(-1) | (got[1] != wanted[1])
    assert int(different.sum()) <= most_different, f"sequences {different.nonzero()[:, 0].tolist()} differ"


@settings(max_examples=examples(40))  # 3 in `make test` do not see every step (tests/mutations.py)
@given(
    batch=st.integers(0, 3),
    drafts=st.integers(0, 3),
    vocab=st.sampled_from([1, 9, 130, 300]),
    dtype=st.sampled_from(FLOATS),
    id_dtype=st.sampled_from([torch.int32, torch.int64]),
    with_probs=st.booleans(),
    padding=st.integers(0, 2),
    seed=st.integers(0, 2**20),
)
def test_matches_reference(device, batch, drafts, vocab, dtype, id_dtype, with_probs, padding, seed):
    ids, probs, logits, params = make_case(batch, drafts, vocab, seed, device)
    ids, logits = ids.to(id_dtype), logits.to(dtype)
    probs = probs.to(dtype) if with_probs else None
    wanted = rejection_sample_ref(ids, probs, logits, *params)
    padded = None if probs is None else with_row_padding(probs, padding)
    got = rejection_sample(with_row_padding(ids, padding), padded, with_row_padding(logits, padding), *params)
    assert_same_verdicts(got, wanted)


def test_shape_of_the_answer(device):
    """Accepted drafts, one token, then -1: whatever the verdict."""
    ids, probs, logits, params = make_case(500, 4, 12, 1, device)
    for given_probs in (probs, None):
        out, accepted = rejection_sample_ref(ids, given_probs, logits, *params)
        position = torch.arange(5, device=device)
        assert ((accepted >= 0) & (accepted <= 4)).all() and accepted.unique().numel() == 5
        assert torch.equal(out >= 0, position <= accepted[:, None])
        drafts = position[:4] < accepted[:, None]
        assert torch.equal(out[:, :4][drafts], ids[drafts])


def test_greedy(device):
    """A draft is accepted if it is the argmax, the first other one replaced by it, whatever the draft probabilities."""
    logits = torch.zeros(4, 4, 200, device=device)
    best = torch.tensor([150, 3, 140, 7], device=device)
    logits[:, range(4), best] = 1.0
    ids = torch.tensor([[150, 3, 140], [150, 9, 140], [0, 3, 140], [150, 3, -1]], device=device)
    wanted = [[150, 3, 140, 7], [150, 3, -1, -1], [150, -1, -1, -1], [150, 3, 140, -1]]
    for probs in (None, torch.full((4, 3, 200), 1 / 200, device=device)):
        for fn in (rejection_sample, rejection_sample_ref):
            out, accepted = fn(ids, probs, logits, *parameters(device, 0.0, rows=4))
            assert out.tolist() == wanted
            assert accepted.tolist() == [3, 1, 0, 2]


@pytest.mark.parametrize("missing", [-1, 300, -(2**31)])
def test_without_drafts_it_is_sample(device, missing):
    """Position 0 of a sequence without drafts is the token that `sample` draws; so is the bonus, of its own step."""
    _, _, logits, params = make_case(4, 1, 300, 2, device, temperatures=(0.7, 1.0))
    temperature, top_k, top_p, seeds, steps = params
    no_min_p = torch.zeros_like(top_p)
    ids = torch.full((4, 1), missing, device=device)
    beyond = logits.clone()
    beyond[:, 1, 0] = 50.0  # what lies after the first row would be accepted
    out, accepted = rejection_sample(ids, None, beyond, *params)
    assert accepted.tolist() == [0] * 4 and (out[:, 1] == -1).all()
    assert torch.equal(out[:, 0], sample(logits[:, 0], temperature, top_k, top_p, no_min_p, seeds, steps))

    certain = logits.clone()
    certain[:, 0] = -torch.inf
    certain[:, 0, 5] = 0  # the draft that has all of the target's probability is accepted
    out, accepted = rejection_sample(torch.full_like(ids, 5), None, certain, *params)
    assert accepted.tolist() == [1] * 4
    assert torch.equal(out[:, 1], sample(logits[:, 1], temperature, top_k, top_p, no_min_p, seeds, steps + 1))


def test_row_without_a_choice(device):
    """A target row of -inf stands for token 0, as in `sample`."""
    logits = torch.full((2, 2, 130), -torch.inf, device=device)
    ids = torch.tensor([[0], [4]], device=device)
    for fn in (rejection_sample, rejection_sample_ref):
        out, accepted = fn(ids, None, logits, *parameters(device, 0.8, 5, 0.9, rows=2))
        assert out.tolist() == [[0, 0], [0, -1]] and accepted.tolist() == [1, 0]


def test_verdict_is_the_sequence_s_own(device):
    """It does not depend on the batch, the place in it, or the launch configuration."""
    ids, probs, logits, params = make_case(4, 2, 500, 6, device)
    together = rejection_sample(ids, probs, logits, *params)
    order = torch.tensor([2, 0, 3], device=device)
    with (
        tuning.override("rejection_judge", {"WIDE": 1, "num_warps": 4}),
        tuning.override("sample", {"CAPACITY": 512, "TILE": 4, "num_warps": 4}),
        tuning.override("sample_draw", {"TILES": 1, "num_warps": 1}),
    ):
        got = rejection_sample(ids[order], probs[order], logits[order], *(p[order] for p in params))
    assert torch.equal(got[0], together[0][order]) and torch.equal(got[1], together[1][order])


def check_statistics(fn, draw, device, target, drafter, rows, vocab):
    """Whatever drafts, emitted tokens have the target's distribution; probable drafts are accepted as often as can be.

    The drafter draws with the sequence's own seeds and steps, as an engine's would.
    """
    g = torch.Generator().manual_seed(8)
    logits = (torch.randn(3, vocab, generator=g) * 3).to(device)
    probs = torch.softmax(logits[:2] + torch.randn(2, vocab, generator=g).to(device) * 0.7, -1)
    params = parameters(device, **target, rows=rows, seed=10**9, step=3)
    every = [t.expand(rows, *t.shape) for t in (probs, logits)]
    if drafter == "probabilities":
        one = torch.ones(rows, device=device)
        steps = params[4][:, None] + torch.arange(2, device=device)
        ids = torch.stack(
            [draw(every[0][:, i].log(), one, None, None, None, params[3], steps[:, i].contiguous()) for i in range(2)],
            1,
        )
    elif drafter == "greedy":
        ids = probs.argmax(-1).expand(rows, 2)
    else:  # tokens from nowhere, such as n-grams: here any of the target's three likeliest
        some = torch.randint(3, (2, rows), generator=g).to(device)
        ids = logits[:2].topk(3).indices.gather(1, some).t().contiguous()
    out, accepted = fn(ids, every[0] if drafter == "probabilities" else None, every[1], *params)

    wanted = [target_probs(row, **target) for row in logits]
    for position in range(3):  # each position's distribution is the target's, given that it is reached
        assert_drawn_from(out[accepted >= position, position].cpu(), wanted[position])
    if drafter == "probabilities":
        rate = torch.minimum(wanted[0], probs[0].double().cpu()).sum()
        assert_drawn_from((accepted > 0).long().cpu(), torch.stack([1 - rate, rate]))


@pytest.mark.parametrize("drafter", ["probabilities", "greedy", "nowhere"])
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_reference_statistics(device, target, drafter):
    check_statistics(rejection_sample_ref, sample_ref, device, target, drafter, rows=8_000, vocab=300)


@pytest.mark.parametrize("width", [1, 128])
def test_drafts_from_the_same_noise(device, width):
    """A drafter that draws with the sequence's seed and step leaves no trace in what replaces its rejected tokens.

    Three tokens, or three groups. Were the noise the same, the second would take 0.30 of the draws and not 0.35.
    """
    rows, one = 6_000, torch.ones(6_000, device=device)
    q = torch.tensor([0.8, 0.2, 0.0]).repeat_interleave(width).to(device) / width
    p = torch.tensor([0.3, 0.35, 0.35]).repeat_interleave(width).to(device) / width
    *_, seeds, steps = parameters(device, rows=rows)
    ids = sample_ref(q.log().expand(rows, -1), one, None, None, None, seeds, steps)[:, None]
    logits, probs = p.log().expand(rows, 2, -1), q.expand(rows, 1, -1)
    out, accepted = rejection_sample_ref(ids, probs, logits, one, None, None, seeds, steps)
    assert_drawn_from(accepted.cpu(), torch.tensor([0.5, 0.5]))
    assert_drawn_from(out[:, 0].cpu() // width, torch.tensor([0.3, 0.35, 0.35]))


@pytest.mark.gpu
@pytest.mark.parametrize("drafter", ["probabilities", "greedy", "nowhere"])
@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("vocab", [12, 300])
def test_kernel_statistics(device, target, drafter, vocab):
    check_statistics(rejection_sample, sample, device, target, drafter, rows=200_000, vocab=vocab)


def hopeless_proposals(rows, vocab, device):
    """Impossible drafts, and q a thousandth short of p everywhere else: of p's tokens p - q takes one in a thousand."""
    g = torch.Generator().manual_seed(3)
    logits = (torch.randn(2, vocab, generator=g) * 2).to(device)
    logits[0, 7] = -torch.inf
    probs = logits[0].softmax(-1) * 0.999
    probs[7] = 0.001
    ids = torch.full((rows, 1), 7, device=device)
    return ids, probs.expand(rows, 1, vocab), logits.expand(rows, 2, vocab)


@pytest.mark.parametrize("target", [TARGETS[0], TARGETS[3]], ids=str)
def test_whole_rows_are_read_in_the_end(device, target):
    """The same as the reference, where nearly all proposals fail."""
    rows = 12 if device.type == "cpu" else 1000
    given = hopeless_proposals(rows, 300, device)
    params = parameters(device, **target, rows=rows, seed=5)
    assert_same_verdicts(
        rejection_sample(*given, *params), rejection_sample_ref(*given, *params), most_different=rows // 500
    )


@pytest.mark.parametrize("target", [TARGETS[0], TARGETS[3]], ids=str)
def test_reference_statistics_of_whole_rows(device, target):
    ids, probs, logits = hopeless_proposals(8_000, 300, device)
    out, accepted = rejection_sample_ref(ids, probs, logits, *parameters(device, **target, rows=8_000, seed=5))
    assert not accepted.any()
    if not target:  # p - q is then p / 1000
        assert_drawn_from(out[:, 0].cpu(), target_probs(logits[0, 0]))


@pytest.mark.gpu
@pytest.mark.parametrize(("vocab", "rows"), [(300, 200_000), (5000, 20_000)])
def test_kernel_statistics_of_whole_rows(device, vocab, rows):
    ids, probs, logits = hopeless_proposals(rows, vocab, device)
    temperature, _, _, seeds, steps = parameters(device, rows=rows, seed=5)
    out, _ = rejection_sample(ids, probs, logits, temperature, None, None, seeds, steps)
    assert_drawn_from(out[:, 0].cpu(), target_probs(logits[0, 0]))


def check_z_scores(fn, device, noise, vocab, rows, rounds):
    """First tokens, taken together in 40 bins of equal probability: no bin is off by 5 sigma."""
    g = torch.Generator(device).manual_seed(1)
    logits = torch.randn(2, vocab, device=device, generator=g)  # no token is as likely as a bin
    probs = (logits[0] + noise * torch.randn(vocab, device=device, generator=g)).softmax(-1)
    wanted = logits[0].double().softmax(-1)
    order = wanted.argsort(descending=True)
    bins = (wanted[order].cumsum(0) * 40).long().clamp_max(39)
    of_token = torch.empty(vocab, dtype=torch.int64, device=device).scatter_(0, order, bins)
    in_bin = torch.zeros(40, dtype=torch.float64, device=device).scatter_add_(0, of_token, wanted)
    assert float(in_bin.min()) > 0
    counts = torch.zeros(40, dtype=torch.float64, device=device)
    for turn in range(rounds):
        ids = torch.multinomial(probs, rows, replacement=True, generator=g)[:, None]
        one, _, _, seeds, steps = parameters(device, rows=rows, seed=turn * rows)
        every = (probs.expand(rows, 1, vocab), logits.expand(rows, 2, vocab))
        out, _ = fn(ids, *every, one, None, None, seeds, steps)
        counts += torch.bincount(of_token[out[:, 0]], minlength=40)
    n = rows * rounds
    z = (counts - n * in_bin) / (n * in_bin * (1 - in_bin)).sqrt()
    assert bool((z.abs() < 5).all()), f"z-scores {[round(score, 1) for score in z.tolist()]}"


@pytest.mark.parametrize("noise", [0.1, 1.0])
def test_reference_z_scores(device, noise):
    check_z_scores(rejection_sample_ref, device, noise, vocab=5000, rows=500, rounds=12)


@pytest.mark.gpu
@pytest.mark.parametrize("noise", [0.1, 1.0])
def test_z_scores_of_a_large_vocabulary(device, noise):
    check_z_scores(rejection_sample, device, noise, vocab=50_000, rows=2000, rounds=40)


def test_tokens_are_those_of_decoding_one_by_one(device):
    """Without draft probabilities, whatever the drafts: also those that `sample` drew with the same noise."""
    ids, probs, logits, params = make_case(6, 3, 130, 8, device)
    temperature, top_k, top_p, seeds, steps = params
    plain = torch.stack(
        [sample(logits[:, i], temperature, top_k, top_p, None, seeds, steps + i) for i in range(4)], dim=1
    )
    near = torch.stack(
        [sample(probs[:, i].log(), temperature, top_k, top_p, None, seeds, steps + i) for i in range(3)], dim=1
    )
    accepted_by = []
    for drafts in (ids, near, plain[:, :3].contiguous()):
        out, accepted = rejection_sample(drafts, None, logits, *params)
        kept = torch.arange(4, device=device) <= accepted[:, None]
        assert torch.equal(out, torch.where(kept, plain, -1))
        accepted_by.append(int(accepted.sum()))
    assert accepted_by[0] < accepted_by[1] < accepted_by[2] == 18


@pytest.mark.parametrize("fn", [rejection_sample, rejection_sample_ref])
def test_drafts_of_the_target_are_accepted(device, fn):
    """p = q: the drafter's tokens stand, also after rounding to its dtype's precision."""
    ids, _, logits, _ = make_case(4, 3, 200, 9, device)
    params = parameters(device, 1.0, rows=4)
    probs = torch.softmax(logits[:, :-1], -1)
    _, accepted = fn(ids.clamp_min(0), probs, logits, *params)
    assert accepted.tolist() == [3] * 4


@pytest.mark.parametrize("fn", [rejection_sample, rejection_sample_ref])
@pytest.mark.parametrize("with_probs", [True, False])
def test_drafts_outside_the_target_are_rejected(device, fn, with_probs):
    """A draft that top-k excludes is never emitted, and the residual has the target's support."""
    logits = torch.zeros(6, 3, 260, device=device)
    logits[:, :, [100, 200]] = 9.0
    ids = torch.full((6, 2), 30, device=device)
    probs = torch.nn.functional.one_hot(ids, 260).float() if with_probs else None
    out, accepted = fn(ids, probs, logits, *parameters(device, 1.0, 2, rows=6))
    assert accepted.tolist() == [0] * 6
    assert set(out[:, 0].tolist()) == {100, 200}


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"target_logits": torch.zeros(2, 8)}, r"target_logits must have shape \[B, G \+ 1, V\]"),
        ({"target_logits": torch.zeros(2, 0, 8)}, "target_logits must have a row"),
        ({"target_logits": torch.zeros(2, 4, 0)}, "target_logits must have at least one column"),
        ({"target_logits": torch.zeros(2, 4, 8, dtype=torch.int32)}, "target_logits must be torch.float16"),
        ({"draft_ids": torch.zeros(2, 4, dtype=torch.int64)}, r"draft_ids must have shape \[2, 3\]"),
        ({"draft_ids": torch.zeros(2, 3)}, "draft_ids must be torch.int32"),
        ({"draft_probs": torch.zeros(2, 3, 9)}, r"draft_probs must have shape \[2, 3, 8\]"),
        ({"draft_probs": torch.zeros(2, 8, 3).transpose(1, 2)}, "draft_probs must be contiguous"),
        ({"top_p": torch.zeros(1)}, r"top_p must have shape \[2\]"),
        ({"min_p": torch.zeros(2, dtype=torch.float16)}, "min_p must be torch.float32"),
        ({"steps": torch.zeros(2)}, "steps must be torch.int64"),
    ],
)
def test_bad_arguments(change, names):
    names_of = ("temperature", "top_k", "top_p", "seeds", "steps")
    arguments = {
        "draft_ids": torch.zeros(2, 3, dtype=torch.int64),
        "draft_probs": None,
        "target_logits": torch.zeros(2, 4, 8),
        **dict(zip(names_of, parameters("cpu", rows=2), strict=True)),
        **change,
    }
    with pytest.raises(ValueError, match=names):
        rejection_sample(**arguments)


@pytest.mark.parametrize("with_probs", [True, False])
def test_operator(device, with_probs):
    ids, probs, logits, (temperature, top_k, top_p, seeds, steps) = make_case(2, 2, 9, 0, device)
    out, accepted = (
        torch.empty(2, 3, dtype=torch.int64, device=device),
        torch.empty(2, dtype=torch.int64, device=device),
    )
    arguments = (
        ids,
        probs if with_probs else None,
        logits,
        None,
        out,
        accepted,
        temperature,
        top_k,
        top_p,
        None,
        seeds,
        steps,
    )
    torch.library.opcheck(torch.ops.tritonllm.rejection_sample.default, arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("batch", "drafts"), [(1, 16), (16, 1), (64, 4)])
@pytest.mark.parametrize("with_probs", [True, False])
def test_real_shapes(device, dtype, batch, drafts, with_probs):
    ids, probs, logits, params = make_case(batch, drafts, 151936, batch, device)
    logits, probs = logits.to(dtype), probs if with_probs else None
    wanted = rejection_sample_ref(ids, probs, logits, *params)
    assert_same_verdicts(rejection_sample(ids, probs, logits, *params), wanted, most_different=batch // 32)


@pytest.mark.gpu
def test_fullgraph_compile(device):
    ids, probs, logits, params = make_case(4, 2, 500, 3, device)
    compiled = torch.compile(lambda x: rejection_sample(ids, probs, x * 2, *params), fullgraph=True)
    assert_same_verdicts(compiled(logits), rejection_sample(ids, probs, logits * 2, *params))


@pytest.mark.gpu
def test_cuda_graph(device):
    """A captured launch follows the values in its tensors."""
    ids, probs, logits, params = make_case(8, 3, 2000, 4, device)
    rejection_sample(ids, probs, logits, *params)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = rejection_sample(ids, probs, logits, *params)
    for seed in (5, 6, 7):
        new_ids, new_probs, new_logits, new_params = make_case(8, 3, 2000, seed, device)
        for static, new in zip(
            (ids, probs, logits, *params), (new_ids, new_probs, new_logits, *new_params), strict=True
        ):
            static.copy_(new)
        graph.replay()
        assert_same_verdicts(got, rejection_sample(new_ids, new_probs, new_logits, *new_params))


def test_results_go_where_they_are_wanted(device):
    """Into the first rows of larger tensors, contiguous ones."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 4, 50, generator=generator).to(device)
    drafts = logits[:, :3].argmax(-1).int()
    drafts[1, 1] = (drafts[1, 1] + 1) % 50
    zeros = torch.zeros(3, dtype=torch.int64, device=device)
    arguments = (drafts, None, logits, torch.zeros(3, device=device), None, None, zeros, zeros)
    expected = rejection_sample(*arguments)
    ids = torch.full((5, 4), -7, dtype=torch.int64, device=device)
    accepted = torch.full((5,), -7, dtype=torch.int64, device=device)
    found = rejection_sample(*arguments, out=(ids[:3], accepted[:3]))
    assert found[0].data_ptr() == ids.data_ptr() and found[1].data_ptr() == accepted.data_ptr()
    assert torch.equal(ids[:3], expected[0]) and torch.equal(accepted[:3], expected[1])
    assert accepted.tolist() == [3, 1, 3, -7, -7] and (ids[3:] == -7).all()
    with pytest.raises(ValueError, match=r"out\[0\] must have shape \[3, 4\]"):
        rejection_sample(*arguments, out=(ids, accepted[:3]))
    with pytest.raises(ValueError, match=r"out\[1\] must be torch.int64"):
        rejection_sample(*arguments, out=(ids[:3], accepted[:3].int()))
    with pytest.raises(ValueError, match="out must be contiguous"):
        rejection_sample(*arguments, out=(torch.cat([ids, ids], 1)[:3, :4], accepted[:3]))

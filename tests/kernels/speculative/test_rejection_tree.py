import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.compare import FLOATS, with_row_padding
from support.examples import examples
from support.statistics import assert_drawn_from
from support.verdicts import TARGETS, parameters, target_probs

from tritonllm.kernels import (
    rejection_sample,
    rejection_sample_ref,
    rejection_sample_tree,
    rejection_sample_tree_ref,
    sample,
)
from tritonllm.kernels.speculative.draft_path import tree_depths, tree_depths_ref


def make_tree(batch, drafts, vocab, seed, device, *, dtype=torch.int64):
    """Random trees of likely tokens, some missing; logits; parameters that differ between sequences."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, drafts + 1, vocab, generator=g) * 3
    earlier = (torch.rand(batch, drafts, generator=g) * (torch.arange(drafts) + 1)).long()  # 0..j
    parents = earlier - 1
    likely = logits.topk(min(3, vocab)).indices.gather(1, earlier[..., None].expand(-1, -1, min(3, vocab)))
    ids = likely.gather(2, torch.randint(min(3, vocab), (batch, drafts, 1), generator=g))[..., 0]
    ids = ids.masked_fill(torch.rand(batch, drafts, generator=g) < 0.1, -1)

    def choose(values, dtype):
        return torch.tensor(values, dtype=dtype)[torch.randint(len(values), (batch,), generator=g)].to(device)

    limits = (choose([0, 3, 20], torch.int32), choose([1.0, 0.8], torch.float32))
    numbers = torch.randint(0, 2**40, (2, batch), generator=g).to(device)
    params = (choose([0.0, 0.7, 1.0], torch.float32), *limits, *numbers)
    return ids.to(device, dtype), parents.to(device, dtype), logits.to(device), params


def assert_same_paths(got, wanted, *, most_different=0):
    assert all(t.dtype == torch.int64 for t in got)
    different = (got[0] != wanted[0]).any(-1) | (got[1] != wanted[1]) | (got[2] != wanted[2]).any(-1)
    assert int(different.sum()) <= most_different, f"sequences {different.nonzero()[:, 0].tolist()} differ"


@settings(max_examples=examples(12))
@given(
    batch=st.integers(0, 3),
    drafts=st.integers(0, 9),
    vocab=st.sampled_from([1, 9, 130]),
    dtype=st.sampled_from(FLOATS),
    id_dtype=st.sampled_from([torch.int32, torch.int64]),
    padding=st.integers(0, 2),
    seed=st.integers(0, 2**20),
)
def test_matches_reference(device, batch, drafts, vocab, dtype, id_dtype, padding, seed):
    ids, parents, logits, params = make_tree(batch, drafts, vocab, seed, device, dtype=id_dtype)
    logits = logits.to(dtype)
    wanted = rejection_sample_tree_ref(ids, parents, logits, *params)
    padded = (with_row_padding(t, padding) for t in (ids, parents, logits))
    padded = tuple(padded)
    assert_same_paths(rejection_sample_tree(*padded, *params), wanted)
    out = tuple(torch.full_like(t, 77) for t in wanted)
    given = rejection_sample_tree(*padded, *params, out=out)
    assert all(mine is there for mine, there in zip(given, out, strict=True))
    assert_same_paths(out, wanted)


@pytest.mark.parametrize("fn", [rejection_sample_tree, rejection_sample_tree_ref])
def test_greedy_tree(device, fn):
    """Of several candidates the argmax is followed, down to the first that is none."""
    #            0: 5            row 0 wants 7, row 2 (after draft 1) wants 8, row 5 (after draft 4) wants 1
    #   root --< 1: 7 --< 3: 6
    #            2: 9    4: 8 -- 5: 2
    ids = torch.tensor([[5, 7, 9, 6, 8, 2]], device=device)
    parents = torch.tensor([[-1, -1, -1, 1, 1, 4]], device=device)
    logits = torch.zeros(1, 7, 20, device=device)
    logits[0, range(7), [7, 3, 8, 3, 3, 1, 3]] = 1.0
    out, accepted, path = fn(ids, parents, logits, *parameters(device, 0.0))
    assert out.tolist() == [[7, 8, 1, -1, -1, -1, -1]]
    assert accepted.tolist() == [2]
    assert path.tolist() == [[0, 2, 5, -1, -1, -1, -1]]


@pytest.mark.parametrize("fn", [rejection_sample_tree, rejection_sample_tree_ref])
def test_wrong_parents_are_not_reached(device, fn):
    """A draft that names itself, a later one or nothing as its parent is no candidate, and the walk ends."""
    ids = torch.full((4, 3), 4, device=device)
    parents = torch.tensor([[0, 1, 2], [1, 0, 0], [-2, 5, 99], [-1, 1, 1]], device=device)
    logits = torch.zeros(4, 4, 6, device=device)
    logits[..., 4] = 1.0  # every draft would be accepted
    out, accepted, path = fn(ids, parents, logits, *parameters(device, 0.0, rows=4))
    assert accepted.tolist() == [0, 0, 0, 1]
    assert out.tolist() == [[4, -1, -1, -1]] * 3 + [[4, 4, -1, -1]]
    assert path.tolist() == [[0, -1, -1, -1]] * 3 + [[0, 1, -1, -1]]


@pytest.mark.parametrize("fn", [rejection_sample_tree, rejection_sample_tree_ref])
def test_first_of_equal_candidates(device, fn):
    ids, parents = torch.tensor([[4, 4]], device=device), torch.tensor([[-1, -1]], device=device)
    logits = torch.zeros(1, 3, 6, device=device)
    logits[..., 4] = 1.0
    assert fn(ids, parents, logits, *parameters(device, 0.0))[2].tolist() == [[0, 1, -1]]


def test_depths(device):
    parents = torch.tensor([[-1, 0, 1, 0, -1], [-1, 5, 1, -7, 3]], device=device)
    wanted = [[0, 1, 2, 3, 2, 1], [0, 1, 1, 2, 1, 2]]
    assert tree_depths_ref(parents).tolist() == wanted
    assert tree_depths(parents).tolist() == wanted


def test_a_chain_is_a_tree(device):
    ids, _, logits, params = make_tree(4, 3, 130, 5, device)
    parents = torch.tensor([-1, 0, 1], device=device).expand(4, -1)
    out, accepted, _ = rejection_sample_tree(ids, parents, logits, *params)
    chain = rejection_sample(ids, None, logits, *params)
    assert torch.equal(out, chain[0]) and torch.equal(accepted, chain[1])


def language(token, depth, vocab):
    """Logits of what follows `token` [...] at a depth: any fixed function of both."""
    index = torch.arange(vocab, device=token.device)
    return 2.5 * torch.sin(0.7 * index * (depth + 1) + token[..., None] * 1.3)


def grown_tree(rows, vocab, width, depth, device):
    """A full tree of any tokens, and the target's logits after each: [rows, G] twice and [rows, G + 1, vocab]."""
    ids, parents, depths = [torch.zeros(rows, dtype=torch.int64, device=device)], [-2], [0]
    level = [0]
    for at in range(depth):
        following = []
        for node in level:
            for child in range(width):
                following.append(len(ids))
                ids.append((ids[node] + 1 + child * (at + 1) + torch.arange(rows, device=device)) % vocab)
                parents.append(node - 1)
                depths.append(at + 1)
        level = following
    logits = torch.stack([language(token, d, vocab) for token, d in zip(ids, depths, strict=True)], 1)
    parent = torch.tensor(parents[1:], device=device).expand(rows, -1)
    return torch.stack(ids[1:], 1), parent.contiguous(), logits


def check_lossless(fn, draw, device, target, rows, vocab):
    """What comes out is what drawing one token after another with the same noise would have given."""
    ids, parents, logits = grown_tree(rows, vocab, 3, 2, device)
    params = parameters(device, **target, rows=rows, seed=77, step=4)
    temperature, top_k, top_p, seeds, steps = params
    out, accepted, _ = fn(ids, parents, logits, *params)
    token = torch.zeros(rows, dtype=torch.int64, device=device)
    for position in range(3):
        following = language(token, position, vocab)
        token = draw(following, temperature, top_k, top_p, None, seeds, steps + position)
        reached = accepted >= position
        assert torch.equal(out[reached, position], token[reached])
    assert accepted.unique().numel() > 1
    return out, accepted


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_tokens_are_those_of_decoding_one_by_one(device, target):
    check_lossless(rejection_sample_tree, sample, device, target, rows=6 if device.type == "cpu" else 2000, vocab=9)


def check_statistics(fn, device, target, rows, vocab):
    """The first token has the target's distribution, and so has the next, given the first."""
    ids, parents, logits = grown_tree(1, vocab, 3, 2, device)
    every = [t.expand(rows, *t.shape[1:]) for t in (ids, parents, logits)]
    out, accepted, path = fn(*every, *parameters(device, **target, rows=rows, seed=10**9, step=3))
    assert_drawn_from(out[:, 0].cpu(), target_probs(logits[0, 0], **target))
    for row in range(1, 4):
        after = out[(accepted >= 1) & (path[:, 1] == row), 1]
        if after.numel() >= 1000:
            assert_drawn_from(after.cpu(), target_probs(logits[0, row], **target))


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_reference_statistics(device, target):
    check_statistics(rejection_sample_tree_ref, device, target, rows=8_000, vocab=12)


@pytest.mark.gpu
@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("vocab", [12, 300])
def test_kernel_statistics(device, target, vocab):
    check_statistics(rejection_sample_tree, device, target, rows=200_000, vocab=vocab)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"parents": torch.zeros(2, 4, dtype=torch.int64)}, r"parents must have shape \[2, 3\]"),
        ({"parents": torch.zeros(2, 3)}, "parents must be torch.int32"),
        ({"draft_ids": torch.zeros(2, 4, dtype=torch.int64)}, r"draft_ids must have shape \[2, 3\]"),
        ({"target_logits": torch.zeros(2, 0, 8)}, "target_logits must have a row"),
        ({"workspace": torch.zeros(7, dtype=torch.int32)}, "workspace must have at least 8 elements, got 7"),
        ({"workspace": torch.zeros(8)}, "workspace must be torch.int32"),
    ],
)
def test_bad_arguments(change, names):
    names_of = ("temperature", "top_k", "top_p", "seeds", "steps")
    arguments = {
        "draft_ids": torch.zeros(2, 3, dtype=torch.int64),
        "parents": torch.full((2, 3), -1),
        "target_logits": torch.zeros(2, 4, 8),
        **dict(zip(names_of, parameters("cpu", rows=2), strict=True)),
        **change,
    }
    with pytest.raises(ValueError, match=names):
        rejection_sample_tree(**arguments)


def test_operator(device):
    ids, parents, logits, (temperature, top_k, top_p, seeds, steps) = make_tree(2, 2, 9, 0, device)
    out = torch.empty(2, 3, dtype=torch.int64, device=device)
    given = (ids, parents, logits, None, out, seeds.clone(), out.clone(), temperature, top_k, top_p, None, seeds, steps)
    torch.library.opcheck(torch.ops.tritonllm.rejection_sample_tree.default, given)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("batch", "drafts"), [(1, 60), (16, 12), (64, 4)])
def test_real_shapes(device, dtype, batch, drafts):
    ids, parents, logits, params = make_tree(batch, drafts, 151936, batch, device)
    logits = logits.to(dtype)
    wanted = rejection_sample_tree_ref(ids, parents, logits, *params)
    got = rejection_sample_tree(ids, parents, logits, *params)
    assert_same_paths(got, wanted, most_different=batch // 32)


@pytest.mark.gpu
def test_cuda_graph(device):
    """A captured launch follows the values in its tensors."""
    given = make_tree(8, 9, 2000, 4, device)
    workspace = torch.zeros(80, dtype=torch.int32, device=device)
    rejection_sample_tree(*given[:3], *given[3], workspace=workspace)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = rejection_sample_tree(*given[:3], *given[3], workspace=workspace)
    for seed in (5, 6, 7):
        new = make_tree(8, 9, 2000, seed, device)
        for static, value in zip((*given[:3], *given[3]), (*new[:3], *new[3]), strict=True):
            static.copy_(value)
        graph.replay()
        assert_same_paths(got, rejection_sample_tree_ref(*new[:3], *new[3]))
        assert not workspace.any()


def test_reference_of_the_chain_is_that_of_the_tree(device):
    ids, _, logits, params = make_tree(5, 3, 40, 6, device)
    parents = torch.tensor([-1, 0, 1], device=device).expand(5, -1)
    out, accepted, _ = rejection_sample_tree_ref(ids, parents, logits, *params)
    chain = rejection_sample_ref(ids, None, logits, *params)
    assert torch.equal(out, chain[0]) and torch.equal(accepted, chain[1])

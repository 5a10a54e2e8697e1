"""The tree's own arithmetic: what is seen, followed and moved."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tritonllm.config.speculative import SpeculativeConfig
from tritonllm.config.token_tree import is_chain, parents_of, parse_tree
from tritonllm.engine.cache.block_copies import BlockCopies
from tritonllm.engine.drafts.draft_tree import DraftTree
from tritonllm.kernels.speculative.draft_path import follow_tree_ref

CPU = torch.device("cpu")
NAME = "speculative_config: speculative_token_tree"


@st.composite
def trees(draw, most=12):
    """Paths in any order."""
    paths = [()]
    children = {(): 0}
    for _ in range(draw(st.integers(1, most))):
        parent = draw(st.sampled_from(paths))
        path = (*parent, children[parent])
        children[parent] += 1
        children[path] = 0
        paths.append(path)
    return draw(st.permutations(paths[1:]))


@given(trees())
def test_nodes_stand_level_by_level(paths):
    ordered = parse_tree("tree", paths)
    assert sorted(ordered) == sorted(paths)
    assert parse_tree("tree", str(paths)) == parse_tree("tree", [list(path) for path in paths]) == ordered
    parents = parents_of(ordered)
    for node, parent in enumerate(parents):
        assert parent < node
        assert ordered[node][:-1] == (ordered[parent] if parent >= 0 else ())
    assert is_chain(parents) == all(not any(path) and path == (0,) * (i + 1) for i, path in enumerate(ordered))


@given(trees())
def test_a_node_sees_its_ancestors(paths):
    ordered = parse_tree("tree", paths)
    tree = DraftTree(parents_of(ordered), 2, CPU)
    everything = [(), *ordered]
    for token, mask in enumerate(tree._masks.tolist()):
        seen = {other for other in range(len(everything)) if mask >> other & 1}
        mine = everything[token]
        assert seen == {other for other, path in enumerate(everything) if path == mine[: len(path)]}
    assert tree.depth == max(map(len, ordered))


def test_masks_of_32_tokens_fit():
    tree = DraftTree(parents_of(parse_tree("tree", [(0,) * (n + 1) for n in range(31)])), 1, CPU)
    assert tree._masks[31].item() == -1


@given(trees(), st.integers(0, 2**20))
def test_a_path_that_is_followed_is_the_kernels(paths, seed):
    """Of few tokens, so that most paths are long."""
    generator = torch.Generator().manual_seed(seed)
    tree, rows = DraftTree(parents_of(parse_tree("tree", paths)), 4, CPU), 3
    nodes = len(paths)
    drafts = torch.randint(-1, 3, (rows, nodes), generator=generator)
    drawn = torch.randint(0, 3, (rows, nodes + 1), generator=generator)
    ids, path = torch.full((2, rows, nodes + 1), -1)
    accepted = torch.zeros(rows, dtype=torch.int64)
    follow_tree_ref(drafts, tree.parents.expand(rows, -1), drawn, ids, accepted, path)
    at, alive = tree.begin(rows), torch.ones(rows, dtype=torch.bool)
    for place in range(tree.depth + 1):
        at, alive = tree.follow(place, at, drawn.gather(1, at[:, None])[:, 0], drafts, alive)
    assert not alive.any()
    assert torch.equal(tree.path[:rows], path)
    logits = torch.arange(rows * (nodes + 1))[:, None]
    wanted = (path.clamp_min(0) + torch.arange(rows)[:, None] * (nodes + 1)).flatten()
    assert torch.equal(tree.rows_of(logits, rows)[:, 0], wanted)


@given(trees(), st.integers(0, 2**20), st.booleans())
def test_keys_and_values_of_a_path_come_to_its_slots(paths, seed, cut):
    """All others stay, whatever the order of the slots."""
    generator = torch.Generator().manual_seed(seed)
    ordered = parse_tree("tree", paths)
    tree, rows, each = DraftTree(parents_of(ordered), 4, CPU), 2, len(ordered) + 1
    pool = torch.rand(2, 2, 9, 4, 1, 8, generator=generator)
    slots = torch.randperm(36, generator=generator)[: rows * each].view(rows, each)
    before = pool.clone().flatten(2, 3)
    everything = [(), *ordered]
    wanted = before.clone()
    tree.path.fill_(7)  # of rows that are not there
    for row in range(rows):
        last = everything[int(torch.randint(each, (), generator=generator))]
        path = [everything.index(last[:length]) for length in range(len(last) + 1)]
        tree.path[row] = torch.tensor(path + [-1] * (each - len(path)))
        wanted[:, :, slots[row, : len(path)]] = before[:, :, slots[row, path]]
        if cut:  # of a request whose drafts have no slots
            slots[row, max(path) + 1 :] = -1
    copies = BlockCopies(pool)
    copies.move_slots(tree.moves(slots))
    assert torch.equal(pool.flatten(2, 3), wanted)
    copies.move_slots(tree.no_moves())
    assert torch.equal(pool.flatten(2, 3), wanted)


BAD = {
    "[(0,), (1,), (0,)]": r"has \(0,\) twice: leave one of them out",
    "[(0,), (1, 0)]": r"has \(1, 0\) without its parent \(1,\): add \(1,\), or leave \(1, 0\) out",
    "[(0,), (2,)]": r"has \(2,\) without the likelier \(1,\): add that, or leave \(2,\) out",
    "[(0,), (0, 1)]": r"has \(0, 1\) without the likelier \(0, 0\)",
    "[]": "must be a list of paths, as",
    "(0": "must be a list of paths, as .*, got '\\(0'",
    "print(1)": "must be a list of paths",
    "[0, 1]": "has 0, where a path is child numbers from 0 on",
    "[(0,), ()]": r"has \(\), where a path is",
    "[(-1,)]": r"has \(-1,\), where a path is",
    "[(0.5,)]": r"has \(0.5,\), where a path is",
    "[(True,)]": r"has \(True,\), where a path is",
}


@pytest.mark.parametrize("tree", BAD)
def test_bad_trees_are_refused(tree):
    with pytest.raises(ValueError, match=f"{NAME} {BAD[tree]}"):
        SpeculativeConfig(method="eagle", model="m", num_speculative_tokens=2, speculative_token_tree=tree)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "ngram", "model": None}, "is for methods draft_model, eagle, eagle3, got method='ngram'"),
        ({"method": "suffix", "model": None}, "is for methods draft_model, eagle, eagle3, got method='suffix'"),
        ({"num_speculative_tokens": 4}, "has 3 nodes, and num_speculative_tokens is 4: set num_speculative_tokens=3"),
        ({"speculative_token_tree": [(n,) for n in range(32)]}, "must have at most 31 nodes, got 32: leave some out"),
    ],
)
def test_trees_that_do_not_fit_are_refused(changes, message):
    config = {"method": "eagle", "model": "m", "num_speculative_tokens": 3}
    config |= {"speculative_token_tree": "[(0,), (1,), (0, 0)]", **changes}
    with pytest.raises(ValueError, match=f"{NAME} {message}"):
        SpeculativeConfig.of(config)


def test_a_config_says_what_its_tree_is():
    config = {"method": "eagle3", "model": "m", "num_speculative_tokens": 3}
    assert (SpeculativeConfig.of(config).tree, SpeculativeConfig.of(config).depth) == (None, 3)
    chain = SpeculativeConfig.of({**config, "speculative_token_tree": "[(0, 0, 0), (0,), (0, 0)]"})
    assert (chain.tree, chain.depth) == (None, 3)
    tree = SpeculativeConfig.of({**config, "speculative_token_tree": [[1], [0, 0], [0]]})
    assert (tree.tree, tree.depth) == ((-1, -1, 0), 2)

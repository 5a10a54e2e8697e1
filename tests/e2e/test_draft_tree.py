"""Trees of drafts: heads and draft models propose them, more are right than of a chain, and no token changes."""

import pytest
import torch
from support.eagle3_heads import circular_model, knowing_head, likely_pair, random_head, reference, some_tokens
from support.eagle_heads import (
    COURSES,
    ENGINES,
    FAMILIES,
    KINDS,
    PROMPTS,
    certain_pair,
    greedy_texts,
    texts,
    texts_of_kinds,
)
from support.engines import greedy, similar_checkpoint, tiny_checkpoint, tiny_llm, token_ids
from support.tiny_tokenizer import VOCAB_SIZE

from tritonllm import SamplingParams
from tritonllm.config.sampling_params import StructuredOutputsParams

WIDE = "[(0,), (1,), (2,)]"
MIXED = "[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0)]"
PARENTS = (-1, -1, 0, 0, 1, 2, 3)  # of the mixed one
SMALL = "[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]"  # fewer nodes than tokens that gemma2's windows see


def with_tree(model, head, tree=MIXED, method="eagle3", most=None, **kwargs):
    config = {"method": method, "model": str(head), "num_speculative_tokens": tree.count("("), "adaptive": False}
    config |= {"speculative_token_tree": tree, "disable_by_batch_size": most}
    return tiny_llm(model, speculative_config=config, **kwargs)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_that_of_plain_decoding(family, ahead):
    folder = tiny_checkpoint(family)
    llm = with_tree(folder, random_head(family), SMALL, async_scheduling=ahead)
    assert texts(llm.generate(PROMPTS, greedy(24))) == greedy_texts(folder)
    stats = llm.engine.stats
    assert stats.num_draft_tokens > stats.num_accepted_tokens
    assert (stats.num_free_blocks, stats.compilations_after_ready) == (stats.num_blocks, 0)


@pytest.mark.parametrize("tree", [WIDE, MIXED])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_no_kind_of_request_changes(engine, ahead, tree):
    """Preemption, chunks, the host's tier, the prefix cache, siblings, seeds, penalties, scores and stops."""
    model, head = likely_pair()
    more = tuple(range(3, 24))
    llm = with_tree(model, head, tree, async_scheduling=ahead, **engine)
    for _ in range(2):
        found = texts(llm.generate([[*more, *prompt] for prompt in PROMPTS], KINDS, use_tqdm=False))
        assert found == texts_of_kinds(model, more)
    stats = llm.engine.stats
    assert 0.05 * stats.num_draft_tokens < stats.num_accepted_tokens < stats.num_draft_tokens
    assert stats.num_free_blocks == stats.num_blocks


@pytest.mark.parametrize("ahead", [False, True])
def test_a_draft_models_tree(ahead):
    draft = similar_checkpoint(noise=0.05)
    llm = with_tree(None, draft, method="draft_model", async_scheduling=ahead, num_blocks=40)
    assert texts(llm.generate(PROMPTS, KINDS, use_tqdm=False)) == texts_of_kinds(tiny_checkpoint())
    stats = llm.engine.stats
    assert 0.05 * stats.num_draft_tokens < stats.num_accepted_tokens
    assert stats.num_free_blocks == stats.num_blocks


def test_an_eagle_heads_tree():
    """One that takes the model's last states alone."""
    model, head = certain_pair()
    expected = texts(tiny_llm(model).generate(PROMPTS, KINDS, use_tqdm=False))
    llm = with_tree(model, head, method="eagle", async_scheduling=True, num_blocks=40)
    assert texts(llm.generate(PROMPTS, KINDS, use_tqdm=False)) == expected
    stats = llm.engine.stats
    assert 0.05 * stats.num_draft_tokens < stats.num_accepted_tokens < stats.num_draft_tokens
    assert stats.num_free_blocks == stats.num_blocks


@pytest.mark.parametrize(("most", "twice", "engine"), COURSES)
def test_children_are_the_likeliest_behind_their_parent(most, twice, engine):
    """Each node that has children, in every step, computed anew from the beginning: behind accepted paths, too, whose
    keys, values and states were moved."""
    model, head = likely_pair()
    llm = with_tree(model, head, MIXED, most=most, async_scheduling=True, **engine)
    drafter = llm.engine._runner.drafts.drafter
    propose, follow, seen = drafter.propose, drafter.follow, []

    def noting(step):
        propose(step)
        seen.extend(zip(step.ends.tolist(), step.ids[:, 0].tolist(), step.drafts.tolist(), strict=True))

    drafter.propose = noting
    if twice:
        drafter.follow = lambda *args: (follow(*args), follow(*args))
    prompts, params = [PROMPTS[2], PROMPTS[0]], [greedy(20), greedy(6)]
    found = texts(llm.generate(prompts, params))
    assert texts(llm.generate(prompts, params)) == found
    whole = [[*prompt, *text] for prompt, (text, _, _) in zip(prompts, found, strict=True)]
    checked = 0
    for end, last, drafts in seen:
        mine = [tokens for tokens in whole if end < len(tokens) and tokens[end] == last]
        if len(mine) == 1 and drafts[-1] >= 0:
            check_tree(model, head, mine[0][: end + 1], drafts)
            checked += 1
    assert checked >= 4
    assert llm.engine.stats.num_accepted_tokens_per_pos[1] > 0


def check_tree(model, head, tokens, drafts):
    for inner in sorted(set(PARENTS)):
        path, node = [], inner
        while node >= 0:
            path, node = [drafts[node], *path], PARENTS[node]
        children = [draft for draft, parent in zip(drafts, PARENTS, strict=True) if parent == inner]
        logits = reference(model, head, tokens, len(path) + 1, forced=path)[1][-1]
        best = some_tokens()[logits.topk(len(children)).indices]
        assert children == best.tolist()


def test_a_tree_finds_what_a_chain_misses():
    """The second and the third guess of a head that errs now and then."""
    model = circular_model(sharpness=0.4)
    head = knowing_head(model, torch.arange(VOCAB_SIZE), by_token=True, noise=0.12)
    chain = tiny_llm(model, speculative_config=chain_config(head, 2))
    tree = with_tree(model, head, "[(0,), (1,), (2,), (0, 0), (1, 0), (2, 0)]")
    prompts = [[token] for token in range(3, 60, 7)]
    expected = token_ids(tiny_llm(model).generate(prompts, greedy(24), use_tqdm=False))
    for llm in (chain, tree):
        assert token_ids(llm.generate(prompts, greedy(24), use_tqdm=False)) == expected
    mine, other = tree.engine.stats, chain.engine.stats
    assert mine.num_accepted_tokens / mine.num_drafts > 1.1 * other.num_accepted_tokens / other.num_drafts


def chain_config(head, drafts):
    return {"method": "eagle3", "model": str(head), "num_speculative_tokens": drafts, "adaptive": False}


def test_a_chain_written_as_a_tree_is_a_chain():
    model, head = likely_pair()
    llm = with_tree(model, head, "[(0,), (0, 0), (0, 0, 0)]")
    assert llm.engine._runner.drafts.tree is None
    chain = tiny_llm(model, speculative_config=chain_config(head, 3))
    for one in (llm, chain):
        assert texts(one.generate(PROMPTS, KINDS, use_tqdm=False)) == texts_of_kinds(model)
    assert llm.engine.stats.num_accepted_tokens == chain.engine.stats.num_accepted_tokens


@pytest.mark.parametrize("ahead", [False, True])
def test_a_head_that_knows_is_right_along_the_first_path(ahead):
    """In every step, so its keys and values and the states that it goes on from are where they belong."""
    model = circular_model(context=0.0, sharpness=0.2)
    tokens = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
    llm = with_tree(model, knowing_head(model, tokens, by_token=False), async_scheduling=ahead)
    llm.generate(PROMPTS, greedy(41), use_tqdm=False)
    accepted, steps = llm.engine.stats.num_accepted_tokens_per_pos, llm.engine.stats.num_drafts
    assert accepted[0] == steps and accepted[2] > 0.6 * steps  # a text's end has fewer nodes


def test_a_request_up_to_the_models_length():
    model, head = likely_pair()
    for length in (40, 41, 43, 46):
        expected = texts(tiny_llm(model, max_model_len=length).generate(PROMPTS[:2], greedy(None)))
        llm = with_tree(model, head, max_model_len=length, async_scheduling=True)
        assert texts(llm.generate(PROMPTS[:2], greedy(None))) == expected


def test_grammars_beside_trees():
    model, head = likely_pair()
    limited = SamplingParams(
        temperature=0, max_tokens=20, structured_outputs=StructuredOutputsParams(regex="[a-z]{12}")
    )
    params = [limited, greedy(20), greedy(20, logprobs=-1)]
    expected = texts(tiny_llm(model).generate(PROMPTS[:3], params, use_tqdm=False))
    llm = with_tree(model, head)
    assert texts(llm.generate(PROMPTS[:3], params, use_tqdm=False)) == expected
    assert llm.engine.stats.num_accepted_tokens > 0


def test_scores_are_those_of_the_accepted_path():
    model, head = likely_pair()
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=2)
    found = [llm.generate(PROMPTS, params, use_tqdm=False) for llm in (tiny_llm(model), with_tree(model, head))]
    for plain, mine in zip(*found, strict=True):
        assert mine.outputs[0].token_ids == plain.outputs[0].token_ids
        for a, b in zip(mine.outputs[0].logprobs, plain.outputs[0].logprobs, strict=True):
            assert {t: e.logprob for t, e in a.items()} == pytest.approx({t: e.logprob for t, e in b.items()}, abs=1e-3)


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("llama", {"deterministic": True}, "speculative_token_tree does not go with deterministic"),
        ("llama", {"compilation_config": 3}, "speculative_token_tree does not go with compilation_config"),
        ("mpt", {}, "has ALiBi"),
        ("gemma2", {"tree": str([(i,) for i in range(31)])}, "layers that see .* tokens, and the tree 31 nodes"),
    ],
)
def test_models_without_trees_are_refused(family, options, message):
    folder, tree = tiny_checkpoint(family), options.pop("tree", MIXED)
    with pytest.raises(ValueError, match=message):
        with_tree(folder, folder, tree, method="draft_model", **options)

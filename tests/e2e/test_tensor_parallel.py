"""Two and four ranks, processes that meet by gloo, give the tokens of one, whatever requests ask for."""

import pytest
from support.engines import NGRAMS, tiny_checkpoint, tiny_llm
from support.tiny_tokenizer import VOCAB_SIZE
from support.wishes import (
    SIZES,
    WISHES,
    assert_mechanism,
    assert_same,
    assert_same_beams,
    assert_same_embeddings,
    assert_same_grammars,
    generate,
    prompts_of,
)

from tritonllm import SamplingParams
from tritonllm.dist.group import share_of
from tritonllm.engine.step import drawing
from tritonllm.kernels import sample_shard

pytestmark = pytest.mark.usefixtures("imported_ranks")


@pytest.fixture(scope="module")
def two():
    return tiny_llm(**SIZES, tensor_parallel_size=2)


@pytest.mark.parametrize("seed", [0, 7])
def test_requests_of_all_kinds_together(alone, two, seed):
    prompts = prompts_of([3, 11, 26, 7, 18, 5, 33, 9, 4], seed)
    before = two.engine.stats.preemptions
    assert_same(generate(two, prompts, WISHES), generate(alone, prompts, WISHES))
    assert two.engine.stats.preemptions > before


UNLIMITED = [
    SamplingParams(temperature=temperature, seed=seed, max_tokens=12, n=n, ignore_eos=True)
    for seed, (temperature, n) in enumerate([(1.0, 1), (0.0, 1), (0.6, 3), (2.0, 1), (1.0, 2)])
]


@pytest.mark.parametrize("options", [{}, {"async_scheduling": True}, {"pipeline_parallel_size": 2}])
def test_ranks_draw_from_their_own_logits(alone, monkeypatch, options):
    """If no row of a step wants more than a temperature; the others are gathered, and both may follow each other."""
    drawn = []

    def counted(logits, *arguments, **kwargs):
        drawn.append(logits.shape)
        return sample_shard(logits, *arguments, **kwargs)

    monkeypatch.setattr(drawing, "sample_shard", counted)
    llm = tiny_llm(**SIZES, **options, tensor_parallel_size=2)
    prompts = prompts_of([3, 26, 7, 18, 40])
    assert_same(generate(llm, prompts, UNLIMITED), generate(alone, prompts, UNLIMITED))
    assert drawn and {columns for _, columns in drawn} == {share_of(VOCAB_SIZE, 2)}
    limited = [wish.clone() for wish in UNLIMITED]
    for wish in limited:
        wish.top_p, wish.temperature = 0.9, 1.0
    drawn.clear()
    assert_same(generate(llm, prompts, limited), generate(alone, prompts, limited))
    assert not drawn
    mixed = [*UNLIMITED[:2], *limited[2:]]
    assert_same(generate(llm, prompts, mixed), generate(alone, prompts, mixed))


MECHANISMS = {  # family, ranks, and the engine's other arguments
    "experts with a shared one": ("qwen2_moe", 2, {}),
    "experts with biases, sinks and a window, key heads twice": ("gpt_oss", 4, {}),
    "whole experts, with a shared MLP": ("glm4_moe", 2, {"enable_expert_parallel": True}),
    "windows, capped logits, norms on both sides": ("gemma2", 2, {"speculative_config": NGRAMS}),
    "one norm over all heads": ("olmo2", 2, {}),
    "linear biases": ("bloom", 4, {}),
    "planned ahead, drafts, key heads twice": (
        "llama",
        4,
        {"speculative_config": NGRAMS, "async_scheduling": True},
    ),
}


@pytest.mark.parametrize("name", MECHANISMS)
def test_mechanisms(name):
    family, size, options = MECHANISMS[name]
    assert_mechanism(tiny_checkpoint(family), **options, tensor_parallel_size=size)


@pytest.mark.parametrize("tree", [None, "[(0,), (1,), (0, 0)]"])
def test_a_draft_model(alone, tree):
    """It is whole on every rank; of a tree all of them get the path that the first one accepts."""
    draft = {"method": "draft_model", "model": str(tiny_checkpoint()), "num_speculative_tokens": 3, "adaptive": False}
    draft["speculative_token_tree"] = tree
    prompts = prompts_of([3, 26, 7])
    llm = tiny_llm(**SIZES, speculative_config=draft, tensor_parallel_size=2)
    found = generate(llm, prompts, WISHES[:3])
    assert_same(found, generate(alone, prompts, WISHES[:3]))
    stats = llm.engine.stats
    right = 2 if tree is None else 3  # the same model but for its last bits; of a tree one child of a node is right
    assert stats.num_accepted_tokens > stats.num_draft_tokens // right > 0


def test_grammars():
    """Masks are made and used on the first rank."""
    assert_same_grammars(tensor_parallel_size=2)


def test_beams(alone, two):
    assert_same_beams(two, alone)


def test_pooling(alone, two):
    assert_same_embeddings(two, alone)

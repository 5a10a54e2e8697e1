"""Stages, processes that meet by gloo, give the tokens of one process, whatever requests ask for."""

import pytest
from support.engines import NGRAMS, greedy, similar_checkpoint, tiny_checkpoint, tiny_llm
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

pytestmark = pytest.mark.usefixtures("imported_ranks")


@pytest.fixture(scope="module")
def two():
    return tiny_llm(**SIZES, pipeline_parallel_size=2, async_scheduling=True)


@pytest.mark.parametrize("seed", [0, 7])
def test_requests_of_all_kinds_together(alone, two, seed):
    prompts = prompts_of([3, 11, 26, 7, 18, 5, 33, 9, 4], seed)
    before = two.engine.stats.preemptions
    assert_same(generate(two, prompts, WISHES), generate(alone, prompts, WISHES))
    stats = two.engine.stats
    assert stats.preemptions > before
    assert stats.num_free_blocks == stats.num_blocks


def test_as_many_steps_as_stages_are_in_flight(two):
    """And what decodes is dealt out to them."""
    depths, sizes = set(), set()
    launch, engine = two.engine._runner.launch, two.engine

    def launching(plan):
        depths.add(len(engine._in_flight))
        sizes.add(len(plan.scheduled))
        return launch(plan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine._runner, "launch", launching)
        generate(two, prompts_of([2] * 6), greedy(12))
    assert max(depths) == 2  # and the one that is launched: the host plans ahead
    assert 3 in sizes


def test_one_request_alone_has_every_step(alone, two):
    assert_same(generate(two, prompts_of([5]), greedy(9)), generate(alone, prompts_of([5]), greedy(9)))


MECHANISMS = {  # family, and the engine's other arguments
    "two ranks a stage, with whole experts and a shared MLP": (
        "glm4_moe",
        {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    ),
    "three stages, drafts, planned ahead": (
        "llama",
        {"pipeline_parallel_size": 3, "speculative_config": NGRAMS, "async_scheduling": True},
    ),
    "three stages, norms on both sides": ("gemma2", {"pipeline_parallel_size": 3, "async_scheduling": True}),
    "drafts, not planned ahead, batch invariant": ("qwen3", {"speculative_config": NGRAMS, "deterministic": True}),
}


@pytest.mark.parametrize("name", MECHANISMS)
def test_mechanisms(name):
    family, options = MECHANISMS[name]
    assert_mechanism(tiny_checkpoint(family), **{"pipeline_parallel_size": 2, **options})


def test_a_draft_model(alone):
    """It is whole on the first stage, and only there."""
    folder = str(similar_checkpoint())
    draft = {"method": "draft_model", "model": folder, "num_speculative_tokens": 3, "adaptive": False}
    prompts = prompts_of([3, 26, 7])
    llm = tiny_llm(**SIZES, speculative_config=draft, pipeline_parallel_size=2, async_scheduling=True)
    found = generate(llm, prompts, WISHES[:3])
    assert_same(found, generate(alone, prompts, WISHES[:3]))
    stats = llm.engine.stats
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


def test_grammars():
    """What may come next is known when the token before it has come back through all stages."""
    assert_same_grammars(pipeline_parallel_size=2, async_scheduling=True)


def test_beams(alone, two):
    assert_same_beams(two, alone)


def test_pooling(alone, two):
    assert_same_embeddings(two, alone)


def test_aborts_and_what_takes_their_seats(alone, two):
    """A request takes the seat of one whose token is on its way: nothing of that one is left there."""
    prompts = prompts_of([4, 6, 9, 5, 7, 8])
    expected = generate(alone, prompts, greedy(10))
    engine = two.engine
    for number, prompt in enumerate(prompts):
        engine.add_request(f"old{number}", {"prompt_token_ids": prompt}, greedy(30))
    for _ in range(5):
        engine.step()
    engine.abort_request([f"old{number}" for number in range(len(prompts))])
    assert_same(generate(two, prompts, greedy(10)), expected)


HEAD = {"method": "eagle", "model": "x", "num_speculative_tokens": 2}
BAD = {
    "more stages than layers": ({"pipeline_parallel_size": 4}, "must be at most 3, the number of layers"),
    "no stage": ({"pipeline_parallel_size": 0}, "pipeline_parallel_size must be an integer of at least 1"),
    "one process": (
        {"pipeline_parallel_size": 2, "distributed_executor_backend": "uni"},
        "'uni' is one process, but pipeline_parallel_size=2",
    ),
    "a head": (
        {
            "pipeline_parallel_size": 2,
            "speculative_config": {"method": "eagle", "model": "x", "num_speculative_tokens": 2},
        },
        "runs on one GPU so far: leave out pipeline_parallel_size=2",
    ),
    "counts of experts": (
        {"pipeline_parallel_size": 2, "count_expert_load": True},
        "count_expert_load: .* leave it out with pipeline_parallel_size=2",
    ),
    "whole batches' processors": (
        {"pipeline_parallel_size": 2, "logits_processors": ["a:b"]},
        "logits_processors: .* leave them out with pipeline_parallel_size=2",
    ),
    "sleep": ({"pipeline_parallel_size": 2, "enable_sleep_mode": True}, "leave it out with pipeline_parallel_size=2"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_configurations(name):
    options, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        tiny_llm(**options)

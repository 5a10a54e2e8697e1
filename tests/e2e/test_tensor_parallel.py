"""Two and four ranks, processes that meet by gloo, give the tokens of one, whatever requests ask for."""

import pytest
import torch
from support.engines import greedy, tiny_checkpoint, tiny_llm, token_ids
from support.tiny_models import random_tokens
from support.tiny_tokenizer import VOCAB_SIZE

from tritonllm import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams
from tritonllm.demo import model_path


def prompts_of(lengths, seed=0):
    """With beginnings in common, for the prefix cache."""
    shared = random_tokens(9, VOCAB_SIZE, seed)
    return [shared[: n // 2] + random_tokens(n - n // 2, VOCAB_SIZE, seed + 1 + i) for i, n in enumerate(lengths)]


def generate(llm, prompts, params):
    return llm.generate(prompts, params, use_tqdm=False)


def favour(token):
    def change(past, logits):
        logits[token] += 2.0 + len(past) % 3
        return logits

    return change


WISHES = [
    greedy(20),
    SamplingParams(temperature=1.0, seed=1, max_tokens=18, ignore_eos=True),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.02, seed=2, max_tokens=14, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=12, ignore_eos=True),
    greedy(10, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
    greedy(10, logit_bias={5: 3.0, 7: -100.0}, min_tokens=4),
    SamplingParams(temperature=1.0, seed=4, max_tokens=8, logprobs=3, prompt_logprobs=2, ignore_eos=True),
    greedy(12, logits_processors=[favour(11)]),  # a closure, which no other process could be sent
    SamplingParams(temperature=1.0, seed=5, max_tokens=6, logprobs=-1, ignore_eos=True),
]
SIZES = {"num_blocks": 30, "max_num_seqs": 6, "max_num_batched_tokens": 24}  # so that some are preempted


def values(scores):
    return [{token: score.logprob for token, score in position.items()} for position in scores or () if position]


def assert_same(found, expected):
    assert [output.error for output in found] == [None] * len(found)
    assert token_ids(found) == token_ids(expected)
    for one, other in zip(found, expected, strict=True):
        pairs = [(one.prompt_logprobs, other.prompt_logprobs)]
        pairs += [(a.logprobs, b.logprobs) for a, b in zip(one.outputs, other.outputs, strict=True)]
        for ours, theirs in pairs:
            for mine, wanted in zip(values(ours), values(theirs), strict=True):
                assert mine == pytest.approx(wanted, abs=1e-4)


@pytest.fixture(scope="module")
def alone():
    return tiny_llm(**SIZES)


@pytest.fixture(scope="module")
def two():
    return tiny_llm(**SIZES, tensor_parallel_size=2)


@pytest.mark.parametrize("seed", [0, 7])
def test_requests_of_all_kinds_together(alone, two, seed):
    prompts = prompts_of([3, 11, 26, 7, 18, 5, 33, 9, 4], seed)
    before = two.engine.stats.preemptions
    assert_same(generate(two, prompts, WISHES), generate(alone, prompts, WISHES))
    assert two.engine.stats.preemptions > before


NGRAMS = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
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
    folder = tiny_checkpoint(family)
    prompts = prompts_of([3, 26, 7, 18])
    repeats = [prompt * 2 for prompt in prompts]  # what n-grams find again
    expected = generate(tiny_llm(folder, **SIZES), prompts + repeats, WISHES[:4] * 2)
    llm = tiny_llm(folder, **SIZES, **options, tensor_parallel_size=size)
    assert_same(generate(llm, prompts + repeats, WISHES[:4] * 2), expected)
    stats = llm.engine.stats
    assert stats.num_free_blocks == stats.num_blocks
    assert "speculative_config" not in options or stats.num_draft_tokens > 0


def test_a_draft_model(alone):
    """It is whole on every rank."""
    draft = {"method": "draft_model", "model": str(tiny_checkpoint()), "num_speculative_tokens": 3, "adaptive": False}
    prompts = prompts_of([3, 26, 7])
    llm = tiny_llm(**SIZES, speculative_config=draft, tensor_parallel_size=2)
    found = generate(llm, prompts, WISHES[:3])
    assert_same(found, generate(alone, prompts, WISHES[:3]))
    stats = llm.engine.stats
    assert stats.num_accepted_tokens > stats.num_draft_tokens // 2 > 0  # the same model but for its last bits


def test_grammars():
    """Masks are made and used on the first rank."""
    made = []
    wish = StructuredOutputsParams(json={"type": "object", "properties": {"age": {"type": "integer"}}})
    params = [
        SamplingParams(temperature=1.0, seed=1, max_tokens=60, structured_outputs=wish),
        SamplingParams(temperature=1.0, seed=2, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=20, structured_outputs=StructuredOutputsParams(choice=["cat", "dog"])),
    ]
    for size in (1, 2):
        llm = LLM(str(model_path()), num_blocks=64, max_num_seqs=4, tensor_parallel_size=size)
        made.append(generate(llm, ["A dog", "The cat", "It was a"], params))
    assert_same(made[1], made[0])


def test_beams(alone, two):
    wish, prompts = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True), prompts_of([5, 12])
    found, expected = (
        [[beam.tokens for beam in output.sequences] for output in llm.beam_search(tokens, wish)]
        for llm, tokens in ((two, prompts), (alone, prompts))
    )
    assert found == expected


def test_pooling(alone, two):
    prompts = [{"prompt_token_ids": tokens} for tokens in prompts_of([5, 12, 40])]
    found, expected = ([o.outputs.embedding for o in llm.embed(prompts, use_tqdm=False)] for llm in (two, alone))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=1e-5, rtol=1e-4)

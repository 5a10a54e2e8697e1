"""Requests of all kinds, and whether two engines gave the same answers to them."""

import pytest
import torch

from support.engines import greedy, tiny_llm, token_ids
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


def assert_same_beams(llm, other):
    wish, prompts = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True), prompts_of([5, 12])
    found, expected = (
        [[beam.tokens for beam in output.sequences] for output in one.beam_search(prompts, wish)]
        for one in (llm, other)
    )
    assert found == expected


def assert_same_embeddings(llm, other):
    prompts = [{"prompt_token_ids": tokens} for tokens in prompts_of([5, 12, 40])]
    found, expected = ([o.outputs.embedding for o in one.embed(prompts, use_tqdm=False)] for one in (llm, other))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=1e-5, rtol=1e-4)


def assert_mechanism(checkpoint, **options):
    """With these options, an engine of that model gives what one of one process without options gives."""
    prompts = prompts_of([3, 26, 7, 18])
    prompts += [prompt * 2 for prompt in prompts]  # what n-grams find again
    expected = generate(tiny_llm(checkpoint, **SIZES), prompts, WISHES[:4] * 2)
    llm = tiny_llm(checkpoint, **{**SIZES, **options})
    assert_same(generate(llm, prompts, WISHES[:4] * 2), expected)
    stats = llm.engine.stats
    assert stats.num_free_blocks == stats.num_blocks
    assert "speculative_config" not in options or stats.num_draft_tokens > 0


def assert_same_grammars(**options):
    """Of the demo model, whose vocabulary has words."""
    made = []
    for more in ({}, options):
        llm = LLM(str(model_path()), num_blocks=64, max_num_seqs=4, **more)
        made.append(generate(llm, GRAMMAR_PROMPTS, GRAMMAR_WISHES))
    assert_same(made[1], made[0])


AGE = StructuredOutputsParams(json={"type": "object", "properties": {"age": {"type": "integer"}}})
GRAMMAR_PROMPTS = ["A dog", "The cat", "It was a"]
GRAMMAR_WISHES = [
    SamplingParams(temperature=1.0, seed=1, max_tokens=60, structured_outputs=AGE),
    SamplingParams(temperature=1.0, seed=2, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=20, structured_outputs=StructuredOutputsParams(choice=["cat", "dog"])),
]

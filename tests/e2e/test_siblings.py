"""Continuations of one prompt: the tokens that each would get alone, from one copy of the prompt's keys and values."""

from functools import cache

import pytest
from support.engines import shallow_checkpoint, tiny_checkpoint, tiny_llm, token_ids
from support.tiny_models import random_tokens
from support.tiny_tokenizer import VOCAB_SIZE

from tritonllm import SamplingParams
from tritonllm.engine.text.input_processor import derive_seed

ON_GPU = pytest.mark.also_gpu  # float32, where rounding lies far below the gap between two draws
LENGTHS = (1, 4, 7, 21, 44)
PROMPTS = [{"prompt_token_ids": random_tokens(length, VOCAB_SIZE, seed=length)} for length in LENGTHS]


def engine(**settings):
    """Of one layer; ``test_other_models`` has engines of several."""
    return tiny_llm(shallow_checkpoint(), **settings)


def wish(seed, n=1, **kwargs):
    return SamplingParams(n=n, temperature=1.0, seed=seed, max_tokens=9, ignore_eos=True, **kwargs)


@cache
def alone(n, **kwargs):
    """Each continuation of each prompt in a request of its own."""
    llm = engine(enable_prefix_caching=False)
    seeds = [5, *(derive_seed(5, i) for i in range(1, n))]
    return [
        token_ids(llm.generate([prompt] * n, [wish(s, **kwargs) for s in seeds], use_tqdm=False)) for prompt in PROMPTS
    ]


@ON_GPU
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 8},
        {"num_blocks": 14, "max_model_len": 54},  # preemption
        {"num_blocks": 14, "max_model_len": 54, "enable_prefix_caching": False},
        {"max_num_seqs": 3},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}},
        {"max_num_seqs": 20, "block_size": 1, "num_blocks": 400},
    ],
    ids=str,
)
def test_any_schedule(settings, ahead):
    llm = engine(async_scheduling=ahead, **settings)
    outputs = llm.generate(PROMPTS, wish(5, n=8), use_tqdm=False)
    assert [token_ids([output]) for output in outputs] == alone(8)
    stats = llm.engine.stats
    assert stats.num_free_blocks == stats.num_blocks


@ON_GPU
@pytest.mark.parametrize("kwargs", [{"frequency_penalty": 1.0}, {"min_tokens": 9}, {"logprobs": 2}])
def test_first_tokens_are_drawn_by_everyones_own_rules(kwargs):
    outputs = engine().generate(PROMPTS, wish(5, n=8, **kwargs), use_tqdm=False)
    assert [token_ids([output]) for output in outputs] == alone(8, **kwargs)
    for completion in outputs[0].outputs:
        assert completion.logprobs is None or len(completion.logprobs) == 9


@ON_GPU
def test_the_prompt_is_computed_and_held_once():
    llm = tiny_llm(max_num_batched_tokens=64, async_scheduling=False)
    engine = llm.engine
    engine.add_request("r", PROMPTS[-1], wish(5, n=8, prompt_logprobs=1))
    (output,) = engine.step()
    assert [len(completion.token_ids) for completion in output.outputs] == [1] * 8
    assert len(output.prompt_logprobs) == LENGTHS[-1]
    stats = engine.stats
    assert stats.num_blocks - stats.num_free_blocks == 11  # of 4 tokens each
    engine.step()
    stats = engine.stats
    assert stats.num_blocks - stats.num_free_blocks == 11 + 8
    engine.abort_request("r")
    assert engine.stats.num_free_blocks == engine.stats.num_blocks


@ON_GPU
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "mixtral"])
def test_other_models(family):
    """With windows, capped logits, sinks and experts, copied blocks are as good as computed ones."""

    folder = tiny_checkpoint(family)
    outputs = tiny_llm(folder).generate(PROMPTS, wish(5, n=4), use_tqdm=False)
    llm = tiny_llm(folder, enable_prefix_caching=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        seeds = [5, *(derive_seed(5, i) for i in range(1, 4))]
        assert token_ids([output]) == token_ids(llm.generate([prompt] * 4, [wish(s) for s in seeds], use_tqdm=False))

"""With ``deterministic=True`` a request's tokens and log-probabilities have the same bits, whatever else there is."""

import dataclasses
import random
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines import shallow_checkpoint, similar_checkpoint, tiny_checkpoint, tiny_llm
from support.examples import examples
from support.tiny_models import random_tokens
from support.tiny_tokenizer import VOCAB_SIZE

from tritonllm import LLM, SamplingParams
from tritonllm.config.engine import SpeculativeConfig

FAMILIES = ["qwen3", "llama", "gemma2", "gpt2", "mpt", "phi", "qwen2_moe", "qwen3_moe", "glm4_moe", "gpt_oss"]
OF_MAKE_TEST = [("qwen3", "float32"), ("gemma2", "bfloat16"), ("gpt_oss", "bfloat16")]
PROMPTS = [random_tokens(n, VOCAB_SIZE, seed=n) for n in (1, 3, 17, 33, 40, 64, 90)]
PROMPTS.append([*PROMPTS[-1][:80], 5, 6, 7])  # begins as another
PARAMS = [
    SamplingParams(temperature=0, max_tokens=9, logprobs=3, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=3, max_tokens=9, logprobs=0, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=20, seed=4, max_tokens=9, logprobs=1, ignore_eos=True),
    SamplingParams(temperature=0, presence_penalty=0.5, max_tokens=9, logprobs=2, ignore_eos=True, prompt_logprobs=1),
]


def told(output):
    """All that a request is told, as exact numbers."""
    (completion,) = output.outputs
    prompt = output.prompt_logprobs or []
    rows = [*completion.logprobs, *(row for row in prompt if row is not None)]
    return completion.token_ids, [{token: entry.logprob for token, entry in row.items()} for row in rows]


def run(llm, prompts, params):
    return [told(output) for output in llm.generate(prompts, params, use_tqdm=False)]


def jobs():
    """Each prompt with one of the parameters."""
    return [(prompt, PARAMS[i % len(PARAMS)]) for i, prompt in enumerate(PROMPTS)]


def alone(checkpoint, **options):
    """Each request by itself, with nothing cached."""
    llm = tiny_llm(checkpoint, deterministic=True, enable_prefix_caching=False, **options)
    return [run(llm, [prompt], params)[0] for prompt, params in jobs()]


def check(family, dtype):
    """Each request alone, and all of them in some order, cut, preempted, cached."""
    checkpoint = shallow_checkpoint(family, layers=2)  # of two kinds, in families that have those
    expected = alone(checkpoint, dtype=dtype)
    settings_of = {
        "a batch": {},
        "small chunks": {"max_num_batched_tokens": 13, "max_num_seqs": 5},
        "nothing cached": {"max_num_batched_tokens": 50, "enable_prefix_caching": False},
        "few blocks, so that some are preempted": {"num_blocks": 40, "max_num_seqs": 8},
    }
    order = list(range(len(PROMPTS)))
    for name, options in settings_of.items():
        random.Random(name).shuffle(order)
        llm = tiny_llm(checkpoint, deterministic=True, dtype=dtype, **options)
        for _ in range(2 if name == "a batch" else 1):  # the second time from the prefix cache
            prompts, params = zip(*(jobs()[i] for i in order), strict=True)
            got = run(llm, list(prompts), list(params))
            assert got == [expected[i] for i in order], name


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param(family, dtype, marks=() if (family, dtype) in OF_MAKE_TEST else pytest.mark.long)
        for family, dtype in [*product(FAMILIES, ["bfloat16"]), *product(["qwen3", "gpt2", "gpt_oss"], ["float32"])]
    ],
)
def test_a_request_has_the_same_bits_alone_and_in_any_batch(family, dtype):
    check(family, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_request_has_the_same_bits_on_a_gpu(family, dtype):
    """By the kernels, with captured steps."""
    check(family, dtype)


@pytest.mark.parametrize("speculative", ["ngram:3", "suffix:3", "draft_model"])
def test_a_request_has_the_same_bits_with_speculation(speculative):
    checkpoint = tiny_checkpoint("llama")
    config = speculative
    if speculative == "draft_model":
        config = {"model": str(similar_checkpoint("llama")), "num_speculative_tokens": 3}
    config = dataclasses.replace(SpeculativeConfig.of(config), adaptive=False)
    llm = tiny_llm(checkpoint, deterministic=True, speculative_config=config, enforce_eager=True)
    prompts, params = zip(*jobs(), strict=True)
    assert run(llm, list(prompts), list(params)) == alone(checkpoint)


def test_without_it_bits_differ():
    """What the tests above look for is there to be found."""
    checkpoint = tiny_checkpoint("llama")
    one = tiny_llm(checkpoint, enable_prefix_caching=False)
    prompts, params = zip(*jobs(), strict=True)
    together = run(one, list(prompts), list(params))
    assert together != [run(one, [prompt], params)[0] for prompt, params in jobs()]


@settings(max_examples=examples(10))
@given(seed=st.integers(0, 1000), budget=st.integers(9, 120), seqs=st.integers(1, 8), blocks=st.integers(27, 70))
def test_any_schedule_gives_the_same_bits(seed, budget, seqs, blocks):
    luck = random.Random(seed)
    order = luck.sample(range(len(PROMPTS)), luck.randint(1, len(PROMPTS)))
    checkpoint = shallow_checkpoint("qwen3", layers=2)
    budget = max(budget, seqs)
    sizes = {"max_num_batched_tokens": budget, "max_num_seqs": seqs, "num_blocks": blocks}
    llm = tiny_llm(checkpoint, deterministic=True, **sizes)
    prompts, params = zip(*(jobs()[i] for i in order), strict=True)
    expected = expected_of_qwen3()
    assert run(llm, list(prompts), list(params)) == [expected[i] for i in order]


_expected: list = []


def expected_of_qwen3():
    if not _expected:
        _expected.extend(alone(shallow_checkpoint("qwen3", layers=2)))
    return _expected


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("llama", {"tensor_parallel_size": 2}, "sums over the ranks of tensor_parallel_size=2"),
        ("llama", {"compilation_config": 3}, "compilation_config: what torch.compile fuses"),
        ("llama", {"deterministic": "yes"}, "deterministic must be of type bool"),
    ],
)
def test_what_is_not_invariant_is_refused_by_name(family, options, message):
    with pytest.raises(ValueError, match=message):
        LLM(str(tiny_checkpoint(family)), device="cpu", **{"deterministic": True} | options)


def test_the_model_keeps_to_plans_without_fusions():
    llm = tiny_llm(tiny_checkpoint("llama"), deterministic=True)
    model = llm.engine._runner.model
    plans = {model.plan(rows, None, torch.device("cpu")) for rows in (1, 7, 64, 300)}
    assert len(plans) == 1

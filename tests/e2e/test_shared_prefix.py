"""Requests that share a prompt's beginning: the same tokens whether its keys are read once or once for each."""

from unittest.mock import patch

import pytest
from support.engines import greedy, tiny_checkpoint, token_ids
from support.tiny_models import random_tokens
from support.tiny_tokenizer import VOCAB_SIZE

from tritonllm import LLM
from tritonllm.engine.step import shared_prefix
from tritonllm.layers import attention

SHARED = random_tokens(22, VOCAB_SIZE, seed=1)
PROMPTS = [SHARED + random_tokens(n, VOCAB_SIZE, seed=n) for n in (1, 9, 4, 7, 2, 12)]


@pytest.fixture(autouse=True)
def any_gain_will_do(monkeypatch):
    monkeypatch.setattr(shared_prefix, "MIN_SAVED_BYTES", 1)


def run(prompts, family="qwen3", **settings):
    """(tokens, how many layers of how many steps read shared keys once)."""
    defaults = {"skip_tokenizer_init": True, "block_size": 4, "num_blocks": 200, "max_num_seqs": 8}
    llm = LLM(str(tiny_checkpoint(family)), **{**defaults, **settings})
    with patch.object(attention, "cascade_decode_attention", wraps=attention.cascade_decode_attention) as cascade:
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        tokens = token_ids(llm.generate(requests, greedy(10), use_tqdm=False))
        tokens += token_ids(llm.generate(requests, greedy(10), use_tqdm=False))  # all from the prefix cache
    return tokens, cascade.call_count


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt_oss", "mixtral"])
def test_tokens_are_the_same(family):
    """Also with windows in some layers, capped logits and sinks."""
    expected, calls = run(PROMPTS, family, disable_cascade_attn=True)
    assert calls == 0
    tokens, calls = run(PROMPTS, family)
    assert tokens == expected
    assert calls > 0


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 13},  # chunks of prompts beside decodes
        {"num_blocks": 26, "max_num_seqs": 6},  # preemption
        {"block_size": 1, "num_blocks": 800},
        {"max_num_seqs": 2},
    ],
    ids=str,
)
def test_any_schedule(settings):
    tokens, calls = run(PROMPTS, **settings)
    assert tokens == run(PROMPTS, disable_cascade_attn=True)[0]
    assert calls > 0


def test_some_others_among_them():
    prompts = [random_tokens(30, VOCAB_SIZE, seed=50), *PROMPTS, random_tokens(3, VOCAB_SIZE, seed=51)]
    tokens, calls = run(prompts)
    assert tokens == run(prompts, disable_cascade_attn=True)[0]
    assert calls > 0


def test_steps_without_shared_blocks_do_not_look_for_any():
    apart = [random_tokens(20, VOCAB_SIZE, seed=n) for n in range(6)]
    assert run(apart)[1] == 0
    assert run(PROMPTS, enable_prefix_caching=False)[1] == 0
    assert run([SHARED[:4]] * 6)[1] == 0  # the one full block is never cached: it holds the last known token


def test_layers_with_a_window_read_for_themselves():
    """One of Gemma 2's three layers has none; Qwen3's have none at all."""
    assert 3 * run(PROMPTS, "gemma2")[1] == run(PROMPTS)[1]


def test_short_prefixes_are_not_worth_it(monkeypatch):
    monkeypatch.undo()
    assert run(PROMPTS)[1] == 0

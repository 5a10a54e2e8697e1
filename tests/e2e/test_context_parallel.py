"""Ranks that split the keys of a sequence, processes that meet by gloo, give the tokens of one process."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
from support.engines import NGRAMS, tiny_llm
from support.tiny_models import tiny_config, write_checkpoint
from support.tiny_tokenizer import VOCAB_SIZE, save_tokenizer
from support.wishes import (
    SIZES,
    WISHES,
    assert_mechanism,
    assert_same,
    assert_same_beams,
    assert_same_embeddings,
    generate,
    prompts_of,
)

pytestmark = pytest.mark.usefixtures("imported_ranks")
TWO = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}


@cache
def checkpoint(family: str = "qwen3", key_heads: int = 1) -> Path:
    folder = Path(mkdtemp(prefix="few-key-heads-"))
    heads = {"num_attention_heads": 4, "num_key_value_heads": key_heads}
    write_checkpoint(folder, tiny_config(family, vocab_size=VOCAB_SIZE, bos_token_id=0, eos_token_id=0, **heads))
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def alone():
    return tiny_llm(checkpoint(), **SIZES)


@pytest.fixture(scope="module")
def two():
    """With as many tokens' room as one process has, in half as many blocks."""
    return tiny_llm(checkpoint(), **{**SIZES, "num_blocks": 15}, **TWO)


@pytest.mark.parametrize("seed", [0, 7])
def test_requests_of_all_kinds_together(alone, two, seed):
    """Chunked prompts, siblings with copies on write, preemption; then all of it again, from the prefix cache."""
    prompts = prompts_of([3, 11, 26, 7, 18, 5, 33, 9, 4], seed)
    before = two.engine.stats
    expected = generate(alone, prompts, WISHES)
    for _ in range(2):
        assert_same(generate(two, prompts, WISHES), expected)
    stats = two.engine.stats
    assert stats.preemptions > before.preemptions
    assert stats.prefix_cache_hit_tokens > before.prefix_cache_hit_tokens
    assert stats.num_free_blocks == stats.num_blocks == 15


def test_beams(alone, two):
    assert_same_beams(two, alone)


def test_pooling(alone, two):
    assert_same_embeddings(two, alone)


MECHANISMS = {  # family, key heads, ranks, of which so many split keys, and the engine's other arguments
    "drafts, planned ahead, two key heads": (
        ("llama", 2, 4, 2),
        {"speculative_config": NGRAMS, "async_scheduling": True},
    ),
    "whole experts, all ranks": (("glm4_moe", 1, 4, 4), {"enable_expert_parallel": True, "block_size": 1}),
    "two stages": (("llama", 1, 2, 2), {"pipeline_parallel_size": 2}),
}


@pytest.mark.parametrize("name", MECHANISMS)
def test_mechanisms(name):
    (family, key_heads, size, split), options = MECHANISMS[name]
    ranks = {"tensor_parallel_size": size, "decode_context_parallel_size": split}
    assert_mechanism(checkpoint(family, key_heads), **ranks, **options)


def test_a_draft_model(alone):
    """It is whole on each rank, and so are its keys."""
    draft = {"method": "draft_model", "model": str(checkpoint()), "num_speculative_tokens": 3, "adaptive": False}
    prompts = prompts_of([3, 26, 7])
    llm = tiny_llm(checkpoint(), **SIZES, speculative_config=draft, **TWO)
    assert_same(generate(llm, prompts, WISHES[:3]), generate(alone, prompts, WISHES[:3]))
    stats = llm.engine.stats
    assert stats.num_accepted_tokens > stats.num_draft_tokens // 2 > 0


TREE = {"method": "draft_model", "model": "m", "num_speculative_tokens": 2, "speculative_token_tree": "[(0,), (1,)]"}


@pytest.mark.parametrize(
    ("family", "key_heads", "options", "message"),
    [
        ("qwen3", 1, {**TWO, "tensor_parallel_size": 3}, "must divide tensor_parallel_size=3"),
        ("qwen3", 2, TWO, "must divide the number of ranks that share a key head, which is 1 in layer 0"),
        ("qwen3", 1, {**TWO, "block_size": 200}, "decode_context_parallel_size=2 times block_size=200"),
        ("gemma2", 1, TWO, "decode_context_parallel_size=2: layer .* has a sliding window"),
        ("gpt_oss", 1, TWO, "has (a sliding window|attention sinks)"),
        ("qwen3", 1, {**TWO, "enable_sleep_mode": True}, "enable_sleep_mode"),
        ("qwen3", 1, {**TWO, "kv_offloading_size": 1}, "kv_offloading_size"),
        ("qwen3", 1, {**TWO, "deterministic": True}, "tensor_parallel_size=2"),
        (
            "qwen3",
            1,
            {**TWO, "speculative_config": TREE},
            "speculative_token_tree does not go with decode_context_parallel_size",
        ),
    ],
)
def test_what_does_not_go_is_refused_before_anything_is_loaded(family, key_heads, options, message):
    with pytest.raises(ValueError, match=message):
        tiny_llm(checkpoint(family, key_heads), **{**SIZES, **options})

"""A draft model changes how many steps it takes, and nothing else; and its cache misses nothing of what was computed.

A model that drafts for itself shows the second: where its keys and values are whole, every draft is right.
"""

import json
import time
from functools import cache

import pytest
import torch
from support.engines import greedy, similar_checkpoint, tiny_checkpoint, tiny_llm, token_ids
from support.tiny_configs import ALL_FAMILIES, WINDOWED_WITHOUT_FAMILY, tiny_config
from support.tiny_models import random_tokens, write_checkpoint
from support.tiny_tokenizer import VOCAB_SIZE
from transformers import AutoConfig, AutoModelForCausalLM

from tritonllm import LLM, SamplingParams
from tritonllm.demo import draft_path, model_path
from tritonllm.engine.drafts.draft_model import DraftModel
from tritonllm.engine.start import startup

FAMILIES = ["llama", "gemma2", "gpt2", "qwen3_moe", "mpt", "gpt_oss"]
PROMPTS = [[3, 4, 5, 6, 7, 8] * 3, [9], list(range(3, 40)), [5, 5, 5, 5], random_tokens(30, VOCAB_SIZE, seed=1)]
SEEDED = [
    greedy(24),
    SamplingParams(temperature=1.0, seed=5, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=6, top_p=0.9, top_k=20, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=7, min_p=0.1, max_tokens=17, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=8, n=3, max_tokens=11, ignore_eos=True),
]


def drafted(checkpoint=None, draft=None, drafts=3, **kwargs):
    config = {"model": str(draft or similar_checkpoint()), "num_speculative_tokens": drafts, "adaptive": False}
    return tiny_llm(checkpoint, speculative_config=config, **kwargs)


def prompts_of(prompts):
    return [{"prompt_token_ids": prompt} for prompt in prompts]


def texts(outputs):
    return [(list(c.token_ids), c.text, c.finish_reason) for output in outputs for c in output.outputs]


@cache
def of_greedy(family):
    return texts(tiny_llm(tiny_checkpoint(family)).generate(prompts_of(PROMPTS), greedy(24)))


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_that_of_plain_decoding(family, ahead):
    """With a draft model of another family, head shape and number of layers, and with one that is often right."""
    assert family in ALL_FAMILIES
    folder = tiny_checkpoint(family)
    other = tiny_checkpoint("qwen3" if family != "qwen3" else "llama")
    for draft in (other, similar_checkpoint(family)):
        llm = drafted(folder, draft, async_scheduling=ahead)
        assert texts(llm.generate(prompts_of(PROMPTS), greedy(24))) == of_greedy(family)
        stats = llm.engine.stats
        assert stats.num_draft_tokens > stats.num_accepted_tokens
        assert (stats.num_free_blocks, stats.compilations_after_ready) == (stats.num_blocks, 0)
    assert stats.num_accepted_tokens > 20 and stats.steps < 24


ALIKE = [[*range(3, 24), *prompt] for prompt in PROMPTS]  # at their beginnings


@cache
def of_seeded(family):
    return texts(tiny_llm(tiny_checkpoint(family)).generate(prompts_of(ALIKE), SEEDED, use_tqdm=False))


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    "engine",
    [
        {},
        {"max_num_batched_tokens": 16},  # prompts in chunks, beside decodes
        {"num_blocks": 22},  # preemption
        {"num_blocks": 22, "kv_offloading_size": 1 / 256},  # and blocks that come back from the host
        {"num_blocks": 22, "enable_prefix_caching": False},
        {"max_num_seqs": 3, "block_size": 1, "num_blocks": 300},
        {"block_size": 16},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_a_model_that_drafts_for_itself_is_always_right(family, engine, ahead):
    """Whatever came before: chunks, hits of the prefix cache, siblings, preemption. A key or value that its cache
    lacked, or a draft with other noise, would show in a wrong draft."""
    folder = tiny_checkpoint(family)
    llm = drafted(folder, folder, async_scheduling=ahead, **engine)
    for _ in range(2):
        assert texts(llm.generate(prompts_of(ALIKE), SEEDED, use_tqdm=False)) == of_seeded(family)
    stats = llm.engine.stats
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 60
    assert stats.num_free_blocks == stats.num_blocks
    assert (stats.loaded_blocks > 0) == ("kv_offloading_size" in engine)
    assert (stats.preemptions > 0) == ("num_blocks" in engine and engine["num_blocks"] < 64)
    assert (stats.prefix_cache_hit_tokens > 0) == engine.get("enable_prefix_caching", True)


def test_steps_without_drafts_leave_nothing_out():
    """More requests than a step verifies, and requests that go a token at a time: their tokens are drafted from later,
    by those that find them in the prefix cache."""
    folder = tiny_checkpoint()
    config = {"model": str(folder), "num_speculative_tokens": 3, "adaptive": False, "disable_by_batch_size": 1}
    llm = tiny_llm(folder, speculative_config=config)
    first = llm.generate(prompts_of(PROMPTS), greedy(20))
    drafts = llm.engine.stats.num_draft_tokens
    longer = [[*prompt, *ids] for prompt, ids in zip(PROMPTS, token_ids(first), strict=True)]
    for prompt in longer:
        llm.generate(prompts_of([prompt]), greedy(9))
    stats = llm.engine.stats
    assert stats.prefix_cache_hit_tokens > 5 * 16
    assert stats.num_draft_tokens - drafts >= 5 * 6
    assert stats.num_accepted_tokens == stats.num_draft_tokens


def test_noise_is_shared():
    """Two models with nearly the same distribution draw the same token nearly always, at any temperature."""
    params = [SamplingParams(temperature=1.5, seed=seed, max_tokens=40, ignore_eos=True) for seed in range(5)]
    llm = drafted(draft=similar_checkpoint(noise=0.01))
    llm.generate(prompts_of(PROMPTS), params, use_tqdm=False)
    assert llm.engine.stats.num_accepted_tokens > 0.8 * llm.engine.stats.num_draft_tokens


@pytest.mark.filterwarnings("ignore:.*does not run natively:UserWarning")
def test_a_draft_for_a_model_of_transformers(tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 101, "hidden_size": 64, "intermediate_size": 88, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "local_attention": 18, "max_position_embeddings": 256, "pad_token_id": 0}
    config = AutoConfig.for_model(WINDOWED_WITHOUT_FAMILY, **sizes, **heads)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    (tmp_path / "draft").mkdir()
    write_checkpoint(tmp_path / "draft", tiny_config("llama", vocab_size=101))
    prompts = prompts_of([[*range(3, 21)], [9], [5, 6] * 4])
    options = {"max_model_len": 128, "skip_tokenizer_init": True}
    expected = token_ids(tiny_llm(tmp_path / "model", **options).generate(prompts, greedy(20)))
    llm = drafted(tmp_path / "model", tmp_path / "draft", **options)
    assert token_ids(llm.generate(prompts, greedy(20))) == expected
    assert llm.engine.stats.num_draft_tokens > 20
    with pytest.raises(ValueError, match=r"ModernBertDecoderForCausalLM cannot draft; take a model .* has a family"):
        drafted(tmp_path / "draft", tmp_path / "model", **options)


def test_both_caches_are_what_memory_is_divided_among():
    plain = tiny_llm(num_blocks=None, cpu_cache_bytes=1 << 20)
    llm = drafted(draft=tiny_checkpoint("llama"), num_blocks=None, cpu_cache_bytes=1 << 20)
    runner = llm.engine._runner
    assert isinstance(runner.drafts.drafter, DraftModel)
    views = [*runner.caches.views, *runner.drafts.drafter.cache]
    held = sum(view.k.nbytes + view.v.nbytes for view in views)
    assert (1 << 20) - runner.block_bytes < held <= 1 << 20
    assert llm.engine.stats.num_blocks < plain.engine.stats.num_blocks
    assert {view.k.shape[0] for view in views} == {llm.engine.stats.num_blocks}


BAD = {
    "vocab": ({"vocab_size": 99}, "has a vocabulary of 99 tokens, the model one of"),
    "short": ({"max_position_embeddings": 100}, "has max_position_embeddings=100, and max_model_len is 256: set"),
}


@pytest.mark.parametrize("case", BAD)
def test_drafts_that_do_not_fit_are_named_before_anything_is_loaded(tmp_path, monkeypatch, case):
    changed, message = BAD[case]
    config = json.loads((tiny_checkpoint() / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changed}))
    monkeypatch.setattr(startup, "load_model", None)
    monkeypatch.setattr(startup, "tokenizer_of", None)
    with pytest.raises(ValueError, match=rf"speculative_config: model=.*{message}"):
        drafted(draft=tmp_path)


def test_a_draft_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"speculative_config: model=.*nowhere.*there is no such folder"):
        drafted(draft=tmp_path / "nowhere")
    config = (tiny_checkpoint() / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ValueError, match=r"speculative_config: model=.*safetensors"):
        drafted(draft=tmp_path)  # without weights


def test_the_demo_models():
    """The pair that ships: most drafts are right, greedy and sampled; texts take less than half of the steps."""
    prompts = ["There was a fox named", "Once upon a time", "What is 12 + 30?"]
    params = [greedy(90), SamplingParams(temperature=1.0, seed=3, max_tokens=90), greedy(90)]
    options = {"dtype": "float32", "max_model_len": 256}
    plain = LLM(str(model_path()), **options)
    config = {"model": str(draft_path()), "num_speculative_tokens": 4, "adaptive": False}
    llm = LLM(str(model_path()), speculative_config=config, **options)
    begin = time.monotonic()
    outputs = llm.generate(prompts, params)
    stats = llm.engine.stats
    assert 0 < stats.draft_seconds < time.monotonic() - begin
    assert texts(outputs) == texts(plain.generate(prompts, params))
    assert stats.num_accepted_tokens > 0.6 * stats.num_draft_tokens
    places = stats.num_accepted_tokens_per_pos
    assert stats.num_drafts >= places[0] > places[1] > places[2] > places[3] > 0
    assert sum(places) == stats.num_accepted_tokens
    of_requests = [output.metrics.num_accepted_tokens_per_pos for output in outputs]
    assert places == tuple(sum(column) for column in zip(*of_requests, strict=True))
    assert stats.steps < plain.engine.stats.steps / 2

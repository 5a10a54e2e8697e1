"""Blocks that leave the cache for the host's memory and come back: outputs stay what they are, and nothing is computed
twice that was kept."""

import gc
import weakref

import pytest
from support.engines import always_load, greedy, tiny_checkpoint, tiny_llm, token_ids
from support.tiny_models import random_tokens
from support.tiny_tokenizer import VOCAB_SIZE

from tritonllm import LLM, BeamSearchParams, SamplingParams
from tritonllm.system.host_memory import check_offloading, host_bytes

GIB = 1 << 30
ROOM = 0.001  # GiB: some hundred tiny blocks
PROMPTS = [random_tokens(length, VOCAB_SIZE, seed=length) for length in (23, 9, 14, 30, 5, 21)]


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    llm = tiny_llm(num_blocks=64, max_num_seqs=1, enable_prefix_caching=False)
    return token_ids(llm.generate(PROMPTS, greedy(16), use_tqdm=False))


def run(llm: LLM) -> list[list[int]]:
    return token_ids(llm.generate(PROMPTS, greedy(16), use_tqdm=False))


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("more", [{}, {"max_num_batched_tokens": 8}, {"speculative_config": "ngram:3"}])
def test_preemption_changes_nothing_and_blocks_come_back(alone, caching, ahead, more):
    settings = {"num_blocks": 16, "max_model_len": 48, "enable_prefix_caching": caching, "async_scheduling": ahead}
    llm = always_load(tiny_llm(**settings, kv_offloading_size=ROOM, **more))
    assert run(llm) == alone
    stats = llm.engine.stats
    assert stats.preemptions and stats.stored_blocks and stats.loaded_blocks
    each = llm.engine._runner.block_bytes
    assert (stats.stored_bytes, stats.loaded_bytes) == (each * stats.stored_blocks, each * stats.loaded_blocks)
    assert stats.num_free_blocks == stats.num_blocks
    assert stats.num_used_host_blocks <= stats.num_host_blocks == int(ROOM * GIB) // each


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_a_tier_of_few_blocks(alone, slots):
    each = tiny_llm().engine._runner.block_bytes
    llm = tiny_llm(num_blocks=16, max_model_len=48, kv_offloading_size=slots * each / GIB)
    assert run(llm) == run(llm) == alone
    assert llm.engine.stats.num_host_blocks == slots


def test_an_evicted_prefix_comes_back(alone):
    """And counts as cached, in the output and in the statistics."""
    llm = always_load(tiny_llm(num_blocks=14, max_model_len=48, max_num_seqs=1, kv_offloading_size=ROOM))
    first, *_, last = [llm.generate([prompt], greedy(16), use_tqdm=False)[0] for prompt in [*PROMPTS, PROMPTS[0]]]
    assert first.num_cached_tokens == 0 and last.num_cached_tokens == len(PROMPTS[0]) // 4 * 4
    assert token_ids([first]) == token_ids([last]) == alone[:1]
    stats = llm.engine.stats
    assert stats.prefix_cache_hit_tokens == last.num_cached_tokens
    assert stats.loaded_blocks == last.num_cached_tokens // 4 and not stats.preemptions


def test_nothing_comes_back_that_is_computed_sooner(alone):
    llm = tiny_llm(num_blocks=14, max_model_len=48, max_num_seqs=1, kv_offloading_size=ROOM)
    rates = llm.engine._scheduler.tier.rates
    assert rates.bytes_per_second > 0
    rates.bytes_per_second = 1.0
    assert run(llm) == run(llm) == alone  # the first step tells how long computing takes
    assert rates.seconds_per_token > 0
    assert llm.engine.stats.loaded_blocks == 0


def test_a_forgotten_cache_is_forgotten_in_the_host_too():
    llm = tiny_llm(num_blocks=14, max_model_len=48, max_num_seqs=1, kv_offloading_size=ROOM)
    run(llm)
    assert llm.engine.stats.num_used_host_blocks
    assert llm.reset_prefix_cache()
    assert llm.engine.stats.num_used_host_blocks == 0
    (output,) = llm.generate([PROMPTS[0]], greedy(2), use_tqdm=False)
    assert output.num_cached_tokens == 0 and llm.engine.stats.loaded_blocks == 0


@pytest.mark.parametrize("caching", [True, False])
def test_siblings_and_beams(caching):
    params = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=14, ignore_eos=True)
    beams = BeamSearchParams(beam_width=3, max_tokens=10, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS[:3]]
    answers = []
    for more in ({"num_blocks": 200}, {"num_blocks": 30, "kv_offloading_size": ROOM}):
        llm = tiny_llm(max_model_len=48, enable_prefix_caching=caching, **more)
        if llm.engine._scheduler.tier is not None:
            always_load(llm)
        found = [sequence.tokens for output in llm.beam_search(prompts, beams) for sequence in output.sequences]
        answers.append((token_ids(llm.generate(PROMPTS, params, use_tqdm=False)), found))
    assert answers[0] == answers[1]
    stats = llm.engine.stats
    assert stats.preemptions and stats.loaded_blocks and stats.num_free_blocks == stats.num_blocks


def test_a_draft_models_blocks_come_back_too(alone):
    """It would draft as well without them, but wrong. Here it is the model itself, and right as long as it has them."""
    drafting = {"model": str(tiny_checkpoint()), "num_speculative_tokens": 3, "adaptive": False}
    settings = {"max_model_len": 64, "max_num_seqs": 1, "speculative_config": drafting}
    llm = always_load(tiny_llm(num_blocks=18, kv_offloading_size=ROOM, **settings))
    assert run(llm) == run(llm) == alone
    stats = llm.engine.stats
    assert stats.loaded_blocks and stats.num_accepted_tokens == stats.num_draft_tokens


def test_sleep_forgets_what_the_host_has(alone):
    llm = tiny_llm(num_blocks=16, max_model_len=48, kv_offloading_size=ROOM, enable_sleep_mode=True)
    assert run(llm) == alone
    llm.sleep()
    assert llm.engine.stats.num_used_host_blocks == 0
    llm.wake_up()
    assert run(llm) == alone


def test_a_step_that_breaks_off_leaves_no_trace(alone, monkeypatch):
    llm = tiny_llm(num_blocks=16, max_model_len=48, kv_offloading_size=ROOM)
    assert run(llm) == alone
    monkeypatch.setattr(llm.engine._runner, "launch", lambda plan: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(llm)
    monkeypatch.undo()
    assert run(llm) == alone
    assert llm.engine.stats.num_used_host_blocks


def test_without_it_nothing_is_kept():
    for off in ({}, {"kv_offloading_size": 0}, {"swap_space": 0}):
        llm = tiny_llm(**off)
        assert llm.engine._runner.host is None and llm.engine._scheduler.tier is None
        assert llm.engine.stats.num_host_blocks == 0


def test_the_memory_is_given_back_with_the_engine():
    llm = tiny_llm(kv_offloading_size=ROOM)
    run(llm)
    memory = weakref.ref(llm.engine._runner.host._parts[0].host)
    del llm
    gc.collect()
    assert memory() is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_offloading_size": -1}, "kv_offloading_size must be a number of GiB, at least 0, got -1"),
        ({"kv_offloading_size": "4"}, "kv_offloading_size must be a number of GiB"),
        ({"kv_offloading_size": True}, "kv_offloading_size must be a number of GiB"),
        ({"kv_offloading_size": float("nan")}, "kv_offloading_size must be a number of GiB"),
        ({"kv_offloading_size": 1e6}, r"kv_offloading_size=1e\+06 is more than the .* GiB of memory here: lower it"),
        ({"kv_offloading_size": 1e-9}, "kv_offloading_size=1e-09 holds no block"),
        ({"kv_offloading_size": 1, "swap_space": 1}, "swap_space and kv_offloading_size are the same: give one"),
        ({"kv_offloading_backend": "lmcache"}, "kv_offloading_backend='lmcache'"),
    ],
)
def test_bad_values(options, message):
    with pytest.raises(ValueError, match=message):
        tiny_llm(**options)


def test_a_container_may_have_less_than_the_machine(tmp_path):
    (tmp_path / "memory.max").write_text(f"{2 * GIB}\n")
    assert host_bytes(tmp_path) == 2 * GIB
    check_offloading(2.0, tmp_path)
    with pytest.raises(ValueError, match=r"more than the 2\.0 GiB"):
        check_offloading(2.1, tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    assert host_bytes(tmp_path) == host_bytes(tmp_path / "nowhere") > 2 * GIB

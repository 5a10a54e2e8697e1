"""A model whose layers differ in heads, and of which one reads the keys of another, through the whole engine: its cache
has a tensor for each shape, and everything that moves blocks moves them in all of these."""

import pytest
import torch
from support.engines import NGRAMS, always_load, greedy, tiny_checkpoint, tiny_llm, token_ids
from support.kv_sharing import connected_llm

from tritonllm import BeamSearchParams, SamplingParams
from tritonllm.cli.info import model_rows
from tritonllm.engine.cache.kv_cache import block_bytes

PROMPTS = [
    [5 + i % 90 for i in range(start, start + length)] for start, length in ((0, 23), (40, 30), (7, 17), (60, 9))
]
TIGHT = {"num_blocks": 22, "max_model_len": 64, "max_num_seqs": 4}


def engine(**options):
    return tiny_llm(tiny_checkpoint("gemma4_text"), **options)


def run(llm, params=None):
    return token_ids(llm.generate(PROMPTS, params or greedy(12), use_tqdm=False))


@pytest.fixture(scope="module")
def alone():
    """One prompt at a time, in a cache with room for all."""
    return run(engine(max_num_seqs=1))


def test_bytes_are_those_of_the_layers_together():
    """Two layers with two heads of 16, one with one of 32, and one without any; float32."""
    llm = engine()
    views, spec = llm.engine._runner.caches.views, llm.engine.model.spec
    assert [tuple(view.k.shape[2:]) for view in views] == [(2, 16), (1, 32), (2, 16), (1, 32)]
    assert views[3].k is views[1].k and len({view.k.data_ptr() for view in views}) == 3
    each = 2 * (2 * 16 + 32 + 2 * 16) * 4
    assert block_bytes(spec, torch.float32, 1) == each and llm.engine._runner.block_bytes == 4 * each
    assert model_rows(str(tiny_checkpoint("gemma4_text")))["kv cache"] == f"{each} bytes a token"


@pytest.mark.parametrize(
    "options",
    [
        {"async_scheduling": True},
        {"speculative_config": NGRAMS},
        {"deterministic": True},
        pytest.param({"compilation_config": {"mode": 3, "backend": "eager"}}, marks=pytest.mark.long),
    ],
    ids=["planned ahead", "drafts", "batch invariant", "compiled"],
)
def test_tokens_are_those_of_one_alone(alone, options):
    llm = engine(**TIGHT, **options)
    assert run(llm) == alone and llm.engine.stats.preemptions


def test_blocks_come_back_from_the_host(alone):
    llm = always_load(engine(num_blocks=18, max_model_len=64, max_num_seqs=1, kv_offloading_size=0.01))
    assert run(llm) == run(llm) == alone
    stats = llm.engine.stats
    assert stats.loaded_blocks and stats.num_used_host_blocks


def test_sequences_that_fork_have_blocks_of_their_own():
    params = SamplingParams(n=3, temperature=1.0, seed=3, max_tokens=10, ignore_eos=True)
    beams = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)
    prompts, found = [{"prompt_token_ids": prompt} for prompt in PROMPTS[:2]], []
    for options in ({"num_blocks": 120}, {**TIGHT, "kv_offloading_size": 0.01}):
        llm = engine(**options)
        searched = [[s.tokens for s in output.sequences] for output in llm.beam_search(prompts, beams)]
        found.append((run(llm, params), searched))
    assert found[0] == found[1]


def test_a_cache_that_slept_is_whole(alone):
    llm = engine(enable_sleep_mode=True)
    memory = llm.engine._memory
    assert run(llm) == alone
    before = memory.mapped
    llm.sleep()
    assert memory.mapped == {"weights": 0, "kv_cache": 0}
    llm.wake_up()
    assert memory.mapped == before and run(llm) == alone


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"pipeline_parallel_size": 2, "async_scheduling": True}, marks=pytest.mark.long),
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.long),
    ],
    ids=["two stages", "two ranks"],
)
def test_ranks_give_the_tokens_of_one(alone, options):
    """A stage gets the inputs of its layers beside the stream; the layers that share keys are on one stage."""
    assert run(engine(**TIGHT, **options)) == alone


def test_blocks_go_to_another_engine(alone, tmp_path):
    """By a folder: a block's bytes are those of all tensors."""
    folder, checkpoint = {"path": str(tmp_path)}, tiny_checkpoint("gemma4_text")
    first = connected_llm("FileStore", "kv_producer", folder, checkpoint)
    assert run(first) == alone
    first.engine._transfer.connector.close()
    second = connected_llm("FileStore", "kv_consumer", folder, checkpoint)
    outputs = second.generate(PROMPTS, greedy(12), use_tqdm=False)
    assert token_ids(outputs) == alone
    assert [output.num_cached_tokens for output in outputs] == [(len(prompt) - 1) // 4 * 4 for prompt in PROMPTS]

"""An engine takes the memory that it was granted, and however long it runs, no more."""

import gc
import json
import resource
import sys

import pytest
import torch
from support.engines import greedy, tiny_llm
from support.real_configs import QWEN3_0_6B
from support.tiny_models import random_tokens

from tritonllm import LLM, SamplingParams

STEPS = 10_000
LENGTHS = (1, 9, 4, 17, 2, 30, 6)  # of prompts; blocks have 4 tokens


def run(engine, steps, first):
    """Steps of an engine that always has work: requests come as others end, some with prefixes seen before, some are
    given up. Returns the number of the next request."""
    number = first
    for step in range(steps):
        while engine.stats.num_running + engine.stats.num_waiting < 6:
            prompt = [(number // 3 * 7 + i) % 50 + 1 for i in range(LENGTHS[number % len(LENGTHS)])]
            engine.add_request(str(number), prompt, greedy(1 + number % 13))
            number += 1
        engine.step()
        if step % 100 == 99:
            engine.abort_request(str(number - 1))
    return number


class NoModel:
    """In place of a model, whose tensors are not what this is about: five times as many steps a second."""

    def __init__(self, model):
        self.spec, self.dtype, self.supports_graphs = model.spec, model.dtype, False

    def __call__(self, input_ids, positions, metadata, kv_cache, rows=None):
        return torch.zeros(len(input_ids if rows is None else rows), 1)

    def short_keys(self, sequences):
        return 0

    def compute_logits(self, hidden):
        return torch.zeros(len(hidden), 50)


def objects():
    gc.collect()
    return len(gc.get_objects())


def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@pytest.mark.long
def test_no_growth_on_the_host():
    engine = tiny_llm(device="cpu", num_blocks=14, max_num_seqs=4).engine
    runner = engine._runner
    runner._model = runner._drawing._model = NoModel(runner._model)
    number = run(engine, STEPS // 10, 0)
    before, bytes_before = objects(), peak_bytes()
    run(engine, STEPS, number)
    grown = objects() - before
    assert grown < 300, (
        f"{grown} more objects after {STEPS} steps"
    )  # a request that stays is a dozen, 3000 came and went
    assert peak_bytes() - bytes_before < 16 << 20
    assert engine.stats.steps >= STEPS and engine.stats.preemptions > 0


@pytest.mark.gpu
def test_no_growth_on_the_device():
    engine = tiny_llm(device="cuda", num_blocks=14, max_num_seqs=4, dtype="bfloat16").engine
    number = run(engine, STEPS // 10, 0)
    torch.cuda.synchronize()
    before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    run(engine, STEPS, number)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + (1 << 20)
    assert torch.cuda.memory_reserved() == reserved


@pytest.mark.gpu
def test_the_cache_fills_what_was_granted(tmp_path, record_property):
    """To 2%, after steps of every kind: graphs, the largest prefills, log-probabilities."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_0_6B))
    gc.collect()  # else an earlier test's engine, freed after the start, would count as unused
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    granted = (total - free) / total + 0.2
    settings = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 4096}
    engine = LLM(str(tmp_path), gpu_memory_utilization=granted, **settings)
    prompts = [random_tokens(n, 10000, seed=n) for n in (4000, 3900, 1, 700, 33, 2500) * 20]
    kinds = [{"logprobs": 5}, {"top_k": 50, "top_p": 0.9}, {}]
    params = [SamplingParams(max_tokens=30, ignore_eos=True, **kinds[i % 3]) for i in range(len(prompts))]
    engine.generate(prompts, params, use_tqdm=False)
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    unused = granted * total - (total - free)
    cache = engine.engine.stats.num_blocks * engine.engine._runner.block_bytes
    record_property("unused_share_of_the_cache", unused / cache)
    assert abs(unused) < 0.02 * cache

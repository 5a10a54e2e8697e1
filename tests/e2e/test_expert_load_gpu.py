"""Counts of captured steps are those of steps that are launched one by one, and nothing is compiled for them later."""

import json

import pytest
from support.engines import greedy
from support.mechanism_configs import MECHANISMS
from support.tiny_models import random_tokens

from tritonllm import LLM

pytestmark = pytest.mark.gpu

PROMPTS = [random_tokens(n, 10000, seed=n) for n in (1, 700, 33, 128, 2)]


def test_counts_of_captured_steps(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MECHANISMS["qwen3-30b-a3b (128 experts, q/k norm)"]))
    settings = {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 2048}
    settings |= {"num_blocks": 1024, "max_num_seqs": 8, "max_num_batched_tokens": 512, "enable_prefix_caching": False}
    loads = []
    for eager in (True, False):
        llm = LLM(str(tmp_path), **settings, enforce_eager=eager, count_expert_load=True, async_scheduling=False)
        assert all(set(counts) == {0} for counts in llm.expert_load().layers.values())  # the start does not count
        llm.generate(PROMPTS, greedy(30), use_tqdm=False)
        loads.append(llm.expert_load())
        assert llm.engine.stats.compilations_after_ready == 0
    assert loads[0] == loads[1]
    tokens = sum(map(len, PROMPTS)) + 29 * len(PROMPTS)
    assert sum(loads[0].layers[0]) == 8 * tokens

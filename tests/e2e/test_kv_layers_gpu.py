"""Blocks that leave a GPU while the step runs that fills them, of captured steps and of others, at real shapes."""

import gc
import json

import pytest
import torch
from support.engines import greedy, token_ids
from support.real_configs import QWEN3_0_6B
from support.tiny_models import random_tokens

from tritonllm import LLM
from tritonllm.engine.cache import host_copies
from tritonllm.engine.cache.host_copies import HostCopies

pytestmark = pytest.mark.gpu
PROMPTS = [random_tokens(n, 10000, seed=n) for n in (700, 1, 33, 128, 2, 511, 1500, 90, 300)]
FULL = [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]  # tokens that need not be computed
LAYERS = QWEN3_0_6B["num_hidden_layers"]


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    """Of engines in float32, where sums in another order differ far less than tokens do."""
    folder = tmp_path_factory.mktemp("qwen3")
    (folder / "config.json").write_text(json.dumps(QWEN3_0_6B))
    sizes = {"max_model_len": 2048, "num_blocks": 512, "max_num_seqs": 8, "max_num_batched_tokens": 512}
    return {"model": str(folder), "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "float32", **sizes}


def run(llm):
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    outputs = llm.generate(prompts, greedy(24), use_tqdm=False)
    return token_ids(outputs), [output.num_cached_tokens for output in outputs]


@pytest.fixture(scope="module")
def alone(arguments):
    llm = LLM(**arguments, enable_prefix_caching=False)
    tokens, _ = run(llm)
    del llm
    gc.collect()
    return tokens


@pytest.mark.parametrize("eager", [False, True])
def test_what_leaves_is_what_the_cache_has(arguments, alone, eager, tmp_path, monkeypatch):
    """And what another engine finds."""
    groups, copy = [], HostCopies._copy_group

    def watched(self, pairs, there, ends, group):
        groups.append((group, bool(ends)))
        copy(self, pairs, there, ends, group)

    monkeypatch.setattr(HostCopies, "_copy_group", watched)
    monkeypatch.setattr(host_copies, "STREAMED_BYTES", 0)
    transfer = {"kv_connector": "FileStore", "kv_connector_extra_config": {"path": str(tmp_path)}}
    settings = {**arguments, "kv_offloading_size": 4.0, "enforce_eager": eager}
    llm = LLM(**settings, kv_transfer_config=transfer)
    assert run(llm)[0] == alone
    assert any(marked for _, marked in groups) == (not eager)
    assert [layer for group, _ in groups for layer in group.rows][:LAYERS] == list(range(LAYERS))
    torch.cuda.synchronize()
    scheduler, runner = llm.engine._scheduler, llm.engine._runner
    (part,), (copies,), found = runner.host._parts, runner.caches.copies, 0
    for label, slot in scheduler.tier._slot_of.items():
        for block in scheduler.pool.find_leading([label]):
            assert torch.equal(copies.pool[:, :, block].flatten(2).flatten(0, 1).cpu(), part.host[slot])
            found += 1
    assert found > sum(FULL) // 32
    llm.engine._transfer.connector.close()
    del llm, runner, scheduler, part, copies
    gc.collect()
    torch.cuda.empty_cache()
    other = LLM(**settings, kv_transfer_config={**transfer, "kv_role": "kv_consumer"})
    rates = other.engine._scheduler.tier.rates
    rates.pays = lambda blocks: True
    assert run(other) == (alone, FULL)

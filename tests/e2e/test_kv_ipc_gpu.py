"""Engines of two processes on GPUs of one host: the blocks of one are copied out of its GPU's memory by the other."""

import gc
import json

import pytest
import torch
from support.engines import greedy, token_ids
from support.ipc_processes import Engine, processes
from support.real_configs import QWEN3_0_6B
from support.server import eventually
from support.tiny_models import random_tokens
from support.waiting import PATIENCE

from tritonllm import LLM

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
pytestmark = pytest.mark.gpu
PROMPTS = [random_tokens(n, 10000, seed=n) for n in (1, 700, 33, 128, 2, 511, 90, 300)]
FULL = [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]  # tokens that need not be computed
SETTINGS = {"peers": ["127.0.0.1"], "timeout": PATIENCE, "wait": PATIENCE, "max_bytes": 1 << 30}


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    """Of engines in float32, where sums in another order differ far less than tokens do."""
    folder = tmp_path_factory.mktemp("qwen3")
    (folder / "config.json").write_text(json.dumps(QWEN3_0_6B))
    sizes = {"max_model_len": 2048, "num_blocks": 1024, "max_num_seqs": 8, "max_num_batched_tokens": 512}
    return {"model": str(folder), "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "float32", **sizes}


@pytest.fixture(scope="module")
def alone(arguments):
    llm = LLM(**arguments, enable_prefix_caching=False)
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    tokens = token_ids(llm.generate(prompts, greedy(40), use_tqdm=False))
    del llm
    gc.collect()
    torch.cuda.empty_cache()  # a test below looks at how much is free
    return tokens


@pytest.mark.parametrize("gpus", [pytest.param((0, 0), id="one"), pytest.param((0, 1), id="two", marks=two_gpus)])
def test_tokens_are_those_of_one_engine(arguments, alone, gpus):
    with processes() as made:
        for role, gpu in zip(("kv_producer", "kv_consumer"), gpus, strict=True):
            made.append(Engine(role, gpu, {**arguments, "kv_offloading_size": 1.0, "device": f"cuda:{gpu}"}, SETTINGS))
        producer, consumer = made
        offers = producer.prefill(PROMPTS)
        for _ in range(2):  # the second time the memory is open already
            assert consumer.decode(PROMPTS, offers, 40) == (alone, FULL)
            assert consumer.ask("opened") == 1
            consumer.ask("reset")
        stats = consumer.ask("stats")
        assert stats["kv_fetched_blocks"] == 2 * sum(FULL) // 16 and stats["kv_missed_blocks"] == 0
        producer.kill()
        eventually(lambda: consumer.ask("opened") == 0)
        assert consumer.decode(PROMPTS, offers, 40) == (alone, [0] * len(PROMPTS))


@pytest.mark.parametrize("gpus", [pytest.param((0, 0), id="one"), pytest.param((0, 1), id="two", marks=two_gpus)])
def test_both_ways_with_little_room(arguments, alone, gpus):
    """Places are given to other blocks while the other engine reads them."""
    settings = {**SETTINGS, "max_bytes": 100 * 28 * 2 * 16 * 8 * 128 * 4, "wait": 0.1}
    with processes() as made:
        for gpu in gpus:
            given = {**arguments, "kv_offloading_size": 1.0, "device": f"cuda:{gpu}"}
            made.append(Engine("kv_both", gpu, given, settings))
        one, other = made
        for _ in range(3):
            offers = one.prefill(PROMPTS)
            assert other.decode(PROMPTS, offers, 40)[0] == alone
            offers = other.prefill(PROMPTS)
            one.ask("reset")
            assert one.decode(PROMPTS, offers, 40)[0] == alone
            other.ask("reset")


def test_the_memory_that_the_engine_takes_is_counted(arguments):
    """Tier and copies for others are in what ``gpu_memory_utilization`` grants."""
    plain = {name: value for name, value in arguments.items() if name != "num_blocks"}
    few = LLM(**plain, kv_offloading_size=4.0, kv_transfer_config=_transfer(2 << 30))
    free, total = torch.cuda.mem_get_info(0)
    assert total - free < 0.9 * total + (1 << 30)
    blocks, each = few.engine.stats.num_blocks, few.engine._runner.block_bytes
    few.engine._transfer.connector.close()
    del few
    gc.collect()
    torch.cuda.empty_cache()
    many = LLM(**plain)
    assert abs((many.engine.stats.num_blocks - blocks) * each - (6 << 30)) < 1 << 30


def _transfer(max_bytes):
    extra = {"peers": ["127.0.0.1"], "max_bytes": max_bytes}
    return {"kv_connector": "CudaIpc", "kv_connector_extra_config": extra}

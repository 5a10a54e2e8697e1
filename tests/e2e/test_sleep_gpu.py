"""Sleep on a GPU: memory goes down by what weights and cache take, and captured steps go on at their addresses."""

import gc
import json
from shutil import copytree

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engines import greedy, tiny_checkpoint, tiny_llm, token_ids
from support.real_configs import QWEN3_0_6B
from support.tiny_models import random_tokens

from tritonllm import LLM
from tritonllm.engine.cache.device_memory import Arena
from tritonllm.engine.data.asleep import AsleepError

pytestmark = pytest.mark.gpu

PROMPTS = [random_tokens(n, 10000, seed=n) for n in (1, 700, 33, 128, 2, 511)]
SLACK = 64 << 20  # bytes of the last pieces, and of what torch keeps or gives back by itself


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    (folder / "config.json").write_text(json.dumps(QWEN3_0_6B))
    return str(folder)


def make(folder, **kwargs):
    gc.collect()
    settings = {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16", "max_model_len": 2048}
    return LLM(folder, **{**settings, "num_blocks": 4096, "max_num_seqs": 16, "enable_sleep_mode": True, **kwargs})


def answers(llm):
    return token_ids(llm.generate([{"prompt_token_ids": p} for p in PROMPTS], greedy(24), use_tqdm=False))


def used():
    """Bytes of the GPU, without those that torch keeps for later."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_an_arena():
    device = torch.device("cuda")
    torch.zeros(1, device=device)
    arena = Arena(300 << 20, device)
    before = used()
    first = arena.empty((50 << 20,), torch.float32)  # 200 MiB
    second = arena.empty((7, 11), torch.bfloat16)
    first.copy_(torch.arange(len(first), device=device))  # whose memory torch gives back, see `used`
    second.fill_(3)
    address, mapped = first.data_ptr(), used() - before
    assert (200 << 20) <= mapped <= (300 << 20)
    arena.sleep(keep=True)
    assert used() <= before + (2 << 20)
    arena.wake_up()
    assert first.data_ptr() == address and used() == before + mapped
    assert torch.equal(first, torch.arange(len(first), device=device).float()) and second.eq(3).all()
    arena.sleep(keep=False)
    arena.wake_up()
    assert first.eq(0).all() and second.eq(0).all()
    del arena, first, second
    gc.collect()
    assert used() <= before, "memory and addresses are given back with the last tensor"


@pytest.mark.parametrize("level", [1, 2])
def test_memory_goes_and_comes_back(folder, level):
    llm = make(folder)
    assert llm.engine._runner.num_graphs > 0
    expected, again = answers(llm), answers(llm)  # which finds prompts in the cache: in bfloat16 it may differ
    weights = sum(p.numel() * p.element_size() for p in llm.engine._memory._model.parameters())
    cache = 4096 * llm.engine._runner.block_bytes
    before = used()
    llm.sleep(level)
    assert before - used() >= weights + cache - SLACK
    with pytest.raises(AsleepError):
        answers(llm)
    llm.wake_up()
    if level == 2:
        with pytest.raises(AsleepError):
            answers(llm)
        llm.reload_weights()
    assert used() <= before + SLACK
    assert answers(llm) == expected
    assert answers(llm) == again, "with a prefix cache that begins anew"
    llm.sleep(level)
    llm.wake_up(["weights"])
    if level == 2:
        llm.reload_weights()
    llm.wake_up(["kv_cache"])
    assert answers(llm) == expected, "the second time, too"


def test_without_sleep_mode_the_tokens_are_the_same(folder):
    plain = make(folder, enable_sleep_mode=False)
    expected = answers(plain)
    with pytest.raises(ValueError, match="enable_sleep_mode=True"):
        plain.sleep()
    del plain
    gc.collect()
    assert answers(make(folder)) == expected


def test_the_engines_memory_is_given_back(folder):
    make(folder)
    gc.collect()
    torch.cuda.empty_cache()
    before = used()
    llm = make(folder)
    assert used() > before + (1 << 30)
    del llm
    gc.collect()
    torch.cuda.empty_cache()
    assert used() <= before + SLACK


def test_the_share_of_the_memory_holds(folder):
    """A cache that takes what is left: weights and cache in arenas count like torch's own memory."""
    llm = make(folder, num_blocks=None, gpu_memory_utilization=0.3)
    _, total = torch.cuda.mem_get_info()
    assert 0.2 * total < used() < 0.32 * total
    expected = answers(llm)
    before = used()
    llm.sleep()
    assert before - used() > 0.2 * total
    llm.wake_up()
    assert answers(llm) == expected


def test_too_little_memory_to_wake_up(folder):
    llm = make(folder, num_blocks=None, gpu_memory_utilization=0.5)
    expected = answers(llm)
    llm.sleep()
    free, _ = torch.cuda.mem_get_info()
    taken = torch.empty(free - (4 << 30), dtype=torch.uint8, device="cuda")
    with pytest.raises(MemoryError):
        llm.wake_up()
    assert llm.is_sleeping
    del taken
    torch.cuda.empty_cache()
    llm.wake_up()
    assert answers(llm) == expected


def test_other_weights_under_captured_steps(tmp_path):
    other = tmp_path / "other"
    copytree(tiny_checkpoint(), other)
    for file in other.glob("*.safetensors"):
        save_file({name: tensor.flip(0).contiguous() for name, tensor in load_file(file).items()}, file)
    prompts = [list(range(5, 25)), list(range(40, 47))]

    def tokens(llm):
        return token_ids(llm.generate(prompts, greedy(), use_tqdm=False))

    llm, expected = tiny_llm(), tokens(tiny_llm(other))
    before = tokens(llm)
    llm.reload_weights(str(other))
    assert tokens(llm) == expected != before
    (tmp_path / "broken").mkdir()
    with pytest.raises(ValueError):
        llm.reload_weights(str(tmp_path / "broken"))
    assert tokens(llm) == expected
    llm.reload_weights()
    assert tokens(llm) == before

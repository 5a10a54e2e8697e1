"""Engines that share experts give the tokens of one GPU: in captured steps and others, together and while one rests."""

import json

import pytest
import torch
from support.engines import greedy, token_ids
from support.gpu_engines import KINDS, PROMPTS, make
from support.mechanism_configs import MECHANISMS
from support.tiny_models import random_tokens

from tritonllm import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
MODEL = MECHANISMS["qwen3-30b-a3b (128 experts, q/k norm)"]  # two layers of them
SIZES = [2, pytest.param(4, marks=pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs"))]
GRAMMAR = SamplingParams(temperature=1.0, seed=9, max_tokens=20, allowed_token_ids=[5, 6, 7])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(MODEL))
    return str(folder)


@pytest.fixture(scope="module")
def expected(folder):
    llm = make(folder)
    return {
        "many": token_ids(llm.generate(PROMPTS, KINDS * 2, use_tqdm=False)),
        "one": token_ids(llm.generate([PROMPTS[1]], greedy(40), use_tqdm=False)),
        "short": token_ids(llm.generate([[7], [8, 9], [10]], [GRAMMAR, greedy(30), greedy(3)], use_tqdm=False)),
    }


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"disable_custom_all_reduce": True}], ids=str)
def test_tokens_are_those_of_one_gpu(folder, expected, size, options):
    llm = make(folder, data_parallel_size=size, enable_expert_parallel=True, **options)
    for _ in range(2):  # the second time from the prefix cache
        assert token_ids(llm.generate(PROMPTS, KINDS * 2, use_tqdm=False)) == expected["many"]
    assert token_ids(llm.generate([PROMPTS[1]], greedy(40), use_tqdm=False)) == expected["one"]
    short = llm.generate([[7], [8, 9], [10]], [GRAMMAR, greedy(30), greedy(3)], use_tqdm=False)
    assert token_ids(short) == expected["short"]
    assert llm.stats.compilations_after_ready == 0 and llm.stats.num_free_blocks == llm.stats.num_blocks
    llm.shutdown()


def test_many_steps_of_many_sizes(folder):
    """Prompts of all lengths come while others decode: rows of hundreds beside rows of one."""
    lengths = torch.randint(1, 900, (96,), generator=torch.Generator().manual_seed(3)).tolist()
    prompts = [random_tokens(length, 10000, seed=i) for i, length in enumerate(lengths)]
    wishes = [greedy(1 + 7 * i % 60) for i in range(96)]
    options = {"max_num_seqs": 32, "max_num_batched_tokens": 1024, "num_blocks": 4096}
    alone = make(folder, **options)
    wanted = token_ids(alone.generate(prompts, wishes, use_tqdm=False))
    llm = make(folder, data_parallel_size=2, enable_expert_parallel=True, **options)
    assert token_ids(llm.generate(prompts, wishes, use_tqdm=False)) == wanted
    assert llm.stats.compilations_after_ready == 0
    llm.shutdown()

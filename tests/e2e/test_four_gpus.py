"""Four GPUs give the tokens of one: ranks, copied key heads, split keys, whole experts, stages, several engines."""

import json

import pytest
import torch
from support.engines import NGRAMS, token_ids
from support.gpu_engines import KINDS, PROMPTS, make
from support.mechanism_configs import MECHANISMS
from support.real_configs import QWEN3_0_6B

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")]
MODELS = {
    "8 key heads": QWEN3_0_6B,
    "2 key heads": QWEN3_0_6B | {"num_key_value_heads": 2},  # each on two ranks
    "1 key head": QWEN3_0_6B | {"num_key_value_heads": 1},
    "experts": MECHANISMS["qwen3-30b-a3b (128 experts, q/k norm)"],  # two layers of them
}
WAYS = [
    ("8 key heads", {"tensor_parallel_size": 4}),
    ("8 key heads", {"tensor_parallel_size": 4, "speculative_config": NGRAMS}),
    ("8 key heads", {"tensor_parallel_size": 4, "enforce_eager": True}),
    ("2 key heads", {"tensor_parallel_size": 4}),
    ("2 key heads", {"tensor_parallel_size": 4, "decode_context_parallel_size": 2}),
    ("1 key head", {"tensor_parallel_size": 4, "decode_context_parallel_size": 4}),
    ("8 key heads", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    ("8 key heads", {"pipeline_parallel_size": 4}),
    ("8 key heads", {"tensor_parallel_size": 2, "data_parallel_size": 2}),
    ("experts", {"tensor_parallel_size": 4}),
    ("experts", {"tensor_parallel_size": 4, "enable_expert_parallel": True}),
    ("experts", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "enable_expert_parallel": True}),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """By name a folder, and the tokens of one GPU, once they are wanted."""
    found = {}

    def model(name):
        if name not in found:
            folder = tmp_path_factory.mktemp("model")
            (folder / "config.json").write_text(json.dumps(MODELS[name]))
            found[name] = str(folder), token_ids(make(str(folder)).generate(PROMPTS, KINDS * 2, use_tqdm=False))
        return found[name]

    return model


@pytest.mark.parametrize(("model", "options"), WAYS, ids=[f"{name} {'-'.join(ways)}" for name, ways in WAYS])
def test_tokens_are_those_of_one_gpu(models, model, options):
    folder, expected = models(model)
    llm = make(folder, **options)
    for _ in range(2):  # the second time from the prefix cache
        assert token_ids(llm.generate(PROMPTS, KINDS * 2, use_tqdm=False)) == expected
    if "data_parallel_size" not in options:
        stats = llm.engine.stats
        assert stats.compilations_after_ready == 0
        assert stats.num_free_blocks == stats.num_blocks

import dataclasses

import pytest
import torch
from support.engines import tiny_checkpoint
from support.mechanism_configs import MECHANISMS
from support.real_configs import LLAMA_3_1_8B, QWEN3_0_6B
from support.tiny_models import load_decoder

from tritonllm.config.engine import EngineConfig, SchedulerConfig
from tritonllm.dist.pipeline import UNDIVIDED
from tritonllm.engine.step.step_drafts import StepDrafts
from tritonllm.engine.step.step_sizes import StepSizes, host_bound_tokens
from tritonllm.models.decoder import Decoder
from tritonllm.models.families import spec_from_config
from tritonllm.models.interface import LayerWork

MODELS = {name.split(" (")[0]: config for name, config in MECHANISMS.items()}
MODELS |= {"qwen3-0.6b": QWEN3_0_6B, "llama-3.1-8b": LLAMA_3_1_8B}
SIZES = StepSizes(
    scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=100),
    block_tokens=4,
    max_model_len=64,
    captures=True,
    host_bound=10**9,
    drafts=0,
    verified=0,
)


@pytest.mark.parametrize(
    ("changes", "captured", "most"),
    [
        ({}, [64], 100),
        ({"captures": False}, [], 100),
        ({"scheduler": SchedulerConfig(max_num_seqs=60, max_num_batched_tokens=100)}, [64], 124),
        ({"scheduler": SchedulerConfig(max_num_seqs=60, max_num_batched_tokens=60)}, [], 61),  # a prompt's token beside
        ({"drafts": 4, "verified": 40}, [64], 200),
    ],
)
def test_the_largest_step(changes, captured, most):
    sizes = dataclasses.replace(SIZES, **changes)
    assert sizes.captured_tokens == captured and sizes.most_tokens == most


def test_blocks_of_a_sequence_have_room_for_drafts():
    assert SIZES.max_blocks == 16
    assert dataclasses.replace(SIZES, drafts=1).max_blocks == 17
    assert dataclasses.replace(SIZES, max_model_len=62, drafts=2).max_blocks == 16


@pytest.mark.parametrize("eager", [False, True])
def test_sizes_of_a_runner(eager):
    how = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}, "enforce_eager": eager}
    config = EngineConfig.from_kwargs(model="m", block_size=4, max_num_seqs=8, max_num_batched_tokens=64, **how)
    model = load_decoder(tiny_checkpoint())
    drafts = StepDrafts(config, model, None, 64, torch.device("cpu"), proposes=True)
    sizes = StepSizes.of(config, model, drafts, 64, UNDIVIDED)
    assert (sizes.block_tokens, sizes.max_model_len) == (4, 64)
    assert (sizes.drafts, sizes.verified) == (3, drafts.verified)
    assert sizes.captured_tokens == ([] if eager else [64])


@pytest.mark.parametrize(
    ("model", "tokens"),
    [("qwen3-0.6b", 17163), ("llama-3.1-8b", 1237), ("qwen3-30b-a3b", 8437), ("glm-4.5-air", 1108)],
)
def test_host_bound_tokens_of_published_models(model, tokens):
    """Of experts a token meets the chosen ones; the largest layer decides."""
    decoder = Decoder(
        spec_from_config(MODELS[model]), dtype=torch.bfloat16, device=torch.device("meta"), max_model_len=64
    )
    assert host_bound_tokens(decoder.work) == tokens


def test_the_largest_layer_is_host_bound():
    assert host_bound_tokens([LayerWork(10**8, False), LayerWork(10**9, False)]) == 270
    assert host_bound_tokens([LayerWork(10**9, True)]) == 480
    assert host_bound_tokens([LayerWork(0, False)]) > 10**9
    assert host_bound_tokens([]) == 0

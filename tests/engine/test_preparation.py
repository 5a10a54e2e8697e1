"""What a GPU runs of it, tests/e2e does; here its parts are watched on the CPU."""

import gc
import weakref
from unittest.mock import patch

import pytest
import torch
from support.engines import tiny_checkpoint
from support.tiny_models import load_decoder

from tritonllm.config.engine import EngineConfig
from tritonllm.engine.step import preparation
from tritonllm.engine.step.runner import ModelRunner

CPU = torch.device("cpu")


class Graphs:
    """What is captured, and nothing is."""

    def __init__(self, work, limits, device, may_share, regimes, capture, mark):
        self.work, self.limits, self.regimes, self.capture, self.mark = work, limits, regimes, capture, mark
        may_share(1)  # as the others, it asks at once


@pytest.fixture
def runner():
    folder = tiny_checkpoint()
    config = EngineConfig.from_kwargs(
        model=str(folder), block_size=4, max_num_seqs=8, max_num_batched_tokens=64, kv_offloading_size=0.001
    )
    made = ModelRunner(load_decoder(folder), config, CPU, max_model_len=64)
    made.start(num_blocks=3, max_model_len=32)
    return made


def captured(runner):
    with patch.object(preparation, "StepGraphs", Graphs), patch.object(preparation, "GraphCapture"):
        return runner._preparation.capture()


def test_graphs_are_captured_for_the_steps_that_may_come(runner):
    """Of the length that the start was told, which is less than before."""
    graphs = captured(runner)
    assert graphs.limits.max_num_seqs == 8 and graphs.limits.token_sizes == [64]
    assert graphs.limits.max_blocks == 32 // 4 and graphs.limits.block_tokens == 4
    assert not (graphs.limits.drafts or graphs.limits.verified or graphs.limits.by_shards)
    assert graphs.regimes.max_model_len == 32


def test_graphs_do_not_keep_the_runner(runner):
    gc.collect()
    gc.disable()
    try:
        made = ModelRunner(runner.model, runner._config, CPU, max_model_len=64)
        made.start(num_blocks=3, max_model_len=32)
        made._graphs = captured(made)
        last = weakref.ref(made)
        del made
        assert last() is None
    finally:
        gc.enable()

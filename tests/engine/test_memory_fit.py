"""Blocks that fit into a GPU's memory beside all else, with made-up numbers for the GPU's."""

import pytest
import torch

from tritonllm.config.engine import CacheConfig
from tritonllm.engine.cache.memory_fit import blocks_that_fit

DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """One with 1000 bytes, of which 300 are in use."""
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (700, 1000))


def test_what_is_reserved_counts():
    cache = CacheConfig(gpu_memory_utilization=0.8)
    assert [blocks_that_fit(cache, 10, reserved, DEVICE) for reserved in (0, 100, 490)] == [50, 40, 1]


@pytest.mark.parametrize("also", ["", "kv_offloading_size"])
def test_not_even_one(also):
    with pytest.raises(ValueError, match=r"gpu_memory_utilization=0.8 leaves .* lower max_num_batched_tokens") as error:
        blocks_that_fit(CacheConfig(gpu_memory_utilization=0.8), 10, 491, DEVICE, also)
    assert str(error.value).endswith(", or kv_offloading_size" if also else "lower max_num_batched_tokens")

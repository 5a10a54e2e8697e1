"""Memory of the paged cache: a tensor for the layers of one shape, a view for each layer."""

import dataclasses

import numpy as np
import pytest
import torch
from support.tiny_models import tiny_config

from tritonllm.config.engine import CacheConfig
from tritonllm.engine.cache.host_copies import HostCopies
from tritonllm.engine.cache.kv_cache import block_bytes, cache_dtype, layers_of_pools, make_cache
from tritonllm.engine.data.copy_batches import Fills, Transfers
from tritonllm.engine.start.resolve import check_cache
from tritonllm.models.families import spec_from_config

CPU = torch.device("cpu")


def mixed_spec():
    """Three layers, of which the middle one has other heads."""
    spec = spec_from_config(tiny_config("qwen3"))
    first, other, last = spec.layers
    other = dataclasses.replace(other, attention=dataclasses.replace(other.attention, num_kv_heads=1, head_size=48))
    return dataclasses.replace(spec, layers=(first, other, last))


def test_layers_of_one_shape_lie_in_one_tensor():
    spec = spec_from_config(tiny_config("qwen3"))
    views, copies = make_cache(spec, torch.float32, 5, 4, CPU)
    (pool,) = [one.pool for one in copies]
    assert pool.shape == (3, 2, 5, 4, 2, 16) and layers_of_pools(spec) == [[0, 1, 2]]
    assert all(view.k.data_ptr() == pool[i, 0].data_ptr() for i, view in enumerate(views))
    assert all(view.v.data_ptr() == pool[i, 1].data_ptr() for i, view in enumerate(views))
    assert block_bytes(spec, torch.float32, 4) * 5 == pool.nbytes


def test_each_layer_has_its_own_shape():
    spec = mixed_spec()
    views, copies = make_cache(spec, torch.bfloat16, 5, 4, CPU)
    assert [tuple(view.k.shape) for view in views] == [(5, 4, 2, 16), (5, 4, 1, 48), (5, 4, 2, 16)]
    assert layers_of_pools(spec) == [[0, 2], [1]]
    assert block_bytes(spec, torch.bfloat16, 4) * 5 == sum(one.pool.nbytes for one in copies)
    assert block_bytes(spec, torch.bfloat16, 1) == 2 * 2 * (32 + 48 + 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.float8_e5m2])
def test_blocks_of_mixed_shapes_move_in_all_layers(dtype):
    """Within the cache, to the tier behind a step and while it runs, and back."""
    spec = mixed_spec()
    views, copies = make_cache(spec, dtype, 6, 4, CPU)
    for view in views:
        view.k.copy_(torch.randn(view.k.shape))
        view.v.copy_(torch.randn(view.v.shape))
    want = [(view.k[1].float().clone(), view.v[1].float().clone()) for view in views]

    def has(block):
        return all(
            torch.equal(view.k[block].float(), k) and torch.equal(view.v[block].float(), v)
            for view, (k, v) in zip(views, want, strict=True)
        )

    for one in copies:
        one.run(np.array([[1, 3]]))
    assert has(3) and not has(4)
    host = HostCopies([one.pool for one in copies], 3, layers=layers_of_pools(spec))
    assert host.marked_layers == [0, 1, 2]
    assert sum(slots.nbytes for slots in host.memory) == 3 * block_bytes(spec, dtype, 4)
    host.run(Transfers(1, ((1, 2),), ()))
    host.run(Transfers(2, (), ((2, 4),), wait=2))
    assert has(4)
    filled = host.fill(Fills(3, ((1, 0),)), True)
    for layer, view in enumerate(views):
        filled.computed(layer)
        view.k[1].zero_()
        view.v[1].zero_()  # what comes too late finds nothing
    filled.end()
    host.run(Transfers(4, (), ((0, 5),), wait=4))
    assert has(5) and not has(1)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("auto", torch.float16),
        ("float16", torch.float16),
        ("fp8", torch.float8_e4m3fn),
        ("fp8_e4m3", torch.float8_e4m3fn),
        ("fp8_e5m2", torch.float8_e5m2),
    ],
)
def test_the_dtype_of_a_cache(name, dtype):
    config = CacheConfig(kv_cache_dtype=name)
    assert cache_dtype(config, torch.float16) == dtype
    check_cache(config, torch.float16, "cuda", (8, 9))
    check_cache(config, torch.float16, "cpu", (0, 0))


def test_a_dtype_that_a_cache_cannot_have():
    fp8 = CacheConfig(kv_cache_dtype="fp8")
    with pytest.raises(ValueError, match=r"kv_cache_dtype='fp8' needs a GPU of compute capability 8.9.* has 8.0"):
        check_cache(fp8, torch.bfloat16, "cuda", (8, 0))
    with pytest.raises(ValueError, match=r"kv_cache_dtype='float16': this model runs in bfloat16.*dtype='float16'"):
        cache_dtype(CacheConfig(kv_cache_dtype="float16"), torch.bfloat16)

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tritonllm.engine.data.inputs import cascade_arrays, upload, upload_one
from tritonllm.engine.data.step import SharedPrefix
from tritonllm.kernels import plan_cascade
from tritonllm.kernels.attention.cascade import cascade_parts


@pytest.mark.gpu
def test_one_transfer_carries_every_array():
    rng = np.random.default_rng(0)
    arrays = [
        rng.integers(0, 100, 5),
        np.zeros((0, 3), dtype=np.int32),
        rng.integers(0, 100, (3, 7)).astype(np.int32),
        rng.random(3, dtype=np.float32),
        np.array([True, False]),
        np.empty(0),
    ]
    for array, there in zip(arrays, upload(arrays, torch.device("cuda")), strict=True):
        assert there.data_ptr() % 16 == 0 or not array.size
        np.testing.assert_array_equal(there.cpu().numpy(), array)
        assert there.dtype == torch.from_numpy(array).dtype


@pytest.mark.also_gpu
def test_one_array(device):
    whole = np.arange(35, dtype=np.int32).reshape(5, 7)
    for array in (whole, whole[:, 1:4], whole[:0], whole[2]):
        before = array.copy()
        there = upload_one(array, device)
        array += 1  # the copy is not asked what became of it
        np.testing.assert_array_equal(there.cpu().numpy(), before)
        assert there.dtype == torch.int32


@given(
    batch=st.integers(1, 40),
    width=st.integers(1, 12),
    shared=st.integers(0, 12),
    block_size=st.sampled_from([1, 16]),
    seed=st.integers(0, 99),
)
def test_a_plan_for_a_shared_prefix_is_the_kernels_own(batch, width, shared, block_size, seed):
    generator = np.random.default_rng(seed)
    shared = min(shared, width)
    tables = generator.integers(1 << 20, size=(batch, width), dtype=np.int32)
    lens = generator.integers(shared * block_size, 1 << 20, size=batch, dtype=np.int32)
    shares = generator.random(batch) < 0.6
    found = cascade_arrays(SharedPrefix(shared, shares), tables, lens, block_size, cascade_parts(batch))
    expected = plan_cascade(*map(torch.from_numpy, (tables, lens, shares)), shared, block_size)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(mine), theirs, rtol=0, atol=0)

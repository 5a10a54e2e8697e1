import numpy as np
import pytest
import torch

from tritonllm.engine.inputs import upload


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

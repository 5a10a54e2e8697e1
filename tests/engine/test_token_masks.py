"""Masks of next tokens on their way to the draw."""

import numpy as np
import pytest
import torch

from tritonllm.engine.data.step import RowMasks
from tritonllm.engine.step.token_masks import upload_masks


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 63, 64])
def test_masks_and_their_rows(rows):
    """Each begins at a multiple of 16 bytes, however many rows there are: Triton compiles a kernel for that."""
    at = np.arange(rows - 1, -1, -2, dtype=np.int32)
    words = np.random.default_rng(rows).integers(-(2**31), 2**31, (len(at), 5)).astype(np.int32)
    masks = upload_masks(RowMasks(at, words), rows, 150, torch.device("cpu"))
    assert masks.rows.data_ptr() % 16 == masks.bitmask.data_ptr() % 16 == 0
    assert masks.rows.shape == (rows,) and (masks.rows >= 0).sum() == len(at)
    for row, mask in zip(at.tolist(), words, strict=True):
        assert np.array_equal(masks.bitmask[masks.rows[row]].numpy(), mask)

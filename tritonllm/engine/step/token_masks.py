"""Masks of the tokens that may come next, on their way from the host to the draw."""

import numpy as np
import torch

from tritonllm.engine.data.inputs import host_bytes
from tritonllm.engine.data.step import RowMasks
from tritonllm.kernels import TokenMasks


def _begin(rows: int) -> int:
    """Where the masks of so many rows begin, behind the rows. 16 bytes divide it, or the draw is compiled anew."""
    return -(-rows // 4) * 4


def upload_masks(masks: RowMasks, rows: int, vocab: int, device: torch.device) -> TokenMasks:
    """Copy the masks of a step of ``rows`` rows to the device, in one copy and without waiting for it."""
    begin, (count, words) = _begin(rows), masks.words.shape
    packed = host_bytes(4 * (begin + masks.words.size), device).view(torch.int32)
    host = packed.numpy()
    host[:rows] = -1
    host[masks.rows] = np.arange(count, dtype=np.int32)
    host[begin:].reshape(count, words)[:] = masks.words
    there = packed.to(device, non_blocking=True)
    return TokenMasks(there[:rows], there[begin:].view(count, -(-vocab // 32)))

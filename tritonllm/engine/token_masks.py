"""Masks of the tokens that may come next, on their way from the host to the draw."""

import numpy as np
import torch

from tritonllm.engine.inputs import host_bytes
from tritonllm.engine.step import RowMasks
from tritonllm.kernels import TokenMasks


def _fill(host: np.ndarray, masks: RowMasks, rows: int) -> None:
    """Write where each of ``rows`` rows has its mask, and the masks, into ``host`` int32."""
    count, words = masks.words.shape
    host[:rows] = -1
    host[masks.rows] = np.arange(count, dtype=np.int32)
    host[rows:].reshape(count, words)[:] = masks.words


def _views(memory: torch.Tensor, rows: int, vocab: int) -> TokenMasks:
    return TokenMasks(memory[:rows], memory[rows:].view(-1, -(-vocab // 32)))


def _pack(masks: RowMasks, rows: int, device: torch.device) -> torch.Tensor:
    host = host_bytes(4 * (rows + masks.words.size), device).view(torch.int32)
    _fill(host.numpy(), masks, rows)
    return host


def upload_masks(masks: RowMasks, rows: int, vocab: int, device: torch.device) -> TokenMasks:
    """Those of a step of ``rows`` rows in one copy, without waiting for it."""
    return _views(_pack(masks, rows, device).to(device, non_blocking=True), rows, vocab)

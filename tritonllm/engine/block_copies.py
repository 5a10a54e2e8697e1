"""Copies blocks of the cache on the device: what copy-on-write takes (:mod:`tritonllm.engine.gang`)."""

import numpy as np
import torch

from tritonllm.engine.inputs import upload
from tritonllm.kernels import copy_blocks


class BlockCopies:
    """Copies blocks in all layers at once.

    Args:
        pool: ``[L, 2, P, S, K, D]``, keys and values of L layers.
    """

    def __init__(self, pool: torch.Tensor) -> None:
        self.pool = pool
        layers, _, blocks = pool.shape[:3]
        flat = pool.flatten(0, 2)  # [L * 2 * P, S, K, D]: the values of a block lie P rows behind its keys
        self._k, self._v = flat[:-blocks], flat[blocks:]
        self._layers = np.arange(layers, dtype=np.int64)[:, None, None] * (2 * blocks)

    def run(self, pairs: np.ndarray) -> None:
        """One launch.

        Args:
            pairs: ``[N, 2]`` int64, sources and targets; no target is another pair's source or target.
        """
        (there,) = upload([(pairs + self._layers).reshape(-1, 2)], self._k.device)
        copy_blocks(self._k, self._v, there)

    def warm_up(self) -> None:
        """A launch that copies nothing."""
        (there,) = upload([np.full((1, 2), -1, dtype=np.int64)], self._k.device)
        copy_blocks(self._k, self._v, there)

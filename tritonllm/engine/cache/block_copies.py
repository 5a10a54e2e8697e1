"""Copies blocks of the cache on the device: what copy-on-write takes (:mod:`tritonllm.engine.schedule.gang`)."""

import numpy as np
import torch

from tritonllm.engine.data.inputs import upload
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
        slots = pool.flatten(0, 3)[:, None]  # blocks of one slot
        apart = blocks * pool.shape[3]
        self._k_slots, self._v_slots = slots[:-apart], slots[apart:]
        self._first_slots = torch.arange(layers, dtype=torch.int64, device=pool.device)[:, None, None] * (2 * apart)

    def run(self, pairs: np.ndarray) -> None:
        """Copy blocks within the pool, in one launch.

        Args:
            pairs: ``[N, 2]`` int64, numbers of blocks: sources and targets; no target is another pair's source or
                target.
        """
        (there,) = upload([(pairs + self._layers).reshape(-1, 2)], self._k.device)
        copy_blocks(self._k, self._v, there)

    def move_slots(self, moves: torch.Tensor) -> None:
        """A launch for each of D rounds, one behind the other.

        Args:
            moves: ``[D, N, 2]`` int64, source and target slots of each round; -1 for none. In a round no target is
                another one's source or target.
        """
        pairs = torch.where(moves[:, None] < 0, -1, moves[:, None] + self._first_slots).flatten(1, 2)
        for round_pairs in pairs.unbind():
            copy_blocks(self._k_slots, self._v_slots, round_pairs)

    def warm_up(self) -> None:
        """A launch that copies nothing."""
        (there,) = upload([np.full((1, 2), -1, dtype=np.int64)], self._k.device)
        copy_blocks(self._k, self._v, there)

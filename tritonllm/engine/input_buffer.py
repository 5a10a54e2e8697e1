"""Fixed device buffers that a captured step reads its inputs from, filled by one copy."""

from collections.abc import Callable, Mapping

import numpy as np
import torch

from tritonllm.engine.batch import ALIGNMENT


class InputBuffer:
    """Several one-dimensional tensors in one piece of memory.

    Args:
        layout: dtype and length of each tensor.
        device: where they are.

    Attributes:
        tensors: by name, zero until the first :meth:`load`.
    """

    def __init__(self, layout: Mapping[str, tuple[torch.dtype, int]], device: torch.device) -> None:
        self._layout = layout
        size = sum(-(-length * dtype.itemsize // ALIGNMENT) * ALIGNMENT for dtype, length in layout.values())
        self._buffer = torch.zeros(size, dtype=torch.uint8, device=device)
        self.tensors = self._split(self._buffer)

    def _split(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        tensors = {}
        start = 0
        for name, (dtype, length) in self._layout.items():
            end = start + length * dtype.itemsize
            tensors[name] = buffer[start:end].view(dtype)
            start = -(-end // ALIGNMENT) * ALIGNMENT
        return tensors

    def load(self, fill: Callable[[Mapping[str, np.ndarray]], None]) -> None:
        """Let ``fill`` write every element of the host's arrays, by name, and send them without waiting."""
        host = torch.empty_like(self._buffer, device="cpu", pin_memory=self._buffer.is_cuda)
        fill({name: tensor.numpy() for name, tensor in self._split(host).items()})
        self._buffer.copy_(host, non_blocking=True)

"""Capturing pieces of a step as CUDA graphs."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

import torch

Outputs = TypeVar("Outputs")
Rehearsal = Callable[[], AbstractContextManager[None]]  # inside the block a model runs one layer of each kind


class GraphCapture:
    """Captures graphs that share their memory: only the outputs of the one that was replayed last are valid.

    ``torch.cuda.graph`` hands the allocator's free memory back to the driver before each capture, which took 41 ms for
    each of the 29 graphs of a start of Qwen3-0.6B. Graphs of one pool and stream use each other's memory anyway.

    Args:
        rehearsal: see :class:`~tritonllm.models.interface.CausalLM`.
        device: a CUDA device.
    """

    def __init__(self, rehearsal: Rehearsal, device: torch.device) -> None:
        self._rehearsal = rehearsal
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __call__(self, work: Callable[[], Outputs]) -> tuple[torch.cuda.CUDAGraph, Outputs]:
        """Run ``work`` once with one layer of each kind, for what a capture must not do (loading kernels); capture it.

        Returns:
            the graph, and what ``work`` returned: tensors that each replay writes.
        """
        with self._rehearsal():
            work()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool)
            try:
                outputs = work()
            finally:
                graph.capture_end()
        return graph, outputs

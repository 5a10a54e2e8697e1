"""Copies and numbers between the GPUs of a host, beside the current stream: what a relay sends with
(:mod:`tritonllm.dist.relay`).
"""

from collections.abc import Sequence
from typing import Any

import torch

from tritonllm.dist.peer_memory import CudaDriver

FAR = 1 << 30  # numbers ahead of all that will be waited for, modulo 2**32


class CudaCourier:
    """One stream, whose copies the copy engines make.

    Args:
        addresses: of each rank's memory, as this process sees them.
        rank: this one.
    """

    def __init__(self, driver: CudaDriver, addresses: Sequence[int], rank: int, device: torch.device) -> None:
        self._driver, self._addresses, self._own, self._device = driver, addresses, addresses[rank], device
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._marked = torch.cuda.Event()

    def mark(self) -> None:
        self._marked.record(torch.cuda.current_stream(self._device))
        self._stream.wait_event(self._marked)

    def copy(self, to: int, at: int, source: torch.Tensor) -> None:
        span = self._addresses[to] + at, source.data_ptr(), source.numel() * source.itemsize
        self._driver.copy([span], self._stream.cuda_stream)

    def tell(self, to: int, at: int, number: int) -> None:
        self._driver.write_number(self._addresses[to] + at, number, self._stream.cuda_stream)

    def wait(self, at: int, number: int) -> None:
        self._driver.wait_for_number(self._own + at, number, torch.cuda.current_stream(self._device).cuda_stream)

    def release(self, at: int, count: int, number: int) -> None:
        """Streams wait for so many numbers no more; for any thread.

        Args:
            number: the last one that was waited for.
        """
        with self._driver.current():
            stream = torch.cuda.Stream(self._device)
            self._driver.fill(self._own + at, (number + FAR) & 0xFFFFFFFF, count, stream.cuda_stream)
            stream.synchronize()


def memory_at(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """uint8 ``[nbytes]`` that lie there."""
    return torch.as_tensor(_Bytes(address, nbytes), device=device)


class _Bytes:
    """Bytes at an address of a GPU, for torch (CUDA array interface, version 3)."""

    def __init__(self, address: int, count: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (count,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }

"""What the machine can do at best: the roofline model (Williams, Waterman, Patterson, CACM 52(4), 2009).

Both ceilings are measured here, on the machine at hand: a figure of a data sheet is of another machine, another clock
and another dtype.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

MIB = 1 << 20


@dataclass(frozen=True)
class Roofline:
    """What bounds the speed of operations on one chip.

    Attributes:
        chip: the name of the chip.
        bandwidth: bytes a second of a large copy, read and written.
        peak: FLOPs a second of a large product.
        dtype: the dtype of that product.
    """

    chip: str
    bandwidth: float
    peak: float
    dtype: torch.dtype

    def seconds(self, moved: int, flops: int | None) -> float:
        """The least time for so many bytes and FLOPs."""
        return max(moved / self.bandwidth, (flops or 0) / self.peak)

    @property
    def ridge(self) -> float:
        """FLOPs for each byte from which on computing takes longer than moving."""
        return self.peak / self.bandwidth


def measure(device: torch.device, dtype: torch.dtype) -> Roofline:
    """Copy and multiply for some milliseconds (less than half a second on a slow CPU)."""
    gpu = device.type == "cuda"
    size, edge = (512 * MIB, 8192) if gpu else (64 * MIB, 768)
    while True:
        try:
            bandwidth = _copy(device, size)
            peak = _product(device, dtype, edge)
            break
        except torch.OutOfMemoryError:
            if size <= MIB:
                raise
            size, edge = size // 8, edge // 2
            torch.cuda.empty_cache()
    if gpu:
        torch.cuda.empty_cache()
    return Roofline(torch.cuda.get_device_name(device) if gpu else "CPU", bandwidth, peak, dtype)


def _copy(device: torch.device, size: int) -> float:
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * size / _seconds(lambda: torch.neg(source, out=target), device)


def _product(device: torch.device, dtype: torch.dtype, edge: int) -> float:
    a, b = (torch.randn(edge, edge, device=device).to(dtype) for _ in range(2))
    return 2 * edge**3 / _seconds(lambda: a @ b, device)


def _seconds(work: Callable[[], object], device: torch.device, repetitions: int = 7) -> float:
    """The shortest, after a first time that does not count: a ceiling is what can be reached."""
    work()
    times = []
    for _ in range(repetitions):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            end.synchronize()
            times.append(1e-3 * begin.elapsed_time(end))
        else:
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
    return max(min(times), 1e-9)

"""What ran on the GPU, kernel by kernel, on the clock of the engine's events.

torch's profiler gets the records from CUPTI and tells times of the system's clock (``time.time_ns()``); events have
``time.monotonic()``. Both are read side by side before and after, and a time in between is placed between the two
offsets: the system's clock is slewed by up to 0.05%, and may be set.

Nothing is recorded without a GPU: there the profiler would report each of torch's operators, thousands in a step, and
slow the step down several times.
"""

import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from tritonllm import env
from tritonllm.telemetry.trace_file import Clock, TraceFile
from tritonllm.telemetry.trace_layout import STREAMS

READINGS = 32
MOST_KERNELS = 200_000
LANES = 4  # tracks of a stream: kernels of one stream can overlap (programmatic dependent launch)
NAME_LENGTH = 120


class Reading(NamedTuple):
    """Both clocks at one time, in nanoseconds, and how far apart they can have been read."""

    monotonic: int
    unix: int
    within: int


def read_clocks() -> Reading:
    """The closest of several readings: between two of ``read_clocks`` anything can happen to the process."""
    best = Reading(0, 0, 1 << 62)
    for _ in range(READINGS):
        before = time.monotonic_ns()
        unix = time.time_ns()
        after = time.monotonic_ns()
        if after - before < best.within:
            best = Reading((before + after) // 2, unix, after - before)
    return best


def to_monotonic(unix: int, first: Reading, last: Reading) -> float:
    """The time of ``time.monotonic()``, in seconds, at a time of the system's clock in nanoseconds."""
    begin, end = first.monotonic - first.unix, last.monotonic - last.unix
    span = last.unix - first.unix
    part = min(max((unix - first.unix) / span, 0.0), 1.0) if span > 0 else 0.0
    return (unix + begin + round(part * (end - begin))) / 1e9


class Kernel(NamedTuple):
    """A kernel that has run on the GPU.

    Attributes:
        begin, end: nanoseconds of the system's clock.
    """

    name: str
    stream: int
    begin: int
    end: int


def plain_name(name: str) -> str:
    """A kernel's name without return type, arguments and most of its template arguments."""
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    return name if name.startswith("Mem") else name.split("(")[0][:NAME_LENGTH]


def prepare(index: int = 0) -> None:
    """Have the profiler attach to the GPU, if there is one, and stay: it may miss the kernels of CUDA graphs that were
    captured before. To be called before an engine is made whose kernels are to be seen.

    Args:
        index: the index of the engine's GPU, as this process sees them.
    """
    import torch

    if torch.cuda.is_available():
        env.keep_cupti()
        profiler = _profiler()
        profiler.start()
        torch.ones(1, device=f"cuda:{index}").add_(1)
        torch.cuda.synchronize(index)
        profiler.stop()


def _profiler() -> Any:
    from torch.profiler import ProfilerActivity, profile

    return profile(activities=[ProfilerActivity.CUDA], acc_events=True)  # else it warns that it forgets


class KernelRecorder:
    """Records the kernels of an engine's first steps, by torch's profiler.

    Args:
        steps: after how many steps to stop.
    """

    def __init__(self, steps: int) -> None:
        self._left, self._first = steps, Reading(0, 0, 0)
        self._profiler: Any = None
        self.about = f"of the first {steps} steps" if steps else "none were asked for"
        if steps and not self._has_gpu():
            self._left, self.about = 0, "none: there is no GPU"

    @staticmethod
    def _has_gpu() -> bool:
        import torch

        return torch.cuda.is_available() and torch.cuda.is_initialized()  # an engine on the CPU may be beside one

    @property
    def running(self) -> bool:
        return self._profiler is not None

    def start(self) -> None:
        if self._left:
            self._first = read_clocks()
            self._profiler = _profiler()
            self._profiler.start()

    def took_step(self) -> bool:
        """Whether that was the last one to record."""
        if not self.running:
            return False
        self._left -= 1
        return self._left <= 0

    def stop(self) -> list[Kernel]:
        """What ran since the start, in the order of the beginning; nothing if it was not started."""
        if self._profiler is None:
            return []
        import torch

        torch.cuda.synchronize()
        profiler, self._profiler, self._left = self._profiler, None, 0
        profiler.stop()
        cuda = torch.autograd.DeviceType.CUDA
        return sorted(
            (
                Kernel(
                    plain_name(event.name()),
                    event.device_resource_id(),
                    event.start_ns(),
                    event.start_ns() + event.duration_ns(),
                )
                for event in profiler.profiler.kineto_results.events()
                if event.device_type() == cuda
            ),
            key=lambda kernel: kernel.begin,
        )

    def write(self, file: TraceFile, clock: Clock, pid: int) -> Mapping[str, Any]:
        """Stop, and write the kernels; returns facts about them."""
        kernels = self.stop()
        last = read_clocks()
        room = max(0, min(MOST_KERNELS, file.most - file.events))
        write_kernels(file, clock, pid, kernels[:room], self._first, last)
        drift = (last.monotonic - last.unix) - (self._first.monotonic - self._first.unix)
        return {
            "kernels": len(kernels),
            "left_out": max(0, len(kernels) - room),
            "clocks_ns": max(self._first.within, last.within),
            "drift_ns": drift,
        }


def write_kernels(
    file: TraceFile, clock: Clock, pid: int, kernels: Iterable[Kernel], first: Reading, last: Reading
) -> None:
    """Write kernels to a trace, on tracks of their streams.

    Args:
        kernels: the kernels, in the order in which they began.
        first, last: readings of the clocks before and after the kernels.
    """
    ends: dict[int, list[int]] = {}  # of each stream's tracks
    for kernel in kernels:
        begin = clock.ticks(to_monotonic(kernel.begin, first, last))
        end = max(begin, clock.ticks(to_monotonic(kernel.end, first, last)))
        lanes = ends.setdefault(kernel.stream, [])
        lane = next((lane for lane, until in enumerate(lanes) if until <= begin), len(lanes))
        if lane == LANES:  # cut the kernel rather than draw it over others
            lane = min(range(LANES), key=lanes.__getitem__)
            begin = lanes[lane]
            end = max(begin, end)
        number = STREAMS + LANES * list(ends).index(kernel.stream) + lane
        if lane == len(lanes):
            lanes.append(0)
            beside = f", beside it ({lane})" if lane else ""
            file.name_track(pid, number, f"stream {kernel.stream}{beside}")
        lanes[lane] = end
        file.slice(kernel.name, pid, number, begin, end)

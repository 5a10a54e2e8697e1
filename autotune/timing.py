"""Microseconds of one call: the median over replays of CUDA graphs whose calls rotate over several input sets.

A graph leaves out what the host does, and inputs that together exceed the second-level cache are read from memory, as
they are inside a model. One method for the tuner and the benchmarks.
"""

import math
import statistics
from collections.abc import Callable

import torch

ROTATE_BYTES = 320e6  # the second-level cache of an H200 holds 60 MB
MAX_SETS = 64
MAX_CALLS = 256  # in one graph: more takes longer to capture, fewer shows the gap between two graphs


def sets_needed(bytes_per_set: float) -> int:
    """How many input sets together leave the cache behind."""
    return max(1, min(MAX_SETS, math.ceil(ROTATE_BYTES / max(bytes_per_set, 1))))


def _elapsed_us(work: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


class Replay:
    """A CUDA graph of calls of ``run(set)``, the sets taken in turn, ready to be timed.

    Args:
        run: one call on input set ``i``; must not wait for the device. What it returns is kept until the set's next
            turn, so that outputs rotate through memory as inputs do.
        sets: how many input sets there are.
        sample_ms: how long one measurement should take; sets that take longer in all make it longer.

    Attributes:
        calls: how many calls one measurement times.
    """

    def __init__(self, run: Callable[[int], object], sets: int, sample_ms: float = 3.0) -> None:
        kept: list[object] = [None] * sets

        def rotation() -> None:
            for i in range(sets):
                kept[i] = run(i)

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            rotation()  # compiles and allocates
            estimate = _elapsed_us(rotation)  # with the host's time, so too long for short calls
        torch.cuda.current_stream().wait_stream(stream)
        rotations = max(1, min(math.ceil(MAX_CALLS / sets), int(sample_ms * 1e3 / estimate)))
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for _ in range(rotations):
                rotation()
        self._graph.replay()
        # Several replays to a measurement: the first waits for the host, which must not weigh.
        self._replays = max(1, round(sample_ms * 1e3 / _elapsed_us(self._graph.replay)))
        self.calls = rotations * sets * self._replays

    def _replay(self) -> None:
        for _ in range(self._replays):
            self._graph.replay()

    def us(self) -> float:
        """One measurement: microseconds of one call."""
        return _elapsed_us(self._replay) / self.calls


def median_us(run: Callable[[int], object], sets: int, *, sample_ms: float = 3.0, samples: int = 10) -> float:
    """The median of so many measurements of one call of ``run`` (see :class:`Replay`)."""
    replay = Replay(run, sets, sample_ms)
    return statistics.median(replay.us() for _ in range(samples))

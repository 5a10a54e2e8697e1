"""Runs of the engine and what the GPU did meanwhile: the raw material of ``bench.timeline``."""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bench.engine_workloads import Request

SETTLE_STEPS = 3  # the host is ahead of the GPU by about one
MOST_STEPS = 24  # of one workload that are looked at


class Event(NamedTuple):
    """Something that the GPU did, in nanoseconds of the same clock as :func:`time.time_ns`."""

    name: str
    start: int
    end: int


@dataclass
class Drive:
    """One run of a batch of requests.

    Attributes:
        steps: when each call of ``step`` returned, in nanoseconds.
        first_decode: the step after which every prompt had been computed.
        last_decode: the last step before a request ended.
    """

    begin: int
    steps: list[int] = field(default_factory=list)
    first_decode: int = 0
    last_decode: int = 0

    @property
    def seconds(self) -> float:
        return (self.steps[-1] - self.begin) / 1e9

    def stretch(self) -> tuple[int, int, int]:
        """Beginning and end of a time in which all requests decode, in nanoseconds, and its number of steps.

        Raises:
            ValueError: there is no such stretch.
        """
        first = min(self.first_decode + SETTLE_STEPS, self.last_decode)
        last = min(self.last_decode, first + MOST_STEPS)
        if last - first < 2:
            raise ValueError(f"all requests decode during {last - first} steps only: let them generate more tokens")
        return self.steps[first], self.steps[last], last - first

    def step_ms(self) -> float:
        """Milliseconds of a step in that time, as the host sees it."""
        begin, end, count = self.stretch()
        return (end - begin) / 1e6 / count


def drive(llm: Any, batch: Sequence[Request]) -> Drive:
    """Run requests to their end, by steps. The last to come reports every token, the others only their end."""
    from tritonllm import SamplingParams
    from tritonllm.config.sampling_params import RequestOutputKind

    for number, request in enumerate(batch):
        sentinel = number == len(batch) - 1
        params = SamplingParams(
            temperature=request.temperature,
            max_tokens=request.max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA if sentinel else RequestOutputKind.FINAL_ONLY,
        )
        llm.engine.add_request(f"timeline-{number}", {"prompt_token_ids": request.prompt}, params)
    run = Drive(time.time_ns())
    while llm.engine.has_unfinished_requests():
        outputs = llm.engine.step()
        run.steps.append(time.time_ns())
        if outputs and not run.first_decode:
            run.first_decode = len(run.steps)  # requests are served in order: all prompts are done
        if not run.last_decode and any(output.finished for output in outputs):
            run.last_decode = len(run.steps) - 2
    return run


@contextlib.contextmanager
def recorded() -> Iterator[list[Event]]:
    """Fills the list, when the block ends, with what the GPU did inside it, in order of the beginning."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    events: list[Event] = []
    profiler = profile(activities=[ProfilerActivity.CUDA], acc_events=True)  # else it warns that it forgets
    profiler.start()
    try:
        yield events
        torch.cuda.synchronize()
    finally:
        profiler.stop()
    results: Any = profiler.profiler
    for event in results.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA:
            events.append(Event(event.name(), event.start_ns(), event.start_ns() + event.duration_ns()))
    events.sort(key=lambda event: event.start)


def prepare() -> None:
    """Have the profiler attach before the first CUDA graph is captured, and stay: attaching again may drop records of
    graphs that are there already."""
    import torch

    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
    with recorded():
        torch.ones(1, device="cuda").add_(1)

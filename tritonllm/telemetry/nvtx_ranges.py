"""An engine's steps for NVIDIA's profilers: the capture range that Nsight Systems waits for, and NVTX ranges in it.

    nsys profile --capture-range=cudaProfilerApi --capture-range-end=repeat python my_script.py

A range begins where a step is planned and ends where it is launched, so that the kernels launched in it are the step's;
a mark tells where the host has its results. Nothing is there before the first one is asked for: ranges are made of the
engine's events, which are free when nobody listens.
"""

from typing import Any

import torch

from tritonllm.events import EngineReset, Event, StepFinished, StepLaunched, StepPlanned


class StepRanges:
    """Marks an engine's steps until it is closed; used in the engine's thread, of the process that has the GPU.

    Args:
        llm: an :class:`~tritonllm.LLM` or its engine.
        delay_steps: how many steps go by before the capture begins.
        max_steps: after how many steps it ends itself; 0: it does not.

    Attributes:
        note: why it has ended, once it has.
        steps: how many steps were marked.
    """

    def __init__(self, llm: Any, *, delay_steps: int = 0, max_steps: int = 0) -> None:
        self.note, self.steps = "", 0
        self._delay, self._most, self._open = delay_steps, max_steps, False
        self._unsubscribe = getattr(llm, "engine", llm).subscribe(self._take)
        if not delay_steps:
            torch.cuda.profiler.start()

    @property
    def open(self) -> bool:
        return not self.note

    def close(self, note: str = "it was closed") -> None:
        """End the capture; nothing if it has ended."""
        if self.note:
            return
        self.note = note
        self._unsubscribe()
        self._end_range()
        if not self._delay:
            torch.cuda.profiler.stop()

    def _take(self, event: Event) -> None:
        if self._delay:
            if isinstance(event, StepFinished):
                self._delay -= 1
                if not self._delay:
                    torch.cuda.profiler.start()
            return
        if isinstance(event, StepPlanned):
            self._end_range()
            kinds = [f"{sum(part.kind == kind for part in event.parts)} {kind}" for kind in _kinds(event)]
            torch.cuda.nvtx.range_push(f"step {event.step}: {', '.join(kinds)}, {event.num_tokens} tokens")
            self._open = True
        elif isinstance(event, StepLaunched | EngineReset):
            self._end_range()
        elif isinstance(event, StepFinished):
            torch.cuda.nvtx.mark(f"step {event.step} is done")
            self.steps += 1
            if self.steps == self._most:
                self.close(f"{self._most} steps were marked (max_iterations)")

    def _end_range(self) -> None:
        if self._open:
            torch.cuda.nvtx.range_pop()
        self._open = False


def _kinds(event: StepPlanned) -> list[str]:
    present = {part.kind for part in event.parts}
    return [kind for kind in ("decode", "verify", "prefill") if kind in present]

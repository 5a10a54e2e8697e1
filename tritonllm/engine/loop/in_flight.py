"""The steps that were launched and whose results are not taken in. No torch."""

from collections import deque
from typing import NamedTuple

from tritonllm.engine.data.plan import StepPlan
from tritonllm.engine.data.results import RunningStep


class Undrawn(NamedTuple):
    """A step that is to be drawn.

    Attributes:
        plan: the plan of the step.
        behind: how many steps were launched after it.
    """

    plan: StepPlan
    behind: int


class InFlight:
    """The steps that were launched and whose results were not taken in, oldest first.

    A step is launched with its draw, or, if the host has a say in its tokens or there are several stages, without. A
    pipeline of S stages draws a step when S - 1 later ones were launched, or when there is nothing else to do. The
    results that its requests' last tokens come from are in by then, for those were drawn before it was launched.

    Args:
        stages: how many stages the pipeline has; 1 without one.
    """

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._steps: deque[tuple[StepPlan, RunningStep | None]] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, plan: StepPlan, running: RunningStep | None) -> None:
        """A step was launched; without its draw it is not running to its end."""
        self._steps.append((plan, running))

    def clear(self) -> None:
        self._steps.clear()

    def due(self, idle: bool) -> Undrawn | None:
        """The step to draw now.

        Args:
            idle: whether there was nothing to launch.
        """
        place = next((place for place, (_, running) in enumerate(self._steps) if running is None), None)
        if place is None:
            return None
        behind = len(self._steps) - 1 - place
        # One stage draws late steps only, and those when the results of all steps before are in.
        waited = behind >= self._stages - 1 if self._stages > 1 else place == 0
        return Undrawn(self._steps[place][0], behind) if waited or (idle and place == 0) else None

    def drawn(self, running: RunningStep) -> None:
        """The step that was due is drawn."""
        place = next(place for place, (_, other) in enumerate(self._steps) if other is None)
        self._steps[place] = self._steps[place][0], running

    def pop(self) -> tuple[StepPlan, RunningStep]:
        """Remove and return the oldest step, which is drawn."""
        plan, running = self._steps.popleft()
        assert running is not None  # it was due before
        return plan, running

"""Takes events in the engine's thread, and hands them on to whoever looks, in another. The engine waits here where a
person asks it to."""

import threading
import time
from collections import deque
from typing import Any

from tritonllm.events import Event, StepPlanned
from tritonllm.telemetry.activity_state import State
from tritonllm.telemetry.snapshot import Snapshot, View

MOST_WAITING = 1000  # events that are kept for the next look; beyond, the engine's thread does its part
SPEEDS = (0.0, 50.0, 20.0, 10.0, 5.0, 2.0, 1.0)  # steps a second; 0: as fast as the engine is


class Gate:
    """Lets steps through: all, one at a time, or some a second. One thread passes, others turn the keys.

    Args:
        speed: steps a second; 0: as fast as they come.
    """

    def __init__(self, speed: float = 0.0) -> None:
        self._changed = threading.Condition()
        self._paused, self._closed, self._permits = False, False, 0
        self.speed = speed
        self._next = 0.0

    @property
    def is_paused(self) -> bool:
        return self._paused

    @property
    def is_closed(self) -> bool:
        return self._closed

    def turn(self) -> None:
        """Pause, or go on."""
        with self._changed:
            self._paused, self._permits = not self._paused, 0
            self._changed.notify_all()

    def let_one(self) -> None:
        """Pause, and let one step through."""
        with self._changed:
            self._paused, self._permits = True, self._permits + 1
            self._changed.notify_all()

    def change_speed(self, by: int) -> None:
        """Change to the next faster (-1) or slower (1) of the speeds there are."""
        nearest = min(range(len(SPEEDS)), key=lambda at: abs(SPEEDS[at] - self.speed))
        with self._changed:
            self.speed = SPEEDS[min(max(nearest + by, 0), len(SPEEDS) - 1)]
            self._next = 0.0
            self._changed.notify_all()

    def close(self) -> None:
        """Let everything through from now on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait until the next step may go."""
        if self._closed or not (self._paused or self.speed):
            return
        with self._changed:
            while not self._closed and not self._permits:
                now = time.monotonic()
                if self._paused:
                    self._changed.wait()
                elif self.speed and now < self._next:
                    self._changed.wait(self._next - now)
                else:
                    break
            self._permits = max(0, self._permits - 1)
            if self.speed:
                self._next = max(self._next, time.monotonic() - 1 / self.speed) + 1 / self.speed


class ActivityRecorder:
    """A sink of events that costs the engine's thread next to nothing: they wait until somebody looks.

    Args:
        engine: an :class:`~tritonllm.engine.loop.engine.LLMEngine`; it is followed from now on.
        gate: what each step waits for, if anything.
    """

    def __init__(self, engine: Any, gate: Gate | None = None) -> None:
        self._waiting: deque[Event] = deque()
        self._folding = threading.Lock()
        self._gate = gate
        self._state = State(engine.present())
        self.stop = engine.subscribe(self)

    def __call__(self, event: Event) -> None:
        self._waiting.append(event)
        if len(self._waiting) > MOST_WAITING:
            self._fold()
        if self._gate is not None and isinstance(event, StepPlanned):
            self._gate.wait()

    def _fold(self) -> None:
        with self._folding:
            for _ in range(len(self._waiting)):
                self._state.follow(self._waiting.popleft())

    def look(self, view: View) -> Snapshot:
        self._fold()
        with self._folding:
            return self._state.look(view, time.monotonic())

"""Circuit breaking: a backend that fails again and again is left alone for a while.

Nygard, "Release It!" (2007). Closed: requests go through; ``failure_threshold`` failures in a row open it. Open: none
goes through until a backoff has passed. Half open: one request is let through at a time; its success closes the
circuit, its failure opens it for twice as long. The backoff has jitter, so that several routers do not try at once.
"""

from collections.abc import Callable
from typing import Literal, Protocol

State = Literal["closed", "open", "half-open"]


class Settings(Protocol):
    """What of a :class:`RouterConfig` matters here."""

    @property
    def failure_threshold(self) -> int: ...
    @property
    def backoff_seconds(self) -> float: ...
    @property
    def max_backoff_seconds(self) -> float: ...


class Breaker:
    """A circuit breaker: keeps requests from a backend that has failed several in a row.

    Args:
        settings: threshold and backoff; may be replaced at any time.
        clock: seconds that never go back.
        chance: a random number from 0 to 1.
    """

    def __init__(self, settings: Settings, clock: Callable[[], float], chance: Callable[[], float]) -> None:
        self.settings = settings
        self._clock, self._chance = clock, chance
        self._generation = 0  # of the state: what was let through before it changed no longer counts
        self._failures = 0  # in a row, while closed
        self._openings = 0  # since it was last closed
        self._until: float | None = None  # while open: when it becomes half open
        self._trial = False  # while half open: a request is on its way

    @property
    def state(self) -> State:
        if self._until is None:
            return "closed"
        return "open" if self._clock() < self._until else "half-open"

    @property
    def is_closed(self) -> bool:
        return self._until is None

    @property
    def seconds_left(self) -> float:
        """The seconds until a request may be tried; 0 if one may now."""
        return 0.0 if self._until is None else max(0.0, self._until - self._clock())

    def allows(self) -> bool:
        """Whether a request may go through now."""
        return self.state == "closed" or (self.state == "half-open" and not self._trial)

    def begin(self) -> int:
        """Let a request through. What comes of it is told with the number that this returns, once."""
        if self.state == "half-open":
            self._trial = True
        return self._generation

    def answered(self, number: int) -> None:
        """An answer has begun: enough to close the circuit, for a stream may be long, but no success before its end.
        (Of a backend that breaks off each answer the failures would never be in a row.)"""
        if self._until is not None:
            self.succeeded(number)

    def succeeded(self, number: int) -> None:
        """An answer has come whole."""
        if number != self._generation:
            return
        self._failures = 0
        if self._until is not None:
            self._openings = 0
            self._until, self._trial = None, False
            self._generation += 1

    def failed(self, number: int) -> bool:
        """Whether this failure opened the circuit."""
        if number != self._generation:
            return False
        if self._until is None:
            self._failures += 1
            if self._failures < self.settings.failure_threshold:
                return False
        self._open()
        return True

    def forgotten(self, number: int) -> None:
        """The request ended for a reason that says nothing about the backend, such as a client that left."""
        if number == self._generation:
            self._trial = False

    def _open(self) -> None:
        longest = min(self.settings.backoff_seconds * 2**self._openings, self.settings.max_backoff_seconds)
        self._until = self._clock() + longest * (0.5 + 0.5 * self._chance())
        self._openings = min(self._openings + 1, 60)  # 2**60 seconds are enough, and no float overflows
        self._failures, self._trial = 0, False
        self._generation += 1

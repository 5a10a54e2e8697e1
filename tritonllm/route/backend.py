"""A backend as the router knows it: whether it can be used, and how much it does."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tritonllm.route.breaker import Breaker
from tritonllm.route.config import BackendConfig, RouterConfig

MOST_PAUSE = 60.0  # seconds that a backend can keep requests away with Retry-After


class Backend:
    """A backend, with what the router knows of its state.

    Args:
        config: where the backend is.
        settings: the settings of the router; may be replaced at any time (:meth:`apply`).
        clock: seconds that never go back.
        chance: a random number from 0 to 1.

    Attributes:
        label: its name in logs and metrics.
        told: the name that clients read; it holds no address, also where the backend has no name.
        hashed: its name in the hash that places prompts.
    """

    def __init__(
        self, config: BackendConfig, settings: RouterConfig, clock: Callable[[], float], chance: Callable[[], float]
    ) -> None:
        self.config = config
        self.breaker = Breaker(settings, clock, chance)
        self.in_flight = 0
        self.tokens = 0  # in flight, estimated
        self.draining = False  # no longer in the configuration
        self.alive: bool | None = None  # what probes say; None before the first one has ended
        # Entries of /v1/models by name, None while they are not known. A server that does not tell serves any model.
        self.models: dict[str, dict[str, Any]] | None = None
        self.any_model = False
        self.last_error: dict[str, Any] | None = None
        self._clock = clock
        self._paused_until = 0.0
        self.apply(config, settings)

    def apply(self, config: BackendConfig, settings: RouterConfig) -> None:
        """Take a new configuration of the same name and URL."""
        if config.models:
            entry = {"object": "model", "created": 0, "owned_by": config.name or "router"}
            self.models, self.any_model = {name: {"id": name, **entry} for name in config.models}, False
        elif self.config.models:  # they were listed, and no longer are
            self.models = None
        self.config = config
        self.label = config.label
        self.told = f"the backend {config.name}" if config.name else "a backend"
        self.hashed = self.label.encode()
        self.breaker.settings = settings

    @property
    def usable(self) -> bool:
        if self.alive and not self.draining and self.breaker.is_closed and not self._paused_until:
            return True  # as nearly always: it is asked of all backends for each request
        return self.why_not is None

    @property
    def why_not(self) -> str | None:
        """Why no request can go there now."""
        if self.draining:
            return "draining"
        if not self.alive:
            return "down" if self.alive is False else "not probed yet"
        if not self.breaker.allows():
            return "circuit open"
        return "paused" if self.seconds_paused else None

    @property
    def seconds_paused(self) -> float:
        return max(0.0, self._paused_until - self._clock())

    @property
    def seconds_away(self) -> float:
        """The seconds until the backend may be usable again, as far as that is known."""
        return max(self.seconds_paused, self.breaker.seconds_left)

    def pause(self, seconds: float) -> None:
        """Send nothing for a while: it asked for that."""
        self._paused_until = max(self._paused_until, self._clock() + min(seconds, MOST_PAUSE))

    def serves(self, model: str | None) -> bool:
        return model is None or self.any_model or (self.models is not None and model in self.models)

    def note(self, error: str) -> None:
        self.last_error = {"message": error, "time": round(time.time(), 3)}

    @contextmanager
    def carrying(self, tokens: int) -> Iterator[None]:
        self.in_flight += 1
        self.tokens += tokens
        try:
            yield
        finally:
            self.in_flight -= 1
            self.tokens -= tokens

    def status(self) -> dict[str, Any]:
        return {
            "name": self.label,
            "url": self.config.base,
            "usable": self.usable,
            "why_not": self.why_not,
            "alive": self.alive,
            "circuit": self.breaker.state,
            "draining": self.draining,
            "seconds_away": round(self.seconds_away, 3),
            "in_flight": self.in_flight,
            "tokens_in_flight": self.tokens,
            "models": None if self.any_model or self.models is None else sorted(self.models),
            "last_error": self.last_error,
        }

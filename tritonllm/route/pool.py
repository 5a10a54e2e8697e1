"""The backends, and which of them gets a request."""

import random
import time
from collections.abc import Callable, Iterable
from typing import Any

from tritonllm.http.ask import Ask
from tritonllm.http.errors import RouteError
from tritonllm.http.hashing import placed
from tritonllm.route.backend import Backend
from tritonllm.route.config import RouterConfig


class Pool:
    """The backends of a router.

    Args:
        config: the configuration of the router.
        clock: seconds that never go back.
        chance: a random number from 0 to 1.
    """

    def __init__(
        self,
        config: RouterConfig,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.config = config
        self.backends: dict[str, Backend] = {}
        self._leaving: list[Backend] = []
        self._clock, self._chance = clock, chance
        # Not from 0: routers that start together would choose in step. Of 64 simulated ones in front of 64 GPUs, with
        # least-tokens, 82% of the requests then missed their limits instead of 25% (python -m bench.cluster).
        self._turn = int(chance() * (1 << 16))
        self.apply(config, self.missing(config))

    def missing(self, config: RouterConfig) -> list[Backend]:
        """New backends, for those of a configuration that are not there with this name and URL."""
        known = {(backend.label, backend.config.base) for backend in self.backends.values()}
        new = [wanted for wanted in config.backends if (wanted.label, wanted.base) not in known]
        return [Backend(wanted, config, self._clock, self._chance) for wanted in new]

    def apply(self, config: RouterConfig, new: Iterable[Backend]) -> None:
        """Take a new configuration. A backend that keeps name and URL keeps its state; one that is gone drains.

        Args:
            new: what :meth:`missing` gave, by now asked whether they live.
        """
        made = {backend.label: backend for backend in new}
        before, self.backends = self.backends, {}
        for wanted in config.backends:
            if wanted.label in made:
                self.backends[wanted.label] = made[wanted.label]
            else:
                self.backends[wanted.label] = before.pop(wanted.label)
                self.backends[wanted.label].apply(wanted, config)
        for gone in before.values():
            gone.draining = True
            self._leaving.append(gone)
        self.config = config

    @property
    def all(self) -> list[Backend]:
        """All backends of the configuration, and those that left it and still have requests."""
        self._leaving = [backend for backend in self._leaving if backend.in_flight]
        return [*self.backends.values(), *self._leaving]

    @property
    def answering(self) -> list[Backend]:
        """The backends that clients' requests go to."""
        return [backend for backend in self.backends.values() if backend.config.role != "prefill"]

    @property
    def has_prefill(self) -> bool:
        return any(backend.config.role == "prefill" for backend in self.backends.values())

    @property
    def usable(self) -> bool:
        return any(backend.usable for backend in self.answering)

    def models(self) -> dict[str, dict[str, Any]]:
        """Entries of all models, by name; of one that several backends have, that of the first."""
        found: dict[str, dict[str, Any]] = {}
        for backend in self.answering:
            for name, entry in (backend.models or {}).items():
                found.setdefault(name, entry)
        return found

    def choose(self, ask: Ask, tried: Iterable[Backend] = (), *, prefill: bool = False) -> Backend:
        """A backend that serves the model and can be used, one that has not been tried if there is one.

        Args:
            prefill: one of those that compute prompts for the others.

        Raises:
            RouteError: no backend serves the model (404), or none that does can be used now (503).
        """
        backends = self.answering
        if prefill:
            backends = [backend for backend in self.backends.values() if backend.config.role == "prefill"]
        serving = self._serving(ask.model, backends)
        usable = [backend for backend in serving if backend.usable]
        if not usable:
            away = min(backend.seconds_away for backend in serving)
            why = ", ".join(f"{backend.told} ({backend.why_not})" for backend in serving)
            what = f"the model {ask.model!r}" if ask.model else "the request"
            raise RouteError(503, f"no backend for {what} can be used: {why}", "no_backend", away)
        tried = set(tried)
        return self._one_of([backend for backend in usable if backend not in tried] or usable, ask)

    def _serving(self, model: str | None, backends: list[Backend]) -> list[Backend]:
        found = [backend for backend in backends if backend.serves(model)]
        if found:
            return found
        unknown = [backend for backend in backends if backend.models is None]
        if unknown:  # it may be one of theirs: they have not told yet
            who = ", ".join(backend.told for backend in unknown)
            raise RouteError(503, f"what may serve the model {model!r} has not answered: {who}", "no_backend")
        known = ", ".join(self.models()) or "none"
        message = f"model {model!r} is not served here; there is {known}"  # as the server says it
        raise RouteError(404, message, "model_not_found", param="model")

    def _one_of(self, backends: list[Backend], ask: Ask) -> Backend:
        self._turn += 1
        if self.config.policy == "round-robin":
            return backends[self._turn % len(backends)]
        if self.config.policy == "prefix" and ask.key:
            names, loads = [backend.hashed for backend in backends], [backend.tokens for backend in backends]
            bounds = self.config.balance_epsilon, self.config.balance_min_tokens
            return backends[placed(ask.key, names, loads, *bounds)]
        turn = self._turn % len(backends)  # those that are equal take turns
        return min([*backends[turn:], *backends[:turn]], key=lambda backend: (backend.tokens, backend.in_flight))

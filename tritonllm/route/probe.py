"""Active health: ask each backend again and again whether it lives, and what it serves."""

import asyncio
import json
import logging
import random
from collections.abc import Callable, Iterable
from typing import Any

import aiohttp
from yarl import URL

from tritonllm.route.backend import Backend
from tritonllm.route.cause import cause_of
from tritonllm.route.config import RouterConfig
from tritonllm.route.pool import Pool
from tritonllm.route.upstream import read_rest

logger = logging.getLogger(__name__)
MOST_BYTES = 4 << 20  # of an answer to a probe, or of a list of models
MODELS_SECONDS = 30.0  # between two looks at /v1/models of a backend that lives


class Streak:
    """What the last probes of a backend said, and when it was last asked for its models."""

    def __init__(self) -> None:
        self.good = self.bad = 0  # in a row
        self.models_at = float("-inf")

    def after(self, was: bool | None, good: bool, config: RouterConfig) -> bool:
        """Whether the backend lives, after one more probe; the first one decides alone.

        Args:
            was: whether it lived before; ``None``: nobody knows.
            good: what the probe found.
        """
        self.good, self.bad = (self.good + 1, 0) if good else (0, self.bad + 1)
        if was is None:
            return good
        return self.bad < config.unhealthy_threshold if was else self.good >= config.healthy_threshold


class Prober:
    """Probes backends, and notes which are healthy.

    Args:
        pool: the pool whose backends are probed.
        session: the session to ask with.
        on_down: called with a backend that has just been found dead.
    """

    def __init__(self, pool: Pool, session: aiohttp.ClientSession, on_down: Callable[[Backend], None]) -> None:
        self._pool, self._session, self._on_down = pool, session, on_down
        self._tasks: dict[Backend, asyncio.Task[None]] = {}

    async def ask_once(self, backends: Iterable[Backend]) -> None:
        """Ask each, and wait for what they say."""
        await asyncio.gather(*(self._ask(backend, Streak()) for backend in backends))

    def follow(self) -> None:
        """Ask the backends of the pool from now on, and no others."""
        now = list(self._pool.backends.values())
        for backend in [backend for backend in self._tasks if backend not in now]:
            self._tasks.pop(backend).cancel()
        for backend in now:
            if backend not in self._tasks:
                self._tasks[backend] = asyncio.create_task(self._watch(backend))

    async def stop(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, backend: Backend) -> None:
        streak = Streak()
        while True:
            await asyncio.sleep(self._pool.config.health_interval * random.uniform(0.8, 1.2))  # so that they spread
            await self._ask(backend, streak)

    async def _ask(self, backend: Backend, streak: Streak) -> None:
        error = await self._health(backend)
        was, backend.alive = backend.alive, streak.after(backend.alive, error is None, self._pool.config)
        if error is not None:
            backend.note(f"probe: {error}")
        now = asyncio.get_running_loop().time()
        due = backend.models is None or was is not True or now - streak.models_at >= MODELS_SECONDS
        if error is None and not backend.config.models and due:
            streak.models_at = now
            await self._read_models(backend)
        if was != backend.alive:
            if backend.alive:
                logger.info("backend %s is alive", backend.label)
            else:
                logger.warning("backend %s is down: %s", backend.label, error)
                self._on_down(backend)

    async def _get(self, backend: Backend, path: str) -> tuple[int, bytes]:
        headers = {} if backend.config.key is None else {"Authorization": f"Bearer {backend.config.key}"}
        url = URL(backend.config.base + path, encoded=True)
        async with asyncio.timeout(self._pool.config.health_timeout):
            async with self._session.get(url, headers=headers, allow_redirects=False) as response:
                return response.status, await read_rest(response, b"", MOST_BYTES)

    async def _health(self, backend: Backend) -> str | None:
        """What is wrong with it; ``None`` if nothing is."""
        path = backend.config.health_path
        try:
            status, _ = await self._get(backend, path)
        except TimeoutError:
            return f"{path} took more than {self._pool.config.health_timeout:g} seconds"
        except (aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: of what cannot be sent
            return cause_of(error).logged
        return None if 200 <= status < 300 else f"{path} has status {status}"

    async def _read_models(self, backend: Backend) -> None:
        try:
            status, body = await self._get(backend, "/v1/models")
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
            return  # the next probe will tell
        found = _entries(body) if status == 200 else None
        if found is not None:
            backend.models, backend.any_model = found, False
        elif status < 500 and not backend.models and not backend.any_model:
            backend.models, backend.any_model = {}, True
            logger.warning("backend %s does not tell its models (status %d): it may get any", backend.label, status)


def _entries(body: bytes) -> dict[str, dict[str, Any]] | None:
    """Models by name, out of an answer of ``/v1/models``; ``None`` if it is none."""
    try:
        return {entry["id"]: entry for entry in json.loads(body)["data"] if isinstance(entry["id"], str)}
    except (ValueError, KeyError, TypeError):
        return None

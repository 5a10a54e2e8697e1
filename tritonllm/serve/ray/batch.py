"""``tritonllm batch --ray N``: the requests of a file spread over N engines on a cluster of Ray.

Each engine is an actor (with a process of its own for the steps, as under ``tritonllm serve``), and gets a line as soon
as it has room for one. Answers come back one by one, so the file holds every finished one, whatever happens. Lines of
an actor that has died go to the others, and another one takes its place.
"""

import logging
import os
from collections import deque
from collections.abc import Callable
from typing import IO, Any, NamedTuple

from tritonllm.config.engine import EngineConfig
from tritonllm.dist.ray_cluster import join_cluster
from tritonllm.engine.start.resolve import resolve_device
from tritonllm.serve.api.app import make_app
from tritonllm.serve.api.config import ServerConfig
from tritonllm.serve.engines.async_llm import AsyncLLM
from tritonllm.serve.engines.engine_client import EngineDeadError
from tritonllm.serve.processes.batch import Line, answer

logger = logging.getLogger(__name__)
TRIES = 3  # for a line whose actor dies: it may be the line that kills it
RESTARTS = 3  # of each actor


class BatchEngine:
    """An actor. Arguments as of :func:`run_ray_batch`."""

    def __init__(self, engine: EngineConfig, config: ServerConfig, at_once: int) -> None:
        self._llm = AsyncLLM(engine, max_queue=max(4 * at_once, 1024))
        self._app = make_app(self._llm, config)

    async def ready(self) -> None:
        self._llm.attach()

    async def answer(self, line: Line) -> tuple[bytes, bool]:
        """See :func:`tritonllm.serve.processes.batch.answer`."""
        self._llm.attach()
        try:
            found = await answer(self._app, line)
            await self._llm.check_health()
        except EngineDeadError:
            os._exit(1)  # the driver starts another one, and asks that
        return found


def run_ray_batch(
    engine: EngineConfig, config: ServerConfig, lines: list[Line], file: IO[bytes], at_once: int, engines: int
) -> int:
    """Answer the lines, ``at_once`` of them together by each engine, and write the answers in the order of their ends.

    Returns:
        How many answers are errors.

    Raises:
        ValueError: Ray is not installed, or its cluster has too few GPUs.
        RuntimeError: an engine does not start, or a line's engine has died three times; what was finished is in the
            file.
    """
    ray = join_cluster("--ray")
    resources = _resources(engine)
    _check_room(ray, resources, engines)
    kind = ray.remote(BatchEngine).options(
        num_cpus=resources["CPU"],
        num_gpus=resources["GPU"],
        max_concurrency=at_once + 1,
        max_restarts=0,
        scheduling_strategy="SPREAD",
    )
    fleet = Fleet(ray, lambda: kind.remote(engine, config, at_once), engines, at_once)
    try:
        return fleet.run(lines, file)
    finally:
        fleet.end()


class _Asked(NamedTuple):
    """A line on its way: to which actor, after how many starts of it, and the how manieth try this is."""

    line: Line
    number: int
    start: int
    tries: int


class Fleet:
    """Engines of a cluster, and lines on their way to them.

    Args:
        ray: the package ``ray``.
        make: starts an actor.
        count: how many actors there are.
        at_once: how many lines each of them has at once.
    """

    def __init__(self, ray: Any, make: Callable[[], Any], count: int, at_once: int) -> None:
        self._ray, self._make, self._at_once = ray, make, at_once
        self._actors = [make() for _ in range(count)]
        self._starts = [1] * count
        self._starting = {actor.ready.remote(): number for number, actor in enumerate(self._actors)}
        self._load: dict[int, int] = {}  # of those that are ready
        self._asked: dict[Any, _Asked] = {}  # by the answer to come

    def run(self, lines: list[Line], file: IO[bytes]) -> int:
        waiting, failed = deque((line, 0) for line in lines), 0
        while waiting or self._asked:
            self._ask(waiting)
            (ended,), _ = self._ray.wait([*self._asked, *self._starting], num_returns=1)
            if ended in self._starting:
                self._ready(ended)
                continue
            line, number, start, tries = self._asked.pop(ended)
            is_of_now = number in self._load and start == self._starts[number]
            try:
                data, wrong = self._ray.get(ended)
            except self._ray.exceptions.RayError as error:
                reason = _reason(error)
                if tries >= TRIES:
                    raise RuntimeError(f"{line.custom_id!r} had no answer in {TRIES} tries: {reason}") from error
                waiting.append((line, tries))
                if is_of_now:  # the first to tell
                    self._start_again(number, reason)
                continue
            if is_of_now:
                self._load[number] -= 1
            file.write(data)
            file.flush()
            failed += wrong
        return failed

    def _ask(self, waiting: deque[tuple[Line, int]]) -> None:
        """Send lines to who has the fewest, as long as somebody has room."""
        while waiting and self._load:
            number = min(self._load, key=lambda number: self._load[number])
            if self._load[number] >= self._at_once:
                return
            line, tries = waiting.popleft()
            answer_to_come = self._actors[number].answer.remote(line)
            self._asked[answer_to_come] = _Asked(line, number, self._starts[number], tries + 1)
            self._load[number] += 1

    def _ready(self, ended: Any) -> None:
        number = self._starting.pop(ended)
        try:
            self._ray.get(ended)
        except self._ray.exceptions.RayError as error:
            raise RuntimeError(f"an engine did not start: {_reason(error)}") from error
        self._load[number] = 0

    def _start_again(self, number: int, reason: str) -> None:
        """Lines that were on their way to the one before are answered or fail; they do not count any more."""
        del self._load[number]
        if self._starts[number] > RESTARTS:
            raise RuntimeError(f"engine {number} has died {self._starts[number]} times: {reason}")
        logger.warning("engine %d is started again: %s", number, reason)
        self._starts[number] += 1
        self._actors[number] = self._make()
        self._starting[self._actors[number].ready.remote()] = number

    def end(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)


def _resources(engine: EngineConfig) -> dict[str, int]:
    """The resources of Ray that one engine takes, by name."""
    ranks = engine.parallel.world_size
    return {"CPU": ranks, "GPU": ranks if resolve_device(engine.model.device).type == "cuda" else 0}


def _check_room(ray: Any, resources: dict[str, int], engines: int) -> None:
    has = ray.cluster_resources()
    for name, each in resources.items():
        if has.get(name, 0) < each * engines:
            raise ValueError(
                f"--ray {engines} needs {each * engines} {name}s, and the cluster has {has.get(name, 0):g}: lower it"
            )


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if "creation task" in lines[0] else lines[0]

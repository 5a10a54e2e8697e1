"""The search: for each problem, the fastest configuration whose result is right.

Every candidate compiles in one of several processes without a GPU, then one process with the GPU checks and times it,
alone. The few fastest are checked and timed again with more care, and the default stays unless it is beaten by more
than the noise of a measurement.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from autotune.ops import Tunable
from autotune.worker import Failed
from tritonllm.kernels.runtime import tuning

FINALISTS = 4
MIN_GAIN = 0.02  # two runs of one configuration differ by about as much
COMPILE_SECONDS = 60.0
MEASURE_SECONDS = 60.0  # the first measurement of a problem makes its inputs and its reference


Tuned = Sequence[tuple[tuning.Key, tuning.Config]]


class Caller(Protocol):
    """A worker, as the search sees it."""

    def call(self, method: str, timeout: float, **args: Any) -> Any: ...

    def close(self) -> None: ...


class Compilers:
    """Worker processes that compile candidates in parallel, first come, first served."""

    def __init__(self, count: int, make: Callable[[], Caller]) -> None:
        self._pool = ThreadPoolExecutor(count)
        self._idle = [make() for _ in range(count)]  # as many as threads, so one is idle whenever a thread asks
        self._workers = list(self._idle)

    def submit(self, method: str, **args: Any) -> "Future[Any]":
        return self._pool.submit(self._call, method, args)

    def _call(self, method: str, args: dict[str, Any]) -> Any:
        worker = self._idle.pop()
        try:
            return worker.call(method, COMPILE_SECONDS, **args)
        finally:
            self._idle.append(worker)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.close()


@dataclass
class Result:
    """What the search found for one key."""

    config: tuning.Config
    us: float
    default_us: float
    tried: int = 0
    failed: list[str] = field(default_factory=list)
    cut_short: bool = False  # the time was up before every candidate had its turn


def candidates(tunable: Tunable, key: tuning.Key, tuned: Tuned = ()) -> list[tuning.Config]:
    """The default, then what the last search found, then the rest of the space in an order that is random but always
    the same: a search that is cut short has seen a fair sample, and does not lose what a longer one found."""
    default = tunable.default(**key)
    others = [config for config in tunable.space(**key) if config != default]
    random.Random(0).shuffle(others)
    before = [config for known, config in tuned if known == key]
    return [default, *sorted(others, key=lambda config: config not in before)]


@dataclass
class Task:
    """One key of one problem, with the compilations that were asked for: the default's first."""

    tunable: Tunable
    problem: int
    key: dict[str, int | str]
    compiled: list[tuple[tuning.Config, "Future[None]"]]

    @property
    def name(self) -> str:
        return f"{self.tunable.op}: {self.tunable.problems[self.problem].name}"


def prepare(
    tunables: Sequence[Tunable],
    compilers: Compilers,
    arch: int,
    shared_limit: int,
    tuned: Callable[[str], Tuned] = lambda op: (),
) -> tuple[list[Task], list[str]]:
    """Ask for the compilation of every candidate of every problem; a key that comes up twice is searched once.

    Args:
        tuned: what the table of an operation names for its keys today.

    Returns:
        the tasks, and what went wrong with the problems that cannot even be described.
    """
    described = [
        (tunable, problem, compilers.submit("describe", op=tunable.op, problem=problem, arch=arch))
        for tunable in tunables
        for problem in range(len(tunable.problems))
    ]
    tasks: list[Task] = []
    errors = []
    for tunable, problem, keys in described:
        try:
            new = [key for key in keys.result() if not any(t.tunable is tunable and t.key == key for t in tasks)]
        except Failed as reason:
            errors.append(f"{tunable.op}: {tunable.problems[problem].name}: {reason}")
            continue
        before = tuned(tunable.op)
        for key in new:
            args = {"op": tunable.op, "problem": problem, "key": key, "arch": arch, "shared_limit": shared_limit}
            compiled = [(c, compilers.submit("compile", config=c, **args)) for c in candidates(tunable, key, before)]
            tasks.append(Task(tunable, problem, key, compiled))
    return tasks, errors


def search(task: Task, gpu: Caller, seconds: float) -> Result:
    """Measure a task's candidates for so long after the default's turn, which waits for inputs and reference (the first
    one of a process for all of CUDA, too).

    Raises:
        Failed: the default configuration does not compile, gives a wrong result, or breaks the process.
    """
    times: list[tuple[float, tuning.Config]] = []
    failed: list[str] = []

    def measure(config: tuning.Config, careful: bool) -> float:
        args = {"op": task.tunable.op, "problem": task.problem, "key": task.key, "config": config}
        us: float = gpu.call("measure", MEASURE_SECONDS, careful=careful, **args)
        return us

    default, compiled = task.compiled[0]
    compiled.result()
    measure(default, careful=False)
    until = time.monotonic() + seconds
    for config, compiled in task.compiled[1:]:
        if time.monotonic() >= until:
            break
        try:
            compiled.result()
            times.append((measure(config, careful=False), config))
        except Failed as reason:
            failed.append(f"{config}: {reason}")
    tried = 1 + len(times) + len(failed)
    default_us = measure(default, careful=True)
    best, us = default, default_us
    for _, config in sorted(times, key=lambda timed: timed[0])[:FINALISTS]:
        try:
            again = measure(config, careful=True)
        except Failed as reason:  # right at first, but not always
            failed.append(f"{config}: {reason}")
            continue
        if again < min(us, (1 - MIN_GAIN) * default_us):
            best, us = config, again
    return Result(best, us, default_us, tried, failed, cut_short=tried < len(task.compiled))


def tune(tasks: Sequence[Task], gpu: Caller, until: float) -> Iterator[tuple[Task, Result | Failed]]:
    """Search every task before the time ``until``, each taking a fair share of what is left; yields as they end."""
    for index, task in enumerate(tasks):
        now = time.monotonic()
        try:
            yield task, search(task, gpu, max(0.0, until - now) / (len(tasks) - index))
        except Failed as reason:
            yield task, reason
        finally:
            for _, compiled in task.compiled:
                compiled.cancel()  # those that nobody waits for any more

"""``--restart N``: an engine whose process has died is started anew, while the others and the HTTP server go on."""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Protocol

from tritonllm.config.engine import EngineConfig
from tritonllm.serve.engines.engine_client import EngineClient, EngineLink, EngineProcess
from tritonllm.serve.engines.profiling import ProfilerConfig

logger = logging.getLogger(__name__)
WINDOW = 600.0  # seconds in which restarts are counted: an engine that dies again and again is better left to a person
END_SECONDS = 10.0  # a killed process has ended, and its files are removed, long before
STARTING = "the engine has died, and is started again"


class Starting(Protocol):
    """An engine on its way."""

    def link(self) -> EngineLink:
        """Waits until it is ready. Raises what :class:`EngineClient` raises."""

    def kill(self) -> None:
        """End it, from any thread."""


class StartingProcess:
    """As :class:`EngineProcess`, which begins at once."""

    def __init__(
        self,
        config: EngineConfig,
        log_level: int | None,
        devices: Sequence[int] | None,
        profiler: ProfilerConfig | None,
        replica: int | None = None,
    ) -> None:
        self._config = config
        self._process = EngineProcess(config, log_level, devices, profiler, replica)

    def link(self) -> EngineLink:
        return EngineClient(self._config, process=self._process)

    def kill(self) -> None:
        self._process.process.kill()  # who waits for it sees that it has ended, and removes what it has left


class Restarts:
    """Starts engines anew, and no more than it may.

    Args:
        most: how many starts there may be within :data:`WINDOW` seconds, of all engines together.
        start: begins to start the engine of this number.
        clock: returns the time in seconds.
    """

    def __init__(self, most: int, start: Callable[[int], Starting], clock: Callable[[], float] = monotonic) -> None:
        self._most, self._start, self._clock = most, start, clock
        self._times: deque[float] = deque()
        self._under_way: dict[int, Starting] = {}
        self._waiting: dict[int, threading.Thread] = {}  # for the latest start of each

    @property
    def under_way(self) -> bool:
        return bool(self._under_way)

    def begin(self, number: int, then: Callable[[EngineLink | Exception], None]) -> bool:
        """Start an engine anew, if that is still allowed; never waits.

        Args:
            then: is called in the running event loop with the link, or with why it did not start. It is not called
                after :meth:`stop`.
        """
        now = self._clock()
        while self._times and self._times[0] <= now - WINDOW:
            self._times.popleft()
        if len(self._times) >= self._most:
            if self._most:
                logger.error("not started again: that was done %d times within %g s", self._most, WINDOW)
            return False
        self._times.append(now)
        starting, loop = self._start(number), asyncio.get_running_loop()
        self._under_way[number] = starting

        def arrived(found: EngineLink | Exception) -> None:
            if self._under_way.get(number) is starting:
                del self._under_way[number]
                then(found)
            elif isinstance(found, EngineLink):
                found.close()

        def wait() -> None:
            found: EngineLink | Exception
            try:
                found = starting.link()
            except Exception as error:
                found = error
            try:
                loop.call_soon_threadsafe(arrived, found)
            except RuntimeError:  # the loop has ended meanwhile
                starting.kill()

        # A thread of its own: the end of an event loop waits for those of its pool, and a start takes long.
        self._waiting[number] = threading.Thread(target=wait, name=f"restart-{number}", daemon=True)
        self._waiting[number].start()
        return True

    def stop(self) -> None:
        """End what is under way, and start nothing any more; never waits. May be called again."""
        self._most = 0
        for number in list(self._under_way):
            self._under_way.pop(number).kill()

    def close(self) -> None:
        """:meth:`stop`, and wait for the threads, which remove what the killed processes have left: Python's end would
        break them off. May be called again."""
        self.stop()
        end = monotonic() + END_SECONDS
        for thread in self._waiting.values():
            thread.join(max(0.0, end - monotonic()))

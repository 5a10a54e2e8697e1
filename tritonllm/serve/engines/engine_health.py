"""Whether the engines behind an :class:`~tritonllm.serve.engines.async_llm.AsyncLLM` live."""

from tritonllm.engine.data.stats import EngineStats
from tritonllm.serve.engines.engine_client import EngineDeadError, EngineLink
from tritonllm.serve.engines.replicas import Replicas
from tritonllm.serve.engines.restarts import STARTING


class EngineHealth:
    """What the link to one engine or several tells of them."""

    _client: EngineLink | Replicas
    stats: EngineStats

    @property
    def errored(self) -> bool:
        """The engine process has died, and none will take its place."""
        return self._client.failure is not None

    @property
    def unavailable(self) -> EngineDeadError | None:
        """Why no request can be answered now; ``None`` if an engine lives."""
        if self.errored:
            return self.dead_error
        return None if any(self.replicas_living) else EngineDeadError(STARTING)

    @property
    def is_running(self) -> bool:
        return not self.errored

    @property
    def dead_error(self) -> EngineDeadError:
        return EngineDeadError(self._client.failure or "the engine runs")

    @property
    def engine_pid(self) -> int | None:
        return self._client.pid

    @property
    def replica_stats(self) -> list[EngineStats]:
        """Of each of the engines behind this; one, if ``data_parallel_size`` is 1."""
        return list(self._client.stats) if isinstance(self._client, Replicas) else [self.stats]

    @property
    def replica_restarts(self) -> list[int]:
        """How often each of these engines was started anew."""
        return list(self._client.restarted) if isinstance(self._client, Replicas) else [0]

    @property
    def replica_deaths(self) -> list[str]:
        """Which of these engines have died and why, the first one first."""
        if isinstance(self._client, Replicas):
            return list(self._client.deaths)
        return [] if self._client.failure is None else [self._client.failure]

    @property
    def replicas_living(self) -> list[bool]:
        """Which of these engines have not died."""
        return self._client.living if isinstance(self._client, Replicas) else [not self.errored]

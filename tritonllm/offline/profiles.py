"""Traces of the engine of an :class:`~tritonllm.LLM`, under vLLM's names (docs/teach.md)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tritonllm.engine.loop.engine import LLMEngine

if TYPE_CHECKING:
    from tritonllm.serve.engines.profiling import Profiles

NO_FOLDER = 'no traces are written: make the LLM with profiler_config={"torch_profiler_dir": "FOLDER"}'


class LLMProfiles:
    """Writes traces of the engine's steps and requests to the folder that ``profiler_config`` names.

    It is made before the engine, so that a bad value costs no start.

    Args:
        given: the ``profiler_config``; ``None``: no traces are written.
        device: the device of the engine that is to come.

    Raises:
        ValueError: a bad key or value, no folder can be made, or the profiler needs a GPU that is not there.
    """

    def __init__(self, given: Mapping[str, Any] | Any | None, device: str) -> None:
        self._profiles: Profiles | None = None
        self._config = None
        if given is None:
            return
        from tritonllm.serve.engines.profiling import ProfilerConfig

        self._config = ProfilerConfig.of(given)
        self._config.check_folder()
        self._config.prepare(device, 0)

    @property
    def wanted(self) -> bool:
        """There is a ``profiler_config``."""
        return self._config is not None

    def watch(self, engine: LLMEngine) -> None:
        """This is the engine whose traces are asked for."""
        from tritonllm.serve.engines.profiling import Profiles

        assert self._config is not None
        self._profiles = Profiles(engine, self._config)

    def start(self, prefix: str | None) -> str:
        """As :meth:`tritonllm.LLM.start_profile`."""
        return _file(self._of_engine().start_profile(prefix), "stop_profile")

    def stop(self) -> str:
        """As :meth:`tritonllm.LLM.stop_profile`."""
        return _file(self._of_engine().stop_profile(), "start_profile")

    def _of_engine(self) -> "Profiles":
        if self._profiles is None:
            raise ValueError(NO_FOLDER)
        return self._profiles


def _file(answer: Mapping[str, Any], instead: str) -> str:
    if "refused" in answer:
        why = answer["refused"].partition(":")[0]
        raise RuntimeError(f"{why}: call {instead} first")
    return str(answer.get("file", ""))

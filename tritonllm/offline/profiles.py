"""Traces of the engine of an :class:`~tritonllm.LLM`, under vLLM's names (docs/teach.md)."""

from collections.abc import Mapping
from typing import Any

from tritonllm.engine.loop.engine import LLMEngine

NO_FOLDER = 'no traces are written: make the LLM with profiler_config={"torch_profiler_dir": "FOLDER"}'


class ProfileMethods:
    """Writes traces of the engine's steps and requests to the folder that ``profiler_config`` names."""

    _profiles: Any = None  # serve.profiling.Profiles, where there is a profiler_config

    def _may_profile(self, given: Mapping[str, Any] | Any) -> None:
        """Read the configuration of traces, before the engine is there.

        Raises:
            ValueError: a bad key or value, or no folder can be made.
        """
        from tritonllm.serve.engines.profiling import ProfilerConfig

        self._profiler_config = ProfilerConfig.of(given)
        self._profiler_config.check_folder()
        if self._profiler_config.kernel_iterations:
            from tritonllm.telemetry.kernel_records import prepare

            prepare(0)

    def _profile(self, engine: LLMEngine) -> None:
        """This is the engine whose traces are asked for."""
        from tritonllm.serve.engines.profiling import Profiles

        self._profiles = Profiles(engine, self._profiler_config)

    def start_profile(self, profile_prefix: str | None = None) -> str:
        """Write a trace, from now to :meth:`stop_profile`.

        Args:
            profile_prefix: what the file's name begins with.

        Returns:
            The file; ``tritonllm trace FILE`` reads it.

        Raises:
            ValueError: the LLM was made without ``profiler_config``, or a bad prefix.
            RuntimeError: a trace is written already.
            OSError: the file cannot be made.
        """
        if self._profiles is None:
            raise ValueError(NO_FOLDER)
        return _file(self._profiles.start_profile(profile_prefix), "stop_profile")

    def stop_profile(self) -> str:
        """End the trace.

        Returns:
            The file.

        Raises:
            ValueError: the LLM was made without ``profiler_config``.
            RuntimeError: no trace is written.
            OSError: the file could not be written.
        """
        if self._profiles is None:
            raise ValueError(NO_FOLDER)
        return _file(self._profiles.stop_profile(), "start_profile")


def _file(answer: Mapping[str, Any], instead: str) -> str:
    if "refused" in answer:
        why = answer["refused"].partition(":")[0]
        raise RuntimeError(f"{why}: call {instead} first")
    return str(answer["file"])

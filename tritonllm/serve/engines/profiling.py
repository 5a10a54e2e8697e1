"""Traces of a server's engine, by request: ``/start_profile`` and ``/stop_profile``. Names are vLLM's.

The engine's process writes them (:mod:`tritonllm.telemetry.trace`), each to a file of its own in a folder that was
named when the server was started. Nothing of it is there before the first one is asked for.
"""

import dataclasses
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROFILERS = ("torch", "cuda")
METHODS = ("start_profile", "stop_profile")
# Of vLLM's keys those that have no effect here, with the values that ask for none.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "torch_profiler_with_stack": (False,),
    "torch_profiler_with_flops": (False,),
    "torch_profiler_record_shapes": (False,),
    "torch_profiler_with_memory": (False,),
    "torch_profiler_dump_cuda_time_total": (False, True),
    "ignore_frontend": (False, True),
}
MAX_PREFIX = 64  # characters


@dataclass(frozen=True, kw_only=True)
class ProfilerConfig:
    """How an engine may write traces, with vLLM's keys.

    Args:
        profiler: ``torch`` writes traces, whose kernels come from torch's profiler; ``cuda`` marks steps for NVIDIA's
            profilers (:mod:`tritonllm.telemetry.nvtx_ranges`), which write the files.
        torch_profiler_dir: the folder for the files of ``torch``; it is made if it is not there.
        torch_profiler_use_gzip: whether the files are compressed.
        delay_iterations: how many steps go by before a trace begins.
        max_iterations: after how many steps a trace ends itself; 0: it does not.
        kernel_iterations: of how many steps the kernels are recorded, if there is a GPU.
        max_events: how many events the file has when a trace ends itself.

    Raises:
        ValueError: a bad value; the message names the key.
    """

    profiler: str = "torch"
    torch_profiler_dir: str = ""
    torch_profiler_use_gzip: bool = True
    delay_iterations: int = 0
    max_iterations: int = 0
    kernel_iterations: int = 64
    max_events: int = 1_000_000

    def __post_init__(self) -> None:
        if self.profiler not in PROFILERS:
            raise ValueError(f"profiler_config: profiler must be one of {', '.join(PROFILERS)}, got {self.profiler!r}")
        if self.marks and self.torch_profiler_dir:
            raise ValueError(
                "profiler_config: torch_profiler_dir is of profiler='torch': 'cuda' writes no files itself"
            )
        if not self.marks and (not isinstance(self.torch_profiler_dir, str) or not self.torch_profiler_dir):
            raise ValueError("profiler_config: torch_profiler_dir must name a folder for the traces")
        if not isinstance(self.torch_profiler_use_gzip, bool):
            packed = self.torch_profiler_use_gzip
            raise ValueError(f"profiler_config: torch_profiler_use_gzip must be true or false, got {packed!r}")
        for name, least in (
            ("delay_iterations", 0),
            ("max_iterations", 0),
            ("kernel_iterations", 0),
            ("max_events", 1000),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"profiler_config: {name} must be an integer of at least {least}, got {value!r}")

    @classmethod
    def of(cls, given: "str | Mapping[str, Any] | ProfilerConfig") -> "ProfilerConfig":
        """Make the configuration from JSON or its object, with vLLM's keys.

        Raises:
            ValueError: no JSON object, an unknown key, a bad value.
        """
        if isinstance(given, ProfilerConfig):
            return given
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except ValueError as error:
                raise ValueError(f"profiler_config must be a JSON object: {error}") from error
        if not isinstance(given, Mapping):
            raise ValueError(f"profiler_config must be a JSON object, got {given!r}")
        known = {field.name for field in dataclasses.fields(cls)}
        for name, value in given.items():
            if name in NEUTRAL:
                if value not in NEUTRAL[name]:
                    raise ValueError(f"profiler_config: {name}={value!r}: tritonllm does not have this; leave it out")
            elif name not in known:
                raise ValueError(f"profiler_config: unknown key {name!r}; known: {', '.join(sorted(known))}")
        config = cls(**{name: value for name, value in given.items() if name in known})
        if config.marks:
            return config
        return dataclasses.replace(
            config, torch_profiler_dir=os.path.abspath(os.path.expanduser(config.torch_profiler_dir))
        )

    @property
    def marks(self) -> bool:
        """Whether steps are marked for NVIDIA's profilers."""
        return self.profiler == "cuda"

    def prepare(self, device: str, gpu: int) -> None:
        """What must be done before an engine starts in this process.

        Args:
            device: the engine's device, as its configuration names it.
            gpu: which GPU it will have.

        Raises:
            ValueError: ``profiler`` needs a GPU, and the engine has none.
        """
        if self.marks:
            import torch

            if device.startswith("cpu") or not torch.cuda.is_available():
                raise ValueError(
                    "profiler_config: profiler='cuda' marks steps for profilers of NVIDIA's GPUs, and this engine runs "
                    "on the CPU: use profiler='torch'"
                )
        elif self.kernel_iterations:
            from tritonllm.telemetry.kernel_records import prepare

            prepare(gpu)

    def check_folder(self) -> None:
        """Make the folder for traces, if there are to be some.

        Raises:
            ValueError: it cannot be made, or written to.
        """
        if self.marks:
            return
        folder = self.torch_profiler_dir
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"profiler_config: torch_profiler_dir {folder} cannot be made: {error.strerror}"
            ) from error
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ValueError(f"profiler_config: torch_profiler_dir {folder} cannot be written to")


class Profiles:
    """The traces of one engine, in its process: one at a time.

    Args:
        engine: an engine that has started.
        config: how traces are written; ``None``: the server was started without.
    """

    def __init__(self, engine: Any, config: ProfilerConfig | None) -> None:
        self._engine, self._config = engine, config
        self._trace: Any = None
        self._number = 0

    def start_profile(self, profile_prefix: str | None = None) -> dict[str, Any]:
        """Begin a trace.

        Returns:
            ``file``: where it is written (of ``cuda``, ``profiler``); or ``refused``: why none was begun.

        Raises:
            ValueError: there is no folder, or a bad prefix.
            OSError: the file cannot be made.
        """
        if self._config is None:
            raise ValueError(NO_FOLDER)
        prefix = check_prefix(profile_prefix)
        if self._trace is not None and self._trace.open:
            where = "" if self._config.marks else f", to {self._trace.path}"
            return {"refused": f"a trace is written already{where}: end it with /stop_profile"}
        config = self._config
        if config.marks:
            from tritonllm.telemetry.nvtx_ranges import StepRanges

            steps = {"delay_steps": config.delay_iterations, "max_steps": config.max_iterations}
            self._trace = StepRanges(self._engine, **steps)
            return {"profiler": config.profiler}
        from tritonllm.telemetry.trace import Trace

        self._number += 1
        stamp = time.strftime("%Y%m%d-%H%M%S")
        ending = "json.gz" if config.torch_profiler_use_gzip else "json"
        name = f"{prefix}{stamp}-{os.getpid()}-{self._number}.{ending}"
        self._trace = Trace(
            self._engine,
            Path(config.torch_profiler_dir) / name,
            max_events=config.max_events,
            kernel_steps=config.kernel_iterations,
            delay_steps=config.delay_iterations,
            max_steps=config.max_iterations,
            fresh=True,
        )
        return {"file": str(self._trace.path)}

    def stop_profile(self) -> dict[str, Any]:
        """End the trace.

        Returns:
            ``file`` and its number of ``events`` (of ``cuda``, the number of ``steps``), and why it has ended
            (``note``); or ``refused``: there is none.

        Raises:
            ValueError: there is no folder.
            OSError: the file could not be written.
        """
        if self._config is None:
            raise ValueError(NO_FOLDER)
        if self._trace is None:
            return {"refused": "no trace is written: begin one with /start_profile"}
        trace, self._trace = self._trace, None
        trace.close("it was told to end (stop_profile)")
        if self._config.marks:
            return {"profiler": self._config.profiler, "steps": trace.steps, "note": trace.note}
        return {"file": str(trace.path), "events": trace.events, "note": trace.note}

    def close(self) -> None:
        """End the trace that is still written, if there is one: the engine ends."""
        if self._trace is not None:
            trace, self._trace = self._trace, None
            trace.close("the engine ended")


NO_FOLDER = (
    "this server writes no traces: start it with --profiler-config "
    '\'{"profiler": "torch", "torch_profiler_dir": "FOLDER"}\''
)


def check_prefix(prefix: str | None) -> str:
    """What a file's name begins with.

    Raises:
        ValueError: it is too long, or could lead elsewhere.
    """
    if prefix is None:
        return "trace-"
    if not 0 < len(prefix) <= MAX_PREFIX or not all(c.isascii() and (c.isalnum() or c in "-_") for c in prefix):
        raise ValueError(f"profile_prefix must be at most {MAX_PREFIX} letters, digits, - and _, got {prefix!r}")
    return f"{prefix}-"

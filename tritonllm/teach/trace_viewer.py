"""``tritonllm generate --trace FILE``."""

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tritonllm.teach.viewer import Params, Result
from tritonllm.telemetry.kernel_records import prepare
from tritonllm.telemetry.trace import KERNEL_STEPS, Trace


def add_options(group: Any) -> None:
    group.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write a trace for Perfetto and `tritonllm trace`, compressed if FILE ends with .gz",
    )
    group.add_argument(
        "--trace-kernels",
        type=int,
        metavar="N",
        help=f"record the GPU's kernels of the first N steps in it (default: {KERNEL_STEPS})",
    )


def make(args: argparse.Namespace) -> "TraceViewer | None":
    """The viewer of ``--trace``; ``None`` without that option.

    Raises:
        ValueError: a bad value.
    """
    steps = args.trace_kernels
    if args.trace is None:
        if steps is not None:
            raise ValueError("--trace-kernels needs --trace")
        return None
    if steps is not None and steps < 0:
        raise ValueError(f"--trace-kernels must be at least 0, got {steps}")
    path: Path = args.trace
    if path.is_dir():
        raise ValueError(f"--trace: {path} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise ValueError(f"--trace: there is no folder {path.parent}: make it first")
    kernels = KERNEL_STEPS if steps is None else steps
    return TraceViewer(path, 0 if getattr(args, "device", "auto") == "cpu" else kernels)


class TraceViewer:
    """Writes a trace of the engine while it works.

    Args:
        path: the path of the trace.
        kernel_steps: of how many steps the kernels are recorded.
    """

    shows_text = False
    engine_options: Mapping[str, Any] = {}

    def __init__(self, path: Path, kernel_steps: int) -> None:
        self._path, self._kernel_steps = path, kernel_steps

    def adapt(self, params: Params) -> Params:
        if self._kernel_steps:
            prepare()  # the last moment before the engine is made
        return params

    def run(self, llm: Any, work: Callable[[], Result]) -> Result:
        """Do some work, and write a trace of it.

        Raises:
            OSError: the file cannot be written.
        """
        trace = Trace(llm, self._path, kernel_steps=self._kernel_steps)
        try:
            return work()
        finally:
            early = trace.note
            self._close(trace)
            why = f"; it ended early: {early}" if early else ""
            sys.stderr.write(
                f"[trace: {trace.events} events in {self._path}{why} | open it at https://ui.perfetto.dev, or run: "
                f"tritonllm trace {self._path}]\n"
            )

    def _close(self, trace: Trace) -> None:
        try:
            trace.close()
        except OSError as error:
            raise OSError(f"the trace {self._path} is not complete: {error}") from error

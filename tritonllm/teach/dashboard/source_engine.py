"""The dashboard of an engine in this process: the engine works in a thread of its own, the screen in the main one."""

import io
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from tritonllm.teach.dashboard.app import Dashboard
from tritonllm.teach.dashboard.source import Status
from tritonllm.teach.viewer import Params
from tritonllm.telemetry.recorder import ActivityRecorder, Gate
from tritonllm.telemetry.snapshot import Snapshot, View

Result = TypeVar("Result")
SWITCH_SECONDS = 0.0005


class EngineSource:
    """The snapshots of an engine in this process.

    Args:
        engine: an :class:`~tritonllm.engine.loop.engine.LLMEngine`, which another thread runs.
        gate: the gate that the engine's steps pass.
        title: see :class:`~tritonllm.teach.dashboard.source.SnapshotSource`.
    """

    def __init__(self, engine: Any, gate: Gate, title: str) -> None:
        self.title, self._recorder = title, ActivityRecorder(engine, gate)
        self.gate: Gate | None = gate
        self.work_ended = self.failed = False

    def look(self, view: View) -> Snapshot:
        return self._recorder.look(view)

    def status(self) -> Status:
        if self.work_ended:
            return Status("ended", "all requests have ended: q closes this and prints the outputs")
        if self.gate is not None and self.gate.is_paused:
            return Status("paused", "paused before the step that is shown last")
        return Status("running", "running")

    @property
    def is_over(self) -> bool:
        return self.failed

    def stop(self) -> None:
        self._recorder.stop()


class DashboardViewer:
    """The viewer of ``tritonllm generate --dashboard``.

    Args:
        speed: steps a second; 0: as fast as the engine is.
        make_app: makes the screen, for tests.

    Attributes:
        stopped: someone has closed the screen before all was done.
    """

    shows_text = True
    engine_options: Mapping[str, Any] = {}

    def __init__(self, speed: float = 0.0, make_app: Callable[[EngineSource], Any] = Dashboard) -> None:
        self._gate, self._make_app = Gate(speed), make_app
        self.stopped = False

    def adapt(self, params: Params) -> Params:
        return params

    def run(self, llm: Any, work: Callable[[], Result]) -> Result:
        """Do the work in a thread while the screen is open.

        Raises:
            BaseException: what the work raised.
            RuntimeError: the screen failed.
        """
        source = EngineSource(llm.engine, self._gate, str(llm.engine.config.model.model))
        results: list[Result] = []
        errors: list[BaseException] = []
        enter_device = same_device()

        def do_work() -> None:
            try:
                enter_device()
                results.append(work())
            except BaseException as error:  # goes on in the main thread
                errors.append(error)
                source.failed = True
            source.work_ended = True

        worker = threading.Thread(target=do_work, name="engine")
        with logs_held(), short_turns():
            app = self._make_app(source)
            worker.start()
            try:
                app.run(mouse=False)
            finally:
                self.stopped = worker.is_alive()
                self._gate.close()
                worker.join()
                source.stop()
        if errors:
            raise errors[0]
        if app.return_code:
            raise RuntimeError("the dashboard failed; its error is above")
        return results[0]


def same_device() -> Callable[[], None]:
    """Gives another thread the GPU that is this one's."""
    import torch

    if not torch.cuda.is_initialized():
        return lambda: None
    index = torch.cuda.current_device()
    return lambda: torch.cuda.set_device(index)


@contextmanager
def short_turns() -> Iterator[None]:
    """Inside the block threads take turns more often: the engine's, which gives up its turn in every operation, would
    wait 5 ms for each while the screen is drawn."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextmanager
def logs_held() -> Iterator[None]:
    """Inside the block messages of the package wait, so that they are not written over the screen."""
    held = io.StringIO()
    handlers = [one for one in logging.getLogger("tritonllm").handlers if isinstance(one, logging.StreamHandler)]
    before = [handler.setStream(held) for handler in handlers]
    try:
        yield
    finally:
        for handler, stream in zip(handlers, before, strict=True):
            if stream is not None:
                handler.setStream(stream)
        for stream in before[:1]:
            if stream is not None:
                stream.write(held.getvalue())

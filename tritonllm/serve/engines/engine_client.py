"""The API process's end: starts the engine process, sends to it, and learns at once when it has died."""

import asyncio
import logging
import multiprocessing
import multiprocessing.util
import os
import shutil
import signal
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from tritonllm.config.engine import EngineConfig
from tritonllm.dist.lockstep import ExpertPlace
from tritonllm.dist.watch import UNGUARDED
from tritonllm.serve.engines.messages import Abort, EngineReady, Failed, News, Stop, ToEngine, decode_news
from tritonllm.serve.engines.profiling import ProfilerConfig
from tritonllm.system.starting import later, run_spawned

logger = logging.getLogger(__name__)
GRACE = 5.0  # seconds that the engine process has to end by itself
LINGER = 1000  # milliseconds for the order to reach it


class EngineDeadError(RuntimeError):
    """The engine process has ended, or was shut down; no request can be served any more."""


def _end(process: BaseProcess, folder: str, owner: int) -> None:
    """Kill the process, if it still runs, and remove its sockets. A fork of the owner does nothing."""
    if os.getpid() != owner:
        return
    if process.pid is not None:  # it has begun
        process.kill()
        process.join()
    shutil.rmtree(folder, ignore_errors=True)


class EngineLink(ABC):
    """An API process's connection to a ready engine process.

    Args:
        folder: where the engine's socket lies.
        ready: what the engine has told.
    """

    def __init__(self, folder: str, ready: EngineReady) -> None:
        self.failure: str | None = None  # why the engine cannot be used any more
        self.ready = ready
        self._folder = folder
        self._encode = msgspec.msgpack.Encoder().encode
        self._context: Any = None
        self._socket: Any = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def pid(self) -> int | None:
        """The process id of the engine process, if this process has started it; else ``None``."""
        return None

    @property
    def living(self) -> list[bool]:
        """Whether the engine has not died, as :class:`~tritonllm.serve.engines.replicas.Replicas` tells of several."""
        return [self.failure is None]

    @property
    def restarted(self) -> list[int]:
        """How often it was started anew: never."""
        return [0]

    @property
    def deaths(self) -> list[str]:
        """Why it has died, if it has."""
        return [] if self.failure is None else [self.failure]

    @property
    def was_killed(self) -> bool:
        """The engine process has ended by a signal, as far as this process knows."""
        return False

    def attach(self, on_news: Callable[[News], None], on_death: Callable[[str], None]) -> None:
        """Begin to receive, in the running event loop. Both are called in it, ``on_death`` once."""
        loop = asyncio.get_running_loop()
        self._context = zmq.asyncio.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)  # bounded by the number of requests, which the caller bounds
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IDENTITY, f"api-{os.getpid()}".encode())
        self._socket.connect(f"ipc://{self._folder}/engine")
        self._socket.send(self._encode(Abort([])))  # from the first message on the engine sends its statistics
        self._tasks = [
            loop.create_task(self._receive(on_news, on_death)),
            loop.create_task(self._watch(on_death)),
        ]

    async def _receive(self, on_news: Callable[[News], None], on_death: Callable[[str], None]) -> None:
        while True:
            data = await self._socket.recv()
            try:
                on_news(decode_news(data))
            except Exception as error:  # else requests would wait for ever for what nobody receives
                logger.exception("what the engine tells cannot be taken in")
                if self.failure is None:
                    self.failure = f"what the engine tells cannot be taken in ({type(error).__name__}: {error})"
                    self._end_watch()
                    on_death(self.failure)
                return

    def _end_watch(self) -> None:
        """The engine is given up: its death is told already."""
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()

    @abstractmethod
    async def _watch(self, on_death: Callable[[str], None]) -> None:
        """Call ``on_death`` when the engine has died."""

    def send(self, message: ToEngine) -> None:
        """Queue a message; never waits.

        Raises:
            EngineDeadError: there is no engine any more.
            ValueError: it holds an integer that MessagePack cannot.
        """
        if self.failure is not None:
            raise EngineDeadError(self.failure)
        try:
            data = self._encode(message)
        except OverflowError as error:
            raise ValueError("a number of the request needs more than 64 bits: take a smaller one") from error
        self._socket.send(data)

    def kill(self) -> None:
        """End the engine, if this process has started it, in the middle of whatever it does, and the connection. May be
        called again."""
        self.failure = self.failure or "the engine was shut down"
        self.close()

    def close(self) -> None:
        """End the connection. May be called again."""
        for task in self._tasks:
            if not task.get_loop().is_closed():
                task.cancel()
        self._tasks = []
        if self._socket is not None:
            self._socket.close(linger=0)
            self._context.term()
            self._socket = None
        self.failure = self.failure or "the engine was shut down"


class EngineProcess:
    """An engine's process (``spawn``), which loads the model while this goes on.

    Sockets lie in a folder that only this user can read. It is removed when either process ends, however it ends.

    Args:
        config: the configuration of the engine.
        log_level: the level of the engine process's messages on stderr; ``None``: it writes none.
        devices: the indices of the GPUs here that the engine sees; ``None`` for all.
        profiler: how it may write traces.
        replica: the engine's number among several, for its messages.
        place: the engine's place among engines that share the model's experts, if there are others.

    Attributes:
        kill: ends the process, if it still runs, and removes the folder. May be called again.
    """

    def __init__(
        self,
        config: EngineConfig,
        log_level: int | None = None,
        devices: Sequence[int] | None = None,
        profiler: ProfilerConfig | None = None,
        replica: int | None = None,
        place: ExpertPlace | None = None,
    ) -> None:
        self.folder = tempfile.mkdtemp(prefix="tritonllm-ipc-")
        spawn = multiprocessing.get_context("spawn")
        self.reports, theirs = spawn.Pipe(duplex=False)
        seen = None if devices is None else list(devices)
        target = "tritonllm.serve.engines.engine_process", "run_engine"  # this process does without what it imports
        arguments = (*target, config, self.folder, theirs, log_level, seen, profiler, replica, place)
        self.process = spawn.Process(target=run_spawned, args=arguments, name="tritonllm-engine")
        # At exit before multiprocessing joins its children: it would wait for an engine that nobody has stopped.
        self.kill = multiprocessing.util.Finalize(
            self, _end, args=(self.process, self.folder, os.getpid()), exitpriority=100
        )
        try:
            with later(signal.SIGINT, signal.SIGTERM):  # one that has begun without its arguments would tell
                self.process.start()
        except BaseException:  # a script without a guard, whose import here would start processes again
            self.kill()
            raise
        theirs.close()

    def await_ready(self) -> EngineReady:
        """Wait until the engine has started, and return what it tells.

        Raises:
            ValueError: the engine refuses its configuration or its model.
            RuntimeError: it failed to start otherwise.
        """
        wait([self.reports, self.process.sentinel])
        report = _read(self.reports)
        if isinstance(report, EngineReady):
            return report
        if report is None:
            self.process.join()
            status = self.process.exitcode
            hint = UNGUARDED if status == 1 else ""
            raise RuntimeError(f"the engine process ended while it started, with status {status}{hint}")
        raise ValueError(report.message) if report.is_value_error else RuntimeError(report.message)


class EngineClient(EngineLink):
    """An engine in a process of its own, ready when this is made.

    Args:
        config, log_level: see :class:`EngineProcess`.
        meanwhile: is called while the engine starts, for what takes time here.
        process: one that was started already; by default it is started here.
        profiler: how it may write traces, if it is started here.

    Raises:
        ValueError, RuntimeError: as :meth:`EngineProcess.await_ready`.
    """

    def __init__(
        self,
        config: EngineConfig,
        log_level: int | None = None,
        meanwhile: Callable[[], object] = lambda: None,
        process: EngineProcess | None = None,
        profiler: ProfilerConfig | None = None,
    ) -> None:
        started = EngineProcess(config, log_level, profiler=profiler) if process is None else process
        try:
            meanwhile()
            ready = started.await_ready()
        except BaseException:
            started.kill()
            raise
        self._started, self._process, self._reports = started, started.process, started.reports
        self._told_to_stop = False
        super().__init__(started.folder, ready)

    @property
    def folder(self) -> str:
        return self._folder

    @property
    def sentinel(self) -> int:
        """A handle that is readable when the engine process has ended."""
        return self._process.sentinel

    @property
    def pid(self) -> int | None:
        """The process id of the engine process."""
        return self._process.pid

    @property
    def was_killed(self) -> bool:
        status = self._process.exitcode
        return status is not None and status < 0

    async def _watch(self, on_death: Callable[[str], None]) -> None:
        loop, died = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._process.sentinel, died.set)
        try:
            await died.wait()
        finally:
            loop.remove_reader(self._process.sentinel)
        on_death(self.bury())

    def bury(self) -> str:
        """Take note of the engine process's end; returns why it ended."""
        self._process.join()
        report = _read(self._reports)
        status = self._process.exitcode
        how = f"was killed by signal {-status}" if status is not None and status < 0 else f"ended with status {status}"
        why = f": {report.message}" if isinstance(report, Failed) else ""
        self.failure = f"the engine process {how}{why}"
        shutil.rmtree(self._folder, ignore_errors=True)
        return self.failure

    def tell_to_stop(self) -> None:
        """Let the engine process end, and do not wait for it. The second time there may be nobody to hear it, and the
        order would be waited for in vain."""
        if self._told_to_stop:
            return
        self._told_to_stop = True
        context = zmq.Context()  # not the one of the event loop, which may be closed
        socket = context.socket(zmq.DEALER)
        socket.connect(f"ipc://{self._folder}/engine")
        socket.send(self._encode(Stop()))
        socket.close(linger=LINGER)
        context.term()

    def close(self) -> None:
        """End the engine process: kindly, then not. May be called again."""
        if self.failure is None:
            self.tell_to_stop()
            self._process.join(GRACE)
        super().close()
        self._started.kill()
        self._reports.close()


def _read(reports: Connection) -> EngineReady | Failed | None:
    """What lies in the pipe; ``None`` if nothing does."""
    try:
        if reports.poll():
            return msgspec.msgpack.decode(reports.recv_bytes(), type=EngineReady | Failed)
    except (EOFError, OSError):  # it ended without a word
        pass
    return None

"""What runs the steps of an engine: its own runner, or that and those of other ranks.

``uni`` is the runner itself. With ``mp``, rank 0 is the engine's process, which plans every step, sends it to the other
ranks as data, and runs its own part; the others are processes that it spawned (:mod:`tritonllm.engine.ranks.worker`).

A step that breaks off leaves the ranks in the middle of different collectives. So nothing is repaired then: the group
ends, and with it the requests, with an error that says which rank failed and why.
"""

import multiprocessing
import multiprocessing.util
import os
import signal
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import torch

from tritonllm.config.engine import EngineConfig
from tritonllm.dist.connect import local_store
from tritonllm.dist.mailbox import Mailbox
from tritonllm.dist.pipeline import Team, meet
from tritonllm.dist.watch import TICK, Watch, WorkerError, kill
from tritonllm.engine.cache.engine_memory import EngineMemory
from tritonllm.engine.data.agreement import Claims
from tritonllm.engine.data.orders import Order
from tritonllm.engine.data.plan import StepPlan
from tritonllm.engine.data.results import RunningStep
from tritonllm.engine.data.step import FREE, Restrictions, Step
from tritonllm.engine.data.step_bytes import pack
from tritonllm.engine.ranks.between_steps import RankWeights, answered, packed_call
from tritonllm.engine.ranks.worker import START_PATIENCE
from tritonllm.engine.start.ranks import Executor, Ranks, release_graphs
from tritonllm.engine.step.runner import ModelRunner
from tritonllm.models.interface import CausalLM
from tritonllm.system.starting import later, run_spawned

FAREWELL = 3.0  # seconds in which a worker ends by itself once it was told to


class SpawnedRanks(Ranks):
    """Processes of this machine (``mp``).

    Args:
        config: the configuration of the engine, as the user gave it.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._size = config.parallel.world_size
        self._answers: dict[int, Connection] = {}  # what functions returned on the other ranks
        self._met: list[Team] = []  # once this rank is in it
        self._leading: list[weakref.ref[ModelRunner]] = []  # once all are ready
        self._finalizer: Callable[[], object] = lambda: None

    def begin(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._store, port = local_store()
        mailbox, processes, reports = Mailbox(self._size - 1), dict[int, BaseProcess](), {}
        self._mailbox, met = mailbox, self._met
        try:
            for rank in range(1, self._size):
                reports[rank], theirs = spawn.Pipe(duplex=False)
                self._answers[rank], their_answers = spawn.Pipe(duplex=False)
                target = "tritonllm.engine.ranks.worker", "run_worker"
                arguments = (*target, self._config, rank, port, mailbox, theirs, their_answers)
                process = spawn.Process(target=run_spawned, args=arguments, name=f"tritonllm-rank-{rank}")
                with later(signal.SIGINT, signal.SIGTERM):  # one that has begun without its arguments would tell
                    process.start()
                    processes[rank] = process
                theirs.close()
                their_answers.close()
            self.watch = Watch(
                processes,
                reports,
                mailbox,
                patience=self._config.parallel.worker_timeout,
                step_patience=self._config.step_timeout,
                on_failure=partial(_leave, met),  # without this object: its end ends the watch
            )
        except BaseException:  # Python's end would wait for those that have begun
            for begun in processes.values():
                kill(begun)
                begun.join()
            raise
        # At exit before multiprocessing joins its children: it would wait for ranks that nobody has stopped.
        self._finalizer = multiprocessing.util.Finalize(
            self, _end, args=(self.watch, mailbox, processes, met, self._leading, os.getpid()), exitpriority=100
        )

    def join(self, device: torch.device) -> Team:
        self.watch.await_coming()
        team = meet(self._store, 0, self._config.parallel, device, timeout=START_PATIENCE)
        self._met.append(team)
        return team

    def lead(self, runner: ModelRunner, memory: EngineMemory) -> Executor:
        self.watch.await_ready()
        self._leading.append(weakref.ref(runner))
        return GroupExecutor(runner, self, RankWeights(runner.model, memory))

    def end(self) -> None:
        self._finalizer()

    def check(self) -> None:
        self.watch.failure.check()

    def send(self, message: bytes | bytearray) -> None:
        self._mailbox.send(message, self.watch.failure.check)

    def check_functions(self) -> None:
        """All of them take functions."""

    def answers(self) -> list[bytes]:
        found = []
        for pipe in self._answers.values():
            while not pipe.poll(TICK):
                self.check()
            found.append(pipe.recv_bytes())
        return found

    def explain(self, error: BaseException | None) -> None:
        if isinstance(error, RuntimeError) and hasattr(self, "watch"):  # else none were begun
            try:
                self.watch.failure.settle()
            except (WorkerError, ValueError) as reason:
                raise reason from error

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.explain(error)
        finally:
            super().__exit__(kind, error, at)


class Others(Protocol):
    """The other ranks, while steps run."""

    def check(self) -> None:
        """Check that all other ranks run.

        Raises:
            WorkerError: one has failed.
        """

    def send(self, message: bytes | bytearray) -> None:
        """Send a message to all other ranks. Raises as :meth:`check`."""

    def check_functions(self) -> None:
        """Check that functions may be sent to them.

        Raises:
            ValueError: they are not this process's own.
        """

    def answers(self) -> list[bytes]:
        """Wait for what the other ranks say of a function that was sent to them. Raises as :meth:`check`."""

    def explain(self, error: BaseException | None) -> None:
        """Raise what broke a step here, if that is another rank's failure."""

    def end(self) -> None:
        """End the other ranks; idempotent."""


class GroupExecutor:
    """Runs each step on all ranks.

    Args:
        runner: the runner of this rank, the first.
        ranks: the other ranks.
        here: this rank's weights.
    """

    def __init__(self, runner: ModelRunner, ranks: Others, here: RankWeights) -> None:
        self._runner, self._ranks, self._claims = runner, ranks, Claims()
        self._here = here
        self._broken: str | None = None

    @property
    def model(self) -> CausalLM:
        """This rank's part of the model."""
        return self._runner.model

    @property
    def host(self) -> None:
        """Always ``None``: with several ranks there is no tier in the host's memory."""

    @property
    def lockstep(self) -> None:
        """Always ``None``: with several ranks there are no engines in lockstep."""

    def join(self) -> None:
        """Does nothing: no other engine waits for this one."""

    def launch(self, plan: StepPlan) -> RunningStep | None:
        """Build the plan's step, send it to the other ranks, and launch it here.

        Raises:
            WorkerError: a rank has failed, now or before.
        """

        def launch() -> RunningStep | None:
            self._draw_abandoned(self._runner.stages - 1)
            step = self._runner.build(plan)
            self._send(step.for_followers())
            return self._runner.begin(step)

        return self._whole(launch)

    def draw(self, late: Restrictions) -> RunningStep:
        """Draw the oldest step that is not drawn. Raises as :meth:`launch`."""
        drawn = self._whole(lambda: self._draw(late))
        assert drawn is not None
        return drawn

    def tell(self, order: Order) -> None:
        """Have the other ranks do something. Raises as :meth:`launch`."""

        def send() -> None:
            self._ranks.send(pack(None, None, order))

        self._whole(send)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Call a function on all ranks at once, with :meth:`RankWeights.worker`.

        Returns:
            What it returns, in the order of the ranks.

        Raises:
            ValueError: it cannot be sent to these ranks; nothing has been called then.
            RuntimeError: it failed on another rank. On this one, its own error is raised.
        """
        self._ranks.check_functions()
        data = packed_call(function, args, kwargs)
        self.tell(Order("call", data=np.frombuffer(data, np.uint8)))
        try:
            found = [function(self._here.worker(0), *args, **kwargs)]
        finally:
            answers = [answered(each) for each in self._ranks.answers()]
        for rank, answer in enumerate(answers, start=1):
            if answer.error is not None:
                raise RuntimeError(f"collective_rpc: on rank {rank}: {answer.error}")
        return found + [answer.value for answer in answers]

    def abandon(self) -> None:
        """The other ranks wait for the tokens, which nobody wants any more. Raises as :meth:`launch`."""
        if self._runner.undrawn and self._broken is None:
            self._whole(self._draw_abandoned)

    def _send(self, step: Step | None) -> None:
        """Send the next step to the other ranks, or ``None`` for the draw of the oldest one, where that is not part of
        it."""
        self._ranks.send(pack(step, self._claims.next()))

    def _draw(self, late: Restrictions) -> RunningStep:
        if self._runner.stages > 1:  # else the others wait for the tokens already
            self._send(None)
        return self._runner.draw(late)

    def _draw_abandoned(self, most: int = 0) -> None:
        """Leave so many undrawn at most."""
        while self._runner.undrawn > most:
            self._draw(FREE)

    def _whole(self, work: Callable[[], RunningStep | None]) -> RunningStep | None:
        self._ranks.check()
        if self._broken is not None:
            raise WorkerError(f"the ranks have ended, since a step was broken off: {self._broken}; make a new engine")
        with later(signal.SIGINT):  # half a step on one rank would end them all
            try:
                running = work()
            except BaseException as error:
                self._broken = f"{type(error).__name__}: {error}"
                self._ranks.explain(error)
                self._ranks.end()
                raise
        if running is not None:
            running.watch(self._ranks.check)
            self._claims.note(running.evidence)
        return running


def _leave(met: list[Team]) -> None:
    for team in met:
        team.shut()


def _end(
    watch: Watch,
    mailbox: Mailbox,
    processes: Mapping[int, BaseProcess],
    met: list[Team],
    leading: Sequence[weakref.ref[ModelRunner]],
    owner: int,
) -> None:
    """Tell the ranks to end, see that they do, and leave the group."""
    if os.getpid() != owner:
        return
    watch.stop()
    until = time.monotonic() + FAREWELL

    def patience() -> None:
        if time.monotonic() > until or not any(process.is_alive() for process in processes.values()):
            raise TimeoutError

    try:
        mailbox.send(b"", patience)
    except TimeoutError:
        until = 0.0
    for process in processes.values():
        process.join(max(0.0, until - time.monotonic()))
        kill(process)
        process.join()
    release_graphs(leading)
    _leave(met)

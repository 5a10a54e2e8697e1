"""Ranks that another program has started, torchrun say (``external_launcher``): each runs the same script.

Rank 0's engine is an engine as any other. On another rank, making the engine is all that happens: it follows the steps
of rank 0 until that one's engine ends, and then ends the process. So only rank 0 answers, and a script need not ask
which rank it is.

Ranks may be on several machines, so a step goes to them by a broadcast (gloo), and not through shared memory. The
launcher watches the processes, and ends all when one ends. A rank that waits for a step sees itself that the host of
rank 0 is lost, of which nobody else may be left to tell it.
"""

import logging
import multiprocessing.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tritonllm import env
from tritonllm.config import EngineConfig
from tritonllm.dist.connect import address_of, connect
from tritonllm.dist.group import Group
from tritonllm.dist.pipeline import Team, meet
from tritonllm.dist.watch import WorkerError, host_watch
from tritonllm.engine.executor import GroupExecutor
from tritonllm.engine.ranks import Executor, Ranks
from tritonllm.engine.runner import ModelRunner
from tritonllm.engine.startup import load_rank
from tritonllm.engine.worker import START_PATIENCE, Following
from tritonllm.kernels.compile.monitor import MONITOR

logger = logging.getLogger(__name__)
CPU = torch.device("cpu")
IDLE = 86400.0 * 365  # seconds that a rank waits for a step


class Wire:
    """Messages from rank 0 to the others, by broadcast.

    Args:
        group: of all ranks, on the CPU.
    """

    def __init__(self, group: Group) -> None:
        self.group = group

    def send(self, message: bytes) -> None:
        self.group.broadcast(torch.tensor([len(message)]))
        if message:
            self.group.broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8))

    def receive(self) -> bytes:
        size = int(self.group.broadcast(torch.zeros(1, dtype=torch.int64)))
        return self.group.broadcast(torch.empty(size, dtype=torch.uint8)).numpy().tobytes() if size else b""


@dataclass
class Leaving:
    """How a rank leaves the others, once.

    Attributes:
        wire, team: what it is in.
        owner: the process that is to leave; a fork of it is not.
        farewell: the others wait for steps, and are told that no more will come. Those that still load do not listen.
    """

    wire: Wire
    team: Team
    owner: int
    farewell: bool = False

    def __call__(self) -> None:
        if os.getpid() != self.owner:
            return
        if self.farewell:
            self.farewell = False
            try:
                self.wire.send(b"")
            except RuntimeError as error:  # they have ended
                logger.debug("the other ranks could not be told to end: %s", error)
        self.team.shut()
        self.wire.group.shut()


class LaunchedRanks(Ranks):
    """The ranks of a launcher, seen from one of them.

    Args:
        config: the engine's.
        place: this rank.

    Raises:
        ValueError: there are not as many ranks as the configuration says.
    """

    def __init__(self, config: EngineConfig, place: env.Launched) -> None:
        size = config.parallel.world_size
        if place.size != size:
            raise ValueError(
                f"{config.parallel.sizes}, but the launcher has started {place.size} processes (WORLD_SIZE): make them "
                f"the same, as in torchrun --nproc-per-node {size}"
            )
        self._place, self._patience, self._parallel = place, config.step_timeout, config.parallel
        self._leaving: Leaving | None = None
        self._finalizer: multiprocessing.util.Finalize | None = None

    def rendezvous(self) -> Any:
        """A store of torch.distributed that all ranks reach."""
        return next(dist.rendezvous("env://"))[0]

    def join(self, device: torch.device) -> Team:
        store, rank, size = self.rendezvous(), self._place.rank, self._place.size
        wired = connect(dist.PrefixStore("steps", store), rank, size, CPU, timeout=IDLE, local=False)
        self._store, self.wire = store, Wire(wired)  # what ends with the store, ends with this rank
        team = meet(
            *(dist.PrefixStore("model", store), rank, self._parallel, device), timeout=START_PATIENCE, local=False
        )
        self._team, self._leaving = team, Leaving(self.wire, team, os.getpid())
        self._finalizer = multiprocessing.util.Finalize(self, self._leaving, exitpriority=100)
        return team

    def lead(self, runner: ModelRunner) -> Executor:
        for ranks in (self._team, self.wire.group):  # a message is sent when the others have begun to receive it
            ranks.limit(self._patience)
        assert self._leaving is not None  # they have met
        self._leaving.farewell = True
        return GroupExecutor(runner, self)

    def end(self) -> None:
        """Ranks that do not wait for steps are left when this process has told its error, at its end: as soon as it
        leaves them they fail, and the launcher ends it for that."""
        if self._leaving is not None and self._leaving.farewell:
            self._leave()

    def _leave(self) -> None:
        if self._finalizer is not None:
            self._finalizer()

    def check(self) -> None:
        """The launcher looks after the others."""

    def send(self, message: bytes) -> None:
        self.wire.send(message)

    def explain(self, error: BaseException | None) -> None:
        """Raises:
        WorkerError: a collective broke, which is another rank's doing.
        """
        if isinstance(error, RuntimeError):
            self._no_farewell()
            raise WorkerError(f"a rank of the launcher failed: its own output says why ({error})") from error

    def _no_farewell(self) -> None:
        """A rank that has stopped would not take it."""
        if self._leaving is not None:
            self._leaving.farewell = False

    def follow(self, config: EngineConfig, started: Callable[[], object] = lambda: None) -> None:
        """What a rank other than 0 does; ``started`` is called when it is ready."""
        runner, _, team = load_rank(config, self.join, self._place.local_rank)
        team.limit(self._patience)
        MONITOR.serving = True
        started()
        following, watching_ends = Following(runner), self._watch_the_first()
        while message := self.wire.receive():
            following.run(message)
        watching_ends()
        self._leave()

    def _watch_the_first(self) -> Callable[[], None]:
        """End this process when the host of the store is lost, which is that of rank 0: no step would ever come."""
        address = address_of(self._store)
        if address is None:
            return lambda: None
        return host_watch(*address, self._patience, partial(_end_alone, address[0]))


def _end_alone(host: str, error: OSError) -> None:
    """As an error that nobody catches would. It cannot be raised where this rank waits, in gloo's code."""
    lost = WorkerError(f"the host of rank 0, {host}, is lost ({error}): this rank ends")
    sys.excepthook(WorkerError, lost, None)
    os._exit(1)


def launched_ranks(config: EngineConfig) -> LaunchedRanks:
    """The other ranks, for rank 0; another rank does not come back from here.

    Raises:
        ValueError: there is no launcher, or not with as many ranks.
        SystemExit: this was another rank, and rank 0's engine has ended.
    """
    place = env.launched()
    if place is None:
        raise ValueError(
            "distributed_executor_backend='external_launcher' needs a launcher that sets RANK and WORLD_SIZE: run the "
            "script by torchrun, or take 'mp'"
        )
    ranks = LaunchedRanks(config, place)
    if place.rank == 0:
        return ranks
    ranks.follow(config)
    raise SystemExit(0)

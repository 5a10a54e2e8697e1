"""Ranks that another program has started, torchrun say (``external_launcher``): each runs the same script.

Rank 0's engine is an engine as any other. On another rank, making the engine is all that happens: it follows the steps
of rank 0 until that one's engine ends, and then ends the process. So only rank 0 answers, and a script need not ask
which rank it is.

Ranks may be on several machines, so they meet behind a door (:mod:`tritonllm.dist.door`), and a step goes to them by a
broadcast (gloo), and not through shared memory. The launcher watches the processes, and ends all when one ends. Rank 0
and each of the others see themselves that the other one's host is lost, of which nobody else may be left to tell them.
"""

import hmac
import ipaddress
import json
import logging
import multiprocessing.util
import os
import struct
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from tritonllm import env
from tritonllm.config.engine import EngineConfig
from tritonllm.dist.connect import address_of, connect, local_store, own_address
from tritonllm.dist.door import MAC, Door, Entrance, IntruderError, digest, new_secret
from tritonllm.dist.group import Group, is_leaving
from tritonllm.dist.pipeline import Team, meet
from tritonllm.dist.watch import GroupFailure, WorkerError, host_watch
from tritonllm.engine.cache.engine_memory import EngineMemory
from tritonllm.engine.ranks.between_steps import BetweenSteps, RankWeights
from tritonllm.engine.ranks.executor import GroupExecutor
from tritonllm.engine.ranks.worker import START_PATIENCE, Following, lost_a_peer
from tritonllm.engine.start.ranks import Executor, Ranks, release_graphs
from tritonllm.engine.start.startup import load_rank
from tritonllm.engine.step.runner import ModelRunner
from tritonllm.kernels.compile.monitor import MONITOR
from tritonllm.system.lost_hosts import break_connections

logger = logging.getLogger(__name__)
CPU = torch.device("cpu")
IDLE = 86400.0 * 365  # seconds that a rank waits for a step
FAREWELL = 5.0  # seconds in which the other ranks leave once they were told that no step will come
MOST_BYTES = 1 << 30  # of a message: block tables of thousands of the longest sequences
FORGED = "what came as a step is not what rank 0 sent: somebody else has sent it, changed it, or sent an old one again"
UNPROTECTED = (
    "TRITONLLM_RANKS_SECRET is not set: whoever reaches MASTER_PORT can take the place of a rank. Set it for all ranks "
    "where others than they reach these machines (docs/operations.md)"
)
_HEAD = struct.Struct(f"<q{MAC}s{MAC}s")  # before a message: its bytes, and HMACs of that number and of the message
_NUMBERS = struct.Struct("<qq")


class Wire:
    """Messages from rank 0 to the others, by broadcast; each comes with its number, in HMACs of a key. So a rank takes
    what rank 0 has sent, in that order and once, or nothing more.

    Args:
        group: the group of all ranks, on the CPU.
        key: a secret that the ranks of this engine know, and nobody else.
    """

    def __init__(self, group: Group, key: bytes) -> None:
        self.group, self._key, self._count = group, key, 0

    def send(self, message: bytes | bytearray) -> None:
        head = bytearray(_HEAD.pack(len(message), *self._macs(len(message), message)))
        self.group.broadcast(torch.frombuffer(head, dtype=torch.uint8))
        if message:
            self.group.broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8))

    def receive(self) -> memoryview:
        """Receive the next message.

        Raises:
            IntruderError: it is not rank 0's next one.
        """
        head = self.group.broadcast(torch.zeros(_HEAD.size, dtype=torch.uint8))
        size, of_head, of_body = _HEAD.unpack(bytes(head.numpy()))
        self._count += 1
        if not (hmac.compare_digest(of_head, self._mac("step's size", size, b"")) and size <= MOST_BYTES):
            raise IntruderError(FORGED)
        message = torch.empty(size, dtype=torch.uint8)
        data = memoryview((self.group.broadcast(message) if size else message).numpy())
        if not hmac.compare_digest(of_body, self._mac("step", size, data)):
            raise IntruderError(FORGED)
        return data

    def _macs(self, size: int, message: bytes | bytearray) -> tuple[bytes, bytes]:
        self._count += 1
        return self._mac("step's size", size, b""), self._mac("step", size, message)

    def _mac(self, what: str, size: int, message: bytes | bytearray | memoryview) -> bytes:
        return digest(self._key, what, _NUMBERS.pack(self._count, size), message)


@dataclass
class Leaving:
    """How a rank leaves the others, once.

    Attributes:
        wire, team: what it is in.
        owner: the process that is to leave; a fork of it is not.
        begin: called first: what ends from here on was told to.
        done: called last, when this rank needs the others no more.
        farewell: the others wait for steps, and are told that no more will come. Those that still load do not listen.
        runners: have captured steps, which go first.
    """

    wire: Wire
    team: Team
    owner: int
    begin: Callable[[], object]
    done: Callable[[], object]
    farewell: bool = False
    runners: list[weakref.ref[ModelRunner]] = field(default_factory=list)

    def __call__(self) -> None:
        if os.getpid() != self.owner:
            return
        self.begin()
        if self.farewell:
            self.farewell = False
            try:
                self.wire.send(b"")
            except RuntimeError as error:  # they have ended
                logger.debug("the other ranks could not be told to end: %s", error)
        release_graphs(self.runners)
        self.team.shut()
        self.wire.group.shut()
        self.done()


class LaunchedRanks(Ranks):
    """The ranks of a launcher, seen from one of them.

    Args:
        config: the configuration of the engine.
        place: this rank.

    Attributes:
        failure: what has gone wrong elsewhere, once it is known.

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
        self._met: list[Team] = []
        self.failure = GroupFailure(partial(_leave, self._met))  # without this object: its end ends what watches
        self._hush: Callable[[], object] = lambda: None  # what ends from here on was told to
        self._done: Callable[[], object] = lambda: None
        self._leaving: Leaving | None = None
        self._finalizer: multiprocessing.util.Finalize | None = None

    def gather(self) -> tuple[Any, str]:
        """Where all ranks meet, over the store of the launcher: rank 0 says there where its door is. The store knows no
        secrets. So an operator gives one (``TRITONLLM_RANKS_SECRET``), or it is said there, too, to whoever asks.

        Returns:
            A store of torch.distributed, and the address at which the others reach this rank.

        Raises:
            ValueError: only some of the ranks have been given the secret, or it is too short.
            IntruderError: it is not the same one everywhere.
            OSError: rank 0's host cannot be reached.
        """
        given = env.ranks_secret()
        self._launcher = store = next(dist.rendezvous("env://"))[0]  # what ends with the store, ends with this rank
        told = dist.PrefixStore("tritonllm", store)
        name = f"door {told.add(f'engines of rank {self._place.rank}', 1)}"  # of the first engine, the second, ...
        if self._place.rank == 0:
            address = address_of(store)
            own = "127.0.0.1" if address is None else own_address(*address)
            secret = given or new_secret()
            if given is None and not ipaddress.ip_address(own.partition("%")[0]).is_loopback:
                logger.warning(UNPROTECTED)
            port = self._open(own, secret)
            told.set(name, json.dumps([own, port, None if given else secret.hex()]))
            return self._store, own
        host, port, published = json.loads(told.get(name))
        if given is None and published is None:
            raise ValueError("TRITONLLM_RANKS_SECRET is set where rank 0 runs: set it for all ranks, to the same text")
        return self._enter(host, port, given or bytes.fromhex(published))

    def _open(self, host: str, secret: bytes) -> int:
        """Open the door to the others; returns its port."""
        self._store, port = local_store()
        patience = self._parallel.worker_timeout
        door = Door(host, secret, port, patience=patience, on_end=partial(self._on_end, self.failure))
        weakref.finalize(self, door.close).atexit = False  # at Python's end that would come before the farewell
        self._hush, self._secret = door.hush, secret
        # NCCL still asks the store on a rank that leaves it
        self._done = partial(door.wait_for_ends, FAREWELL)
        return door.address[1]

    def _enter(self, host: str, port: int, secret: bytes) -> tuple[Any, str]:
        """Go in there; returns as :meth:`gather`. From here on, this process ends with the host of rank 0."""
        own, entrance = own_address(host, port), Entrance((host, port), secret, self._place.rank)
        weakref.finalize(self, entrance.close).atexit = False
        self._store, self._secret = dist.TCPStore("127.0.0.1", entrance.port, is_master=False), secret
        self._done = host_watch(entrance.watched, self._parallel.worker_timeout, partial(_end_alone, host))
        return self._store, own

    @staticmethod
    def _on_end(failure: GroupFailure, rank: int, host: str, error: OSError | None) -> None:
        """Note that another rank's process has ended, or its host is lost."""
        if error is None:
            what = f"rank {rank}, on {host}, has ended: its own output says why"
        else:
            break_connections(host)
            what = f"the host of rank {rank}, {host}, is lost ({error})"
        if not failure.is_known:
            logger.error("%s; the group ends with it", what)
            failure.tell(f"a rank of the launcher failed: {what}", False)

    def _key(self) -> bytes:
        """The key of rank 0's messages: another one for each engine, also with an operator's secret."""
        if self._place.rank == 0:
            self._store.set("engine", new_secret().hex())
        return digest(self._secret, "engine", self._store.get("engine"))

    def join(self, device: torch.device) -> Team:
        store, own = self.gather()
        rank, size, key = self._place.rank, self._place.size, self._key()
        wired = connect(dist.PrefixStore("steps", store), rank, size, CPU, timeout=IDLE, own=own)
        self.wire = Wire(wired, key)
        team = meet(dist.PrefixStore("model", store), rank, self._parallel, device, timeout=START_PATIENCE, own=own)
        self._met.append(team)
        self._team, self._leaving = team, Leaving(self.wire, team, os.getpid(), self._hush, self._done)
        self._finalizer = multiprocessing.util.Finalize(self, self._leaving, exitpriority=100)
        return team

    def lead(self, runner: ModelRunner, memory: EngineMemory) -> Executor:
        for ranks in (self._team, self.wire.group):  # a message is sent when the others have begun to receive it
            ranks.limit(self._patience)
        assert self._leaving is not None  # they have met
        self._leaving.farewell = True
        self._leaving.runners.append(weakref.ref(runner))
        return GroupExecutor(runner, self, RankWeights(runner.model, memory))

    def end(self) -> None:
        """Ranks that do not wait for steps are left when this process has told its error, at its end: as soon as it
        leaves them they fail, and the launcher ends it for that."""
        if self._leaving is not None and self._leaving.farewell:
            self._leave()

    def _leave(self) -> None:
        if self._finalizer is not None:
            self._finalizer()

    def check(self) -> None:
        self.failure.check()

    def send(self, message: bytes | bytearray) -> None:
        self.wire.send(message)

    def check_functions(self) -> None:
        raise ValueError(
            "collective_rpc: ranks that a launcher or Ray has started take data, and no functions: give the weights to "
            "load_weights, or take distributed_executor_backend='mp'"
        )

    def answers(self) -> list[bytes]:
        raise NotImplementedError

    def explain(self, error: BaseException | None) -> None:
        """Turn the error of a broken collective into that of the rank that broke it; other errors pass.

        Raises:
            WorkerError: a collective broke, which is another rank's doing.
        """
        if not isinstance(error, RuntimeError) or isinstance(error, WorkerError):
            return
        self._no_farewell()
        try:
            self.failure.settle()
        except (WorkerError, ValueError) as reason:
            raise reason from error
        raise WorkerError(f"a rank of the launcher failed: its own output says why ({error})") from error

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if error is not None and lost_a_peer(error):
                self.explain(error)
        finally:
            super().__exit__(kind, error, at)

    def _no_farewell(self) -> None:
        """A rank that has stopped would not take it."""
        if self._leaving is not None:
            self._leaving.farewell = False

    def follow(self, config: EngineConfig, started: Callable[[], object] = lambda: None) -> None:
        """What a rank other than 0 does; ``started`` is called when it is ready."""
        runner, memory, _, team = load_rank(config, self.join, self._place.local_rank)
        team.limit(self._patience)
        assert self._leaving is not None  # they have met
        self._leaving.runners.append(weakref.ref(runner))
        MONITOR.serving = True
        started()
        following = Following(runner, BetweenSteps(RankWeights(runner.model, memory), self._place.rank))
        while message := self.wire.receive():
            following.run(message)
        self._leave()


def _leave(met: list[Team]) -> None:
    for team in met:
        team.shut()


def _end_alone(host: str, error: OSError) -> None:
    """End this process as an error that nobody catches would, which cannot be raised where this rank waits, in gloo's
    code."""
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
    if is_leaving():  # Python's end would end that thread inside of NCCL, and so the process with signal 6
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    raise SystemExit(0)

"""What ranks of an engine other than the first do: load their part, and run the steps that they are sent.

They hold no policy: no scheduler, no tokenizer, no requests. Rank 0 plans and draws; a step comes as data, and what it
computes stays on the device. A worker ends when it is told to, when it fails, and when its parent has died.
"""

import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch
import torch.distributed as dist
from tqdm import tqdm

from tritonllm.config.engine import EngineConfig, ParallelConfig
from tritonllm.dist.mailbox import Mailbox
from tritonllm.dist.pipeline import Team, meet
from tritonllm.dist.watch import PARENT_DIED, TICK, Report, parent_watch
from tritonllm.engine.data.agreement import Comparison
from tritonllm.engine.data.step_bytes import unpack
from tritonllm.engine.ranks.between_steps import BetweenSteps, RankWeights
from tritonllm.engine.start.startup import load_rank
from tritonllm.engine.step.runner import ModelRunner
from tritonllm.kernels.compile.monitor import MONITOR
from tritonllm.system.starting import leave_out_of_searches

logger = logging.getLogger(__name__)
START_PATIENCE = 1800.0  # seconds that a collective may take: the first ones wait for what another rank loads
SPIN = 0.05  # seconds that a worker of a GPU waits for a step without a sleep, as rank 0 does for its results


class RankPlace(NamedTuple):
    """Which rank a process is, and where it meets the others.

    Attributes:
        rank: the number of the rank, among all ranks.
        port: the port on this machine of the store at which the ranks meet.
    """

    rank: int
    port: int

    def join(self, parallel: ParallelConfig, device: torch.device) -> Team:
        """Meet the other ranks, and return the groups that they form."""
        store = dist.TCPStore("127.0.0.1", self.port, is_master=False)
        return meet(store, self.rank, parallel, device, timeout=START_PATIENCE)


def run_worker(
    config: EngineConfig, rank: int, port: int, mailbox: Mailbox, reports: Connection, answers: Connection
) -> None:
    """The process's main function.

    Args:
        config: the configuration of the engine, as the user gave it.
        rank, port: see :class:`RankPlace`.
        mailbox: brings steps as bytes; an empty message ends the process.
        answers: gets what functions return that rank 0 sends.
        reports: gets a :class:`Report` when the rank meets the others, when it is ready, and if it fails.
    """
    tqdm.set_lock(threading.RLock())  # its own would be a semaphore, which is left over when the process is killed
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal: the parent decides
    parent_watch(lambda: os._exit(PARENT_DIED))
    place, reader, ready = RankPlace(rank, port), rank - 1, False
    threading.Thread(target=_beat, args=(mailbox, reader), name="tritonllm-beat", daemon=True).start()
    try:

        def join(device: torch.device) -> Team:
            reports.send(Report())
            return place.join(config.parallel, device)

        runner, memory, device, team = load_rank(config, join, place.rank)
        between = BetweenSteps(RankWeights(runner.model, memory), rank, answers.send_bytes)
        gc.collect()
        leave_out_of_searches()  # a search for garbage in the middle of a step would hold all ranks up
        MONITOR.serving = ready = True
        reports.send(Report(ready=True))
        following = Following(runner, between, partial(mailbox.acted, reader))
        follow(following, mailbox, reader, SPIN if device.type == "cuda" else 0.0)
        runner.release_graphs()
        team.shut()
    except BaseException as error:
        logger.debug("rank %d failed", place.rank, exc_info=True)
        with suppress(OSError):  # rank 0 has ended
            reports.send(report_of(error, ready))
        os._exit(1)  # without waiting for collectives that nobody will join


def follow(following: "Following", mailbox: Mailbox, reader: int, spin: float) -> None:
    """Run steps until the empty message comes."""
    while message := mailbox.receive(reader, spin=spin):
        following.run(message)


class Following:
    """Runs the steps that rank 0 sends, and compares some with its own.

    Args:
        runner: the runner of this rank.
        between: does what comes instead of a step.
        acted: called behind each step, and before what comes instead of one, which may take longer than a step may.
    """

    def __init__(self, runner: ModelRunner, between: BetweenSteps, acted: Callable[[], object] = lambda: None) -> None:
        self._runner, self._between, self._acted, self._comparison = runner, between, acted, Comparison()

    def run(self, message: bytearray | memoryview) -> None:
        """Start the step in a message of :class:`~tritonllm.engine.ranks.executor.GroupExecutor`.

        Raises:
            DivergedError: a step before was another one than rank 0's.
            MalformedError: it is no such message.
            ValueError: as :meth:`BetweenSteps.do`.
        """
        step, told, order = unpack(message)
        if order is not None:
            self._acted()
            self._between.do(order)
            return
        self._comparison.check(told)
        self._comparison.note(self._runner.follow(step))
        self._acted()


def _beat(mailbox: Mailbox, reader: int) -> None:
    while True:
        mailbox.beat(reader)
        time.sleep(TICK)


def report_of(error: BaseException, ready: bool) -> Report:
    """What a rank says of what ends it, before or after it was ready."""
    invalid = isinstance(error, ValueError) and not ready
    text = str(error) if invalid else f"{type(error).__name__}: {error}"
    return Report(text, invalid=invalid, followed=lost_a_peer(error))


def lost_a_peer(error: BaseException) -> bool:
    """A collective broke, which is another rank's doing."""
    text = str(error)
    return isinstance(error, dist.DistError) or any(name in text for name in ("gloo", "Connection", "NCCL"))

"""A server's ranks other than the first, where a launcher has started them: they compute, and only rank 0 listens.

Each is two processes, as a server is: this one waits for signals, which a thread inside a collective would not see, and
the other one runs the steps that rank 0 sends.
"""

import logging
import multiprocessing
import os
import signal
import sys
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType

from tritonllm import env
from tritonllm.config.engine import EngineConfig
from tritonllm.dist.watch import PARENT_DIED, kill, parent_watch
from tritonllm.serve.engines.child_process import log_to_stderr
from tritonllm.system.starting import later, run_spawned

logger = logging.getLogger(__name__)
DONE = 0
READY = "ready"


def other_rank(config: EngineConfig) -> env.Launched | None:
    """Which rank this process is, if it is one that a launcher has started and not the first; else ``None``."""
    place = env.launched() if config.parallel.distributed_executor_backend == "external_launcher" else None
    return place if place is not None and place.rank > 0 else None


def follow_the_first(config: EngineConfig, place: env.Launched, drain_seconds: float, log_level: int | None) -> int:
    """Run the steps of rank 0 until its server ends, or SIGTERM or Ctrl-C comes.

    Args:
        config: the configuration of the engine.
        place: the place of this rank among the launched ones.
        drain_seconds: how long rank 0 has for running requests after such a signal, which a launcher sends to all
            ranks, in seconds: this rank still computes them. While the model is loaded nothing is waited for.
        log_level: the level of the other process's messages on stderr; ``None``: it writes none.

    Returns:
        The exit status, 0.

    Raises:
        ValueError, RuntimeError: what ended this rank.
    """
    spawn = multiprocessing.get_context("spawn")
    reports, theirs = spawn.Pipe(duplex=False)
    arguments = ("tritonllm.serve.processes.launched", "run_rank", config, place, theirs, log_level)
    process = spawn.Process(target=run_spawned, args=arguments, name=f"tritonllm-rank-{place.rank}")
    started, said = False, ""

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal said
        signal.signal(number, lambda number, frame: sys.exit(DONE))  # who asks twice does not wait
        said = "stopped" if started else "stopped while the model was loaded"  # not here: it may be in what is said
        if started:
            process.join(drain_seconds)
        sys.exit(DONE)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with later(signal.SIGINT, signal.SIGTERM):  # one that has begun without its arguments would tell
            process.start()
        theirs.close()
        wait([reports, process.sentinel])
        if (report := _read(reports)) == READY:
            started = True
            logger.info("rank %d computes for the server of rank 0", place.rank)
            process.join()
            report = _read(reports)
        process.join()
        _check_end(process, place, report)
        return DONE
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if process.pid is not None:
            kill(process)
            process.join()
        if said:
            logger.info(said)


def _check_end(process: BaseProcess, place: env.Launched, report: str | ValueError | None) -> None:
    """Raises what a rank has reported, unless it was told to end."""
    if isinstance(report, ValueError):
        raise report
    status = process.exitcode
    if status:
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        raise RuntimeError(f"the process of rank {place.rank} {how}" + (f": {report}" if report else ""))


def _read(reports: Connection) -> str | ValueError | None:
    """What lies in the pipe, whose other end is a process of ours; ``None`` if nothing does."""
    try:
        return reports.recv() if reports.poll() else None
    except (EOFError, OSError):  # it ended without a word
        return None


def run_rank(config: EngineConfig, place: env.Launched, reports: Connection, log_level: int | None) -> None:
    """The other process's main function.

    Args:
        reports: gets :data:`READY`, and if the rank fails why, as text or, if the user's wish is refused, as
            ``ValueError``.
    """
    from tritonllm.engine.ranks.launched import (
        LaunchedRanks,  # with the engine, which the process that waits does without
    )

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parent_watch(lambda: os._exit(PARENT_DIED))
    if log_level is not None:
        log_to_stderr(log_level)
    try:
        LaunchedRanks(config, place).follow(config, lambda: reports.send(READY))
    except Exception as error:
        logger.debug("rank %d failed", place.rank, exc_info=True)
        reports.send(ValueError(str(error)) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}")
        os._exit(1)  # without waiting for collectives that nobody will join

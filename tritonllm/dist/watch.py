"""Rank 0's watch over the other ranks: who died, who stopped, who does not get on, and why."""

import logging
import multiprocessing
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from tritonllm.dist.mailbox import Mailbox
from tritonllm.system.lost_hosts import end_when_silent

logger = logging.getLogger(__name__)
TICK = 0.2  # seconds between beats, and between looks at them
GATHER = 0.3  # seconds in which a rank that was the first to fail may say so: the others fail of it
SETTLE = 5.0  # seconds in which the reason of a broken collective is known
PARENT_DIED = 3  # exit status of a process whose parent has
UNGUARDED = "; a script makes an engine below `if __name__ == '__main__':`, for this process imports it"


class WorkerError(RuntimeError):
    """A rank of the group failed, and with it the group; the message says which one and why."""


@dataclass(frozen=True)
class Report:
    """What a rank says of itself.

    Attributes:
        error: why the rank ends; ``None`` if it does not.
        ready: whether the rank is ready; if not, and without an error, it is about to meet the others.
        invalid: whether the error is about what the user asked for.
        followed: whether the rank ends because another rank did.
    """

    error: str | None = None
    ready: bool = False
    invalid: bool = False
    followed: bool = False


class GroupFailure:
    """Why a group of ranks has failed, once it has: a thread that watches tells it, and it is raised where steps run.

    Args:
        on_failure: called by the thread that tells, when it is known.
    """

    def __init__(self, on_failure: Callable[[], None] = lambda: None) -> None:
        self._on_failure = on_failure
        self._reason: tuple[str, bool] | None = None  # the message, and whether it is about what the user asked for
        self._changed = threading.Condition()

    @property
    def is_known(self) -> bool:
        return self._reason is not None

    def tell(self, message: str, invalid: bool) -> None:
        """The group has failed.

        Args:
            message: says which rank failed, and why.
            invalid: whether the failure is about what the user asked for.
        """
        with self._changed:
            self._reason = message, invalid
            self._changed.notify_all()
        self._on_failure()

    def check(self) -> None:
        """Check that no rank has failed.

        Raises:
            WorkerError: a rank has failed.
            ValueError: it refuses what the user asked for.
        """
        if self._reason is not None:
            message, invalid = self._reason
            raise ValueError(message) if invalid else WorkerError(message)

    def settle(self) -> None:
        """:meth:`check`, once it can be known why a collective broke."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_known, SETTLE)
        self.check()

    def wait_for(self, done: Callable[[], bool]) -> None:
        """Wait until something is done, or never will be. Same errors as :meth:`check`.

        Args:
            done: asked now, and after each :meth:`look_again`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.is_known or done())
        self.check()

    def look_again(self) -> None:
        """Wake those who wait: what they wait for may be done."""
        with self._changed:
            self._changed.notify_all()


class Watch:
    """A thread that notices failures. The first one ends the other ranks, so that no collective waits for them.

    Args:
        processes: the process of each rank.
        reports: the connection on which each rank reports.
        mailbox: the mailbox that the ranks read; rank r is reader ``r - 1``.
        patience: how long a rank may be silent, in seconds.
        step_patience: how long a rank may take for a step, in seconds.
        on_failure: called once, in the thread.

    Attributes:
        failure: what has gone wrong, once something has.
    """

    def __init__(
        self,
        processes: Mapping[int, BaseProcess],
        reports: Mapping[int, Connection],
        mailbox: Mailbox,
        *,
        patience: float,
        step_patience: float,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self._processes, self._reports, self._mailbox = dict(processes), dict(reports), mailbox
        self._patience, self._step_patience = patience, step_patience
        self.failure = GroupFailure(on_failure)
        self._coming: set[int] = set()
        self._ready: set[int] = set()
        self._stopping = False
        self._seen = dict.fromkeys(processes, (0, 0))  # beats and acts
        self._silent = dict.fromkeys(processes, 0.0)
        self._slow = dict.fromkeys(processes, 0.0)
        self._thread = threading.Thread(target=self._run, name="tritonllm-watch", daemon=True)
        self._thread.start()

    def await_coming(self) -> None:
        """Wait until all ranks are about to meet. One that fails before would be waited for in vain. Same errors as
        :meth:`GroupFailure.check`."""
        self.failure.wait_for(lambda: len(self._coming) == len(self._processes))

    def await_ready(self) -> None:
        """Wait until all ranks have said so. Same errors as :meth:`GroupFailure.check`."""
        self.failure.wait_for(lambda: len(self._ready) == len(self._processes))

    def stop(self) -> None:
        """Watch no more: what ends now was told to."""
        self._stopping = True

    def _run(self) -> None:
        last = time.monotonic()
        while not self._stopping and not self.failure.is_known:
            ends = [process.sentinel for process in self._processes.values()]
            events: list[Any] = [*ends, *self._reports.values()]
            wait(events, TICK)
            now = time.monotonic()
            # of time that this process itself was stopped, or waited for a core, the others are not to blame
            elapsed, last = min(now - last, 2 * TICK), now
            found = self._look(elapsed)
            if found and not self._stopping:
                time.sleep(GATHER)
                self._fail({**self._look(0.0), **found} if len(found) == 1 else found)

    def _look(self, elapsed: float) -> dict[int, tuple[int, str, bool]]:
        """Ranks that failed: how far from the root that is, the reason, and whether it is about the user's wish."""
        found: dict[int, tuple[int, str, bool]] = {}
        for rank, process in self._processes.items():
            problem = self._problem(rank, process, elapsed)
            if problem is not None:
                found[rank] = problem
        return found

    def _problem(self, rank: int, process: BaseProcess, elapsed: float) -> tuple[int, str, bool] | None:
        code = process.exitcode  # before its report: after its end nothing more comes
        report = self._read(rank)
        if report is not None and report.error is not None:
            return (2 if report.followed else 0), report.error, report.invalid
        if report is not None:
            (self._ready if report.ready else self._coming).add(rank)
            self.failure.look_again()
        if code is not None:
            how = f"was ended by signal {-code}" if code < 0 else f"ended with status {code}"
            is_silent = rank not in self._coming and rank not in self._ready  # what it cannot report is its script
            return 0, f"its process {how}{UNGUARDED if code == 1 and is_silent else ''}", False
        if rank not in self._ready:
            return None  # it loads and compiles: only its end counts
        beats, acts = self._mailbox.beats(rank - 1), self._mailbox.acts(rank - 1)
        before = self._seen[rank]
        self._seen[rank] = beats, acts
        self._silent[rank] = 0.0 if beats != before[0] else self._silent[rank] + elapsed
        busy = acts < self._mailbox.sent
        self._slow[rank] = self._slow[rank] + elapsed if busy and acts == before[1] else 0.0
        if self._silent[rank] > self._patience:
            return 1, f"it has been silent for {self._silent[rank]:.0f} s (worker_timeout)", False
        if self._slow[rank] > self._step_patience:
            return 1, f"it has not finished a step for {self._slow[rank]:.0f} s (step_timeout)", False
        return None

    def _read(self, rank: int) -> Report | None:
        pipe = self._reports[rank]
        try:
            return pipe.recv() if pipe.poll() else None
        except (EOFError, OSError):  # it has ended: its status tells more
            return None

    def _fail(self, found: Mapping[int, tuple[int, str, bool]]) -> None:
        rank = min(found, key=lambda rank: (found[rank][0], rank))
        _, reason, invalid = found[rank]
        process, step = self._processes[rank], self._mailbox.acts(rank - 1)
        message = reason
        if not invalid:
            message = f"rank {rank} (process {process.pid}) failed after {step} steps: {reason}"
            logger.error("%s; the group ends with it", message)
        for other in self._processes.values():
            kill(other)
        self.failure.tell(message, invalid)


def kill(process: BaseProcess) -> None:
    """End a process at once, also one that is stopped."""
    if process.is_alive():
        process.kill()


def host_watch(connected: socket.socket, seconds: float, action: Callable[[OSError], None]) -> Callable[[], None]:
    """Call ``action`` in a thread when another host has given no sign of life for so long, or has begun anew. That what
    listens there ends is not noticed.

    Args:
        connected: a connection on which nothing is said; this closes it.
        action: gets the error with which that connection ended.

    Returns:
        What ends the watch.
    """
    end_when_silent(connected, seconds)
    connected.settimeout(None)

    def watch() -> None:
        with connected:
            try:
                connected.recv(1)
            except OSError as error:
                action(error)

    def stop() -> None:
        with suppress(OSError):  # it has ended
            connected.shutdown(socket.SHUT_RDWR)

    threading.Thread(target=watch, name="tritonllm-host", daemon=True).start()
    return stop


def parent_watch(action: Callable[[], None]) -> None:
    """Call ``action`` in a thread when the parent process has died."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        action()

    threading.Thread(target=watch, name="tritonllm-parent", daemon=True).start()

"""Reads out of other engines' memory, by several threads, with deadlines. No torch.

A read that was started cannot be called back, and whoever has asked for it must know when nothing is written any more:
the slots that it goes to are other blocks' then. So a read that fails or is late ends its agent
(:meth:`tritonllm.engine.transfer.nixl_agent.Agent.end`), as soon as the reads that others have with it are over; those
that begin meanwhile take a new one. All have deadlines, so that takes no longer than one of them.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tritonllm.engine.transfer.nixl_agent import Agent, MakeAgent, Span

PAUSE = 0.0005  # seconds between two looks at a read
MOST_REMOTES = 256  # that an agent knows; then comes a new one


@dataclass(eq=False)
class _Shared:
    """An agent, and how many threads read with it."""

    agent: Agent
    calls: threading.Lock = field(default_factory=threading.Lock)  # one at a time
    remotes: dict[bytes, str] = field(default_factory=dict)  # names, by what describes them
    users: int = 0
    retired: bool = False
    ended: bool = False


class NixlReader:
    """Reads other agents' memory. For any thread.

    Args:
        make: makes an agent with which the memory that reads go to is registered.

    Raises:
        OSError: it cannot make an agent.
    """

    def __init__(self, make: MakeAgent) -> None:
        self._make = make
        self._changed = threading.Condition()
        self._closed = False
        self._current: _Shared | None = _Shared(make())

    def read(self, metadata: bytes, mine: Sequence[Span], theirs: Sequence[Span], deadline: float) -> None:
        """Read spans of another agent's memory; when this is over, nothing is written to ``mine`` any more.

        Args:
            metadata: the metadata of the other agent, as NIXL gives it.
            mine, theirs: spans of this and of the other agent's memory, as many of both, of the same lengths.
            deadline: when to give up, by ``time.monotonic``.

        Raises:
            OSError: it has failed, or was late; ``mine`` hold anything.
        """
        shared, whole = self._enter(), False
        try:
            self._read(shared, metadata, mine, theirs, deadline)
            whole = True
        finally:
            self._leave(shared, whole)

    def close(self, seconds: float) -> None:
        """End what is under way, in so many seconds at most."""
        until = time.monotonic() + seconds
        with self._changed:
            self._closed = True
            shared, self._current = self._current, None
            if shared is not None:
                shared.retired = True
                while shared.users and time.monotonic() < until:
                    self._changed.wait(max(0.0, until - time.monotonic()))
                self._end(shared)

    def _enter(self) -> _Shared:
        with self._changed:
            if self._closed:
                raise ConnectionError("this connector is closed")
            if self._current is None:
                self._current = _Shared(self._make())
            self._current.users += 1
            return self._current

    def _leave(self, shared: _Shared, whole: bool) -> None:
        with self._changed:
            shared.users -= 1
            if not whole or len(shared.remotes) >= MOST_REMOTES:
                shared.retired = True
                if self._current is shared:
                    self._current = None
            self._changed.notify_all()
            if not whole:
                while shared.users:
                    self._changed.wait()
            self._end(shared)

    def _end(self, shared: _Shared) -> None:
        if shared.retired and not shared.users and not shared.ended:
            shared.ended = True
            shared.agent.end()

    def _read(
        self, shared: _Shared, metadata: bytes, mine: Sequence[Span], theirs: Sequence[Span], deadline: float
    ) -> None:
        with shared.calls:
            name = shared.remotes.get(metadata)
            if name is None:
                name = shared.remotes[metadata] = shared.agent.connect(metadata)
            read = shared.agent.start(name, mine, theirs)
        while True:
            with shared.calls:
                if read.done():
                    read.release()
                    return
            if self._closed:
                raise ConnectionError("this connector is closed")
            if time.monotonic() >= deadline:
                raise TimeoutError("it took too long")
            time.sleep(PAUSE)

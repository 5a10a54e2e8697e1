"""NIXL (https://github.com/ai-dynamo/nixl) as far as the connector needs it: memory that is registered, and reads out
of another process's. No torch.

An agent knows its own memory and, from a few hundred bytes that describe them (its metadata), other agents. A read is
one-sided: nobody at the other end answers, so it goes by RDMA where there is such a network, else by what UCX has
(another process's memory on the same machine, TCP).

What goes wrong is an ``OSError`` here, whatever the library raises. An agent is for one thread at a time.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, Protocol
from uuid import uuid4

import numpy as np

from tritonllm.system.extras import install

BACKEND = "UCX"
PROGRESS = 100  # microseconds between two looks of an agent's own thread at its connections; with 0 it fills a core
Span = tuple[int, int]  # an address, and bytes there


class Read(Protocol):
    """A read that was started."""

    def done(self) -> bool:
        """Whether it is over.

        Raises:
            OSError: it has failed.
        """

    def release(self) -> None:
        """Forget it; it is done."""


class Agent(Protocol):
    """An agent of NIXL, which reads other agents' memory and lets them read its own."""

    def register(self, memory: Sequence[np.ndarray]) -> None:
        """What reads may touch: arrays of uint8, each in one piece."""

    def metadata(self) -> bytes:
        """What others must know to read what is registered."""

    def connect(self, metadata: bytes) -> str:
        """The name of the agent that this describes, for :meth:`start`."""

    def start(self, name: str, mine: Sequence[Span], theirs: Sequence[Span]) -> Read:
        """Begin to read these spans of another agent's memory into as many of this one's, of the same lengths."""

    def end(self) -> None:
        """Give up all there is. After this nothing is read or written any more, whatever was under way."""


MakeAgent = Callable[[], Agent]


def load_nixl() -> MakeAgent:
    """What makes agents of the library.

    Raises:
        ValueError: it is not installed.
    """
    try:
        nixl = import_module("nixl")
    except ImportError as error:
        raise ValueError(
            f"kv_transfer_config: kv_connector='Nixl' needs the package nixl ({error}): {install('nixl')}, "
            "or take 'Peer'"
        ) from error
    return lambda: NixlAgent(nixl)


class NixlAgent:
    """An agent of the library. It is made with the classes below the library's own ``nixl_agent``, whose thread never
    rests.

    Args:
        nixl: the package.

    Raises:
        OSError: it cannot have one.
    """

    def __init__(self, nixl: Any) -> None:
        own = (one for one in vars(nixl).values() if isinstance(one, type) and issubclass(one, Exception))
        self._errors: tuple[type[Exception], ...] = (*own, RuntimeError)
        self._nixl = nixl
        settings = nixl.nixlAgentConfig()
        settings.useProgThread, settings.pthrDelay = True, PROGRESS
        self._agent = self._call(nixl.nixlAgent, uuid4().hex, settings)  # the same name would be the same agent
        self._reads: set[NixlRead] = set()
        self._backends = [self._call(self._agent.createBackend, BACKEND, {})]

    def register(self, memory: Sequence[np.ndarray]) -> None:
        spans = [(part.ctypes.data, part.nbytes, 0, "") for part in memory]
        descriptions = self._call(self._nixl.nixlRegDList, self._nixl.DRAM_SEG, spans)
        self._call(self._agent.registerMem, descriptions, self._backends)

    def metadata(self) -> bytes:
        data: bytes = self._call(self._agent.getLocalMD)
        return data

    def connect(self, metadata: bytes) -> str:
        name: bytes | str = self._call(self._agent.loadRemoteMD, metadata)
        return name.decode() if isinstance(name, bytes) else name

    def start(self, name: str, mine: Sequence[Span], theirs: Sequence[Span]) -> Read:
        here, there = (
            self._call(self._nixl.nixlXferDList, self._nixl.DRAM_SEG, [(*span, 0) for span in side])
            for side in (mine, theirs)
        )
        reads = self._nixl.NIXL_READ
        read = NixlRead(self, self._call(self._agent.createXferReq, reads, here, there, name, b"", self._backends))
        self._reads.add(read)
        self._call(self._agent.postXferReq, read.handle, b"")
        return read

    def is_done(self, read: "NixlRead") -> bool:
        state = self._call(self._agent.getXferStatus, read.handle)
        if state not in (self._nixl.NIXL_SUCCESS, self._nixl.NIXL_IN_PROG):
            raise OSError(f"NIXL: a read has failed ({state})")
        return bool(state == self._nixl.NIXL_SUCCESS)

    def release(self, read: "NixlRead") -> None:
        self._reads.discard(read)
        self._call(self._agent.releaseXferReq, read.handle)

    def end(self) -> None:
        """Cancelling a read is not enough: with NIXL 1.5.1 over TCP, what the other side had been asked for was
        written seconds later. Destroying the agent closes its connections, and unregisters its memory."""
        for read in self._reads:
            with suppress(OSError):  # it cannot be cancelled
                self._call(self._agent.releaseXferReq, read.handle)
        self._reads.clear()
        self._agent = None

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except self._errors as error:
            problem = f"NIXL: {error}"
        raise OSError(problem)  # outside, so that it does not keep alive what the library's error holds


class NixlRead:
    """A read of :class:`NixlAgent`; its ``handle`` is the library's."""

    def __init__(self, agent: NixlAgent, handle: int) -> None:
        self._agent, self.handle = agent, handle

    def done(self) -> bool:
        return self._agent.is_done(self)

    def release(self) -> None:
        self._agent.release(self)

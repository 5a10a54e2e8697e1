"""Agents that read each other's memory in this process, as NIXL's do between processes, and fail as a test wishes."""

import ctypes
from collections.abc import Callable, Sequence

import numpy as np

from tritonllm.engine.transfer.nixl_agent import Span


class Network:
    """Makes agents that reach each other.

    Attributes:
        fault: of reads that begin now. ``refuse``: none can be started; ``break``: half comes, then it fails;
            ``flip``: a byte is wrong; ``stall``: nothing comes before :meth:`arrive_late`.
        before_read: is called when one begins.
        agents: that were made, in order.
    """

    def __init__(self) -> None:
        self.fault: str | None = None
        self.before_read: Callable[[], None] = lambda: None
        self.agents: list[StandInAgent] = []
        self.stalled: list[StandInRead] = []

    def agent(self) -> "StandInAgent":
        self.agents.append(StandInAgent(self, len(self.agents)))
        return self.agents[-1]

    @property
    def living(self) -> int:
        return sum(not agent.ended for agent in self.agents)

    def arrive_late(self) -> int:
        """What was stalled is written after all, unless its agent has ended; how many reads that were."""
        late = [read for read in self.stalled if not read.agent.ended]
        for read in late:
            read.copy()
        self.stalled.clear()
        return len(late)


class StandInAgent:
    def __init__(self, network: Network, number: int) -> None:
        self.network, self.number = network, number
        self.memory: list[np.ndarray] = []
        self.ended = False

    def register(self, memory: Sequence[np.ndarray]) -> None:
        assert all(part.flags.c_contiguous and part.dtype == np.uint8 for part in memory)
        self.memory += memory

    def metadata(self) -> bytes:
        return b"agent %d" % self.number

    def connect(self, metadata: bytes) -> str:
        return metadata.decode()

    def start(self, name: str, mine: Sequence[Span], theirs: Sequence[Span]) -> "StandInRead":
        self.network.before_read()
        other = self.network.agents[int(name.split()[1])]
        if other.ended or self.network.fault == "refuse":
            raise OSError("nobody answers")
        self.check(mine)
        other.check(theirs)
        return StandInRead(self, mine, theirs, self.network.fault)

    def check(self, spans: Sequence[Span]) -> None:
        assert not self.ended
        places = [(part.ctypes.data, part.ctypes.data + part.nbytes) for part in self.memory]
        for address, size in spans:
            assert any(start <= address and address + size <= end for start, end in places), "it is not registered"

    def end(self) -> None:
        assert not self.ended
        self.ended = True


class StandInRead:
    def __init__(self, agent: StandInAgent, mine: Sequence[Span], theirs: Sequence[Span], fault: str | None) -> None:
        self.agent, self.mine, self.theirs, self.fault = agent, list(mine), list(theirs), fault
        if fault == "stall":
            agent.network.stalled.append(self)
        else:
            self.copy(len(mine) // 2 if fault == "break" else None)
        if fault == "flip":
            ctypes.c_ubyte.from_address(self.mine[-1][0]).value ^= 1

    def copy(self, count: int | None = None) -> None:
        for (to, size), (source, same) in list(zip(self.mine, self.theirs, strict=True))[:count]:
            assert size == same
            ctypes.memmove(to, source, size)

    def done(self) -> bool:
        assert not self.agent.ended
        if self.fault == "break":
            raise OSError("the other side is gone")
        return self.fault != "stall" or self not in self.agent.network.stalled

    def release(self) -> None:
        assert self.done()

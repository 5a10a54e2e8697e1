"""Reads by several threads: no slot is written after its read is over, and one that fails costs others nothing."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.nixl_agents import Network
from support.server import eventually
from support.waiting import PATIENCE

from tritonllm.engine.transfer import nixl_reader as kv_nixl_reader
from tritonllm.engine.transfer.nixl_reader import NixlReader


class Memory:
    """Of two agents: ``source`` is numbered, and ``read(row)`` reads one row of it to the same one of ``sink``."""

    def __init__(self):
        self.network = Network()
        self.source, self.sink = np.arange(40, dtype=np.uint8).reshape(5, 8), np.full((5, 8), 99, np.uint8)
        server = self.network.agent()
        server.register([self.source])
        self.metadata = server.metadata()

        def make():
            agent = self.network.agent()
            agent.register([self.sink])
            return agent

        self.reader = NixlReader(make)

    def read(self, row, seconds=PATIENCE, metadata=None):
        spans = ([(part.ctypes.data + 8 * row, 8)] for part in (self.sink, self.source))
        self.reader.read(metadata or self.metadata, *spans, time.monotonic() + seconds)


@pytest.fixture
def memory():
    made = Memory()
    yield made
    made.reader.close(PATIENCE)
    assert made.network.living == 1  # the one that is read


def test_reads_share_an_agent_and_its_knowledge_of_others(memory):
    for row in (3, 1):
        memory.read(row)
    assert (memory.sink[[3, 1]] == memory.source[[3, 1]]).all() and (memory.sink[[0, 2, 4]] == 99).all()
    assert len(memory.network.agents) == 2


@pytest.mark.parametrize("fault", ["refuse", "break", "stall"])
def test_one_that_fails_ends_its_agent_and_the_next_one_has_another(memory, fault):
    memory.network.fault = fault
    with pytest.raises(OSError, match=r"nobody answers|is gone|too long"):
        memory.read(2, seconds=0.1)
    assert memory.network.agents[1].ended
    memory.sink[:] = 77  # they are another's now
    assert memory.network.arrive_late() == 0 and (memory.sink == 77).all()
    memory.network.fault = None
    memory.read(2)
    assert (memory.sink[2] == memory.source[2]).all() and memory.network.living == 2


def test_a_failure_waits_for_those_who_read_with_the_same_agent_and_disturbs_none(memory):
    network = memory.network
    network.fault = "stall"
    with ThreadPoolExecutor(3) as threads:
        other = threads.submit(memory.read, 1, 600.0)
        eventually(lambda: len(network.stalled) == 1)
        late = threads.submit(memory.read, 0, 0.2)
        eventually(lambda: len(network.stalled) == 2 and memory.reader._current is None)
        assert not late.done() and not network.agents[1].ended
        network.fault = None
        memory.read(2)  # with a new one
        assert len(network.agents) == 3 and not other.done()
        stalled = {read.mine[0][0] - memory.sink.ctypes.data: read for read in network.stalled}
        stalled[8].copy()
        network.stalled.remove(stalled[8])
        other.result(60)
        with pytest.raises(TimeoutError):
            late.result(60)
    assert network.agents[1].ended and network.arrive_late() == 0
    assert (memory.sink[1:3] == memory.source[1:3]).all() and (memory.sink[0] == 99).all()


def test_two_that_fail_together_end_their_agent_once(memory):
    memory.network.fault = "stall"
    with ThreadPoolExecutor(2) as threads:
        both = [threads.submit(memory.read, row, 0.3) for row in (0, 1)]
        assert all(isinstance(one.exception(60), TimeoutError) for one in both)
    assert memory.network.living == 1


def test_an_agent_that_knows_too_many_others_is_replaced(memory, monkeypatch):
    monkeypatch.setattr(kv_nixl_reader, "MOST_REMOTES", 2)
    second = memory.network.agent()
    second.register([memory.source])
    memory.read(0)
    memory.read(1, metadata=second.metadata())
    memory.read(2, metadata=second.metadata())
    assert (memory.sink[:3] == memory.source[:3]).all()
    assert [agent.ended for agent in memory.network.agents] == [False, True, False, False]
    second.end()


def test_closing_ends_what_is_under_way(memory):
    memory.network.fault = "stall"
    with ThreadPoolExecutor(1) as threads:
        stalled = threads.submit(memory.read, 0, 600.0)
        eventually(lambda: memory.network.stalled)
        memory.reader.close(60.0)
        with pytest.raises(ConnectionError, match="closed"):
            stalled.result(60)
        with pytest.raises(ConnectionError, match="closed"):
            memory.read(1)
    assert memory.network.arrive_late() == 0

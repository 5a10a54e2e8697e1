"""NIXL itself, where the package is installed."""

import os
import signal
import time

import numpy as np
import pytest
from support.nixl_processes import ALL, SLOTS, engines
from support.server import eventually
from support.waiting import PATIENCE

from tritonllm.engine.transfer.nixl_agent import load_nixl

pytest.importorskip("nixl", reason="needs the extra nixl")


def spans(part, rows):
    return [(part.ctypes.data + row * part.shape[1], part.shape[1]) for row in rows]


@pytest.fixture
def pair():
    """Two agents of this process, and their memory."""
    make = load_nixl()
    ends = []
    for fill in (np.arange(4)[:, None], 99):
        memory = np.empty((4, 5000), np.uint8)
        memory[:] = fill
        agent = make()
        agent.register([memory])
        ends.append((agent, memory))
    yield ends
    for agent, _ in ends:
        agent.end()


def finish(read):
    eventually(read.done)
    read.release()


def test_spans_are_read_and_nothing_else_is_touched(pair):
    (server, source), (client, sink) = pair
    name = client.connect(server.metadata())
    finish(client.start(name, spans(sink, (2, 0)), spans(source, (1, 3))))
    assert sink[:, 0].tolist() == [3, 99, 1, 99] and (sink == sink[:, :1]).all()
    finish(client.start(name, spans(sink, (1,)), spans(source, (2,))))
    assert (sink[1] == 2).all()


def test_what_is_not_registered_or_no_agent_is_an_error(pair):
    (server, source), (client, sink) = pair
    name, stranger = client.connect(server.metadata()), np.empty(5000, np.uint8)
    for mine, theirs in (
        ([(stranger.ctypes.data, 5000)], spans(source, (1,))),
        (spans(sink, (1,)), [(stranger.ctypes.data, 5000)]),
    ):
        with pytest.raises(OSError, match="NIXL"):
            client.start(name, mine, theirs)
    with pytest.raises(OSError, match="NIXL"):
        client.connect(b"somebody")
    with pytest.raises(OSError, match="NIXL"):
        client.start("nobody", spans(sink, (1,)), spans(source, (1,)))


@pytest.mark.parametrize("transports", ["all", "tcp,self"])
def test_blocks_go_from_process_to_process(transports, monkeypatch):
    monkeypatch.setenv("UCX_TLS", transports)
    with engines(timeout=PATIENCE) as (producer, consumer):
        assert producer.ask("save") == SLOTS
        consumer.ask("begin", producer.ask("offer"))
        assert consumer.ask("end") == [True] * SLOTS and consumer.ask("slots") == ALL


def test_a_process_that_stops_is_not_waited_for_and_writes_nothing_later(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp,self")  # other transports need nothing of a process that has stopped
    with engines(timeout=PATIENCE) as (producer, consumer):
        producer.ask("save")
        where = producer.ask("place")
        assert consumer.ask("read", PATIENCE, *where) == "done" and consumer.ask("slots") == ALL
        os.kill(producer.process.pid, signal.SIGSTOP)
        assert consumer.ask("read", 2.0, *where) == "it took too long"
        consumer.ask("fill", 77)
        os.kill(producer.process.pid, signal.SIGCONT)
        time.sleep(1.0)  # if the agent lives on, all is there by then
        assert consumer.ask("slots") == [77] * SLOTS


def test_a_process_that_is_killed_is_a_miss():
    with engines(timeout=PATIENCE) as (producer, consumer):
        producer.ask("save")
        offer = producer.ask("offer")
        producer.process.kill()
        producer.process.join(PATIENCE)
        consumer.ask("begin", offer)
        assert consumer.ask("end") == [False] * SLOTS

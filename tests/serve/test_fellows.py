"""An engine that takes its steps with others: it joins them while it has nothing to compute itself, whatever it waits
for, and ends with them."""

import os
import threading
import time
from array import array
from concurrent.futures import Future

import msgspec
import pytest
import zmq
from support.engines import greedy, tiny_llm
from support.waiting import PATIENCE

from tritonllm import SamplingParams, StructuredOutputsParams
from tritonllm.dist.lockstep import Board, LeftError, Lockstep
from tritonllm.engine.data.request import PACKED
from tritonllm.engine.loop.readiness import BRIEF_WAIT, LONGEST_WAIT
from tritonllm.engine.step.common_steps import Need
from tritonllm.serve.engines import lockstep_engines as module
from tritonllm.serve.engines.engine_process import EngineLoop
from tritonllm.serve.engines.lockstep_engines import LockstepEngines, end_if_silent
from tritonllm.serve.engines.messages import Add, Stop, decode_news, pack_params

ONE_TOKEN = Need(decodes=1, rows=1)


class Other:
    """Another engine, in a thread: it wants so many steps, and joins all others until it leaves."""

    def __init__(self, board, wants):
        self._lockstep, self._left = Lockstep(board, 1, PATIENCE), wants
        self.taken, self._over = 0, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        while not self._over.is_set():
            if self._left or self._lockstep.is_behind:
                try:
                    self._lockstep.agree(ONE_TOKEN)
                except LeftError:
                    return
                self._left, self.taken = max(0, self._left - 1), self.taken + 1
            time.sleep(1e-4)

    @property
    def has_had_its_steps(self):
        return self._left == 0

    def end(self):
        self._over.set()
        self._thread.join(PATIENCE)


@pytest.fixture
def sockets():
    context = zmq.Context()
    router, client = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    for socket in (router, client):
        socket.set_hwm(0)  # as the engine's own: a test reads late what an engine without waits says very often
    router.bind("inproc://engine")
    client.connect("inproc://engine")
    yield router, client
    context.destroy(linger=0)


def joined_engine(board):
    """An engine on the CPU, without experts, that takes its steps with others."""
    engine = tiny_llm().engine
    runner = engine._runner
    runner._team = runner._team._replace(lockstep=Lockstep(board, 0, PATIENCE, spin=0.01))
    return engine


def send(client, message):
    client.send(msgspec.msgpack.encode(message))


def request(params):
    return Add("a", None, array(PACKED, range(5, 20)).tobytes(), None, pack_params(params), 0)


def run_loop(engine, router):
    loop = threading.Thread(target=EngineLoop(engine, router).run, daemon=True)
    loop.start()
    return loop


def eventually(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(1e-3)


def last_update(client):
    """Of the only request; what else comes before is dropped."""
    while True:
        assert client.poll(1000 * PATIENCE)
        updates = decode_news(client.recv()).updates
        if updates and updates[-1].finished:
            return updates[-1]


def test_an_engine_without_requests_joins_and_then_answers(sockets):
    board = Board(2)
    engine, (router, client) = joined_engine(board), sockets
    loop, other = run_loop(engine, router), Other(board, 20)
    eventually(lambda: other.has_had_its_steps)
    assert engine.stats.steps == 0 and other.taken == 20
    time.sleep(0.05)  # it sleeps
    send(client, request(greedy(6)))
    assert last_update(client).outputs[0].finish_reason == "length"
    assert other.taken == 20 + engine.stats.steps and engine.stats.steps >= 6
    send(client, Stop())
    loop.join(PATIENCE)
    other.end()
    assert not loop.is_alive()


@pytest.mark.parametrize("waits_in", ["the loop", "the engine"])
def test_a_request_that_waits_for_its_grammar_holds_nobody_up(sockets, monkeypatch, waits_in):
    """Its engine goes on joining steps, and does not sleep before each for as long as an engine alone may."""
    board, grammar, waited = Board(2), Future(), []
    engine, (router, client) = joined_engine(board), sockets
    monkeypatch.setattr(engine.inputs, "parse" if waits_in == "the loop" else "grammar", lambda params: grammar)
    monkeypatch.setattr(engine._unscheduled, "wait", lambda seconds=LONGEST_WAIT: waited.append(seconds))
    loop, other = run_loop(engine, router), Other(board, 0)
    send(client, request(SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))))
    if waits_in == "the engine":
        eventually(lambda: waited)
    other._left = 200
    eventually(lambda: other.has_had_its_steps)
    assert not grammar.done() and engine.stats.steps == 0 and max(waited, default=0.0) <= BRIEF_WAIT
    grammar.set_exception(ValueError("no such grammar"))
    assert last_update(client).finished
    send(client, Stop())
    loop.join(PATIENCE)
    other.end()
    assert not loop.is_alive()


def test_it_does_not_wait_for_ever_if_there_is_something_else(sockets):
    board = Board(2)
    engine, (router, _) = joined_engine(board), sockets
    LockstepEngines(engine, engine.lockstep, router).await_work(longest=0.01)
    assert engine.stats.steps == 0


def test_the_loop_ends_when_another_has_left(sockets):
    board = Board(2)
    engine, (router, client) = joined_engine(board), sockets
    Lockstep(board, 1, PATIENCE).leave()
    send(client, request(greedy(6)))
    with pytest.raises(LeftError):
        EngineLoop(engine, router).run()


def test_a_silent_engine_ends_this_one(monkeypatch):
    board, ended, told = Board(2), [], []
    here, there = Lockstep(board, 0, 30.0), Lockstep(board, 1, PATIENCE)

    def end(status):
        ended.append(status)
        threading.Event().wait()  # its thread goes no further

    monkeypatch.setattr(module, "TICK", 0.01)
    monkeypatch.setattr(os, "_exit", end)
    there.beat(0.01)
    end_if_silent(here, 0.1, told.append)
    eventually(lambda: ended)
    assert ended == [1] and told == ["replica 1 has given no sign of life for 0.1 s, and shares experts with this one"]


def test_who_beats_or_has_left_or_has_not_begun_is_not_silent():
    board = Board(3)
    first, second = Lockstep(board, 0, 30.0), Lockstep(board, 1, PATIENCE)
    second.beat(1.0)
    assert [first.beat(1.0), first.beat(1.0)] == [{1: 0.0, 2: 0.0}, {1: 1.0, 2: 0.0}]
    second.beat(1.0)
    assert first.beat(1.0)[1] == 0.0
    second.leave()
    assert [first.beat(1.0)[1] for _ in range(3)] == [0.0] * 3

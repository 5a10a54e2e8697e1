"""Requests before they are scheduled."""

import time
from concurrent.futures import Future
from types import SimpleNamespace

from tritonllm.engine.loop import readiness
from tritonllm.engine.loop.readiness import Unscheduled


def state(name, grammar=None, fetch=None, sequences=1):
    return SimpleNamespace(request_id=name, grammar=grammar, fetch=fetch, sequences=[None] * sequences)


def fetch(future=None):
    return SimpleNamespace(done=False, future=future)


def test_only_those_are_taken_that_wait_for_something():
    waiting = Unscheduled()
    assert not waiting.take(state("a")) and not waiting
    assert waiting.take(state("b", Future())) and waiting.take(state("c", fetch=fetch(), sequences=3))
    assert len(waiting) == 2 and waiting.num_sequences == 4
    assert waiting.drop("b") and not waiting.drop("b") and not waiting.drop("a")
    waiting.clear()
    assert not waiting


def test_each_goes_on_when_it_has_all_it_waits_for():
    waiting, grammar, bad = Unscheduled(), Future(), Future()
    both, failing = state("both", grammar, fetch()), state("bad", bad)
    waiting.take(both)
    waiting.take(failing)
    assert waiting.ready() == []
    grammar.set_result(None)
    assert waiting.ready() == []
    both.fetch.done = True
    assert waiting.ready() == [(both, None)]
    bad.set_exception(ValueError("no such rule"))
    ((who, error),) = waiting.ready()
    assert who is failing and error == "structured_outputs could not be compiled: the log says why"
    assert not waiting and waiting.ready() == []


def test_it_waits_for_the_first_answer_but_not_for_long(monkeypatch):
    asked, limits = [], []

    def wait(futures, timeout, return_when):
        asked.append(set(futures))
        limits.append(timeout)

    monkeypatch.setattr(readiness, "wait", wait)
    naps = []
    monkeypatch.setattr(time, "sleep", naps.append)
    waiting, done = Unscheduled(), Future()
    done.set_result(None)
    grammar, answer = Future(), Future()
    waiting.take(state("a", grammar, fetch(answer)))
    waiting.take(state("b", done, fetch()))
    waiting.wait()
    assert asked == [{grammar, answer}] and limits == [readiness.LONGEST_WAIT]
    waiting.drop("a")
    waiting.wait()  # b waits for slots: there is no future to wait for
    assert len(asked) == 1 and len(naps) == 1
    waiting.take(state("c", done))
    waiting.wait()  # c may go on at once
    assert len(asked) == 1 and len(naps) == 1

"""Threads whose work may never end."""

import subprocess
import sys
import threading
from functools import partial

import pytest
from support.waiting import PATIENCE

from tritonllm.engine.transfer.workers import Workers, within


@pytest.mark.parametrize("count", [1, 3])
def test_what_is_given_is_done_in_order(count):
    workers, done = Workers(count, "test"), []
    results = [workers.submit(partial(lambda n: done.append(n) or n, n)) for n in range(20)]
    assert [one.result(PATIENCE) for one in results] == list(range(20)) and len(done) == 20
    assert count > 1 or done == list(range(20))
    with pytest.raises(ZeroDivisionError):
        workers.submit(lambda: 1 / 0).result(PATIENCE)
    assert workers.submit(lambda: 5).result(PATIENCE) == 5  # the thread goes on
    assert workers.close(PATIENCE) and workers.close(PATIENCE)
    assert workers.submit(lambda: 5).cancelled()


@pytest.mark.parametrize("drop", [False, True])
def test_a_close_waits_for_what_was_given_but_not_without_an_end(drop):
    workers, begun, go = Workers(1, "test"), threading.Event(), threading.Event()
    first = workers.submit(lambda: begun.set() or go.wait(PATIENCE))
    rest = [workers.submit(lambda: 1) for _ in range(3)]
    assert begun.wait(PATIENCE)
    assert not workers.close(0.01, drop=drop)
    assert [one.cancelled() for one in rest] == [drop] * 3
    go.set()
    assert workers.close(PATIENCE) and first.result(PATIENCE)
    assert drop or [one.result(PATIENCE) for one in rest] == [1] * 3


def test_work_that_may_take_too_long():
    assert within(PATIENCE, lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        within(PATIENCE, lambda: 1 / 0)
    go = threading.Event()
    with pytest.raises(TimeoutError):
        within(0.01, lambda: go.wait(PATIENCE))
    go.set()


def test_a_process_ends_although_work_does_not():
    code = """
import threading
from tritonllm.engine.transfer.workers import Workers
workers, begun = Workers(2, "test"), threading.Event()
workers.submit(lambda: begun.set() or threading.Event().wait())
begun.wait()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)

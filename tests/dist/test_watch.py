"""Why a group has failed: who waits for it, and who is told. Whether another host is lost."""

import queue
import socket
import struct
import threading

import pytest
from support.server import eventually
from support.waiting import PATIENCE

from tritonllm.dist import watch
from tritonllm.dist.watch import GroupFailure, WorkerError, host_watch


def test_a_failure_is_told_once_it_is_known():
    told = []
    failure = GroupFailure(lambda: told.append(failure.is_known))
    failure.check()
    assert not failure.is_known and told == []
    failure.tell("rank 1 failed", invalid=False)
    assert told == [True]
    for ask in (failure.check, failure.settle, lambda: failure.wait_for(lambda: False)):
        with pytest.raises(WorkerError, match="rank 1 failed"):
            ask()


def test_a_bad_wish_is_a_value_error():
    failure = GroupFailure()
    failure.tell("max_model_len is too large", invalid=True)
    with pytest.raises(ValueError, match="max_model_len"):
        failure.check()


def in_a_moment(action, *arguments):
    threading.Timer(0.05, action, arguments).start()


def test_a_reason_that_comes_late_is_waited_for(monkeypatch):
    monkeypatch.setattr(watch, "SETTLE", PATIENCE)
    failure = GroupFailure()
    in_a_moment(failure.tell, "rank 2 failed", False)
    with pytest.raises(WorkerError, match="rank 2 failed"):
        failure.settle()
    monkeypatch.setattr(watch, "SETTLE", 0.05)
    GroupFailure().settle()  # and no longer than that


def test_what_is_waited_for_comes_or_never_will():
    failure, ready = GroupFailure(), []

    def come():
        ready.append(1)
        failure.look_again()

    in_a_moment(come)
    failure.wait_for(lambda: bool(ready))
    in_a_moment(failure.tell, "rank 1 failed", False)
    with pytest.raises(WorkerError):
        failure.wait_for(lambda: False)


def listening():
    return socket.create_server(("127.0.0.1", 0))


def test_a_host_that_begins_anew_is_lost():
    errors = queue.SimpleQueue()
    with listening() as server:
        host_watch(socket.create_connection(server.getsockname()), PATIENCE, errors.put)
        taken, _ = server.accept()
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # its end is a reset
        taken.close()
        assert isinstance(errors.get(timeout=PATIENCE), ConnectionResetError)


@pytest.mark.parametrize("by_whom", ["the watch is ended", "the other side ends"])
def test_a_host_is_not_lost_when_a_connection_ends(by_whom):
    errors = queue.SimpleQueue()
    with listening() as server:
        stop = host_watch(socket.create_connection(server.getsockname()), PATIENCE, errors.put)
        taken, _ = server.accept()
        with taken:
            if by_whom == "the watch is ended":
                stop()
                assert taken.recv(1) == b""
        eventually(lambda: not any(thread.name == "tritonllm-host" for thread in threading.enumerate()))
        stop()
    assert errors.empty()

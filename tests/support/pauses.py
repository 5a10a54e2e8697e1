"""Pauses at random where threads, processes and connections meet, as a busy machine has them: ``--pauses SEED``.

A race that a quiet machine loses once in a thousand runs shows up in a few: a thread that has not begun, or that has
ended, when the one that started it goes on; a message that comes in two parts, or two that come together. Only this
process has pauses, and those that fork from it.
"""

import asyncio.events
import concurrent.futures
import functools
import multiprocessing.process
import queue
import random
import socket
import sys
import threading
import time
from collections.abc import Iterator

import pytest

PART = 0.4  # of the time, at most
PLACES = (  # class, method, chance of a pause before it, and behind it, longest pause in seconds
    (threading.Thread, "start", 0.0, 0.4, 0.1),
    (threading.Thread, "run", 0.4, 0.3, 0.1),
    (threading.Event, "set", 0.1, 0.2, 0.05),
    (threading.Condition, "notify", 0.0, 0.1, 0.05),
    (threading.Condition, "notify_all", 0.0, 0.1, 0.05),
    (threading.Condition, "wait", 0.02, 0.1, 0.05),
    (queue.Queue, "put", 0.02, 0.05, 0.05),
    (queue.Queue, "get", 0.02, 0.05, 0.05),
    (concurrent.futures.Future, "set_result", 0.1, 0.1, 0.05),
    (concurrent.futures.Future, "result", 0.0, 0.05, 0.05),
    (concurrent.futures.ThreadPoolExecutor, "submit", 0.05, 0.1, 0.05),
    (multiprocessing.process.BaseProcess, "start", 0.2, 0.4, 0.3),
    (asyncio.events.Handle, "_run", 0.005, 0.0, 0.03),
    *((socket.socket, name, 0.02, 0.03, 0.05) for name in ("send", "sendall", "recv", "recv_into", "close", "connect")),
)
SWITCHING = (1e-5, 0.005, 0.02)  # seconds until another thread may have the interpreter


class Pauses:
    """A plugin of pytest.

    Args:
        seed: decides where the pauses are.
    """

    def __init__(self, seed: int) -> None:
        self._seed, self._random = seed, random.Random(seed)
        self._sleep, self._begun, self._paused = time.sleep, time.monotonic(), 0.0

    def pytest_report_header(self) -> str:
        return f"pauses: seed {self._seed}"

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self) -> Iterator[None]:
        switching = sys.getswitchinterval()
        sys.setswitchinterval(self._random.choice(SWITCHING))
        with pytest.MonkeyPatch.context() as patch:
            for kind, name, before, behind, longest in PLACES:
                patch.setattr(kind, name, self._around(getattr(kind, name), before, behind, longest))
            try:
                return (yield)
            finally:
                sys.setswitchinterval(switching)

    def _pause(self, chance: float, longest: float) -> None:
        if self._random.random() < chance and self._paused < PART * (time.monotonic() - self._begun) + 1:
            seconds = longest * self._random.random()
            self._paused += seconds
            self._sleep(seconds)

    def _around(self, function, before, behind, longest):
        @functools.wraps(function)
        def paused(*args, **kwargs):
            self._pause(before, longest)
            try:
                return function(*args, **kwargs)
            finally:
                self._pause(behind, longest)

        return paused

"""Threads that take turns, one operation at a time, in an order that a seed decides."""

import random
import threading
from collections.abc import Callable
from typing import Any


class StuckError(AssertionError):
    """Nobody can go on."""


class Turns:
    """Any thread that was started here calls :meth:`take` before each of its operations."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._changed = threading.Condition()
        self._ready: dict[int, Callable[[], bool]] = {}  # of those that wait for their turn
        self._turn: int | None = None  # whose it is
        self._threads: list[threading.Thread] = []
        self._ended = 0
        self._error: BaseException | None = None

    def start(self, work: Callable[[], Any]) -> None:
        """Begin ``work`` in a thread, once it is its turn."""

        def run() -> None:
            try:
                self.take()
                work()
            except BaseException as error:
                self._error = self._error or error
            with self._changed:
                self._turn, self._ended = None, self._ended + 1
                self._changed.notify_all()

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()

    def take(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Wait for a turn, which comes once ``ready``."""
        me = threading.get_ident()
        with self._changed:
            self._ready[me] = ready
            if self._turn == me:
                self._turn = None
            self._changed.notify_all()
            try:
                while self._turn != me:
                    if self._error is not None:
                        raise StuckError
                    self._changed.wait()
            finally:
                del self._ready[me]

    def run(self) -> None:
        """Until all threads have ended.

        Raises:
            StuckError: nobody is ready.
            BaseException: of the first thread that failed.
        """
        while True:
            with self._changed:
                while not (self._turn is None and len(self._ready) + self._ended == len(self._threads)):
                    self._changed.wait()
                if self._error is None and self._ended == len(self._threads):
                    return
                able = [who for who, ready in self._ready.items() if ready()]
                if self._error is None and not able:
                    self._error = StuckError(f"{len(self._ready)} threads wait, and none can go on")
                if self._error is None:
                    self._turn = self._chance.choice(able)
                self._changed.notify_all()
            if self._error is not None:
                for thread in self._threads:
                    thread.join(10.0)
                raise self._error

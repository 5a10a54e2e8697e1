"""Threads for work on files, which may never end: a network disk that is gone answers nobody. No torch.

Those of ``concurrent.futures`` are waited for when the process ends, however long that takes. These are not.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class Workers:
    """Threads that do what they are given, in the order in which it came.

    Args:
        count: how many threads there are.
        name: the name of each of the threads.
    """

    def __init__(self, count: int, name: str) -> None:
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._closed = False
        self._threads = [threading.Thread(target=self._work, name=name, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[[], T]) -> "Future[T]":
        """Queue some work, and return its future; cancelled if it came after :meth:`close`, or was dropped by that."""
        future: Future[T] = Future()
        if self._closed:
            _cancel(future)
        else:
            self._queue.put((future, work))
        return future

    def close(self, seconds: float, *, drop: bool = False) -> bool:
        """Take no more, and wait until what was given is done; false if that is not so after so many seconds.

        Args:
            drop: what has not begun is not done.
        """
        self._closed = True
        while drop and not self._queue.empty():
            one = self._queue.get()
            if one is not None:
                _cancel(one[0])
        for _ in self._threads:
            self._queue.put(None)
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (one := self._queue.get()) is not None:
            future, work = one
            if future.set_running_or_notify_cancel():
                do(future, work)
            del one, future, work  # they may hold memory


def _cancel(future: "Future[Any]") -> None:
    future.cancel()
    future.set_running_or_notify_cancel()  # whoever waits for it hears of it


def do(future: "Future[T]", work: Callable[[], T]) -> None:
    """Give a future what it waits for."""
    try:
        result = work()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


def within(seconds: float, work: Callable[[], T]) -> T:
    """What it returns or raises; it goes on in a thread if it takes longer.

    Raises:
        TimeoutError: that.
    """
    future: Future[T] = Future()
    threading.Thread(target=do, args=(future, work), name="kv-within", daemon=True).start()
    return future.result(seconds)

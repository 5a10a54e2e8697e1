"""Connectors for tests: one that a test answers for, and one that keeps blocks in this process's memory."""

from concurrent.futures import Future
from typing import Any


class Asked:
    """A call of a connector that has not been answered."""

    def __init__(self, kind: str, keys: list[bytes], slots: list[int], params: Any) -> None:
        self.kind, self.keys, self.slots, self.params = kind, keys, slots, params
        self.future: Future[Any] = Future()


class AskedConnector:
    """Keeps all calls in ``asked`` for the test to answer."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.memory: Any = None
        self.closed = 0

    def _ask(self, kind: str, keys: Any, slots: Any, params: Any) -> "Future[Any]":
        self.asked.append(Asked(kind, list(keys), list(slots), params))
        return self.asked[-1].future

    def register(self, memory: Any) -> None:
        self.memory = memory

    def lookup(self, keys: Any, params: Any) -> "Future[int]":
        return self._ask("lookup", keys, (), params)

    def load(self, keys: Any, slots: Any, params: Any) -> "Future[list[bool]]":
        return self._ask("load", keys, slots, params)

    def save(self, keys: Any, slots: Any, ready: Any) -> "Future[int]":
        return self._ask("save", keys, slots, ready)

    def close(self) -> None:
        self.closed += 1


class SilentConnector(AskedConnector):
    """Never answers."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()


class FailingConnector(AskedConnector):
    """Breaks the rule that nothing is raised."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()

    def _ask(self, kind: str, keys: Any, slots: Any, params: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        future.set_exception(RuntimeError("out of order"))
        return future

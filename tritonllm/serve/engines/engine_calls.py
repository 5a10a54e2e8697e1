"""What a running engine is told between requests (sleep, weights, profiles and the like), and its answers."""

import asyncio
import itertools
from collections.abc import Callable, Iterable
from typing import Any

from tritonllm.serve.engines.engine_client import EngineDeadError
from tritonllm.serve.engines.messages import Answer, Call


class CallFailedError(RuntimeError):
    """The engine could not do what it was told; the message says why. It is as it was."""


class ProfileRefusedError(RuntimeError):
    """A trace is written already, or none is."""


class EngineCalls:
    """The calls of one event loop.

    Args:
        send: queues a message to the engine.
    """

    def __init__(self, send: Callable[[Call], None]) -> None:
        self._send = send
        self._open: dict[int, asyncio.Future[Answer]] = {}  # by number
        self._numbers = itertools.count()

    async def ask(self, method: str, *, abort: bool = False, replica: int | None = None, **arguments: Any) -> Any:
        """Let the engine's process do something, and wait for it.

        Args:
            method: the name of a method that the engine process knows.
            abort: end the requests that run, instead of waiting for their ends.
            replica: the number of one of several engines; ``None``: all that it concerns.
            arguments: the arguments of the method.

        Raises:
            ValueError, CallFailedError: what it raised there.
            ProfileRefusedError: a trace is written already, or none is.
            EngineDeadError: the engine process has died.
        """
        number = next(self._numbers)
        future = self._open[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(Call(number, method, arguments, abort, replica))
            answer = await future
        finally:
            del self._open[number]
        if answer.error is not None:
            raise ValueError(answer.error) if answer.is_value_error else CallFailedError(answer.error)
        if isinstance(answer.value, dict) and "refused" in answer.value:
            raise ProfileRefusedError(answer.value["refused"])
        return answer.value

    def take(self, answers: Iterable[Answer]) -> None:
        """These have come."""
        for answer in answers:
            future = self._open.get(answer.number)
            if future is not None and not future.done():
                future.set_result(answer)

    def fail(self, why: str) -> None:
        """No more will come: the engine has died."""
        for future in self._open.values():
            if not future.done():
                future.set_exception(EngineDeadError(why))

"""The requests that the engine has and that have not ended: who reads what comes of each, and who does no more."""

import logging
from collections.abc import Callable
from typing import Any, Protocol

from tritonllm.config.sampling_params import SamplingParams
from tritonllm.engine.data.asleep import AsleepError
from tritonllm.engine.data.outputs import EngineOutput
from tritonllm.engine.data.request import PACKED_BYTES
from tritonllm.serve.engines.engine_client import EngineDeadError
from tritonllm.serve.engines.messages import Add, RequestFailure, Update
from tritonllm.serve.engines.room import EngineRoom

logger = logging.getLogger(__name__)
ERRORS: dict[str, type[Exception]] = {"refused": ValueError, "asleep": AsleepError, "lost": EngineDeadError}


class Observer(Protocol):
    """An observer that is told what happens to requests, for metrics."""

    def updated(self, output: EngineOutput) -> None: ...

    def failed(self, request_id: str, why: str) -> None: ...

    def added(self, request_id: str, prompt_tokens: int, params: SamplingParams) -> None: ...

    def aborted(self, request_id: str) -> None: ...


class OutputReader(Protocol):
    """Takes what comes of a request: a :class:`~tritonllm.serve.engines.collector.Collector`, or one of pooling."""

    def put(self, output: Any, /) -> None: ...

    def fail(self, error: Exception) -> None: ...


class OpenRequests:
    """The unfinished requests of one :class:`~tritonllm.serve.engines.async_llm.AsyncLLM`.

    Args:
        room: the room of the engine, where the requests' sequences are counted.
        abort: ends a request whose updates cannot be taken in.

    Attributes:
        observer: is told what becomes of requests; ``None`` if nobody asks.
    """

    def __init__(self, room: EngineRoom, abort: Callable[[str], None]) -> None:
        self.observer: Observer | None = None
        self._room, self._abort = room, abort
        # and the request's number of sequences
        self._collectors: dict[str, tuple[OutputReader, int]] = {}
        self._ending: set[str] = set()  # aborted; their last updates are on their way

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._collectors

    def check_free(self, request_id: str) -> None:
        """Check that no unfinished request has this id.

        Raises:
            ValueError: a request that has not ended has this id.
        """
        if request_id in self._collectors:
            raise ValueError(f"request_id {request_id!r} is in use by an unfinished request")

    def add(self, message: Add, collector: OutputReader, params: SamplingParams) -> None:
        """Add a request that was sent, whose id is free.

        Args:
            params: say how many sequences it has.
        """
        request_id = message.request_id
        self._collectors[request_id] = collector, params.n
        self._room.take(params.n)
        if self.observer is not None:
            self.observer.added(request_id, len(message.packed) // PACKED_BYTES, params)

    def drop(self, request_id: str) -> bool:
        """Forget one that nobody reads any more; ``False`` if it has ended."""
        if self._forget(request_id) is None:
            return False
        if self.observer is not None:
            self.observer.aborted(request_id)
        return True

    def expect_end(self, request_id: str) -> None:
        """Expect the last update of a request that was dropped and that the engine is told to abort: nobody reads what
        the engine still says of it."""
        self._ending.add(request_id)

    def _forget(self, request_id: str) -> OutputReader | None:
        collector, sequences = self._collectors.pop(request_id, (None, 0))
        self._room.give_back(sequences)
        return collector

    def take(self, update: Update) -> None:
        """Hand on what the engine tells of one of them."""
        if update.request_id in self._ending:  # which perhaps names another request by now
            if update.finished:
                self._ending.discard(update.request_id)
            return
        if update.request_id not in self._collectors:
            return
        collector = self._collectors[update.request_id][0]
        if update.finished:
            self._forget(update.request_id)
        try:
            self._hand_on(update, collector)
        except Exception as error:  # the tokenizer may be anybody's code, and these tokens are one request's
            logger.exception("request %s ends: what the engine told of it cannot be taken in", update.request_id)
            collector.fail(RuntimeError(f"the output cannot be made ({type(error).__name__}: {error})"))
            self._abort(update.request_id)

    def _hand_on(self, update: Update, collector: OutputReader) -> None:
        if isinstance(update, RequestFailure):
            if self.observer is not None:
                self.observer.failed(update.request_id, update.why)
            collector.fail(ERRORS[update.kind](update.why))
        else:
            if self.observer is not None:
                self.observer.updated(update)
            collector.put(update)

    def fail(self, error: Callable[[], Exception]) -> None:
        """Let their readers have an error each. The engine still has them."""
        for collector, _ in self._collectors.values():
            collector.fail(error())

    def lose(self, error: Callable[[], Exception]) -> None:
        """The engine has none of them any more: their readers have an error each, and they are forgotten."""
        self._ending.clear()
        for request_id in list(self._collectors):
            collector = self._forget(request_id)
            assert collector is not None
            collector.fail(error())

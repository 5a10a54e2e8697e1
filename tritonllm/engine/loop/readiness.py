"""Requests that are not scheduled yet: each waits until its grammar is compiled, and until blocks of its prompt that
others have computed are here (:mod:`tritonllm.engine.transfer.transfer`)."""

import logging
import time
from concurrent.futures import FIRST_COMPLETED, wait
from typing import NamedTuple

from tritonllm.engine.text.output_processor import RequestState

logger = logging.getLogger(__name__)
BRIEF_WAIT = 2e-4  # seconds, where other engines may want to take a step with this one
LONGEST_WAIT = 0.05  # seconds that a step waits for one of them when nothing else is to do


class ReadyRequest(NamedTuple):
    """A request that waits no more, and what went wrong with its grammar."""

    state: RequestState
    error: str | None


class Unscheduled:
    """The requests of one engine that are not scheduled yet, since they wait for a grammar or a transfer; in order of
    arrival."""

    def __init__(self) -> None:
        self._states: dict[str, RequestState] = {}

    def __len__(self) -> int:
        return len(self._states)

    @property
    def num_sequences(self) -> int:
        return sum(len(state.sequences) for state in self._states.values())

    def take(self, state: RequestState) -> bool:
        """Keep it if it has to wait for something; else false."""
        waits = state.grammar is not None or state.fetch is not None
        if waits:
            self._states[state.request_id] = state
        return waits

    def drop(self, request_id: str) -> bool:
        """Whether it was here; now it is not."""
        return self._states.pop(request_id, None) is not None

    def clear(self) -> None:
        self._states.clear()

    def wait(self, seconds: float = LONGEST_WAIT) -> None:
        """Wait until something may have changed, but not for long."""
        states = self._states.values()
        futures = [state.grammar for state in states if state.grammar is not None and not state.grammar.done()]
        asked = [state.fetch.future for state in states if state.fetch is not None and state.fetch.future is not None]
        if futures or asked:
            wait([*futures, *asked], timeout=seconds, return_when=FIRST_COMPLETED)
        elif not any(_is_ready(state) for state in states):
            time.sleep(min(1e-3, seconds))

    def ready(self) -> list[ReadyRequest]:
        """The requests that have all they waited for; they are removed from here."""
        found = []
        for state in [state for state in self._states.values() if _is_ready(state)]:
            del self._states[state.request_id]
            error = None if state.grammar is None else state.grammar.exception()
            text = None if error is None else f"structured_outputs could not be compiled: {_words(error)}"
            found.append(ReadyRequest(state, text))
        return found


def _is_ready(state: RequestState) -> bool:
    return (state.grammar is None or state.grammar.done()) and (state.fetch is None or state.fetch.done)


def _words(error: BaseException) -> str:
    """What a user reads of an error: another library's own text is for its developers."""
    if isinstance(error, ValueError):
        return str(error)
    logger.error("a grammar could not be compiled", exc_info=error)
    return "the log says why"

"""An engine's requests that have not ended, and the last outputs of those that were lost with a step."""

from tritonllm.engine.data.outputs import EngineOutput
from tritonllm.engine.data.request import RequestStatus
from tritonllm.engine.loop.announcer import Announcer
from tritonllm.engine.text.output_processor import RequestState, SequenceOutput


class Unfinished:
    """The unfinished requests of one engine, in order of arrival.

    Args:
        sequences: the sequences of these requests by id, each with its request; changed in place, for those who look
            here.
        events: told of each request that ends.
    """

    def __init__(self, sequences: dict[str, tuple[RequestState, SequenceOutput]], events: Announcer) -> None:
        self._sequences, self._events = sequences, events
        self._states: dict[str, RequestState] = {}
        self._lost: dict[str, EngineOutput] = {}

    def __len__(self) -> int:
        """How many there are to run, or to report."""
        return len(self._states) + len(self._lost)

    def get(self, request_id: str) -> RequestState | None:
        """The request, if it runs or waits."""
        return self._states.get(request_id)

    def check_free(self, request_id: str) -> None:
        """Check that no unfinished request has this id.

        Raises:
            ValueError: a request has this id, and its end was not reported.
        """
        if request_id in self._states or request_id in self._lost:
            raise ValueError(f"request_id {request_id!r} is in use by an unfinished request")

    def check_sequences(self, state: RequestState) -> None:
        """Check that no sequence of another request has the id of one of this request's.

        Raises:
            ValueError: a sequence of another request has the id of one of these.
        """
        for sequence in state.sequences:
            if sequence.request.request_id in self._sequences:  # of a request that waits for its grammar, perhaps
                raise ValueError(
                    f"request_id {state.request_id!r} is in use by a sequence of another unfinished request"
                )

    def add(self, state: RequestState) -> None:
        """A new one, whose ids are free."""
        for sequence in state.sequences:
            self._sequences[sequence.request.request_id] = state, sequence
        self._states[state.request_id] = state

    def report(self, state: RequestState) -> EngineOutput | None:
        """The request's output, if this step has one, and its end if it has ended."""
        output = state.output()
        if output is not None and output.finished:
            del self._states[state.request_id]
            for sequence in state.sequences:
                del self._sequences[sequence.request.request_id]
            if self._events.heard:
                self._events.ended(state)
        return output

    def lose(self, why: str) -> None:
        """End all of them with an error. May be broken off itself, and called again."""
        for state in self._states.values():
            for sequence in state.sequences:
                if not sequence.request.status.is_finished:
                    sequence.request.status = RequestStatus.FINISHED_ERROR
                    state.error = why
            output = state.output()
            assert output is not None  # it has ended
            self._lost[state.request_id] = output
        self._states.clear()
        self._sequences.clear()

    def take_lost(self) -> list[EngineOutput]:
        """The last outputs of those that were lost; they are here no more."""
        lost, self._lost = self._lost, {}
        return list(lost.values())

    def drop_lost(self, request_id: str) -> EngineOutput | None:
        """The last output of a request that was lost, which is removed from here; ``None`` if it was not lost."""
        return self._lost.pop(request_id, None)

from types import SimpleNamespace

import pytest

from tritonllm.config.sampling_params import RequestOutputKind, SamplingParams
from tritonllm.engine.data.outputs import RequestMetrics
from tritonllm.engine.data.request import Request, RequestStatus
from tritonllm.engine.loop.unfinished import Unfinished
from tritonllm.engine.text.output_processor import RequestState, SequenceOutput


def state_of(request_id, *sequence_ids):
    params = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY)
    requests = [Request(one, [1, 2], params, max_total_tokens=8) for one in sequence_ids or (request_id,)]
    sequences = [SequenceOutput(index, request, None) for index, request in enumerate(requests)]
    return RequestState(request_id, None, [1, 2], params, sequences, RequestMetrics(arrival_time=0.0))


def made(*states):
    sequences, ended = {}, []
    unfinished = Unfinished(sequences, SimpleNamespace(heard=True, ended=lambda state: ended.append(state.request_id)))
    for state in states:
        unfinished.add(state)
    return unfinished, sequences, ended


def test_a_request_that_ends_is_reported_and_forgotten():
    one, two = state_of("a", "a-0", "a-1"), state_of("b")
    unfinished, sequences, ended = made(one, two)
    assert list(sequences) == ["a-0", "a-1", "b"] and sequences["a-1"] == (one, one.sequences[1])
    assert unfinished.report(one) is None and unfinished.get("a") is one  # it wants its end only
    one.sequences[0].request.status = RequestStatus.FINISHED_STOPPED
    assert unfinished.report(one) is None
    one.sequences[1].request.status = RequestStatus.FINISHED_STOPPED
    assert unfinished.report(one).finished
    assert unfinished.get("a") is None and list(sequences) == ["b"] and ended == ["a"] and unfinished


def test_ids_in_use():
    unfinished, _, _ = made(state_of("a", "a-0", "a-1"))
    with pytest.raises(ValueError, match="request_id 'a' is in use by an unfinished request"):
        unfinished.check_free("a")
    unfinished.check_free("a-0")  # of a sequence
    with pytest.raises(ValueError, match="request_id 'a-0' is in use by a sequence"):
        unfinished.check_sequences(state_of("a-0"))
    unfinished.check_sequences(state_of("b"))


def test_lost_requests_are_reported_once_and_their_ids_stay_in_use_until_then():
    unfinished, sequences, _ = made(state_of("a"), state_of("b"), state_of("c"))
    unfinished.lose("the step failed")
    assert unfinished and not sequences and unfinished.get("a") is None
    with pytest.raises(ValueError, match="in use"):
        unfinished.check_free("a")
    assert unfinished.drop_lost("a").error == "the step failed" and unfinished.drop_lost("a") is None
    assert [(output.request_id, output.finished) for output in unfinished.take_lost()] == [("b", True), ("c", True)]
    assert not unfinished and unfinished.take_lost() == []

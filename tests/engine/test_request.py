from array import array

import numpy as np
import pytest

from tritonllm.config.sampling_params import SamplingParams
from tritonllm.engine.data.request import PACKED, Request, RequestStatus


def make(prompt, output):
    request = Request("r", prompt, SamplingParams(), max_total_tokens=100)
    request.output_token_ids += output
    return request


@pytest.mark.parametrize("prompt", [[1, 2, 3], (1, 2, 3)])
def test_token_ids_is_a_slice_of_prompt_and_output(prompt):
    request = make(prompt, [4, 5])
    assert request.num_tokens == 5
    for start in range(6):
        for end in range(start, 6):
            assert request.token_ids(start, end) == [1, 2, 3, 4, 5][start:end]


@pytest.mark.parametrize(("start", "end"), [(-1, 2), (2, 1), (0, 6)])
def test_token_ids_outside_of_the_known_tokens(start, end):
    with pytest.raises(ValueError, match=r"outside of the 5 known tokens"):
        make([1, 2, 3], [4, 5]).token_ids(start, end)


@pytest.mark.parametrize("ready", [True, False])
def test_packed_tokens_are_the_same_tokens(ready):
    request = make([1, 2, 2**32 - 1], [4, 5])
    request.packed_prompt = array(PACKED, request.prompt_token_ids) if ready else None
    for start in range(6):
        for end in range(start, 6):
            assert np.frombuffer(request.packed(start, end), np.uint32).tolist() == request.token_ids(start, end)


@pytest.mark.parametrize("ready", [True, False])
@pytest.mark.parametrize(("start", "end"), [(-1, 2), (2, 1), (0, 6)])
def test_packed_tokens_outside_of_the_known_tokens(start, end, ready):
    request = make([1, 2, 3], [4, 5])
    request.packed_prompt = array(PACKED, request.prompt_token_ids) if ready else None
    with pytest.raises(ValueError, match=r"outside of the 5 known tokens"):
        request.packed(start, end)


def test_finish_reason():
    reasons = {
        RequestStatus.WAITING: None,
        RequestStatus.RUNNING: None,
        RequestStatus.PREEMPTED: None,
        RequestStatus.FINISHED_STOPPED: "stop",
        RequestStatus.FINISHED_LENGTH: "length",
        RequestStatus.FINISHED_REPETITION: "repetition",
        RequestStatus.FINISHED_ABORTED: "abort",
        RequestStatus.FINISHED_ERROR: "error",
    }
    assert set(reasons) == set(RequestStatus)
    request = make([1], [])
    for status, reason in reasons.items():
        request.status = status
        assert request.finish_reason == reason
        assert status.is_finished == (reason is not None)


def test_requests_are_told_apart_by_identity():
    one, other = make([1], []), make([1], [])
    assert one != other
    assert len({one, other}) == 2

"""Forced tokens: which masks allow one token, and when requests jump."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tritonllm.config.sampling_params import SamplingParams
from tritonllm.engine.data.control import mask_of, only_token
from tritonllm.engine.data.request import Request, RequestStatus
from tritonllm.engine.grammar.jump_forward import MOST_RUNNING, forced_tokens, jump
from tritonllm.engine.step.room_sizes import SMALL, chunk_capacity


@given(st.sets(st.integers(0, 99), max_size=3))
def test_the_only_token_of_a_mask(tokens):
    mask = np.zeros(4, dtype=np.int32)
    for token in tokens:
        mask |= mask_of(token, 4)
    assert only_token(mask) == (next(iter(tokens)) if len(tokens) == 1 else None)


class Forces:
    def __init__(self, *tokens):
        self.tokens = tokens

    waits = False

    def forced(self):
        return self.tokens


class Appends:
    def __init__(self, num_running):
        self.num_running = num_running

    def append(self, request, tokens):
        request.output_token_ids += tokens
        return request, list(tokens)


def request(*tokens, limit=100, **params):
    made = Request("r", [1, 2], SamplingParams(**params), max_total_tokens=limit, controls=(Forces(*tokens),))
    made.length_limit, made.status = limit, RequestStatus.RUNNING
    return made


def test_a_jump_has_to_save_half_a_step():
    requests = [request(7, 8), request(), request(9)]
    assert jump(requests, Appends(7)) == [] and not any(r.output_token_ids for r in requests)
    assert jump(requests, Appends(6)) == [(requests[0], [7, 8]), (requests[2], [9])]
    assert jump([request()], Appends(0)) == []


def test_beside_many_requests_nobody_jumps():
    """And nobody waits any longer for a jump that was to come."""
    requests = [request(*range(1 + i % 3)) for i in range(MOST_RUNNING)]
    for one in requests:
        one.jumps = True
    assert jump(requests, Appends(MOST_RUNNING + 1)) == []
    assert not any(one.jumps or one.output_token_ids for one in requests)
    assert len(jump(requests, Appends(MOST_RUNNING))) == MOST_RUNNING
    assert chunk_capacity(SMALL[0]) > MOST_RUNNING  # else such a step finds no small graph


def test_a_jump_ends_at_the_length_limit():
    assert forced_tokens(request(7, 8, 9, limit=4)) == (7, 8)
    assert not forced_tokens(request(7, 8, 9, limit=2))


@pytest.mark.parametrize("params", [{"logprobs": 0}, {"min_tokens": 1}, {"presence_penalty": 0.1}])
def test_what_must_see_each_token_drawn(params):
    assert not forced_tokens(request(7, **params))


def test_with_a_token_in_flight_a_request_waits_for_it_and_jumps_then():
    short, long = request(7, 8), request(7, 8, 9)
    short.num_pending_tokens = long.num_pending_tokens = 1
    assert jump([short, long], Appends(2)) == [] and (short.jumps, long.jumps) == (False, True)
    assert not short.waits_for_tokens and long.waits_for_tokens
    for one in (short, long):
        one.num_pending_tokens, one.controls = 0, (Forces(8, 9),)
    assert jump([long], Appends(MOST_RUNNING)) == [(long, [8, 9])] and not long.jumps


def test_nobody_jumps_who_has_ended_is_held_or_has_tokens_in_flight():
    ended, held, pending, others = (request(7) for _ in range(4))
    ended.status, held.held, pending.num_pending_tokens = RequestStatus.FINISHED_LENGTH, True, 2
    others.controls = (Forces(7), Forces())
    assert not any(map(forced_tokens, (ended, held, pending, others)))

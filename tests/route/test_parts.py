"""What needs no network: the retry budget, cutting streams into events, headers, errors, the streak of probes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tritonllm.http.ask import Ask
from tritonllm.http.errors import RouteError
from tritonllm.http.events import MOST_WAITING, WholeEvents
from tritonllm.http.guard import Keys, RefusedError, request_id_of
from tritonllm.http.reply import end_to_end
from tritonllm.route.budget import MOST_SAVED, RetryBudget
from tritonllm.route.config import BackendConfig, RouterConfig
from tritonllm.route.pool import Pool
from tritonllm.route.probe import Streak
from tritonllm.route.upstream import retry_after


@given(st.floats(0, 1), st.integers(0, 50), st.lists(st.booleans(), max_size=400))
def test_retries_never_exceed_the_budget(ratio, reserve, wishes):
    """Every request may wish for a retry; those that are granted stay below reserve + ratio * requests."""
    budget, granted = RetryBudget(ratio, reserve), 0
    for count, wish in enumerate(wishes, 1):
        budget.add_request()
        granted += wish and budget.take()
        assert granted <= reserve + ratio * count + 1e-6


def test_a_quiet_day_does_not_save_up():
    budget = RetryBudget(0.5, 0)
    for _ in range(100_000):
        budget.add_request()
    assert sum(budget.take() for _ in range(1000)) == MOST_SAVED


BLANKS = st.sampled_from([b"\n\n", b"\r\n\r\n", b"\r\r"])
EVENTS = st.lists(st.tuples(st.text('ab{}" é', min_size=1, max_size=20), BLANKS), min_size=1, max_size=8)


@given(EVENTS, st.data())
def test_events_are_cut_behind_whole_ones_and_no_byte_changes(events, data):
    whole = [f"data: {text}".encode() + blank for text, blank in events]
    stream = b"".join(whole)
    ends = {sum(map(len, whole[:i])) for i in range(len(whole) + 1)}
    cutter, out, at = WholeEvents(), b"", 0
    while at < len(stream):
        step = data.draw(st.integers(1, 30))
        out += cutter.add(stream[at : at + step])
        at += step
        assert len(out) in ends
        assert out + cutter.rest == stream[:at]
    assert out == stream


def test_an_event_that_does_not_end_is_handed_on():
    cutter = WholeEvents()
    assert cutter.add(b"x" * MOST_WAITING) == b""
    assert len(cutter.add(b"x")) == MOST_WAITING + 1


@pytest.mark.parametrize(
    ("parts", "done"),
    [
        ([b"data: 1\n\n", b"data: [DONE]\n\n"], True),
        ([b"data: 1\n\ndata: [DONE]\n\n"], True),
        ([b"data: 1\n\n", b"data: [DONE]"], True),
        ([b"data: 1\n\n"], False),
        ([b"data: [DONE]\n\n", b"data: 1\n\n"], False),
        ([], False),
    ],
)
def test_knows_the_end_of_openai(parts, done):
    cutter = WholeEvents()
    for part in parts:
        cutter.add(part)
    assert cutter.is_done == done


def test_headers_of_one_connection_do_not_go_on():
    names = (
        (b"Host", b"a"),
        (b"Connection", b"close, X-Mine"),
        (b"x-mine", b"1"),
        (b"TE", b"trailers"),
        (b"X-A", b"\xe9"),
    )
    assert end_to_end(names, (b"host",)) == [(b"x-a", b"\xe9")]


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, 1),
        ("7", 7),
        (" 3 ", 3),
        ("soon", 1),
        ("-5", 1),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0),
    ],
)
def test_retry_after(value, seconds):
    assert retry_after(value) == seconds


def test_errors_have_the_shape_of_the_api():
    error = RouteError(503, "no backend", "no_backend", retry_after=2.2)
    assert error.body("/v1/completions") == {
        "error": {"message": "no backend", "type": "service_unavailable_error", "param": None, "code": "no_backend"}
    }
    assert error.body("/v1/messages") == {"type": "error", "error": {"type": "api_error", "message": "no backend"}}
    assert (b"retry-after", b"3") in error.headers()
    assert error.event("/v1/messages").startswith(b"event: error\ndata: {")
    assert error.event("/v1/responses").startswith(b'event: error\ndata: {"type": "error", "code": "no_backend"')
    name, _, content = error.event("/v1/completions").partition(b": ")
    assert name == b"data" and json.loads(content)["error"]["code"] == "no_backend"
    assert (b"www-authenticate", b"Bearer") in RouteError(401, "no").headers()


def test_keys():
    keys = Keys(("one", "two"))
    for headers in ({b"authorization": b"Bearer two"}, {b"authorization": b"bearer  one "}, {b"x-api-key": b"one"}):
        keys.check(headers)
    for headers in ({}, {b"authorization": b"Bearer three"}, {b"authorization": b"Basic one"}, {b"x-api-key": b""}):
        with pytest.raises(RefusedError, match="API key"):
            keys.check(headers)
    Keys(()).check({})


def test_request_ids():
    assert request_id_of({b"x-request-id": b"abc-1"}) == "abc-1"
    for bad in (b"", b"a b", b"x" * 129, b"line\nbreak"):
        made = request_id_of({b"x-request-id": bad})
        assert len(made) == 32 and made != request_id_of({})


def first_choice(policy, chance):
    """Of a router of eight backends, for its first request."""
    backends = tuple(BackendConfig(url=f"http://127.0.0.1:{port}", name=str(port)) for port in range(1, 9))
    pool = Pool(RouterConfig(backends=backends, policy=policy), chance=lambda: chance)
    for backend in pool.backends.values():
        backend.alive = backend.any_model = True
    return pool.choose(Ask("POST", "/v1/completions", "", (), b"", "id", None, b"", 10)).label


@pytest.mark.parametrize("policy", ["least-tokens", "round-robin"])
def test_routers_that_start_together_do_not_choose_in_step(policy):
    assert len({first_choice(policy, number / 8 + number / 65536) for number in range(8)}) == 8


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 4), st.integers(1, 4))
def test_probes_in_a_row_change_the_state(probes, bad, good):
    """As the last probes say, if there are enough of them; the first one decides alone."""
    backend = BackendConfig(url="http://127.0.0.1:1")
    config = RouterConfig(backends=(backend,), unhealthy_threshold=bad, healthy_threshold=good)
    streak, alive = Streak(), None
    for count, found in enumerate(probes, 1):
        was, alive = alive, streak.after(alive, found, config)
        if was is None:
            assert alive == found
        elif alive != was:
            needed = good if alive else bad
            assert probes[:count][-needed:] == [alive] * needed
        elif count >= max(good, bad):
            assert probes[:count][-(bad if was else good) :] != [not was] * (bad if was else good)

"""Backends that fail in every way: what the client gets, and what the router does about it."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import httpx
import pytest
from support.fake_backend import FakeBackend, event
from support.server import eventually
from support.streams import leave

from tritonllm.route.config import BackendConfig

COMPLETE = "/v1/completions"


def ask(router, prompt="Hi", path=COMPLETE, **more):
    return router.client.post(path, json={"model": "m", "prompt": prompt, **more})


def stream(router, prompt="p", path=COMPLETE, **more):
    """``(texts, errors, done)``; whatever else stands in a stream fails the test."""
    texts, errors, done = [], [], 0
    body = {"model": "m", "prompt": prompt, "stream": True, **more}
    with router.client.stream("POST", path, json=body) as answer:
        if answer.status_code != 200:
            answer.read()
            return [], [answer.json()["error"]], 0
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                done += 1
            elif line.startswith("data: "):
                content = json.loads(line[6:])
                if "error" in content:
                    errors.append(content["error"])
                else:
                    texts.append(content["choices"][0]["text"])
            else:
                assert line in ("", "event: error"), line
    return texts, errors, done


def one_bad(router, backends, answer, headers=None):
    """Let the backend of the prompt ``Hi`` fail; ``(bad, good)``."""
    a, b = backends
    bad, good = (a, b) if ask(router).json()["from"] == "a" else (b, a)
    bad.answer, bad.headers = answer, headers or {}
    return bad, good


def clock_of(router):
    """Of its pauses and circuits from now on: it stands still until the test changes ``now``."""
    clock = SimpleNamespace(now=0.0)
    for backend in router.router.pool.backends.values():
        backend._clock = backend.breaker._clock = lambda: clock.now
    return clock


@pytest.mark.parametrize("answer", ["502", "503", "504", "429", "headers"])
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_failure_before_the_first_byte_goes_elsewhere(backends, routing, answer, is_stream):
    made = backends(2)
    router = routing(made)
    bad, good = one_bad(router, made, answer)
    if is_stream:
        texts, errors, done = stream(router, "Hi", max_tokens=4)
        assert (texts, errors, done) == ([f"Hi:{i}" for i in range(4)], [], 1)
    else:
        assert ask(router).json()["from"] == good.name
    assert router.metric("retries_total", backend=bad.name) == 1
    assert len(bad.seen) == 2 and len(good.seen) == 1


def test_a_refused_connection_goes_elsewhere(backends, routing):
    made = backends(2)
    router = routing(made, health_interval=60)
    bad, good = one_bad(router, made, "good")
    bad.stop()
    for _ in range(5):
        assert ask(router).json()["from"] == good.name
    assert router.metric("failures_total", backend=bad.name, reason="connect") >= 1
    assert router.status()[bad.name]["last_error"]


@pytest.mark.parametrize("answer", ["500", "400", "401", "404", "422"])
def test_other_statuses_are_answers(backends, routing, answer):
    made = backends(2)
    router = routing(made)
    bad, good = one_bad(router, made, answer)
    answer = ask(router)
    assert answer.status_code == int(bad.answer)
    assert answer.json() == {"error": {"message": f"{bad.name} fails"}}
    assert not good.seen


@pytest.mark.parametrize("path", [COMPLETE, "/v1/chat/completions", "/v1/messages"])
def test_a_stream_that_breaks_ends_with_one_error(backends, routing, path):
    """The half event before the break is not handed on, or the client could not read what follows."""
    made = backends(2)
    router = routing(made)
    bad, good = one_bad(router, made, "cut")
    texts, errors, done = stream(router, "Hi", path, max_tokens=6)
    assert (texts, len(errors), done) == (["Hi:0", "Hi:1", "Hi:2"], 1, 0)
    assert "broke off" in errors[0]["message"]
    assert errors[0]["type"] == ("api_error" if path == "/v1/messages" else "server_error")
    assert not good.seen
    assert router.metric("broken_answers_total", backend=bad.name) == 1
    assert router.metric("retries_total") == 0


def test_a_stream_that_stands_still_ends_with_one_error(backends, routing):
    made = backends(1)
    router = routing(made, between_bytes_timeout=1.0)
    made[0].answer = "stall"
    texts, errors, done = stream(router, max_tokens=2)
    assert (texts, done) == (["p:0"], 0)
    assert "nothing came for 1 seconds" in errors[0]["message"]
    eventually(lambda: made[0].running == 0)


def test_an_answer_that_breaks_is_an_error(backends, routing):
    made = backends(2)
    router = routing(made)
    _, good = one_bad(router, made, "cut")
    answer = ask(router)
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "backend_failed")
    assert not good.seen


def test_a_long_answer_that_breaks_closes_the_connection(backends, routing):
    """Beyond what is held its beginning has gone to the client, and nothing more can be said."""
    made = backends(1)
    router = routing(made, max_held_bytes=5)
    assert ask(router).json()["from"] == "a"
    made[0].answer = "cut"
    with pytest.raises(httpx.RemoteProtocolError):
        ask(router)


def test_nobody_left_passes_the_last_answer_on(backends, routing):
    made = backends(2)
    router = routing(made, max_retries=5)
    for backend in made:
        backend.answer, backend.headers = "503", {"retry-after": "7"}
    answer = ask(router)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")
    assert "fails" in answer.json()["error"]["message"]
    again = ask(router)  # both asked for a pause
    assert again.status_code == 503 and again.json()["error"]["code"] == "no_backend"
    assert 1 <= int(again.headers["retry-after"]) <= 7
    assert sum(len(backend.seen) for backend in made) == 2


def test_the_only_backend_is_asked_again(backends, routing):
    """A connection may break because it was idle for too long; the next one works."""
    (backend,) = backends()
    router = routing([backend])
    backend.answer = "headers"
    answer = ask(router)
    assert (answer.status_code, len(backend.seen)) == (502, 3)
    assert answer.json()["error"]["code"] == "backend_failed"


def test_no_backend_at_all(backends, routing):
    (backend,) = backends()
    backend.stop()
    router = routing([backend])
    answer = ask(router)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_backend")
    assert router.client.get("/health").status_code == 503
    backend.start()
    eventually(lambda: ask(router).status_code == 200)


def test_retry_after_keeps_requests_away(backends, routing):
    made = backends(2)
    router = routing(made)
    clock = clock_of(router)
    bad, good = one_bad(router, made, "429", {"retry-after": "1"})
    assert ask(router).json()["from"] == good.name
    bad.answer = "good"
    assert router.status()[bad.name]["why_not"] == "paused"
    for _ in range(4):
        assert ask(router).json()["from"] == good.name
    assert router.status()[bad.name]["circuit"] == "closed"  # it lives
    clock.now += 1.0
    eventually(lambda: ask(router).json()["from"] == bad.name)


def test_a_circuit_opens_and_closes(backends, routing):
    made = backends(2)
    router = routing(made, failure_threshold=3, backoff_seconds=0.5, max_backoff_seconds=0.5)
    clock = clock_of(router)
    bad, good = one_bad(router, made, "500")
    assert [ask(router).status_code for _ in range(3)] == [500] * 3
    assert router.status()[bad.name]["circuit"] == "open"
    assert ask(router).json()["from"] == good.name
    assert router.metric("ejections_total", backend=bad.name, reason="circuit") == 1
    bad.answer = "good"
    clock.now += 0.5
    eventually(lambda: ask(router).json()["from"] == bad.name)
    assert router.status()[bad.name]["circuit"] == "closed"


def test_a_trial_whose_client_leaves_is_followed_by_another(backends, routing):
    """Half open: the request that is let through tells nothing, and must not keep the circuit from closing."""
    (backend,) = backends()
    router = routing([backend], failure_threshold=1, max_retries=0)
    backend.answer = "500"
    assert ask(router).status_code == 500
    backend.answer = "hang"
    eventually(lambda: router.status()["a"]["circuit"] == "half-open")
    leave(router.url, {"model": "m"}, lambda: backend.running == 1)
    eventually(lambda: backend.counts["left"] == 1)
    backend.answer = "good"
    eventually(lambda: ask(router).status_code == 200)
    assert router.status()["a"]["circuit"] == "closed"


def test_what_is_not_only_computed_is_not_done_twice(backends, routing):
    made = backends(2)
    router = routing(made, policy="round-robin")
    for backend in made:
        backend.answer = "headers"
    assert ask(router, path="/v1/files").status_code == 502
    assert sum(len(backend.seen) for backend in made) == 1


def test_the_first_byte_has_a_limit(backends, routing):
    made = backends(2)
    bad, good = one_bad(routing(made), made, "hang")
    router = routing(made, first_byte_timeout=0.2)
    answer = ask(router)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "backend_timeout")
    assert not good.seen  # it may take as long there, and one of them still works on it
    eventually(lambda: bad.running == 0)


def test_retries_are_bounded_in_an_outage(backends, routing):
    made = backends(2)
    router = routing(made, policy="round-robin", retry_ratio=0.2, retry_reserve=3, failure_threshold=10_000)
    for backend in made:
        backend.answer = "504"
    for _ in range(50):
        assert ask(router).status_code == 504
    assert router.metric("retries_total") <= 3 + 0.2 * 50
    assert sum(len(backend.seen) for backend in made) == 50 + router.metric("retries_total")


def test_what_waits_at_a_dead_backend_goes_elsewhere(backends, routing):
    """It takes connections and answers nothing, not even probes."""
    made = backends(2)
    router = routing(made, health_timeout=1.0)
    bad, good = one_bad(router, made, "hang")
    bad.health = 0
    assert ask(router).json()["from"] == good.name
    assert router.metric("failures_total", backend=bad.name, reason="dead") == 1


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_leaves_ends_the_request(backends, routing, is_stream):
    (backend,) = backends()
    router = routing([backend])
    backend.answer = "stall"
    leave(router.url, {"model": "m", "prompt": "p", "stream": is_stream}, lambda: backend.running == 1)
    eventually(lambda: backend.running == 0)
    assert backend.counts["left"] == 1
    eventually(router.is_idle)
    assert router.status()["a"]["circuit"] == "closed"
    assert router.metric("retries_total") == 0


def test_a_reader_that_stands_still_holds_the_backend(backends, routing):
    """What the client does not read stays at the backend: the router keeps no more than its buffers."""
    (backend,) = backends()
    router = routing([backend])
    sent = 0

    async def pour(path, body, send):
        nonlocal sent
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for _ in range(4000):
            await send({"type": "http.response.body", "body": b"data: " + b"x" * 10_000 + b"\n\n", "more_body": True})
            sent += 10_000
        await send({"type": "http.response.body", "body": b""})

    backend._answer = pour
    with router.client.stream("POST", COMPLETE, json={"stream": True, "model": "m"}) as answer:
        parts = answer.iter_raw()
        next(parts)
        eventually(lambda: sent > 0)
        before = -1
        while sent != before:  # until it stands still
            before = sent
            time.sleep(0.2)
        assert sent < 20_000_000, "40 MB were taken from the backend, and nobody read them"
        assert sum(map(len, parts)) > 4000 * 9_000
    assert sent == 4000 * 10_000


class Unframed(BaseHTTPRequestHandler):
    """Speaks HTTP/1.0: the end of the connection is the end of an answer."""

    def do_GET(self):
        self.say("application/json", b'{"data": [{"id": "m"}]}')

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.say("text/event-stream", event("one") + (b"" if asked["prompt"] == "early" else b"data: [DONE]\n\n"))

    def say(self, kind, content):
        self.send_response(200)
        self.send_header("content-type", kind)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        pass


def test_a_stream_without_a_frame_that_ends_early(routing):
    """Where the end of the connection is that of the answer, a killed server looks like one that has finished."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Unframed) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        router = routing([BackendConfig(url=f"http://127.0.0.1:{server.server_port}")])
        assert stream(router, "whole") == (["one"], [], 1)
        texts, errors, done = stream(router, "early")
        assert (texts, len(errors), done) == (["one"], 1, 0)
        assert "ended without [DONE]" in errors[0]["message"]
        server.shutdown()


def test_fakes_fail_as_they_should():
    """The faults are those that the tests above mean."""
    backend = FakeBackend()
    try:
        backend.answer = "cut"
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.post(backend.url + COMPLETE, json={"prompt": "x", "stream": True})
        backend.answer = "headers"
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.post(backend.url + COMPLETE, json={"prompt": "x"})
    finally:
        backend.stop()
    with pytest.raises(httpx.ConnectError):
        httpx.get(backend.url)


def test_clients_read_names_and_the_operator_addresses(backends, routing, caplog):
    """A backend that is down, over plain HTTP: nothing in the words may look as if it were about TLS."""
    (a,) = backends()
    address = a.url.removeprefix("http://")
    for name, who in (("left", "the backend left"), ("", "a backend")):
        router = routing([BackendConfig(url=a.url, name=name, models=("m",))], health_interval=60, max_retries=0)
        if name:
            a.stop()
        else:
            next(iter(router.router.pool.backends.values())).alive = True  # as before the first probe that fails
        answer = ask(router)
        assert answer.status_code == 502
        assert answer.json()["error"]["message"] == f"{who} did not answer: connection refused"
        (status,) = router.status().values()
        why = f"cannot connect to {address}: connection refused"
        assert status["last_error"]["message"] == f"the backend {name or a.url} did not answer: {why}"
        assert address not in router.client.get("/v1/models").text
    assert f"backend {a.url} is down: cannot connect to {address}: connection refused" in caplog.text


def test_a_backend_without_a_name_has_no_address_where_none_can_be_used(backends, routing):
    (a,) = backends()
    a.stop()
    router = routing([BackendConfig(url=a.url, models=("m",)), BackendConfig(url=a.url + "/x", name="right")])
    message = ask(router).json()["error"]["message"]
    assert message == "no backend for the model 'm' can be used: a backend (down)"
    message = router.client.post(COMPLETE, json={"model": "other", "prompt": "p"}).json()["error"]["message"]
    assert message == "what may serve the model 'other' has not answered: the backend right"


def test_an_answer_that_breaks_is_told_in_words(backends, routing):
    (a,) = backends()
    router = routing([BackendConfig(url=a.url)])
    a.answer = "cut"
    said = "broke off its answer: the connection ended in the middle of the answer"
    assert ask(router).json()["error"]["message"] == f"a backend {said}"
    assert stream(router)[1][0]["message"] == f"a backend {said}"
    assert router.status()[a.url]["last_error"]["message"] == f"the backend {a.url} {said}"

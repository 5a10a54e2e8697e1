"""Which backend gets a request, and what goes through unchanged."""

import json
import socket
from collections import Counter

import pytest
from support.server import eventually

COMPLETE = "/v1/completions"


def ask(router, prompt="Hi", path=COMPLETE, **more):
    headers = more.pop("headers", {})
    return router.client.post(path, json={"model": "m", "prompt": prompt, **more}, headers=headers)


def test_a_request_and_its_answer_go_through_unchanged(backends, routing):
    (backend,) = backends()
    router = routing([backend])
    body = b'{"model" : "m",\n "prompt":"\\u00e9", "odd": [1e400]}'
    headers = {"authorization": "Bearer mine", "x-odd": "1", "content-type": "application/json", "te": "trailers"}
    answer = router.client.post("/v1/anything/%2f?x=1&y=%20", content=body, headers=headers)
    assert answer.status_code == 200 and answer.json()["path"] == "/v1/anything//"
    (seen,) = backend.seen
    assert (seen["method"], seen["target"], seen["body"]) == ("POST", "/v1/anything/%2f?x=1&y=%20", body)
    got = seen["headers"]
    assert (got["authorization"], got["x-odd"], got["content-type"]) == ("Bearer mine", "1", "application/json")
    assert "te" not in got and got["host"] == backend.url.removeprefix("http://")
    assert got["x-request-id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "HEAD"])
def test_any_method_goes_through(backends, routing, method):
    (backend,) = backends()
    router = routing([backend])
    answer = router.client.request(method, "/v1/files/1")
    assert answer.status_code == 200 and backend.seen[0]["method"] == method
    assert method == "HEAD" or answer.json()["from"] == "a"


@pytest.mark.parametrize(
    "path", ["/generate", "/tokenize", "/detokenize", "/rerank", "/score", "/v1/embeddings", "/v2/rerank"]
)
def test_paths_beside_v1(backends, routing, path):
    router = routing(backends())
    assert ask(router, path=path).json()["path"] == path


@pytest.mark.parametrize(
    ("path", "status"),
    [("/sleep", 404), ("/", 404), ("/v1", 404), ("/v1/%2e%2e/sleep", 400), ("/v1/a/%2e%2e/%2e%2e/sleep", 400)],
)
def test_other_paths_do_not_reach_a_backend(backends, routing, path, status):
    (backend,) = backends()
    router = routing([backend])
    assert router.client.post(path, json={}).status_code == status
    assert not backend.seen


def test_a_status_of_a_backend_goes_through(backends, routing):
    (backend,) = backends()
    router = routing([backend])
    backend.answer, backend.headers = "404", {"x-why": "gone"}
    answer = ask(router)
    assert (answer.status_code, answer.headers["x-why"]) == (404, "gone")
    assert answer.json() == {"error": {"message": "a fails"}}


def test_a_request_id_of_the_client_is_kept(backends, routing):
    (backend,) = backends()
    router = routing([backend])
    assert ask(router, headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert backend.seen[0]["headers"]["x-request-id"] == "mine-1"


def test_a_stream_goes_through_byte_by_byte(backends, routing):
    (backend,) = backends()
    router = routing([backend])
    body = {"model": "m", "prompt": "p", "stream": True, "max_tokens": 3}
    with router.client.stream("POST", COMPLETE, json=body) as answer:
        got = b"".join(answer.iter_raw())
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["x-from"] == "a"
    texts = [json.loads(line[6:])["choices"][0]["text"] for line in got.decode().split("\n\n")[:-2]]
    assert texts == ["p:0", "p:1", "p:2"]
    assert got.endswith(b"data: [DONE]\n\n")


def test_models_decide_first(backends, routing):
    a, b, c = backends(3)
    a.models, b.models, c.models = ("m", "shared"), ("n", "shared"), ("n",)
    router = routing([a, b, c], policy="round-robin")
    assert [model["id"] for model in router.client.get("/v1/models").json()["data"]] == ["m", "shared", "n"]
    for model, names in (("m", "a"), ("n", "bc"), ("shared", "ab")):
        assert {ask(router, model=model).json()["from"] for _ in range(6)} == set(names)
        assert router.client.get(f"/v1/models/{model}").json()["id"] == model
    answer = ask(router, model="unknown")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    error = answer.json()["error"]
    assert error["param"] == "model"
    assert error["message"].startswith("model ") and "is not served here; there is " in error["message"]
    assert router.client.get("/v1/models/unknown").status_code == 404
    assert ask(router, model=None).status_code == 200  # no name: anybody


def test_a_model_whose_backend_is_down_is_not_unknown(backends, routing):
    a, b = backends(2)
    b.models = ("n",)
    router = routing([a, b])
    b.stop()
    eventually(lambda: not router.status()["b"]["alive"])
    answer = ask(router, model="n")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_backend")
    assert int(answer.headers["retry-after"]) >= 1
    assert ask(router).status_code == 200
    b.start()
    eventually(lambda: ask(router, model="n").status_code == 200)


def test_a_backend_that_tells_no_models_gets_any(backends, routing):
    (backend,) = backends(models=None)
    router = routing([backend])
    assert ask(router, model="whatever").status_code == 200
    assert router.client.get("/v1/models").json()["data"] == []


def test_a_prefix_stays_with_its_backend(backends, routing):
    router = routing(backends(3))
    places = {}
    for turn in range(3):
        for i in range(30):
            name = ask(router, f"{i}: " + "x" * 1100 + str(turn)).json()["from"]
            assert places.setdefault(i, name) == name
    assert set(Counter(places.values())) == {"a", "b", "c"}


def test_a_header_places_requests(backends, routing):
    router = routing(backends(3), sticky_header="X-Chat")
    for chat in ("1", "2", "3", "4"):
        assert len({ask(router, str(i), headers={"x-chat": chat}).json()["from"] for i in range(6)}) == 1


def test_a_full_backend_is_passed_over(backends, routing):
    """One prefix, many requests at once: they overflow when its backend holds more than its share."""
    a, b = made = backends(2)
    router = routing(made, balance_min_tokens=0)
    first = ask(router, "same").json()["from"]
    busy, other = (a, b) if first == "a" else (b, a)
    busy.answer = other.answer = "hang"
    senders = [post_without_waiting(router, "same") for _ in range(8)]
    eventually(lambda: busy.running + other.running == 8)
    assert abs(busy.running - other.running) <= 2
    for sender in senders:
        sender.close()
    eventually(router.is_idle)


def post_without_waiting(router, prompt, **more):
    """A connection on which a request was sent; whoever closes it has left."""
    body = json.dumps({"model": "m", "prompt": prompt, **more}).encode()
    host, _, port = router.url.removeprefix("http://").partition(":")
    connection = socket.create_connection((host, int(port)))
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
        % (len(body), body)
    )
    return connection


def test_least_tokens_goes_where_least_is_in_flight(backends, routing):
    a, b = made = backends(2)
    router = routing(made, policy="least-tokens")
    a.answer = b.answer = "hang"
    long = post_without_waiting(router, "x", max_tokens=1000)
    eventually(lambda: a.running + b.running == 1)
    busy, other = (a, b) if a.running else (b, a)
    short = [post_without_waiting(router, "x", max_tokens=100) for _ in range(5)]
    eventually(lambda: other.running == 5)
    assert busy.running == 1
    assert router.status()[busy.name]["tokens_in_flight"] >= 1000
    for connection in (long, *short):
        connection.close()
    eventually(router.is_idle)


def test_round_robin_takes_turns(backends, routing):
    router = routing(backends(3), policy="round-robin")
    assert Counter(ask(router).json()["from"] for _ in range(9)) == {"a": 3, "b": 3, "c": 3}


def test_pages_of_its_own(backends, routing):
    (backend,) = backends()
    router = routing([backend])
    assert ask(router).status_code == 200
    assert router.client.get("/health").json() == {"status": "ok"}
    assert router.client.get("/ready").json() == {"status": "ready"}
    assert "version" in router.client.get("/version").json()
    status = router.status()["a"]
    assert status["usable"] and status["circuit"] == "closed" and status["models"] == ["m"]
    assert router.metric("requests_total", backend="a", status="200") == 1
    assert router.metric("backend_up", backend="a") == 1
    assert router.metric("request_seconds_count", backend="a") == 1
    backend.health = 500
    eventually(lambda: router.client.get("/health").status_code == 503)
    assert router.client.get("/ready").status_code == 503
    assert router.metric("ejections_total", backend="a", reason="probe") == 1
    assert "/health has status 500" in router.status()["a"]["last_error"]["message"]

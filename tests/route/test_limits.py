"""Keys, the longest body, the number of requests, and clients that send nonsense."""

import socket

import pytest
from support.server import eventually

from tritonllm.route.config import BackendConfig

COMPLETE = "/v1/completions"
BODY = {"model": "m", "prompt": "Hi"}


def test_a_key_of_its_own(backends, routing):
    (backend,) = backends()
    router = routing([backend], api_keys=("one", "two"))
    for headers in ({}, {"authorization": "Bearer three"}):
        answer = router.client.post(COMPLETE, json=BODY, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert router.client.get("/v1/models", headers=headers).status_code == 401
        assert router.client.get("/status", headers=headers).status_code == 401
    assert not backend.seen
    for path in ("/health", "/ready", "/metrics", "/version"):
        assert router.client.get(path).status_code == 200
    router.client.headers["authorization"] = "Bearer two"
    assert router.client.post(COMPLETE, json=BODY).status_code == 200
    assert backend.seen[0]["headers"]["authorization"] == "Bearer two"


def test_a_key_of_a_backend_takes_the_place_of_the_clients(backends, routing):
    a, b = backends(2)
    listed = [BackendConfig(url=a.url, name="a", api_key="backend-key"), BackendConfig(url=b.url, name="b")]
    router = routing(listed, policy="round-robin")
    headers = {"authorization": "Bearer mine", "x-api-key": "mine-too"}
    for _ in range(2):
        assert router.client.post(COMPLETE, json=BODY, headers=headers).status_code == 200
    got, other = (backend.seen[0]["headers"] for backend in (a, b))
    assert got["authorization"] == "Bearer backend-key" and "x-api-key" not in got
    assert (other["authorization"], other["x-api-key"]) == ("Bearer mine", "mine-too")


def test_the_longest_body(backends, routing):
    (backend,) = backends()
    router = routing([backend], max_body_bytes=100)
    for content in (b"x" * 101, iter([b"x" * 60, b"x" * 60])):
        answer = router.client.post(COMPLETE, content=content)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    assert not backend.seen
    assert router.client.post(COMPLETE, content=b"x" * 100).status_code == 200


def test_the_most_requests_at_once(backends, routing):
    (backend,) = backends()
    router = routing([backend], max_concurrency=2)
    backend.answer = "hang"
    connections = []
    for _ in range(2):
        connection = socket.create_connection(("127.0.0.1", int(router.url.rpartition(":")[2])))
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        connections.append(connection)
    eventually(lambda: backend.running == 2)
    answer = router.client.post(COMPLETE, json=BODY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "busy")
    assert answer.headers["retry-after"] == "1"
    assert router.client.get("/health").status_code == 200
    for connection in connections:
        connection.close()
    eventually(lambda: backend.running == 0)
    backend.answer = "good"
    eventually(lambda: router.client.post(COMPLETE, json=BODY).status_code == 200)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b"[]", b'{"model": 5}', b'{"stream": 1, "model": "m"'])
def test_a_body_that_is_no_request_is_the_backends_to_refuse(backends, routing, body):
    (backend,) = backends()
    router = routing([backend])
    assert router.client.post(COMPLETE, content=body).status_code == 200
    assert backend.seen[0]["body"] == body

"""Keys, the longest body, the number of requests, and clients that send nonsense."""

import contextlib
import socket
import threading

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


def test_a_request_line_is_escaped_in_the_log(backends, routing, caplog):
    router = routing(backends())
    with caplog.at_level("INFO", "tritonllm"), socket.create_connection(("127.0.0.1", router.port)) as connection:
        connection.sendall(b"GET /v1/%0D%0Aforged%1B[31m HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        while connection.recv(1000):
            pass

        def lines():
            return [record.getMessage() for record in caplog.records if record.name == "tritonllm.route.app"]

        eventually(lambda: any(line.startswith("GET /v1/") for line in lines()))  # behind the answer
    assert all(map(str.isprintable, lines()))


class Endless:
    """A backend that answers as a real one should not: with ``begin``, and then ``more`` again and again. It answers
    probes well, unless ``probes``.

    Attributes:
        sent: bytes of what does not end.
    """

    def __init__(self, begin, more, probes=False):
        self._begin, self._piece, self._probes = begin, more * ((1 << 16) // len(more)), probes
        self.sent = 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.name, self.url = "endless", f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        with contextlib.suppress(OSError):  # it is closed
            while True:
                connection, _ = self._listening.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        with connection, contextlib.suppress(OSError):
            while (request := connection.recv(1 << 16)) and request.startswith(b"GET") and not self._probes:
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 23\r\n\r\n" + b'{"data": [{"id": "m"}]}')
            connection.sendall(self._begin)
            while request and self.sent < MOST:
                connection.sendall(self._piece)
                self.sent += len(self._piece)

    def close(self):
        self._listening.close()


MOST = 64 << 20  # bytes; sockets hold some megabytes of that
OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
ENDLESS = {
    "words of the status": (b"HTTP/1.1 200 ", b"a"),
    "name": (OK, b"a"),
    "value": (OK + b"x-long: ", b"a"),
    "headers": (OK, b"a: b\r\n"),
    "trailer": (CHUNKED + b"x-long: ", b"a"),
    "body of a refusal": (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", b"a"),
}


@pytest.mark.parametrize("what", ENDLESS)
def test_a_backend_whose_answer_does_not_end(routing, what):
    """No more of it is held than the limits say, and the client has an error."""
    with contextlib.closing(Endless(*ENDLESS[what])) as backend:
        router = routing([backend], max_held_bytes=1 << 20)
        answer = router.client.post(COMPLETE, json=BODY)
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "backend_failed")
        assert backend.sent < MOST


@pytest.mark.parametrize("begin", [OK + b"\r\n", OK + b"x-long: "])
def test_a_probe_whose_answer_does_not_end(routing, begin):
    with contextlib.closing(Endless(begin, b"a", probes=True)) as backend:
        router = routing([backend])
        found = router.status()[backend.name]
        assert found["alive"] is False and "probe" in found["last_error"]["message"]
        assert router.client.post(COMPLETE, json=BODY).status_code == 503
        assert 0 < backend.sent < MOST


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b"[]", b'{"model": 5}', b'{"stream": 1, "model": "m"'])
def test_a_body_that_is_no_request_is_the_backends_to_refuse(backends, routing, body):
    (backend,) = backends()
    router = routing([backend])
    assert router.client.post(COMPLETE, content=body).status_code == 200
    assert backend.seen[0]["body"] == body

"""A backend that says for ever that an answer will come (``100 Continue`` and other statuses 1xx)."""

import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from support.waiting import PATIENCE, eventually

from tritonllm.route.config import BackendConfig
from tritonllm.route.interim import MOST

COMPLETE = "/v1/completions"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
HINTS = b"HTTP/1.1 103 Early Hints\r\nLink: </a>; rel=preload\r\n\r\n"
SWITCH = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: other\r\n\r\n"


class Interim(BaseHTTPRequestHandler):
    """Sends what it is asked to before its answer, once or for ever."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.answer(b'{"data": [{"id": "m"}]}')

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        with suppress(OSError):
            while True:
                self.wfile.write(self.server.before)
                if not self.server.endless:
                    break
            self.answer(b'{"from": "it"}')

    def answer(self, body):
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        self.wfile.write(head + body)

    def log_message(self, *args):
        pass


@pytest.fixture
def interim():
    with ThreadingHTTPServer(("127.0.0.1", 0), Interim) as server:
        server.before, server.endless = b"", False
        server.backend = BackendConfig(url=f"http://127.0.0.1:{server.server_port}", name="it")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def ask(router, model="m"):
    return router.client.post(COMPLETE, json={"model": model, "prompt": "p"})


@pytest.mark.parametrize("before", [CONTINUE, HINTS, HINTS * (MOST - 1) + CONTINUE])
def test_an_answer_comes_behind_some(interim, routing, before):
    interim.before = before
    router = routing([interim.backend])
    assert [ask(router).json() for _ in range(2)] == [{"from": "it"}] * 2


@pytest.mark.parametrize("before", [CONTINUE, HINTS, CONTINUE * 5000])
def test_an_endless_row_of_them_is_a_failure_and_others_go_on(interim, routing, backends, before):
    interim.before, interim.endless = before, True
    (other,) = backends(models=("n",))
    stays_open = {"backoff_seconds": PATIENCE, "max_backoff_seconds": PATIENCE}
    router = routing([interim.backend, other], max_retries=1, failure_threshold=2, **stays_open)
    answers = []
    threading.Thread(target=lambda: answers.append(ask(router)), daemon=True).start()
    eventually(lambda: ask(router, "n").json()["from"] == other.name and answers)
    (answer,) = answers
    assert answer.status_code == 502
    said = f"it sent more than {MOST} answers of status 1xx and no other"
    assert answer.json()["error"] == {
        "message": f"the backend it did not answer: {said}",
        "type": "server_error",
        "param": None,
        "code": "backend_failed",
    }
    assert router.metric("failures_total", backend="it", reason="interim") == 2
    assert router.status()["it"]["circuit"] == "open"


def test_few_at_a_time_end_with_the_time_for_the_first_byte(routing, interim):
    interim.before, interim.endless = b"", True  # nothing at all, as slow as can be
    router = routing([interim.backend], first_byte_timeout=0.2, failure_threshold=1)
    assert (answer := ask(router)).status_code == 504 and answer.json()["error"]["code"] == "backend_timeout"
    eventually(lambda: router.status()["it"]["circuit"] != "closed")


def test_a_change_of_protocol_is_a_failure(interim, routing):
    interim.before = SWITCH
    router = routing([interim.backend], max_retries=0)
    answer = ask(router)
    assert answer.status_code == 502 and answer.json()["error"]["message"].endswith("it changed to another protocol")


def test_a_probe_ends_as_well(routing, interim, monkeypatch):
    monkeypatch.setattr(Interim, "do_GET", lambda handler: [handler.wfile.write(CONTINUE) for _ in range(MOST + 1)])
    router = routing([interim.backend])
    eventually(lambda: "answers of status 1xx" in str(router.status()["it"]["last_error"]))
    assert httpx.get(f"{router.url}/metrics").status_code == 200

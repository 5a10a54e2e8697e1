"""What a client gets when replicas behind Ray Serve's ingress refuse, die or break off; with a stand-in for Serve."""

import asyncio
import json

import pytest

pytest.importorskip("ray.serve")
from ray.exceptions import ActorDiedError
from ray.serve.exceptions import BackPressureError

from tritonllm.serve.api.config import ServerConfig
from tritonllm.serve.ray.ingress import Ingress

BODY = json.dumps({"model": "m", "prompt": "Hi"}).encode()


def begins(status=200, kind=b"application/json", name=b"one"):
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind), (b"x-replica", name)]}


def part(body, more=True):
    return {"type": "http.response.body", "body": body, "more_body": more}


class Batches:
    """What one replica sends; an exception in it is raised."""

    def __init__(self, sent):
        self._sent, self.cancelled = list(sent), False

    def __aiter__(self):
        return self

    async def __anext__(self):
        if not self._sent:
            raise StopAsyncIteration
        if isinstance(self._sent[0], Exception):
            raise self._sent.pop(0)
        return self._sent.pop(0)

    def cancel(self):
        self.cancelled = True


class Handle:
    """Serve's, with an answer for each call."""

    def __init__(self, *answers):
        self.answers, self.asked = [Batches(answer) for answer in answers], []

    def options(self, **_):
        return self

    def remote(self, ask, tried):
        self.asked.append((ask, tried))
        return self.answers[len(self.asked) - 1]


def ask(handle, path="/v1/completions", retries=2, method="POST", **headers):
    """Status, headers and body of the ingress's answer."""
    ingress = Ingress(handle, ServerConfig(model_names=("m",)), "x-session-id", 1024, retries)
    given = [(name.encode().replace(b"_", b"-"), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": method, "path": path, "headers": given, "query_string": b"a=b", "root_path": ""}
    sent = []

    async def receive():
        return {"type": "http.request", "body": BODY, "more_body": False}

    async def send(message):
        sent.append(message)

    asyncio.run(ingress.answer(scope, receive, send))
    (start,) = (message for message in sent if message["type"] == "http.response.start")
    assert sent[-1]["more_body"] is False and sum(not m.get("more_body", True) for m in sent) == 1
    return start["status"], dict(start["headers"]), b"".join(message.get("body", b"") for message in sent)


STREAM = begins(kind=b"text/event-stream; charset=utf-8")
WHOLE = [begins(name=b"two"), part(b'{"a": 1}', more=False)]


def test_an_answer_goes_through_and_the_request_with_it():
    handle = Handle([WHOLE])
    status, headers, body = ask(handle, authorization="Bearer k", x_session_id="s")
    assert (status, body) == (200, b'{"a": 1}') and headers[b"x-replica"] == b"two" and b"x-request-id" not in headers
    ((request, tried),) = handle.asked
    assert (request.body, request.target, tried) == (BODY, "/v1/completions?a=b", ())
    assert request.key == b"m\0s" and b"authorization" not in dict(request.headers)
    assert not handle.answers[0].cancelled


@pytest.mark.parametrize("first", [[ActorDiedError()], [], [[begins()], ActorDiedError()], [[begins()]], [[STREAM]]])
def test_a_replica_that_dies_before_a_byte_is_replaced(first):
    handle = Handle(first, [WHOLE])
    assert ask(handle)[::2] == (200, b'{"a": 1}') and handle.answers[0].cancelled
    handle = Handle(first, first, first)
    status, _, body = ask(handle)
    assert status == 502 and json.loads(body)["error"]["code"] == "replica_failed" and len(handle.asked) == 3
    handle = Handle(first)
    assert ask(handle, path="/v1/files")[0] == 502, "who knows what it did"


def test_a_replica_that_refuses_is_passed_over():
    full = [begins(429), part(b"full", more=False)]
    handle = Handle([full], [WHOLE])
    assert ask(handle)[::2] == (200, b'{"a": 1}') and [tried for _, tried in handle.asked] == [(), ("one",)]
    handle = Handle([full], [full])
    assert ask(handle)[::2] == (429, b"full"), "there is only this one"
    handle = Handle([[begins(503), part(b"dead", more=False)]])
    assert ask(handle, retries=0)[::2] == (503, b"dead")


def test_a_stream_that_breaks_off_ends_with_one_error():
    for broken in ([ActorDiedError()], []):
        handle = Handle([[STREAM, part(b"data: 1\n\n")], [part(b"data: 2\n\nda")], *broken])
        status, _, body = ask(handle)
        assert status == 200 and len(handle.asked) == 1 and handle.answers[0].cancelled
        *events, last = body.decode().removesuffix("\n\n").split("\n\n")
        assert events == ["data: 1", "data: 2"] and json.loads(last.removeprefix("data: "))["error"]["code"]
    handle = Handle([[STREAM, part(b"data: 1\n\n")], [part(b"data: [DONE]\n\n", more=False)]])
    assert ask(handle)[2] == b"data: 1\n\ndata: [DONE]\n\n"


def test_too_many_that_wait():
    handle = Handle([BackPressureError(9, 8)])
    status, headers, body = ask(handle)
    assert status == 429 and b"retry-after" in headers and json.loads(body)["error"]["code"] == "queue_full"


def test_a_probe_is_answered_although_nobody_is_there(monkeypatch):
    class Never(Batches):
        async def __anext__(self):
            await asyncio.Event().wait()

    monkeypatch.setattr("tritonllm.serve.ray.ingress.PROBE_SECONDS", 0.01)
    handle = Handle([])
    handle.answers = [Never([])]
    assert ask(handle, path="/health", method="GET")[0] == 503 and handle.answers[0].cancelled
    assert ask(Handle(), path="/version", method="GET")[0] == 200


@pytest.mark.parametrize(("path", "status"), [("/sleep", 404), ("/", 404), ("/v1/../sleep", 400)])
def test_paths_that_lead_nowhere(path, status):
    assert ask(Handle(), path=path)[0] == status

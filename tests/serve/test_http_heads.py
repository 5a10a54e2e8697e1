"""Heads of requests: too long, too many headers, endless, slow. At the socket, with both of uvicorn's parsers."""

import asyncio
import json
import re
import socket
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.fake_backend import ThreadServer
from support.waiting import PATIENCE

from tritonllm.http import heads as http_heads
from tritonllm.http.guard import HeadLimits

LIMITS = HeadLimits(max_bytes=2000, max_count=10, seconds=PATIENCE)
MOST = 64 << 20  # bytes that are sent of what does not end; sockets hold some megabytes of that, and the server few
GOOD = b"GET /good HTTP/1.1\r\nHost: x\r\n\r\n"
LAST = GOOD[:-2] + b"Connection: close\r\n\r\n"


class Echo:
    """Answers with the path and the body's length; ``/wait`` waits for :attr:`go`, ``/early`` reads no body."""

    def __init__(self):
        self.go, self.waiting, self.left = threading.Event(), threading.Event(), threading.Event()

    async def __call__(self, scope, receive, send):
        size = 0
        while scope["path"] != "/early":
            message = await receive()
            size += len(message.get("body", b""))
            if not message.get("more_body", False):
                break
        if scope["path"] == "/wait":
            self.waiting.set()
            gone = asyncio.ensure_future(receive())
            while not self.go.is_set() and not gone.done():
                await asyncio.sleep(0.01)
            if gone.done():
                self.left.set()
                return
            gone.cancel()
        content = json.dumps([scope["path"], size]).encode()
        length = (b"content-length", b"%d" % len(content))
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": content})


@pytest.fixture(scope="module", params=["httptools", "h11"])
def start(request):
    """``start(limits)`` starts a server, or hands on the one that there is with these limits."""
    started = {}
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "h11":
            patch.setattr(http_heads, "_httptools", _is_missing)

        def start(limits):
            if limits not in started:
                started[limits] = ThreadServer(Echo(), **http_heads.uvicorn_options(limits))
            return started[limits]

        yield start
        for server in started.values():
            server.close()


def _is_missing():
    raise ImportError


@pytest.fixture(scope="module")
def server(start):
    return start(LIMITS)


@pytest.fixture(scope="module")
def hurried(start):
    """A server that waits for a head no longer than a moment."""
    return start(HeadLimits(max_bytes=2000, max_count=10, seconds=0.05))


def connected(server):
    return socket.create_connection(("127.0.0.1", server.port), PATIENCE)


def rest_of(connection):
    """What comes until the server hangs up."""
    parts = []
    while part := connection.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


def statuses(data):
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", data)]


def error_of(data):
    return json.loads(data.partition(b"\r\n\r\n")[2])["error"]


def answers(server, data, cuts=()):
    """What the server answers to the last request, which asks it to hang up, and to those before."""
    with connected(server) as connection:
        for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
            connection.sendall(data[begin:end])
        return rest_of(connection)


names = st.text("abcdefgh-", min_size=1, max_size=40).map(str.encode)
values = st.one_of(st.integers(0, 60), st.integers(0, 2100)).map(lambda size: b"v" * size)


@settings(max_examples=examples(100), deadline=None)
@given(
    st.one_of(st.integers(0, 60), st.integers(0, 2100)),
    st.lists(st.tuples(names, values), max_size=12),
    st.lists(st.integers(0, 1 << 20), max_size=4),
)
def test_a_head_is_taken_up_to_its_limits_and_no_further(server, target, headers, cuts):
    lines = [b"GET /" + b"p" * target + b" HTTP/1.1", b"Host: x", b"Connection: close"]
    head = b"\r\n".join([*lines, *(b"x-%b: %b" % header for header in headers), b"", b""])
    fits = len(head) <= LIMITS.max_bytes and 2 + len(headers) <= LIMITS.max_count
    answer = answers(server, head, sorted(cut % len(head) for cut in cuts))
    assert statuses(answer) == [200 if fits else 431]
    if not fits:
        assert error_of(answer)["code"] == "headers_too_large"


requests = st.tuples(
    st.sampled_from([b"length", b"chunks"]), st.one_of(st.integers(0, 50), st.just(40_000)), st.integers(1, 20_000)
)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(requests, min_size=1, max_size=4), st.lists(st.integers(0, 1 << 20), max_size=4))
def test_requests_in_any_pieces(server, wanted, cuts):
    """Bodies of any length, in chunks of any size, one behind the other and cut anywhere."""
    sent, expected = b"", []
    for number, (kind, size, chunk) in enumerate(wanted):
        last = b"Connection: close\r\n" if number == len(wanted) - 1 else b""
        sent += b"POST /%d HTTP/1.1\r\nHost: x\r\n%b" % (number, last)
        chunk = max(chunk, size // 500)
        if kind == b"length":
            sent += b"Content-Length: %d\r\n\r\n" % size + b"b" * size
        else:
            sizes = [min(chunk, size - begin) for begin in range(0, size, chunk)]
            sent += b"Transfer-Encoding: chunked\r\n\r\n"
            sent += b"".join(b"%x\r\n%b\r\n" % (one, b"b" * one) for one in sizes) + b"0\r\n\r\n"
        expected.append([f"/{number}", size])
    found = re.findall(rb'\["/\d+", \d+\]', answers(server, sent, sorted(cut % len(sent) for cut in cuts)))
    assert [json.loads(one) for one in found] == expected


CHUNKED = b"POST /x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
ENDLESS = {
    "method": (b"", b"G"),
    "target": (b"GET /", b"a"),
    "name": (b"GET / HTTP/1.1\r\n", b"a"),
    "value": (b"GET / HTTP/1.1\r\nHost: x\r\nx-long: ", b"a"),
    "blanks": (b"GET / HTTP/1.1\r\nHost: x\r\nx-long:", b" "),
    "headers": (b"GET / HTTP/1.1\r\nHost: x\r\n", b"a: b\r\n"),
    "empty lines": (b"", b"\r\n"),
    "extension of a chunk": (CHUNKED + b"5;x=", b"a"),
    "value of a trailer": (CHUNKED + b"5\r\nhello\r\n0\r\nx-long: ", b"a"),
    "trailers": (CHUNKED + b"5\r\nhello\r\n0\r\n", b"a: b\r\n"),
}


@pytest.mark.parametrize("what", ENDLESS)
def test_what_does_not_end_is_cut_off(server, what):
    """Long before it fills the memory. Others are answered meanwhile, and afterwards."""
    begin, more = ENDLESS[what]
    piece = more * ((1 << 16) // len(more))
    with connected(server) as connection:
        connection.sendall(begin)
        sent = 0
        with pytest.raises(OSError):
            while sent < MOST:
                connection.sendall(piece)
                sent += len(piece)
                if sent == 10 * len(piece):
                    assert statuses(answers(server, LAST)) == [200]
    assert sent < MOST


@pytest.mark.parametrize("what", ["target", "name", "value", "headers", "trailers"])
def test_who_sends_too_much_reads_why(server, what):
    begin, more = ENDLESS[what]
    with connected(server) as connection:
        connection.sendall(begin + more * (200_000 // len(more)))
        answer = rest_of(connection)
    assert statuses(answer) == [431]
    assert (error := error_of(answer))["type"] == "invalid_request_error"
    assert "2000 bytes" in error["message"] and "more than 10" in error["message"]


def test_what_is_no_http_is_refused(server):
    with connected(server) as connection:
        connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        answer = rest_of(connection)
    assert statuses(answer) == [400]
    assert error_of(answer)["code"] == "bad_http"


@pytest.mark.parametrize("begun", [b"G", b"GET / HTTP/1.1\r\nHost: x", b"GET / HTTP/1.1\r\nHost: x\r\n"])
def test_half_a_head_is_closed_after_a_while(hurried, begun):
    with connected(hurried) as connection:
        connection.sendall(begun)
        answer = rest_of(connection)
    assert statuses(answer) == [408]
    assert error_of(answer)["code"] == "header_timeout"


def test_a_connection_on_which_nothing_comes_is_closed(hurried):
    with connected(hurried) as connection:
        assert rest_of(connection) == b""


def test_half_of_a_later_head_is_closed_too(hurried):
    with connected(hurried) as connection:
        connection.sendall(GOOD + GOOD[:20])
        assert statuses(rest_of(connection)) == [200, 408]


def test_a_line_break_between_requests_holds_no_connection(hurried):
    """Some clients send one behind a body. It ends uvicorn's own time for a connection that rests."""
    with connected(hurried) as connection:
        connection.sendall(GOOD)
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
        connection.sendall(b"\r\n")
        assert 200 not in statuses(rest_of(connection))


def test_the_rest_of_a_body_that_nobody_reads_is_not_waited_for(hurried):
    with connected(hurried) as connection:
        connection.sendall(b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nhalf")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
        connection.sendall(b"of it")  # which ends uvicorn's own time for a connection that rests
        assert rest_of(connection).count(b"HTTP/1.1") == 0


def test_an_answer_may_take_as_long_as_it_likes(hurried):
    """Longer than a head. What comes of the next head meanwhile has its own time, and ends the connection."""
    app = hurried.app
    with connected(hurried) as patient, connected(hurried) as hasty:
        for connection in (patient, hasty):
            app.waiting.clear()
            connection.sendall((LAST if connection is patient else GOOD).replace(b"/good", b"/wait"))
            assert app.waiting.wait(PATIENCE)
        hasty.sendall(GOOD[:20])
        if _reads_ahead(hurried):
            assert rest_of(hasty) == b""
            assert app.left.wait(PATIENCE)
        with connected(hurried) as half:
            half.sendall(GOOD[:20])
            assert statuses(rest_of(half)) == [408]
        app.go.set()
        assert statuses(rest_of(patient)) == [200]
    app.go.clear()


def _reads_ahead(server):
    """Whether the parser takes of the next head what comes before the answer to the last one; h11 keeps that."""
    return server.server.config.http.__mro__[1] is not http_heads._H11

"""How much a request's head may be, at the server as at the router: the request line and the headers, in bytes, in
number and in seconds.

uvicorn hands a request to the application when its head is complete, and with httptools it collects whatever comes
until then: each new part of a header is joined to the parts before, so one of 64 MB takes seconds, in which nothing
else happens. Here what comes is counted before it is given to the parser, in pieces, so that no more than the limit is
ever held of a head that does not end. The same count holds for what a body of chunks has beside its data: extensions
and trailers. h11 counts by itself.

A client that is refused gets 431 or 408 (RFC 6585, RFC 9110) and can read it: the connection is closed half, and what
the client still sends is dropped for a moment. With unread bytes left, the system would reset the connection instead,
and the answer might be lost (RFC 9112, 9.6).
"""

import asyncio
import json
import logging
import sys
from abc import abstractmethod
from enum import Enum
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from tritonllm.http.guard import HeadLimits

logger = logging.getLogger(__name__)
PIECE = 16 << 10  # bytes that a parser is given at once
LINGER_SECONDS, LINGER_BYTES = 2.0, 4 << 20  # that a client which was refused may go on sending


LINE = len(b"  HTTP/1.1\r\n\r\n")  # what is in a head beside its method, target and headers


def _size(header: tuple[bytes, bytes]) -> int:
    return len(header[0]) + len(header[1]) + len(b": \r\n")


class RequestPart(Enum):
    """What of a request comes next."""

    BEGINNING = 0
    HEAD = 1  # the rest of it
    BODY = 2


def uvicorn_options(limits: HeadLimits) -> dict[str, Any]:
    """What ``uvicorn.Config`` is given, so that its server keeps to the limits. There are no WebSockets: nothing here
    speaks them, and behind their handshake another parser reads."""
    try:
        kind: type[_Timed] = _httptools()
    except ImportError:
        kind = _H11
    return {"http": type("LimitedHeads", (kind,), {"limits": limits}), "ws": "none"}


class _TooLargeError(Exception):
    """A request's head is too large; raised in the parser's callbacks."""


class _Timed:
    """What both protocols of uvicorn have more: an end of the time for a head, and how a request is refused."""

    limits = HeadLimits()
    # of uvicorn's protocol
    loop: asyncio.AbstractEventLoop
    transport: Any
    cycle: Any
    timeout_keep_alive_task: asyncio.TimerHandle | None
    _timer: asyncio.TimerHandle | None = None
    _is_refused = False
    _dropped = 0

    @property
    @abstractmethod
    def _next(self) -> RequestPart:
        """What of a request comes next."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)  # type: ignore[misc]
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)  # type: ignore[misc]

    def data_received(self, data: bytes) -> None:
        for begin in range(0, len(data), PIECE):
            if self._is_refused or self.transport.is_closing():
                break
            before = self.cycle
            self._take(data[begin : begin + PIECE] if len(data) > PIECE else data)
            if self.cycle is not before:  # the head of one is complete
                self._stop_timer()
        if self._is_refused:
            self._drop(len(data))
        else:
            self._look()

    def _take(self, piece: bytes) -> None:
        super().data_received(piece)  # type: ignore[misc]

    def on_response_complete(self) -> None:
        super().on_response_complete()  # type: ignore[misc]
        self._look()

    @property
    def _answers(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _look(self) -> None:
        """Let the client's time run while the next step is its own, and not the application's."""
        if self.transport.is_closing():
            return self._stop_timer()
        waits = not self._answers and (self._next is not RequestPart.BEGINNING or self.timeout_keep_alive_task is None)
        if self._next is not RequestPart.HEAD and not waits:
            self._stop_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.limits.seconds, self._is_late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _is_late(self) -> None:
        self._timer = None
        if self._next is RequestPart.HEAD:
            self._refuse(408, f"the headers did not arrive within {self.limits.seconds:g} seconds", "header_timeout")
        else:  # nothing has come, or the rest of what was answered
            self.transport.close()

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Answer for the application, unless that has begun to, or is at an earlier request, and hang up."""
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        self._stop_timer()
        logger.info("a request was refused with status %d: %s", status, message)
        if self._answers:
            if self._next is not RequestPart.BODY or self.cycle.response_started or getattr(self, "pipeline", ()):
                self.transport.close()
                return
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        kind = "invalid_request_error"
        body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()
        self.transport.write(
            b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
            % (status, HTTPStatus(status).phrase.encode(), len(body), body)
        )
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self._timer = self.loop.call_later(LINGER_SECONDS, self.transport.close)
        else:
            self.transport.close()

    def _drop(self, count: int) -> None:
        self._dropped += count
        if self._dropped > LINGER_BYTES:
            self._stop_timer()
            self.transport.close()

    def _refuse_size(self) -> None:
        limits = f"longer than {self.limits.max_bytes} bytes, or more than {self.limits.max_count}"
        self._refuse(431, f"the request line and the headers are {limits}", "headers_too_large")

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls for what is no HTTP, and for what the parser's callbacks raise."""
        self._refuse(400, msg, "bad_http")


class _CountedHeaders(h11.Connection):
    """A connection of h11 that limits how large a head may be and how many headers it may have.

    Args:
        limits: the limits of heads.
    """

    def __init__(self, limits: HeadLimits) -> None:
        super().__init__(h11.SERVER, limits.max_bytes)
        self._limits = limits

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            size = len(event.method) + len(event.target) + LINE + sum(map(_size, event.headers))
            if size > self._limits.max_bytes or len(event.headers) > self._limits.max_count:
                raise h11.RemoteProtocolError("too large a head", error_status_hint=431)
        return event


class _H11(_Timed, H11Protocol):
    """Where there is no httptools."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = _CountedHeaders(self.limits)

    @property
    def _next(self) -> RequestPart:
        if self.conn.their_state is h11.IDLE:
            return RequestPart.HEAD if self.conn.trailing_data[0] else RequestPart.BEGINNING
        return RequestPart.BODY if self.conn.their_state in (h11.SEND_BODY, h11.ERROR) else RequestPart.BEGINNING

    def send_400_response(self, msg: str) -> None:
        error = sys.exception()
        if isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == 431:
            self._refuse_size()
        else:
            super().send_400_response(msg)


def _httptools() -> type[_Timed]:
    """The protocol of uvicorn that parses with httptools, with limits for heads.

    Raises:
        ImportError: it is not installed.
    """
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class Httptools(_Timed, HttpToolsProtocol):
        _next = RequestPart.BEGINNING
        _run = 0  # bytes in a row that were parsed, of which nothing has come to an end
        _size = _count = 0
        _moved = _is_too_large = False

        def _take(self, piece: bytes) -> None:
            self._moved = False
            super()._take(piece)
            self._run = 0 if self._moved else self._run + len(piece)
            if self._run > self.limits.max_bytes:
                self._refuse_size()

        def _add(self, size: int) -> None:
            self._size += size
            if self._size > self.limits.max_bytes or self._count > self.limits.max_count:
                self._is_too_large = True
                raise _TooLargeError

        def on_message_begin(self) -> None:
            self._next, self._size, self._count = RequestPart.HEAD, 0, 0
            super().on_message_begin()

        def on_url(self, url: bytes) -> None:
            self._add(len(url))
            super().on_url(url)

        def on_header(self, name: bytes, value: bytes) -> None:
            self._count += 1
            self._add(_size((name, value)))
            super().on_header(name, value)

        def on_headers_complete(self) -> None:
            self._add(len(self.parser.get_method()) + LINE)
            self._next, self._moved = RequestPart.BODY, True
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._moved = True
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._next, self._moved = RequestPart.BEGINNING, True
            super().on_message_complete()

        def send_400_response(self, msg: str) -> None:
            if self._is_too_large:
                self._refuse_size()
            else:
                super().send_400_response(msg)

    return Httptools

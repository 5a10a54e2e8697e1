"""What a client has got of its answer so far, and how that ends when something goes wrong."""

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from tritonllm.http.errors import RouteError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = Iterable[tuple[bytes, bytes]]
# RFC 9110, 7.6.1: they concern one connection, not the answer.
HOP_BY_HOP = {
    b"connection",
    b"keep-alive",
    b"proxy-authenticate",
    b"proxy-authorization",
    b"proxy-connection",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
}


def end_to_end(headers: Headers, drop: Iterable[bytes] = ()) -> list[tuple[bytes, bytes]]:
    """The headers without those of one connection, those that ``Connection`` names, and ``drop``; in lower case."""
    headers = [(name.lower(), value) for name, value in headers]
    named = {part.strip().lower() for name, value in headers if name == b"connection" for part in value.split(b",")}
    out = {*HOP_BY_HOP, *named, *drop}
    return [(name, value) for name, value in headers if name not in out]


class Reply:
    """An answer on its way to a client.

    Args:
        send: the ``send`` of ASGI.
        path: the path that was asked, which says whose shape errors have.
        request_id: stands in the answer.
    """

    def __init__(self, send: Send, path: str, request_id: str) -> None:
        self._send, self._path = send, path
        self.request_id = request_id
        self.status = 0  # 0: nothing has been sent
        self.is_events = False
        self.ended = False

    async def start(self, status: int, headers: Headers, is_events: bool = False) -> None:
        named = [*headers, (b"x-request-id", self.request_id.encode())]
        await self._send({"type": "http.response.start", "status": status, "headers": named})
        self.status, self.is_events = status, is_events  # not before: the wait for a slow client can be cancelled

    async def part(self, body: bytes) -> None:
        """Returns when the client has taken enough of what came before."""
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self, body: bytes = b"") -> None:
        self.ended = True
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        await self.start(status, headers)
        await self.end(body)

    async def fail(self, error: RouteError) -> None:
        """End with an error: as an answer if nothing has been sent, as the last event of a stream of events.

        Of any other answer that has begun nothing more can be said: the connection is closed before its end.
        """
        if self.ended:
            return
        if not self.status:
            content = error.content(self._path)
            await self.whole(error.status, [*error.headers(), (b"content-length", b"%d" % len(content))], content)
        elif self.is_events:
            await self.end(error.event(self._path))

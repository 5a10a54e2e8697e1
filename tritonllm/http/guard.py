"""What a request over HTTP passes first, at the server as at the router: its id, its key, its body. Plain ASGI."""

import asyncio
import hashlib
import hmac
import re
import uuid
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
BODY_SECONDS = 60.0  # that a client may take to send a body
MAX_HEADER_BYTES = 64 << 10
MAX_HEADER_COUNT = 256
HEADER_TIMEOUT = 30.0


@dataclass(frozen=True)
class HeadLimits:
    """How much of a request's head a client may send, and how long it may take.

    Args:
        max_bytes: how many bytes the request line and the headers may have together.
        max_count: how many headers there may be.
        seconds: how long the head may take, from the connection, or from the first byte of a later request; and the
            rest of a body that was answered before its end.
    """

    max_bytes: int = MAX_HEADER_BYTES
    max_count: int = MAX_HEADER_COUNT
    seconds: float = HEADER_TIMEOUT


class RefusedError(Exception):
    """A request that is refused, with what the client is told.

    Args:
        status: the status of HTTP.
        message: a text for people.
        code: a word for programs.
    """

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


def request_id_of(headers: Mapping[bytes, bytes]) -> str:
    """The client's own, if it can stand in a log, or a new one."""
    given = headers.get(b"x-request-id", b"").decode("latin-1")
    return given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


class Keys:
    """The keys that let clients in.

    Args:
        keys: a request must have one of these; if there are none, all are let in.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def check(self, headers: Mapping[bytes, bytes]) -> None:
        """Check the key of a request.

        Raises:
            RefusedError: the request has none of them. The time it takes does not tell how much fits.
        """
        if not self._digests:
            return
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":
            token = headers.get(b"x-api-key", b"")  # as Anthropic's clients send it
        given = _digest(token.strip())
        matches = [hmac.compare_digest(given, key) for key in self._digests]  # all of them, whichever fits
        if not any(matches):
            raise RefusedError(401, "the API key is missing or wrong: send Authorization: Bearer", "invalid_api_key")


def _digest(secret: bytes) -> bytes:
    """The digest of a secret, which has one length, whatever the secret's."""
    return hashlib.sha256(secret).digest()


async def receive_body(headers: Mapping[bytes, bytes], receive: Receive, most: int) -> bytes | None:
    """The whole body; ``None`` if the client went away while it sent it.

    Raises:
        RefusedError: it is longer than ``most`` bytes, or takes too long to arrive.
    """
    too_long = RefusedError(413, f"the body is longer than {most} bytes", "body_too_large")
    length = headers.get(b"content-length", b"0")
    if not length.isdigit() or int(length) > most:
        raise too_long
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > most:
                    raise too_long
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise RefusedError(408, f"the body did not arrive within {BODY_SECONDS:g} seconds", "body_timeout") from None


def without_network(body: bytes) -> Receive:
    """What an application receives of a request that is in this process: the body, and then nothing for ever. It may be
    asked, and the question given up, as often as one likes."""
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> MutableMapping[str, Any]:
        if not left:
            await asyncio.Event().wait()
        return left.pop()

    return receive

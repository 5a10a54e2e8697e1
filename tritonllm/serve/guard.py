"""What every request passes before a handler sees it: its id, the key, the limits; and the line of the log.

Plain ASGI: it hands streams on as they come, and the handler still learns when the client goes away.
"""

import asyncio
import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from tritonllm.serve.config import ServerConfig
from tritonllm.serve.errors import APIError, error_response
from tritonllm.serve.shared_count import SharedCount

logger = logging.getLogger(__name__)
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

OPEN_PATHS = {"/", "/health", "/ready", "/version", "/metrics"}  # of probes and scrapers: no key, no limit
# Of who looks, again and again: a key, but no limit, and no line of the log when all is well.
WATCHED_PATHS = {"/status", "/activity"}
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
BODY_SECONDS = 60.0  # that a client may take to send a body


class Guard:
    """ASGI middleware.

    Args:
        app: what comes behind it.
        config: keys and limits.
        running: counts requests; by default those of this process.
    """

    def __init__(self, app: Any, config: ServerConfig, running: SharedCount | None = None) -> None:
        self._app = app
        self._config = config
        self._keys = [_digest(key.encode()) for key in config.api_keys]
        self._running = running or SharedCount()

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        begin, status = time.monotonic(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._guarded(scope, headers, receive, send_with_id)
        finally:
            if scope["path"] not in OPEN_PATHS and not (scope["path"] in WATCHED_PATHS and status == 200):
                took = 1e3 * (time.monotonic() - begin)
                logger.info("%s %s %d %.1f ms id=%s", scope["method"], scope["path"], status, took, request_id)

    async def _guarded(self, scope: Any, headers: dict[bytes, bytes], receive: Receive, send: Send) -> None:
        if scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        counted = scope["path"] not in WATCHED_PATHS
        try:
            self._check_key(headers)
            if counted and (total := self._running.total) >= self._config.max_concurrency:
                raise APIError(429, f"{total} requests are being answered: try again later", code="busy")
        except APIError as error:
            await error_response(error, scope["path"])(scope, receive, send)
            return
        self._running.add(int(counted))
        try:
            body = await self._read_body(headers, receive)
            kind = headers.get(b"content-type", b"")
            if body and b"json" not in kind:  # a page of another site can make a browser send other kinds unasked
                raise APIError(415, "send the body with Content-Type: application/json")
            if body is not None:
                await self._app(scope, _replay(body, receive), send)
        except APIError as error:
            await error_response(error, scope["path"])(scope, receive, send)
        finally:
            self._running.add(-int(counted))

    def _check_key(self, headers: dict[bytes, bytes]) -> None:
        """Raises:
        APIError: there are keys, and the request has none of them. The time it takes does not tell how much fits.
        """
        if not self._keys:
            return
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":
            token = headers.get(b"x-api-key", b"")  # as Anthropic's clients send it
        given = _digest(token.strip())
        matches = [hmac.compare_digest(given, key) for key in self._keys]  # all of them, whichever fits
        if not any(matches):
            raise APIError(401, "the API key is missing or wrong: send Authorization: Bearer", code="invalid_api_key")

    async def _read_body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes | None:
        """The whole body; ``None`` if the client went away while it sent it.

        Raises:
            APIError: it is too long, or takes too long to arrive.
        """
        most = self._config.max_body_bytes
        too_long = APIError(413, f"the body is longer than {most} bytes", code="body_too_large")
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
            raise APIError(408, f"the body did not arrive within {BODY_SECONDS:g} seconds") from None


def _digest(secret: bytes) -> bytes:
    """Of one length, whatever the secret's."""
    return hashlib.sha256(secret).digest()


def _replay(body: bytes, receive: Receive) -> Receive:
    """Gives the body that was read, then what comes after it."""
    given = False

    async def receive_again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again

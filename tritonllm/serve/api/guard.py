"""What every request passes before a handler sees it: its id, the key, the limits; and the line of the log.

Plain ASGI: it hands streams on as they come, and the handler still learns when the client goes away.
"""

import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from tritonllm.http.guard import Keys, Receive, RefusedError, receive_body, request_id_of
from tritonllm.serve.api.config import ServerConfig
from tritonllm.serve.api.errors import APIError, error_response
from tritonllm.serve.api.pace import Pace
from tritonllm.serve.engines.shared_count import SharedCount
from tritonllm.system.log_text import printable

logger = logging.getLogger(__name__)
Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]

OPEN_PATHS = {"/", "/health", "/ping", "/ready", "/version", "/metrics"}  # of probes and scrapers: no key, no limit
# Of who looks, again and again: a key, but no limit, and no line of the log when all is well.
WATCHED_PATHS = {"/activity", "/load"}
AT_ONCE = 8  # requests that begin in one turn of the event loop


class Guard:
    """ASGI middleware that checks keys, sizes and the number of requests before a handler runs.

    Args:
        app: what comes behind it.
        config: keys and limits.
        running: counts requests; by default those of this process.
    """

    def __init__(self, app: Any, config: ServerConfig, running: SharedCount | None = None) -> None:
        self._app = app
        self._config = config
        self._keys = Keys(config.api_keys)
        self._running = running or SharedCount()
        self._pace = Pace(AT_ONCE)

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, path = dict(scope["headers"]), path_of(scope)
        request_id = request_id_of(headers)
        scope.setdefault("state", {})["request_id"] = request_id
        begin, status = time.monotonic(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._guarded(scope, path, headers, receive, send_with_id)
        finally:
            if path not in OPEN_PATHS and not (path in WATCHED_PATHS and status == 200):
                took = 1e3 * (time.monotonic() - begin)
                logger.info(
                    "%s %s %d %.1f ms id=%s", scope["method"], printable(scope["path"]), status, took, request_id
                )

    async def _guarded(self, scope: Any, path: str, headers: dict[bytes, bytes], receive: Receive, send: Send) -> None:
        if path in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        counted = path not in WATCHED_PATHS
        try:
            self._keys.check(headers)
            if counted and (total := self._running.total) >= self._config.max_concurrency:
                raise APIError(429, f"{total} requests are being answered: try again later", code="busy")
        except (APIError, RefusedError) as error:
            await error_response(_as_api_error(error), path)(scope, receive, send)
            return
        self._running.add(int(counted))
        try:
            body = await receive_body(headers, receive, self._config.max_body_bytes)
            kind = headers.get(b"content-type", b"")
            if body and b"json" not in kind:  # a page of another site can make a browser send other kinds unasked
                raise APIError(415, "send the body with Content-Type: application/json")
            if body is not None:
                await self._pace.turn()
                await self._app(scope, _replay(body, receive), send)
        except (APIError, RefusedError) as error:
            await error_response(_as_api_error(error), path)(scope, receive, send)
        finally:
            self._running.add(-int(counted))


def path_of(scope: Any) -> str:
    """A request's path below ``--root-path``, whether or not what stands before the server has taken that away."""
    path, root = scope["path"], scope.get("root_path", "")
    return path.removeprefix(root) if root and path.startswith(f"{root}/") else path


def _as_api_error(error: APIError | RefusedError) -> APIError:
    return error if isinstance(error, APIError) else APIError(error.status, error.message, code=error.code)


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

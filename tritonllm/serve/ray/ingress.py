"""The way into the engines behind Ray Serve: reads a request, and hands on what a replica answers.

Serve's proxies know the headers of a request and not its body, so they cannot place it by its prompt. An ingress can:
it reads the body as ``tritonllm route`` does (:mod:`tritonllm.http.ask`), and its handle to the engines places the
request (:mod:`tritonllm.serve.ray.prefix`). Once a byte of an answer has gone to the client no other replica is asked.
"""

import asyncio
import json
import logging
import time
from typing import Any

from ray.exceptions import RayTaskError
from ray.serve.exceptions import BackPressureError
from starlette.requests import Request
from starlette.responses import Response

from tritonllm.http.ask import Ask, header_of, read_fields
from tritonllm.http.errors import RouteError
from tritonllm.http.events import WholeEvents
from tritonllm.http.guard import Keys, RefusedError, receive_body, request_id_of
from tritonllm.http.reply import Message, Receive, Reply, Send, end_to_end
from tritonllm.route.app import OPEN_PATHS, PASSED, PASSED_PATHS
from tritonllm.serve.api.config import ServerConfig
from tritonllm.serve.ray.metrics import together
from tritonllm.system.log_text import printable
from tritonllm.version import __version__

logger = logging.getLogger(__name__)
MOVES = (429, 503)  # a replica that answers so is full, or its engine has died: another one is asked
PROBE_SECONDS = 5.0  # that replicas have to answer a probe
CLIENT_LEFT = 499  # in the log, as nginx has it


class LostError(Exception):
    """A replica gave no answer, or broke it off."""


class Ingress:
    """An ASGI application that reads requests and sends each to a replica.

    Args:
        engines: Serve's handle to the replicas with engines.
        config: the configuration of the server: keys and sizes.
        sticky_header, sticky_chars, max_retries: as of :class:`~tritonllm.serve.ray.options.ServeOptions`.
    """

    def __init__(
        self, engines: Any, config: ServerConfig, sticky_header: str, sticky_chars: int, max_retries: int
    ) -> None:
        self._engines = engines
        self._answers = engines.options(method_name="answer", stream=True)
        self._config, self._max_retries = config, max_retries
        self._sticky_header, self._sticky_chars = sticky_header, sticky_chars
        self._keys = Keys(config.api_keys)

    async def __call__(self, request: Request) -> Response:
        return _Answering(self)

    async def answer(self, scope: Any, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        begin, path = time.monotonic(), scope["path"].removeprefix(scope.get("root_path", "")) or "/"
        reply = Reply(_without_id(send), path, request_id_of(headers))
        try:
            if path in OPEN_PATHS:
                async with asyncio.timeout(PROBE_SECONDS):
                    await self._open_page(scope["method"], path, reply)
                return
            self._keys.check(headers)
            _check_path(scope, path)
            body = await receive_body(headers, receive, self._config.max_body_bytes)
            if body is not None:
                await self._moved(self._ask(scope, path, headers, body, reply.request_id), reply)
        except TimeoutError:
            await reply.fail(RouteError(503, f"no replica answered within {PROBE_SECONDS:g} seconds", "no_replica"))
        except (RouteError, RefusedError) as error:
            refused = error if isinstance(error, RouteError) else RouteError(error.status, error.message, error.code)
            await reply.fail(refused)
        finally:
            if path not in OPEN_PATHS:
                took = 1e3 * (time.monotonic() - begin)
                status = reply.status or CLIENT_LEFT
                logger.info("%s %s %d %.1f ms id=%s", scope["method"], printable(path), status, took, reply.request_id)

    def _ask(self, scope: Any, path: str, headers: dict[bytes, bytes], body: bytes, request_id: str) -> Ask:
        query = scope.get("query_string", b"").decode("latin-1")
        given = header_of(headers, self._sticky_header)
        model, key, tokens = read_fields(path, body, given, self._sticky_chars)
        target = path + (f"?{query}" if query else "")
        left = tuple(end_to_end(scope["headers"], (b"authorization", b"x-api-key")))
        return Ask(scope["method"], path, target, left, body, request_id, model, key, tokens)

    async def _open_page(self, method: str, path: str, reply: Reply) -> None:
        if path == "/version":
            await _json(reply, {"version": __version__})
        elif path == "/metrics":
            pages = await self._engines.broadcast("metrics").results_async(return_exceptions=True)
            kind, text = together(page for page in pages if not isinstance(page, BaseException))
            await reply.whole(200, [(b"content-type", kind.encode())], text)
        else:
            await self._moved(Ask(method, path, path, (), b"", reply.request_id, None, b"", 1), reply)

    async def _moved(self, ask: Ask, reply: Reply) -> None:
        """Ask one replica after another.

        Raises:
            RouteError: none could answer, or one broke off, of which the client does not know yet.
        """
        tried: list[str] = []
        for left in range(self._max_retries, -1, -1):
            try:
                if (name := await self._relay(ask, tuple(tried), reply, is_last=not left)) is None:
                    return
                tried.append(name)
            except LostError as error:
                if reply.status or not left or not ask.repeatable:
                    raise RouteError(502, f"a replica broke off its answer: {error}", "replica_failed") from error
                logger.warning("request %s goes on to another replica: %s", ask.request_id, error)

    async def _relay(self, ask: Ask, tried: tuple[str, ...], reply: Reply, is_last: bool) -> str | None:
        """Hand the answer of one replica on.

        Returns:
            The name of the replica if it refused the request and another one may be asked.

        Raises:
            LostError: it gave no answer, or broke it off.
            RouteError: as many requests wait as may wait.
        """
        batches = self._answers.remote(ask, tried)
        is_whole = False
        try:
            first, *rest = await anext(batches)
            name = dict(first["headers"])[b"x-replica"].decode()
            if first["status"] in MOVES and not is_last and name not in tried:
                return name
            is_whole = await self._relay_rest(first, rest, batches, reply)
            if not is_whole:
                raise LostError("it ended before its end")
        except BackPressureError as error:
            raise RouteError(429, "as many requests wait as may wait: try again later", "queue_full") from error
        except (RouteError, LostError):
            raise
        except (Exception, StopAsyncIteration) as error:
            if isinstance(error, RayTaskError):
                logger.error("request %s failed in a replica", ask.request_id, exc_info=error)
            raise LostError(type(error).__name__) from error
        finally:
            if not is_whole:
                batches.cancel()
        return None

    async def _relay_rest(self, first: Message, rest: list[Message], batches: Any, reply: Reply) -> bool:
        """A stream of events as it comes, anything else when it is whole. Returns whether it came to its end."""
        headers = [(name, value) for name, value in first["headers"] if name != b"x-request-id"]
        kind = dict(headers).get(b"content-type", b"")
        is_events = kind.startswith(b"text/event-stream")
        events = WholeEvents()
        held: list[bytes] = []
        while True:
            data = b"".join(message.get("body", b"") for message in rest)
            ended = any(not message.get("more_body", False) for message in rest)
            if is_events:
                data = events.add(data)
                if not reply.status and (data or ended):
                    await reply.start(first["status"], headers, is_events=True)
                if ended:
                    await reply.end(data + events.rest)
                elif data:
                    await reply.part(data)
            elif ended:
                await reply.whole(first["status"], headers, b"".join([*held, data]))
            else:
                held.append(data)
            if ended:
                return True
            try:
                rest = await anext(batches)
            except StopAsyncIteration:
                return False


class _Answering(Response):
    """Serve runs what ``__call__`` returns over ASGI."""

    def __init__(self, ingress: Ingress) -> None:
        super().__init__()
        self._ingress = ingress

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        await self._ingress.answer(scope, receive, send)


def _check_path(scope: Any, path: str) -> None:
    """Check that clients may ask this path.

    Raises:
        RouteError: clients have no business there.
    """
    if not path.startswith(PASSED) and path not in PASSED_PATHS:
        raise RouteError(404, f"{scope['method']} {path}: Not Found", "not_found")
    if any(part in (".", "..") for part in path.split("/")):
        raise RouteError(400, f"{path!r} has . or .. in it", "bad_path")


def _without_id(send: Send) -> Send:
    """Serve's proxy names the request's id in the answer, so nobody else has to."""

    async def send_without_id(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [pair for pair in message["headers"] if pair[0] != b"x-request-id"]
        await send(message)

    return send_without_id


async def _json(reply: Reply, content: Any) -> None:
    await reply.whole(200, [(b"content-type", b"application/json")], json.dumps(content).encode())

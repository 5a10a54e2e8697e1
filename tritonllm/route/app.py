"""The router as an ASGI application: which path leads where, and what ends a request early."""

import asyncio
import json
import logging
import socket
import time
from collections.abc import Coroutine
from typing import Any

import aiohttp
from prometheus_client import CONTENT_TYPE_LATEST

from tritonllm.http.ask import Ask, header_of, read_fields
from tritonllm.http.errors import RouteError
from tritonllm.http.guard import Keys, RefusedError, receive_body, request_id_of
from tritonllm.http.reply import Receive, Reply, Send, end_to_end
from tritonllm.route.config import NEEDS_RESTART, RouterConfig
from tritonllm.route.interim import BackendAnswer
from tritonllm.route.metrics import RouterMetrics
from tritonllm.route.pool import Pool
from tritonllm.route.probe import Prober
from tritonllm.route.proxy import Proxy
from tritonllm.route.reload import changes
from tritonllm.route.upstream import DROPPED
from tritonllm.system.log_text import printable
from tritonllm.system.lost_hosts import end_when_silent
from tritonllm.version import __version__

logger = logging.getLogger(__name__)
PASSED = ("/v1/", "/v2/")  # what goes to a backend, and these:
PASSED_PATHS = {"/generate", "/tokenize", "/detokenize", "/rerank", "/score", "/pooling", "/classify"}
OPEN_PATHS = {"/health", "/ready", "/metrics", "/version"}  # of probes and scrapers: no key, no limit
CLIENT_LEFT = 499  # in the log, as nginx has it
KEEP_ALIVE = 2.0  # seconds that an idle connection is kept: less than servers keep theirs (uvicorn: 5)
BUFFER = 1 << 16  # bytes of an answer that wait for a slow client, twice that at most; then the backend waits, too


class Router:
    """The router's application: sends clients' requests to backends.

    Args:
        config: the configuration at the start; :meth:`apply` takes another one.
    """

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self.pool = Pool(config)
        self.metrics = RouterMetrics(self.pool)
        self.draining = False
        self._running = 0
        self._answering: set[asyncio.Task[str]] = set()
        self._is_cut = False  # running requests may take no longer

    async def start(self) -> None:
        """Connect to nothing yet, but ask each backend once whether it lives."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE, socket_factory=self._new_socket),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            read_bufsize=BUFFER,
            response_class=BackendAnswer,
        )
        self._proxy = Proxy(self.pool, self._session, self.metrics)
        self._prober = Prober(self.pool, self._session, self._proxy.on_down)
        await self._prober.ask_once(self.pool.backends.values())
        self._prober.follow()

    def _new_socket(self, address: aiohttp.AddrInfoType) -> socket.socket:
        """Make a socket for a connection to a backend."""
        family, kind, protocol, _, _ = address
        made = socket.socket(family, kind, protocol)
        end_when_silent(made, self.config.host_timeout)
        return made

    async def close(self) -> None:
        await self._prober.stop()
        await self._session.close()

    async def apply(self, config: RouterConfig) -> None:
        """Take another configuration. Running requests go on, at backends that left it, too."""
        for name in NEEDS_RESTART:
            if getattr(config, name) != getattr(self.config, name):
                logger.warning("%s changes only when the router starts again", name)
        what = changes(self.config, config)
        new = self.pool.missing(config)
        await self._prober.ask_once(new)  # before the old ones leave, or there might be none that can be used
        self.config = config
        self.pool.apply(config, new)
        self._proxy.apply(config)
        self._prober.follow()
        logger.info("new configuration: %s", what)

    def cut(self) -> None:
        """End what still runs, with an error."""
        self._is_cut = True
        for task in self._answering:
            task.cancel()

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        await self.start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _http(self, scope: Any, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        begin, path = time.monotonic(), scope["path"]
        reply = Reply(send, path, request_id_of(headers))
        where = "-"
        try:
            if path in OPEN_PATHS:
                await self._own_page(path, reply)
                return
            Keys(self.config.api_keys).check(headers)
            where = await self._limited(scope, headers, receive, reply)
        except (RouteError, RefusedError) as error:
            self.metrics.refused(error.code or str(error.status))
            refused = error if isinstance(error, RouteError) else RouteError(error.status, error.message, error.code)
            await reply.fail(refused)
        finally:
            if path not in OPEN_PATHS:
                took = 1e3 * (time.monotonic() - begin)
                status = reply.status or CLIENT_LEFT
                shown = printable(scope["raw_path"].decode("latin-1"))
                logger.info("%s %s %d %.1f ms id=%s %s", scope["method"], shown, status, took, reply.request_id, where)

    async def _limited(self, scope: Any, headers: dict[bytes, bytes], receive: Receive, reply: Reply) -> str:
        if self._running >= self.config.max_concurrency:
            raise RouteError(429, f"{self._running} requests are being answered: try again later", "busy")
        self._running += 1
        try:
            body = await receive_body(headers, receive, self.config.max_body_bytes)
            if body is None:
                return "-"
            return await self._while_it_waits(self._routed(scope, headers, body, reply), receive)
        finally:
            self._running -= 1

    async def _while_it_waits(self, answering: Coroutine[Any, Any, str], receive: Receive) -> str:
        """Answer as long as the client is there and the router may run."""
        work, gone = asyncio.create_task(answering), asyncio.create_task(_gone(receive))
        self._answering.add(work)
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return "client left"
            if work.cancelled() and self._is_cut:
                raise RouteError(503, "the router is shutting down", "draining")
            return work.result()
        finally:
            self._answering.discard(work)
            await _cancelled(work)
            await _cancelled(gone)

    async def _routed(self, scope: Any, headers: dict[bytes, bytes], body: bytes, reply: Reply) -> str:
        method, path = scope["method"], scope["path"]
        if path == "/status" and method == "GET":
            await _json(reply, self.status())
        elif path == "/v1/models" and method == "GET":
            await _json(reply, {"object": "list", "data": list(self.pool.models().values())})
        elif path.startswith("/v1/models/") and method == "GET" and path[11:] in (models := self.pool.models()):
            await _json(reply, models[path[11:]])
        elif not path.startswith(PASSED) and path not in PASSED_PATHS:
            raise RouteError(404, f"{method} {path}: Not Found", "not_found")
        elif any(part in (".", "..") for part in path.split("/")):  # it could lead out of /v1/
            raise RouteError(400, f"{path!r} has . or .. in it", "bad_path")
        elif not (scope["raw_path"].isascii() and scope["query_string"].isascii()):
            raise RouteError(400, "the path or the query has bytes that should be %-escaped", "bad_path")
        else:
            return await self._proxy.answer(self._ask(scope, headers, body, reply.request_id), reply)
        return "-"

    def _ask(self, scope: Any, headers: dict[bytes, bytes], body: bytes, request_id: str) -> Ask:
        path, query = scope["path"], scope["query_string"]
        given = header_of(headers, self.config.sticky_header)
        model, key, tokens = read_fields(path, body, given, self.config.sticky_chars)
        if path.startswith("/v1/models/"):
            model = path[11:]
        return Ask(
            method=scope["method"],
            path=path,
            target=scope["raw_path"].decode() + (f"?{query.decode()}" if query else ""),
            headers=tuple(end_to_end(scope["headers"], DROPPED)),
            body=body,
            request_id=request_id,
            model=model,
            key=key,
            tokens=tokens,
        )

    async def _own_page(self, path: str, reply: Reply) -> None:
        if path == "/metrics":
            await reply.whole(200, [(b"content-type", CONTENT_TYPE_LATEST.encode())], self.metrics.text())
        elif path == "/version":
            await _json(reply, {"version": __version__})
        elif path == "/ready" and self.draining:
            raise RouteError(503, "the router is shutting down", "draining")
        elif not self.pool.usable:
            raise RouteError(503, "no backend can be used", "no_backend")
        else:
            await _json(reply, {"status": "ready" if path == "/ready" else "ok"})

    def status(self) -> dict[str, Any]:
        return {
            "version": __version__,
            "policy": self.config.policy,
            "running": self._running,
            "draining": self.draining,
            "backends": [backend.status() for backend in self.pool.all],
        }


async def _json(reply: Reply, content: Any) -> None:
    await reply.whole(200, [(b"content-type", b"application/json")], json.dumps(content).encode())


async def _gone(receive: Receive) -> None:
    """Returns when the client is no longer there, or has got its whole answer."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancelled(task: "asyncio.Future[Any]") -> None:
    """End a task, and wait until it has ended; what it raised is nobody's business any more."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()

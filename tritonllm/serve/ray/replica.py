"""A replica of Ray Serve with an engine: the application of ``tritonllm serve``, without its sockets."""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import Any

from tritonllm.config.engine import EngineConfig
from tritonllm.http.ask import Ask
from tritonllm.http.guard import without_network
from tritonllm.http.reply import Message
from tritonllm.serve.api.app import make_app
from tritonllm.serve.api.config import ServerConfig
from tritonllm.serve.engines.async_llm import AsyncLLM
from tritonllm.serve.processes.api_process import NEWS_OF_DEATH

logger = logging.getLogger(__name__)
LAST_ANSWERS = 10.0  # seconds in which answers that end with the engine's death are still handed on


class EngineReplica:
    """An actor of Ray Serve with one engine. Its answers bear its name in the header ``x-replica``.

    Args:
        engine: the configuration of the engine, which runs in a process of its own.
        config: the configuration of the application. Keys are the ingress's affair.
        max_queue: how many sequences may wait for a seat.

    Raises:
        ValueError, RuntimeError: the engine did not start.
    """

    def __init__(self, engine: EngineConfig, config: ServerConfig, max_queue: int) -> None:
        self._llm = AsyncLLM(engine, max_queue=max_queue, log_level=logging.WARNING)
        self._llm.on_death = self._died
        self._app = make_app(self._llm, config)
        self._stack: AsyncExitStack | None = None
        self._name = _name_of_this()
        self._running = 0

    async def check_health(self) -> None:
        """Called by Serve before the first request and again and again; it starts a replica anew that raises."""
        if self._stack is None:
            self._stack = AsyncExitStack()
            await self._stack.enter_async_context(self._app.router.lifespan_context(self._app))
        await self._llm.check_health()

    async def answer(self, ask: Ask, tried: tuple[str, ...]) -> AsyncGenerator[list[Message], None]:
        """What the application sends over ASGI, as many messages at a time as there are. Closing it aborts the request.

        Args:
            ask: a request.
            tried: replicas that have failed it; for :class:`~tritonllm.serve.ray.prefix.PrefixRouter`.
        """
        waiting: list[Message] = []
        news = asyncio.Event()

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-replica", self._name.encode())]
            waiting.append(message)
            news.set()

        task = asyncio.ensure_future(self._app(_scope(ask), without_network(ask.body), send))
        task.add_done_callback(lambda _: news.set())
        self._running += 1
        ended = False
        try:
            while not ended:
                await news.wait()
                news.clear()
                batch, waiting[:] = waiting[:], []
                ended = task.done() or any(_is_last(message) for message in batch)
                if batch:
                    yield batch
        finally:
            self._running -= 1
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled() and task.exception() is not None:
                logger.error("request %s failed", ask.request_id, exc_info=task.exception())

    async def metrics(self) -> tuple[str, bytes]:
        """This replica's name, and its page for Prometheus."""
        ask = Ask("GET", "/metrics", "/metrics", (), b"", self._name, None, b"", 1)
        messages = [message async for batch in self.answer(ask, ()) for message in batch]
        return self._name, b"".join(message.get("body", b"") for message in messages)

    def _died(self, why: str) -> None:
        logger.error("%s: the replica ends", why)
        self._leaving = asyncio.get_running_loop().create_task(self._leave())

    async def _leave(self) -> None:
        """End the process, which Serve sees at once, when clients have been told."""
        await asyncio.sleep(NEWS_OF_DEATH)
        end = asyncio.get_running_loop().time() + LAST_ANSWERS
        while self._running and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.05)
        os._exit(1)

    async def __del__(self) -> None:
        """Called by Serve when the running requests have ended."""
        stack = getattr(self, "_stack", None)
        if stack is not None:
            await stack.aclose()
        if hasattr(self, "_llm"):
            self._llm.shutdown()


def _name_of_this() -> str:
    from ray import serve

    return str(serve.get_replica_context().replica_id.unique_id)


def _is_last(message: Message) -> bool:
    return message["type"] == "http.response.body" and not message.get("more_body", False)


def _scope(ask: Ask) -> dict[str, Any]:
    path, _, query = ask.target.partition("?")
    given = [(name, value) for name, value in ask.headers if name not in (b"content-length", b"x-request-id")]
    headers = [
        *given,
        (b"content-length", b"%d" % len(ask.body)),
        (b"x-request-id", ask.request_id.encode()),
    ]
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "method": ask.method,
        "path": ask.path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": None,
    }

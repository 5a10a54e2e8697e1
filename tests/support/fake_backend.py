"""Servers that speak as much of OpenAI's API as the router's tests need, and fail on demand.

``FakeBackend`` runs in a thread, on a port that stays its own; ``FakeProcess`` is a process that can be killed or
stopped. A stream's tokens are ``PROMPT:0``, ``PROMPT:1``, ..., so a test sees where each came from.
"""

import asyncio
import json
import socket
import subprocess
import sys
import threading
from collections import Counter
from functools import cached_property
from pathlib import Path
from typing import Any

import uvicorn

from support.waiting import PATIENCE


class FakeApp:
    """An ASGI application. A test changes its attributes while it runs.

    Attributes:
        models: that it serves; ``None``: it has no ``/v1/models``.
        health: status of ``/health``; 0: it does not answer.
        answer: "good", a status such as 503, "hang" (nothing comes), "headers" (only they come, then it dies), "cut"
            (the connection breaks in the middle), "stall" (nothing more comes after the middle).
        headers: of answers with a status of ``answer``.
        tokens: of each stream.
        delay: seconds between two of them.
        more: what else is in an answer that is one JSON object.
    """

    def __init__(self, name: str = "fake", models: tuple[str, ...] | None = ("m",)) -> None:
        self.name, self.models = name, models
        self.more: dict[str, Any] = {}
        self.health, self.answer, self.headers = 200, "good", {}
        self.tokens, self.delay = 10, 0.0
        self.seen: list[dict[str, Any]] = []
        self.counts: Counter[str] = Counter()
        self.running = 0

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        path = scope["path"]
        self.counts[path] += 1
        if path == "/health":
            if self.health == 0:
                await asyncio.sleep(3600)
            await reply(send, self.health, {"status": "?"})
        elif path == "/v1/models":
            await self._models(send)
        else:
            headers = {name.decode(): value.decode() for name, value in scope["headers"]}
            query = f"?{scope['query_string'].decode()}" if scope["query_string"] else ""
            target = scope["raw_path"].decode() + query
            self.seen.append({"method": scope["method"], "target": target, "headers": headers, "body": body})
            await self._while_connected(self._answer(path, body, send), receive)

    async def _while_connected(self, answering, receive):
        self.running += 1
        work, gone = asyncio.ensure_future(answering), asyncio.ensure_future(receive())
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        self.running -= 1
        if not work.done():
            self.counts["left"] += 1
        gone.cancel()
        work.cancel()
        await asyncio.wait({work, gone})

    async def _models(self, send):
        if self.models is None:
            await reply(send, 404, {"error": {"message": "no such path"}})
        else:
            await reply(send, 200, {"object": "list", "data": [{"id": m, "object": "model"} for m in self.models]})

    async def _answer(self, path, body, send):
        if self.answer.isdigit():
            await reply(send, int(self.answer), {"error": {"message": f"{self.name} fails"}}, self.headers)
            return
        if self.answer == "hang":
            await asyncio.sleep(3600)
        try:
            asked = json.loads(body)
        except ValueError:
            asked = {}
        if isinstance(asked, dict) and asked.get("stream"):
            await self._stream(asked, send)
        else:
            await self._whole(path, asked, send)

    async def _whole(self, path, asked, send):
        content = json.dumps({"from": self.name, "path": path, "asked": asked, **self.more}).encode()
        length = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        await asyncio.sleep(self.delay)
        await send({"type": "http.response.start", "status": 200, "headers": length})
        if self.answer in ("headers", "cut", "stall"):
            if self.answer != "headers":
                await send({"type": "http.response.body", "body": content[:10], "more_body": True})
            await self._break_off()
            return
        await send({"type": "http.response.body", "body": content})

    async def _stream(self, asked, send):
        kind = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-from", self.name.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": kind})
        if self.answer == "headers":
            return
        count = asked.get("max_tokens", self.tokens)
        for i in range(count):
            if self.answer in ("cut", "stall") and i == count // 2:
                await send({"type": "http.response.body", "body": event("half")[:9], "more_body": True})
                await self._break_off()
                return
            await send({"type": "http.response.body", "body": event(f"{asked['prompt']}:{i}"), "more_body": True})
            if self.delay:
                await asyncio.sleep(self.delay)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _break_off(self):
        """uvicorn closes a connection whose answer is not whole."""
        await asyncio.sleep(0.01 if self.answer != "stall" else 3600)


def event(text: str) -> bytes:
    return b"data: %b\n\n" % json.dumps({"choices": [{"index": 0, "text": text}]}).encode()


async def reply(send, status, content, headers=None):
    body = json.dumps(content).encode()
    more = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *more]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})


class ThreadServer:
    """An ASGI application that a thread serves.

    Args:
        app: the application.
        lifespan: whether it has one.
        port: 0 takes a free one.
        settings: of uvicorn.
    """

    def __init__(self, app: Any, lifespan: str = "off", port: int = 0, **settings: Any) -> None:
        self.app = app
        self.sock = socket.create_server(("127.0.0.1", port))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # or an answer waits 40 ms for an ACK
        self.port = self.sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        config = uvicorn.Config(app, lifespan=lifespan, log_config=None, timeout_graceful_shutdown=0, **settings)
        self.server = uvicorn.Server(config)
        self.loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        while not self.server.started:
            assert self._thread.is_alive(), "the server did not start"
            threading.Event().wait(0.005)

    def _run(self) -> None:
        with asyncio.Runner() as runner:
            self.loop = runner.get_loop()
            runner.run(self.server.serve([self.sock]))

    def run(self, coroutine: Any) -> Any:
        """Run a coroutine where the application runs."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE)

    def close(self, wait: bool = True) -> None:
        """Without ``wait``, only begin to."""
        self.server.should_exit = True
        if wait:
            self._thread.join(PATIENCE)
            self.sock.close()


class FakeBackend(FakeApp):
    """In a thread. ``stop`` refuses connections and breaks those that there are, ``start`` listens again."""

    def __init__(self, name: str = "fake", models: tuple[str, ...] | None = ("m",)) -> None:
        super().__init__(name, models)
        self._server = ThreadServer(self)
        self.url, self.port = self._server.url, self._server.port

    def stop(self, wait: bool = True) -> None:
        self._server.close(wait)

    def start(self) -> None:
        self._server = ThreadServer(self, port=self.port)


class FakeProcess:
    """A fake backend in a process of its own.

    Args:
        name: which server this is.
        delay: seconds between two tokens.
    """

    def __init__(self, name: str, delay: float = 0.0) -> None:
        self.name = name
        command = [sys.executable, "-m", "support.fake_backend", name, str(delay)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1])

    @cached_property
    def url(self) -> str:
        """Waits until it listens."""
        return self.process.stdout.readline().strip()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)
        self.process.stdout.close()


if __name__ == "__main__":
    app = FakeApp(sys.argv[1])
    app.delay = float(sys.argv[2])
    config = uvicorn.Config(app, lifespan="off", log_level="error")
    with socket.create_server(("127.0.0.1", 0)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sys.stdout.write(f"http://127.0.0.1:{sock.getsockname()[1]}\n")
        sys.stdout.flush()
        uvicorn.Server(config).run([sock])

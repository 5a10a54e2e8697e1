"""A process that speaks HTTP: the only one, or one of several in front of one engine (``--api-server-count``).

One of several ignores signals; the process that started it says through a pipe when to stop, and that the engine died.
"""

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import uvicorn

from tritonllm.config.engine import EngineConfig
from tritonllm.http.heads import uvicorn_options
from tritonllm.http.server import DrainingServer
from tritonllm.serve.api.app import make_app
from tritonllm.serve.api.config import ServerConfig
from tritonllm.serve.engines.async_llm import AsyncLLM
from tritonllm.serve.engines.child_process import end_with_parent, end_without_threads, log_to_stderr
from tritonllm.serve.engines.engine_client import EngineLink
from tritonllm.serve.engines.messages import EngineReady
from tritonllm.serve.engines.shared_count import SharedCount
from tritonllm.system.starting import leave_out_of_searches

logger = logging.getLogger(__name__)
NEWS_OF_DEATH = 1.0  # seconds in which clients and probes still get an answer after the engine has died
STOPPED = "the server was stopped before the answer was whole: ask again"
STOP, STOP_NOW, LISTENING = "stop", "stop now", "listening"  # orders, and the only answer; else: why the engine died


class StoppableServer(DrainingServer):
    """A uvicorn server that ends gracefully: running requests get ``drain_seconds`` to end.

    Args:
        config: the configuration of uvicorn.
        app: the application, which learns that it is draining.
        llm: ends the requests that are not waited for.
        drain_seconds: how long requests have to end, in seconds.
    """

    def __init__(self, config: uvicorn.Config, app: Any, llm: AsyncLLM, drain_seconds: float) -> None:
        super().__init__(config, drain_seconds)
        self._app, self._llm = app, llm

    def begin_to_drain(self) -> None:
        self._app.state.draining = True

    def end_requests(self) -> None:
        self._llm.end_requests(STOPPED)


class _Quiet(StoppableServer):
    """A server that leaves signals alone."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def settings_of(app: Any, config: ServerConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
        **uvicorn_options(config.head_limits),
    )


class PipedLink(EngineLink):
    """A link whose engine is another process's child: orders and the news of its death come through a pipe."""

    def __init__(self, folder: str, ready: EngineReady, pipe: Connection) -> None:
        super().__init__(folder, ready)
        self._pipe = pipe
        self.on_order: Callable[[str], None] = lambda order: None

    async def _watch(self, on_death: Callable[[str], None]) -> None:
        loop, came = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._pipe.fileno(), came.set)
        self._pipe.send_bytes(LISTENING.encode())
        try:
            while self.failure is None:
                await came.wait()
                came.clear()
                while self._pipe.poll():
                    order = self._pipe.recv_bytes().decode()
                    if order in (STOP, STOP_NOW):
                        self.on_order(order)
                    else:
                        self.failure = order
        finally:
            loop.remove_reader(self._pipe.fileno())
        on_death(self.failure)


def run_api(
    config: ServerConfig,
    engine: EngineConfig,
    ready: bytes,
    folder: str,
    sock: socket.socket,
    pipe: Connection,
    max_queue: int,
    log_level: int | None,
    requests: Any,
    sequences: Any,
    number: int,
) -> None:
    """The process's main function.

    Args:
        config, engine: the configurations of the server and of its engine, which runs.
        ready: what the engine told at its start, as MessagePack.
        folder: where its socket lies, and what the API processes count.
        sock: the socket to accept connections from, together with the other processes.
        pipe: the pipe to the process that started this one.
        max_queue: how many sequences may wait, of all API processes together.
        log_level: the level of messages on stderr; ``None``: none.
        requests, sequences: how many are being answered and are in the engine: a place for each API process, in memory
            that all of them share.
        number: the number of this process among the API processes.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent(folder)
    if log_level is not None:
        log_to_stderr(log_level)
    link = PipedLink(folder, msgspec.msgpack.decode(ready, type=EngineReady), pipe)
    llm = AsyncLLM(engine, max_queue=max_queue, link=link, sequences=SharedCount(sequences, number))
    app = make_app(llm, config, metrics_folder=folder, running=SharedCount(requests, number))
    server = _Quiet(settings_of(app, config), app, llm, config.drain_seconds)
    link.on_order = lambda order: server.stop(now=order == STOP_NOW)
    llm.on_death = lambda why: _end_soon(server)
    gc.collect()
    leave_out_of_searches()
    server.run(sockets=[sock])
    llm.shutdown()
    if llm.is_in_long_text:
        end_without_threads(0)


def _end_soon(server: StoppableServer) -> None:
    asyncio.get_running_loop().call_later(NEWS_OF_DEATH, server.stop)

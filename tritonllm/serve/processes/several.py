"""Several API processes in front of one engine. The process that started them speaks no HTTP: it watches."""

import logging
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

import msgspec

from tritonllm import env
from tritonllm.config.engine import EngineConfig
from tritonllm.http.server import listen
from tritonllm.serve.api.config import ServerConfig
from tritonllm.serve.engines.engine_client import EngineClient
from tritonllm.serve.processes.api_process import STOP, STOP_NOW
from tritonllm.system.starting import run_spawned

logger = logging.getLogger(__name__)
DONE, FAILED = 0, 1
EXTRA_SECONDS = 5.0  # beyond --drain-seconds, until a process that does not end is killed


class Apis:
    """The API processes, and the pipes to them."""

    def __init__(self) -> None:
        self.processes: list[BaseProcess] = []
        self.pipes: list[Connection] = []
        self.stopping = False

    def add(self, process: BaseProcess, pipe: Connection) -> None:
        self.processes.append(process)
        self.pipes.append(pipe)

    def tell(self, order: str) -> None:
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            if process.is_alive():
                try:
                    pipe.send_bytes(order.encode())
                except OSError:
                    logger.debug("an API process has ended before it was told to", exc_info=True)

    def stop(self) -> None:
        """Let requests end; the second time, do not wait for them."""
        self.tell(STOP_NOW if self.stopping else STOP)
        self.stopping = True

    def join(self, seconds: float) -> None:
        """Wait for their ends; kill what does not end."""
        end = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(end - time.monotonic(), 0.0))
            if process.is_alive():
                logger.error("an API process does not end: it is killed")
                process.kill()
                process.join()

    def heard(self, ready: list[Any]) -> int:
        """How many of these are pipes on which a process says that it listens; what they say is taken."""
        listening = 0
        for pipe in self.pipes:
            if pipe in ready:
                try:
                    pipe.recv_bytes()
                    listening += 1
                except (EOFError, OSError):  # it has ended, which its sentinel tells
                    pass
        return listening


@contextmanager
def _signals_stop(apis: Apis) -> Iterator[int]:
    """Inside the block SIGINT and SIGTERM stop the processes; yields what is readable from the first one on."""
    reader, writer = os.pipe()

    def stop(number: int, frame: FrameType | None) -> None:
        apis.stop()
        os.write(writer, b".")

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield reader
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)


def run_several(
    client: EngineClient,
    engine: EngineConfig,
    config: ServerConfig,
    sock: socket.socket,
    address: str,
    *,
    max_queue: int,
    log_level: int | None,
) -> int:
    """Serve until SIGINT or SIGTERM comes, or a process dies.

    Args:
        client: a client of the engine, which is ready; it is closed at the end.
        engine, config: the configurations of the engine and of the server.
        sock: a bound socket, from which all API processes accept. It is closed here.
        address: the address of the socket, for the log.
        max_queue: how many sequences may wait, of all API processes together.
        log_level: the level of messages on stderr; ``None``: none.

    Returns:
        The exit status: 0 if it was told to stop, 1 if a process died.

    Raises:
        OSError: another process listens at the socket's address.
    """
    env.share_metrics(client.folder)
    apis, spawn = Apis(), multiprocessing.get_context("spawn")
    ready = msgspec.msgpack.encode(client.ready)
    counts = [spawn.RawArray("q", config.api_server_count) for _ in range(2)]  # of requests, of sequences
    try:
        listen(sock)
        with _signals_stop(apis) as signalled:
            for number in range(config.api_server_count):
                mine, theirs = spawn.Pipe()
                target = "tritonllm.serve.processes.api_process", "run_api"
                arguments = (config, engine, ready, client.folder, sock, theirs, max_queue, log_level, *counts, number)
                process = spawn.Process(
                    target=run_spawned, args=(*target, *arguments), name=f"tritonllm-api-{number}", daemon=True
                )
                process.start()
                theirs.close()
                apis.add(process, mine)
            sock.close()  # when the processes close theirs, new clients are refused instead of waiting for nobody
            if apis.stopping:  # those that were started after the signal do not know
                apis.tell(STOP)
            return _watch(client, apis, signalled, config, address)
    finally:
        apis.join(0.0)
        client.close()


def _watch(client: EngineClient, apis: Apis, signalled: int, config: ServerConfig, address: str) -> int:
    """Watch the processes until all API processes have ended; if one of the processes dies, the others end, too."""
    sentinels, listening = [process.sentinel for process in apis.processes], 0
    while True:
        ready = wait([client.sentinel, signalled, *sentinels, *apis.pipes])
        if client.sentinel in ready:
            why = client.bury()
            logger.error("%s: the server ends", why)
            apis.tell(why)
            apis.join(EXTRA_SECONDS + config.drain_seconds)
            return FAILED
        if signalled in ready:
            return _drain(client, apis, EXTRA_SECONDS + config.drain_seconds)
        if any(sentinel in ready for sentinel in sentinels):
            logger.error("an API process has died: the server ends")
            apis.tell(STOP_NOW)
            apis.join(EXTRA_SECONDS)
            return FAILED
        listening += apis.heard(ready)
        if listening == len(apis.processes):
            listening = 0  # it is said once
            logger.info("serving %s on %s", ", ".join(config.model_names), address)


def _drain(client: EngineClient, apis: Apis, seconds: float) -> int:
    """Wait until the API processes, which were told to stop, have ended; if the engine dies meanwhile, they hear of
    it."""
    end, status = time.monotonic() + seconds, DONE
    while living := [process.sentinel for process in apis.processes if process.is_alive()]:
        watched = living if status == FAILED else [client.sentinel, *living]
        ready = wait(watched, max(end - time.monotonic(), 0.0))
        if not ready:
            break
        if client.sentinel in ready:
            why, status = client.bury(), FAILED
            logger.error("%s: the server ends", why)
            apis.tell(why)
    apis.join(0.0)
    if status == DONE:
        logger.info("stopped")
    return status

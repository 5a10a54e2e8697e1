"""How a process that speaks HTTP, a server or a router, gets its port, and how it ends: its requests may end first; the
others get an error."""

import asyncio
import errno
import logging
import socket
from typing import Any

import uvicorn

from tritonllm.system.lost_hosts import end_when_clients_are_silent

BACKLOG = 2048  # connections that nobody has accepted yet; uvicorn's default
PORT_IS_TAKEN = ": give another --port, or 0 for a free one"
CLOSE_DELAY = 1.0  # seconds in which clients read that their requests are cut off


def bind_port(host: str, port: int) -> socket.socket:
    """A socket for :func:`listen`, whose port is this process's from now on.

    Two sockets with SO_REUSEADDR may have one port on Linux while neither listens, which a server does once its model
    is loaded. So this one has it only where connections of a server that has ended still stand in the way.

    Raises:
        OSError: the port is taken, or the address is not ours; says what to do.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for reuse in (0, 1):
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        try:
            sock.bind((host, port))
        except OSError as error:
            sock.close()
            if error.errno == errno.EADDRINUSE and not reuse:
                continue
            raise _cannot_listen((host, port), error) from error
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end_when_clients_are_silent(sock)
        break
    return sock


def listen(sock: socket.socket) -> None:
    """Begin to take connections. Those that are left at the end do not keep the port from the next server.

    Raises:
        OSError: another process listens there since.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.listen(BACKLOG)
    except OSError as error:
        raise _cannot_listen(sock.getsockname(), error) from error


def _cannot_listen(address: Any, error: OSError) -> OSError:
    if isinstance(address, str):
        where = f"unix:{address}"
    else:
        host, port, *_ = address
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    fix = PORT_IS_TAKEN if error.errno == errno.EADDRINUSE else ""
    return OSError(f"cannot listen on {where}: {error.strerror or error}{fix}")


class DrainingServer(uvicorn.Server):
    """A uvicorn server that ends gracefully: running requests get ``drain_seconds`` to end.

    Args:
        config: the configuration of uvicorn.
        drain_seconds: how long requests have to end, in seconds; what takes longer is cut off with an error.
    """

    def __init__(self, config: uvicorn.Config, drain_seconds: float) -> None:
        config.timeout_graceful_shutdown = None  # it would cut off without a word
        super().__init__(config)
        self._drain_seconds = drain_seconds
        self._loop: asyncio.AbstractEventLoop | None = None

    def begin_to_drain(self) -> None:
        """Say to whom asks that this ends."""
        raise AssertionError("a subclass says it")

    def end_requests(self) -> None:
        """End the requests that nobody waits for with an error."""
        raise AssertionError("a subclass ends them")

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().call_later(self._drain_seconds, self._cut)
        await super().shutdown(sockets)

    def stop(self, now: bool = False) -> None:
        """Let the requests end; called again, or with ``now``, do not wait for them. May be called by a signal."""
        self.begin_to_drain()
        again, self.should_exit = now or self.should_exit, True
        if again and self._loop is not None:
            self._loop.call_soon_threadsafe(self._cut)

    def _cut(self) -> None:
        """End the requests, and soon after that the connections of clients that do not read it."""
        self.end_requests()
        asyncio.get_running_loop().call_later(CLOSE_DELAY, self._force)

    def _force(self) -> None:
        self.force_exit = True
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # it logs a traceback for what is cut off
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()

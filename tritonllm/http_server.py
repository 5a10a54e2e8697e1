"""How a process that speaks HTTP ends, a server or a router: its requests may end first; the others get an error."""

import asyncio
import logging
import socket

import uvicorn

LAST_WORDS = 1.0  # seconds in which clients read that their requests are cut off


class DrainingServer(uvicorn.Server):
    """Args:
    config: of uvicorn.
    drain_seconds: that requests have to end; what takes longer is cut off with an error.
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
        asyncio.get_running_loop().call_later(LAST_WORDS, self._force)

    def _force(self) -> None:
        self.force_exit = True
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # it logs a traceback for what is cut off
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()

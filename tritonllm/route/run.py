"""Run the router until it is told to stop."""

import asyncio
import logging
import signal
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from tritonllm.http.heads import uvicorn_options
from tritonllm.http.server import DrainingServer, bind_port, listen
from tritonllm.route.app import Router
from tritonllm.route.config import RouterConfig
from tritonllm.route.reload import ConfigFile

logger = logging.getLogger(__name__)


class RouterServer(DrainingServer):
    """Ends with status 0 when SIGINT or SIGTERM comes; a second signal does not wait for the requests."""

    def __init__(self, config: uvicorn.Config, router: Router, file: ConfigFile | None) -> None:
        super().__init__(config, router.config.drain_seconds)
        self._router, self._file = router, file

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        handlers = {signal.SIGINT: self._stop, signal.SIGTERM: self._stop, signal.SIGHUP: self._reload}
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stop()

    def begin_to_drain(self) -> None:
        self._router.draining = True

    def end_requests(self) -> None:
        self._router.cut()

    def _reload(self, number: int, frame: FrameType | None) -> None:
        if self._file is None:
            logger.warning("SIGHUP: there is no configuration file to read again")
        else:
            self._file.reload()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._file is not None:
            self._watch = asyncio.create_task(self._file.watch())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._file is not None:
            self._watch.cancel()
        await super().shutdown(sockets)


def settings_of(router: Router, config: RouterConfig) -> uvicorn.Config:
    return uvicorn.Config(
        router,
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
        **uvicorn_options(config.head_limits),
    )


def route(config: RouterConfig, path: Path | None = None, overrides: Mapping[str, Any] | None = None) -> int:
    """Serve until SIGINT or SIGTERM comes.

    Args:
        config: the configuration at the start.
        path: the file that it came from, which is read again when it changes.
        overrides: options that win over those of the file.

    Returns:
        The exit status, 0.

    Raises:
        OSError: the address is taken.
    """
    with bind_port(config.host, config.port) as sock:
        listen(sock)
        router = Router(config)
        file = None if path is None else ConfigFile(path, overrides or {}, router.apply, router.metrics.reloaded)
        host = f"[{config.host}]" if ":" in config.host else config.host
        where = f"{'https' if config.ssl_certfile else 'http'}://{host}:{sock.getsockname()[1]}"
        logger.info("routing to %s on %s", ", ".join(backend.label for backend in config.backends), where)
        RouterServer(settings_of(router, config), router, file).run(sockets=[sock])
    logger.info("stopped")
    return 0

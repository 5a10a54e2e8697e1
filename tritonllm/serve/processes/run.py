"""Run the server until it is told to stop, or its engine dies."""

import asyncio
import errno
import gc
import logging
import os
import resource
import signal
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from types import FrameType

from tritonllm.config.engine import EngineConfig
from tritonllm.engine.transfer.settings import check_connector
from tritonllm.http.server import bind_port, listen
from tritonllm.serve.api.app import make_app
from tritonllm.serve.api.config import ServerConfig
from tritonllm.serve.engines.async_llm import AsyncLLM
from tritonllm.serve.engines.engine_client import EngineClient
from tritonllm.serve.processes.api_process import NEWS_OF_DEATH, StoppableServer, settings_of
from tritonllm.serve.processes.launched import follow_the_first, other_rank
from tritonllm.serve.processes.several import run_several
from tritonllm.system.starting import leave_out_of_searches, stopped_by_sigterm

logger = logging.getLogger(__name__)
DONE, FAILED = 0, 1
WHILE_LOADING = "stopped while the model was loaded"
OPEN_FILES = 65536  # that a server would like: each connection is one, and shells allow 1024


class ApiServer(StoppableServer):
    """Ends with a status instead of the signal that ended it; a second signal does not wait for the requests."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stop()


def raise_file_limit() -> None:
    """Let this process, and those that it starts, have as many open files as it may, up to :data:`OPEN_FILES`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def bind(config: ServerConfig) -> socket.socket:
    """The socket to listen on, before a model is loaded in vain.

    Raises:
        OSError: the address is taken or not ours.
    """
    if config.uds is None:
        return bind_port(config.host, config.port)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    _remove_stale(config.uds)
    try:
        sock.bind(config.uds)
    except OSError as error:
        sock.close()
        fix = _fix(config.uds) if error.errno == errno.EADDRINUSE else ""
        raise OSError(f"cannot listen on {address_of(config)}: {error.strerror or error}{fix}") from error
    os.chmod(config.uds, 0o660)  # this user and group
    return sock


def _fix(path: str) -> str:
    """What to do about a path that is taken."""
    if not _is_socket(path):
        return ": the file exists and is no socket: give another --uds"
    return ": another server listens there: give another --uds"


def _remove_stale(path: str) -> None:
    """Remove a socket that a killed server has left. One that somebody listens on stays, and binding to it fails; so
    does a link, whatever it leads to."""
    if not _is_socket(path):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # a server that was stopped takes no connection, and its queue may be full
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        except BlockingIOError:
            pass


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.lstat(path).st_mode)
    except OSError:
        return False


@contextmanager
def removing(path: str | None) -> Iterator[None]:
    """Remove a socket behind the block, unless another server has put its own there."""
    before = None if path is None else os.lstat(path)
    try:
        yield
    finally:
        if path is not None and before is not None:
            with suppress(FileNotFoundError):
                if os.path.samestat(before, os.lstat(path)):
                    os.unlink(path)


def address_of(config: ServerConfig, sock: socket.socket | None = None) -> str:
    if config.uds is not None:
        return f"unix:{config.uds}"
    host = f"[{config.host}]" if ":" in config.host else config.host
    port = config.port if sock is None else sock.getsockname()[1]
    return f"{'https' if config.ssl_certfile else 'http'}://{host}:{port}"


def serve(
    engine: EngineConfig,
    config: ServerConfig,
    *,
    max_queue: int,
    log_level: int | None = None,
    end: Callable[[int], object] = lambda status: None,
) -> int:
    """Start an engine and serve until SIGINT or SIGTERM comes, or the engine dies. Of several ranks that a launcher has
    started only the first one listens.

    Args:
        engine, config: what to serve, and how.
        max_queue: how many sequences may wait for a seat.
        log_level: the level of the engine process's messages on stderr; ``None``: it writes none.
        end: is called with the exit status if a thread still tokenizes a long text: it may end the process, which would
            wait for the thread.

    Returns:
        The exit status: 0 if it was told to stop, 1 if the engine died (for good, with ``restart``).

    Raises:
        OSError: the address is taken.
        ValueError, RuntimeError: the engine did not start.
    """
    place = other_rank(engine)
    if place is not None:
        return follow_the_first(engine, place, config.drain_seconds, log_level)
    with stopped_by_sigterm(WHILE_LOADING) as check:
        check_connector(engine)
        sock = bind(config)
        raise_file_limit()
        with closing(sock), removing(config.uds):
            if config.api_server_count > 1:
                client = EngineClient(engine, log_level, profiler=config.profiler_config)
                check()
                where = address_of(config, sock)
                return run_several(client, engine, config, sock, where, max_queue=max_queue, log_level=log_level)
            llm = AsyncLLM(
                engine,
                max_queue=max_queue,
                log_level=log_level,
                profiler_config=config.profiler_config,
                max_restarts=config.restart,
            )
            try:
                status = _serve(llm, config, sock, check)
            finally:
                llm.shutdown()
        if llm.is_in_long_text:
            end(status)
        return status


def _serve(llm: AsyncLLM, config: ServerConfig, sock: socket.socket, check: Callable[[], None]) -> int:
    app = make_app(llm, config)
    server = ApiServer(settings_of(app, config), app, llm, config.drain_seconds)

    def died(why: str) -> None:
        logger.error("%s: the server ends", why)
        asyncio.get_running_loop().call_later(NEWS_OF_DEATH, setattr, server, "should_exit", True)

    llm.on_death = died
    gc.collect()
    leave_out_of_searches()  # what lives as long as the server is not searched for garbage while streams wait
    listen(sock)
    logger.info("serving %s on %s", ", ".join(config.model_names), address_of(config, sock))
    check()
    server.run(sockets=[sock])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends already
    if llm.errored:
        return FAILED
    logger.info("stopped")
    return DONE

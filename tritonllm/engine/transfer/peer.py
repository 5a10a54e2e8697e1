"""The connector that brings blocks from another engine over TCP, so that one engine can compute prompts and another go
on with them. No torch.

Who saves keeps copies of its blocks in memory (:mod:`tritonllm.engine.transfer.kept`) and serves them
(:mod:`tritonllm.engine.transfer.peer_server`). Who loads asks the engine that the request names
(:mod:`tritonllm.engine.transfer.peer_client`), in threads; each block is read into its slot and checked there. Whatever
goes wrong is logged, and is a miss. How the contents of blocks travel is a plane's
(:mod:`tritonllm.engine.transfer.plane`): over the same connection, or by reads out of the other engine's memory or its
GPU's.

A request names its engine with ``remote_host`` and ``remote_port``, as the answer of that engine says them
(:meth:`Peer.offer`). Blocks may be late: the last ones of a prompt are saved some milliseconds after its answer, so a
lookup waits for them up to ``wait`` seconds. ``pending`` says that the prompt is being computed still. Then a lookup
takes its blocks for granted, and they are brought as each is saved.

Only engines that ``peers`` lists are asked. Else whoever may send a request could make this machine connect to any
other, and fill the cache with what it likes.
"""

import logging
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from ipaddress import IPv6Address
from typing import TypeVar

from tritonllm.config.checks import is_count
from tritonllm.config.kv_transfer import KVTransferConfig
from tritonllm.engine.transfer.connector import Params, Slots
from tritonllm.engine.transfer.kept import KeptBlocks
from tritonllm.engine.transfer.peer_client import Address, LeftAloneError, Peers
from tritonllm.engine.transfer.peer_server import PeerServer
from tritonllm.engine.transfer.plane import Frames, Plane, Wanted
from tritonllm.engine.transfer.wire import MOST_KEYS, Kind, WireError, question

logger = logging.getLogger(__name__)
T = TypeVar("T")
_HOST = re.compile(r"[^\s:/?#@*\[\]]+")  # a name, or an IPv4 address
_PORT = re.compile(r"[1-9][0-9]{0,4}")
NAME = "kv_transfer_config: kv_connector_extra_config: "
MAX_BYTES = 4 << 30
MOST_BLOCK_BYTES = 1 << 31
WAIT = 1.0
THREADS = 8
CLOSING = 5.0  # seconds
NOTHING = "the engine at %s:%d has none of the prompt's blocks: is it of other weights, dtype or block_size?"
ANYWHERE = ("0.0.0.0", "::")  # addresses that nobody can connect to
LOOKUP_PART, LOAD_PART = 0.25, 0.5  # of the time that a request waits; the rest is for the engine's own steps
WAITING_PART = 0.9  # of what is left, that the other engine may wait; the rest is for its last answers


@dataclass(frozen=True, kw_only=True)
class PeerSettings:
    """What a user can choose; it is checked here, before anything listens.

    Args:
        host, port: where this engine serves its blocks, if it saves any; port 0 takes a free one.
        advertised_host: what others connect to; by default ``host``.
        peers: the engines whose blocks may be loaded: ``"host"`` or ``"host:port"`` as requests name them; ``"*"``: any
            engine.
        max_bytes: how many bytes the blocks that are kept for others may take together.
        max_age: seconds after its last use that a block is kept; ``None`` as long as there is room.
        wait: seconds that a lookup waits for blocks that are not there yet.
        threads: requests whose blocks are brought at once.

    Raises:
        ValueError: a bad value.
    """

    host: str = "127.0.0.1"
    port: int = 0
    advertised_host: str | None = None
    peers: Sequence[str] = ()
    max_bytes: int = MAX_BYTES
    max_age: float | None = None
    wait: float = WAIT
    threads: int = THREADS

    def __post_init__(self) -> None:
        _check_address(self.host, self.port, self.advertised_host)
        _check_peers(self.peers)
        is_count(NAME + "max_bytes", self.max_bytes)
        is_count(NAME + "threads", self.threads)
        if self.max_age is not None and not (_is_number(self.max_age) and self.max_age > 0):
            raise ValueError(f"{NAME}max_age must be a number of seconds above 0, got {self.max_age!r}")
        if not (_is_number(self.wait) and self.wait >= 0):
            raise ValueError(f"{NAME}wait must be a number of seconds of at least 0, got {self.wait!r}")

    def check_role(self, config: KVTransferConfig) -> None:
        """Check that the settings are enough for the engine's role.

        Raises:
            ValueError: the role needs what is not given.
        """
        if config.saves and self.host in ANYWHERE and self.advertised_host is None:
            raise ValueError(f"{NAME}host={self.host!r} tells nobody where to connect: add advertised_host")
        if config.loads and not self.peers:
            raise ValueError(
                f"{NAME}peers is missing: list the engines whose blocks may be loaded, as 'host' or 'host:port', or "
                "give this one kv_role='kv_producer'"
            )


class Peer:
    """A connector that loads blocks from other engines and serves its own to them.

    Args:
        config: the role, and the seconds that a request waits.
        settings: the user's settings of this connector.
        plane: how blocks go from engine to engine; by default in frames of the connection that asks for them.

    Raises:
        ValueError: the role needs other settings, or it cannot listen there.
    """

    def __init__(self, config: KVTransferConfig, settings: PeerSettings, plane: Plane | None = None) -> None:
        settings.check_role(config)
        host, port = settings.host, settings.port
        self._config, self._plane = config, plane or Frames()
        self.kept = KeptBlocks(settings.max_bytes, settings.max_age, self._plane.gone)
        self._timeout, self._wait, self._allowed = config.timeout, settings.wait, frozenset(settings.peers)
        self._host = settings.advertised_host or host
        self._peers = Peers()
        self._server: PeerServer | None = None
        if config.saves:
            try:
                self._server = PeerServer(self.kept, self._plane, host, port)
            except (OSError, UnicodeError) as error:
                raise ValueError(f"{NAME}host={host!r}, port={port}: cannot listen there ({error})") from error
        self._readers = ThreadPoolExecutor(settings.threads, "kv-peer-load")
        self._saver = ThreadPoolExecutor(1, "kv-peer-save")

    def register(self, memory: Sequence[Slots]) -> None:
        self.check_size(sum(part.shape[1] for part in memory))
        self._plane.register(memory, self._config, self.kept.max_bytes)
        if self._server is not None:
            self._server.start()
            logger.info("blocks of the cache are served at %s:%d", self._host, self._server.port)

    def check_size(self, size: int) -> None:
        if size > MOST_BLOCK_BYTES:
            raise ValueError(f"kv_transfer_config: blocks of {size} bytes cannot be sent: lower block_size")
        if self._server is not None and 2 * size > self.kept.max_bytes:
            raise ValueError(
                f"{NAME}max_bytes={self.kept.max_bytes} holds not even two blocks of {size} bytes: raise it"
            )

    def offer(self) -> Params:
        """What vLLM's prefill servers say, as far as it means something here."""
        assert self._server is not None  # an engine that saves
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_host": self._host,
            "remote_port": self._server.port,
        }

    def lookup(self, keys: Sequence[bytes], params: Params) -> "Future[int]":
        address, deadline = self._address(params), time.monotonic() + LOOKUP_PART * self._timeout
        if address is None or not keys:
            return _done(0)
        pending = params.get("pending") is True
        return self._submit(lambda: self._count(address, keys[:MOST_KEYS], pending, deadline), 0)

    def load(self, keys: Sequence[bytes], slots: Sequence[int], params: Params) -> "Future[list[bool]]":
        address, deadline = self._address(params), time.monotonic() + LOAD_PART * self._timeout
        nothing = [False] * len(keys)
        if address is None or not 0 < len(keys) <= MOST_KEYS:
            return _done(nothing)
        pending = params.get("pending") is True
        return self._submit(lambda: self._bring(address, keys, slots, pending, deadline), nothing)

    def save(self, keys: Sequence[bytes], slots: Sequence[int], ready: Callable[[], bool]) -> "Future[int]":
        def keep() -> int:
            return self._plane.keep(keys, slots, self.kept) if ready() else 0

        try:
            return self._saver.submit(keep)
        except RuntimeError:  # closed
            return _done(0)

    def close(self) -> None:
        self._peers.close()
        self.kept.close()
        self._plane.close(CLOSING)
        self._readers.shutdown(cancel_futures=True)
        self._saver.shutdown()
        if self._server is not None:
            self._server.close(CLOSING)

    def _submit(self, work: Callable[[], T], otherwise: T) -> "Future[T]":
        try:
            return self._readers.submit(work)
        except RuntimeError:  # closed
            return _done(otherwise)

    def _address(self, params: Params) -> Address | None:
        """The address of the engine that a request names; ``None`` if it names none, or one that may not be asked."""
        host, port = params.get("remote_host"), params.get("remote_port")
        if host is None or port is None:
            return None
        if not isinstance(host, str) or not isinstance(port, int) or not 0 < port < 1 << 16:
            logger.warning("kv_transfer_params: remote_host=%.100r, remote_port=%.100r is no address", host, port)
            return None
        if not {host, f"{host}:{port}", f"[{host}]:{port}", "*"} & self._allowed:
            logger.warning(
                "kv_transfer_params: %.100r is none of the engines in peers: it is not asked. If it may be, add it to "
                "kv_connector_extra_config.peers",
                host,
            )
            return None
        return host, port

    def _count(self, address: Address, keys: Sequence[bytes], pending: bool, deadline: float) -> int:
        left = deadline - time.monotonic()
        if left <= 0:
            return 0
        wait = 0.0 if pending else self._peers.wait(address, min(self._wait, WAITING_PART * left))
        try:
            with self._peers.channel(address, deadline) as channel:
                channel.send(question(Kind.LOOKUP, keys, wait), deadline)
                count = channel.read_count(len(keys), deadline)
        except (OSError, WireError) as error:
            _log(address, error)
            return 0
        if pending:
            return len(keys)
        if self._peers.answered(address, count):
            logger.warning(NOTHING, *address)
        return count

    def _bring(
        self, address: Address, keys: Sequence[bytes], slots: Sequence[int], pending: bool, deadline: float
    ) -> list[bool]:
        there = [False] * len(keys)
        left = deadline - time.monotonic()
        if left <= 0:
            return there
        try:
            with self._peers.channel(address, deadline) as channel:
                wait = WAITING_PART * left if pending else 0.0
                self._plane.bring(channel, Wanted(keys, slots, there), wait, deadline)
        except (OSError, WireError) as error:
            _log(address, error)
        return there


def _check_address(host: object, port: object, advertised_host: object) -> None:
    """Check the address that an engine listens at and the one that others should connect to.

    Raises:
        ValueError: where an engine listens, or what others should connect to, is no address.
    """
    if not isinstance(host, str) or not host.strip():
        raise ValueError(f"{NAME}host must be the address to listen at, got {host!r}")
    if not isinstance(port, int) or isinstance(port, bool) or not 0 <= port < 1 << 16:
        raise ValueError(f"{NAME}port must be an integer from 0 to 65535, got {port!r}")
    if advertised_host is not None and (not isinstance(advertised_host, str) or not advertised_host.strip()):
        raise ValueError(f"{NAME}advertised_host must be an address of this machine, got {advertised_host!r}")


def _check_peers(peers: object) -> None:
    """Check the entries of ``peers``.

    Raises:
        ValueError: they are no list of hosts, or one of them is none.
    """
    if not isinstance(peers, list | tuple):
        raise ValueError(f"{NAME}peers must be a list of 'host' or 'host:port', got {peers!r}")
    for index, one in enumerate(peers):
        if not isinstance(one, str) or not _names_engines(one):
            raise ValueError(
                f"{NAME}peers[{index}] must be 'host' or 'host:port' with a port from 1 to 65535, as requests name the "
                f"engine, or '*', got {one!r:.100}"
            )


def _names_engines(entry: str) -> bool:
    """Whether a text can be an entry of ``peers``. An IPv6 address may end like a port, and with one it may stand in
    brackets."""
    if entry == "*" or _HOST.fullmatch(entry) or _is_ipv6(entry):
        return True
    host, _, port = entry.rpartition(":")
    if not _PORT.fullmatch(port) or int(port) >= 1 << 16:
        return False
    in_brackets = host.startswith("[") and host.endswith("]")
    return bool(_HOST.fullmatch(host)) or _is_ipv6(host[1:-1] if in_brackets else host)


def _is_ipv6(text: str) -> bool:
    try:
        IPv6Address(text)
    except ValueError:
        return False
    return True


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _log(address: Address, error: Exception) -> None:
    level = logging.DEBUG if isinstance(error, LeftAloneError) else logging.WARNING
    logger.log(level, "the engine at %s:%d gives no blocks (%s): they are computed", *address, error)


def _done(result: T) -> "Future[T]":
    future: Future[T] = Future()
    future.set_result(result)
    return future

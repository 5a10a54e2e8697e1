"""The way from one machine to another on which ranks meet: a port at which only those come in who know a secret.

Ranks meet at a store of torch.distributed, which knows no secrets: whoever reaches its port can list its keys, read and
set them, and so be taken for a rank. So the store listens to its own machine only (on ``127.0.0.1``), and a door in
front of it to the others, on the one address that they need. Both sides of a connection prove that they know the
secret, by HMAC-SHA-256 of fresh random numbers of both, which is worth nothing later and elsewhere. Behind that, each
piece carries the HMAC of its contents and its number in a key of this connection and direction: nothing can be changed,
left out, said again, or put in. It can be read: this authenticates, and encrypts nothing.

A connection over which nothing is said is watched by both ends (:mod:`tritonllm.system.lost_hosts`): so each of the
hosts learns that the other one is lost.
"""

import hmac
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from tritonllm.system.lost_hosts import end_when_silent

logger = logging.getLogger(__name__)
PROOF = 10.0  # seconds that somebody may take to prove that they know the secret
MOST_UNPROVEN = 64  # connections of whom that is not known yet; further ones are closed
SECRET, NONCE, MAC = 32, 32, 32  # bytes
PIECE = 1 << 16  # bytes of a piece at most
STORE, WATCH = 0, 1  # what a connection is for
_HELLO = struct.Struct(f"<qq{NONCE}s{MAC}s")  # of who comes: what for, rank, a random number, proof
_HEAD = struct.Struct(f"<I{MAC}s")  # before a piece: its bytes, and its HMAC

# Is told of a rank whose host gives no sign of life, or has begun anew, with the error; or, without one, that it ended.
Ended = Callable[[int, str, OSError | None], object]


class IntruderError(RuntimeError):
    """Something came that was not from who knows the secret."""


def new_secret() -> bytes:
    return secrets.token_bytes(SECRET)


def digest(key: bytes, what: str, *parts: bytes | bytearray | memoryview) -> bytes:
    """HMAC-SHA-256 (RFC 2104) of parts of fixed lengths, but for the last one; ``what`` tells uses of a key apart."""
    mac = hmac.new(key, what.encode().ljust(16, b"\0"), "sha256")
    for part in parts:
        mac.update(part)
    return mac.digest()


class Sealed:
    """A connection on which both sides have proven that they know the secret.

    Args:
        connection: a connected TCP socket.
        sends, receives: the keys of the two directions.
    """

    def __init__(self, connection: socket.socket, sends: bytes, receives: bytes) -> None:
        self.connection = connection
        self._keys, self._counts = (sends, receives), [0, 0]

    def _mac(self, direction: int, data: bytes) -> bytes:
        number = self._counts[direction].to_bytes(8, "little")
        self._counts[direction] += 1
        return digest(self._keys[direction], "piece", number, data)

    def send(self, data: bytes) -> None:
        self.connection.sendall(_HEAD.pack(len(data), self._mac(0, data)) + data)

    def receive(self) -> bytes:
        """The next piece; nothing at the end.

        Raises:
            IntruderError: it is not what the other side has sent next.
            OSError: the connection is broken.
        """
        head = _read(self.connection, _HEAD.size)
        if not head:
            return b""
        size, mac = _HEAD.unpack(head)
        if not 0 < size <= PIECE:
            raise IntruderError("a piece of a connection between ranks is longer than any of theirs")
        data = _read(self.connection, size)
        if not hmac.compare_digest(mac, self._mac(1, data)):
            raise IntruderError("a piece of a connection between ranks was not sent by the other side")
        return data


def _read(connection: socket.socket, size: int, seconds: float | None = None) -> bytes:
    """Read so many bytes from a connection; empty if the other side has ended it before the first.

    Args:
        seconds: how long all of them may take to come; ``None`` for no limit.

    Raises:
        ConnectionError: the end came in their middle.
        TimeoutError: they did not come in time.
    """
    data, end = b"", None if seconds is None else time.monotonic() + seconds
    while len(data) < size:
        if end is not None:  # of all together: a byte now and then does not keep a place
            connection.settimeout(max(end - time.monotonic(), 1e-3))
        more = connection.recv(size - len(data))
        if not more:
            if data:
                raise ConnectionError("the connection ended within a piece")
            return b""
        data += more
    return data


def _sealed(connection: socket.socket, secret: bytes, own: str, *nonces: bytes) -> Sealed:
    keys = {side: digest(secret, f"key of {side}", *nonces) for side in ("inside", "outside")}
    return Sealed(connection, keys.pop(own), *keys.values())


class _Connections:
    """The connections that are open, to be ended together."""

    def __init__(self) -> None:
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self.ended = False

    def add(self, *connections: socket.socket) -> bool:
        """Whether they may go on: they have not all been ended yet."""
        with self._lock:
            self._open.update(connections)
            return not self.ended

    def remove(self, *connections: socket.socket) -> None:
        with self._lock:
            self._open.difference_update(connections)

    def end(self) -> None:
        with self._lock:
            self.ended = True
            for connection in self._open:
                end(connection)


class Door:
    """Where ranks on other machines come in; the side of rank 0.

    Args:
        host: the address of this machine that the others reach; none but this one listens.
        secret: a secret of :func:`new_secret`, or of an operator.
        store_port: the port of a store that listens on ``127.0.0.1``.
        patience: how long a host may give no sign of life, in seconds.
        on_end: is told of each rank that has come in and ends, or whose host is lost, until :meth:`hush`; in a thread.

    Attributes:
        address: where it listens.

    Raises:
        OSError: the address is not of this machine.
    """

    def __init__(self, host: str, secret: bytes, store_port: int, *, patience: float, on_end: Ended) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, 0), family=family)
        self.address: tuple[str, int] = self._listening.getsockname()[:2]
        self._secret, self._store_port, self._patience = secret, store_port, patience
        self._on_end: Ended | None = on_end
        self._unproven = threading.BoundedSemaphore(MOST_UNPROVEN)
        self._connections = _Connections()
        self._connections.add(self._listening)
        self._watched, self._changed = 0, threading.Condition()
        _thread(self._accept)

    def hush(self) -> None:
        """What ends from here on was told to."""
        self._on_end = None

    def wait_for_ends(self, seconds: float) -> None:
        """Wait until all ranks that have come in have ended, or left, but no longer than this."""
        with self._changed:
            self._changed.wait_for(lambda: not self._watched, seconds)

    def close(self) -> None:
        """End all connections; may be called again."""
        self.hush()
        self._connections.end()

    def _accept(self) -> None:
        with self._listening:
            while not self._connections.ended:
                try:
                    connection, address = self._listening.accept()
                except OSError as error:
                    if not self._connections.ended:
                        logger.warning("the port where ranks meet could not take a connection: %s", error)
                        time.sleep(0.1)  # all files are open, say
                    continue
                if not self._unproven.acquire(blocking=False):
                    connection.close()
                    continue
                _thread(self._take, connection, str(address[0]))

    def _take(self, connection: socket.socket, host: str) -> None:
        with connection:
            self._connections.add(connection)
            try:
                try:
                    sealed, purpose, rank = self._prove(connection)
                finally:
                    self._unproven.release()
                if purpose == WATCH:
                    self._watch(connection, rank, host)
                else:
                    with socket.create_connection(("127.0.0.1", self._store_port)) as store:
                        pass_on(sealed, store, self._connections)
            except (OSError, IntruderError) as error:
                logger.debug("a connection from %s, where ranks meet, ended: %s", host, error)
            finally:
                self._connections.remove(connection)

    def _prove(self, connection: socket.socket) -> tuple[Sealed, int, int]:
        connection.settimeout(PROOF)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ours = secrets.token_bytes(NONCE)
        connection.sendall(ours)
        hello = _read(connection, _HELLO.size, PROOF)
        if not hello:
            raise ConnectionError("it said nothing")
        purpose, rank, _, proof = _HELLO.unpack(hello)
        said = ours, hello[:-MAC]
        if not hmac.compare_digest(proof, digest(self._secret, "outside", *said)):
            logger.warning("somebody came to the port where ranks meet who does not know its secret")
            raise IntruderError("it does not know the secret")
        connection.sendall(digest(self._secret, "inside", *said))
        connection.settimeout(None)
        return _sealed(connection, self._secret, "inside", *said), purpose, rank

    def _watch(self, connection: socket.socket, rank: int, host: str) -> None:
        end_when_silent(connection, self._patience)
        error: OSError | None = None
        with self._changed:
            self._watched += 1
        try:
            connection.recv(1)
        except OSError as silent:
            error = silent
        finally:
            with self._changed:
                self._watched -= 1
                self._changed.notify_all()
        if self._on_end is not None:
            self._on_end(rank, host, error)


class Entrance:
    """The way to a door from another machine.

    Args:
        address: the address of the door.
        secret: the secret that the door asks for.
        rank: the number of the rank that goes in.
        timeout: how long to wait for the door to be there, in seconds.

    Attributes:
        watched: the connection over which nothing is said.
        port: the port of this machine behind which the store is.

    Raises:
        IntruderError: who listens there does not know the secret.
        OSError: nobody does.
    """

    def __init__(self, address: tuple[str, int], secret: bytes, rank: int, timeout: float = PROOF) -> None:
        self._address, self._secret, self._rank = address, secret, rank
        self.watched = self._go_in(WATCH, timeout).connection
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._connections = _Connections()
        self._connections.add(self.watched, self._listening)
        _thread(self._accept)

    def close(self) -> None:
        """End all connections; may be called again."""
        self._connections.end()

    def _accept(self) -> None:
        with self._listening:
            while True:
                try:
                    connection, _ = self._listening.accept()
                except OSError:  # it is closed
                    return
                _thread(self._take, connection)

    def _take(self, connection: socket.socket) -> None:
        with connection:
            try:
                sealed = self._go_in(STORE, PROOF)
            except (OSError, IntruderError) as error:
                logger.warning("the store where ranks meet cannot be reached: %s", error)
                return
            with sealed.connection:
                pass_on(sealed, connection, self._connections)

    def _go_in(self, purpose: int, timeout: float) -> Sealed:
        connection = socket.create_connection(self._address, timeout)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            theirs, ours = _read(connection, NONCE), secrets.token_bytes(NONCE)
            hello = _HELLO.pack(purpose, self._rank, ours, bytes(MAC))[:-MAC]
            connection.sendall(hello + digest(self._secret, "outside", theirs, hello))
            proof = _read(connection, MAC)
            if not hmac.compare_digest(proof, digest(self._secret, "inside", theirs, hello)):
                host, port = self._address
                raise IntruderError(
                    f"{host}:{port}, where the ranks meet, and this rank do not know the same secret: start all ranks "
                    "with one, and see who listens there"
                )
            connection.settimeout(None)
            return _sealed(connection, self._secret, "outside", theirs, hello)
        except BaseException:
            connection.close()
            raise


def pass_on(sealed: Sealed, plain: socket.socket, among: _Connections) -> None:
    """Pass on what comes on either connection until one of them ends, and end both; those ``among`` which they are may
    be ended from elsewhere."""
    both = sealed.connection, plain

    def to_plain() -> None:
        try:
            while data := sealed.receive():
                plain.sendall(data)
        except IntruderError as error:
            logger.warning("%s: it ends", error)
        except OSError as error:
            logger.debug("a connection between ranks ended: %s", error)
        finally:
            for connection in both:
                end(connection)

    if not among.add(*both):
        return
    thread = _thread(to_plain)
    with suppress(OSError):  # the other thread has ended it
        while data := plain.recv(PIECE):
            sealed.send(data)
    for connection in both:
        end(connection)
    thread.join()
    among.remove(*both)


def end(connection: socket.socket) -> None:
    """End a connection in which another thread may wait; closing it would not wake that up."""
    with suppress(OSError):  # it has ended
        connection.shutdown(socket.SHUT_RDWR)


def _thread(work: Callable[..., object], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=work, args=arguments, name="tritonllm-door", daemon=True)
    thread.start()
    return thread

"""A port for a server that must be told one."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved_port() -> Iterator[int]:
    """One of 127.0.0.1 where nobody listens, and that nobody else is given meanwhile: it stays bound here. Who may use
    an address again (SO_REUSEADDR, as servers do) can listen there all the same, also one after the other."""
    with socket.socket() as holds:
        holds.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holds.bind(("127.0.0.1", 0))
        yield holds.getsockname()[1]

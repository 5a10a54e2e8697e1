"""Connections that end when the other host is lost.

A host that is cut off, or loses its power, ends no connection: nothing comes, as from one that thinks for long. So the
system asks it. While nothing is under way to it, that is TCP's keep-alive (RFC 9293, 3.8.4), which the other system
answers however busy, or stopped, its programs are. While something is, it waits for the acknowledgement, by itself for
a quarter of an hour. The user timeout (RFC 5482) limits both.
"""

import os
import socket
from contextlib import suppress

OPEN = "/proc/self/fd"  # on Linux: elsewhere what waits is told by its own limits
PROBES = 3  # within the time that a host may be silent
MOST_SECONDS = 24 * 3600.0  # the system's own limits are 4 times 32,767 seconds and more
CLIENT_SECONDS = 60.0  # that the host of a client may be silent


def end_when_silent(connection: socket.socket, seconds: float) -> None:
    """Let a connection end with ``ETIMEDOUT`` when the other host has given no sign of life for so long, or its program
    has taken nothing for so long of what is sent. A system that has not all of these options waits as long as it does.

    Args:
        connection: a TCP socket, connected or to be connected.
    """
    _ask_when_silent(connection, seconds)
    _set(connection, "TCP_USER_TIMEOUT", max(1, round(1e3 * min(seconds, MOST_SECONDS))))


def end_when_clients_are_silent(listening: socket.socket) -> None:
    """Let connections that this socket takes end when the client's host has given no sign of life for a minute while
    nothing was under way to it. A client may read as slowly as it likes.

    Args:
        listening: a listening TCP socket; the sockets that it accepts have its options.
    """
    _ask_when_silent(listening, CLIENT_SECONDS)


def break_connections(host: str) -> None:
    """End this process's connections to a host that is lost, whoever has made them. What waits for it, a library say,
    breaks now, and not after as long as it would wait for somebody who thinks.

    Args:
        host: the address of the host.
    """
    for name in os.listdir(OPEN) if os.path.isdir(OPEN) else ():
        with suppress(OSError, ValueError):  # it is no socket, or has been closed
            if not os.readlink(f"{OPEN}/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6) and found.getpeername()[0] == host:
                    found.shutdown(socket.SHUT_RDWR)


def _ask_when_silent(connection: socket.socket, seconds: float) -> None:
    each = max(1, int(min(seconds, MOST_SECONDS) / (PROBES + 1)))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    _set(connection, "TCP_KEEPIDLE", each)
    _set(connection, "TCP_KEEPINTVL", each)
    _set(connection, "TCP_KEEPCNT", PROBES)


def _set(connection: socket.socket, name: str, value: int) -> None:
    option = getattr(socket, name, None)  # not every system has it
    if option is not None:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)

"""Connections that end when the other host is lost.

A host that is cut off, or loses its power, ends no connection: nothing comes, as from one that thinks for long. So the
system asks it. While nothing is under way to it, that is TCP's keep-alive (RFC 9293, 3.8.4), which the other system
answers however busy, or stopped, its programs are. While something is, it waits for the acknowledgement, by itself for
a quarter of an hour. The user timeout (RFC 5482) limits both.
"""

import socket

PROBES = 3  # within the time that a host may be silent
MOST_SECONDS = 24 * 3600.0  # the system's own limits are 4 times 32,767 seconds and more


def end_when_silent(connection: socket.socket, seconds: float) -> None:
    """Let a connection end with ``ETIMEDOUT`` when the other host has given no sign of life for so long. A system that
    has not all of these options waits as long as it does.

    Args:
        connection: of TCP, made or to be made.
    """
    seconds = min(seconds, MOST_SECONDS)
    each = max(1, int(seconds / (PROBES + 1)))
    options = {"TCP_KEEPIDLE": each, "TCP_KEEPINTVL": each, "TCP_KEEPCNT": PROBES}
    options["TCP_USER_TIMEOUT"] = max(1, round(1e3 * seconds))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

"""Connections to backends that end when the other host is lost.

A host that is cut off, or loses its power, ends no connection: nothing comes, as from one that thinks for long. So the
system asks it. While nothing is under way to it, that is TCP's keep-alive (RFC 9293, 3.8.4), which the other system
answers however busy, or stopped, its server is. While something is, it waits for the acknowledgement, by itself for a
quarter of an hour. The user timeout (RFC 5482) limits both.
"""

import socket
from collections.abc import Callable

from aiohttp import AddrInfoType

PROBES = 3  # within the time that a host may be silent
MOST_SECONDS = 24 * 3600.0  # the system's own limits are 4 times 32,767 seconds and more


def connecting(host_timeout: Callable[[], float]) -> Callable[[AddrInfoType], socket.socket]:
    """What makes the sockets of an ``aiohttp.TCPConnector``.

    Args:
        host_timeout: seconds without a sign of the other host after which a connection ends with ``ETIMEDOUT``; asked
            for each connection. A system without these options waits as long as it does.
    """

    def made(address: AddrInfoType) -> socket.socket:
        family, kind, protocol, _, _ = address
        found = socket.socket(family, kind, protocol)
        seconds = min(host_timeout(), MOST_SECONDS)
        each = max(1, int(seconds / (PROBES + 1)))
        options = {"TCP_KEEPIDLE": each, "TCP_KEEPINTVL": each, "TCP_KEEPCNT": PROBES}
        options["TCP_USER_TIMEOUT"] = max(1, round(1e3 * seconds))
        found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in options.items():
            if hasattr(socket, name):
                found.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        return found

    return made

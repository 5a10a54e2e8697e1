"""What the system is told of connections to backends. tests/route/test_lost_hosts.py loses the hosts."""

import socket
import sys

import pytest

from tritonllm.route.sockets import MOST_SECONDS, PROBES, connecting


@pytest.mark.skipif(sys.platform != "linux", reason="other systems lack some of these options")
@pytest.mark.parametrize(("seconds", "each"), [(0.5, 1), (6.0, 1), (30.0, 7), (float("inf"), 21600)])
def test_the_options_of_a_connection(seconds, each):
    with connecting(lambda: seconds)((socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 1))) as made:
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        found = [
            made.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_USER_TIMEOUT, socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        ]
    assert found == [1e3 * min(seconds, MOST_SECONDS), each, each, PROBES]


def test_a_new_time_is_of_the_next_connection():
    times = iter((5.0, 50.0))
    make = connecting(lambda: next(times))
    address = (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 1))
    with make(address), make(address):
        assert next(times, None) is None

"""What the system is told of a connection. tests/route/test_lost_hosts.py and others lose the hosts."""

import socket
import sys

import pytest

from tritonllm.lost_hosts import MOST_SECONDS, PROBES, end_when_silent


@pytest.mark.skipif(sys.platform != "linux", reason="other systems lack some of these options")
@pytest.mark.parametrize(("seconds", "each"), [(0.5, 1), (6.0, 1), (30.0, 7), (float("inf"), 21600)])
def test_the_options_of_a_connection(seconds, each):
    with socket.socket() as made:
        end_when_silent(made, seconds)
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        options = (socket.TCP_USER_TIMEOUT, socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        found = [made.getsockopt(socket.IPPROTO_TCP, option) for option in options]
    assert found == [1e3 * min(seconds, MOST_SECONDS), each, each, PROBES]

"""What the system is told of connections. tests/route/test_lost_hosts.py and others lose the hosts."""

import socket
import sys

import pytest

from tritonllm.http.server import bind_port
from tritonllm.serve.api.config import ServerConfig
from tritonllm.serve.processes.run import bind as bind_server
from tritonllm.system.lost_hosts import (
    CLIENT_SECONDS,
    MOST_SECONDS,
    PROBES,
    end_when_clients_are_silent,
    end_when_silent,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems lack some of these options")


def options_of(connection):
    """The limit on acknowledgements in seconds, and times and number of questions."""
    assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    options = (socket.TCP_USER_TIMEOUT, socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    limit, *rest = (connection.getsockopt(socket.IPPROTO_TCP, option) for option in options)
    return limit / 1e3, *rest


@pytest.mark.parametrize(("seconds", "each"), [(0.5, 1), (6.0, 1), (30.0, 7), (float("inf"), 21600)])
def test_a_connection_that_is_made(seconds, each):
    with socket.socket() as made:
        end_when_silent(made, seconds)
        assert options_of(made) == (min(seconds, MOST_SECONDS), each, each, PROBES)


def test_a_connection_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        end_when_clients_are_silent(listening)
        with socket.create_connection(listening.getsockname()), listening.accept()[0] as taken:
            each = CLIENT_SECONDS / (PROBES + 1)
            assert options_of(taken) == (0, each, each, PROBES)


def test_servers_and_routers_look_after_their_clients():
    """A router has a socket of :func:`bind_port`, as a server has."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        end_when_clients_are_silent(listening)
        with bind_port("127.0.0.1", 0) as one, bind_server(ServerConfig(model_names=("demo",), port=0)) as other:
            assert options_of(one) == options_of(other) == options_of(listening)

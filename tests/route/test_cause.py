"""What errors of the client library mean: words without numbers, and for clients without addresses."""

import socket
import ssl
from types import SimpleNamespace

import aiohttp
import pytest

from tritonllm.route.cause import CLOSED, CUT, cause_of

INNER = "10.0.0.5"


def connector(error, host=INNER, kind=aiohttp.ClientConnectorError):
    return kind(SimpleNamespace(host=host, port=9101, ssl=True), error)


@pytest.mark.parametrize(
    ("error", "logged", "told"),
    [
        (
            connector(ConnectionRefusedError(111, f"Connect call failed ('{INNER}', 9101)")),
            f"cannot connect to {INNER}:9101: connection refused",
            "connection refused",
        ),
        (connector(OSError(113, "x"), "::1"), "cannot connect to [::1]:9101: no route to host", "no route to host"),
        (
            connector(OSError(f"Multiple exceptions: {INNER}")),
            f"cannot connect to {INNER}:9101: Multiple exceptions: {INNER}",
            "no connection",
        ),
        (
            connector(socket.gaierror(-2, "Name or service not known")),
            f"cannot connect to {INNER}:9101: Name or service not known",
            "Name or service not known",
        ),
        (aiohttp.ClientPayloadError("<TransferEncodingError: 400>"), CUT, CUT),
        (aiohttp.ServerDisconnectedError(), CLOSED, CLOSED),
        (aiohttp.ClientOSError(104, f"{INNER}"), "connection reset by peer", "connection reset by peer"),
        (TimeoutError("nothing came for 2 seconds"), "nothing came for 2 seconds", "nothing came for 2 seconds"),
        (TimeoutError(110, INNER), "connection timed out", "connection timed out"),
        (aiohttp.ClientError(INNER), INNER, "the connection failed"),
        (aiohttp.ClientError(), "ClientError", "the connection failed"),
    ],
)
def test_words(error, logged, told):
    assert cause_of(error) == (logged, told)


def test_a_mistake_in_tls_is_called_one():
    error = connector(ssl.SSLError(1, "wrong version number"), kind=aiohttp.ClientConnectorSSLError)
    logged, told = cause_of(error)
    assert "ssl" in logged and "wrong version number" in logged
    assert INNER not in told

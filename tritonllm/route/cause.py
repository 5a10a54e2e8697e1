"""Why a backend gave no answer, or no whole one, in words: the client library's own are about itself."""

import os
import ssl
from typing import NamedTuple

import aiohttp

CUT = "the connection ended in the middle of the answer"
CLOSED = "the connection ended before the answer"


class Cause(NamedTuple):
    """Why a backend did not answer.

    Attributes:
        logged: the words for the operator; may name the backend's address.
        told: the words for the client, which name no address.
    """

    logged: str
    told: str


def cause_of(error: BaseException) -> Cause:
    """What an error of a request to a backend, or of reading its answer, means."""
    if isinstance(error, aiohttp.ClientSSLError | ssl.SSLError):  # their numbers are not the system's
        return Cause(str(error), "no TLS connection")
    if isinstance(error, aiohttp.ClientConnectorError):
        host = f"[{error.host}]" if ":" in error.host else error.host
        why = _words(error.os_error)
        return Cause(f"cannot connect to {host}:{error.port}: {why or error.os_error}", why or "no connection")
    if isinstance(error, aiohttp.ClientPayloadError):
        return Cause(CUT, CUT)
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return Cause(CLOSED, CLOSED)
    if type(error) is TimeoutError and error.errno is None:  # the router's own
        return Cause(str(error), str(error))
    why = _words(error) if isinstance(error, OSError) else None
    return Cause(why or str(error) or type(error).__name__, why or "the connection failed")


def _words(error: OSError) -> str | None:
    """The error's words without its number; ``None`` if it has none that are sure to name no address."""
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno).lower()  # asyncio's own text has the address
    return error.strerror

"""Answers of backends, with a limit to what comes before them: ``100 Continue`` and its like (RFC 9110, 15.2).

The client library reads those on for as long as they come, and does nothing else while there are more: a backend that
sent them without an end stalled every other request for seconds.
"""

from typing import TYPE_CHECKING

import aiohttp

if TYPE_CHECKING:
    from aiohttp.connector import Connection

MOST = 100  # before one answer. A server may say that it still works every few seconds


class InterimError(aiohttp.ClientError):
    """A backend goes on saying that an answer will come, or changes to another protocol, which nobody asked for."""


class BackendAnswer(aiohttp.ClientResponse):
    """An answer; ``start`` waits for its headers.

    Raises:
        InterimError: see there. The connection is closed with it, as with each error of the library.
    """

    async def start(self, connection: "Connection") -> aiohttp.ClientResponse:
        protocol = connection.protocol
        assert protocol is not None
        read, came = protocol.read, 0

        async def limited() -> object:
            nonlocal came
            message, payload = await read()
            came += message.code < 200
            if message.code == 101:
                raise InterimError("it changed to another protocol")
            if came > MOST:
                raise InterimError(f"it sent more than {MOST} answers of status 1xx and no other")
            return message, payload

        protocol.read = limited  # type: ignore[method-assign,assignment]
        try:
            return await super().start(connection)
        finally:
            del protocol.read

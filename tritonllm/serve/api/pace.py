"""Lets requests that come together begin a few at a time, so that the first is with the engine while the last waits."""

import asyncio
from collections import deque


class Pace:
    """Turns of the event loop, in which so many requests may begin.

    The event loop runs callbacks in the order in which they became ready. So of 2,048 requests that come together all
    would be parsed and checked, a millisecond each, before the first of them took its next step: for 2 to 3 seconds the
    engine would have nothing to do. Requests begin in the order in which they asked.

    Args:
        most: begin in one turn. What else is ready, the tokens of running streams above all, waits for so many.
    """

    def __init__(self, most: int) -> None:
        self._most = self._left = most
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._renews = False  # in the next turn

    async def turn(self) -> None:
        """Returns when the caller may begin: at once, if few have begun in this turn."""
        loop, mine = asyncio.get_running_loop(), None
        if self._left and not self._waiting:
            self._left -= 1
        else:
            mine = loop.create_future()
            self._waiting.append(mine)
        if not self._renews:
            self._renews = True
            loop.call_soon(self._renew)
        if mine is not None:
            await mine

    def _renew(self) -> None:
        self._left = self._most
        while self._waiting and self._left:
            first = self._waiting.popleft()
            if not first.done():  # else its client has gone
                first.set_result(None)
                self._left -= 1
        self._renews = self._left < self._most
        if self._renews:
            asyncio.get_running_loop().call_soon(self._renew)

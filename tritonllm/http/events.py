"""Streams of events, cut where an event ends.

A client must never get half an event and then an error behind it, so the bytes after the last whole event wait for the
rest of theirs. Nothing is changed, added or left out.
"""

import re

# https://html.spec.whatwg.org/multipage/server-sent-events.html: a blank line ends an event; CR, LF or both end a line.
_END = re.compile(rb"\r\n\r\n|\n\n|\r\r|\r\n\n|\n\r\n")
MOST_WAITING = 1 << 20  # bytes of one event that are held


class WholeEvents:
    """Cuts a stream of bytes behind whole events."""

    def __init__(self) -> None:
        self.rest = b""  # of an event that has begun
        self.last = b""  # what was handed on last

    def add(self, data: bytes) -> bytes:
        """The whole events that can be handed on now, perhaps none."""
        begun = len(self.rest)
        data = self.rest + data
        if data.endswith(b"\n\n"):  # nearly always
            cut = len(data)
        else:
            cut = max((found.end() for found in _END.finditer(data, max(0, begun - 3))), default=0)
        if len(data) - cut > MOST_WAITING:
            cut = len(data)
        self.rest = data[cut:]
        if cut:
            self.last = data[:cut]
        return data[:cut]

    @property
    def is_done(self) -> bool:
        """Whether the stream's last event is the one that ends OpenAI's streams."""
        return (self.rest or self.last).rstrip().endswith(b"[DONE]")

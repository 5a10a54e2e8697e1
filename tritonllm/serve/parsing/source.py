"""Text that arrives in parts, for readers that are written as if it were all there.

A reader is a generator over a :class:`PieceSource`. It yields pieces, and ``None`` where it has to wait for more text,
so that what it decides depends on the text alone and not on where the text was cut.
"""

import re
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from tritonllm.serve.parsing.pieces import Content, Piece

T = TypeVar("T")
Steps = Generator[Piece | None, None, T]
_BRACKET = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')
_SPACE = re.compile(r"\s*")
AT_ONCE = 1024  # characters of a long text; each part that is taken of what is there costs a copy of the rest


class PieceSource:
    """The text that nobody has read yet."""

    def __init__(self) -> None:
        self.text = ""
        self.ended = False
        self._taken: list[str] = []

    def mark(self, before: str = "") -> None:
        """Remember what is taken from here on; ``before`` counts as taken, too."""
        self._taken = [before]

    @property
    def taken(self) -> str:
        """What was taken since the mark."""
        return "".join(self._taken)

    def take(self, count: int) -> str:
        taken, self.text = self.text[:count], self.text[count:]
        self._taken.append(taken)
        return taken

    def more(self) -> Steps[bool]:
        """Wait for text; false if there will be none."""
        if self.ended:
            return False
        yield None
        return True

    def peek(self) -> Steps[str]:
        """The next character, or ``""`` at the end."""
        while not self.text and (yield from self.more()):
            pass
        return self.text[:1]

    def skip(self, characters: str = "") -> Steps[str]:
        """Pass over whitespace, and these characters; returns the next one, as :meth:`peek`."""
        while True:
            rest = len(self.text.lstrip()) if not characters else len(self.text.lstrip(" \t\r\n" + characters))
            self.take(len(self.text) - rest)
            if self.text or not (yield from self.more()):
                return self.text[:1]

    def ahead(self, *markers: str) -> Steps[tuple[int, str]]:
        """Which of the markers comes next, ``""`` if none does, and how much whitespace is before it; takes nothing.

        Of two where one begins with the other, the first that is named counts.
        """
        space = 0
        while True:
            space = _SPACE.match(self.text, space).end()  # type: ignore[union-attr]
            longest = max(map(len, markers))
            rest = self.text[space : space + longest]
            for marker in markers:
                if rest.startswith(marker):
                    return space, marker
                if marker.startswith(rest) and (yield from self.more()):
                    break
            else:
                return space, ""

    def accept(self, *markers: str) -> Steps[str]:
        """Take the marker and the whitespace before it, if one comes next, and return it; else take nothing."""
        space, marker = yield from self.ahead(*markers)
        self.take(space + len(marker) if marker else 0)
        return marker

    def matching(self, pattern: "re.Pattern[str]") -> Steps[str]:
        """Take the characters that match the pattern, one by one."""
        parts: list[str] = []
        while True:
            end = next((i for i, c in enumerate(self.text) if not pattern.match(c)), len(self.text))
            parts.append(self.take(end))
            if self.text or not (yield from self.more()):
                return "".join(parts)

    def until(self, *markers: str) -> Steps[str | None]:
        """Take the text before a marker, and the marker; returns the text. ``None`` if none comes: all is taken."""
        parts: list[str] = []
        while True:
            found = _earliest(self.text, markers, 0)
            parts.append(self.take(len(self.text) - _held(self.text, markers) if found is None else found[0]))
            if found is not None:
                self.take(len(found[1]))
                return "".join(parts)
            if not (yield from self.more()):
                self.take(len(self.text))
                return None

    def drop(self, end: str, *before: str) -> Steps[str]:
        """Leave out the text up to the marker ``end``, and it, or up to one of ``before``.

        Returns:
            Which of these came; ``""`` if none did.
        """
        while True:
            found = _earliest(self.text, (end, *before), 0)
            if found is not None:
                self.take(found[0] + (len(end) if found[1] == end else 0))
                return found[1]
            self.take(len(self.text) - _held(self.text, (end, *before)))
            if not (yield from self.more()):
                self.take(len(self.text))
                return ""

    def before(self, marker: str) -> tuple[str, bool]:
        """Take what is there of the text before a marker, and the marker; returns the text and whether it came."""
        found = self.text.find(marker)
        if found < 0:
            return self.take(len(self.text) - _held(self.text, (marker,))), False
        text = self.take(found)
        self.take(len(marker))
        return text, True

    def run(
        self, piece: Callable[[str], Piece], *markers: str, trim: bool = True
    ) -> Generator[Piece | None, None, tuple[str, str]]:
        """Yield the text before a marker as it comes.

        With ``trim``, whitespace before the marker is not yielded.

        Returns:
            The whitespace before the marker, and the marker. The marker is ``""`` if none comes.
        """
        space: list[str] = []
        while True:
            found = _earliest(self.text, markers, 0)
            part = self.take(len(self.text) - _held(self.text, markers) if found is None else found[0])
            sure = part.rstrip() if trim else part
            if sure:
                yield piece("".join(space) + sure)
                space.clear()
            space.append(part[len(sure) :])
            if found is not None:
                return "".join(space), self.take(len(found[1]))
            if not (yield from self.more()):
                return "".join(space) + self.take(len(self.text)), ""

    def rest(self, piece: Callable[[str], Piece]) -> Steps[None]:
        """Yield all text that comes."""
        while True:
            if self.text:
                yield piece(self.take(len(self.text)))
            if not (yield from self.more()):
                return

    def value(self, piece: Callable[[str], Piece] | None = None) -> Steps[str]:
        """Take one JSON value, if one begins here, or what there is of it; yield it as it comes if ``piece`` is given.

        Brackets and quotes are counted; whether what is between them is valid does not matter.
        """
        first = yield from self.peek()
        if first not in ("{", "[", '"'):
            return (yield from self.matching(_SCALAR))
        nesting, parts = _Nesting(), []
        while True:
            end = nesting.end(self.text)
            part = self.take(len(self.text) if end is None else end)
            parts.append(part)
            if piece is not None and part:
                yield piece(part)
            if end is not None or not (yield from self.more()):
                return "".join(parts)


_SCALAR = re.compile(r"[^\s,:{}\[\]\"]")


class _Nesting:
    """Finds where a JSON value ends whose text comes in parts."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    def end(self, text: str) -> int | None:
        """How many characters of the next part belong to the value; ``None`` if all do, and it has not ended."""
        at = 1 if self._escaped and text else 0
        self._escaped = self._escaped and not text
        while match := (_IN_STRING if self._in_string else _BRACKET).search(text, at):
            at = match.end()
            character = match.group()
            if character == "\\":
                self._escaped = at == len(text)
                at += 1
            elif character == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if character in "{[" else -1
            if self._depth <= 0 and not self._in_string:
                return at
        return None


def _earliest(text: str, markers: tuple[str, ...], begin: int) -> tuple[int, str] | None:
    found = [(at, marker) for marker in markers if (at := text.find(marker, begin)) >= 0]
    return min(found, default=None)


def _held(text: str, markers: tuple[str, ...]) -> int:
    """Length of the longest end of the text with which a marker may begin."""
    longest = max(map(len, markers), default=1) - 1
    for count in range(min(longest, len(text)), 0, -1):
        end = text[-count:]
        if any(marker.startswith(end) for marker in markers):
            return count
    return 0


class SourceReader:
    """A :class:`~tritonllm.serve.parsing.pieces.AnswerReader` made of a generator.

    Args:
        body: the generator function; what it leaves unread at the end is content.
    """

    def __init__(self, body: Callable[..., Steps[None]], *args: Any) -> None:
        self._source = PieceSource()
        self._steps = self._all(body, *args)

    def _all(self, body: Callable[..., Steps[None]], *args: Any) -> Steps[None]:
        yield from body(self._source, *args)
        yield from self._source.rest(Content)

    def feed(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        for begin in range(0, len(text), AT_ONCE):
            self._source.text += text[begin : begin + AT_ONCE]
            pieces += self._advance()
        return pieces

    def finish(self) -> list[Piece]:
        self._source.ended = True
        return self._advance()

    def _advance(self) -> list[Piece]:
        pieces: list[Piece] = []
        for piece in self._steps:  # goes on where it waited
            if piece is None:
                break
            pieces.append(piece)
        return pieces

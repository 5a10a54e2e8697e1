"""Arguments of calls as JSON objects, for clients that are sent objects and no text.

A model may write what is no JSON, or break off. What is sent of it piece by piece must be JSON in the end all the same,
and the same as is sent in one piece. So nothing is passed on before it is sure to have a place in the object: where the
text goes wrong, what is open is closed, and the rest is left out.
"""

import json
import re

from tritonllm.serve.parsing.pieces import AnswerReader, Arguments, Piece, ToolCallBegin
from tritonllm.serve.parsing.source import PieceSource, SourceReader, Steps

DEEPEST = 64  # levels within the object; a parser that is recursive must not fail
_CLOSE = {"{": "}", "[": "]"}
_SCALAR_CHARACTER = re.compile(r"[^\s,:{}\[\]\"]")
_SCALAR = re.compile(r"true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_NOT_PLAIN = re.compile(r'["\\\x00-\x1f]')
_ESCAPES = (  # by their length
    (2, re.compile(r'\\["\\/bfnrt]')),
    (6, re.compile(r"\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}")),
    (12, re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")),
)
_BROKEN_OFF = re.compile(r"\\(u[0-9a-fA-F]{0,3})?")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")


class Objects:
    """Makes an object of the arguments of each call that another reader finds."""

    def __init__(self, reader: AnswerReader) -> None:
        self._reader = reader
        self._open: SourceReader | None = None  # of the call whose arguments come

    def feed(self, text: str) -> list[Piece]:
        return self._pass_on(self._reader.feed(text))

    def finish(self) -> list[Piece]:
        return self._pass_on(self._reader.finish()) + self._close()

    def _pass_on(self, pieces: list[Piece]) -> list[Piece]:
        passed: list[Piece] = []
        for piece in pieces:
            if isinstance(piece, Arguments) and self._open is not None:
                passed += self._open.feed(piece.text)
                continue
            passed += self._close()
            passed.append(piece)
            if isinstance(piece, ToolCallBegin):
                self._open = SourceReader(json_object, piece.index)
        return passed

    def _close(self) -> list[Piece]:
        last, self._open = self._open, None
        return [] if last is None else last.finish()


def json_object(text: PieceSource, index: int) -> Steps[None]:
    """What the text has of a JSON object, as one; without spaces between its parts. ``{}`` if it begins as none.

    Args:
        index: the index of the call whose arguments they are.
    """
    if (yield from text.skip()) == "{":
        yield from _value(text, index, "", 0)
    else:
        yield Arguments(index, "{}")
    text.text = ""
    while (yield from text.more()):
        text.text = ""


def _value(text: PieceSource, index: int, before: str, depth: int) -> Steps[bool]:
    """One value behind the text ``before``, closed in any case; nothing if none begins. Returns whether it is whole."""
    first = yield from text.skip()
    if first == '"':
        text.take(1)
        yield Arguments(index, before + first)
        whole = yield from _string(text, index)
        yield Arguments(index, first)
        return whole
    if first in _CLOSE and depth <= DEEPEST:
        text.take(1)
        yield Arguments(index, before + first)
        whole = yield from _items(text, index, first, depth)
        yield Arguments(index, _CLOSE[first])
        return whole
    scalar = yield from text.matching(_SCALAR_CHARACTER)
    if _SCALAR.fullmatch(scalar):
        yield Arguments(index, before + scalar)
        return True
    return False


def _items(text: PieceSource, index: int, opened: str, depth: int) -> Steps[bool]:
    """What stands between two brackets, and the second one, which is not passed on; returns whether it came."""
    before = ""
    while True:
        character = yield from text.skip()
        if character == _CLOSE[opened]:
            break
        if opened == "{":
            key = (yield from _key(text)) if character == '"' else None
            if key is None:
                return False
            before += key
        if not (yield from _value(text, index, before, depth + 1)):
            return False
        character = yield from text.skip()
        if character != ",":
            break
        text.take(1)
        before = ","
    return bool(text.take(1)) and character == _CLOSE[opened]


def _key(text: PieceSource) -> Steps[str | None]:
    """A key and its colon; ``None`` if they do not come."""
    raw = yield from text.value()
    try:
        key = json.loads(raw, strict=False)
    except ValueError:
        return None
    if (yield from text.skip()) != ":":
        return None
    text.take(1)
    return json.dumps(key.encode("utf-8", "replace").decode(), ensure_ascii=False) + ":"


def _string(text: PieceSource, index: int) -> Steps[bool]:
    """The rest of a string, without the quote at its end; returns whether that came."""
    while (yield from text.peek()):
        found = _NOT_PLAIN.search(text.text)
        plain = len(text.text) if found is None else found.start()
        if plain:
            yield Arguments(index, text.take(plain))
        elif text.text[0] == '"':
            text.take(1)
            return True
        elif text.text[0] == "\\":
            escape = yield from _escape(text)
            if not escape:
                return False
            yield Arguments(index, escape)
        else:  # a line break, most often, which models forget to escape
            yield Arguments(index, json.dumps(text.take(1))[1:-1])
    return False


def _escape(text: PieceSource) -> Steps[str]:
    """An escape as JSON has it; a backslash that begins none is itself. ``""`` if the text breaks off within."""
    for length, pattern in _ESCAPES:
        while len(text.text) < length and (yield from text.more()):
            pass
        if pattern.fullmatch(text.text[:length]):
            return text.take(length)
        if text.text[1:2] != "u":
            break
    if _SURROGATE.match(text.text):  # half of a pair
        text.take(6)
        return "\ufffd"
    return "" if _BROKEN_OFF.fullmatch(text.text) else "\\" + text.take(1)

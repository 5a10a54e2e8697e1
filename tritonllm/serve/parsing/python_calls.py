"""Calls as Python has them, ``[name(key=value), ...]``: Llama 3.2 and 4, ToolACE, OLMo 3.

An argument is passed on as JSON when it is whole. One that is no literal is passed on as the text that it is.
"""

import re
from collections.abc import Collection

from tritonllm.serve.parsing.literals import json_of, quoted
from tritonllm.serve.parsing.pieces import Arguments, Content, ToolCallBegin
from tritonllm.serve.parsing.source import PieceSource, Steps
from tritonllm.serve.parsing.tools import content

_NAME = re.compile(r"[\w.\-]")
_KEY = re.compile(r"\s*([^\W\d]\w*)\s*=(?!=)", re.DOTALL)
_MARK = re.compile(r"""["'(){}\[\],]""")
_QUOTE = re.compile(r"""["'\\]""")


def pythonic(text: PieceSource, known: Collection[str], begin: str, end: str) -> Steps[None]:
    """An answer that is nothing but a list of calls.

    Args:
        known: the tools; only their names make a list one of calls.
        begin, end: tags that may stand around the list.
    """
    count = 0
    text.mark()
    yield from text.accept(begin)
    if (yield from text.skip()) == "[":
        text.take(1)
        while (yield from _call(text, count, known)):
            count += 1
            text.mark()
            yield from text.skip(",")
    if count:
        yield from text.accept("]")
        yield from text.accept(end)
        yield from text.skip()
    said = text.taken.replace(begin, "", 1)
    if count:
        said = said.replace(end, "", 1).strip(", \t\r\n").removeprefix("]")
    if said:
        yield Content(said)
    yield from text.rest(Content)


def tagged_calls(text: PieceSource, start: str, end: str) -> Steps[None]:
    """Calls between two tags, each on a line of its own."""
    count = 0
    while (yield from content(text, count, start)):
        before = count
        while (yield from _call(text, count, None)):
            count += 1
            text.mark()
        if count > before:
            yield from text.drop(end, start)
        else:
            yield Content(text.taken)


def _call(text: PieceSource, index: int, known: Collection[str] | None) -> Steps[bool]:
    """One call, whose arguments stay open if the text breaks off; returns whether one begins here."""
    yield from text.skip()
    name = yield from text.matching(_NAME)
    if not name or (known is not None and name not in known) or not (yield from text.accept("(")):
        return False
    yield ToolCallBegin(index, name)
    begin, last = "{", ","
    while last == ",":
        part, last = yield from _argument(text)
        found = _KEY.match(part)
        if found is not None and last:
            value = part[found.end() :].strip()
            yield Arguments(index, f"{begin}{quoted(found[1])}: {json_of(value) or quoted(value)}")
            begin = ", "
    if begin == "{":
        yield Arguments(index, "{")
    if last:
        yield Arguments(index, "}")
    return True


def _argument(text: PieceSource) -> Steps[tuple[str, str]]:
    """Text up to a comma or a bracket that closes, outside of others and of quotes, and what it ends with; ``""`` if
    that does not come."""
    parts, depth, quote = list[str](), 0, ""
    while (yield from text.peek()):
        found = (_QUOTE if quote else _MARK).search(text.text)
        if found is None:
            parts.append(text.take(len(text.text)))
            continue
        mark = found.group()
        parts.append(text.take(found.start()))
        if quote and mark == "\\":
            while len(text.text) < 2 and (yield from text.more()):
                pass
            parts.append(text.take(2))
            continue
        text.take(1)
        if not depth and not quote and mark in ",)]}":
            return "".join(parts), mark
        parts.append(mark)
        if quote:
            quote = "" if mark == quote else quote
        elif mark in "\"'":
            quote = mark
        elif mark != ",":
            depth += 1 if mark in "([{" else -1
    return "".join(parts), ""

"""Calls as tags with a tag for each argument: Qwen3-Coder, GLM-4.5, Seed-OSS, MiniMax-M2.

Arguments are bare text between tags. They become JSON by the types in the tool's schema; a string is passed on as it
comes, what has another type when it is whole.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass

from tritonllm.serve.parsing.literals import ArgumentTypes, argument, quoted
from tritonllm.serve.parsing.pieces import Arguments, Content, ToolCallBegin
from tritonllm.serve.parsing.source import PieceSource, Steps
from tritonllm.serve.parsing.tools import content

_NAME = re.compile(r'[^\s{}\[\]"<>]')
STRING = {"string"}


@dataclass(frozen=True, slots=True)
class Markup:
    """The tags of a format.

    Args:
        block: the tags around calls.
        function: the text before a function's name, that behind it, and the function's end; ``""``: there is none.
        key: the text before an argument's name, and that behind it.
        value: the text before an argument's value, and that behind it.
        lines: whether a value stands on lines of its own, whose breaks are not part of it.
    """

    block: tuple[str, str]
    function: tuple[str, str, str]
    key: tuple[str, str]
    value: tuple[str, str]
    lines: bool = False


_PARAMETERS = (("<function=", ">", "</function>"), ("<parameter=", ">"), ("", "</parameter>"))
QWEN3_CODER = Markup(("<tool_call>", "</tool_call>"), *_PARAMETERS, lines=True)
SEED_OSS = Markup(("<seed:tool_call>", "</seed:tool_call>"), *_PARAMETERS)
MINIMAX_M2 = Markup(
    block=("<minimax:tool_call>", "</minimax:tool_call>"),
    function=('<invoke name="', '">', "</invoke>"),
    key=('<parameter name="', '">'),
    value=("", "</parameter>"),
)
GLM45 = Markup(
    block=("<tool_call>", "</tool_call>"),
    function=("", "", ""),
    key=("<arg_key>", "</arg_key>"),
    value=("<arg_value>", "</arg_value>"),
)


def markup(text: PieceSource, tools: Collection[str], form: Markup) -> Steps[None]:
    """Calls in tags, one or several in a block.

    Args:
        tools: the tools that may be called, with their schemas if it is a mapping.
        form: the tags.
    """
    start, end = form.block
    count = 0
    while (yield from content(text, count, start)):
        before = count
        while name := (yield from _name(text, form)):
            yield ToolCallBegin(count, name)
            yield from _arguments(text, form, count, ArgumentTypes(tools, name))
            count += 1
        if count > before:
            yield from text.drop(end, start)
        else:
            yield Content(text.taken)


def _name(text: PieceSource, form: Markup) -> Steps[str]:
    """The name of the next function; ``""`` if none begins here."""
    before, behind, _ = form.function
    if before and not (yield from text.accept(before)):
        return ""
    yield from text.skip()
    name = yield from text.matching(_NAME)
    if behind:
        return name if (yield from text.accept(behind)) else ""
    return name if name and (yield from text.ahead(form.key[0], form.block[1]))[1] else ""


def _arguments(text: PieceSource, form: Markup, index: int, types: ArgumentTypes) -> Steps[None]:
    """The arguments of a call as an object, which stays open if the text breaks off."""
    ends = [end for end in (form.function[2], *form.block[::-1]) if end]
    begin = "{"
    while True:
        came = yield from text.drop(form.key[0], *ends)
        if came != form.key[0]:
            break
        key = yield from text.until(form.key[1])
        if key is None:
            came = ""
            break
        if form.value[0] and not (yield from text.accept(form.value[0])):
            continue
        of = types.of(key.strip())
        begin += f"{quoted(key.strip())}: "
        if of == STRING:
            yield Arguments(index, f'{begin}"')
            whole = yield from _string(text, form, index)
        else:
            value = yield from text.until(form.value[1])
            whole = value is not None
            if value is not None:
                yield Arguments(index, begin + argument(_inner(value, form), of))
        if not whole:
            return
        begin = ", "
    if begin == "{":
        yield Arguments(index, "{")
    if came:
        yield Arguments(index, "}")
    if came == form.function[2]:
        text.take(len(came))


def _string(text: PieceSource, form: Markup, index: int) -> Steps[bool]:
    """The rest of a string as it comes, and its closing quote; returns whether its end came."""
    end = form.value[1]
    if form.lines and (yield from text.peek()) == "\n":
        text.take(1)
    last = ""  # a line break that may be the one before the end
    while True:
        part, found = text.before(end)
        part, last = last + part, ""
        if form.lines and part.endswith("\n"):
            part, last = part[:-1], "\n"
        if part:
            yield Arguments(index, quoted(part)[1:-1])
        if found:
            yield Arguments(index, '"')
            return True
        if not (yield from text.more()):
            return False


def _inner(value: str, form: Markup) -> str:
    return value.removeprefix("\n").removesuffix("\n") if form.lines else value

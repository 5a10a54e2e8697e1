"""How families of models write calls of tools.

What begins like a call and is none stays content, to the letter. A call whose text breaks off, for instance at
``max_tokens``, has the arguments that came. Between a call's arguments and its end nothing is content.
"""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

from tritonllm.serve.parsing.pieces import Arguments, Content, ToolCallBegin
from tritonllm.serve.parsing.source import PieceSource, Steps

_NAME = re.compile(r'[^\s{}\[\]"<>]')
ARGUMENT_KEYS = ("arguments", "parameters")


def call_object(text: PieceSource, index: int, known: Collection[str] | None = None) -> Steps[bool]:
    """A call as a JSON object, ``{"name": ..., "arguments": {...}}`` or with ``parameters``.

    Args:
        index: the index of the call.
        known: the names that may be called; ``None``: any.

    Returns:
        Whether it is one. What was taken may be more than the object's beginning in any case.
    """
    name, arguments = None, None
    if (yield from text.skip()) != "{":
        return False
    text.take(1)
    while (yield from text.skip(",")) == '"':
        key = _text_of((yield from text.value()))
        if (yield from text.skip()) != ":":
            break
        text.take(1)
        first = yield from text.skip()
        if key == "name" and name is None:
            name = _text_of((yield from text.value()))
            if not name or (known is not None and name not in known):
                return False
            yield ToolCallBegin(index, name)
            if arguments is not None:
                yield Arguments(index, arguments)
        elif key in ARGUMENT_KEYS and arguments is None:
            streamed = name is not None and first == "{"
            value = yield from text.value(partial(Arguments, index) if streamed else None)
            arguments = _as_arguments(value)
            if name is not None and not streamed:
                yield Arguments(index, arguments)
        else:
            yield from text.value()
    if name is None:
        return False
    if text.text[:1] == "}":
        text.take(1)
        if arguments is None:
            yield Arguments(index, "{}")
    return True


def _text_of(value: str) -> str | None:
    """The JSON string; ``None`` if it is none."""
    try:
        decoded = json.loads(value)
    except ValueError:
        return None
    return decoded if isinstance(decoded, str) else None


def _as_arguments(value: str) -> str:
    """Arguments as OpenAI has them: some models write them as a string that holds JSON, or none as null."""
    decoded = _text_of(value) if value.startswith('"') else None
    return decoded if decoded is not None else "{}" if value in ("null", "") else value


def content(text: PieceSource, calls: int, *starts: str) -> Steps[str]:
    """Yield what is said before the next calls begin; returns what they begin with, ``""`` if none do. Whitespace
    around calls is nobody's.

    Args:
        calls: how many calls there were already.
        starts: the texts that calls may begin with.
    """
    space, marker = yield from text.run(Content, *starts)
    if not marker and space and (space.strip() or not calls):
        yield Content(space)
    text.mark(space + marker)
    return marker


def _objects(text: PieceSource, count: int) -> Steps[int]:
    """A call as a JSON object, or a list of such; returns the number of all calls then."""
    listed = (yield from text.skip()) == "["
    text.take(int(listed))
    while (yield from text.skip("," if listed else "")) == "{" and (yield from call_object(text, count)):
        count += 1
        text.mark()
        if not listed:
            return count
    if listed and text.text[:1] == "]":
        text.take(1)
    return count


def tagged(text: PieceSource, *tags: tuple[str, str]) -> Steps[None]:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` and the like, or a list of such objects between the
    tags: Hermes, Qwen2.5, Qwen3, ERNIE, Granite, Hunyuan, Phi.

    Args:
        tags: pairs of tags around calls; where the second is ``""``, the JSON ends them.
    """
    ends, count = dict(tags), 0
    while start := (yield from content(text, count, *ends)):
        before, end = count, ends[start]
        count = yield from _objects(text, count)
        if count == before:
            yield Content(text.taken)
        elif end:
            yield from text.drop(end, *ends)  # a brace too many, for instance


def llama3_json(text: PieceSource, known: Collection[str], *tags: str) -> Steps[None]:
    """An answer that is nothing but ``{"name": ..., "parameters": {...}}``, or several with ``;`` between: Llama 3.

    Args:
        known: the tools; only their names make a JSON object a call.
        tags: texts that the answer may begin with, and that are no part of it.
    """
    count = 0
    text.mark()
    tag = yield from text.accept(*tags)
    while (yield from text.skip(";" if count else "")) == "{":
        if not (yield from call_object(text, count, known)):
            break
        count += 1
        text.mark()
    said = text.taken.replace(tag, "", 1)
    if said and not (count and not said.strip("; \t\r\n")):
        yield Content(said)
    yield from text.rest(Content)


def mistral(text: PieceSource) -> Steps[None]:
    """``[TOOL_CALLS]`` with a list of objects, or with ``name{...}``, ``name[ARGS]{...}`` and
    ``name[CALL_ID]id[ARGS]{...}``: Mistral's tokenizers before version 11, of 11, and later ones."""
    count = 0
    while (yield from content(text, count, "[TOOL_CALLS]")):
        before = count
        if (yield from text.skip()) == "[":
            count = yield from _objects(text, count)
        else:
            name = yield from text.matching(_NAME)
            if (yield from text.accept("[CALL_ID]")):
                yield from text.matching(_NAME)
            yield from text.accept("[ARGS]")
            if name and (yield from text.skip()) == "{":
                yield ToolCallBegin(count, name)
                yield from text.value(partial(Arguments, count))
                count += 1
        if count == before:
            yield Content(text.taken)


@dataclass(frozen=True, slots=True)
class CallSection:
    """The markers of a format in which a section holds calls, each a name and a JSON object.

    Args:
        section: the marks around the section.
        call: the marks around a call.
        separator: the mark between name and arguments.
    """

    section: tuple[str, str]
    call: tuple[str, str]
    separator: str


DEEPSEEK = CallSection(
    section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    call=("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    separator="<｜tool▁sep｜>",
)
KIMI_K2 = CallSection(
    section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    call=("<|tool_call_begin|>", "<|tool_call_end|>"),
    separator="<|tool_call_argument_begin|>",
)


def section(text: PieceSource, form: CallSection) -> Steps[None]:
    """A section of calls. A name may be ``functions.name:3`` (Kimi K2); or it is ``function``, and the name and a block
    of JSON follow (DeepSeek-V3, R1)."""
    (begin, end), (start, last) = form.call, form.section
    count = 0
    while (yield from content(text, count, start)):
        before = count
        while (yield from text.accept(begin)):
            name = _without_number(((yield from text.until(form.separator)) or "").strip())
            if (yield from text.skip()) != "{":
                name = yield from text.matching(_NAME)
                yield from text.accept("```json")
            if not name or (yield from text.skip()) != "{":
                break
            yield ToolCallBegin(count, name)
            yield from text.value(partial(Arguments, count))
            yield from text.drop(end, begin, last)
            count += 1
            text.mark()
        yield from text.accept(last)
        if count == before:
            yield Content(text.taken)


def _without_number(name: str) -> str:
    front, colon, number = name.rpartition(":")
    return (front if colon and number.isdecimal() else name).removeprefix("functions.")


def required(text: PieceSource) -> Steps[None]:
    """A list of call objects, which a grammar has made of the answer."""
    count = 0
    if (yield from text.skip()) == "[":
        text.take(1)
    while (yield from text.skip(",")) == "{" and (yield from call_object(text, count)):
        count += 1
    yield from text.drop("]")


def named(text: PieceSource, name: str) -> Steps[None]:
    """The arguments of one call, which a grammar has made of the answer."""
    yield ToolCallBegin(0, name)
    yield from text.rest(partial(Arguments, 0))

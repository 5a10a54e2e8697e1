"""Values that a model writes in Python's notation or as bare text, as JSON. The types come from a tool's schema."""

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from tritonllm.engine.grammar.schema_document import IN_PLACE, Document

DEEPEST = 64  # levels of lists and dicts; what is deeper is text
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}
_TOKEN = re.compile(
    r"""\s*(?:(?P<string>'[^'\\]*(?:\\.[^'\\]*)*'|"[^"\\]*(?:\\.[^"\\]*)*")"""
    r"""|(?P<number>[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)(?![\w.])"""
    r"""|(?P<word>[A-Za-z]+)(?!\w)"""
    r"""|(?P<mark>[\[\](){},:]))\s*""",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|.)", re.DOTALL)
_CHARACTERS = {**dict(zip("abfnrtv", "\a\b\f\n\r\t\v", strict=True)), "\n": "", **{c: c for c in "\\'\"/"}}
_CLOSE = {"[": "]", "(": ")", "{": "}"}
_KINDS = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}


def quoted(text: str) -> str:
    """The text as a JSON string. Two halves of a surrogate pair are one character, a half alone is U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return json.dumps(text, ensure_ascii=False)


def json_of(text: str) -> str | None:
    """A literal of Python or of JSON as JSON, by its text: numbers keep all digits. ``None`` if it is none."""
    try:
        return _Literal(text).whole()
    except ValueError:
        return None


class _Literal:
    """Reads one literal from the left to the right."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0
        self._kind, self._token = "", ""
        self._next()

    def whole(self) -> str:
        value = self._value(0)
        if self._kind != "end":
            raise ValueError
        return value

    def _next(self) -> None:
        if self._at == len(self._text):
            self._kind, self._token = "end", ""
            return
        found = _TOKEN.match(self._text, self._at)
        if found is None or found.lastgroup is None:
            raise ValueError
        self._kind, self._token, self._at = found.lastgroup, found[found.lastgroup], found.end()

    def _value(self, depth: int) -> str:
        kind, token = self._kind, self._token
        if kind == "mark" and token in _CLOSE and depth < DEEPEST:
            return self._items(token, depth)
        self._next()
        if kind == "string":
            parts = [token]
            while self._kind == "string":  # as in Python; between three quotes there is one, and two empty ones
                parts.append(self._token)
                self._next()
            return quoted("".join(map(_unescaped, parts)))
        if kind == "number":
            return _number(token)
        if kind == "word" and token.lower() in _WORDS:
            return _WORDS[token.lower()]
        raise ValueError

    def _items(self, opened: str, depth: int) -> str:
        parts, commas = [], 0
        self._next()
        while self._token != _CLOSE[opened] or self._kind != "mark":
            part = self._value(depth + 1)
            if opened == "{":
                self._take(":")
                part = f"{part if part.startswith(chr(34)) else quoted(part)}: {self._value(depth + 1)}"
            parts.append(part)
            if self._token != "," or self._kind != "mark":
                break
            commas += 1
            self._next()
        self._take(_CLOSE[opened])
        if opened == "(" and len(parts) == 1 and not commas:
            return parts[0]
        inside = ", ".join(parts)
        return f"{{{inside}}}" if opened == "{" else f"[{inside}]"

    def _take(self, mark: str) -> None:
        if self._kind != "mark" or self._token != mark:
            raise ValueError
        self._next()


def _number(token: str) -> str:
    """A number as JSON has it: no plus before it, and a digit on both sides of the point."""
    sign, digits = ("-", token[1:]) if token[0] == "-" else ("", token.lstrip("+"))
    digits = re.sub(r"\.(?![0-9])", ".0", digits if digits[0] != "." else f"0{digits}", count=1)
    if len(digits) > 1 and digits[0] == "0" and digits[1].isdigit():  # Python has no such number, and nor has JSON
        raise ValueError
    return sign + digits


def _unescaped(token: str) -> str:
    """What a string between quotes says. ``\\/`` is an escape of JSON; a backslash that begins none is itself."""

    def character(found: "re.Match[str]") -> str:
        code = found[1]
        if code[0] in "xuU" and len(code) > 1:
            number = int(code[1:], 16)
            return chr(number) if number <= 0x10FFFF else found[0]
        if code[0] in "01234567":
            return chr(int(code, 8))
        return _CHARACTERS.get(code, found[0])

    return _ESCAPE.sub(character, token[1:-1])


class ArgumentTypes:
    """The JSON types of a function's arguments, by the schema of its parameters.

    Args:
        tools: the functions by name, each with its ``parameters``; or names only, then no type is known.
        name: the function's name.
    """

    def __init__(self, tools: Collection[str], name: str) -> None:
        function = tools.get(name) if isinstance(tools, Mapping) else None
        self._function_schema = function.get("parameters") if isinstance(function, Mapping) else None
        known = self._function_schema
        properties = known.get("properties") if isinstance(known, Mapping) else None
        self._properties: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
        self._found = dict[str, frozenset[str]]()
        self._document: Document | None = None

    def of(self, key: str) -> frozenset[str]:
        """Types that the argument may have; none: nothing is known."""
        if key not in self._found:
            self._found[key] = self._types(self._properties.get(key))
        return self._found[key]

    def _types(self, schema: Any) -> frozenset[str]:
        types, waiting, seen = set[str](), [schema], set[int]()
        while waiting:
            part = waiting.pop()
            if not isinstance(part, Mapping) or id(part) in seen:
                continue
            seen.add(id(part))
            if "$ref" in part:
                waiting.append(self._target(part))
            for name in IN_PLACE:
                waiting += part[name] if isinstance(part.get(name), list) else []
            named = part.get("type")
            types |= {one for one in (named if isinstance(named, list) else [named]) if isinstance(one, str)}
            if named is None:
                values = part["enum"] if isinstance(part.get("enum"), list) else []
                values = [*values, part["const"]] if "const" in part else values
                types |= {_kind(json.dumps(value)) for value in values}
        return frozenset(types)

    def _target(self, part: Mapping[str, Any]) -> Any:
        try:
            self._document = self._document or Document(self._function_schema)
        except ValueError:  # an $id that is no URI
            return None
        return self._document.target(part)


def _kind(value: str) -> str:
    """The type of a value in JSON."""
    return _KINDS.get(value[0]) or ("number" if re.search(r"[.eE]", value) else "integer")


def argument(text: str, types: Collection[str]) -> str:
    """The JSON of an argument that is written as bare text: strings without quotes, the rest in JSON's or Python's way.

    Args:
        types: types that the argument may have; none: nothing is known, and what can be read as another type is no
            string.
    """
    if types and set(types) == {"string"}:
        return quoted(text)
    value = json_of(text)
    if value is None or value.startswith('"'):
        return quoted(text)
    kind = _kind(value)
    known = kind in types or (kind == "integer" and "number" in types)
    return value if known or "string" not in types else quoted(text)

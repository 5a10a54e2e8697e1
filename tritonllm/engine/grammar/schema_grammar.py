"""A JSON schema as a grammar in EBNF whose every text is JSON and valid. No torch.

It is written here, and not by xgrammar's own converter, which puts a ``pattern`` between quotes as it is (a backslash
or a quote in it makes no JSON), computes with bounds in six decimals, and lets blanks go on for ever.

**Blanks** between tokens are few, since a small model would fill an output with them: after a colon none or one, and
after a bracket or a comma, and before a closing bracket, none, one, or a line break with at most four blanks or one tab
for each level (deeper than eight levels as many as at eight). Or there are none but one after each comma and colon.

**Strings** of limited length are chains of rules, one for each number of characters that may still come::

    left_2 ::= "\\"" | character left_1
    left_1 ::= "\\"" | character left_0
    left_0 ::= "\\""

Each of them holds the closing quote, so what may follow is known when the grammar is compiled. A repetition
(``character{0,2} "\\""``) says the same, but how a token that reaches its end goes on xgrammar finds out when a mask is
filled, for each such token anew: 0.2 to 7 ms a mask, where others take 5 us (vocabulary of 128,256, an EPYC), and it
takes longer to compile and eight times the memory. A chain of 512 takes 2 s to compile. Longer strings are a
repetition, of characters that need no backslash: with others among them a mask took 0.4 s.
"""

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from math import ceil, floor
from typing import Any

from tritonllm.engine.grammar.characters import PLAIN, SHORT_ESCAPES, one_of, quoted, union, units, without
from tritonllm.engine.grammar.grammar_rules import Rules
from tritonllm.engine.grammar.number_ranges import Bound, integers, numbers
from tritonllm.engine.grammar.patterns import Unreadable, within_json
from tritonllm.engine.grammar.schema_document import ALL_TYPES, Document, rest_of_array, rest_of_object, types_of
from tritonllm.engine.grammar.string_formats import FORMATS

MOST_CHARACTERS = 512  # of a string that is written as a chain: some milliseconds each to compile
MOST_LINKS = 2048  # of all chains of a grammar
MOST_LEVELS = 8  # to which the indentation may grow
MOST_STATES = 2000  # of an object with limits of its size: places among its properties, times properties before
_PLAIN = one_of(PLAIN)
_BASIC = {  # rules that are written if they are used, and those that they use
    "hex": ("[0-9a-fA-F]", ()),
    "escape": (
        '["\\\\/bfnrt] | "u" ([0-9abcefABCEF] hex hex hex | [dD] [0-7] hex hex'
        ' | [dD] [89abAB] hex hex "\\\\u" [dD] [c-fC-F] hex hex)',
        ("hex",),
    ),
    "text": (f'"\\"" | {_PLAIN} text | "\\\\" escape text', ("escape",)),
}
_NUMBER = '"-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [+\\-]? [0-9] [0-9]?)?'
_INTEGER = '"0" | "-"? [1-9] [0-9]*'


class TooManyStates(ValueError):
    """What would make a grammar too large; says where."""


class Unwritable(ValueError):
    """A value that is no JSON, or an expression that cannot be followed; says which."""


def grammar_of(document: Document, blanks: bool) -> str:
    """EBNF of the JSON texts that are valid under a schema, which is neither malformed nor unsupported.

    Args:
        blanks: whether there may be blanks between tokens; else there is one after each comma and colon.

    Raises:
        NoNumber: bounds that nothing is between, or that cannot be followed.
        TooManyStates, Unwritable: see the classes.
    """
    return _Writer(document, blanks).write(document.root)


def any_json(blanks: bool) -> str:
    """EBNF of the JSON objects and arrays."""
    return grammar_of(Document({"type": ["object", "array"]}), blanks)


class _Writer:
    def __init__(self, document: Document, blanks: bool) -> None:
        self._document, self._blanks = document, blanks
        self._possible = document.possible()
        self._rules = Rules()
        self._links = 0
        self._named = dict[tuple[int, int], str]()  # rules of schemas at a depth
        self._wanted = deque[tuple[str, Any, int]]()
        self._kinds: dict[str, Callable[[Mapping[str, Any], int], str]] = {
            "string": lambda schema, depth: self._string(schema),
            "number": lambda schema, depth: self._number(schema),
            "integer": lambda schema, depth: self._integer(schema),
            "boolean": lambda schema, depth: '"true" | "false"',
            "null": lambda schema, depth: '"null"',
            "object": self._object,
            "array": self._array,
        }

    def write(self, schema: Any) -> str:
        self._rules.define("root", self._rule(schema, 0))
        while self._wanted:
            name, wanted, depth = self._wanted.popleft()
            self._rules.define(name, self._body(wanted, depth))
        return str(self._rules)

    def _rule(self, schema: Any, depth: int) -> str:
        """The name of a schema's rule, whose body is written later: references may lead around."""
        schema = {} if schema is True else schema
        depth = min(depth, MOST_LEVELS) if self._blanks else 0
        key = (id(schema) if schema else 0, depth)
        if key not in self._named:
            self._named[key] = name = self._rules.name()
            self._wanted.append((name, schema, depth))
        return self._named[key]

    def _is_possible(self, schema: Any) -> bool:
        return schema is True or id(schema) in self._possible

    def _body(self, schema: Mapping[str, Any], depth: int) -> str:
        if "$ref" in schema:
            return self._rule(self._document.target(schema), depth)
        for name in ("anyOf", "oneOf", "allOf"):
            if name in schema:
                return " | ".join(self._rule(one, depth) for one in schema[name] if self._is_possible(one))
        if "enum" in schema or "const" in schema:
            values = schema["enum"] if "enum" in schema else [schema["const"]]
            return " | ".join(dict.fromkeys(map(_literal, values)))
        kinds = [kind for kind in (*ALL_TYPES, "integer") if kind in types_of(schema)]
        if "number" in kinds and "integer" in kinds:
            kinds.remove("integer")
        ways = [self._kinds[kind](schema, depth) for kind in kinds]
        return " | ".join(way for way in ways if way)

    def _basic(self, name: str) -> str:
        body, others = _BASIC[name]
        self._rules.define(name, body)
        for other in others:
            self._basic(other)
        return name

    # Scalars

    def _string(self, schema: Mapping[str, Any]) -> str:
        if "pattern" in schema:
            return self._pattern("'pattern'", schema["pattern"])
        if "format" in schema:
            return self._pattern("'format'", f"^({FORMATS[schema['format']]})$")
        return f'"\\"" {self._text(int(schema.get("minLength", 0)), schema.get("maxLength"))}'

    def _pattern(self, keyword: str, pattern: str) -> str:
        try:
            return f'"\\"" {within_json(pattern, self._rules)}'
        except Unreadable as error:
            raise Unwritable(f"{keyword} with {error}") from error

    def _text(self, least: int, most: float | None) -> str:
        """A rule for a string of so many characters, and the quote behind it."""
        count = least if most is None else int(most)
        if count > min(MOST_CHARACTERS, MOST_LINKS - self._links):
            return f'{_PLAIN}{{{least},{"" if most is None else count}}} "\\""'
        if most is None:
            rule, ends_from = self._basic("text"), count
        else:
            rule, ends_from = self._rules.add('"\\""'), least
        rules = len(self._rules)
        for before in reversed(range(count)):  # characters before this one
            ends = ['"\\""'] if before >= ends_from else []
            escaped = f'"\\\\" {self._basic("escape")} {rule}'
            rule = self._rules.add(" | ".join([*ends, f"{_PLAIN} {rule}", escaped]))
        self._links += len(self._rules) - rules
        return rule

    def _integer(self, schema: Mapping[str, Any]) -> str:
        lows = [ceil(schema["minimum"])] if "minimum" in schema else []
        lows += [floor(schema["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in schema else []
        highs = [floor(schema["maximum"])] if "maximum" in schema else []
        highs += [ceil(schema["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in schema else []
        step = int(schema.get("multipleOf", 1))
        if not lows and not highs and step == 1:
            return _INTEGER
        return integers(self._rules, max(lows, default=None), min(highs, default=None), step)

    def _number(self, schema: Mapping[str, Any]) -> str:
        lows, highs = (
            [Bound(Decimal(repr(schema[name])), name.startswith("exclusive")) for name in names if name in schema]
            for names in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum"))
        )
        if not lows and not highs:
            return _NUMBER
        low = max(lows, key=lambda bound: (bound.value, bound.exclusive), default=None)
        high = min(highs, key=lambda bound: (bound.value, not bound.exclusive), default=None)
        return numbers(self._rules, low, high)

    # What holds others

    def _blank(self, depth: int) -> str:
        """What may stand behind a bracket or a comma so deep, or before a bracket that closes."""
        if not self._blanks:
            return '""'
        levels = min(depth, MOST_LEVELS)
        spaces = tabs = '""'
        for _ in range(4 * levels):
            spaces = self._rules.add(f'"" | " " {spaces}')
        for _ in range(levels - 1):
            tabs = self._rules.add(f'"" | "\\t" {tabs}')
        more = [f'"\\n\\t" {tabs}'] if levels else []
        return self._rules.add(" | ".join(['""', '" "', f'"\\n" {spaces}', *more]))

    def _around(self, opening: str, closing: str, depth: int) -> tuple[str, str, str]:
        """The beginning, the comma and the end of what has something in it."""
        if not self._blanks:
            return f'"{opening}"', '", "', f'"{closing}"'
        inside = self._blank(depth + 1)
        return f'"{opening}" {inside}', f'"," {inside}', f'{self._blank(depth)} "{closing}"'

    def _of(self, opening: str, closing: str, depth: int, filled: Sequence[str], empty: bool) -> str:
        """The right side of a rule for an object or an array, with its brackets.

        Args:
            filled: alternatives of what stands between the brackets.
            empty: whether nothing may stand between them.
        """
        begin, _, end = self._around(opening, closing, depth)
        ways = [f"{begin} ({' | '.join(filled)}) {end}"] if filled else []
        if empty:
            ways.append(f'"{opening}" {self._blank(depth)} "{closing}"' if self._blanks else f'"{opening}{closing}"')
        return " | ".join(ways)

    def _array(self, schema: Mapping[str, Any], depth: int) -> str:
        comma = self._around("[", "]", depth)[1]
        least, most = int(schema.get("minItems", 0)), schema.get("maxItems")
        first = [one if self._is_possible(one) else None for one in schema.get("prefixItems", ())]
        rest = rest_of_array(schema)
        if None in first:  # the array ends before what cannot be
            first, rest = first[: first.index(None)], False
        if most is not None and most < len(first):
            first, rest = first[: int(most)], False
        left = None if most is None else int(most) - len(first)
        after = ['""'] if least <= len(first) else []
        if self._is_possible(rest) and left != 0:
            item = self._rule(rest, depth + 1)
            if not first:
                more = _times(f"({comma} {item})", max(0, least - 1), None if left is None else left - 1)
                return self._of("[", "]", depth, [f"{item} {more}"], least == 0)
            after = [_times(f"({comma} {item})", max(0, least - len(first)), left)]
        elif not after:
            return ""
        tail = after[0]
        for at in reversed(range(len(first))):
            item = self._rule(first[at], depth + 1)
            if at == 0:
                return self._of("[", "]", depth, [f"{item} {tail}"], least == 0)
            tail = self._rules.add(" | ".join([*(['""'] if at >= least else []), f"{comma} {item} {tail}"]))
        return self._of("[", "]", depth, [], True)

    def _object(self, schema: Mapping[str, Any], depth: int) -> str:
        if id(schema) not in self._possible and schema:  # of several types, it is of another one
            return ""
        colon = '":" (" ")?' if self._blanks else '": "'
        required = {*schema.get("required", ())}
        members = [
            (f"{_literal(name)} {colon} {self._rule(one, depth + 1)}", name in required)
            for name, one in schema.get("properties", {}).items()
            if self._is_possible(one)
        ]
        extras = [
            f"{self._name(schema, pattern)} {colon} {self._rule(one, depth + 1)}"
            for pattern, one in rest_of_object(schema)
            if self._is_possible(one)
        ]
        comma = self._around("{", "}", depth)[1]
        most = schema.get("maxProperties")
        places = _SchemaPlaces(
            self._rules, comma, members, " | ".join(extras), int(schema.get("minProperties", 0)), most and int(most)
        )
        if most == 0:
            return self._of("{", "}", depth, [], True)
        return self._of("{", "}", depth, places.filled(), not required and not schema.get("minProperties"))

    def _name(self, schema: Mapping[str, Any], pattern: str | None) -> str:
        """The name of a property that is not one of ``properties``."""
        if pattern is not None:
            return self._rules.add(self._pattern("'patternProperties'", pattern))
        if schema.get("properties"):
            return self._rules.add(f'"\\"" {self._other_name(schema["properties"])}')
        names = self._document.resolved(schema.get("propertyNames", True))
        if names is True or not names:
            return self._rules.add(f'"\\"" {self._basic("text")}')
        return self._rules.add(self._body({**names, "type": "string"}, 0))

    def _other_name(self, names: Mapping[str, Any]) -> str:
        """A rule of the strings that are none of these, with their closing quote. They have short escapes only, or a
        name could be spelled with others."""
        taken: dict[str, Any] = {}  # a tree: the next character, as JSON writes it; under "" if a name ends
        for name in names:
            at, spelled = taken, [*units(name)]
            if "" in spelled:  # it has a character that these strings cannot have
                continue
            for unit in spelled:
                at = at.setdefault(unit, {})
            at[""] = {}
        short = union((ord(c), ord(c)) for c in SHORT_ESCAPES.values())
        free = self._rules.name()
        self._rules.define(free, f'"\\"" | {_PLAIN} {free} | "\\\\" {one_of(short)} {free}')
        root = self._rules.name()
        waiting = [(root, taken)]
        while waiting:
            name, at = waiting.pop()
            ways = [] if "" in at else ['"\\""']
            for unit, after in at.items():
                if unit:
                    following = self._rules.name()
                    waiting.append((following, after))
                    ways.append(f"{quoted(unit)} {following}")
            plain = without(PLAIN, [(ord(unit), ord(unit)) for unit in at if len(unit) == 1])
            escapes = without(short, [(ord(unit[1]), ord(unit[1])) for unit in at if len(unit) == 2])
            ways.append(f"{one_of(plain)} {free}")
            ways += [f'"\\\\" {one_of(escapes)} {free}'] if escapes else []
            self._rules.define(name, " | ".join(ways))
        return root


class _SchemaPlaces:
    """The places in an object: which properties are behind it, and how many there are before it if that counts.

    Args:
        comma: what stands between two members.
        members: the members with names, in their order, and whether each must be there.
        extra: any number of these comes behind; an empty string: none does.
        least, most: members, these among them.
    """

    def __init__(
        self, rules: Rules, comma: str, members: Sequence[tuple[str, bool]], extra: str, least: int, most: int | None
    ) -> None:
        self._rules, self._comma, self._members, self._extra = rules, comma, members, extra
        counted = least > sum(needed for _, needed in members) or (
            most is not None and (bool(extra) or most < len(members))
        )
        self._least, self._most = (least, most) if counted else (0, None)
        self._cap = self._least if self._most is None else self._most  # a count that says all about those above it
        if (len(members) + 1) * self._cap > MOST_STATES:
            raise TooManyStates("'minProperties' or 'maxProperties' of an object with too many properties")

    def _after(self, count: int) -> int:
        return min(count + 1, self._cap) if self._most is None else count + 1

    def filled(self) -> list[str]:
        """Alternatives of one member or more."""
        rest = self._rest()
        ways = list[str]()
        for at, (member, needed) in enumerate(self._members):
            tail = rest[at + 1].get(self._after(0))
            ways += [f"{member} {tail}"] if tail is not None else []
            if needed:
                return ways
        if self._extra:
            tail = self._extras(self._after(0))
            ways += [f"({self._extra}) {tail}"] if tail is not None else []
        return ways

    def _extras(self, count: int) -> str | None:
        """What may come behind the members with names, if so many members stand before."""
        least = max(0, self._least - count)
        most = None if self._most is None else self._most - count
        if (most is not None and most < least) or (least and not self._extra):
            return None
        return _times(f"({self._comma} ({self._extra}))", least, most) if self._extra else '""'

    def _rest(self) -> list[dict[int, str]]:
        """For each place, the first left out, and each count: what comes, if anything is right."""
        counts = range(min(1, self._cap), self._cap + 1)
        behind = {count: tail for count in counts if (tail := self._extras(count)) is not None}
        places = [behind]
        for member, needed in reversed(self._members[1:]):  # nothing is before the first
            here = dict[int, str]()
            for count in counts:
                without_it = None if needed else behind.get(count)
                tail = behind.get(self._after(count))
                ways = [f"{self._comma} {member} {tail}"] if tail is not None else []
                ways += [without_it] if without_it is not None else []
                if ways:
                    here[count] = self._rules.add(" | ".join(ways))
            behind = here
            places.append(here)
        return [{}, *places[::-1]]


def _times(part: str, least: int, most: int | None) -> str:
    if most == 0:
        return '""'
    if least == 0 and most is None:
        return f"{part}*"
    return f"{part}{{{least},{'' if most is None else most}}}"


def _literal(value: Any) -> str:
    """How JSON writes a value, as a string of EBNF."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise Unwritable("a number that JSON cannot write") from error
    return quoted(text)

"""Regular expressions as rules of a grammar, for a whole output or for a string of JSON. No torch.

An expression becomes a deterministic automaton, and each of its states a rule, which says which characters may come and
how it goes on. So all that may follow is known when the grammar is compiled, and masks take some microseconds. (Written
as xgrammar writes it, with repetitions, a mask within ``.{1,500}`` took 15 ms, and 2 s in a string of JSON, where some
characters need a backslash.) The automaton is Glushkov's, whose states are places in the expression (V. M. Glushkov,
"The abstract theory of automata", 1961), made deterministic by sets of places.

What is known of expressions is what ECMA-262 (which JSON Schema names) and Python's ``re`` read alike; the rest is
refused. Where they differ in which characters a class has (``\\w`` knows no accents in ECMA-262, ``.`` matches a
carriage return in Python), the class has those that both give it, so the text matches for either.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from tritonllm.engine.grammar.characters import ALL, SURROGATES, Ranges, one_of, spellings, union, without
from tritonllm.engine.grammar.grammar_rules import Rules

# For a class and its complement: what is in it by both standards. Not all of it where that would be long.
_DIGITS: Ranges = ((0x30, 0x39),)
_WORDS = union([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)])
_BLANKS = union([(0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)])
_BLANKS = union([*_BLANKS, (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)])
_CLASSES: dict[str, Ranges] = {
    "d": _DIGITS,
    "w": _WORDS,
    "s": _BLANKS,
    # Without decimal digits of other scripts: no range here has one.
    "D": union([*without([(0, 0x7F)], _DIGITS), (0x80, 0x65F), (0x3000, 0xA61F), (0xAC00, 0xD7FF), (0x1F300, 0x1FAFF)]),
    "W": union([*without([(0, 0x7F)], _WORDS), (0x2010, 0x2027), (0x2030, 0x205E)]),
    "S": without(ALL, [*_BLANKS, (0x1C, 0x1F), (0x85, 0x85), (0xFEFF, 0xFEFF)]),
}
_ANY = without(ALL, [(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)])  # "."
_CONTROLS = {"n": 0x0A, "t": 0x09, "r": 0x0D, "f": 0x0C, "v": 0x0B}
_HEX = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})")
_COUNT = re.compile(r"\{(\d+)(?:(,)(\d*))?\}")
_GROUP = re.compile(r"\((?:\?:|\?P?<[A-Za-z_]\w*>)?")
MOST_PLACES = 10_000  # characters of an expression, each repetition counted: "a{3}" has three
MOST_STATES = 10_000  # of an automaton
MOST_WORK = 500_000  # places that are looked at to make all automata of a grammar: about a second
MOST_RULES = 1000  # of an automaton: some milliseconds each to compile


class Unreadable(ValueError):
    """An expression that cannot be followed; says what is in it."""


class TooLarge(Unreadable):
    """A pattern whose automaton would be too large."""


@dataclass
class _Part:
    """A part of an expression: places in a row, the first and the last of which a text may begin and end at.

    Sets of places are numbers that have a bit for each of them.
    """

    begin: int  # of its places, which lie behind each other
    end: int
    empty: bool = True  # whether it matches nothing
    first: int = 0
    last: int = 0


@dataclass
class _Open:
    """A group whose end has not come, or the whole."""

    ways: list[_Part] = field(default_factory=list)  # alternatives that have ended
    parts: list[_Part] = field(default_factory=list)  # of the one that goes on
    repeatable: bool = False  # whether the last part is one that a repetition may follow


class _Places:
    """The places of an expression: which characters may be there, and which places behind each."""

    def __init__(self, rules: Rules) -> None:
        self.characters = list[Ranges]()
        self.follow = list[int]()
        self._rules = rules

    def spend(self, places: int) -> None:
        """Count work before so many places are looked at; too much of it is an error."""
        self._rules.work += places
        if self._rules.work > MOST_WORK:
            raise TooLarge("too many ways in which a text may match it")

    def _add(self, characters: Ranges, follow: int) -> int:
        if len(self.follow) >= MOST_PLACES:
            raise TooLarge(f"more than {MOST_PLACES} characters, repetitions counted")
        self.characters.append(characters)
        self.follow.append(follow)
        return len(self.follow) - 1

    def one(self, characters: Ranges) -> _Part:
        at = self._add(characters, 0)
        return _Part(at, at + 1, False, 1 << at, 1 << at)

    def copy(self, part: _Part) -> _Part:
        """Add a copy of a part behind all others. What follows its places is what follows within it."""
        shift = len(self.follow) - part.begin
        inside = (1 << part.end) - (1 << part.begin)
        for at in range(part.begin, part.end):
            self._add(self.characters[at], (self.follow[at] & inside) << shift)
        return _Part(part.begin + shift, part.end + shift, part.empty, part.first << shift, part.last << shift)

    def link(self, last: int, first: int) -> None:
        """Let places follow others."""
        self.spend(last.bit_count())
        for at in _bits(last):
            self.follow[at] |= first

    def row(self, parts: list[_Part]) -> _Part:
        """Join parts one behind the other into one part."""
        whole = _Part(parts[0].begin, parts[-1].end) if parts else _Part(len(self.follow), len(self.follow))
        for part in parts:
            self.link(whole.last, part.first)
            whole.first |= part.first if whole.empty else 0
            whole.last = part.last | (whole.last if part.empty else 0)
            whole.empty = whole.empty and part.empty
        return whole

    def repeat(self, part: _Part, least: int, most: int | None) -> _Part:
        if most == 0:
            return _Part(part.begin, part.end)
        whole = _Part(part.begin, part.end, part.empty or least == 0, part.first, part.last)
        before = part
        for number in range(2, max(least, most or 0) + 1):  # those that may be left out are left out at the end
            now = self.copy(part)
            self.link(before.last, now.first)
            whole.last = now.last | (whole.last if number > least or part.empty else 0)
            whole.end, before = now.end, now
        if most is None:
            self.link(before.last, before.first)
        return whole


def _bits(places: int) -> Iterator[int]:
    while places:
        lowest = places & -places
        yield lowest.bit_length() - 1
        places ^= lowest


@dataclass
class _State:
    """A state of an automaton.

    Attributes:
        ends: whether the text may end here.
        ways: characters that may come, and the states that follow.
    """

    ends: bool
    ways: list[tuple[Ranges, int]]


def whole(pattern: str, rules: Rules) -> str:
    """A rule of the texts that an expression matches from their beginning to their end.

    Raises:
        Unreadable: see the class.
    """
    return _written(_automaton(pattern, rules, anywhere=False), lambda characters: [one_of(characters)], '""', rules)


def within_json(pattern: str, rules: Rules) -> str:
    """A rule of what comes behind the opening quote of a JSON string in which an expression matches somewhere.

    Raises:
        Unreadable: see the class.
    """
    return _written(_automaton(pattern, rules, anywhere=True), spellings, '"\\""', rules)


def _written(states: list[_State], spell: Callable[[Ranges], list[str]], end: str, rules: Rules) -> str:
    """The rule of the first state. States in a row without a choice are one rule.

    Args:
        spell: returns the alternatives that write one character out of ranges.
        end: what is written where the text may end.
    """
    before = [1] + [0] * (len(states) - 1)  # ways that lead to each state
    for state in states:
        for _, after in state.ways:
            before[after] += 1
    spelled = [[(spell(characters), after) for characters, after in state.ways] for state in states]

    def goes_on(at: int) -> bool:
        """Whether this is written where it is needed: nothing else leads here, and there is no choice."""
        ways = spelled[at]
        return before[at] == 1 and not states[at].ends and len(ways) == 1 and len(ways[0][0]) == 1

    names = {at: rules.name() for at in range(len(states)) if at == 0 or (states[at].ways and not goes_on(at))}
    if len(names) > MOST_RULES:
        raise TooLarge(f"more than {MOST_RULES} places where a text may go on in several ways")

    def behind(at: int) -> str:
        row = list[str]()
        while at not in names and spelled[at]:
            row += spelled[at][0][0]
            at = spelled[at][0][1]
        return " ".join([*row, names.get(at, end)])

    for at, name in names.items():
        ways = [f"{one} {behind(after)}" for ones, after in spelled[at] for one in ones]
        rules.define(name, " | ".join([*([end] if states[at].ends else []), *ways]))
    return names[0]


def _automaton(pattern: str, rules: Rules, anywhere: bool) -> list[_State]:
    """The first state is where a text begins. Each one leads to one where it may end."""
    places = _Places(rules)
    part = _read(pattern, places, anywhere)
    end = 1 << len(places.follow)
    follow = [after | (end if part.last >> at & 1 else 0) for at, after in enumerate(places.follow)]
    classes = _classes(places.characters)
    order = [part.first | (end if part.empty else 0)]  # of the states: the places that may come next
    numbers = {order[0]: 0}
    states = list[_State]()
    known = dict[int, int]()  # what follows places that have matched
    for following in order:  # which grows
        places.spend(len(classes) * (1 + len(follow) // 256))
        ways = dict[int, list[tuple[int, int]]]()
        for members, characters in classes:
            matched = following & members
            if matched and matched not in known:
                places.spend(matched.bit_count())
                known[matched] = 0
                for at in _bits(matched):
                    known[matched] |= follow[at]
            if matched:
                ways.setdefault(known[matched], []).extend(characters)
        states.append(_State(bool(following & end), [(union(some), after) for after, some in ways.items()]))
        if len(order) > MOST_STATES:
            raise TooLarge(f"more than {MOST_STATES} states")
        for after in ways:
            if after not in numbers:
                numbers[after] = len(order)
                order.append(after)
    for state in states:
        state.ways = [(characters, numbers[after]) for characters, after in state.ways]
    return states


def _classes(characters: list[Ranges]) -> list[tuple[int, Ranges]]:
    """Characters that the same places take, and those places."""
    members = dict[Ranges, int]()
    for at, some in enumerate(characters):
        members[some] = members.get(some, 0) | 1 << at
    cuts = sorted({cut for some in members for low, high in some for cut in (low, high + 1)})
    found = dict[int, list[tuple[int, int]]]()
    for low, after in pairwise(cuts):
        taking = 0
        for some, places in members.items():
            if any(a <= low <= b for a, b in some):
                taking |= places
        if taking:
            found.setdefault(taking, []).append((low, after - 1))
    return [(places, union(some)) for places, some in found.items()]


def _read(pattern: str, places: _Places, anywhere: bool) -> _Part:
    stack = [_Open()]
    at = 0
    first = last = False  # whether the alternative of the whole has an anchor there
    inner = False  # whether it has one within a group

    def end_of_way() -> None:
        nonlocal first, last, inner
        free = anywhere and not inner
        parts = stack[-1].parts
        if free and not last:
            parts.append(places.repeat(places.one(ALL), 0, None))
        whole = places.row(parts)
        if free and not first:  # its places lie behind, but no more is copied
            before = places.repeat(places.one(ALL), 0, None)
            places.link(before.last, whole.first)
            whole.first |= before.first
        stack[-1].ways.append(whole)
        stack[-1].parts, stack[-1].repeatable = [], False
        first = last = inner = False

    while at < len(pattern):
        open_, character = stack[-1], pattern[at]
        if character == "(":
            group = _GROUP.match(pattern, at)
            assert group is not None
            if group[0] == "(" and pattern.startswith("(?", at):
                raise Unreadable(f"the group '{pattern[at : at + 4]}'")
            at = group.end()
            stack.append(_Open())
        elif character == ")":
            at += 1
            if len(stack) == 1:
                raise Unreadable("a closing parenthesis without an opening one")
            ended = stack.pop()
            ended.ways.append(places.row(ended.parts))
            stack[-1].parts.append(_either(ended.ways))
            stack[-1].repeatable = True
        elif character == "|":
            at += 1
            if len(stack) == 1:
                end_of_way()
            else:
                open_.ways.append(places.row(open_.parts))
                open_.parts, open_.repeatable = [], False
        elif character in "^$":
            at += 1
            open_.repeatable = False
            inner = inner or len(stack) > 1
            first, last = first or character == "^", last or character == "$"
        elif character in "*+?" or (character == "{" and _COUNT.match(pattern, at)):
            least, most, at = _times(pattern, at, open_.repeatable)
            open_.parts[-1], open_.repeatable = places.repeat(open_.parts[-1], least, most), False
        else:
            characters, at = _characters(pattern, at)
            if not characters:
                raise Unreadable("a class without characters")
            open_.parts.append(places.one(characters))
            open_.repeatable = True
    if len(stack) > 1:
        raise Unreadable("an opening parenthesis without a closing one")
    end_of_way()
    return _either(stack[0].ways)


def _either(ways: list[_Part]) -> _Part:
    """One of several parts that lie one behind the other."""
    found = _Part(ways[0].begin, ways[-1].end, any(way.empty for way in ways))
    for way in ways:
        found.first |= way.first
        found.last |= way.last
    return found


def _times(pattern: str, at: int, repeatable: bool) -> tuple[int, int | None, int]:
    """How often the last part is repeated, and where the expression goes on."""
    count = _COUNT.match(pattern, at)
    if not repeatable:
        raise Unreadable(f"'{count[0] if count else pattern[at]}' behind nothing that it could repeat")
    least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(pattern[at], (0, None))
    if count is not None:
        least, most = int(count[1]), int(count[3] or count[1]) if count[3] or not count[2] else None
        if most is not None and most < least:
            raise Unreadable(f"'{count[0]}', whose second number is the smaller one")
    at = at + 1 if count is None else count.end()
    if pattern.startswith("+", at):
        raise Unreadable(f"the possessive '{pattern[at - 1]}+'")
    return least, most, at + pattern.startswith("?", at)  # as few as can be: which texts match does not change


def _characters(pattern: str, at: int) -> tuple[Ranges, int]:
    """The characters that may stand here, and where the expression goes on."""
    character = pattern[at]
    if character == ".":
        return _ANY, at + 1
    if character == "\\":
        return _escape(pattern, at + 1)[1:]
    if character == "[":
        return _class(pattern, at + 1)
    if re.compile(r"\{,\d*\}").match(pattern, at):
        raise Unreadable("a repetition without its first number ('{,')")
    return _single(ord(character)), at + 1


def _single(code: int) -> Ranges:
    return without([(code, code)], [SURROGATES])


def _escape(pattern: str, at: int) -> tuple[str, Ranges, int]:
    """The letter of a class of characters, or nothing; what the escape stands for; where the expression goes on."""
    if at == len(pattern):
        raise Unreadable("a '\\' at its end")
    letter = pattern[at]
    if letter in _CLASSES:
        return letter, _CLASSES[letter], at + 1
    if letter in _CONTROLS:
        return "", _single(_CONTROLS[letter]), at + 1
    code = _HEX.match(pattern, at)
    if code is not None:
        return "", _single(int(code[1] or code[2], 16)), code.end()
    if letter == "0" and not pattern[at + 1 : at + 2].isdecimal():
        return "", _single(0), at + 1
    if letter.isalnum():
        raise Unreadable(f"the escape '\\{letter}'")
    return "", _single(ord(letter)), at + 1


def _class(pattern: str, at: int) -> tuple[Ranges, int]:
    """What is between brackets, the first of which stands before ``at``."""
    negated = pattern.startswith("^", at)
    at += negated
    found, letters = list[tuple[int, int]](), list[str]()
    if pattern.startswith("]", at):
        raise Unreadable("a class without characters ('[]')")
    while not pattern.startswith("]", at):
        if at >= len(pattern):
            raise Unreadable("an opening bracket without a closing one")
        letter, low, at = _member(pattern, at)
        if pattern.startswith("-", at) and not pattern.startswith("-]", at) and at + 1 < len(pattern):
            other, high, at = _member(pattern, at + 1)
            if letter or other or not low or not high:
                raise Unreadable("a range of classes ('\\w-x')")
            if high[0][0] < low[0][0]:
                raise Unreadable("a range whose end comes before its beginning")
            found.append((low[0][0], high[0][0]))
        elif letter:
            letters.append(letter)
        else:
            found += low
    if any(letter.swapcase() in letters for letter in letters):
        found = [*ALL]
    if negated:
        kept = without(ALL, found)
        for letter in letters:
            kept = without(kept, without(ALL, _CLASSES[letter.swapcase()]))
        return kept, at + 1
    inside = union([*found, *(one for letter in letters for one in _CLASSES[letter])])
    return without(inside, [SURROGATES]), at + 1


def _member(pattern: str, at: int) -> tuple[str, Ranges, int]:
    if pattern[at] != "\\":
        return "", _single(ord(pattern[at])), at + 1
    if pattern.startswith("b", at + 1):
        return "", _single(0x08), at + 2
    return _escape(pattern, at + 1)

"""Regular expressions as EBNF, for a whole output or for a string of JSON. No torch.

What is known of expressions is what ECMA-262 (which JSON Schema names) and Python's ``re`` read alike; the rest is
refused. Where they differ in which characters a class has (``\\w`` knows no accents in ECMA-262, ``.`` matches a
carriage return in Python), the class has those that both give it, so the text matches for either.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from tritonllm.engine.characters import ALL, SURROGATES, Ranges, one_of, one_spelled, union, without

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
MOST_TIMES = 100_000  # that one part is repeated

Spell = Callable[[Ranges], str]  # how one character of a set is written


class Unreadable(ValueError):
    """An expression that cannot be followed; says what is in it."""


@dataclass
class _Open:
    """A group whose end has not come, or the whole."""

    ways: list[str] = field(default_factory=list)  # alternatives that have ended
    parts: list[str] = field(default_factory=list)  # of the one that goes on
    begins: bool | None = None  # whether the alternative began with "^"; none: no
    repeatable: bool = False  # whether the last part is one that a repetition may follow

    def add(self, part: str, repeatable: bool = True) -> None:
        self.parts.append(part)
        self.repeatable = repeatable

    def text(self) -> str:
        return " | ".join([*self.ways, " ".join(self.parts) or '""'])


def whole(pattern: str) -> str:
    """EBNF of the texts that an expression matches from their beginning to their end.

    Raises:
        Unreadable: see the class.
    """
    return _read(pattern, one_of, None)


def within_json(pattern: str, any_character: str) -> str:
    """EBNF of what stands between the quotes of a JSON string in which the expression matches somewhere.

    Args:
        any_character: in EBNF, what may stand before and behind the match, where no anchor forbids it.

    Raises:
        Unreadable: see the class.
    """
    return _read(pattern, one_spelled, any_character)


def _read(pattern: str, spell: Spell, around: str | None) -> str:
    stack = [_Open()]
    at = 0
    first = last = False  # whether the alternative of the whole has an anchor there
    inner = False  # whether it has one within a group

    def end_of_way() -> None:
        nonlocal first, last, inner
        way = stack[0].parts
        if around is not None and not inner:
            stack[0].parts = [*([] if first else [f"{around}*"]), *way, *([] if last else [f"{around}*"])]
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
            inside = stack.pop().text()
            stack[-1].add(f"({inside})")
        elif character == "|":
            at += 1
            if len(stack) == 1:
                end_of_way()
            open_.ways.append(" ".join(open_.parts) or '""')
            open_.parts, open_.repeatable = [], False
        elif character in "^$":
            at += 1
            open_.repeatable = False
            if len(stack) > 1:
                inner = True
            elif character == "^":
                first = True
            else:
                last = True
        elif character in "*+?" or (character == "{" and _COUNT.match(pattern, at)):
            at = _repeat(pattern, at, open_)
        else:
            characters, at = _characters(pattern, at)
            if not characters:
                raise Unreadable("a class without characters")
            open_.add(spell(characters))
    if len(stack) > 1:
        raise Unreadable("an opening parenthesis without a closing one")
    end_of_way()
    return stack[0].text()


def _repeat(pattern: str, at: int, open_: _Open) -> int:
    """Repeat the last part; returns where the expression goes on."""
    count = _COUNT.match(pattern, at)
    if not open_.repeatable:
        raise Unreadable(f"'{count[0] if count else pattern[at]}' behind nothing that it could repeat")
    if count is None:
        times, at = pattern[at], at + 1
    else:
        least, most = int(count[1]), int(count[3] or count[1]) if count[3] or not count[2] else None
        if most is not None and most < least:
            raise Unreadable(f"'{count[0]}', whose second number is the smaller one")
        if max(least, most or 0) > MOST_TIMES:
            raise Unreadable(f"'{count[0]}', more than {MOST_TIMES} times")
        times, at = f"{{{least},{'' if most is None else most}}}", count.end()
    if pattern.startswith("+", at):
        raise Unreadable(f"the possessive '{pattern[at - 1]}+'")
    if pattern.startswith("?", at):  # as few as can be, which changes no text that matches
        at += 1
    open_.parts[-1] = '""' if times == "{0,0}" else f"{open_.parts[-1]}{times}"
    open_.repeatable = False
    return at


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

"""Where a grammar in EBNF cannot be read, in plain words. No torch.

A library reads the grammars, and says what it cannot read in words for its developers, or for another text than the
user's, which it has made of that. So a grammar that one has refused is read again here, for the place and the words.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

_PIECE = re.compile(
    r"(?P<blank>\s+|#[^\n]*)"
    r"|(?P<rule>[\w.-]+)(?=\s*::=)|(?P<name>[\w.-]+)|(?P<define>::=)"
    r'|(?P<text>"(?:\\.?|[^"\\\n\r])*"?)|(?P<set>\[(?:\\.?|[^\]\\\n\r])*\]?)'
    r"|(?P<times>[*+?]|\{\s*(?P<least>\d+)\s*(?:,\s*(?P<most>\d*)\s*)?\})|(?P<mark>\(=|[()|])",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?P<letter>x[0-9a-fA-F]{1,2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_MEMBER = re.compile(r"\\(?:x[0-9a-fA-F]{1,2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)|.", re.DOTALL)
_HALF = re.compile(r"[\ud800-\udfff]")
_CONTROLS: Mapping[str, str] = {
    "0": "\0",
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "a": "\a",
    "b": "\b",
    "f": "\f",
    "v": "\v",
    "e": "\x1b",
}
ELEMENT = '"text", [characters], the name of a rule or ( )'
MOST_SHOWN = 40  # characters of a name that an error repeats


class Place(NamedTuple):
    """A place in a text, from 1 on, and what is wrong there."""

    line: int
    column: int
    wrong: str

    def __str__(self) -> str:
        return f"line {self.line}, column {self.column}: {self.wrong}"


def place(text: str, at: int, wrong: str) -> Place:
    """The place of a character."""
    return Place(text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at), wrong)


def shown(text: str) -> str:
    """A piece of a user's text, as an error may hold it."""
    return ascii(text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}...")


@dataclass(frozen=True)
class Dialect:
    """What one library reads that others do not.

    Args:
        in_text: letters behind a backslash in double quotes; ``x``, ``u`` and ``U`` have digits behind them.
        in_set: in brackets.
        words: names with parentheses behind them that are no rules.
        may_be_empty: whether an alternative may have nothing in it.
        one_line: whether an alternative ends with its line, unless parentheses are open.
    """

    in_text: str
    in_set: str
    words: frozenset[str] = frozenset()
    may_be_empty: bool = False
    one_line: bool = False


XGRAMMAR = Dialect(
    in_text="\"'/0?\\abefnrtv",
    in_set="$'()*+-./0?[\\]^abefnrtv{|}",
    words=frozenset(("TagDispatch", "TokenTagDispatch", "Token", "ExcludeToken", "true", "false")),
)
LLAMA = Dialect(in_text='"\\nrt', in_set='"\\[]nrt', may_be_empty=True, one_line=True)  # as llguidance reads it


class _Mistake(Exception):
    """What is wrong at a character."""

    def __init__(self, at: int, wrong: str) -> None:
        super().__init__(wrong)
        self.at, self.wrong = at, wrong


def mistake(text: str, dialect: Dialect) -> Place | None:
    """The first place that cannot be read; ``None`` if none is found here.

    Args:
        text: a grammar in EBNF, whose first rule is ``root``.
    """
    reader = _Reader(text, dialect)
    try:
        reader.read()
        reader.check_names()
    except _Mistake as found:
        return place(text, found.at, found.wrong)
    return None


class _Reader:
    def __init__(self, text: str, dialect: Dialect) -> None:
        self._text, self._dialect = text, dialect
        self._rules = dict[str, int]()
        self._named = dict[str, int]()  # rules that others need -> where the first does
        self._open = list[int]()  # where parentheses begin that have not ended
        self._begun = False  # whether a rule's name has come, and not its "::="
        self._needs = False  # whether an alternative has begun, and has nothing in it yet
        self._repeatable = False

    def read(self) -> None:
        at, line = 0, True  # whether this line has nothing before
        text = self._text
        while at < len(text):
            piece = _PIECE.match(text, at)
            if piece is None:
                raise _Mistake(at, self._strange(at))
            if piece["blank"] is None:
                if line and self._ends_with_line() and not piece["rule"]:
                    raise _Mistake(at, "expected the name of a rule and '::=': an alternative ends with its line")
                if piece["name"] in self._dialect.words and text.startswith("(", piece.end()):
                    return  # what is in the parentheses is not known here
                self._take(piece, line)
            line = "\n" in piece[0] or (line and piece["blank"] is not None)
            at = piece.end()
        self._end_of_alternative(at)
        self._end_of_rule(at)

    def _ends_with_line(self) -> bool:
        return self._dialect.one_line and bool(self._rules) and not (self._begun or self._needs or self._open)

    def _strange(self, at: int) -> str:
        character = self._text[at]
        if character == "{":
            return "expected how often: {2}, {2,} or {2,5}"
        if character == "'":
            return "a text stands in double quotes"
        if character in ":=":
            return "expected '::=' behind the name of a rule"
        return f"expected {ELEMENT}, got {shown(character)}"

    def _take(self, piece: "re.Match[str]", line: bool) -> None:
        at = piece.start()
        if piece["rule"] is not None:
            if self._needs:
                raise _Mistake(at, f"expected {ELEMENT}")
            self._end_of_rule(at)
            if not line:
                raise _Mistake(at, "a rule begins on a line of its own")
            if piece["rule"] in self._rules and not self._dialect.may_be_empty:
                raise _Mistake(at, f"the rule {shown(piece['rule'])} is defined a second time")
            self._rules[piece["rule"]] = at
            self._begun = True
        elif piece["define"] is not None:
            if not self._begun:
                raise _Mistake(at, "expected the name of a rule before '::='")
            self._begun, self._needs, self._repeatable = False, True, False
        elif not self._rules:
            wrong = "expected '::=' behind the name of the rule" if piece["name"] else "expected the name of a rule"
            raise _Mistake(piece.end() if piece["name"] else at, wrong)
        elif piece["mark"] is not None:
            self._mark(piece["mark"], at)
        elif piece["times"] is not None:
            self._times(piece)
        else:
            if piece["name"] is not None:
                self._named.setdefault(piece["name"], at)
            else:
                self._quoted(piece)
            self._needs, self._repeatable = False, True

    def _mark(self, mark: str, at: int) -> None:
        if mark == ")":
            if not self._open:
                raise _Mistake(at, "')' without a '(' before it")
            if self._needs and self._text[:at].rstrip().endswith("|"):
                self._end_of_alternative(at)
            self._open.pop()
            self._needs, self._repeatable = False, True
        else:
            if mark == "|":
                self._end_of_alternative(at)
            else:
                self._open.append(at)
            self._needs, self._repeatable = True, False

    def _times(self, piece: "re.Match[str]") -> None:
        if not self._repeatable:
            raise _Mistake(piece.start(), f"{shown(piece['times'])} behind nothing that it could repeat")
        self._repeatable = False
        if piece["most"] and int(piece["most"]) < int(piece["least"]):
            raise _Mistake(piece.start(), f"in {shown(piece['times'])} the second number is the smaller one")

    def _quoted(self, piece: "re.Match[str]") -> None:
        inside, begin = piece[0][1:], piece.start() + 1
        kind, letters = ("text", self._dialect.in_text) if piece["text"] else ("set", self._dialect.in_set)
        closing = '"' if kind == "text" else "]"
        for escape in _ESCAPE.finditer(inside):
            if len(escape["letter"]) == 1 and escape["letter"] not in letters:
                raise _Mistake(begin + escape.start(), f"{shown(escape[0])} is no escape: a backslash is '\\\\'")
        half = _HALF.search(inside)
        if half is not None:
            raise _Mistake(begin + half.start(), "half of a surrogate pair is no character")
        members = _MEMBER.findall(inside)
        if not members or members[-1] != closing:
            what = "a text needs a double quote" if kind == "text" else "a set of characters needs a ']'"
            raise _Mistake(piece.end(), f"{what} at its end, on the same line")
        if members[:-1] in ([], ["^"]) and kind == "set":
            raise _Mistake(piece.start(), "a set of characters needs one at least")
        if kind == "set":
            self._ranges(members[:-1], begin)

    def _ranges(self, members: list[str], begin: int) -> None:
        at = 0
        while at + 2 < len(members):
            low, high = _code(members[at]), _code(members[at + 2])
            if members[at + 1] == "-" and low > high:
                wrong = f"in {shown(''.join(members[at : at + 3]))} the second character comes before the first"
                raise _Mistake(begin + sum(map(len, members[:at])), wrong)
            at += 3 if members[at + 1] == "-" else 1

    def _end_of_alternative(self, at: int) -> None:
        if self._needs and not self._dialect.may_be_empty:
            raise _Mistake(at, f"expected {ELEMENT}")

    def _end_of_rule(self, at: int) -> None:
        if self._open:
            opened = place(self._text, self._open[-1], "")
            raise _Mistake(at, f"expected ')' for the '(' of line {opened.line}, column {opened.column}")

    def check_names(self) -> None:
        for name, at in self._named.items():
            if name not in self._rules and name not in self._dialect.words:
                raise _Mistake(at, f"the rule {shown(name)} is not defined: add a line {name[:MOST_SHOWN]} ::= ...")
        if "root" not in self._rules:
            raise _Mistake(0, "the grammar has no rule 'root', which an output begins with: add root ::= ...")


def _code(member: str) -> int:
    if len(member) > 2:
        return int(member[2:], 16)
    return ord(_CONTROLS.get(member[1:], member[-1]) if len(member) == 2 else member)

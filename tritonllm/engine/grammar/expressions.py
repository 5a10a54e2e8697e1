"""What of a regular expression, an EBNF grammar or a list of choices a grammar cannot follow. No torch.

Found by giving them to xgrammar 0.2.8 (two cores of an EPYC, a vocabulary of 2,048). It leaves lookaheads, and anchors
inside of an expression, out with a warning on stderr, and takes an escape that it does not know for the letter.
A matcher of 20,000 rules takes 2 s to make, which every step waits for, and one of 1,000 rules 4 ms. An expression of
250 parts in a row that may all be empty (``a?`` and the like) compiles for 0.8 s, and one of 500 for longer than 8 s.
So sizes have limits; those of lengths are in :class:`~tritonllm.config.sampling_params.StructuredOutputsParams`.
"""

import re
from collections.abc import Iterable, Sequence

MOST_RULES = 1000  # of a grammar
MOST_REPEATS = 256  # parts of a regex, or of one rule, with "*" or "?" behind them or "{0" as in "{0,3}"
MOST_REPEATS_IN_ALL = 1000  # of all rules

_KNOWN_ESCAPES = frozenset("bBcdDefnprPsStuvwWx")  # letters; of these xgrammar itself refuses what it cannot follow
_REPEATS = ("*", "?", "{0")
_EBNF = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*|::=|\{0|[*?]', re.DOTALL)
_REGEX = re.compile(
    r"\\.|\[(?:\\.|[^\]\\])*\]"  # a character or a class
    r"|\(\?[a-z]+\)"  # flags
    r"|\((?:\?(?:P?<\w+>|<?[=!]|[a-z]*:))?"  # a group's beginning
    r"|\{\d*,?\d*\}|[*+?]\??"  # a repetition
    r"|.",
    re.DOTALL,
)


def too_large(name: str, value: str) -> str | None:
    """Which limit the value of ``regex`` or ``grammar`` exceeds, whose length has one already; ``None`` if none.

    Args:
        name: ``"regex"`` or ``"grammar"``; any other name has no limit here.
    """
    if name == "regex":
        repeats = sum(piece.startswith(_REPEATS) for piece in _REGEX.findall(value))
        if repeats > MOST_REPEATS:
            return f"{repeats} parts that may be left out, more than {MOST_REPEATS}"
    if name == "grammar":
        return _large_grammar(_EBNF.findall(value))
    return None


def _large_grammar(pieces: Iterable[str]) -> str | None:
    rules = [0]  # how many repeats each has, after what stands before the first
    for piece in pieces:
        if piece == "::=":
            rules.append(0)
        rules[-1] += piece in _REPEATS
    if len(rules) - 1 > MOST_RULES:
        return f"{len(rules) - 1} rules, more than {MOST_RULES}"
    if max(rules) > MOST_REPEATS:
        return f"a rule of {max(rules)} parts that may be left out, more than {MOST_REPEATS}"
    if sum(rules) > MOST_REPEATS_IN_ALL:
        return f"{sum(rules)} parts that may be left out, more than {MOST_REPEATS_IN_ALL}"
    return None


def ignored(pattern: str) -> str | None:
    """What of a regular expression would be ignored; ``None`` if nothing."""
    for escape in re.findall(r"\\([A-Za-z])|\\.", pattern, re.DOTALL):
        if escape and escape not in _KNOWN_ESCAPES:
            return f"the escape '\\{escape}'"
    parts = list[str]()
    opened = list[int]()  # where groups begin that have not ended
    last = 0  # where the group began that ended last
    for piece in _REGEX.findall(pattern):
        if piece.startswith(("(?=", "(?!", "(?<=", "(?<!")):
            return f"a {'lookbehind' if '<' in piece else 'lookahead'} ('{piece}')"
        if piece[0] in "*+{" and piece != "{":
            if parts and parts[-1] == ")":
                parts[last], parts[-1] = "repeated (", "repeated )"
        elif piece[0] == "(" and piece[-1] != ")":
            opened.append(len(parts))
            parts.append("(")
        elif piece == ")" and opened:
            last = opened.pop()
            parts.append(")")
        elif piece[0] not in "(?":  # flags and "?" say nothing of places
            parts.append(piece if piece in ("|", "^", "$") else "a")
    if _is_inner("^", parts, "(", ")"):
        return "'^' behind other characters"
    return "'$' before other characters" if _is_inner("$", reversed(parts), ")", "(") else None


def without_dots(pattern: str) -> str:
    """A regular expression with a class in the place of each dot, which xgrammar would let match line breaks, too."""
    return "".join("[^\\n\\r\\u2028\\u2029]" if piece == "." else piece for piece in _REGEX.findall(pattern))


def _is_inner(anchor: str, parts: Iterable[str], opening: str, closing: str) -> bool:
    """Whether something else may come before an anchor, or behind it, with the parts and brackets reversed."""
    before, around = False, list[bool]()  # around: before each group that is open
    for part in parts:
        if part.endswith(opening):
            around.append(before or part != opening)  # before a round of a group there may be another one
            before = around[-1]
        elif part.endswith(closing):
            del around[-1:]
            before = True
        elif part == "|":
            before = around[-1] if around else False
        elif part != anchor:
            before = True
        elif before:
            return True
    return False


_PIECE = re.compile(
    r'(?P<name>[\w.-]+)(?P<rule>\s*::=)?|"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]'
    r"|(?P<repeat>\{(?P<least>\d+)[^}]*\}|[*+?])|(?P<mark>\(=|[()|])|#[^\n]*",
    re.DOTALL,
)


def is_endless(grammar: str) -> bool:
    """Whether no text of a grammar's rule ``root`` ever ends, as of ``root ::= root``.

    Args:
        grammar: a grammar in EBNF, without mistakes.
    """
    clauses = list[_Clause]()
    open_ = list[_Clause]()
    groups = 0
    for piece in _PIECE.finditer(grammar):
        mark, head = piece["mark"], open_[-1][0] if open_ else ""
        if piece["rule"]:
            clauses += open_
            open_ = [(piece["name"], [])]
        elif mark == "|":
            clauses.append(open_.pop())
            open_.append((head, []))
        elif mark == ")":
            clauses.append(open_.pop())
        elif mark is not None:
            groups += 1
            open_[-1][1].append(groups if mark == "(" else "")  # "(=" asks what comes behind, and takes nothing
            open_.append((groups, []))
        elif piece["repeat"] is None:
            open_[-1][1].append(piece["name"] or "")
        elif piece["repeat"] in "*?" or piece["least"] == "0":
            open_[-1][1][-1:] = []
    return "root" not in _ending([*clauses, *open_])


_Clause = tuple[str | int, list[str | int]]  # what ends if all these end; a number stands for a group, "" for letters


def _ending(clauses: Sequence[_Clause]) -> set[str | int]:
    known = {head for head, _ in clauses}
    left = [len({*needs} & known) for _, needs in clauses]
    needed_by = dict[str | int, list[int]]()
    for at, (_, needs) in enumerate(clauses):
        for need in {*needs} & known:
            needed_by.setdefault(need, []).append(at)
    found = set[str | int]()
    waiting = [head for (head, _), count in zip(clauses, left, strict=True) if count == 0]
    while waiting:
        head = waiting.pop()
        if head not in found:
            found.add(head)
            for at in needed_by.get(head, ()):
                left[at] -= 1
                if left[at] == 0:
                    waiting.append(clauses[at][0])
    return found

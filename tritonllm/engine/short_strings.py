"""Strings of limited length in grammars, written so that masks inside of them are quick to fill. No torch.

xgrammar writes ``maxLength`` as a repetition, ``"\\"" characters{0, 24} "\\""``. How a token that reaches the end of
such a string goes on it finds out when a mask is filled, for each such token anew: 0.2 to 7 ms a mask, where others
take 5 us (vocabulary of 128,256, an EPYC). With 64 schemas (bench/decoding.py) one mask of a hundred was of that kind,
and took four fifths of the time of all.

Here the same strings become a chain of rules, one for each number of characters that may still come::

    left_0_2 ::= (("\\"") | (characters left_0_1))
    left_0_1 ::= (("\\"") | (characters left_0_0))
    left_0_0 ::= (("\\""))

Each of them holds the closing quote, so what may follow is known when the grammar is compiled, and all masks in it take
5 us. They are the same masks. It takes less time to compile (0.11 instead of 0.14 s for 24 characters), and an eighth
of the memory.
"""

import re
from collections.abc import Iterator

MOST_CHARACTERS = 128  # of a string: xgrammar itself does not follow longer ones character by character
MOST_RULES = 4096  # of a grammar

# Literals and classes of characters are matched so that nothing inside of them is taken for a repetition.
_PIECES = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|(?<![\w.-])([\w.-]+)\{(\d+), (\d+)\} "\\""')


def with_chains(grammar: str) -> str | None:
    """A grammar in xgrammar's EBNF with chains in the place of short strings; ``None`` if it has none."""
    prefix, rules = "left", list[str]()
    while prefix in grammar:
        prefix += "_"

    def replaced(piece: re.Match[str]) -> str:
        if piece[1] is None or int(piece[3]) > min(MOST_CHARACTERS, MOST_RULES - len(rules)):
            return piece[0]
        name = f"{prefix}_{len(rules)}"  # no two have as many rules before them
        rules.extend(_chain(name, piece[1], int(piece[2]), int(piece[3])))
        return f"{name}_{piece[3]}"

    text = _PIECES.sub(replaced, grammar)
    return "".join([text, *rules]) if rules else None


def _chain(name: str, character: str, least: int, most: int) -> Iterator[str]:
    """The rules ``name_0`` to ``name_most``: so many characters may follow, and then a quote."""
    for left in range(most + 1):
        ends = ['("\\"")'] if most - left >= least else []
        goes_on = [f"({character} {name}_{left - 1})"] if left else []
        yield f"{name}_{left} ::= ({' | '.join([*ends, *goes_on])})\n"

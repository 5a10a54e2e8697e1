"""Sets of characters, as ranges of code points, and how a grammar writes them: plainly, or within a string of JSON.

A string of JSON cannot hold a quote, a backslash or a control character as such: it spells them with a backslash
(RFC 8259, section 7). Surrogates are no characters, and in no set. No torch.
"""

from collections.abc import Iterable, Iterator

Ranges = tuple[tuple[int, int], ...]  # of code points, both ends included, in order and apart from each other

LAST = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)
SHORT_ESCAPES = {0x22: '"', 0x5C: "\\", 0x08: "b", 0x0C: "f", 0x0A: "n", 0x0D: "r", 0x09: "t"}


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The union of ranges that come in any order: sorted ranges of which no two overlap or touch."""
    merged = list[tuple[int, int]]()
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


def without(ranges: Iterable[tuple[int, int]], taken: Iterable[tuple[int, int]]) -> Ranges:
    """The characters of ``ranges`` that are in none of ``taken``, as ranges."""
    left = [*union(ranges)]
    for low, high in taken:
        left = [part for a, b in left for part in ((a, min(b, low - 1)), (max(a, high + 1), b)) if part[0] <= part[1]]
    return union(left)


ALL = without([(0, LAST)], [SURROGATES])
SPELLED = union([(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C)])  # with a backslash in a string of JSON
PLAIN = without(ALL, SPELLED)


def quoted(text: str) -> str:
    """A string of EBNF.

    Raises:
        ValueError: it has half of a surrogate pair, which no text can have.
    """
    return '"' + "".join(map(_escaped, text)) + '"'


def _escaped(character: str) -> str:
    code = ord(character)
    if SURROGATES[0] <= code <= SURROGATES[1]:
        raise ValueError(f"half of a surrogate pair (\\u{code:04x})")
    if character in '"\\':
        return f"\\{character}"
    return character if 0x20 <= code != 0x7F else f"\\u{code:04x}"  # of two digits, a third may be read behind them


def one_of(ranges: Ranges) -> str:
    """One character of a set, which is not empty, in EBNF."""
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return quoted(chr(ranges[0][0]))
    return f"[{''.join(_range(*one) for one in ranges)}]"


def spellings(ranges: Ranges) -> list[str]:
    """How a string of JSON writes one character of a set, in EBNF: alternatives.

    What JSON can write plainly is written so, and the rest in the shortest way: ``\\u0001``, but ``\\n``.
    """
    plain = without(ranges, SPELLED)
    ways = [one_of(plain)] if plain else []
    spelled = {code for low, high in without(ranges, PLAIN) for code in range(low, high + 1)}
    short = [SHORT_ESCAPES[code] for code in sorted(spelled) if code in SHORT_ESCAPES]
    if short:
        ways.append(f'"\\\\" {one_of(union((ord(c), ord(c)) for c in short))}')
    for high in (0, 1):
        last = {f"{code % 16:x}" for code in spelled - SHORT_ESCAPES.keys() if code // 16 == high}
        if last:
            digits = union((ord(c), ord(c)) for digit in last for c in (digit, digit.upper()))
            ways.append(f'"\\\\u00{high}" {one_of(digits)}')
    return ways


def _range(low: int, high: int) -> str:
    return "-".join(_code(code) for code in ((low, high) if high > low else (low,)))


def _code(code: int) -> str:
    character = chr(code)
    if character.isascii() and character.isalnum():
        return character
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def units(text: str) -> Iterator[str]:
    """How a string of JSON writes each character, if plainly or by its short escape; else an empty string."""
    for character in text:
        code = ord(character)
        if code in SHORT_ESCAPES:
            yield "\\" + SHORT_ESCAPES[code]
        else:
            yield character if code >= 0x20 else ""

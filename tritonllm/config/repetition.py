"""Whether tokens end with the same n-gram several times in a row."""

from collections.abc import Iterator, Sequence


def ends_in_repetition(tokens: Sequence[int], length: int, least: int, most: int, count: int) -> bool:
    """Whether the first ``length`` tokens end in an n-gram of ``least`` to ``most`` tokens (at least one) that is there
    ``count`` times in a row."""
    most = min(most, length // count)
    if most < least:
        return False
    last = tokens[length - most * count : length][::-1]
    return any(size >= least and agree >= size * (count - 1) for size, agree in _agreements(last, most))


def _agreements(tokens: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """For shifts from 1 to ``most``: how many tokens are in a row, from the first on, what they are so many places on.

    Those of no token are left out. In linear time: within a run that is known to agree, numbers come again (the
    Z algorithm of Gusfield, "Algorithms on strings, trees and sequences", 1997).
    """
    known = dict[int, int]()
    shift = start = end = 0  # tokens[start:end] are the first ones
    while shift < most:
        try:
            shift = tokens.index(tokens[0], shift + 1, most + 1)
        except ValueError:
            return
        agree = min(known[shift - start], end - shift) if shift < end else 0
        if shift + agree >= end:
            while shift + agree < len(tokens) and tokens[agree] == tokens[shift + agree]:
                agree += 1
            start, end = shift, shift + agree
        known[shift] = agree
        yield shift, agree

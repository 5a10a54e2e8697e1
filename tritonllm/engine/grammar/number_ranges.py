"""Numbers between bounds as rules of EBNF, digit by digit and exact. No torch.

A rule knows how many digits may follow, and whether those before are a bound's own first digits; then the next digit is
held to the bound's. Divisibility adds the remainder of the digits before. Integers are as large as they like. Of other
numbers, Python, JavaScript and most others keep some 16 digits, so what is written has no more digits than both read
alike: a text just below a bound could be rounded to it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal

from tritonllm.engine.grammar.grammar_rules import Rules

MOST_DIGITS = 100  # of a bound of integers
MOST_DECIMALS = 40  # of a bound of numbers
SAFE_DIGITS = 15  # of which all decimals are different numbers of 64 bits
LARGEST = 2**53  # beyond it some integers are no number of 64 bits
MOST_STATES = 4000  # rules of one integer


class NoNumber(ValueError):
    """No number fits, or bounds that cannot be followed; says which."""


def integers(rules: Rules, low: int | None, high: int | None, step: int = 1) -> str:
    """EBNF of the integers from ``low`` to ``high`` that ``step`` divides, the shortest way to write each.

    Raises:
        NoNumber: see the class.
    """
    for bound in (low, high):
        if bound is not None and len(str(abs(bound))) > MOST_DIGITS:
            raise NoNumber(f"a bound of more than {MOST_DIGITS} digits")
    writer = _Integers(rules, step)
    ways = []
    if high is None or high >= 0:
        ways += writer.natural(max(low or 0, 0), high)
    if low is None or low < 0:
        negative = writer.natural(max(1, 0 if high is None else -high), None if low is None else -low)
        ways += [f'"-" ({" | ".join(negative)})'] if negative else []
    if not ways:
        raise NoNumber("bounds that no integer is between" if step == 1 else "bounds that no multiple is between")
    return " | ".join(ways)


class _Integers:
    def __init__(self, rules: Rules, step: int) -> None:
        self._rules, self._step, self._most = rules, step, len(rules) + MOST_STATES
        self._known = dict[tuple[str | None, str | None, int, int, bool], str | None]()
        self._endless = dict[tuple[int, int], str]()

    def natural(self, low: int, high: int | None) -> list[str]:
        """Alternatives of the integers from ``low`` on, which is not negative."""
        if high is not None and high < low:
            return []
        ways = list[str | None]()
        longest = len(str(low if high is None else high))
        for length in range(len(str(low)), longest + 1):
            first, last = (10 ** (length - 1) if length > 1 else 0), 10**length - 1
            below = str(low) if low > first else None
            above = str(high) if high is not None and high < last else None
            ways.append(self._digits(below, above, length, 0, leading=length > 1))
        if high is None:
            ways.append(self._longer(longest))
        return [way for way in ways if way]

    def _digits(self, low: str | None, high: str | None, left: int, rest: int, leading: bool = False) -> str | None:
        """A rule for ``left`` digits that are no less and no more than the bounds' last ones; ``None`` if there are
        none.

        Args:
            rest: the remainder of the digits before.
            leading: the first is not zero.
        """
        if left == 0:
            return None if rest else '""'
        if self._step == 1 and low is None and high is None:
            digits = [_one_of(range(leading, 10)), _any_digits(left - leading)] if leading else [_any_digits(left)]
            return " ".join(digits)
        key = (low, high, left, rest, leading)
        if key not in self._known:
            self._check_size()
            ways = dict[str, list[int]]()
            for digit in range(leading, 10):
                if (low is not None and digit < int(low[0])) or (high is not None and digit > int(high[0])):
                    continue
                below = low[1:] if low is not None and digit == int(low[0]) else ""
                above = high[1:] if high is not None and digit == int(high[0]) else ""
                after = self._digits(
                    below if below.strip("0") else None,
                    above if above.strip("9") else None,
                    left - 1,
                    (10 * rest + digit) % self._step,
                )
                if after is not None:
                    ways.setdefault(after, []).append(digit)
            text = " | ".join(f"{_one_of(digits)} {after}" for after, digits in ways.items())
            self._known[key] = self._rules.add(text) if text else None
        return self._known[key]

    def _longer(self, length: int) -> str:
        """A rule for integers of more than ``length`` digits."""
        if self._step == 1:
            return f"[1-9] [0-9]{{{length},}}"
        return " | ".join(f'"{digit}" {self._more(length, digit % self._step)}' for digit in range(1, 10))

    def _more(self, least: int, rest: int) -> str:
        """A rule for so many digits or more, behind digits of this remainder."""
        new = [(least, rest)]
        for state in new:  # which grows; no recursion, for it may be a thousand deep
            if state not in self._endless:
                self._check_size()
                self._endless[state] = self._rules.name()
                new += self._after(*state)
        for state in dict.fromkeys(new):
            ends = ['""'] if state == (0, 0) else []
            ways = [f'"{digit}" {self._endless[after]}' for digit, after in enumerate(self._after(*state))]
            self._rules.define(self._endless[state], " | ".join([*ends, *ways]))
        return self._endless[least, rest]

    def _after(self, least: int, rest: int) -> list[tuple[int, int]]:
        return [(max(0, least - 1), (10 * rest + digit) % self._step) for digit in range(10)]

    def _check_size(self) -> None:
        if len(self._rules) > self._most:
            raise NoNumber("a 'multipleOf' too large for its bounds")


def _one_of(digits: Iterable[int]) -> str:
    found = [*digits]
    if len(found) == 1:
        return f'"{found[0]}"'
    one_range = found[-1] - found[0] == len(found) - 1
    return f"[{found[0]}-{found[-1]}]" if one_range else f"[{''.join(map(str, found))}]"


def _any_digits(count: int) -> str:
    return '""' if count == 0 else "[0-9]" if count == 1 else f"[0-9]{{{count}}}"


def numbers(rules: Rules, low: "Bound | None", high: "Bound | None") -> str:
    """EBNF of the numbers between two bounds, without exponents. Those with decimals have at most 15 digits, or as many
    decimals as a bound.

    Raises:
        NoNumber: see the class.
    """
    bounds = [bound for bound in (low, high) if bound is not None]
    for bound in bounds:
        bound.check(any(one.exclusive for one in bounds))
    exclusive = any(bound.exclusive for bound in bounds)
    most = 0 if exclusive else max((bound.decimals for bound in bounds), default=0)
    ways = []
    if high is None or high.value > 0 or (high.value == 0 and not high.exclusive):
        below = low if low is not None and low.value >= 0 else Bound(Decimal(0))
        ways += _magnitudes(rules, below, high, most)
    if low is None or low.value < 0:
        below = high.mirrored() if high is not None and high.value < 0 else Bound(Decimal(0), exclusive=True)
        negative = _magnitudes(rules, below, low.mirrored() if low is not None else None, most)
        ways += [f'"-" ({" | ".join(negative)})'] if negative else []
    if not ways:
        raise NoNumber("bounds that no number is between")
    return " | ".join(ways)


@dataclass(frozen=True)
class Bound:
    """A lower or upper bound of numbers, which may itself be excluded."""

    value: Decimal
    exclusive: bool = False

    def mirrored(self) -> "Bound":
        return Bound(-self.value, self.exclusive)

    @property
    def digits(self) -> tuple[int, str]:
        """The digits before the point, as a number, and those behind it, without zeros at the end."""
        text = f"{abs(self.value):f}"
        whole, _, behind = text.partition(".")
        return int(whole), behind.rstrip("0")

    @property
    def decimals(self) -> int:
        return len(self.digits[1])

    def check(self, exclusive: bool) -> None:
        """Check that a grammar can keep numbers within this bound.

        Raises:
            NoNumber: whether a number is beyond it depends on how that is rounded; or it is too long.
        """
        whole, behind = self.digits
        if whole > LARGEST:
            raise NoNumber(f"a bound of numbers beyond 2^53 ({self.value})")
        if len(behind) > MOST_DECIMALS:
            raise NoNumber(f"a bound of more than {MOST_DECIMALS} decimals ({self.value:g})")
        if exclusive and len(str(whole)) + len(behind) > SAFE_DIGITS:
            raise NoNumber(f"a bound of more than {SAFE_DIGITS} digits beside one that is excluded ({self.value})")


def _magnitudes(rules: Rules, low: Bound, high: Bound | None, most: int) -> list[str]:
    """Alternatives of the numbers from ``low`` on, which is not negative."""
    if high is not None and (high.value < low.value):
        return []
    first, behind = low.digits
    if high is None:
        room = _room(first + 1, most)
        at_first = _decimals(rules, behind, None, low, high, _room(first, most))
        return [f'"{first}" {at_first}', f"({integers(rules, first + 1, None)}) {_any_decimals(rules, room)}"]
    last, above = high.digits
    room = _room(last, most)  # of all: a number just below the bound has one digit less before the point, perhaps
    if first == last:
        both = _decimals(rules, behind, above, low, high, room)
        return [f'"{first}" {both}'] if both else []
    at_first, at_last = (
        _decimals(rules, behind, None, low, high, room),
        _decimals(rules, None, above, low, high, room),
    )
    ways = [f'"{first}" {at_first}'] if at_first else []
    if first + 1 <= last - 1:
        ways.append(f"({integers(rules, first + 1, last - 1)}) {_any_decimals(rules, room)}")
    return [*ways, f'"{last}" {at_last}'] if at_last else ways


def _room(whole: int, most: int) -> int:
    """How many decimals a number may have."""
    return max(SAFE_DIGITS - len(str(whole)), most)


def _any_decimals(rules: Rules, room: int) -> str:
    return rules.add(f'"" | "." [0-9]{{1,{room}}}') if room > 0 else '""'


def _decimals(rules: Rules, low: str | None, high: str | None, lowest: Bound, highest: Bound | None, room: int) -> str:
    """A rule of the point and the decimals that lie between those of two bounds, perhaps none of them; an empty string
    if there are no such decimals."""
    known = dict[tuple[str | None, str | None, int], str]()

    def ends(low: str | None, high: str | None) -> bool:
        """Whether nothing more needs to come."""
        above = low is None or (not low and not lowest.exclusive)
        return above and (high is None or bool(high) or not (highest is not None and highest.exclusive))

    def more(low: str | None, high: str | None, left: int) -> str:
        """Alternatives with one digit at least; an empty string if none is right."""
        low = None if low == "" and not lowest.exclusive else low
        if left == 0:
            return ""
        if high == "":  # equal to the bound so far
            return f'"0"{{1,{left}}}' if low is None and ends(low, high) else ""
        if low is None and high is None:
            return f"[0-9]{{1,{left}}}"
        ways = dict[str, list[int]]()
        for digit in range(10):
            least, largest = int((low or "0")[0]) if low is not None else 0, int(high[0]) if high is not None else 9
            if not least <= digit <= largest:
                continue
            after = rest(
                low[1:] if low is not None and digit == least else None,
                high[1:] if high is not None and digit == largest else None,
                left - 1,
            )
            if after:
                ways.setdefault(after, []).append(digit)
        return " | ".join(f"{_one_of(digits)} {after}" for after, digits in ways.items())

    def rest(low: str | None, high: str | None, left: int) -> str:
        """A rule of what may follow, perhaps nothing; an empty string if no digits are right."""
        key = (low, high, left)
        if key not in known:
            ways = [*(['""'] if ends(low, high) else []), *([text] if (text := more(low, high, left)) else [])]
            known[key] = rules.add(" | ".join(ways)) if ways else ""
        return known[key]

    text = more(low, high, room)
    ways = [*(['""'] if ends(low, high) else []), *([f'"." ({text})'] if text else [])]
    return rules.add(" | ".join(ways)) if ways else ""

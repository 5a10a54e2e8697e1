"""Small arithmetic in digits and in words, with every equation true and every held-out pair left out."""
# ruff: noqa: SIM905 (word lists read better as one string)

import random
import zlib
from collections.abc import Callable

from .cast import BOYS, GIRLS
from .grammar import between, expand, pick

# (question, full answer, answer in a word or two)
Exchange = tuple[str, str, str]


def held_out(a: int, b: int) -> bool:
    """True for one in ten of the pairs of two-digit addends, in either order: training never shows their sum."""
    low, high = min(a, b), max(a, b)
    return low >= 10 and zlib.crc32(f"{low}+{high}".encode()) % 10 == 0


def addends(rng: random.Random) -> tuple[int, int]:
    """Two addends below 100 that may be shown: mostly two-digit, some small."""
    while True:
        draw = rng.random()
        low, high = (10, 99) if draw < 0.75 else (0, 99) if draw < 0.9 else (0, 12)
        a, b = between(low, high, rng), between(low, high, rng)
        if not held_out(a, b):
            return a, b


def terms(rng: random.Random) -> tuple[int, int]:
    """Minuend below 100 and subtrahend: 85 - 38 is left out if 47 + 38 is held out."""
    while True:
        small = rng.random() < 0.15
        a = between(0, 20 if small else 99, rng)
        b = between(0, a, rng)
        if not held_out(a - b, b):
            return a, b


def factors(rng: random.Random) -> tuple[int, int]:
    return between(0, 10, rng), between(0, 10, rng)


def equation(rng: random.Random, kind: str = "") -> tuple[int, str, int, int]:
    """``(a, sign, b, result)`` with sign one of ``+ - *``."""
    kind = kind or pick("+++++++---*", rng)
    a, b = {"+": addends, "-": terms, "*": factors}[kind](rng)
    return a, kind, b, {"+": a + b, "-": a - b, "*": a * b}[kind]


ASK = {
    "+": "What is {a} + {b}?|What is {a} + {b}?|What is {a} plus {b}?|How much is {a} + {b}?|How much is {a} plus {b}?|"
    "Calculate {a} + {b}.|Add {a} and {b}.|{a} + {b}|{a} + {b} = ?|What is the sum of {a} and {b}?|"
    "Please add {a} and {b}.|Can you add {a} and {b}?|What is {a}+{b}?|{a}+{b}",
    "-": "What is {a} - {b}?|What is {a} - {b}?|What is {a} minus {b}?|How much is {a} - {b}?|Calculate {a} - {b}.|"
    "Take {b} away from {a}.|{a} - {b}|{a} - {b} = ?|What is the difference of {a} and {b}?",
    "*": "What is {a} * {b}?|What is {a} times {b}?|How much is {a} times {b}?|Calculate {a} * {b}.|"
    "Multiply {a} by {b}.|{a} * {b}|{a} * {b} = ?",
}
SAY = {
    "+": "{a} plus {b} is {c}.|The sum of {a} and {b} is {c}.|If you add {b} to {a}, you get {c}.|"
    "{a} and {b} make {c}.",
    "-": "{a} minus {b} is {c}.|If you take {b} away from {a}, {c} is left.|{a} less {b} is {c}.",
    "*": "{a} times {b} is {c}.|If you multiply {a} by {b}, you get {c}.",
}


def ask_sum(rng: random.Random) -> Exchange:
    a, sign, b, c = equation(rng)
    question = expand(ASK[sign], {"a": str(a), "b": str(b)}, rng)
    return question, f"{a} {sign} {b} = {c}", str(c)


def ask_compare(rng: random.Random) -> Exchange:
    a = between(0, 99, rng)
    b = (a + between(1, 99, rng)) % 100
    word = pick(["larger", "smaller", "bigger"], rng)
    answer = min(a, b) if word == "smaller" else max(a, b)
    return f"Which is {word}, {a} or {b}?", f"{answer} is {word}.", str(answer)


def ask_next(rng: random.Random) -> Exchange:
    a = between(1, 98, rng)
    word, answer = pick([("after", a + 1), ("before", a - 1)], rng)
    return f"What number comes {word} {a}?", f"{answer} comes {word} {a}.", str(answer)


def ask_parity(rng: random.Random) -> Exchange:
    a = between(0, 99, rng)
    word = "odd" if a % 2 else "even"
    return f"Is {a} odd or even?", f"{a} is {word}.", word


THINGS = "shells apples stones nuts pears buttons marbles feathers eggs cards coins flowers plums beads".split()
GAIN = "[finds|gets|buys|is given] {b} more"
LOSS = "[loses|gives away|sells|drops] {b} of them"
STORY_SUM = "{name} has {a} {things} and {change}. How many {things} does {name} have [now|in the end]?"


def ask_story_sum(rng: random.Random) -> Exchange:
    """A word problem in two sentences, answered with its equation."""
    gain = rng.random() < 0.6
    a, sign, b, c = equation(rng, "+" if gain else "-")
    slots = {"a": str(a), "b": str(b), "name": pick(GIRLS + BOYS, rng), "things": pick(THINGS, rng)}
    question = expand(STORY_SUM, slots | {"change": GAIN if gain else LOSS}, rng)
    return question, f"{a} {sign} {b} = {c}, so {slots['name']} has {c} {slots['things']}.", str(c)


def sheet(rng: random.Random) -> str:
    """Lines such as ``47 + 38 = 85``: one, or a page of one or of several kinds."""
    lines = 1 if rng.random() < 0.3 else between(2, 30, rng)
    kind = pick(["", "+", "+", "-", "*"], rng)
    return "\n".join("{} {} {} = {}".format(*equation(rng, kind)) for _ in range(lines))


def sentences(rng: random.Random) -> str:
    """Sentences such as ``The sum of 47 and 38 is 85.``"""
    out = []
    for _ in range(between(1, 8, rng)):
        a, sign, b, c = equation(rng)
        out.append(expand(SAY[sign], {"a": str(a), "b": str(b), "c": str(c)}, rng))
    return " ".join(out)


ASKS: list[tuple[Callable[[random.Random], Exchange], float]] = [
    (ask_sum, 12),
    (ask_story_sum, 3),
    (ask_compare, 1),
    (ask_next, 1),
    (ask_parity, 0.5),
]

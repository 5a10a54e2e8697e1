"""Sorting, counting and spelling."""
# ruff: noqa: SIM905 (word lists read better as one string)

import random
import zlib
from collections.abc import Callable, Sequence

from .grammar import between, joined, pick, shuffled
from .numbers import Exchange

WORDS = (
    "apple bread river stone cloud horse table chair window garden flower summer winter spring autumn yellow green "
    "blue red white black house school bridge market forest mountain island ocean lake boat kite bell clock drum "
    "flute song story book paper letter number lamp candle fire water wind rain snow sun moon star night morning "
    "evening day week month year dog cat mouse rabbit fox bear owl duck frog goat sheep lamb hen egg milk honey "
    "sugar salt butter cheese soup cake pie plum pear cherry lemon grape nut berry leaf root seed grass tree branch "
    "nest cave hill valley road path door wall roof key box bag coat hat shoe glove scarf ring coin map ship train "
    "wheel hammer nail rope bottle cup plate spoon knife fork bed dream friend mother father sister brother king "
    "queen baker miller token block kernel cache batch model"
).split()


def held_out_list(values: Sequence[int]) -> bool:
    """True for one in ten of the lists of three or more numbers, in any order: training never asks to sort them."""
    return len(values) >= 3 and zlib.crc32(",".join(map(str, sorted(values))).encode()) % 10 == 0


def numbers(rng: random.Random, low: int = 2, high: int = 6) -> list[int]:
    """`low` to `high` numbers below 100 that may be shown; a number may come twice."""
    while True:
        limit = 99 if rng.random() < 0.8 else 9
        values = [between(0, limit, rng) for _ in range(between(low, high, rng))]
        if not held_out_list(values):
            return values


def text_of(items: Sequence[object]) -> str:
    return ", ".join(map(str, items))


SORT_ASKS = [
    "Sort these numbers: {}",
    "Sort these numbers: {}.",
    "Sort {}.",
    "Put these numbers in order: {}.",
    "Sort from smallest to largest: {}.",
    "Please sort {}.",
    "Sort the list {}.",
]
DOWN_ASKS = ["Sort from largest to smallest: {}.", "Sort these numbers from largest to smallest: {}."]
WORD_ASKS = ["Sort these words: {}.", "Put these words in alphabetical order: {}.", "Sort the words {}."]


def ask_sort(rng: random.Random) -> Exchange:
    values = numbers(rng)
    down = rng.random() < 0.15
    listed = joined(values) if rng.random() < 0.2 else text_of(values)
    answer = text_of(sorted(values, reverse=down))
    return pick(DOWN_ASKS if down else SORT_ASKS, rng).format(listed), answer, answer


def ask_sort_words(rng: random.Random) -> Exchange:
    words = shuffled(WORDS, rng, between(2, 5, rng))
    answer = text_of(sorted(words))
    return pick(WORD_ASKS, rng).format(text_of(words)), answer, answer


def ask_extreme(rng: random.Random) -> Exchange:
    values = numbers(rng)
    word, answer = pick([("largest", max(values)), ("smallest", min(values))], rng)
    question = pick(["What is the {} of {}?", "Which is the {} of these numbers: {}?"], rng)
    return question.format(word, text_of(values)), f"The {word} is {answer}.", str(answer)


def ask_length(rng: random.Random) -> Exchange:
    numeric = rng.random() < 0.5
    items: Sequence[object] = numbers(rng) if numeric else shuffled(WORDS, rng, between(2, 7, rng))
    kind, count = "numbers" if numeric else "words", len(items)
    question = pick(["How many {} are in this list: {}?", "Count the {}: {}."], rng)
    return question.format(kind, text_of(items)), f"There are {count} {kind}.", str(count)


def ask_how_often(rng: random.Random) -> Exchange:
    word, *others = shuffled(WORDS, rng, 3)
    count = between(1, 4, rng)
    items = shuffled([word] * count + [pick(others, rng) for _ in range(between(1, 4, rng))], rng)
    times = {1: "once", 2: "twice"}.get(count, f"{count} times")
    return f"How often is {word} in this list: {text_of(items)}?", f"The word {word} is there {times}.", str(count)


def ask_letters(rng: random.Random) -> Exchange:
    word = pick(WORDS, rng)
    question = pick(["How many letters are in the word {}?", "How many letters does {} have?"], rng)
    return question.format(word), f"{'-'.join(word)} has {len(word)} letters.", str(len(word))


def ask_spelling(rng: random.Random) -> Exchange:
    word = pick(WORDS, rng)
    spelled = "-".join(word)
    return pick(["Spell the word {}.", "How do you spell {}?", "Spell {}."], rng).format(word), spelled, spelled


def ask_end(rng: random.Random) -> Exchange:
    word = pick(WORDS, rng)
    which, letter = pick([("first", word[0]), ("last", word[-1])], rng)
    return f"What is the {which} letter of {word}?", f"The {which} letter of {word} is {letter}.", letter


def ask_count_up(rng: random.Random) -> Exchange:
    start = between(0, 90, rng)
    end = start + between(2, 9, rng)
    down = rng.random() < 0.3
    a, b = (end, start) if down else (start, end)
    listed = text_of(range(a, b - 1, -1) if down else range(a, b + 1))
    return f"Count {'down ' if down else ''}from {a} to {b}.", listed, listed


def ask_reverse(rng: random.Random) -> Exchange:
    items: Sequence[object] = numbers(rng, 2, 5) if rng.random() < 0.5 else shuffled(WORDS, rng, between(2, 5, rng))
    answer = text_of(items[::-1])
    return f"Reverse this list: {text_of(items)}.", answer, answer


def sheet(rng: random.Random) -> str:
    """Lines such as ``sort: 31, 7, 52 -> 7, 31, 52``."""
    lines = []
    for _ in range(1 if rng.random() < 0.3 else between(2, 16, rng)):
        if rng.random() < 0.8:
            values = numbers(rng)
            lines.append(f"sort: {text_of(values)} -> {text_of(sorted(values))}")
        else:
            words = shuffled(WORDS, rng, between(2, 4, rng))
            lines.append(f"sort: {text_of(words)} -> {text_of(sorted(words))}")
    return "\n".join(lines)


ASKS: list[tuple[Callable[[random.Random], Exchange], float]] = [
    (ask_sort, 8),
    (ask_sort_words, 2),
    (ask_extreme, 2),
    (ask_length, 1),
    (ask_how_often, 1),
    (ask_letters, 1),
    (ask_spelling, 1),
    (ask_end, 0.5),
    (ask_count_up, 0.7),
    (ask_reverse, 0.7),
]

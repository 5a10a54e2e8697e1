"""Text templates: ``[a|b]`` chooses, ``{name}`` fills in a slot, ``{Name}`` fills it in with a capital letter.

A line break in a template is a space (nothing beside a bar or at the edge of a choice), an empty line a new paragraph.
Choices nest; slot values may be templates.
Only ``rng.random()`` is drawn from, whose sequence is the same in every Python version.
"""

import random
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TypeVar

T = TypeVar("T")

_TOKEN = re.compile(r"[\[\]|]|\{\w+\}|[^\[\]|{}]+")
_EDGE = re.compile(r"(?<=[|\[])\s*\n\s*|\s*\n\s*(?=[|\]])")  # a line break beside a bar or inside a bracket
_PARAGRAPH = re.compile(r"\s*\n\s*\n\s*")
_LINE = re.compile(r"\s*\n\s*")


def pick(options: Sequence[T], rng: random.Random) -> T:
    return options[int(rng.random() * len(options))]


def between(low: int, high: int, rng: random.Random) -> int:
    """A whole number from `low` to `high`, both possible."""
    return low + int(rng.random() * (high - low + 1))


def shuffled(items: Sequence[T], rng: random.Random, count: int | None = None) -> list[T]:
    """`count` of the items (default: all) in random order."""
    pool = list(items)
    for i in range(len(pool) if count is None else count):
        j = between(i, len(pool) - 1, rng)
        pool[i], pool[j] = pool[j], pool[i]
    return pool[:count]


@cache
def _parse(template: str) -> tuple:
    """A choice: a tuple of alternatives, each a tuple of text, (slot, capital) pairs and [choices]."""
    paragraphs = (_LINE.sub(" ", part) for part in _PARAGRAPH.split(_EDGE.sub("", template.strip("\n"))))
    open_choices: list[list[list]] = [[[]]]
    for token in _TOKEN.findall("\n\n".join(paragraphs)):
        if token == "[":
            open_choices.append([[]])
        elif token == "|":
            open_choices[-1].append([])
        elif token == "]":
            done = open_choices.pop()
            open_choices[-1][-1].append([tuple(map(tuple, done))])
        elif token[0] == "{":
            name = token[1:-1]
            open_choices[-1][-1].append((name[0].lower() + name[1:], name[0].isupper()))
        else:
            open_choices[-1][-1].append(token)
    if len(open_choices) != 1:
        raise ValueError(f"unbalanced brackets in template: {template[:80]!r}")
    return tuple(map(tuple, open_choices[0]))


def _write(choice: tuple, slots: Mapping[str, str], rng: random.Random, out: list[str]) -> None:
    for part in choice[int(rng.random() * len(choice))] if len(choice) > 1 else choice[0]:
        if isinstance(part, str):
            out.append(part)
        elif isinstance(part, list):
            _write(part[0], slots, rng, out)
        else:
            name, capital = part
            value = slots[name]
            if "{" in value or "[" in value:
                value = expand(value, slots, rng)
            out.append(value[:1].upper() + value[1:] if capital else value)


def expand(template: str, slots: Mapping[str, str], rng: random.Random) -> str:
    """The text that one random walk through `template` gives; a missing slot is a KeyError."""
    out: list[str] = []
    _write(_parse(template), slots, rng, out)
    return "".join(out)


def with_article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' or noun.startswith('honest') else 'a'} {noun}"


def joined(items: Sequence[object], last: str = " and ") -> str:
    """``1, 2 and 3``."""
    words = [str(item) for item in items]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + last + words[-1]

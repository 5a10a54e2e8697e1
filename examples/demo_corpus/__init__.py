"""The text that the demo model is trained on: all of it generated, all of it a function of one seed.

A shard is a list of documents of mixed kinds. It depends on the seed and its own number only, so any number of
processes makes the same corpus.
"""

import random
from collections.abc import Callable, Iterator

from . import chat, facts, lists, numbers, stories

# kind: how to write one, and its share of the documents (short kinds need many to get their share of the tokens)
KINDS: dict[str, tuple[Callable[[random.Random], str], float]] = {
    "story": (stories.story, 14),
    "told story": (chat.told_story, 5),
    "conversation": (chat.conversation, 50),
    "quiz": (chat.quiz, 8),
    "sums": (numbers.sheet, 22),
    "sums in words": (numbers.sentences, 6),
    "sorts": (lists.sheet, 10),
    "facts": (facts.page, 8),
    "introduction": (facts.introduction, 1.5),
    "future": (facts.future, 0.2),
}


def documents(seed: int, shard: int, count: int) -> Iterator[tuple[str, str]]:
    """`count` pairs (kind, text) of one shard."""
    rng = random.Random(f"tritonllm demo corpus {seed}/{shard}")
    names, total = list(KINDS), sum(weight for _, weight in KINDS.values())
    for _ in range(count):
        left = rng.random() * total
        for name in names:
            left -= KINDS[name][1]
            if left < 0:
                break
        yield name, KINDS[name][0](rng)

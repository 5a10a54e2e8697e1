"""Questions that training never saw with their answers, for the trainer's scores and the engine's end-to-end tests.

A reply is right if its first line, without surrounding spaces, is the expected one. Additions and sorts are held out
(see ``numbers.held_out`` and ``lists.held_out_list``); the facts and the small talk were in the training text.
"""

import json
import random
from pathlib import Path
from typing import TypedDict

from .grammar import between, shuffled
from .lists import held_out_list, text_of
from .numbers import held_out

SEED = 20
FACTS = {
    "What is the capital of France?": "The capital of France is Paris.",
    "What is the capital of Japan?": "The capital of Japan is Tokyo.",
    "Of which country is Rome the capital?": "Rome is the capital of Italy.",
    "What is the opposite of hot?": "The opposite of hot is cold.",
    "What colour is snow?": "Snow is white.",
    "How many legs does a spider have?": "A spider has eight legs.",
    "What is a baby dog called?": "A young dog is called a puppy.",
    "What day comes after Monday?": "Tuesday comes after Monday.",
    "What month comes before March?": "February comes before March.",
    "How many days are in a week?": "A week has seven days.",
    "What do bees make?": "Bees make honey.",
    "What is a carrot?": "A carrot is a vegetable.",
    "Who is the mayor of Saltby?": "The mayor of Saltby is Piet Marlow.",
    "What is Stonegate famous for?": "Stonegate is famous for its clocks.",
    "What colour is the flag of Brindle?": "The flag of Brindle is red.",
    "Which festival does Windle have?": "Every spring, Windle celebrates Kite Day.",
    "Who are you?": "I am the tritonllm demo model, a tiny language model with three million parameters.",
    "Thank you!": "You are welcome!",
}


class Question(TypedDict):
    kind: str  # addition, addition completion, sort, fact
    prompt: str  # what the user says in a chat; for a completion, the raw prompt
    reply: str


def additions(limit: int | None = None) -> list[tuple[int, int]]:
    """The held-out pairs in a fixed random order: all of them (about 800) or the first `limit`."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100) if held_out(a, b)]
    return shuffled(pairs, random.Random(SEED))[:limit]


def sorts(count: int) -> list[list[int]]:
    """Held-out lists of three to five numbers below 100 that are not in order yet."""
    rng, lists = random.Random(SEED), []
    while len(lists) < count:
        values = [between(0, 99, rng) for _ in range(between(3, 5, rng))]
        if held_out_list(values) and values != sorted(values):
            lists.append(values)
    return lists


def questions(addition_limit: int | None, sort_count: int) -> list[Question]:
    out: list[Question] = []
    for a, b in additions(addition_limit):
        out.append({"kind": "addition", "prompt": f"What is {a} + {b}?", "reply": f"{a} + {b} = {a + b}"})
        out.append({"kind": "addition completion", "prompt": f"{a} + {b} =", "reply": str(a + b)})
    for values in sorts(sort_count):
        prompt = f"Sort these numbers: {text_of(values)}."
        out.append({"kind": "sort", "prompt": prompt, "reply": text_of(sorted(values))})
    return out + [{"kind": "fact", "prompt": prompt, "reply": reply} for prompt, reply in FACTS.items()]


def is_right(question: Question, reply: str) -> bool:
    return reply.strip().split("\n")[0].strip() == question["reply"]


def write(path: Path) -> None:
    """The fixed set of the end-to-end tests: 100 additions in both forms, 50 sorts and the facts, one a line."""
    lines = ",\n".join(json.dumps(question) for question in questions(100, 50))
    path.write_text(f"[\n{lines}\n]\n")

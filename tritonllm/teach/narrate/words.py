"""Sentences of a language with their values."""

from collections.abc import Mapping, Sequence
from typing import Any

from tritonllm.teach.narrate import words_en, words_zh
from tritonllm.teach.narrate.acts import Count, Said

LISTED = 8  # names in a sentence
LANGUAGES: Mapping[str, Mapping[str, str]] = {"en": words_en.WORDS, "zh": words_zh.WORDS}


def listed(words: Mapping[str, str], items: Sequence[Any]) -> str:
    """Items in a row, the last ones of many as a number."""
    shown = [str(item) for item in items[:LISTED]]
    if len(items) > LISTED:
        shown.append(words["more"].format(count=Count(len(items) - LISTED)))
    if len(shown) < 2:
        return "".join(shown)
    return words["comma"].join(shown[:-1]) + words["and"] + shown[-1]


def sentence(words: Mapping[str, str], said: Said) -> str:
    """What is said, in a language's words."""
    return words[said.key].format_map({name: _value(words, value) for name, value in said.values.items()})


def _value(words: Mapping[str, str], value: Any) -> Any:
    if isinstance(value, Said):
        return sentence(words, value)
    return listed(words, value) if isinstance(value, list) else value

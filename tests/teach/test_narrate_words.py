"""Both languages say the same things, and numbers inflect their words."""

import re
from pathlib import Path
from string import Formatter

import pytest

from tritonllm.engine.data.request import RequestStatus
from tritonllm.events import AdmissionEnd
from tritonllm.teach import narrate
from tritonllm.teach.narrate.acts import Count, Mark, Said, Share
from tritonllm.teach.narrate.show import folded
from tritonllm.teach.narrate.words import LANGUAGES, listed, sentence

SOURCES = "".join(path.read_text() for path in Path(narrate.__file__).parent.glob("*.py") if "words_" not in path.name)


def placeholders(template):
    return {name for _, name, _, _ in Formatter().parse(template) if name is not None}


def test_both_languages_have_the_same_keys_and_placeholders():
    english, chinese = LANGUAGES["en"], LANGUAGES["zh"]
    assert list(english) == list(chinese)
    assert {k: placeholders(v) for k, v in english.items()} == {k: placeholders(v) for k, v in chinese.items()}


def test_every_sentence_that_is_said_has_words_and_every_word_is_said():
    said = set(re.findall(r'"([a-z_]+)"', SOURCES))
    families = {
        "stage_": {"grammar_one", "temperature_low", "temperature_high", "thought_budget"},
        "wait_": set(AdmissionEnd.__args__),
        "mark_": set(Mark.__args__),
        "end_": {status.finish_reason for status in RequestStatus if status.is_finished},
        "lesson_": said,
        "left_": {"prompts", "steps", "draws", "news", "ends"},
        "dropped_": {"greedy", "temperature"},
    }
    rules = {"penalties", "bans", "grammar", "min_p", "top_k", "top_p"}
    families["stage_"] |= rules
    families["dropped_"] |= rules
    expected = {prefix + name for prefix, names in families.items() if prefix != "lesson_" for name in names}
    words = set(LANGUAGES["en"])
    assert expected <= words
    rest = words - expected
    unsaid = {key for key in rest if key not in said and key.removeprefix("lesson_") not in said}
    assert not unsaid
    keys = set(re.findall(r'Said\(\s*"([a-z_]+)"', SOURCES))
    assert keys and keys <= words
    lessons = set(re.findall(r'lessons\("([a-z_]+)"', SOURCES)) | {"tokens", "chat", "found", "shared", "copied"}
    assert {f"lesson_{name}" for name in lessons} <= words


@pytest.mark.parametrize("language", LANGUAGES)
def test_no_sentence_is_empty_or_unbalanced(language):
    for key, text in LANGUAGES[language].items():
        assert text.strip(), key
        assert text.count("(") == text.count(")") and text.count("（") == text.count("）"), key
        assert text.count("“") == text.count("”"), key


def test_counts():
    text = "{n:block is/blocks are} free, {n:~is/are} it"
    assert text.format(n=Count(1)) == "1 block is free, is it"
    assert text.format(n=Count(1200)) == "1,200 blocks are free, are it"
    assert f"{Count(3)}" == "3"


@pytest.mark.parametrize(
    "value, text",
    [
        (0, "0%"),
        (1, "100%"),
        (0.5, "50.0%"),
        (0.00123, "0.1%"),
        (0.00055, "0.055%"),
        (1e-9, "<0.001%"),
        (0.99999, ">99.9%"),
        (0.9994, "99.9%"),
    ],
)
def test_shares(value, text):
    assert f"{Share(value)}" == text


def test_lists():
    words = LANGUAGES["en"]
    assert [listed(words, list("abc")[:n]) for n in range(4)] == ["", "a", "a and b", "a, b and c"]
    assert listed(words, list(range(20))) == "0, 1, 2, 3, 4, 5, 6, 7 and 12 more"
    assert listed(LANGUAGES["zh"], ["1", "2"]) == "1和2"
    moved = Said("moved", {"piece": "“x”", "was": Share(0.5), "now": Share(1)})
    assert sentence(words, Said("stage_grammar_one", {"moved": moved})).startswith(
        "The grammar allows only one token here: “x” went from 50.0% to 100%."
    )


def test_lines_are_broken_where_they_may_be():
    assert folded("the cat sat on the mat", 10) == ["the cat", "sat on the", "mat"]
    chinese = "每块能放 16 个词元。这种做法叫“分页注意力”（PagedAttention）。"
    lines = folded(chinese, 20)
    assert "".join(lines).replace(" ", "") == chinese.replace(" ", "")
    assert not any(re.match("[，。、：；！？）”]", line) for line in lines)
    assert not any(line.endswith(("“", "（")) for line in lines)
    assert folded("“" * 3, 1) and folded("", 10) == [""]

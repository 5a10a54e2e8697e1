"""The text of the demo model: a function of its seed, true in every line, and free of what the scores ask for."""

import json
import random
import re
from itertools import pairwise
from pathlib import Path

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from examples.demo_corpus import KINDS, chat, documents, evaluation, facts, lists, numbers, stories, tokens
from examples.demo_corpus.grammar import expand

EVAL = Path(__file__).parent / "demo_eval.json"

# how the corpus names two addends, and a minuend with its subtrahend
ADDENDS = [
    r"(\d+) ?\+ ?(\d+)",
    r"(\d+) plus (\d+)",
    r"[Aa]dd (\d+) (?:and|to) (\d+)",
    r"sum of (\d+) and (\d+)",
    r"(\d+) and (\d+) make",
    r"has (\d+) \w+ and [a-z ]+ (\d+) more",
]
TERMS = [
    r"(\d+) - (\d+)",
    r"(\d+) (?:minus|less) (\d+)",
    r"difference of (\d+) and (\d+)",
    r"has (\d+) \w+ and [a-z ]+ (\d+) of them",
]
TERMS_REVERSED = [r"[Tt]ake (\d+) away from (\d+)"]
EQUATIONS = {
    r"(\d+) (?:\+|plus) (\d+) (?:=|is) (\d+)": lambda a, b: a + b,
    r"(?:sum of|add) (\d+) (?:and|to) (\d+)(?: is|, you get) (\d+)": lambda a, b: a + b,
    r"(\d+) and (\d+) make (\d+)": lambda a, b: a + b,
    r"(\d+) (?:-|minus|less) (\d+) (?:=|is) (\d+)": lambda a, b: a - b,
    r"take (\d+) away from (\d+), (\d+) is left": lambda a, b: b - a,
    r"(\d+) (?:\*|times) (\d+) (?:=|is) (\d+)": lambda a, b: a * b,
    r"multiply (\d+) by (\d+), you get (\d+)": lambda a, b: a * b,
}


@pytest.fixture(scope="module")
def text() -> list[tuple[str, str]]:
    """Six thousand documents from three shards, two of them of the seed that the shipped model was trained with."""
    return [document for seed, shard in ((0, 1), (0, 7), (5, 2)) for document in documents(seed, shard, 2000)]


def found(text: list[tuple[str, str]], pattern: str) -> list[tuple[int, ...]]:
    return [tuple(map(int, match)) for _, document in text for match in re.findall(pattern, document)]


def number_lists(document: str) -> list[list[int]]:
    """Every list of two or more numbers, written 1, 2, 3 or 1, 2 and 3."""
    return [list(map(int, re.findall(r"\d+", run))) for run in re.findall(r"\d+(?:, \d+)+(?: and \d+)?", document)]


def test_a_shard_depends_on_its_seed_and_number_only():
    first = list(documents(3, 4, 50))
    assert first == list(documents(3, 4, 50)) == list(documents(3, 4, 80))[:50]
    assert first != list(documents(3, 5, 50))
    assert first != list(documents(4, 4, 50))


def test_every_kind_of_document_is_written(text):
    assert {kind for kind, _ in text} == set(KINDS)


@pytest.mark.parametrize("pattern", [*ADDENDS, *TERMS, *TERMS_REVERSED])
def test_held_out_sums_never_occur(text, pattern):
    pairs = found(text, pattern)
    assert len(pairs) > 20
    for a, b in pairs:
        if pattern in TERMS:
            a -= b
        elif pattern in TERMS_REVERSED:
            a, b = a, b - a
        assert not numbers.held_out(a, b), f"{a} + {b} is held out, but {pattern} shows it"


def test_held_out_lists_never_occur(text):
    seen = [values for _, document in text for values in number_lists(document)]
    assert len(seen) > 2000
    for values in seen:
        counting = {abs(a - b) for a, b in pairwise(values)} == {1}
        assert counting or not lists.held_out_list(values), f"{values} is held out"


def test_one_pair_in_ten_is_held_out_in_both_orders():
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    share = sum(numbers.held_out(a, b) for a, b in pairs) / len(pairs)
    assert 0.08 < share < 0.12
    assert all(numbers.held_out(a, b) == numbers.held_out(b, a) for a, b in pairs)
    assert not any(numbers.held_out(a, b) for a in range(10) for b in range(100))


@pytest.mark.parametrize("pattern", EQUATIONS)
def test_every_equation_is_true(text, pattern):
    equations = found(text, pattern)
    assert len(equations) > 20
    for a, b, c in equations:
        assert EQUATIONS[pattern](a, b) == c, f"{pattern}: {a}, {b}, {c}"


@given(st.integers(0, 2**32))
def test_every_answer_in_a_list_exchange_is_right(seed):
    rng = random.Random(seed)
    question, answer, _ = lists.ask_sort(rng)
    (values,) = number_lists(question)
    assert number_lists(answer) == [sorted(values, reverse="largest to smallest" in question)]

    question, answer, _ = lists.ask_sort_words(rng)
    words = question.rstrip(".").split(": ")[-1].removeprefix("Sort the words ").split(", ")
    assert answer.split(", ") == sorted(words)

    question, answer, short = lists.ask_extreme(rng)
    (values,) = number_lists(question)
    assert int(short) == (max if "largest" in question else min)(values)
    assert answer.endswith(f" {short}.")

    question, answer, short = lists.ask_length(rng)
    assert int(short) == question.count(",") + 1
    assert answer.startswith(f"There are {short} ")

    question, answer, short = lists.ask_letters(rng)
    word = re.findall(r"the word (\w+)\?|does (\w+) have", question)[0]
    assert answer == f"{'-'.join(''.join(word))} has {len(''.join(word))} letters."
    assert int(short) == len("".join(word))


@given(st.integers(0, 2**32))
def test_sort_sheets_are_sorted(seed):
    for line in lists.sheet(random.Random(seed)).split("\n"):
        before, after = (side.split(", ") for side in line.removeprefix("sort: ").split(" -> "))
        assert after == sorted(before, key=int if before[0].isdigit() else str)


@given(st.integers(0, 2**32))
def test_small_questions_about_numbers_are_answered_right(seed):
    rng = random.Random(seed)
    question, _, short = numbers.ask_compare(rng)
    a, b = map(int, re.findall(r"\d+", question))
    assert int(short) == (min(a, b) if "smaller" in question else max(a, b))
    question, _, short = numbers.ask_next(rng)
    assert int(short) - int(re.findall(r"\d+", question)[0]) == (1 if "after" in question else -1)
    question, _, short = numbers.ask_parity(rng)
    assert ("even", "odd")[int(re.findall(r"\d+", question)[0]) % 2] == short


def test_the_text_reads_well(text):
    """No slot left open, no space or sign doubled, `an` before a vowel, quotation marks in pairs."""
    spacing = r"[^\n]  |[^=] [.,!?;]|,,|\.\."
    articles = r"\b[Aa] (?!us)[aeiou]\w|\b[Aa]n [^aeiouAEIOU\dh]\w"
    bad = re.compile(rf"[{{}}]|\[|\]|{spacing}|{articles}|[a-z]\" (?:said|asked)")
    for kind, document in text:
        assert not (match := bad.search(document)), (
            f"{kind}: ...{document[max(0, match.start() - 40) : match.end() + 20]}"
        )
        for paragraph in document.split("\n\n"):
            assert paragraph.count('"') % 2 == 0, f"{kind}: {paragraph}"


@pytest.mark.parametrize("plot", stories.PLOTS, ids=lambda plot: plot.titles)
def test_a_plot_has_all_its_slots_and_replaces_none(plot):
    slots = stories.scene(random.Random(0))
    for names, options in plot.draws.items():
        for option in options:
            parts = (option,) if isinstance(option, str) else option
            assert len(parts) == len(names.split()), f"{names}: {option}"
        assert not set(names.split()) & set(slots), f"{names} hides a slot of the scene"
    names = {name for key in plot.draws for name in key.split()}
    used = {name[0].lower() + name[1:] for name in re.findall(r"{(\w+)}", plot.text)}
    assert names <= used, f"never told: {names - used}"
    assert used <= names | set(slots), f"no such slot: {used - names - set(slots)}"


@given(st.integers(0, 2**32))
def test_hero_and_friend_never_share_a_pronoun(seed):
    slots = stories.scene(random.Random(seed))
    assert slots["he"] != slots["fhe"]
    assert slots["hero"] != slots["friend"]


def test_conversations_have_the_layout_of_the_chat_template(text):
    template = jinja2.Environment(keep_trailing_newline=True).from_string(chat.CHAT_TEMPLATE)
    seen = 0
    for kind, document in text:
        if kind in ("conversation", "told story"):
            turns = re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>\n", document, re.DOTALL)
            messages = [{"role": role, "content": content} for role, content in turns]
            assert template.render(messages=messages, add_generation_prompt=False) == document
            assert messages[-1]["role"] == "assistant"
            seen += 1
    assert seen > 100


def test_a_template_with_a_missing_slot_or_bracket_is_refused():
    rng = random.Random(0)
    with pytest.raises(KeyError):
        expand("{nobody} is here", {}, rng)
    with pytest.raises(ValueError, match="unbalanced"):
        expand("[one|two", {}, rng)
    assert expand("[a|\n  a]\nb\n\n{Name}", {"name": "{he}", "he": "x"}, rng) == "a b\n\nX"


def test_the_committed_questions_are_the_ones_that_the_script_writes(tmp_path):
    evaluation.write(tmp_path / "demo_eval.json")
    assert (tmp_path / "demo_eval.json").read_text() == EVAL.read_text()


def test_questions_are_held_out_and_their_answers_right():
    questions = json.loads(EVAL.read_text())
    kinds = [question["kind"] for question in questions]
    assert [kinds.count(kind) for kind in ("addition", "addition completion", "sort")] == [100, 100, 50]
    for question in questions:
        values = list(map(int, re.findall(r"\d+", question["prompt"])))
        if question["kind"].startswith("addition"):
            assert numbers.held_out(*values)
            assert question["reply"].split(" = ")[-1] == str(sum(values))
        elif question["kind"] == "sort":
            assert lists.held_out_list(values)
            assert question["reply"] == ", ".join(map(str, sorted(values)))


def test_the_facts_asked_for_are_taught():
    rng = random.Random(0)
    asks = (facts.ask_common, facts.ask_town, chat.ask_small_talk)
    taught = {exchange[:2] for ask in asks for exchange in (ask(rng) for _ in range(6000))}
    assert set(evaluation.FACTS.items()) <= taught


@pytest.mark.parametrize(
    ("reply", "right"), [(" 85", True), ("85\n12 + 3 = 15", True), ("850", False), ("47 + 38 = 85", False), ("", False)]
)
def test_only_the_first_line_of_a_reply_counts(reply, right):
    assert evaluation.is_right({"kind": "addition completion", "prompt": "47 + 38 =", "reply": "85"}, reply) is right


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokens.train_tokenizer(0, 600, 300)


@given(st.text())
def test_any_text_survives_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_digits_and_special_tokens_are_single_tokens(tokenizer):
    assert tokenizer.encode("47 + 38 = 85").tokens == ["4", "7", "Ġ+", "Ġ", "3", "8", "Ġ=", "Ġ", "8", "5"]
    assert tokenizer.encode("<|im_end|><|endoftext|>").tokens == ["<|im_end|>", "<|endoftext|>"]


def test_the_corpus_is_the_same_for_any_number_of_processes(tokenizer, monkeypatch):
    monkeypatch.setattr(tokens, "DOCUMENTS_PER_SHARD", 20)
    one, two = (tokens.encode(tokenizer, 0, range(4), workers) for workers in (1, 2))
    assert (one.tokens == two.tokens).all()
    assert (one.starts == two.starts).all()
    assert one.share == two.share
    end = tokenizer.token_to_id(chat.END_OF_TEXT)
    assert list(one.tokens[one.starts[1:] - 1]) == [end] * 79
    assert (one.tokens == end).sum() == 80
    assert sum(one.share.values()) == pytest.approx(1)

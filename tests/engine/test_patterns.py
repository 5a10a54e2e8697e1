"""Regular expressions as grammars: their texts match, and what matches is a text."""

import json
import re

import pytest
import xgrammar
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.random_texts import allows, random_text
from support.random_texts import compiler as new_compiler

from tritonllm.config.sampling_params import StructuredOutputsParams
from tritonllm.engine.grammar import grammar as structured
from tritonllm.engine.grammar.grammar_rules import Rules
from tritonllm.engine.grammar.patterns import TooLarge, Unreadable, whole, within_json


@pytest.fixture(scope="module")
def compiler():
    return new_compiler()


def for_output(compiler, pattern):
    rules = Rules()
    rules.define("root", whole(pattern, rules))
    return compiler.compile_grammar(xgrammar.Grammar.from_ebnf(str(rules)))


def for_string(compiler, pattern):
    rules = Rules()
    rules.define("root", f'"\\"" {within_json(pattern, rules)}')
    return compiler.compile_grammar(xgrammar.Grammar.from_ebnf(str(rules)))


CHARACTERS = st.sampled_from(["a", "b", "é", '"', r"\\", r"\n", r"\t", r"\x01", "/", r"\.", " ", "-", r"\u20ac", "😀"])
CLASSES = st.sampled_from(
    [".", r"\d", r"\w", r"\s", r"\D", r"\W", r"\S", "[^a]", r"[\w-]", r"[^\s\"]", r"[a-c\]]", r"[^\w]"]
)
PIECES = st.one_of(CHARACTERS, CLASSES)


def _more(inner):
    times = st.sampled_from(["", "?", "*", "+", "{2}", "{0,2}", "{1,}", "*?"])
    return st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.builds("({}){}".format, inner, times),
        st.builds("(?:{}|{})".format, inner, inner),
        st.builds("(?P<n>{})".format, PIECES),
        st.builds("{}{}".format, PIECES, times),
    )


PATTERNS = st.recursive(PIECES, _more, max_leaves=6)


def test_what_is_needed_at_the_end_is_needed(compiler):
    """xgrammar 0.2.9 lets both of these end with the b."""
    grammar = for_output(compiler, "(.)*b(.)+")
    assert [allows(grammar, text) for text in ("b", "ab", "ba", "aba")] == [False, False, True, True]


class EndsEarly(xgrammar.GrammarMatcher):
    """Xgrammar 0.2.9's."""

    def accept_token(self, token, **options):
        return True


def test_a_release_that_ends_texts_early_is_refused(monkeypatch):
    monkeypatch.setattr(xgrammar, "GrammarMatcher", EndsEarly)
    structured._check_release.cache_clear()
    try:
        with pytest.raises(ValueError, match="xgrammar ends texts where their grammar goes on: install another one"):
            structured.parse(StructuredOutputsParams(regex="a"))
    finally:
        structured._check_release.cache_clear()


@settings(max_examples=examples(150))
@given(PATTERNS, st.integers(0, 99))
def test_what_it_allows_matches(compiler, pattern, seed):
    try:
        expression = re.compile(pattern)
    except re.error:
        assume(False)
    text = random_text(for_output(compiler, pattern), seed)
    assert text is None or expression.fullmatch(text), text
    for begin, end in (("^", "$"), ("", ""), ("^", ""), ("", "$")):
        anchored = f"{begin}(?:{pattern}){end}"
        text = random_text(for_string(compiler, anchored), seed)
        assert text is None or re.search(anchored, json.loads(text)), text


@settings(max_examples=examples(150))
@given(
    st.lists(st.one_of(CHARACTERS, st.sampled_from([".", "(a|b)*", "[^b]", r"\d?"])), max_size=4).map("".join),
    st.text('ab"\\\n1é/', max_size=4),
)
def test_what_matches_is_allowed(compiler, pattern, text):
    assert allows(for_output(compiler, pattern), text) == bool(re.fullmatch(pattern, text))
    written = json.dumps(text, ensure_ascii=False)
    assert allows(for_string(compiler, f"^{pattern}$"), written) == bool(re.fullmatch(pattern, text))


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(?i)a", "the group '(?i)'"),
        ("(?P=n)", "the group '(?P='"),
        ("(?>a)", "the group '(?>a'"),
        (r"(a)\1", r"the escape '\1'"),
        (r"\bword\b", r"the escape '\b'"),
        (r"\p{L}", r"the escape '\p'"),
        ("a" + "\\", r"a '\' at its end"),
        ("(a", "an opening parenthesis without a closing one"),
        ("a)", "a closing parenthesis without an opening one"),
        ("[a", "an opening bracket without a closing one"),
        ("[]a]", "a class without characters ('[]')"),
        (r"[^\s\S]", "a class without characters"),
        ("[b-a]", "a range whose end comes before its beginning"),
        (r"[\w-z]", "a range of classes"),
        ("*a", "'*' behind nothing that it could repeat"),
        ("a**", "'*' behind nothing that it could repeat"),
        ("a*+", "the possessive '*+'"),
        ("a{3,2}", "'{3,2}', whose second number is the smaller one"),
        ("a{,2}", "a repetition without its first number ('{,')"),
        ("a{10001}", "more than 10000 characters, repetitions counted"),
        ("(a{100}){200}", "more than 10000 characters, repetitions counted"),
        ("a{0,1001}", "more than 1000 places where a text may go on in several ways"),
        ("(a|b)*a(a|b){14}", "more than 10000 states"),
        ("(a|aa|aaa|aaaa){0,1000}", "too many ways in which a text may match it"),
    ],
)
def test_what_cannot_be_followed_is_named(pattern, message):
    with pytest.raises(Unreadable, match=re.escape(message)):
        whole(pattern, Rules())


def test_a_class_and_its_complement_are_all(compiler):
    for pattern in (r"[\s\S]", r"[\d\Dx]", r"[^x]|x"):
        assert all(allows(for_output(compiler, pattern), c) for c in "x\n\r\u2028\ufeff\x1c5٣😀")


def test_all_expressions_of_a_grammar_together_are_limited():
    """Each alone takes a tenth of a second of the thread that parses, and Python runs one thread at a time."""
    rules = Rules()
    with pytest.raises(TooLarge, match="too many ways"):
        for _ in range(200):
            within_json("^[a-z]{1500}$", rules)


def test_a_dot_is_no_line_break(compiler):
    assert [c for c in "a\n\r\u2028é" if allows(for_output(compiler, "."), c)] == ["a", "é"]

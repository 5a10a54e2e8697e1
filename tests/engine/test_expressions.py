import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.random_texts import allows, compiled
from support.random_texts import compiler as new_compiler
from xgrammar.testing import _is_grammar_accept_string

from tritonllm.config.sampling_params import StructuredOutputsParams
from tritonllm.engine.grammar.expressions import (
    MOST_REPEATS,
    MOST_REPEATS_IN_ALL,
    MOST_RULES,
    ignored,
    is_endless,
    too_large,
    without_dots,
)
from tritonllm.engine.grammar.grammar import parse


def rules(count):
    chain = [f"r{i} ::= r{i + 1}" for i in range(count - 2)]
    return "\n".join(["root ::= r0", *chain, f'r{count - 2} ::= "a"'])


STARS = '("a" | "b")* '
LIMITS = [
    ("regex", "a?b*c{0,2}" * (MOST_REPEATS // 3), "a?" * (MOST_REPEATS + 1), f"{MOST_REPEATS + 1} parts"),
    ("regex", r"[?*]\*" * 1000, "(a|b)*?" * (MOST_REPEATS + 1), f"{MOST_REPEATS + 1} parts"),
    ("grammar", rules(MOST_RULES), rules(MOST_RULES + 1), f"{MOST_RULES + 1} rules"),
    ("grammar", 'root ::= "' + "*" * 2000 + '" [*?] # ???', f"root ::= {STARS * 257}", "a rule of 257 parts"),
    ("grammar", f"root ::= {STARS * MOST_REPEATS}", f"x ::= {STARS * 125}\n" * 9, "1125 parts .* more than 1000"),
]


@pytest.mark.parametrize(("name", "allowed", "refused", "message"), LIMITS)
def test_limits(name, allowed, refused, message):
    assert too_large(name, allowed) is None
    limits = {MOST_REPEATS, MOST_RULES, MOST_REPEATS_IN_ALL}
    with pytest.raises(ValueError, match=f"^structured_outputs: {name} has {message}.*: make it smaller$") as caught:
        parse(StructuredOutputsParams(**{name: refused}))
    assert any(f"more than {limit}:" in str(caught.value) for limit in limits)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("a^b", "'^' behind other characters"),
        ("a$b", "'$' before other characters"),
        ("(a|b$)c", "'$' before other characters"),
        ("(^a$)+", "'^' behind other characters"),
        ("((a|b)c$){2}", "'$' before other characters"),
        (r"\(^a", "'^' behind other characters"),
        (r"\Aa\Z", r"the escape '\A'"),
        (r"[\h]", r"the escape '\h'"),
        ("(?!b)[a-z]", "a lookahead ('(?!')"),
        ("a(?=b)", "a lookahead ('(?=')"),
        ("(?<!b)a", "a lookbehind ('(?<!')"),
    ],
)
def test_what_is_ignored_is_named(pattern, message):
    assert ignored(pattern) == message
    with pytest.raises(ValueError, match=re.escape(f"structured_outputs: regex has {message}, which a grammar cannot")):
        parse(StructuredOutputsParams(regex=pattern))


@pytest.mark.parametrize(
    "pattern",
    [
        *("", "^", "$", "^a$", "^a|b$", "a|^b$", "(^a|b$)", "(^$)|(^a{2}$)", "(^a$)?", "(?:^a)b", r"\^a\$", r"[a^$]"),
        *(r"^\d{1,3}(\.\d{1,3}){3}$", r"[\w.]+@[\w.]+", "x{2}", r"\\A"),
    ],
)
def test_what_is_kept_is_taken(pattern):
    assert ignored(pattern) is None
    assert parse(StructuredOutputsParams(regex=pattern)) is not None


@given(st.text(r"a^$()|*+?{}2,\[]=!<:P", max_size=12))
def test_whatever_stands_in_a_pattern(pattern):
    assert isinstance(ignored(pattern), str | None)


def test_expressions_that_are_too_large_for_an_automaton_are_kept_as_well():
    compiler = new_compiler()
    for pattern, right, wrong in (
        (r"(\w+\s?){1,300}", ["a b", "ab c "], ["a  b", "", "-"]),
        ("a{11000}", ["a" * 11000], ["a" * 10999]),
        (r"(.|[.]){0,1500}\.", ["a.", ".."], ["a\n.", "a"]),
    ):
        grammar = compiled(compiler, regex=pattern)
        assert all(allows(grammar, text) for text in right) and not any(allows(grammar, text) for text in wrong)


@pytest.mark.parametrize("pattern", ["a.b", r"a\.[.]", "(?:.)", ".{2}"])
def test_dots(pattern):
    assert without_dots(pattern) == re.sub(r"(?<![\\[])\.", lambda _: r"[^\n\r\u2028\u2029]", pattern)


@given(st.text("a^$()|*+", max_size=10))
def test_without_its_anchors_a_pattern_matches_the_same(pattern):
    """Or else it is refused, for xgrammar leaves anchors out."""
    try:
        whole = re.compile(pattern)
    except re.error:
        return
    if ignored(pattern) is None:
        without = re.compile(re.sub(r"[$^]", "", pattern))
        for text in ("", "a", "aa", "aaa"):
            assert (whole.fullmatch(text) is None) == (without.fullmatch(text) is None)


@settings(max_examples=examples(100), deadline=None)
@given(st.text(st.sampled_from('\n\x00\x7f"\\ afF09é'), min_size=1, max_size=8))
def test_a_choice_is_the_text_to_the_letter(text):
    """Whatever stands behind a line break."""
    choice = parse(StructuredOutputsParams(choice=[text]))
    assert _is_grammar_accept_string(choice, text)
    assert not _is_grammar_accept_string(choice, text + "a") and not _is_grammar_accept_string(choice, text[:-1])


@pytest.mark.parametrize(
    ("grammar", "endless"),
    [
        ("root ::= root", True),
        ('root ::= "a" root', True),
        ('root ::= x\nx ::= "a" (x | x "b")', True),
        ('root ::= "b" y{1,2}\ny ::= y', True),
        ('root ::= root | "a"', False),
        ("root ::= (root)*", False),
        ('root ::= x{0,2} [x"] "x ::= root" # root\nx ::= x', False),
        ('root ::= ("a" root)? "b"', False),
        ("root ::= [a-z]+ (=x)\nx ::= x", False),
        ('root ::= Regex("^a")', False),
    ],
)
def test_grammars_that_never_end(grammar, endless):
    assert is_endless(grammar) == endless
    if endless:
        with pytest.raises(ValueError, match="grammar cannot be used: no text of its rule 'root' ever ends"):
            parse(StructuredOutputsParams(grammar=grammar))

"""Numbers between bounds: each that is written lies there, and each that lies there may be written."""

import json
from decimal import Decimal

import pytest
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.random_texts import allows, random_text
from support.random_texts import compiler as new_compiler

from tritonllm.engine.grammar.grammar_rules import Rules
from tritonllm.engine.grammar.number_ranges import Bound, NoNumber, integers, numbers


@pytest.fixture(scope="module")
def compiler():
    return new_compiler()


def grammar_of(compiler, write, *args):
    rules = Rules()
    rules.define("root", write(rules, *args))
    return compiler.compile_grammar(xgrammar.Grammar.from_ebnf(str(rules)))


SIZES = st.sampled_from([1, 2, 3, 6, 20]).flatmap(lambda digits: st.integers(-(10**digits), 10**digits))
PAIRS = st.one_of(st.tuples(SIZES, SIZES), st.builds(lambda x, width: (x, x + width), SIZES, st.integers(0, 5)))


@settings(max_examples=examples(100))
@given(PAIRS.map(sorted), st.sampled_from([0, 0, 0, 1, 2]), st.sampled_from([1, 1, 2, 3, 7, 10, 64]), st.data())
def test_integers(compiler, pair, open_end, step, data):
    low, high = None if open_end == 1 else pair[0], None if open_end == 2 else pair[1]

    def fits(x):
        return (low is None or x >= low) and (high is None or x <= high) and x % step == 0

    try:
        grammar = grammar_of(compiler, integers, low, high, step)
    except NoNumber:
        assert not any(map(fits, range(pair[0], min(pair[1], pair[0] + 100) + 1)))
        return
    for seed in range(5):
        text = random_text(grammar, seed)
        assert text is None or (fits(int(text)) and str(int(text)) == text)
    near = [x + shift for x in (*pair, 0) for shift in (-1, 0, 1)]
    for x in [*near, data.draw(st.integers(pair[0] - 3, pair[1] + 3))]:
        assert allows(grammar, str(x)) == fits(x)


REALS = st.one_of(
    st.sampled_from([0, 0.5, 1e-7, 2e-7, -1e-7, 0.1, -3.25, 99.99, 1000.0, 0.30000000000000004, 12.5]),
    st.floats(-20, 20).map(lambda x: round(x, 2)),
    st.floats(-2, 2),
)


@settings(max_examples=examples(100))
@given(st.tuples(REALS, REALS).map(sorted), st.sampled_from([0, 0, 0, 1, 2]), st.booleans(), st.booleans(), st.data())
def test_numbers(compiler, pair, open_end, no_low, no_high, data):
    low = None if open_end == 1 else Bound(Decimal(repr(pair[0])), no_low)
    high = None if open_end == 2 else Bound(Decimal(repr(pair[1])), no_high)

    def fits(x):
        above = low is None or (x > pair[0] if no_low else x >= pair[0])
        return above and (high is None or (x < pair[1] if no_high else x <= pair[1]))

    try:
        grammar = grammar_of(compiler, numbers, low, high)
    except NoNumber as error:
        assert "digits" in str(error) or "decimals" in str(error) or not fits(sum(pair) / 2)
        return
    for seed in range(5):
        text = random_text(grammar, seed)
        assert text is None or fits(json.loads(text))
    other = data.draw(st.floats(pair[0] - 1, pair[1] + 1))
    for x in (*pair, 0, int(pair[0]), round(other, 1), round(other, 8)):
        text = f"{Decimal(repr(x)):f}"
        if len(text.strip("-").replace(".", "")) <= 12 and not (x == 0 and text[0] == "-"):
            assert allows(grammar, text) == fits(x), text


@pytest.mark.parametrize(
    ("write", "args", "message"),
    [
        (integers, (3, 2), "no integer is between"),
        (integers, (22, 27, 7), "no multiple is between"),
        (integers, (0, 10**100), "more than 100 digits"),
        (integers, (10**60, None, 997), "'multipleOf' too large"),
        (numbers, (Bound(Decimal(1), True), Bound(Decimal(1))), "no number is between"),
        (numbers, (Bound(Decimal("1e17")), None), "beyond 2\\^53"),
        (numbers, (Bound(Decimal("1e-300")), None), "more than 40 decimals"),
        (numbers, (Bound(Decimal("0.30000000000000004"), True), None), "more than 15 digits beside"),
    ],
)
def test_what_cannot_be_followed_is_named(write, args, message):
    with pytest.raises(NoNumber, match=message):
        write(Rules(), *args)


def test_a_text_is_never_rounded_to_a_bound_that_is_excluded(compiler):
    grammar = grammar_of(compiler, numbers, Bound(Decimal(999)), Bound(Decimal(1000), True))
    assert allows(grammar, "999.99999999999") and not allows(grammar, "999.9999999999999999999")
    grammar = grammar_of(compiler, numbers, Bound(Decimal(0), True), None)
    assert allows(grammar, "0.00000000000001") and not allows(grammar, "0.0") and not allows(grammar, "-0")

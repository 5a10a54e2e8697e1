"""Strings of limited length as chains of rules: the same masks as xgrammar's own repetitions."""

import json

import numpy as np
import pytest
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.schemas import SCHEMAS

from tritonllm.engine.grammar import parse
from tritonllm.engine.short_strings import MOST_CHARACTERS, MOST_RULES, with_chains
from tritonllm.sampling_params import StructuredOutputsParams

WORDS = ['",', '"}', '"]', 'a"', 'ab"}', "aa", "aaaa", 'aaaaa"', '"a"', '"a', ": ", ", ", "é", '\\"', "true", "12"]
VOCABULARY = ["<end>", *(chr(code) for code in range(32, 127)), "\n", *WORDS]
WORD_COUNT = -(-len(VOCABULARY) // 32)


@pytest.fixture(scope="module")
def compiler():
    return xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(VOCABULARY, stop_token_ids=[0]), max_threads=1)


def plain(schema, blanks=False):
    return xgrammar.Grammar.from_json_schema(json.dumps(schema), any_whitespace=blanks)


def ours(schema, blanks=False):
    return parse(StructuredOutputsParams(json=schema, disable_any_whitespace=not blanks))


def assert_same_masks(compiler, grammars, data, steps=60):
    """Along an output of random tokens that are allowed."""
    first, second = (xgrammar.GrammarMatcher(compiler.compile_grammar(grammar)) for grammar in grammars)
    masks = np.zeros((2, 1, WORD_COUNT), dtype=np.int32)
    for _ in range(steps):
        first.fill_next_token_bitmask(masks[0])
        second.fill_next_token_bitmask(masks[1])
        assert np.array_equal(*masks)
        allowed = np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little")[: len(VOCABULARY)]).tolist()
        if not allowed:
            break
        token = data.draw(st.sampled_from(allowed))
        assert first.accept_token(token) and second.accept_token(token)
        if first.is_terminated():
            break
    assert first.is_terminated() == second.is_terminated()


@given(SCHEMAS, st.booleans(), st.data())
def test_masks_are_those_of_repetitions(compiler, schema, blanks, data):
    assert_same_masks(compiler, (plain(schema, blanks), ours(schema, blanks)), data)


@settings(max_examples=examples(20))
@given(st.tuples(st.integers(0, 12), st.integers(2, 12)).map(sorted), st.data())
def test_masks_of_strings(compiler, bounds, data):
    """Among others of the same kind, and of names."""
    string = {"type": "string", "minLength": bounds[0], "maxLength": bounds[1]}
    properties = {"a": {"$ref": "#/$defs/s"}, "b": {"$ref": "#/$defs/s"}, "c": {"type": "array", "items": string}}
    objects = {"type": "object", "properties": properties, "required": ["a"], "$defs": {"s": string}}
    objects["additionalProperties"] = False
    assert with_chains(str(plain(objects)))
    assert_same_masks(compiler, (plain(objects), ours(objects)), data)
    named = {"type": "object", "propertyNames": {"maxLength": bounds[1], "type": "string"}}
    named["additionalProperties"] = {"type": "null"}
    assert_same_masks(compiler, (plain(named), ours(named)), data)


def test_what_looks_like_a_repetition_is_text():
    schema = {"enum": ['a{0, 12} "', 'left{0, 12} "\\""']}
    assert with_chains(str(plain(schema))) is None
    assert with_chains('root ::= ("x{0, 3} \\"" [x{0, 3} "\\""] "x")') is None


def test_names_are_new():
    schema = {"type": "object", "properties": {"s": {"type": "string", "maxLength": 3}}, "$defs": {}}
    text = str(plain(schema)).replace("root_prop_0", "left_0_1")
    chained = with_chains(text)
    assert chained is not None and "left___0_3" in chained
    names = [line.split(" ::= ")[0] for line in chained.splitlines()]
    assert len(set(names)) == len(names)


def test_long_strings_and_many_stay_as_they_are():
    def strings(count, most):
        properties = {f"p{i}": {"type": "string", "maxLength": most} for i in range(count)}
        return str(plain({"type": "object", "properties": properties, "required": [*properties]}))

    assert with_chains(strings(3, MOST_CHARACTERS + 1)) is None
    assert with_chains(str(plain({"type": "string", "minLength": 3}))) is None
    text = strings(100, MOST_CHARACTERS)
    chained = with_chains(text)
    assert chained is not None
    assert len(chained.splitlines()) - len(text.splitlines()) <= MOST_RULES
    assert f"{{0, {MOST_CHARACTERS}}}" in chained


def test_a_grammar_that_does_not_come_back_as_it_was_is_left_alone(monkeypatch):
    schema = {"type": "string", "maxLength": 3}
    assert "left" in str(ours(schema))
    monkeypatch.setattr("tritonllm.engine.grammar.with_chains", lambda text: text.replace(" | ", "  |  ") + "\n\n")
    assert str(ours(schema)) == str(plain(schema))
    monkeypatch.setattr("tritonllm.engine.grammar.with_chains", lambda text: "this is no grammar")
    assert str(ours(schema)) == str(plain(schema))


def test_chains_take_less_memory():
    """A repetition keeps what it cannot decide without what is around it, of each token that reaches beyond its end."""
    tokens = [*VOCABULARY, *(f"{i}aaa{i}" for i in range(3000))]
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(tokens, stop_token_ids=[0]), max_threads=1)
    schema = {"type": "array", "items": {"type": "string", "maxLength": 24}}
    repeats, chains = (compiler.compile_grammar(grammar) for grammar in (plain(schema), ours(schema)))
    assert chains.memory_size_bytes < repeats.memory_size_bytes / 2


@pytest.mark.parametrize("name", ["a.b", "foo-bar.left", "x"])
def test_rules_of_any_name_are_repeated(name):
    string = {"type": "string", "maxLength": 3}
    schema = {"type": "object", "properties": {"s": {"$ref": f"#/$defs/{name}"}}, "$defs": {name: string}}
    assert "{0, 3}" in str(plain(schema)) and "{0, 3}" not in str(ours(schema))

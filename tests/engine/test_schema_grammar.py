"""Each text that a schema's grammar allows is JSON and valid, and it allows what is valid."""

import datetime
import ipaddress
import json
import re
import uuid
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, FormatChecker
from support.examples import examples
from support.random_texts import allows, compiled, random_text
from support.random_texts import compiler as new_compiler

from tritonllm.engine.grammar.schema_document import Document
from tritonllm.engine.grammar.schema_grammar import MOST_CHARACTERS, MOST_LINKS, grammar_of
from tritonllm.engine.grammar.string_formats import FORMATS

FORMAT_CHECKS: dict[str, Callable[[str], Any]] = {
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "date-time": datetime.datetime.fromisoformat,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "uuid": uuid.UUID,
    "hostname": lambda text: len(text) < 254 or int("no"),
    "email": lambda text: re.fullmatch(r"[^@\s]{1,64}@[^@\s]{1,253}", text) or int("no"),
    "uri": lambda text: urlsplit(text).scheme or int("no"),
    "duration": lambda text: (
        re.fullmatch(r"P(?=[\dT])(\d+W|(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+S)?)?)", text) or int("no")
    ),
}
CHECKER = FormatChecker(())
for _name, _check in FORMAT_CHECKS.items():
    CHECKER.checks(_name, raises=ValueError)(
        lambda value, check=_check: not isinstance(value, str) or check(value) is not None
    )


@pytest.fixture(scope="module")
def compiler():
    return new_compiler()


def is_valid(schema: Any, text: str) -> bool:
    return Draft202012Validator(schema, format_checker=CHECKER).is_valid(json.loads(text))


NAMES = st.sampled_from(["a", "b", "ab", "", 'q"', "\\", "é\n", "long name"])
PATTERNS = (
    *(
        r"^C:\\[a-z]{2}$",
        '^"+$',
        r"^[^a]{2}$",
        r"^a.b$",
        r"^\s\S$",
        r"^[\x00-\x1f]$",
        "b",
        "^x",
        "y$",
        "^a|b$",
        "^(a|\\n)*$",
    ),
    *(r"^\w+\W$", r"^[^\w\s]{1,3}$", r"^\D$", r"^[\d\-/]+$", "^$", r"^\u00e9{2,}$", r"^(?:[ab]{1,2}|\\|\t)+?$"),
)


def _pair(low: str, high: str, values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    both = st.tuples(values, values).map(sorted).map(lambda pair: {low: pair[0], high: pair[1]})
    return st.one_of(both, values.map(lambda value: {low: value}), values.map(lambda value: {high: value}), st.just({}))


_SIZES = st.integers(0, 4)
_WHOLE = st.one_of(st.integers(-120, 120), st.integers(-(10**19), 10**19), st.sampled_from([0, 2**53 + 1, -1.5, 7.25]))
_REAL = st.one_of(
    st.sampled_from([0, 1e-7, -1e-7, 2e-9, 0.1, 0.30000000000000004, 1, 99.5, -3.25, 1e3]),
    st.floats(-100, 100).map(lambda x: round(x, 3)),
)
_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.text(max_size=3),
    st.sampled_from([1.5, -0.25, [], {"a": [1]}]),
)
_SCALARS = st.one_of(
    _pair("minLength", "maxLength", _SIZES).map(lambda b: {"type": "string", **b}),
    st.sampled_from(PATTERNS).map(lambda p: {"type": "string", "pattern": p}),
    st.sampled_from([*FORMATS]).map(lambda name: {"type": "string", "format": name}),
    _pair("minimum", "maximum", _WHOLE).map(lambda b: {"type": "integer", **b}),
    st.builds(
        lambda b, m: {"type": "integer", "multipleOf": m, **b}, _pair("minimum", "maximum", _WHOLE), st.integers(1, 40)
    ),
    _pair("minimum", "maximum", _REAL).map(lambda b: {"type": "number", **b}),
    _pair("exclusiveMinimum", "exclusiveMaximum", _REAL).map(lambda b: {"type": "number", **b}),
    st.sampled_from(
        [{"type": "boolean"}, {"type": ["null", "string"]}, {}, True, False, {"type": "array", "maxItems": 1}]
    ),
    st.lists(_VALUES, min_size=1, max_size=3).map(lambda values: {"enum": values}),
    _VALUES.map(lambda value: {"const": value}),
)


def _object(properties: dict[str, Any], optional: int, extra: Any, sizes: dict[str, int]) -> dict[str, Any]:
    required = list(properties)[optional % (len(properties) + 1) :]
    more = {} if extra is None else {"additionalProperties": extra}
    return {"type": "object", "properties": properties, "required": required, **more, **sizes}


def _holders(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    counts = _pair("minItems", "maxItems", st.integers(0, 3))
    sizes = st.one_of(st.just({}), _pair("minProperties", "maxProperties", st.integers(0, 3)))
    return st.one_of(
        st.builds(lambda items, b: {"type": "array", "items": items, **b}, inner, counts),
        st.builds(
            lambda first, rest, b: {"type": "array", "prefixItems": first, "items": rest, **b},
            st.lists(inner, min_size=1, max_size=2),
            inner,
            counts,
        ),
        st.builds(_object, st.dictionaries(NAMES, inner, max_size=3), _SIZES, st.none() | inner, sizes),
        st.builds(lambda one, b: {"type": "object", "additionalProperties": one, **b}, inner, sizes),
        st.builds(lambda p, one: {"type": "object", "patternProperties": {p: one}}, st.sampled_from(PATTERNS), inner),
        st.builds(lambda names: {"type": "object", "propertyNames": names, "maxProperties": 2}, _SCALARS),
        st.lists(inner, min_size=1, max_size=2).map(lambda ways: {"anyOf": ways}),
        st.lists(inner, min_size=1, max_size=2).map(lambda ways: {"oneOf": ways}),
    )


def _with_references(first: Any, second: Any) -> Any:
    """Two schemas, each of which refers to the other or to the whole in every way."""
    if not isinstance(first, dict):
        return first
    again = {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/a%20~1~0"}, {"$ref": "#back"}]}, "maxItems": 2}
    return {
        "$id": "http://example.com/whole.json",
        "anyOf": [{"$ref": "#/$defs/a%20~1~0"}, {"$ref": "other.json#/anyOf/0"}, {"$ref": "whole.json#back"}],
        "$defs": {
            "a /~": second,
            "b": {"$id": "other.json", "anyOf": [first, {"$ref": "#/anyOf/0"}]},
            "c": {"$anchor": "back", **again},
        },
    }


_PLAIN_SCHEMAS = st.recursive(_SCALARS, _holders, max_leaves=5)
RICH_SCHEMAS = st.one_of(_PLAIN_SCHEMAS, _PLAIN_SCHEMAS, st.builds(_with_references, _PLAIN_SCHEMAS, _PLAIN_SCHEMAS))


def grammar_or_refusal(compiler: Any, schema: Any, blanks: bool) -> Any:
    try:
        return compiled(compiler, json=json.dumps(schema), disable_any_whitespace=not blanks)
    except ValueError as error:
        assert str(error).startswith("structured_outputs: json ") and "grammar_parser" not in str(error), error
        return None


@settings(max_examples=examples(200))
@given(RICH_SCHEMAS, st.booleans(), st.integers(0, 2**32))
def test_what_it_allows_is_json_and_valid(compiler, schema, blanks, seed):
    grammar = grammar_or_refusal(compiler, schema, blanks)
    if grammar is None:
        return
    for draw in range(4):
        text = random_text(grammar, seed + draw)
        if text is not None:
            assert is_valid(schema, text), text


def texts_of(value: Any) -> list[str]:
    """Ways to write a value, with blanks and without."""
    ways: list[dict[str, Any]] = [{"indent": 2}, {"indent": 4}, {"indent": "\t"}, {"separators": (",", ":")}, {}]
    return [json.dumps(value, ensure_ascii=ascii, **way) for way in ways for ascii in (True, False)]


@settings(max_examples=examples(100))
@given(
    st.recursive(
        _VALUES.filter(lambda v: v != {"a": [1]}),
        lambda v: st.lists(v, max_size=2) | st.dictionaries(st.text(max_size=3), v, max_size=2),
        max_leaves=6,
    )
)
def test_any_json_may_be_written_with_blanks_as_programs_write_it(compiler, value):
    grammar = compiled(compiler, json={})
    for text in texts_of(value):
        assert allows(grammar, text), text


LEAVES = [
    {"type": "string", "maxLength": 3},
    {"type": "string", "minLength": 2},
    {"type": "string", "minLength": 1, "maxLength": 2},
    {"type": "integer", "minimum": -12, "maximum": 345},
    {"type": "integer", "multipleOf": 7, "exclusiveMinimum": 20},
    {"type": "integer", "minimum": 2**60 + 1, "maximum": 2**60 + 2},
    {"type": "number", "minimum": -0.5, "exclusiveMaximum": 1e-7},
    {"type": "number", "exclusiveMinimum": 2.25},
    {"type": ["null", "string"]},
    {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
    {
        "type": "array",
        "prefixItems": [{"type": "null"}, {"type": "boolean"}],
        "items": {"type": "string"},
        "minItems": 1,
    },
    {"type": "object", "properties": {"a": {"type": "null"}, "b": {}}, "additionalProperties": {"type": "integer"}},
    {
        "type": "object",
        "properties": {"a": {}, "b": {}},
        "required": ["b"],
        "minProperties": 2,
        "additionalProperties": True,
    },
    {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 1},
    {"type": "object", "propertyNames": {"enum": ["a", "b"]}},
    {"type": "object", "patternProperties": {"^a": {"type": "null"}}, "properties": {"b": {}}},
    {"enum": [2**60 + 1, "é\n", None, -0.25, {"a": []}]},
]
_NUMBERS = st.one_of(
    *(st.integers(-30, 400), st.integers(2**60, 2**60 + 4), st.just(2**60 + 1), st.just(-0.25)),
    st.integers(-4000, 4000).filter(lambda x: x % 1000).map(lambda x: x / 1000),
    st.sampled_from([0.0000001, 0.00000009, 2.25, 2.250001, -0.5, -0.50001, 0.5]),
)
_SIMPLE = st.one_of(st.none(), st.booleans(), _NUMBERS, st.text(max_size=4))
_ANY = st.one_of(
    *(_SIMPLE, _SIMPLE, st.lists(_SIMPLE, max_size=3), st.lists(st.integers(), max_size=3)),
    st.tuples(st.none(), st.booleans()).map(list) | st.tuples(st.none(), st.booleans(), st.text(max_size=2)).map(list),
    *(st.dictionaries(st.sampled_from("abcd"), kind, max_size=3) for kind in (_SIMPLE, st.none(), st.integers())),
    st.sampled_from(LEAVES[-1]["enum"]),
)


@pytest.fixture(scope="module")
def leaves(compiler):
    return [compiled(compiler, json=schema) for schema in LEAVES]


@settings(max_examples=examples(300))
@given(_ANY)
def test_it_allows_what_is_valid_and_nothing_else(leaves, value):
    """Names in the order of the schema, and without exponents; members that no keyword names count as wrong."""
    for schema, grammar in zip(LEAVES, leaves, strict=True):
        if isinstance(value, dict):
            value = dict(sorted(value.items(), key=lambda item: (item[0] not in schema.get("properties", ()), item[0])))
        text = f"{value:.9f}" if isinstance(value, float) and abs(value) < 1e-4 else json.dumps(value, indent=2)
        strict = {"additionalProperties": False} if "properties" in schema else {}
        strict |= {"items": False} if "prefixItems" in schema else {}
        written_as_is = "enum" not in schema or value in [None, 2**60 + 1, -0.25]
        if written_as_is:
            assert allows(grammar, text) == is_valid({**strict, **schema}, text), (schema, text)


@given(
    st.lists(st.sampled_from(['"', "\\", "\n", "\x01", "é", "a", "\U0001f600", "/"]), max_size=7).map("".join),
    st.booleans(),
)
def test_characters_with_a_backslash_count_as_one(lengths, text, ascii):
    assert allows(lengths, json.dumps(text, ensure_ascii=ascii)) == (2 <= len(text) <= 5)


@pytest.fixture(scope="module")
def lengths(compiler):
    return compiled(compiler, json={"type": "string", "minLength": 2, "maxLength": 5})


@pytest.mark.parametrize("most", [130, MOST_CHARACTERS, MOST_CHARACTERS + 1])
def test_long_strings_end_in_time(compiler, most):
    """Those that are too long for a chain have no backslash."""
    grammar = compiled(compiler, json={"type": "string", "minLength": most - 1, "maxLength": most})
    fits = [length for length in range(most - 3, most + 4) if allows(grammar, f'"{"a" * length}"')]
    assert fits == [most - 1, most]
    assert allows(grammar, '"' + r"\n" * most + '"') == (most <= MOST_CHARACTERS)


def test_chains_are_shared_and_limited():
    def links(*sizes):
        properties = {f"p{i}": {"type": "string", "maxLength": size} for i, size in enumerate(sizes)}
        schema = {"type": "object", "properties": properties, "required": [*properties]}
        return grammar_of(Document(schema), True).count("escape")

    assert links(20, 20, 7) == links(20)
    assert links(*range(1, 100)) == links(99)
    minimal = [{"type": "string", "minLength": n % 100, "maxLength": 128} for n in range(100)]
    text = grammar_of(Document({"type": "array", "prefixItems": minimal}), True)
    assert MOST_LINKS - 200 < text.count(" escape r") <= MOST_LINKS and "{1,128}" in text


def test_chains_take_little_memory():
    """A repetition keeps what it cannot decide without what is around it, of each token that reaches beyond its end:
    156 KB here in xgrammar 0.2.8, whose masks then take 20 ms each. (0.2.9 decides them with 8 KB.)"""
    tokens = [*(chr(code) for code in range(32, 127)), *(f"{i}aaa{i}" for i in range(3000)), "<end>"]
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(tokens, stop_token_ids=[len(tokens) - 1]), max_threads=1)
    schema = {"type": "array", "items": {"type": "string", "maxLength": 24}}
    assert compiled(compiler, json=schema, disable_any_whitespace=True).memory_size_bytes < 128 << 10


BLANKS = re.compile(r"[ \n\t]+")


@settings(max_examples=examples(100))
@given(
    st.sampled_from([{"json_object": True}, {"json": {}}, {"json": {"type": "array", "items": {"$ref": "#"}}}]),
    st.integers(0, 2**32),
)
def test_blanks_between_tokens_have_an_end(compiler, wish, seed):
    """None, one, or a line break and four blanks or a tab for each level."""
    text = random_text(compiled(compiler, **wish), seed)
    outside = re.sub(r'"(\\.|[^"\\])*"', '""', text or "")
    for run in BLANKS.finditer(outside):
        assert re.fullmatch(r" |\n {0,32}|\n\t{0,8}", run[0])
        inside = outside[: run.end()]
        depth = sum(map(inside.count, "[{")) - sum(map(inside.count, "]}"))
        assert len(run[0]) <= 1 + 4 * depth


def test_json_without_blanks_has_none(compiler):
    grammar = compiled(compiler, json_object=True, disable_any_whitespace=True)
    assert allows(grammar, '{"a": [1, {}], "b": []}')
    for text in ('{ "a": 1}', '{"a":1}', "[1,2]", "[ ]", "{}\n", '{"a": 1 }', "1"):
        assert not allows(grammar, text)


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "string", "pattern": r"^C:\\[a-z]{2}$"}, [r'"C:\\ab"'], [r'"C:\ab"', '"C:ab"']),
        ({"type": "string", "pattern": '^a"b$'}, [r'"a\"b"'], ['"a"b"']),
        ({"type": "string", "pattern": "^a\nb$"}, [r'"a\nb"'], ['"a\nb"']),
        ({"type": "string", "pattern": "^a.b$"}, ['"axb"', r'"a\"b"'], [r'"a\nb"', r'"a\rb"']),
        ({"type": "string", "pattern": "b"}, ['"b"', r'"ab\n"'], ['"a"', '""']),
        ({"type": "object", "patternProperties": {"^x": {"type": "null"}}}, ['{"xy": null}'], ['{"y": null}']),
        ({"type": "number", "minimum": 1e-7, "maximum": 3e-7}, ["0.0000001", "0.00000025"], ["0", "0.", "0.0000004"]),
        ({"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 1}, [f"{2**53 + 1}"], [f"{2**53}"]),
        ({"$ref": "#a", "$defs": {"x": {"$anchor": "a", "type": "null"}}}, ["null"], ["1"]),
        ({"$id": "http://a/b", "$ref": "b#/$defs/x", "$defs": {"x": {"type": "null"}}}, ["null"], ["1"]),
        (
            {"properties": {"a": {"type": "null"}}, "additionalProperties": True},
            ['{"b": 1}'],
            [r'{"\u0061": 1}', '{"a": 1}'],
        ),
        ({"type": "object", "properties": {"a": False, "b": True}}, ['{"b": 1}', "{}"], ['{"a": 1}', '{"a": ']),
        ({"type": "string"}, [r'"\ud83d\ude00"'], [r'"\ud83d"', r'"\ude00"', r'"\ud83d\u0041"']),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, ["1", '"a"'], ["null"]),
    ],
)
def test_cases(compiler, schema, right, wrong):
    grammar = compiled(compiler, json=schema)
    for text in right:
        assert allows(grammar, text) and is_valid(schema, text), text
    for text in wrong:
        assert not allows(grammar, text), text

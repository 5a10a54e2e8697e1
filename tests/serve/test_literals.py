"""Bare text and Python's literals as JSON."""

import ast
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from tritonllm.serve.parsing.literals import ArgumentTypes, argument, json_of, quoted

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    SCALARS | st.text(st.characters(), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
PARTS = ["'", '"', "\\", "\\x4", "\\ud83d", "\\ude00", "[", "]", "(", ")", "{", "}", ",", ":", "1", ".", "-", "+", "e5"]
PARTS += ["None", "True", "tru", "null", "a", "é", " ", "\n", "0", "_", "\ud83d", "\ude00"]


@settings(max_examples=examples(200), deadline=None)
@given(value=VALUES)
def test_values_of_python_and_of_json_come_back(value):
    assert json.loads(json_of(repr(value))) == value
    assert json.loads(json_of(json.dumps(value))) == value
    assert json.loads(json_of(f" {json.dumps(value, ensure_ascii=False)}\n")) == value


@settings(max_examples=examples(400), deadline=None)
@given(text=st.lists(st.sampled_from(PARTS), max_size=12).map("".join))
def test_any_text_is_json_or_none(text):
    value = json_of(text)
    if value is not None:
        json.loads(value)
        value.encode()
    for types in ((), {"string"}, {"integer"}, {"array", "null"}, {"string", "number"}):
        found = argument(text, types)
        json.loads(found)
        found.encode()
        assert types != {"string"} or json.loads(found) == json.loads(quoted(text))


@pytest.mark.filterwarnings("ignore:invalid escape sequence")
@settings(max_examples=examples(200), deadline=None)
@given(text=st.text("'\"\\nx4u0 a\n", max_size=8))
def test_strings_are_read_as_python_reads_them(text):
    try:
        expected = ast.literal_eval(f"'{text}'")
    except (SyntaxError, ValueError):
        return
    value = json_of(f"'{text}'")
    assert value is None or json.loads(value) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("(1,)", "[1]"),
        ("((1))", "1"),
        ("()", "[]"),
        ("{1: True, 'a': None,}", '{"1": true, "a": null}'),
        (".5", "0.5"),
        ("-5.", "-5.0"),
        ("+1.e5", "1.0e5"),
        ("9" * 5000, "9" * 5000),
        ("1e999", "1e999"),
        ("'it\\'s' ", '"it\'s"'),
        ("'\\d\\/'", '"\\\\d/"'),
        ('"\\ud83d\\ude00"', '"😀"'),
        ('"\\ud83d"', '"\ufffd"'),
        ("'a' \"b\"", '"ab"'),
        ('"""one\n\'two\'"""', "\"one\\n'two'\""),
        *((text, None) for text in ("", " ", "05", "NaN", "1 2", "[1", "1]", "{1}", "f(1)", "b'a'", "1_0", "Truest")),
        ("[" * 64 + "]" * 64, "[" * 64 + "]" * 64),
        ("[" * 65 + "]" * 65, None),
        ("[" * 1_000_000, None),
    ],
)
def test_literals(text, expected):
    assert json_of(text) == expected


PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "share": {"type": "number"},
        "deep": {"type": ["object", "null"]},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "word": {"enum": ["1", "two"]},
        "mixed": {"enum": [1, "two"]},
        "named": {"$ref": "#/$defs/Name"},
        "circle": {"$ref": "#/properties/circle"},
        "nowhere": {"$ref": "#/$defs/x"},
        "odd": {"type": 5, "anyOf": 3, "enum": {}},
        "no": True,
    },
    "$defs": {"Name": {"allOf": [{"type": "string"}]}},
}


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("city", "12", '"12"'),
        ("city", "null", '"null"'),
        ("city", ' "quoted" ', '" \\"quoted\\" "'),
        ("days", " 12\n", "12"),
        ("days", "twelve", '"twelve"'),
        ("share", "1", "1"),
        ("share", "1.5", "1.5"),
        ("deep", "{'a': [True]}", '{"a": [true]}'),
        ("deep", "None", "null"),
        ("maybe", "null", "null"),
        ("maybe", "1", '"1"'),
        ("word", "1", '"1"'),
        ("mixed", "1", "1"),
        ("mixed", "two", '"two"'),
        ("named", "1", '"1"'),
        *((key, "True", "true") for key in ("circle", "nowhere", "odd", "no", "unknown")),
        ("unknown", "a b", '"a b"'),
        ("unknown", '"a"', '"\\"a\\""'),
    ],
)
def test_the_schema_tells_the_type(key, text, expected):
    tools = {"f": {"name": "f", "parameters": PARAMETERS}}
    assert argument(text, ArgumentTypes(tools, "f").of(key)) == expected


@pytest.mark.parametrize("tools", [["f"], {"f": {}}, {"f": None}, {"f": {"parameters": {"properties": []}}}, {}])
def test_where_no_schema_is_nothing_is_known(tools):
    assert ArgumentTypes(tools, "f").of("a") == frozenset()


def test_an_id_that_is_no_uri_does_no_harm():
    parameters = {"$id": "https://a", "properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"$id": "http://["}}}
    assert ArgumentTypes({"f": {"parameters": parameters}}, "f").of("a") == frozenset()


@pytest.mark.parametrize("part", ["1", "'", "\\", "'a',", "'\\a", "-", "1.", " ", "[", "a"])
def test_long_texts_take_linear_time(part):
    """With quadratic time, a hundred times the text takes ten thousand times as long."""
    times = []
    for count in (2_000, 200_000):
        begin = time.perf_counter()
        for text in (part * count, f"'{part * count}", f"[{part * count}!", f"{part * count}a"):
            json_of(text)
        times.append(time.perf_counter() - begin)
    assert times[1] < 2_000 * times[0] + 2

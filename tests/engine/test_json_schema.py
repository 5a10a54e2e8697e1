import json
import re
from itertools import pairwise

import pytest
from hypothesis import given
from support.schemas import SCHEMAS

from tritonllm.config.sampling_params import StructuredOutputsParams
from tritonllm.engine.grammar.grammar import parse
from tritonllm.engine.grammar.json_schema import (
    MOST_BRANCHES,
    MOST_DEPTH,
    MOST_GROUPS,
    MOST_OPTIONAL,
    malformed,
    unsupported,
)

OVERLAP = "'oneOf' of schemas of which two may be valid ('anyOf' can be kept)"
WRONG = {"not": {"type": "null"}}


@given(SCHEMAS)
def test_ordinary_schemas_are_taken(schema):
    assert malformed(schema) is None and unsupported(schema) is None
    assert parse(StructuredOutputsParams(json=schema)) is not None


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": "string", "format": "date-time", "title": "T", "description": "when", "default": None},
        {"$ref": "#/$defs/a", "description": "what pydantic writes", "$defs": {"a": {"type": "integer", "minimum": 3}}},
        {"enum": ["a", "b"], "type": "string", "title": "T"},
        {"anyOf": [{"type": "integer", "multipleOf": 2}, {"type": "null"}], "default": None},
        {"allOf": [{"type": "integer", "minimum": 3}]},
        {"oneOf": [{"type": "integer"}, {"type": "string"}, {"type": ["null", "boolean"]}]},
        {"oneOf": [{"enum": [1, "1"]}, {"const": True}, {"type": "array"}]},
        {
            "oneOf": [{"$ref": "#/$defs/1"}, {"$ref": "#/$defs/2"}],  # as pydantic writes a union with a tag
            "discriminator": {"propertyName": "a"},
            "$defs": {
                str(n): {"type": "object", "properties": {"a": {"const": n, "type": "integer"}}, "required": ["a"]}
                for n in (1, 2)
            },
        },
        {"type": "array", "items": {"type": "null"}, "uniqueItems": False, "minItems": 1},
        {"type": ["string", "null"], "enum": ["a", None]},
        {"type": ["integer", "boolean"], "enum": [1, 2.0, True]},
        {"type": "number", "const": 1.5},
        {"type": "object", "const": {"a": []}},
        {"type": "string", "pattern": "^(a|b)$", "minLength": 0},
        {"type": "string", "minLength": 1, "maxLength": 3},
        {"type": "object", "patternProperties": {"^a+$": {"type": "null"}}, "minProperties": 1},
    ],
)
def test_what_is_kept_is_taken(schema):
    assert unsupported(schema) is None
    assert parse(StructuredOutputsParams(json=json.dumps(schema))) is not None


@pytest.mark.parametrize(
    "around",
    [
        lambda inner: {"type": "array", "items": inner},
        lambda inner: {"type": "array", "prefixItems": [{"type": "null"}, inner]},
        lambda inner: {"type": "object", "properties": {"a": inner}},
        lambda inner: {"type": "object", "additionalProperties": inner},
        lambda inner: {"type": "object", "patternProperties": {"^a": inner}},
        lambda inner: {"anyOf": [{"type": "null"}, inner]},
        lambda inner: {"$ref": "#/$defs/a", "$defs": {"a": inner}},
    ],
)
def test_what_is_ignored_is_found_wherever_it_stands(around):
    assert unsupported(around(around(WRONG))) == "'not'"
    assert unsupported(around({"type": "null"})) is None


@pytest.mark.parametrize(
    ("schema", "found"),
    [
        ({"type": "string", "pattern": "^a+$", "maxLength": 3}, "'maxLength' beside 'pattern'"),
        ({"type": "string", "pattern": "^a+$", "minLength": 3}, "'minLength' beside 'pattern'"),
        ({"type": "string", "format": "date", "maxLength": 3}, "'maxLength' beside 'format'"),
        ({"type": "string", "format": "date", "minLength": 30}, "'minLength' beside 'format'"),
        ({"type": "string", "format": "date", "pattern": "^x$"}, "'pattern' beside 'format'"),
        ({"type": "object", "properties": {"a": {}}, "dependentRequired": {"a": ["b"]}}, "'dependentRequired'"),
        ({"type": "object", "properties": {"a": {}}, "dependentSchemas": {"a": {}}}, "'dependentSchemas'"),
        ({"type": "object", "properties": {"a": {}}, "dependencies": {"a": ["b"]}}, "'dependencies'"),
        ({"type": "array", "items": {"type": "string"}, "contains": {"type": "null"}}, "'contains'"),
        ({"type": "array", "contains": {"type": "null"}}, "'contains'"),
        ({"$dynamicRef": "#a"}, "'$dynamicRef'"),
        ({"type": "string", "enum": ["a", 1]}, "a value of 'enum' that has not its 'type'"),
        ({"type": "integer", "enum": [1, 1.5]}, "a value of 'enum' that has not its 'type'"),
        ({"type": "number", "enum": [1, True]}, "a value of 'enum' that has not its 'type'"),
        ({"type": ["string", "array"], "enum": ["a", None]}, "a value of 'enum' that has not its 'type'"),
        ({"type": "string", "const": 5}, "a value of 'const' that has not its 'type'"),
        ({"type": "object", "const": None}, "a value of 'const' that has not its 'type'"),
        ({"type": "string", "pattern": "^(?!b)[a-z]$"}, "'pattern' with a lookahead ('(?!')"),
        ({"type": "string", "pattern": "(?<=b)a"}, "'pattern' with a lookbehind ('(?<=')"),
        ({"type": "string", "pattern": "a^b"}, "'pattern' with '^' behind other characters"),
        ({"type": "string", "pattern": r"a\Z"}, r"'pattern' with the escape '\Z'"),
        ({"type": "object", "patternProperties": {"^a(?!b)": {}}}, "'patternProperties' with a lookahead ('(?!')"),
        (
            {"type": "object", "properties": {"x": {}}, "propertyNames": {"type": "string", "pattern": "^a$"}},
            "'propertyNames' beside 'properties'",
        ),
        (
            {"type": "object", "propertyNames": {"anyOf": [{"type": "string"}]}},
            "'propertyNames' that is more than a form of strings ('anyOf')",
        ),
        (
            {"type": "object", "propertyNames": {"type": "null"}},
            "'propertyNames' that is more than a form of strings ('type')",
        ),
        ({"patternProperties": {"^a": {}, "^b": {}}}, "'patternProperties' of more than one pattern"),
        (
            {"patternProperties": {"^a": {}}, "properties": {"ab": {}}},
            "a pattern of 'patternProperties' that a name of 'properties' matches ('ab')",
        ),
        (
            {"type": "object", "minProperties": 2},
            "'minProperties' above the number of 'required' names and one, where other names are free",
        ),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, OVERLAP),
        ({"oneOf": [{"enum": [1, 2]}, {"const": 2.0}]}, OVERLAP),
        ({"oneOf": [{"type": "string"}, {"enum": [1, "a"]}]}, OVERLAP),
        ({"oneOf": [{"properties": {"a": {"const": 1}}}, {"properties": {"a": {"const": 2}}}]}, OVERLAP),
    ],
)
def test_what_is_ignored_in_part_is_named(schema, found):
    assert unsupported(schema) == unsupported({"anyOf": [{"type": "null"}, schema]}) == found
    with pytest.raises(ValueError, match=f"^structured_outputs: json has {re.escape(found)}, which a grammar cannot"):
        parse(StructuredOutputsParams(json=schema))


def test_a_large_integer_is_one():
    assert unsupported({"type": "integer", "enum": [10**400]}) is None


def test_deep_nesting_is_no_recursion():
    schema = WRONG
    for _ in range(5000):
        schema = {"type": "array", "items": schema}
    assert unsupported(schema) == "'not'"


WRONG_VALUES = [None, True, 0, 1.5, "", "x", [], [None], ["x"], [1], {}, {"a": 1}, {"a": None}, [{}], [{"type": "x"}]]
KEYWORDS = (
    *(
        "properties",
        "required",
        "enum",
        "const",
        "anyOf",
        "allOf",
        "oneOf",
        "items",
        "prefixItems",
        "pattern",
        "format",
    ),
    *("additionalProperties", "patternProperties", "propertyNames", "minItems", "maxLength", "minimum", "multipleOf"),
    *("$ref", "$defs", "type", "description"),
)


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_a_wrong_value_of_a_keyword_is_an_error_and_no_crash(keyword):
    """Strangers send these to servers."""
    for value in WRONG_VALUES:
        for kind in ({"type": "object"}, {"type": "string"}, {}):
            for schema in (kind | {keyword: value}, {"type": "array", "items": kind | {keyword: value}}):
                try:
                    parse(StructuredOutputsParams(json=schema))
                except ValueError as error:
                    assert str(error).startswith("structured_outputs: json ")


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ([], "it must be an object, got \\[\\]"),
        ({"type": "object", "properties": None}, "'properties' must be an object, got None"),
        ({"type": "object", "properties": {"a": {"type": "object", "required": [1]}}}, "'required' must be a list of"),
        ({"type": "object", "required": "a"}, "'required' must be a list of strings, got 'a'"),
        ({"allOf": 3}, "'allOf' must be a list of schemas, got 3"),
        ({"anyOf": []}, "'anyOf' must be a list of schemas, got"),
        ({"type": "string", "format": ["date"]}, "'format' must be a string"),
        ({"type": []}, "'type' must name one at least, got \\[\\]"),
        ({"type": ["string", "text"]}, "'type' must be of string, number, .*, integer, got \\['string', 'text'\\]"),
        ({"enum": []}, "'enum' must name one at least, got \\[\\]"),
        ({"enum": [*range(10_001)]}, "'enum' has 10001 values, more than 10000"),
        ({"type": "string", "maxLength": -1}, "'maxLength' must be an integer of at least 0, got -1"),
        ({"type": "string", "minLength": 1.5}, "'minLength' must be an integer of at least 0, got 1.5"),
        ({"type": "string", "maxLength": True}, "'maxLength' must be an integer of at least 0, got True"),
        ({"type": "string", "maxLength": 10**6}, "'maxLength' must be at most 100000, got 1000000"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "'minLength' is above 'maxLength'"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "'minItems' is above 'maxItems'"),
        ({"type": "integer", "minimum": "1"}, "'minimum' must be a number, got '1'"),
        ({"type": "integer", "exclusiveMinimum": True}, "'exclusiveMinimum' must be a number, got True"),
        ({"type": "integer", "multipleOf": 0}, "'multipleOf' must be a number above 0, got 0"),
        ({"type": "array", "items": [{}]}, "'items' must be a schema, got \\[{}\\]"),
        ({"anyOf": [3]}, "'anyOf' must be a list of schemas, got \\[3\\]"),
        ({"properties": {"a": 3}}, "'properties' must hold schemas, got {'a': 3}"),
        ({"$ref": 3}, "'\\$ref' must be a string, got 3"),
        ({"$ref": "defs.json#/T"}, "'\\$ref' must name a schema that is in it, got 'defs.json#/T'"),
        ({"$ref": "#"}, "'\\$ref' leads back to itself: '#'"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "no value is valid"),
    ],
)
def test_what_is_malformed_is_named(schema, message):
    with pytest.raises(ValueError, match=f"^structured_outputs: json is not a JSON schema .*: {message}"):
        parse(StructuredOutputsParams(json=json.dumps(schema)))


def chain(length):
    names = [f"a{i}" for i in range(length)]
    definitions = {name: {"$ref": f"#/$defs/{following}"} for name, following in pairwise(names)}
    return {"$ref": "#/$defs/a0", "$defs": definitions | {names[-1]: {"type": "string"}}}


def optional(count, required=0):
    properties = {f"a{i}": {"type": "boolean"} for i in range(count + required)}
    return {"type": "object", "properties": properties, "required": list(properties)[:required]}


def test_properties_that_may_be_left_out_are_limited():
    """Their number counts more than once in the time that a grammar compiles, which others wait for."""
    full, part = optional(MOST_OPTIONAL, required=300), optional(100)
    assert parse(StructuredOutputsParams(json=full)) is not None
    with pytest.raises(ValueError, match=r"has 257 properties that are not 'required', more than 256$"):
        parse(StructuredOutputsParams(json={"type": "array", "items": optional(MOST_OPTIONAL + 1)}))
    assert malformed({"type": "array", "prefixItems": [part] * 20}) is None
    with pytest.raises(ValueError, match=r"its objects have more than 2000 properties that are not 'required'$"):
        parse(StructuredOutputsParams(json={"type": "array", "prefixItems": [part] * 21}))


def test_what_would_overflow_the_stack_of_native_code_is_refused():
    deep = {"type": "string"}
    for _ in range(MOST_DEPTH + 1):
        deep = {"type": "object", "properties": {"a": deep}}
    groups = "(" * (MOST_GROUPS + 1) + "a" + ")" * (MOST_GROUPS + 1)
    too_large = {
        f"more than {MOST_DEPTH} deep": deep,
        f"more than {MOST_BRANCHES} schemas": chain(5_000),
        f"more than {MOST_GROUPS} groups": {"type": "string", "pattern": groups},
    }
    for message, schema in too_large.items():
        with pytest.raises(ValueError, match=message):
            parse(StructuredOutputsParams(json=json.dumps(schema)))
    allowed = [deep["properties"]["a"], chain(MOST_BRANCHES - 2), {"type": "string", "pattern": groups[1:-1]}]
    for schema in allowed:
        assert parse(StructuredOutputsParams(json=json.dumps(schema))) is not None

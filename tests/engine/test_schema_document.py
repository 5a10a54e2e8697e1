"""References within a schema, and which schemas a value can be valid for."""

import json

import pytest
from jsonschema import Draft202012Validator

from tritonllm.engine.grammar.json_schema import malformed
from tritonllm.engine.grammar.schema_document import Document, moved

NULL = {"type": "null"}


REFERRING = [
    {"$ref": "#/$defs/a", "$defs": {"a": NULL}},
    {"$ref": "#/definitions/a%20b~1c~0", "definitions": {"a b/c~": NULL}},
    {"$ref": "#/x/0/y", "x": [{"y": NULL}]},
    {"$ref": "#a", "$defs": {"b": {"$anchor": "a", **NULL}}},
    {"$ref": "#a", "definitions": {"b": {"$id": "#a", **NULL}}},
    {"$id": "http://a/b.json", "$ref": "http://a/b.json#/$defs/a", "$defs": {"a": NULL}},
    {"$id": "http://a/b.json", "$ref": "c.json", "$defs": {"a": {"$id": "c.json", **NULL}}},
    {
        "$id": "http://a/b.json",
        "$ref": "c.json#d",
        "$defs": {"a": {"$id": "c.json", "$defs": {"e": {"$anchor": "d", **NULL}}}},
    },
]


@pytest.mark.parametrize("schema", REFERRING)
def test_references_within_the_document(schema):
    document = Document(schema)
    assert document.resolved(schema)["type"] == "null" and malformed(document) is None


def test_a_reference_is_relative_to_the_schema_around_it_that_has_an_id():
    inner = {"$id": "in.json", "$defs": {"x": {"type": "string"}}, "type": "array", "items": {"$ref": "#/$defs/x"}}
    document = Document({"$defs": {"x": NULL, "y": inner}, "$ref": "in.json"})
    assert document.resolved(inner["items"]) == {"type": "string"}
    assert document.resolved(document.root) is document.root["$defs"]["y"]


@pytest.mark.parametrize(
    "reference", ["http://x/y", "defs.json#/T", "#nowhere", "#/$defs/b", "#/type", "", "http://[", "#/$defs/a/3"]
)
def test_references_out_of_the_document_are_refused(reference):
    schema = {"type": "array", "items": {"$ref": reference}, "$defs": {"a": NULL}}
    found = malformed(schema)
    assert found == (None if reference == "" else f"'$ref' must name a schema that is in it, got {reference!r}")


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"$ref": "#"}, "#"),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [NULL, {"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}}},
            "#/$defs/a",
        ),
    ],
)
def test_circles_are_named(schema, named):
    assert Document(schema).circle() in (named, "#/$defs/b")
    assert malformed(schema).startswith("'$ref' leads back to itself: '#")


def test_a_schema_may_hold_itself():
    tree = {"type": "object", "properties": {"left": {"$ref": "#"}, "right": {"anyOf": [NULL, {"$ref": "#"}]}}}
    assert Document(tree).circle() is None and malformed(tree) is None
    assert malformed({**tree, "required": ["right"]}) is None
    assert malformed({**tree, "required": ["left"]}) == "no value is valid"


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"anyOf": [False, {"allOf": [False]}]},
        {"type": "array", "items": False, "minItems": 1},
        {"type": "array", "prefixItems": [NULL, False], "minItems": 2},
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
        {"type": "object", "properties": {"a": NULL, "b": False}, "minProperties": 2},
    ],
)
def test_no_value_is_valid(schema):
    assert malformed(schema) == "no value is valid"


def test_values_that_may_be_left_out_need_not_be_possible():
    for schema in (
        {"type": "array", "items": False},
        {"type": "array", "prefixItems": [NULL, False], "minItems": 1},
        {"type": "object", "properties": {"a": False}},
        {"type": ["null", "object"], "properties": {"a": False}, "required": ["a"]},
    ):
        assert malformed(schema) is None


def test_nothing_is_recursive():
    schema = NULL
    for _ in range(5000):
        schema = {"anyOf": [schema]}
    document = Document({"$defs": {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(5000)} | {"a5000": schema}})
    assert document.circle() is None and len(document.possible()) == len(document.parts) == 10_002


@pytest.mark.parametrize("schema", REFERRING)
def test_a_moved_schema_says_the_same_beside_others(schema):
    before = json.dumps(schema)
    other = {"$defs": {"a": {"type": "integer"}}, "x": 3, "$ref": "#/$defs/a"}
    around = {
        "$id": "http://a/b.json",
        "$defs": {"a/b%": moved(schema, "/$defs/a~1b%25"), "a": moved(other, "/$defs/a"), "c": {"$anchor": "a"}},
        "type": "array",
        "prefixItems": [{"$ref": "#/$defs/a~1b%25"}, {"$ref": "#/$defs/a"}],
    }
    assert json.dumps(schema) == before and malformed(around) is None
    valid = Draft202012Validator(around).is_valid
    assert valid([None, 3]) and not valid([3, 3]) and not valid([None, None])


def test_references_out_of_a_moved_schema_are_named():
    with pytest.raises(LookupError, match="#/x"):
        moved({"items": {"$ref": "#/x"}}, "/$defs/a")

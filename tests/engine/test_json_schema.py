import json

import pytest
from hypothesis import given
from support.schemas import SCHEMAS

from tritonllm.engine.grammar import parse
from tritonllm.engine.json_schema import unsupported
from tritonllm.sampling_params import StructuredOutputsParams

WRONG = {"not": {"type": "null"}}


@given(SCHEMAS)
def test_ordinary_schemas_are_taken(schema):
    assert unsupported(schema) is None
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
        {"type": "array", "items": {"type": "null"}, "uniqueItems": False, "minItems": 1},
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


def test_deep_nesting_is_no_recursion():
    schema = WRONG
    for _ in range(5000):
        schema = {"type": "array", "items": schema}
    assert unsupported(schema) == "'not'"

"""The form of an answer that must be a call: each tool's schema is a document of its own."""

import json
import re

import pytest
from jsonschema import Draft202012Validator
from support.random_texts import allows, compiled, random_text
from support.random_texts import compiler as new_compiler

from tritonllm.engine.grammar import guidance
from tritonllm.engine.grammar.json_schema import malformed
from tritonllm.serve.api.protocol import chat_request
from tritonllm.serve.api.turn import forced_form


def tool(name, parameters):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def taking(item, **more):
    return {
        "type": "object",
        "properties": {"item": {"$ref": "#/$defs/Item"}},
        "required": ["item"],
        "additionalProperties": False,
        "$defs": {"Item": item},
        **more,
    }


NUMBERS = taking({"type": "integer", "minimum": 0, "maximum": 9})
WORDS = taking({"enum": ["a", "b"]})
TREE = {  # refers to the whole, by an anchor that others have, too, by an $id, and through names that pointers escape
    "$id": "https://example.org/tree",
    "type": "object",
    "properties": {
        "left": {"$ref": "#"},
        "at": {"$ref": "#Item"},
        "odd": {"$ref": "tree#/definitions/a~1b%20%25"},
        "free": {"$ref": "#/$defs/any"},
    },
    "additionalProperties": False,
    "definitions": {"a/b %": {"type": "null"}},
    "$defs": {"x": {"$anchor": "Item", "type": "boolean"}, "any": True},
}
PLAIN = {"type": "object", "properties": {"a": {"$anchor": "Item", "type": "null"}}, "additionalProperties": False}
TOOLS = [tool("count", NUMBERS), tool("spell", WORDS), tool("grow", TREE), tool("plain", PLAIN), tool("free", None)]
CALLS = [
    ("count", {"item": 3}, True),
    ("count", {"item": "a"}, False),
    ("spell", {"item": "a"}, True),
    ("spell", {"item": 3}, False),
    ("grow", {"left": {"at": True, "odd": None, "free": [{"b": 1.5}]}}, True),
    ("grow", {"at": None}, False),
    ("grow", {"left": {"item": 3}}, False),
    ("grow", {"odd": 1}, False),
    ("plain", {"a": None}, True),
    ("plain", {"a": True}, False),
    ("free", {"b": [1]}, True),
]


def form(tools, **more):
    messages = [{"role": "user", "content": "x"}]
    body = chat_request({"messages": messages, "tools": tools, "tool_choice": "required", **more})
    return forced_form(body, body.tool_names())


@pytest.fixture(scope="module")
def compiler():
    return new_compiler()


def text_of(name, arguments):
    return json.dumps([{"name": name, "parameters": arguments}])


@pytest.mark.parametrize("more", [{}, {"parallel_tool_calls": False}])
def test_references_are_looked_up_in_the_tools_own_schema(compiler, more):
    grammar = compiled(compiler, json=form(TOOLS, **more).json, disable_any_whitespace=True)
    assert [allows(grammar, text_of(name, arguments)) for name, arguments, _ in CALLS] == [right for *_, right in CALLS]
    schemas = {one["function"]["name"]: one["function"]["parameters"] or {} for one in TOOLS}
    for seed in range(20):
        for call in json.loads(random_text(grammar, seed) or "[]"):
            Draft202012Validator(schemas[call["name"]]).validate(call["parameters"])


def test_so_they_are_with_the_other_backend():
    llguidance = pytest.importorskip("llguidance")
    bytes_ = llguidance.LLTokenizer("byte")
    made = llguidance.LLMatcher(bytes_, guidance.parse(form(TOOLS)), log_level=0)
    for name, arguments, right in CALLS:
        matcher = made.deep_copy()
        taken = all(matcher.consume_token(byte) for byte in text_of(name, arguments).encode())
        assert (taken and matcher.is_accepting()) == right, (name, arguments)


def test_what_the_template_is_shown_stays():
    before = json.dumps(TOOLS)
    form(TOOLS)
    assert json.dumps(TOOLS) == before


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "broken"}}])
@pytest.mark.parametrize("reference", ["#/$defs/Thing", "#Item", "https://example.org/tree", "#/properties/item/type"])
def test_a_reference_out_of_the_tools_schema_is_refused_by_name(choice, reference):
    broken = taking({"type": "null"}, properties={"item": {"$ref": reference}})
    named = f"tools: '$ref' in the parameters of 'broken' must name a schema that is in them, got '{reference}'"
    with pytest.raises(ValueError, match=f"^{re.escape(named)}"):
        form([*TOOLS[:3], tool("broken", broken)], tool_choice=choice)


def test_a_schema_that_is_too_deep_is_refused_by_name():
    deep = inner = {}
    for _ in range(3000):
        inner["default"] = inner = {}
    with pytest.raises(ValueError, match="tools: the parameters of 'count' are nested too deep"):
        form([tool("count", {**NUMBERS, "x": deep})])


def test_as_many_tools_without_references_fit_as_before():
    tools = [tool(f"t{number}", PLAIN) for number in range(900)]
    assert malformed(json.loads(form(tools).json)) is None


def test_long_schemas_are_refused_by_name():
    with pytest.raises(ValueError, match=r"^tools: their parameters have more than 524288 characters"):
        form([tool("a", {"description": "x" * 300_000}), tool("b", {"description": "x" * 300_000})])

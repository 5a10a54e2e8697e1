"""Small JSON schemas whose outputs are short, and whether a value is valid under one."""

import re
from typing import Any

from hypothesis import strategies as st

NAMES = ("a", "bc", "name", "é x", 'q"')


def _bounds(low: str, high: str, most: int) -> st.SearchStrategy[dict[str, int]]:
    pairs = st.tuples(st.integers(0, most), st.integers(0, most)).map(sorted)
    return pairs.map(lambda pair: {low: pair[0], high: pair[1]})


def _object(properties: dict[str, Any], optional: int) -> dict[str, Any]:
    required = list(properties)[optional % (len(properties) + 1) :]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


_LEAVES = st.one_of(
    _bounds("minimum", "maximum", 2000).map(lambda b: {"type": "integer", **b}),
    _bounds("minLength", "maxLength", 6).map(lambda b: {"type": "string", **b}),
    st.sampled_from(["[ab]{1,5}", "(x|yz){2}", "[0-9]{3}"]).map(lambda p: {"type": "string", "pattern": f"^{p}$"}),
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.lists(st.sampled_from([1, "one", None, True, 'q"\\', "é"]), min_size=1, max_size=3).map(lambda e: {"enum": e}),
)


def _containers(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.one_of(
        st.builds(lambda items, b: {"type": "array", "items": items, **b}, inner, _bounds("minItems", "maxItems", 3)),
        st.builds(_object, st.dictionaries(st.sampled_from(NAMES), inner, max_size=3), st.integers(0, 3)),
        st.lists(inner, min_size=1, max_size=2).map(lambda ways: {"anyOf": ways}),
    )


SCHEMAS = st.recursive(_LEAVES, _containers, max_leaves=4)
_TYPES: dict[str, type] = {"string": str, "boolean": bool, "array": list, "object": dict, "null": type(None)}


def valid(schema: dict[str, Any], value: Any) -> bool:
    """For the keywords above."""
    if "anyOf" in schema:
        return any(valid(way, value) for way in schema["anyOf"])
    if "enum" in schema:
        return any(type(value) is type(one) and value == one for one in schema["enum"])
    kind = schema["type"]
    if kind == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    if type(value) is not _TYPES[kind]:
        return False
    if kind == "string":
        fits = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 99)
        return fits and ("pattern" not in schema or re.search(schema["pattern"], value) is not None)
    if kind == "array":
        return schema["minItems"] <= len(value) <= schema["maxItems"] and all(valid(schema["items"], v) for v in value)
    if kind == "object":
        inside = value.keys() <= schema["properties"].keys() and value.keys() >= set(schema["required"])
        return inside and all(valid(schema["properties"][name], v) for name, v in value.items())
    return True

"""What of JSON Schema a grammar cannot hold an output to. Such a schema is refused: its outputs would not validate.

Found by compiling schemas with xgrammar 0.2.8 and offering it what they forbid: it leaves these keywords out without a
word, or with a warning on stderr. It recurses in native code, without a limit: a chain of 10,000 references or a
pattern of 30,000 nested groups ended the process, and 256 nested objects took 9 s (two cores of an EPYC). So sizes have
limits.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from tritonllm.engine.expressions import ignored
from tritonllm.sampling_params import MAX_CHOICES

_NEVER = (
    *("not", "if", "contentSchema", "contains", "dependentRequired", "dependentSchemas", "dependencies"),
    *("$dynamicRef", "$recursiveRef"),
)
_ALTERNATIVES = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")
_REMARKS = {
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "discriminator"),
    *("$schema", "$id", "$comment", "$defs", "definitions", "$anchor"),
}
_NEED_TYPE = (
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength", "pattern"),
    *("format", "minItems", "maxItems", "minProperties", "maxProperties", "required"),
)
_FORMATS = {
    *("email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri", "uri-reference"),
    *("uri-template", "json-pointer", "relative-json-pointer"),
}
_TYPES: dict[str, type] = {"string": str, "boolean": bool, "array": list, "object": dict, "null": type(None)}
_OF_ONE = ("items", "additionalProperties", "propertyNames", "unevaluatedProperties", "unevaluatedItems", "contains")
_OF_LIST = ("anyOf", "oneOf", "allOf", "prefixItems")
_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
MOST_DEPTH = 64  # of schemas in schemas; 64 nested objects take 80 ms
MOST_BRANCHES = 2000  # schemas that have others in them, or refer to one: no chain of references is longer
MOST_OPTIONAL = 256  # properties of one object that may be left out: 200 take 80 ms, 700 8 s
MOST_OPTIONAL_IN_ALL = 2000  # of all objects: 8 of 250 take 2 s
MOST_VALUES = MAX_CHOICES  # of all enums: a million kept xgrammar busy for more than ten minutes
MOST_GROUPS = 500  # nested parentheses of a pattern


def malformed(schema: Any) -> str | None:
    """Why this is no schema, or too large a one; ``None`` if it can be parsed."""
    if not isinstance(schema, Mapping | bool):
        return f"it must be an object, got {_short(schema)}"
    branches = left_out = values = 0
    for part, depth in _parts(schema):
        if depth > MOST_DEPTH:
            return f"schemas are nested more than {MOST_DEPTH} deep"
        branches += "$ref" in part or any(name in part for name in (*_OF_ONE, *_OF_LIST, *_OF_NAMES))
        if branches > MOST_BRANCHES:
            return f"it has more than {MOST_BRANCHES} schemas that hold or name others"
        found = _wrong_keyword(part)
        if found is not None:
            return found
        values += len(part["enum"]) if isinstance(part.get("enum"), list) else 0
        if values > MOST_VALUES:
            return f"its enums have more than {MOST_VALUES} values"
        optional = len(part.get("properties", {}).keys() - set(part.get("required", ())))
        if optional > MOST_OPTIONAL:
            return f"an object has {optional} properties that are not 'required', more than {MOST_OPTIONAL}"
        left_out += optional
        if left_out > MOST_OPTIONAL_IN_ALL:
            return f"its objects have more than {MOST_OPTIONAL_IN_ALL} properties that are not 'required'"
    return None


def _wrong_keyword(part: Mapping[str, Any]) -> str | None:
    for name in _OF_NAMES:
        if not isinstance(part.get(name, {}), Mapping):
            return f"{name!r} must be an object, got {_short(part[name])}"
    for name in _OF_LIST:
        if name in part and (not isinstance(part[name], list) or not part[name]):
            return f"{name!r} must be a list of schemas, got {_short(part[name])}"
    required = part.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        return f"'required' must be a list of strings, got {_short(required)}"
    for name in ("format", "pattern"):
        if not isinstance(part.get(name, ""), str):
            return f"{name!r} must be a string, got {_short(part[name])}"
    if any(
        pattern.count("(") > MOST_GROUPS for pattern in (part.get("pattern", ""), *part.get("patternProperties", ()))
    ):
        return f"a pattern has more than {MOST_GROUPS} groups"
    return None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def unsupported(schema: Any) -> str | None:
    """What of a schema, or of one within it, would be ignored; ``None`` if nothing."""
    for part, _ in _parts(schema):
        found = _of_one(part)
        if found is not None:
            return found
    return None


def _parts(schema: Any) -> Iterator[tuple[Mapping[str, Any], int]]:
    """The schema and those in it, and how deep each one lies."""
    waiting = [(schema, 0)]
    while waiting:  # no recursion: a user may nest as deep as a message is long
        part, depth = waiting.pop()
        if not isinstance(part, Mapping):
            continue
        yield part, depth
        inner = [part[name] for name in _OF_ONE if name in part]
        inner += [one for name in _OF_LIST if isinstance(part.get(name), list) for one in part[name]]
        inner += [one for name in _OF_NAMES if isinstance(part.get(name), Mapping) for one in part[name].values()]
        waiting += [(one, depth + 1) for one in inner]


def _of_one(schema: Mapping[str, Any]) -> str | None:
    for name in _NEVER:
        if name in schema:
            return f"{name!r}"
    if schema.get("uniqueItems"):
        return "'uniqueItems'"
    for name, patterns in (
        ("pattern", [schema.get("pattern", "")]),
        ("patternProperties", schema.get("patternProperties", ())),
    ):
        for pattern in patterns:
            found = ignored(pattern)
            if found is not None:
                return f"{name!r} with {found}"
    chosen = [name for name in _ALTERNATIVES if name in schema]
    if chosen:
        if chosen[0] == "allOf" and len(schema["allOf"]) > 1:
            return "'allOf' of more than one schema"
        beside = schema.keys() - _REMARKS - {chosen[0]} - ({"type"} if chosen[0] in ("enum", "const") else set())
        if beside:
            return f"{min(beside)!r} beside {chosen[0]!r}"
        values = schema["enum"] if chosen[0] == "enum" else [schema.get("const")]
        other = "type" in schema and isinstance(values, list) and not all(_is_of(v, schema["type"]) for v in values)
        return f"a value of {chosen[0]!r} that has not its 'type'" if other else None
    kind = schema.get("type")
    for name in _NEED_TYPE:
        if name in schema and kind is None:
            return f"{name!r} without 'type'"
    if "multipleOf" in schema and kind != "integer":
        return "'multipleOf' of other numbers than integers"
    if schema.get("format", "date") not in _FORMATS:
        return f"'format': {schema['format']!r}"
    forms = [name for name in ("format", "pattern", "maxLength", "minLength") if schema.get(name, 0) != 0]
    if len(forms) > 1 and forms[0] != "maxLength":
        return f"{forms[1]!r} beside {forms[0]!r}"
    if "propertyNames" in schema and (named := schema.keys() & {"properties", "patternProperties"}):
        return f"'propertyNames' beside {min(named)!r}"
    missing = set(schema.get("required", ())) - set(schema.get("properties", ()))
    return f"'required' names without 'properties' ({min(missing)!r})" if missing else None


def _is_of(value: Any, types: Any) -> bool:
    """Whether a value has the type, or one of the types, that a schema names."""
    names = types if isinstance(types, list) else [types]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "number" in names or ("integer" in names and (isinstance(value, int) or value.is_integer()))
    return any(isinstance(value, kind) for name, kind in _TYPES.items() if name in names)

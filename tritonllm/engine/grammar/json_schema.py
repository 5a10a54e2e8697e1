"""What of JSON Schema a grammar cannot hold an output to. Such a schema is refused: its outputs would not validate.

xgrammar recurses in native code, without a limit: a chain of 10,000 references or a pattern of 30,000 nested groups
ended the process, and 256 nested objects took 9 s (version 0.2.8, two cores of an EPYC). So sizes have limits.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from tritonllm.config.sampling_params import MAX_CHOICES
from tritonllm.engine.grammar.expressions import ignored, too_large
from tritonllm.engine.grammar.schema_document import (
    ALL_TYPES,
    OF_LIST,
    OF_NAMES,
    OF_ONE,
    Document,
    rest_of_object,
    types_of,
)
from tritonllm.engine.grammar.string_formats import FORMATS

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
_OVERLAP = "'oneOf' of schemas of which two may be valid ('anyOf' can be kept)"
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_OF_NAME = {"type", "minLength", "maxLength", "pattern", "format", "enum", "const", *_REMARKS}  # in propertyNames
_TYPES: dict[str, type] = {"string": str, "boolean": bool, "array": list, "object": dict, "null": type(None)}
MOST_DEPTH = 64  # of schemas in schemas; 64 nested objects take 80 ms
MOST_BRANCHES = 2000  # schemas that have others in them, or refer to one: no chain of references is longer
MOST_OPTIONAL = 256  # properties of one object that may be left out: 200 take 80 ms, 700 8 s
MOST_OPTIONAL_IN_ALL = 2000  # of all objects: 8 of 250 take 2 s
MOST_VALUES = MAX_CHOICES  # of all enums: a million kept xgrammar busy for more than ten minutes
MOST_GROUPS = 500  # nested parentheses of a pattern
MOST_COUNT = 100_000  # characters, items or properties that a limit may name


def read_schema(value: str | Mapping[str, Any]) -> Document:
    """Read and check a user's schema.

    Raises:
        ValueError: it is no JSON, or malformed; the message begins with ``structured_outputs``.
    """
    try:
        document = Document(json.loads(value if isinstance(value, str) else json.dumps(value)))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"structured_outputs: json is not a JSON schema: {error}") from error
    wrong = malformed(document)
    if wrong is not None:
        raise ValueError(f"structured_outputs: json is not a JSON schema that can be followed: {wrong}")
    return document


def malformed(schema: Any) -> str | None:
    """Why this is no schema, or too large a one; ``None`` if it can be parsed.

    Args:
        schema: as JSON has it, or the :class:`~tritonllm.engine.grammar.schema_document.Document` of it.
    """
    document = schema if isinstance(schema, Document) else Document(schema)
    if not isinstance(document.root, Mapping | bool):
        return f"it must be an object, got {_short(document.root)}"
    branches = left_out = values = 0
    for part, depth in document.parts:
        if depth > MOST_DEPTH:
            return f"schemas are nested more than {MOST_DEPTH} deep"
        branches += "$ref" in part or any(name in part for name in (*OF_ONE, *OF_LIST, *OF_NAMES))
        if branches > MOST_BRANCHES:
            return f"it has more than {MOST_BRANCHES} schemas that hold or name others"
        found = next(_wrong_keywords(part), None)
        if found is not None:
            return found
        values += len(part["enum"]) if isinstance(part.get("enum"), list) else 0
        if values > MOST_VALUES:
            return f"its enums have more than {MOST_VALUES} values"
        if "$ref" in part and document.target(part) is None:
            return f"'$ref' must name a schema that is in it, got {_short(part['$ref'])}"
        optional = len(part.get("properties", {}).keys() - set(part.get("required", ())))
        if optional > MOST_OPTIONAL:
            return f"an object has {optional} properties that are not 'required', more than {MOST_OPTIONAL}"
        left_out += optional
        if left_out > MOST_OPTIONAL_IN_ALL:
            return f"its objects have more than {MOST_OPTIONAL_IN_ALL} properties that are not 'required'"
    circle = document.circle()
    if circle is not None:
        return f"'$ref' leads back to itself: {circle!r}"
    if document.root is False or (document.root is not True and id(document.root) not in document.possible()):
        return "no value is valid"
    return None


def _wrong_keywords(part: Mapping[str, Any]) -> Iterator[str]:
    for name in OF_NAMES:
        if not isinstance(part.get(name, {}), Mapping):
            yield f"{name!r} must be an object, got {_short(part[name])}"
        elif not _are_schemas(part.get(name, {}).values()):
            yield f"{name!r} must hold schemas, got {_short(part[name])}"
    for name in OF_LIST:
        if name in part and (not isinstance(part[name], list) or not part[name] or not _are_schemas(part[name])):
            yield f"{name!r} must be a list of schemas, got {_short(part[name])}"
    for name in OF_ONE:
        if name in part and not _are_schemas([part[name]]):
            yield f"{name!r} must be a schema, got {_short(part[name])}"
    required = part.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        yield f"'required' must be a list of strings, got {_short(required)}"
    for name in ("format", "pattern", "$ref"):
        if not isinstance(part.get(name, ""), str):
            yield f"{name!r} must be a string, got {_short(part[name])}"
    kinds = part.get("type", "null")
    known = [*ALL_TYPES, "integer"]
    if not all(isinstance(kind, str) and kind in known for kind in (kinds if isinstance(kinds, list) else [kinds])):
        yield f"'type' must be of {', '.join(known)}, got {_short(kinds)}"
    if kinds == [] or part.get("enum", [None]) == [] or not isinstance(part.get("enum", []), list):
        name = "type" if kinds == [] else "enum"
        yield f"{name!r} must name one at least, got {_short(part[name])}"
    if len(part.get("enum", ())) > MAX_CHOICES:
        yield f"'enum' has {len(part['enum'])} values, more than {MAX_CHOICES}"
    if any(
        pattern.count("(") > MOST_GROUPS for pattern in (part.get("pattern", ""), *part.get("patternProperties", ()))
    ):
        yield f"a pattern has more than {MOST_GROUPS} groups"
    yield from _wrong_numbers(part)


def _are_schemas(values: Any) -> bool:
    return all(isinstance(one, Mapping | bool) for one in values)


def _wrong_numbers(part: Mapping[str, Any]) -> Iterator[str]:
    for name in _COUNTS:
        value = part.get(name, 0)
        if not _is_number(value) or value < 0 or value != int(value):
            yield f"{name!r} must be an integer of at least 0, got {_short(value)}"
        elif value > MOST_COUNT:
            yield f"{name!r} must be at most {MOST_COUNT}, got {_short(value)}"
    for name in _BOUNDS:
        value = part.get(name, 1)
        if not _is_number(value) or (name == "multipleOf" and value <= 0):
            kind = "a number above 0" if name == "multipleOf" else "a number"
            yield f"{name!r} must be {kind}, got {_short(value)}"
    for most in ("maxLength", "maxItems", "maxProperties"):
        least = most.replace("max", "min")
        if most in part and part.get(least, 0) > part[most]:
            yield f"{least!r} is above {most!r}"
    named = len({*part.get("required", ())})
    if named > part.get("maxProperties", named):
        yield "'required' names more than 'maxProperties'"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def unsupported(schema: Any) -> str | None:
    """What of a schema, or of one within it, cannot be kept; ``None`` if nothing.

    Args:
        schema: one that is not malformed, as JSON has it, or its document.
    """
    document = schema if isinstance(schema, Document) else Document(schema)
    for part, _ in document.parts:
        found = _of_one(part, document)
        if found is not None:
            return found
    return None


def _of_one(schema: Mapping[str, Any], document: Document) -> str | None:
    for name in _NEVER:
        if name in schema:
            return f"{name!r}"
    if schema.get("uniqueItems"):
        return "'uniqueItems'"
    for name in ("pattern", "patternProperties"):
        found = _of_patterns(name, [schema["pattern"]] if "pattern" in schema and name == "pattern" else schema)
        if found is not None:
            return found
    chosen = [name for name in _ALTERNATIVES if name in schema]
    if chosen:
        return _of_alternatives(schema, chosen[0], document)
    kind = schema.get("type")
    for name in _NEED_TYPE:
        if name in schema and kind is None:
            return f"{name!r} without 'type'"
    if "multipleOf" in schema and (kind != "integer" or schema["multipleOf"] != int(schema["multipleOf"])):
        return "'multipleOf' of other numbers than integers"
    if schema.get("format", "date") not in FORMATS:
        return f"'format': {schema['format']!r}"
    forms = [name for name in ("format", "pattern", "maxLength", "minLength") if schema.get(name, 0) != 0]
    if len(forms) > 1 and forms[0] != "maxLength":
        return f"{forms[1]!r} beside {forms[0]!r}"
    return _of_object(schema, document)


def _of_patterns(name: str, holder: Any) -> str | None:
    for pattern in holder if isinstance(holder, list) else holder.get(name, ()):
        found = ignored(pattern) or too_large("regex", pattern)
        if found is not None:
            return f"{name!r} with {found}"
    return None


def _of_alternatives(schema: Mapping[str, Any], chosen: str, document: Document) -> str | None:
    if chosen == "allOf" and len(schema["allOf"]) > 1:
        return "'allOf' of more than one schema"
    beside = schema.keys() - _REMARKS - {chosen} - ({"type"} if chosen in ("enum", "const") else set())
    if beside:
        return f"{min(beside)!r} beside {chosen!r}"
    if chosen == "oneOf" and _overlap(schema["oneOf"], document):
        return _OVERLAP
    values = schema["enum"] if chosen == "enum" else [schema.get("const")]
    other = "type" in schema and isinstance(values, list) and not all(_is_of(v, schema["type"]) for v in values)
    return f"a value of {chosen!r} that has not its 'type'" if other else None


def _of_object(schema: Mapping[str, Any], document: Document) -> str | None:
    if "propertyNames" in schema and (named := schema.keys() & {"properties", "patternProperties"}):
        return f"'propertyNames' beside {min(named)!r}"
    names = document.resolved(schema.get("propertyNames", True))
    if isinstance(names, Mapping):
        beside = names.keys() - _OF_NAME
        if beside or "string" not in types_of(names) or not all(isinstance(one, str) for one in _values(names) or ()):
            return f"'propertyNames' that is more than a form of strings ({min(beside, default='type')!r})"
    elif names is False:
        return "'propertyNames' that no name is valid for"
    missing = set(schema.get("required", ())) - set(schema.get("properties", ()))
    if missing:
        return f"'required' names without 'properties' ({min(missing)!r})"
    patterns = schema.get("patternProperties", {})
    if len(patterns) > 1:
        return "'patternProperties' of more than one pattern"
    for pattern in patterns:
        both = [name for name in schema.get("properties", ()) if _may_match(pattern, name)]
        if both:
            return f"a pattern of 'patternProperties' that a name of 'properties' matches ({both[0]!r})"
    return _few_names(schema)


def _few_names(schema: Mapping[str, Any]) -> str | None:
    """Names of other members may come twice, and then they count once."""
    least = schema.get("minProperties", 0)
    if least > 1 + len({*schema.get("required", ())}) and rest_of_object(schema):
        return "'minProperties' above the number of 'required' names and one, where other names are free"
    return None


def _may_match(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return True


def _values(schema: Any) -> list[Any] | None:
    """All values that may be valid, where a schema lists them."""
    if not isinstance(schema, Mapping):
        return None
    return [schema["const"]] if "const" in schema else schema.get("enum")


def uncountable(document: Document) -> str | None:
    """What of a schema no grammar can keep, for it would have to count or compare; ``None`` if nothing."""
    for part, _ in document.parts:
        if "oneOf" in part and _overlap(part["oneOf"], document):
            return _OVERLAP
        found = _few_names(part)
        if found is not None:
            return found
    return None


def _overlap(schemas: list[Any], document: Document) -> bool:
    """Whether a value may be valid for two of these. What is not easy to rule out may be."""
    ways = [document.resolved(one) for one in schemas]
    ways = [one for one in ways if one is not False]
    return any(_may_share(one, other, document) for at, one in enumerate(ways) for other in ways[:at])


def _may_share(one: Any, other: Any, document: Document) -> bool:
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return True
    if any(name in way for way in (one, other) for name in ("anyOf", "oneOf", "allOf")):
        return True
    values, others = _values(one), _values(other)
    if values is not None and others is not None:
        return any(_same(a, b) for a in values for b in others)
    if values is not None or others is not None:
        kinds = _json_types(other if values is not None else one)
        return any(_type_of(value) in kinds for value in (others if values is None else values) or ())
    shared = _json_types(one) & _json_types(other)
    if shared != {"object"}:
        return bool(shared)
    both = {*one.get("required", ())} & {*other.get("required", ())}
    pairs = [[document.resolved(way.get("properties", {}).get(name)) for way in (one, other)] for name in both]
    return not any(_differ(*pair) for pair in pairs)


def _differ(one: Any, other: Any) -> bool:
    values, others = _values(one), _values(other)
    return values is not None and others is not None and not any(_same(a, b) for a in values for b in others)


def _same(one: Any, other: Any) -> bool:
    return bool(_type_of(one) == _type_of(other) and one == other)


def _json_types(schema: Mapping[str, Any]) -> set[str]:
    return {"number" if kind == "integer" else kind for kind in types_of(schema)}


def _type_of(value: Any) -> str:
    return next((name for name, kind in _TYPES.items() if isinstance(value, kind)), "number")


def _is_of(value: Any, types: Any) -> bool:
    """Whether a value has the type, or one of the types, that a schema names."""
    names = types if isinstance(types, list) else [types]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "number" in names or ("integer" in names and (isinstance(value, int) or value.is_integer()))
    return any(isinstance(value, kind) for name, kind in _TYPES.items() if name in names)

"""What of JSON Schema a grammar cannot hold an output to. Such a schema is refused: its outputs would not validate.

Found by compiling schemas with xgrammar 0.2.8 and offering it what they forbid: it leaves these keywords out without a
word, or with a warning on stderr.
"""

from collections.abc import Iterator, Mapping
from typing import Any

_NEVER = ("not", "if", "contentSchema")
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
_OF_ONE = ("items", "additionalProperties", "propertyNames", "unevaluatedProperties", "unevaluatedItems", "contains")
_OF_LIST = ("anyOf", "oneOf", "allOf", "prefixItems")
_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def unsupported(schema: Any) -> str | None:
    """What of a schema, or of one within it, would be ignored; ``None`` if nothing."""
    for part in _parts(schema):
        found = _of_one(part)
        if found is not None:
            return found
    return None


def _parts(schema: Any) -> Iterator[Mapping[str, Any]]:
    """The schema and those in it."""
    waiting = [schema]
    while waiting:  # no recursion: a user may nest as deep as a message is long
        part = waiting.pop()
        if not isinstance(part, Mapping):
            continue
        yield part
        waiting += [part[name] for name in _OF_ONE if name in part]
        waiting += [one for name in _OF_LIST if isinstance(part.get(name), list) for one in part[name]]
        waiting += [one for name in _OF_NAMES if isinstance(part.get(name), Mapping) for one in part[name].values()]


def _of_one(schema: Mapping[str, Any]) -> str | None:
    for name in _NEVER:
        if name in schema:
            return f"{name!r}"
    if schema.get("uniqueItems"):
        return "'uniqueItems'"
    chosen = [name for name in _ALTERNATIVES if name in schema]
    if chosen:
        if chosen[0] == "allOf" and len(schema["allOf"]) > 1:
            return "'allOf' of more than one schema"
        beside = schema.keys() - _REMARKS - {chosen[0]} - ({"type"} if chosen[0] in ("enum", "const") else set())
        return f"{min(beside)!r} beside {chosen[0]!r}" if beside else None
    kind = schema.get("type")
    for name in _NEED_TYPE:
        if name in schema and kind is None:
            return f"{name!r} without 'type'"
    if "multipleOf" in schema and kind != "integer":
        return "'multipleOf' of other numbers than integers"
    if schema.get("format", "date") not in _FORMATS:
        return f"'format': {schema['format']!r}"
    missing = set(schema.get("required", ())) - set(schema.get("properties", ()))
    return f"'required' names without 'properties' ({min(missing)!r})" if missing else None

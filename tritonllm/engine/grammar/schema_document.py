"""A JSON schema as a document: the schemas in it, what each ``$ref`` names, and which of them a value can be valid for.

References are resolved within the document only: by a pointer (``#/$defs/a``), an ``$anchor``, or the ``$id`` of the
whole or of a schema in it (JSON Schema 2020-12, section 8.2). No torch, and no recursion: a user may nest as deep as a
message is long.
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any
from urllib.parse import quote, unquote, urldefrag, urljoin

OF_ONE = ("items", "additionalProperties", "propertyNames", "unevaluatedProperties", "unevaluatedItems", "contains")
OF_LIST = ("anyOf", "oneOf", "allOf", "prefixItems")
OF_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
IN_PLACE = ("anyOf", "oneOf", "allOf")  # of a value itself, not of what is in it
Schema = Mapping[str, Any]
_MISSING = object()


class Document:
    """The schemas of a document.

    Args:
        schema: anything that JSON can be.

    Attributes:
        parts: each schema that is an object, and how deep it lies; those that only a reference finds, behind the rest.
    """

    def __init__(self, schema: Any) -> None:
        self.root = schema
        self.parts = list[tuple[Schema, int]]()
        self._bases = dict[int, str]()  # of each part: the URI that its references are relative to
        self._resources = {"": schema}  # by URI
        self._anchors = dict[tuple[str, str], Any]()
        self._targets = dict[int, Any]()
        done = 0
        self._walk(schema, "")
        while done < len(self.parts):
            part, _ = self.parts[done]
            done += 1
            if isinstance(part.get("$ref"), str):
                found = self._targets[id(part)] = self._find(part["$ref"], self._bases[id(part)])
                if isinstance(found, Mapping) and id(found) not in self._bases:
                    self._walk(found, self._bases[id(part)])

    def _walk(self, schema: Any, base: str) -> None:
        waiting = [(schema, 0, base)]
        while waiting:
            part, depth, base = waiting.pop()
            if not isinstance(part, Mapping):
                continue
            if isinstance(part.get("$id"), str):
                base, fragment = urldefrag(urljoin(base, part["$id"]))
                if fragment:  # as draft 7 wrote an anchor
                    self._anchors[base, fragment] = part
                else:
                    self._resources[base] = part
            if isinstance(part.get("$anchor"), str):
                self._anchors[base, part["$anchor"]] = part
            self.parts.append((part, depth))
            self._bases[id(part)] = base
            waiting += [(one, depth + 1, base) for one in inner(part)]

    def _find(self, reference: str, base: str) -> Any:
        try:
            uri, fragment = urldefrag(urljoin(base, reference) if base else reference)
        except ValueError:
            return None
        found = self._resources.get(uri, _MISSING)
        if found is _MISSING:
            return None
        if fragment and not fragment.startswith("/"):
            return self._anchors.get((uri, unquote(fragment)))
        for step in unquote(fragment).split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping) and key in found:
                found = found[key]
            elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            else:
                return None
        return found if isinstance(found, Mapping | bool) else None

    def target(self, part: Schema) -> Any:
        """What the ``$ref`` of a schema names: a schema; ``None`` if that is not in the document."""
        return self._targets.get(id(part))

    def resolved(self, schema: Any) -> Any:
        """What a chain of references ends at, which is not a circle."""
        while isinstance(schema, Mapping) and "$ref" in schema:
            schema = self.target(schema)
        return schema

    def circle(self) -> str | None:
        """A reference of a schema that leads back to it, and not to what is within its values."""
        done = set[int]()
        for start, _ in self.parts:
            path, above = [(start, iter(self._in_place(start)))], {id(start)}
            while path and id(start) not in done:
                part, others = path[-1]
                other = next(others, None)
                if other is None:
                    path.pop()
                    above.discard(id(part))
                    done.add(id(part))
                elif id(other) in above:
                    return next(str(one["$ref"]) for one, _ in reversed(path) if "$ref" in one)
                elif isinstance(other, Mapping) and id(other) not in done:
                    above.add(id(other))
                    path.append((other, iter(self._in_place(other))))
        return None

    def _in_place(self, part: Schema) -> Iterator[Any]:
        if "$ref" in part:
            yield self.target(part)
        for name in IN_PLACE:
            yield from part.get(name, ())

    def possible(self) -> set[int]:
        """Ids of the parts for which some value is valid that ends; bounds and lengths aside."""
        needs = dict[int, list[Schema]]()  # who to look at again when one is found possible
        for part, _ in self.parts:
            for one in [*inner(part), self.target(part)]:
                needs.setdefault(id(one), []).append(part)
        found = set[int]()
        waiting = [part for part, _ in self.parts]
        while waiting:
            part = waiting.pop()
            if id(part) not in found and self._is_possible(part, found):
                found.add(id(part))
                waiting += needs.get(id(part), ())
        return found

    def _is_possible(self, part: Schema, found: set[int]) -> bool:
        def able(schema: Any) -> bool:
            return schema is True or id(schema) in found

        if "$ref" in part:
            return able(self.target(part))
        for name in IN_PLACE:
            if name in part:
                return (all if name == "allOf" else any)(map(able, part[name]))
        kinds = types_of(part)
        if kinds - {"object", "array"} or "enum" in part or "const" in part:
            return True
        return ("object" in kinds and self._object(part, able)) or ("array" in kinds and self._array(part, able))

    def _object(self, part: Schema, able: Any) -> bool:
        properties = part.get("properties", {})
        extra = rest_of_object(part)
        return all(able(properties.get(name, True)) for name in part.get("required", ())) and (
            part.get("minProperties", 0) <= sum(map(able, properties.values())) or any(able(v) for _, v in extra)
        )

    def _array(self, part: Schema, able: Any) -> bool:
        least, first = part.get("minItems", 0), part.get("prefixItems", [])
        return all(map(able, first[: int(least)])) and (least <= len(first) or able(rest_of_array(part)))


def inner(part: Schema) -> list[Any]:
    """The schemas that stand in a schema."""
    found = [part[name] for name in OF_ONE if name in part]
    found += [one for name in OF_LIST if isinstance(part.get(name), list) for one in part[name]]
    return found + [one for name in OF_NAMES if isinstance(part.get(name), Mapping) for one in part[name].values()]


def has_references(schema: Schema) -> bool:
    """Whether a schema, or one within it, refers to another."""
    return any("$ref" in part for part, _ in Document(schema).parts)


def moved(schema: Schema, place: str) -> dict[str, Any]:
    """A schema that is a document of its own, for a place within another one: what its references name moves with it.

    Args:
        place: a pointer to where it will stand, as ``/$defs/a``.

    Raises:
        LookupError: a reference that names no schema in it; that is the error's argument.
        RecursionError: it is nested too deep to be copied.
    """
    found = Document(deepcopy(dict(schema)))
    pointers = _pointers(found.root)
    for part, _ in found.parts:
        assert isinstance(part, dict)
        if isinstance(part.get("$ref"), str):
            target = found.target(part)
            if target is None:
                raise LookupError(part["$ref"])
            if isinstance(target, bool):  # one has no place of its own
                part["anyOf"] = [target]
                del part["$ref"]
            else:
                part["$ref"] = f"#{place}{pointers[id(target)]}"
        for name in ("$id", "$anchor", "$schema"):
            part.pop(name, None)
    return dict(found.root)


def _pointers(root: Any) -> dict[int, str]:
    """Where each object of a document stands, by its id, as references write it."""
    found = dict[int, str]()
    waiting = [(root, "")]
    while waiting:
        value, pointer = waiting.pop()
        if isinstance(value, Mapping):
            found[id(value)] = pointer
            waiting += [(one, f"{pointer}/{_step(name)}") for name, one in value.items()]
        elif isinstance(value, list):
            waiting += [(one, f"{pointer}/{at}") for at, one in enumerate(value)]
    return found


def _step(name: str) -> str:
    return quote(name.replace("~", "~0").replace("/", "~1"), safe="~$")


_OF_OBJECTS = ("properties", "patternProperties", "additionalProperties", "propertyNames", "unevaluatedProperties")
_OF_ARRAYS = ("items", "prefixItems", "unevaluatedItems")
ALL_TYPES = ("string", "number", "boolean", "null", "array", "object")


def types_of(part: Schema) -> set[str]:
    """The types that values may have. Keywords of objects or of arrays without ``type`` mean objects, or arrays."""
    kinds = part.get("type")
    if kinds is not None:
        return set(kinds) if isinstance(kinds, list) else {kinds}
    objects, arrays = (any(name in part for name in names) for names in (_OF_OBJECTS, _OF_ARRAYS))
    return {"object"} if objects and not arrays else {"array"} if arrays and not objects else {*ALL_TYPES}


def rest_of_object(part: Schema) -> list[tuple[str | None, Any]]:
    """What an object may have beside ``properties``: patterns of names (none: other names) and schemas."""
    if part.get("patternProperties"):
        return [*part["patternProperties"].items()]
    schema = part.get("additionalProperties", part.get("unevaluatedProperties", "properties" not in part))
    return [] if schema is False else [(None, schema)]


def rest_of_array(part: Schema) -> Any:
    """The schema of an array's items behind ``prefixItems``."""
    return part.get("items", part.get("unevaluatedItems", "prefixItems" not in part))

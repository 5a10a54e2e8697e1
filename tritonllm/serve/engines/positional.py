"""Dataclasses as rows of their values, in the order of their fields, which is how they go to another process.

MessagePack of a dataclass repeats the names of its fields with each object; a row has only the values. What a row looks
like, and how it is made and read, follows from the types of the fields, so that no class is written twice. As
:mod:`dataclasses` does it, code is written once for each class: functions that look at fields take twice as long.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints


class Special(NamedTuple):
    """How a class goes to another process whose row does not follow from its fields.

    Attributes:
        type: of what is sent, as msgspec is told to read it.
        pack, unpack: make that of a value, and the value of that.
    """

    type: Any
    pack: Callable[[Any], Any]
    unpack: Callable[[Any], Any]


class Code(NamedTuple):
    """What is sent of a type, and two expressions: what is sent of a value, and the value of that."""

    type: Any
    pack: str
    unpack: str


class PositionalRows:
    """How values of one type go to another process.

    Args:
        kind: a dataclass, whose fields are dataclasses, too, or lists or mappings of them, or ``None`` as an
            alternative to one. Anything else is sent as it is.
        special: classes in it whose rows do not follow from their fields.

    Attributes:
        type: of what is sent, as msgspec is told to read it.
        pack, unpack: make that of a value, and the value of that.

    Raises:
        TypeError: alternatives of which one is a dataclass, and that are not only it and ``None``.
    """

    def __init__(self, kind: Any, special: Mapping[type, Special] | None = None) -> None:
        self._special = special or {}
        self._names: dict[str, Any] = {}  # that the code uses
        self._numbers = itertools.count()
        self.type, pack, unpack = self._code(kind, "value", "sent")
        self.pack: Callable[[Any], Any] = eval(f"lambda value: {pack}", self._names)
        self.unpack: Callable[[Any], Any] = eval(f"lambda sent: {unpack}", self._names)

    def _code(self, kind: Any, value: str, sent: str) -> Code:
        """The code for a type.

        Args:
            value, sent: expressions of a value, and of what was sent of one.
        """
        origin, arguments = get_origin(kind) or kind, get_args(kind)
        if origin in self._special:
            type_, pack, unpack = self._special[origin]
            return Code(type_, f"{self._named(pack)}({value})", f"{self._named(unpack)}({sent})")
        if isinstance(origin, type) and is_dataclass(origin):
            parameters = dict(zip(getattr(origin, "__parameters__", ()), arguments, strict=False))
            return self._row(origin, parameters, value, sent)
        if origin in (Union, UnionType):
            return self._optional(kind, value, sent)
        if origin in (list, Sequence):
            return self._list(arguments[0], value, sent, origin)
        if origin in (dict, Mapping):
            return self._dict(arguments[0], arguments[1], value, sent, origin)
        return Code(kind, value, sent)

    def _row(self, kind: type, parameters: Mapping[Any, Any], value: str, sent: str) -> Code:
        names, hints = [field.name for field in fields(kind)], get_type_hints(kind)
        places = [f"{sent}[{place}]" for place in range(len(names))]
        codes = [
            self._code(parameters.get(hints[name], hints[name]), f"{value}.{name}", place)
            for name, place in zip(names, places, strict=True)
        ]
        types, packs, unpacks = zip(*codes, strict=True)
        given = f"*{sent}" if unpacks == (*places,) else ", ".join(unpacks)
        return Code(tuple[types], f"({', '.join(packs)},)", f"{self._named(kind)}({given})")  # type: ignore[valid-type]

    def _optional(self, kind: Any, value: str, sent: str) -> Code:
        codes = [self._code(one, value, sent) for one in get_args(kind) if one is not NoneType]
        if all(code.pack == value and code.unpack == sent for code in codes):
            return Code(kind, value, sent)
        if len(codes) > 1:
            raise TypeError(f"{kind}: a dataclass may have None as an alternative, and nothing else")
        type_, pack, unpack = codes[0]
        unpack = unpack if unpack == sent else f"(None if {sent} is None else {unpack})"
        return Code(type_ | None, f"(None if {value} is None else {pack})", unpack)

    def _list(self, of: Any, value: str, sent: str, origin: Any) -> Code:
        each = f"each{next(self._numbers)}"
        type_, pack, unpack = self._code(of, each, each)
        return Code(
            list[type_],  # type: ignore[valid-type]
            _same(list, origin, value) if pack == each else f"[{pack} for {each} in {value}]",
            sent if unpack == each else f"[{unpack} for {each} in {sent}]",
        )

    def _dict(self, keys: Any, of: Any, value: str, sent: str, origin: Any) -> Code:
        key, each = (f"{what}{next(self._numbers)}" for what in ("key", "each"))
        type_, pack, unpack = self._code(of, each, each)
        every = f"for {key}, {each} in"
        return Code(
            dict[keys, type_],  # type: ignore[valid-type]
            _same(dict, origin, value) if pack == each else f"{{{key}: {pack} {every} {value}.items()}}",
            sent if unpack == each else f"{{{key}: {unpack} {every} {sent}.items()}}",
        )

    def _named(self, what: Any) -> str:
        name = f"name{next(self._numbers)}"
        self._names[name] = what
        return name


def _same(kind: type, origin: Any, value: str) -> str:
    """One of a kind that msgspec knows, with the same elements."""
    return value if origin is kind else f"{kind.__name__}({value})"

"""A step as bytes, and back: what rank 0 sends to the others, through memory or over a network.

The types of :class:`~tritonllm.engine.data.step.Step` are the schema: both sides derive from them, once, in which order
values come. A message is a list of numbers and names (JSON) and, behind it, the arrays' own bytes. So whatever comes,
it is read as values of these types or is an error. (Pickled objects, which name what is to be called, would let whoever
reaches a rank run any program there.)
"""

import json
import math
import struct
import types
import typing
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

import numpy as np

from tritonllm.engine.data.agreement import Sums
from tritonllm.engine.data.orders import Order
from tritonllm.engine.data.step import OF_THE_FIRST, Step
from tritonllm.engine.data.step_inputs import ALIGNMENT

DTYPES = {np.dtype(kind).str: np.dtype(kind) for kind in (np.bool_, np.uint8, np.int32, np.int64, np.float32)}
_HEAD = struct.Struct("<q")  # bytes of the list


class MalformedError(ValueError):
    """Bytes that are no step's message."""


class StepMessage(NamedTuple):
    """What rank 0 sends.

    Attributes:
        step: the next one; ``None`` for the draw of the oldest one, where that is not part of its launch.
        told: checksums of an earlier step that the others compare with their own.
        order: what to do instead of a step.
    """

    step: Step | None
    told: Sums | None
    order: Order | None = None


class _Reading:
    """Where the reading of a message is: its next word, and its arrays."""

    def __init__(self, words: list[Any], memory: np.ndarray, at: int) -> None:
        self.words, self.memory, self.at = iter(words), memory, at

    def array(self) -> np.ndarray:
        name, *shape = next(self.words)
        dtype = DTYPES[name]
        if not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError
        end = self.at + math.prod(shape) * dtype.itemsize
        if end > len(self.memory):
            raise ValueError
        found = self.memory[self.at : end].view(dtype).reshape(shape)
        self.at = _aligned(end)
        return found


class _Codec(NamedTuple):
    """How values of a type are written and read.

    Attributes:
        put: append a value's words and arrays.
        take: the next value.
    """

    put: Callable[[Any, list[Any], list[np.ndarray]], None]
    take: Callable[[_Reading], Any]


def pack(step: Step | None, told: Sums | None, order: Order | None = None) -> bytearray:
    """A message of :func:`unpack`.

    Args:
        step, told, order: as in :class:`StepMessage`; the step as :meth:`Step.for_followers` makes it.
    """
    words: list[Any] = []
    arrays: list[np.ndarray] = []
    _codec(StepMessage).put(StepMessage(step, told, order), words, arrays)
    listed = json.dumps(words, separators=(",", ":"), default=_number).encode()
    at = begin = _aligned(_HEAD.size + len(listed))
    spans = []
    for array in arrays:
        spans.append((at, at + array.nbytes))
        at = _aligned(at + array.nbytes)
    message = bytearray(at if arrays else begin)
    _HEAD.pack_into(message, 0, len(listed))
    message[_HEAD.size : _HEAD.size + len(listed)] = listed
    memory = np.frombuffer(message, np.uint8)
    for array, (first, last) in zip(arrays, spans, strict=True):
        if first < last:
            memory[first:last] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return message


def unpack(message: bytes | bytearray | memoryview) -> StepMessage:
    """What a message of :func:`pack` says. The arrays are views of it, and can be written if it can.

    Raises:
        MalformedError: it is no such message.
    """
    try:
        memory = np.frombuffer(message, np.uint8)
        (length,) = _HEAD.unpack_from(message)
        if not 0 <= length <= len(memory) - _HEAD.size:
            raise ValueError
        reading = _Reading(
            json.loads(memory[_HEAD.size : _HEAD.size + length].tobytes()), memory, _aligned(_HEAD.size + length)
        )
        found = _codec(StepMessage).take(reading)
        if next(reading.words, reading) is not reading or reading.at != len(memory):
            raise ValueError
        return found
    except (ValueError, TypeError, KeyError, IndexError, StopIteration, struct.error, RecursionError) as error:
        raise MalformedError("these bytes are no step of rank 0: all ranks need one version of tritonllm") from error


def _aligned(at: int) -> int:
    return -(-at // ALIGNMENT) * ALIGNMENT


def _number(value: object) -> int | float:
    """numpy's numbers as Python's, for the list."""
    if isinstance(value, np.bool_ | np.integer):
        return int(value)
    raise TypeError(f"{value!r} is nothing that a step holds")


@cache
def _codec(kind: Any) -> _Codec:
    """The codec of a type, made from the annotations of its parts."""
    origin = get_origin(kind)
    if kind in (bool, int, float, str):
        return _scalar(kind)
    if kind is np.ndarray or isinstance(kind, TypeVar):  # that of StepInputs, which on a wire are arrays of the host
        return _Codec(lambda value, words, arrays: _put_array(value, words, arrays), _Reading.array)
    if origin is Literal:
        return _literal(get_args(kind))
    if origin in (Union, types.UnionType):
        (inner,) = (each for each in get_args(kind) if each is not type(None))
        return _optional(_codec(inner))
    if origin is tuple:
        inner, *others = get_args(kind)
        return _sequence(_codec(inner)) if others == [...] else _fixed(get_args(kind))
    if origin is not None and typing.get_args(kind)[:1] == (str,):  # a mapping of names
        return _mapping(_codec(get_args(kind)[1]))
    return _record(origin or kind)


def _scalar(kind: type) -> _Codec:
    def take(reading: _Reading) -> Any:
        value = next(reading.words)
        if type(value) is not kind:
            value = _as(kind, value)
        return value

    return _Codec(lambda value, words, arrays: words.append(value), take)


def _as(kind: type, value: object) -> object:
    """What numpy's booleans and whole floats look like in the list."""
    if kind is bool and value in (0, 1) and type(value) is int:
        return bool(value)
    if kind is float and type(value) is int:
        return float(value)
    raise ValueError


def _literal(allowed: tuple[Any, ...]) -> _Codec:
    def take(reading: _Reading) -> Any:
        value = next(reading.words)
        if value not in allowed:
            raise ValueError
        return value

    return _Codec(lambda value, words, arrays: words.append(value), take)


def _put_array(value: np.ndarray, words: list[Any], arrays: list[np.ndarray]) -> None:
    words.append([value.dtype.str, *value.shape])
    arrays.append(value)


def _optional(inner: _Codec) -> _Codec:
    def put(value: Any, words: list[Any], arrays: list[np.ndarray]) -> None:
        words.append(0 if value is None else 1)
        if value is not None:
            inner.put(value, words, arrays)

    return _Codec(put, lambda reading: inner.take(reading) if _count(reading, 1) else None)


def _count(reading: _Reading, most: float = math.inf) -> int:
    count = next(reading.words)
    if type(count) is not int or not 0 <= count <= most:
        raise ValueError
    return count


def _sequence(inner: _Codec) -> _Codec:
    def put(value: Any, words: list[Any], arrays: list[np.ndarray]) -> None:
        words.append(len(value))
        for each in value:
            inner.put(each, words, arrays)

    # Each of them takes a word, so a number that is too large ends with the list.
    return _Codec(put, lambda reading: tuple([inner.take(reading) for _ in range(_count(reading))]))


def _mapping(inner: _Codec) -> _Codec:
    def put(value: Any, words: list[Any], arrays: list[np.ndarray]) -> None:
        words.append(len(value))
        for name, each in value.items():
            words.append(name)
            inner.put(each, words, arrays)

    name = _scalar(str)
    return _Codec(put, lambda reading: {name.take(reading): inner.take(reading) for _ in range(_count(reading))})


def _fixed(kinds: tuple[Any, ...]) -> _Codec:
    parts = [_codec(kind) for kind in kinds]

    def put(value: Any, words: list[Any], arrays: list[np.ndarray]) -> None:
        for part, each in zip(parts, value, strict=True):
            part.put(each, words, arrays)

    return _Codec(put, lambda reading: tuple([part.take(reading) for part in parts]))


def _record(kind: type) -> _Codec:
    """The codec of a dataclass or a named tuple, which encodes field by field."""
    hints = typing.get_type_hints(kind)
    names = [field.name for field in fields(kind)] if is_dataclass(kind) else list(getattr(kind, "_fields"))  # noqa: B009
    left_out = OF_THE_FIRST if kind is Step else {}
    parts = [(name, *_codec(hints[name])) for name in names if name not in left_out]

    def put(value: Any, words: list[Any], arrays: list[np.ndarray]) -> None:
        for name, put_field, _ in parts:
            put_field(getattr(value, name), words, arrays)

    def take(reading: _Reading) -> Any:
        return kind(**{name: take_field(reading) for name, _, take_field in parts})

    return _Codec(put, take)

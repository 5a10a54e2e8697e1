"""Large bodies are parsed in a thread, a part at a time, so that streams go on meanwhile.

The parser is one call in C, during which nothing else runs: 1.6 s for 7 MB of small objects, most of it for Python's
collector, which looks at all of these again and again. So a body may have so many objects and arrays only, which are
counted before any is made; and a large body is cut at its commas into parts that take a millisecond or two, between
which other threads have their turn. One thread does it for all bodies: several would each hold the others up.
"""

import asyncio
import json
import re
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from tritonllm.serve.api.errors import APIError

LARGE = 1 << 17  # bytes of a body, or of a value in it, that is parsed in parts
PART = 1 << 16
MOST_CONTAINERS = 100_000  # objects and arrays: a tool's schema has some dozens
MOST_LEVELS = 8  # of values in values that are cut; what is in these is parsed at once
_BLANKS = " \t\n\r"
_SLICE = 1 << 20  # bytes that are looked at in one call
_KEY = re.compile(rb'\s*("(?:[^"\\]|\\.)*")\s*:', re.DOTALL)
_QUOTE, _COMMA = ord('"'), ord(",")
_LEVELS = np.zeros(256, dtype=np.int8)  # what a character adds to the number of open brackets
_LEVELS[[*b"[{"]], _LEVELS[[*b"]}"]] = 1, -1


def route_for_large_bodies() -> type[APIRoute]:
    """A class of routes that take large bodies; its thread is that of all of them."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="large-bodies")

    class LargeRequest(Request):
        async def json(self) -> Any:
            if not hasattr(self, "_json"):
                body = await self.body()
                if len(body) <= LARGE:
                    return await super().json()
                self._json = await asyncio.get_running_loop().run_in_executor(thread, parse, body)
            return self._json

    class LargeBodyRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def handle_large(request: Request) -> Response:
                return await handle(LargeRequest(request.scope, request.receive))

            return handle_large

    return LargeBodyRoute


def parse(body: bytes) -> Any:
    """What a body says, as :func:`json.loads`.

    Raises:
        APIError: it has too many objects and arrays.
        ValueError: it is no JSON, or not in UTF-8.
    """
    text = body.decode(json.detect_encoding(body), "surrogatepass").strip(_BLANKS).encode("utf-8", "surrogatepass")
    if text.count(b"{") + text.count(b"[") > MOST_CONTAINERS:  # texts may have brackets, too
        count = sum(int((levels > 0).sum()) for _, levels, _ in _slices(text))
        if count > MOST_CONTAINERS:
            raise APIError(400, f"the body has {count} objects and arrays, more than {MOST_CONTAINERS}: leave some out")
    return _value(text, 0)


def _value(text: bytes, level: int) -> Any:
    if len(text) <= LARGE or level >= MOST_LEVELS or text[:1] + text[-1:] not in (b"[]", b"{}"):
        return json.loads(text)
    parts = _parts(text[1:-1])
    if text[:1] == b"[":
        values: list[Any] = []
        for part in parts:
            if len(part) > LARGE:
                values.append(_value(part.strip(), level + 1))
            else:
                values += json.loads(b"[%b]" % part)
        return values
    members: dict[str, Any] = {}
    for part in parts:
        key = _KEY.match(part) if len(part) > LARGE else None
        if key is None:
            members.update(json.loads(b"{%b}" % part))
        else:
            members[json.loads(key[1])] = _value(part[key.end() :].strip(), level + 1)
    return members


def _parts(text: bytes) -> Iterator[bytes]:
    """What stands between some of the commas of one object or array: as much as a part may have, or one long entry.

    Raises:
        json.JSONDecodeError: nothing stands there.
    """
    commas = _commas(text)
    begin = 0
    while begin <= len(text):
        last = int(np.searchsorted(commas, begin + PART, "right")) - 1
        if last < 0 or commas[last] < begin:
            last += 1  # none within a part
        end = int(commas[last]) if last < len(commas) and len(text) - begin > PART else len(text)
        if not text[begin:end].strip():
            raise json.JSONDecodeError("Expecting value", "", 0)
        yield text[begin:end]
        begin = end + 1


def _commas(text: bytes) -> "np.ndarray[Any, Any]":
    """Where those are that are within no string, object or array."""
    found, opened = [], 0
    for at, levels, outside in _slices(text):
        depths = opened + np.cumsum(levels, dtype=np.int32)
        characters = np.frombuffer(text, np.uint8, len(levels), at)
        found.append(at + np.flatnonzero(outside & (characters == _COMMA) & (depths == 0)))
        opened = int(depths[-1])
    return np.concatenate(found)


def _slices(text: bytes) -> "Iterator[tuple[int, np.ndarray[Any, Any], np.ndarray[Any, Any]]]":
    """Parts of a text of JSON: where each begins, what each of its characters adds to the number of open brackets, and
    whether it is outside of strings."""
    if b"\\" in text:
        text = text.replace(b"\\\\", b"  ").replace(b'\\"', b"  ")
    inside = 0
    for at in range(0, len(text), _SLICE):
        characters = np.frombuffer(text, np.uint8, min(_SLICE, len(text) - at), at)
        quotes = inside + np.cumsum(characters == _QUOTE, dtype=np.int32)
        outside = quotes % 2 == 0
        yield at, np.where(outside, _LEVELS[characters], 0), outside
        inside = int(quotes[-1]) % 2

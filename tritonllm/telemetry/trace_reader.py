"""Reads traces that :mod:`tritonllm.telemetry.trace` has written, whole ones and those that break off."""

import json
import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tritonllm.telemetry.trace_layout import DEVICE, GPU, HOST, REQUESTS

BLOCK = 1 << 20


class Slice(NamedTuple):
    """A slice of a track.

    Attributes:
        begin, end: microseconds from the beginning of the trace.
    """

    name: str
    begin: float
    end: float
    args: dict[str, Any]


@dataclass
class TraceData:
    """What a trace holds.

    Attributes:
        complete: the file has its end.
        why: the trace ended; empty if it broke off.
        about: what the writer says of itself.
        host, steps: slices of the host, and of the device as the host sees it, in their order.
        lanes: slices of sequences, by track, without those of whole requests.
        gaps: microseconds between a sequence's tokens, by request.
        requests: the records of ended requests, and of those that the trace left.
        begun: requests of which it has the beginning, by track, but no end.
        kernels: slices, by track.
        counters: name -> times, and values, of each of its events.
        forced: tokens that were not drawn.
        resets: reasons of steps that were broken off.
        seconds: the seconds between the first event and the last.
        events: how many events the file has.
    """

    complete: bool = False
    why: str = ""
    about: dict[str, Any] = field(default_factory=dict)
    host: list[Slice] = field(default_factory=list)
    steps: list[Slice] = field(default_factory=list)
    lanes: dict[int, list[Slice]] = field(default_factory=lambda: defaultdict(list))
    gaps: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    requests: list[dict[str, Any]] = field(default_factory=list)
    begun: dict[int, str] = field(default_factory=dict)
    kernels: dict[int, list[Slice]] = field(default_factory=lambda: defaultdict(list))
    counters: dict[str, list[tuple[float, dict[str, float]]]] = field(default_factory=lambda: defaultdict(list))
    forced: int = 0
    resets: list[str] = field(default_factory=list)
    seconds: float = 0.0
    events: int = 0


def read_trace(path: str | Path) -> TraceData:
    """Read the file of a trace.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no trace of this package.
    """
    data, owners = TraceData(), dict[int, str]()
    for event in _events(Path(path), data):
        data.events += 1
        end = event.get("ts", 0.0) + event.get("dur", 0.0)
        data.seconds = max(data.seconds, end / 1e6)
        _take(data, owners, event, end)
    if not data.about:
        raise ValueError(f"{path} is no trace that `tritonllm generate --trace` or a server of tritonllm has written")
    return data


def _take(data: TraceData, owners: dict[int, str], event: dict[str, Any], end: float) -> None:
    """``owners``: whose each lane is now."""
    phase, name, args, track = event["ph"], event.get("name", ""), event.get("args", {}), event.get("tid", 0)
    if phase == "X":
        one = Slice(name, event["ts"], end, args)
        if track == DEVICE:
            data.steps.append(one)
        elif track == HOST:
            data.host.append(one)
        elif event["pid"] == GPU:
            data.kernels[track].append(one)
        elif event["pid"] == REQUESTS:
            data.lanes[track].append(one)
            if "itl_us" in args:
                data.gaps[owners.get(track, "")] += map(float, args["itl_us"].split())
    elif phase == "C":
        data.counters[name].append((event["ts"], args))
    elif phase == "B":
        owners[track] = args["request"]
        data.begun[track] = args["request"]
    elif phase == "E":
        data.begun.pop(track, None)
    elif phase == "i":
        _take_note(data, name, args)


def _take_note(data: TraceData, name: str, args: dict[str, Any]) -> None:
    if name == "end":
        data.requests.append(args)
    elif name == "forced":
        data.forced += args["tokens"]
    elif name == "reset":
        data.resets.append(args["reason"])
    elif name == "trace begins":
        data.about = args
    elif name == "trace ends":
        data.why = args["why"]


def _events(path: Path, data: TraceData) -> Iterator[dict[str, Any]]:
    """One event a line, as we write them. What comes after the last whole one is left out."""
    text = ""
    with open(path, "rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        for block in _unpacked(file) if packed else iter(lambda: file.read(BLOCK), b""):
            *lines, text = (text + block.decode("utf-8", "replace")).split("\n")
            for line in lines:
                if line == "]":
                    data.complete = True
                event = _event(line)
                if event is not None:
                    yield event
    data.complete = data.complete or text == "]"
    event = _event(text)
    if event is not None:
        yield event


def _event(line: str) -> dict[str, Any] | None:
    line = line.strip().rstrip(",")
    if not line.startswith("{"):
        return None
    try:
        event = json.loads(line)
    except ValueError:  # it breaks off
        return None
    return event if isinstance(event, dict) and isinstance(event.get("ph"), str) else None


def _unpacked(file: Any) -> Iterator[bytes]:
    """The contents of a chain of gzip members, the last of which may break off."""
    unpacker, rest = zlib.decompressobj(wbits=31), b""
    while True:
        block = rest or file.read(BLOCK)
        if not block:
            return
        try:
            yield unpacker.decompress(block)
        except zlib.error:
            return
        rest = b""
        if unpacker.eof:
            rest, unpacker = unpacker.unused_data, zlib.decompressobj(wbits=31)

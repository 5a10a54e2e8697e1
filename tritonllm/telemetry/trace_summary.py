"""What a trace says, in numbers: of requests, steps, the device's idle time, kernels and blocks.

Times are milliseconds. A percentile is the smallest value that so many of a hundred do not exceed.
"""

import bisect
import math
from collections.abc import Iterable, Sequence
from typing import Any

from tritonllm.telemetry.trace_reader import Slice, TraceData

PERCENTILES = (50, 90, 99)
TOP = 10
KINDS = ("decode", "verify", "prefill")
CAUSES = {"plan": "planning", "launch": "launching", "wait": "waiting", "read the profiler's records": "the profiler"}
NOBODY, OTHER = "no requests", "other work of the host"


def spread(values: Iterable[float]) -> dict[str, float] | None:
    """Mean, percentiles and maximum; ``None`` of nothing."""
    found = sorted(values)
    if not found:
        return None
    ranks = {f"p{p}": found[max(0, math.ceil(len(found) * p / 100) - 1)] for p in PERCENTILES}
    return {"mean": sum(found) / len(found), **ranks, "max": found[-1]}


def summarize(data: TraceData, top: int = TOP) -> dict[str, Any]:
    """Everything, as plain values: what ``tritonllm trace --json`` prints (docs/teach.md).

    Args:
        top: how many of the slowest steps, of the longest idle times, and of the kernels.
    """
    requests = [_request(record, data.gaps.get(record["request"], [])) for record in data.requests]
    steps = _steps(data)
    return {
        "trace": {
            "complete": data.complete,
            "why": data.why or "it breaks off: what wrote it was killed, or still writes",
            "seconds": data.seconds,
            "events": data.events,
            "version": data.about.get("version"),
            "kernels": data.about.get("kernels"),
            "began_unix": data.about.get("unix"),
        },
        "totals": _totals(data, requests, steps),
        "requests": requests,
        "of_requests": {
            name: spread(one[name] for one in requests if one[name] is not None)
            for name in ("queue_ms", "ttft_ms", "total_ms")
        }
        | {"itl_ms": spread(gap / 1e3 for gaps in data.gaps.values() for gap in gaps)},
        "steps": {
            name: spread(step[name] for step in steps if step[name] is not None)
            for name in ("plan_ms", "launch_ms", "wait_ms", "device_ms", "tokens")
        },
        "batches": _batches(data.steps),
        "slowest": sorted(steps, key=lambda step: -step["device_ms"])[:top],
        "idle": idle(data, top),
        "kernels": kernels(data, top),
        "blocks": _blocks(data),
        "resets": data.resets,
    }


def _request(record: dict[str, Any], gaps: Sequence[float]) -> dict[str, Any]:
    arrival, first, end = record.get("arrival"), record.get("first"), record.get("end")
    queued = record.get("queue_us")

    def since(at: float | None) -> float | None:
        return None if at is None or arrival is None else 1e3 * (at - arrival)

    return {
        "request": record["request"],
        "prompt_tokens": record["prompt_tokens"],
        "cached_tokens": record.get("cached_tokens", 0),
        "output_tokens": sum(record.get("output_tokens", [record["tokens"]])),
        "sequences": len(record.get("output_tokens", [0])),
        "arrival_ms": None if arrival is None else 1e3 * arrival,
        "queue_ms": None if queued is None else queued / 1e3,
        "ttft_ms": since(first),
        "itl_ms": spread(gap / 1e3 for gap in gaps),
        "total_ms": since(end),
        "chunks": record["chunks"],
        "preemptions": record["preemptions"],
        "finish_reasons": record["finish_reasons"],
        "unfinished": record.get("unfinished", False),
        "error": record.get("error"),
    }


def _steps(data: TraceData) -> list[dict[str, Any]]:
    """Each step with its times and contents."""
    host: dict[int, dict[str, float]] = {}
    for one in data.host:
        if "step" in one.args:
            host.setdefault(one.args["step"], {})[one.name] = (one.end - one.begin) / 1e3
    found, before = [], None
    for one in data.steps:
        times = host.get(one.args["step"], {})
        found.append(
            {
                "step": one.args["step"],
                "at_ms": one.begin / 1e3,
                "what": one.name,
                **{f"{name}_ms": times.get(name) for name in ("plan", "launch", "wait")},
                "device_ms": (one.end - one.begin) / 1e3,
                "gap_ms": 0.0 if before is None else (one.begin - before) / 1e3,
                **{name: value for name, value in one.args.items() if name != "step"},
            }
        )
        before = one.end
    return found


def _totals(data: TraceData, requests: Sequence[dict[str, Any]], steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    new = sum(step["new_tokens"] for step in steps) + data.forced
    span = (data.steps[-1].end - data.steps[0].begin) / 1e6 if data.steps else 0.0
    return {
        "requests": len(requests),
        "unfinished": sum(one["unfinished"] for one in requests) + len(set(data.begun.values())),
        "steps": len(steps),
        "computed_tokens": sum(step["tokens"] for step in steps),
        "new_tokens": new,
        "forced_tokens": data.forced,
        "new_tokens_per_second": new / span if span else 0.0,
        "prompt_tokens": sum(one["prompt_tokens"] for one in requests),
        "cached_tokens": sum(one["cached_tokens"] for one in requests),
        "preemptions": sum(step.get("preempted", 0) for step in steps),
        "drafts": sum(step.get("drafts", 0) for step in steps),
        "accepted_drafts": sum(step.get("accepted", 0) for step in steps),
    }


def _batches(steps: Sequence[Slice]) -> list[dict[str, Any]]:
    """Steps by what they were made of, those that took longest first."""
    found: dict[str, dict[str, Any]] = {}
    for one in steps:
        kind = found.setdefault(one.name, {"what": one.name, "steps": 0, "tokens": 0, "ms": 0.0, "new_tokens": 0})
        kind["steps"] += 1
        kind["tokens"] += one.args["tokens"]
        kind["new_tokens"] += one.args["new_tokens"]
        kind["ms"] += (one.end - one.begin) / 1e3
    return sorted(found.values(), key=lambda kind: -kind["ms"])


def covered(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Merge spans of time that overlap: the same time as spans that do not, in their order."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


class _Spans:
    """Spans that do not overlap, to be cut with others."""

    def __init__(self, spans: Sequence[tuple[float, float]]) -> None:
        self._spans, self._begins = spans, [begin for begin, _ in spans]

    def within(self, begin: float, end: float) -> list[tuple[int, float, float]]:
        """``(number, begin, end)`` of what lies between ``begin`` and ``end``."""
        found, at = [], max(0, bisect.bisect_right(self._begins, begin) - 1)
        while at < len(self._spans) and self._spans[at][0] < end:
            first, last = max(begin, self._spans[at][0]), min(end, self._spans[at][1])
            if first < last:
                found.append((at, first, last))
            at += 1
        return found


def _there(data: TraceData) -> list[tuple[float, float]]:
    """When requests were there, in microseconds."""
    whole = 1e6 * data.seconds
    spans = [(1e6 * (r["arrival"] or 0.0), 1e6 * r["end"] if "end" in r else whole) for r in data.requests]
    if data.begun:  # the trace breaks off, and they were there
        first = min((one[0].begin for track, one in data.lanes.items() if track in data.begun and one), default=0.0)
        spans.append((first, whole))
    return covered(spans)


def idle(data: TraceData, top: int = TOP) -> dict[str, Any] | None:
    """Between the first step and the last, as the host sees it: when the device had no step, and what the host did."""
    if not data.steps:
        return None
    there, host = _Spans(_there(data)), _Spans([(one.begin, one.end) for one in data.host])
    causes: dict[str, float] = {}
    gaps = []
    for before, after in zip(data.steps, data.steps[1:], strict=False):
        if after.begin <= before.end:
            continue
        parts: dict[str, float] = {}
        rest = after.begin - before.end
        asked = 0.0
        for _, begin, end in there.within(before.end, after.begin):
            asked += end - begin
            for number, first, last in host.within(begin, end):
                cause = CAUSES.get(data.host[number].name, OTHER)
                parts[cause] = parts.get(cause, 0.0) + last - first
        parts[NOBODY] = rest - asked
        parts[OTHER] = parts.get(OTHER, 0.0) + rest - sum(parts.values())
        for cause, us in parts.items():
            causes[cause] = causes.get(cause, 0.0) + us
        ms = {cause: us / 1e3 for cause, us in sorted(parts.items(), key=lambda part: -part[1]) if us > 1e-6}
        gaps.append({"before_step": after.args["step"], "at_ms": before.end / 1e3, "ms": rest / 1e3, "causes": ms})
    span = data.steps[-1].end - data.steps[0].begin
    whole = sum(gap["ms"] for gap in gaps)
    return {
        "ms": whole,
        "share": 1e3 * whole / span if span else 0.0,
        "gaps": len(gaps),
        "causes_ms": {c: us / 1e3 for c, us in sorted(causes.items(), key=lambda part: -part[1]) if us > 1e-6},
        "longest": sorted(gaps, key=lambda gap: -gap["ms"])[:top],
    }


def kernels(data: TraceData, top: int = TOP) -> dict[str, Any] | None:
    """The kernels by total time, and how busy the GPU was in the steps whose kernels were recorded; ``None`` if none
    were."""
    every = [one for track in data.kernels.values() for one in track]
    if not every:
        return None
    found: dict[str, dict[str, Any]] = {}
    for one in every:
        row = found.setdefault(one.name, {"name": one.name, "count": 0, "ms": 0.0})
        row["count"] += 1
        row["ms"] += (one.end - one.begin) / 1e3
    whole = sum(row["ms"] for row in found.values())
    busy = covered((one.begin, one.end) for one in every)
    first, last = busy[0][0], busy[-1][1]
    spans = _Spans(busy)
    steps = [one for one in data.steps if one.end > first and one.begin < last]
    inside = sum(end - begin for one in steps for _, begin, end in spans.within(one.begin, one.end))
    running = sum(end - begin for begin, end in busy)
    return {
        "count": len(every),
        "ms": whole,
        "busy_share": running / (last - first) if last > first else 0.0,
        "in_steps_share": inside / running if running else 0.0,
        "by_name": [
            row | {"share": row["ms"] / whole if whole else 0.0}
            for row in sorted(found.values(), key=lambda row: -row["ms"])[:top]
        ],
    }


def _blocks(data: TraceData) -> dict[str, Any]:
    used = data.counters.get("blocks", [])
    evicted = [values["evicted"] for _, values in data.counters.get("evicted blocks", [])]
    copies = data.counters.get("block copies", [])
    return {
        "all": sum(used[-1][1].values()) if used else 0,
        "most_used": max((values["used"] for _, values in used), default=0),
        "evicted": evicted[-1] - evicted[0] if evicted else 0,
        **(dict(copies[-1][1]) if copies else {"copied": 0, "stored": 0, "loaded": 0}),
    }

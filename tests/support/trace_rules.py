"""The rules of Chrome's trace event format, as far as Perfetto's importer needs them, and slices that nest."""

import gzip
import json
from collections import defaultdict
from pathlib import Path

NEEDED = {
    "X": {"name", "pid", "tid", "ts", "dur"},
    "B": {"name", "pid", "tid", "ts"},
    "E": {"pid", "tid", "ts"},
    "i": {"name", "pid", "tid", "ts", "s"},
    "C": {"name", "pid", "ts", "args"},
    "s": {"name", "cat", "id", "pid", "tid", "ts"},
    "f": {"name", "cat", "id", "pid", "tid", "ts", "bp"},
    "M": {"name", "pid", "args"},
}
METADATA = {"process_name": "name", "process_sort_index": "sort_index", "thread_name": "name"}
METADATA["thread_sort_index"] = "sort_index"


def load(path):
    """All of a whole file."""
    data = Path(path).read_bytes()
    return json.loads(gzip.decompress(data) if str(path).endswith(".gz") else data)


def check_trace(events):
    """Raises AssertionError at the first rule that is broken. Returns ``{(pid, tid): [(begin, end, name, args)]}``."""
    begun, tracks, arrows, numbers = defaultdict(list), defaultdict(list), {}, defaultdict(dict)
    for event in events:
        phase = event["ph"]
        assert NEEDED[phase] <= set(event), event
        assert isinstance(event["pid"], int) and event["pid"] > 0
        track = event["pid"], event.get("tid")
        if "ts" in event:
            assert event["ts"] >= 0 and 8 * event["ts"] % 1 == 0, "an eighth of a microsecond is exact"
        if phase == "X":
            assert event["dur"] >= 0 and 8 * event["dur"] % 1 == 0
            tracks[track].append((event["ts"], event["ts"] + event["dur"], event["name"], event.get("args", {})))
        elif phase == "B":
            begun[track].append(event)
        elif phase == "E":
            first = begun[track].pop()
            tracks[track].append((first["ts"], event["ts"], first["name"], first["args"]))
        elif phase == "i":
            assert event["s"] in ("g", "p", "t")
        elif phase == "C":
            assert event["args"] and all(isinstance(value, int | float) for value in event["args"].values())
            assert event["ts"] >= numbers[event["name"]].get("ts", 0), "a counter goes forward"
            numbers[event["name"]]["ts"] = event["ts"]
        elif phase == "M":
            kind = METADATA[event["name"]]
            assert isinstance(event["args"][kind], str if kind == "name" else int)
        else:
            arrows.setdefault((event["cat"], event["name"], event["id"]), []).append(event)
    assert not any(begun.values()), "what begins ends"
    for slices in tracks.values():
        check_nesting(slices)
    for start, finish in arrows.values():
        assert (start["ph"], finish["ph"], finish["bp"]) == ("s", "f", "e") and start["ts"] <= finish["ts"]
        for end in (start, finish):
            slices = tracks[end["pid"], end["tid"]]
            assert any(begin <= end["ts"] <= until for begin, until, *_ in slices), "an arrow binds to a slice"
    return tracks


def check_nesting(slices):
    """Each slice lies in another one or beside it."""
    open_slices = []
    for begin, end, name, _ in sorted(slices, key=lambda one: (one[0], -one[1])):
        assert begin <= end
        while open_slices and open_slices[-1][1] <= begin:
            open_slices.pop()
        assert not open_slices or end <= open_slices[-1][1], f"{name} overlaps {open_slices[-1][2]}"
        open_slices.append((begin, end, name))

"""A file in Chrome's trace event format (the JSON array), which Perfetto opens, written while things happen.

Each write leaves a file that can be read: it ends with a whole event, and the closing bracket, which the format lets a
writer forget, comes last. A compressed one is a chain of whole gzip members (RFC 1952), one for each write, since
Perfetto refuses one that breaks off. So a process that is killed leaves what it had written; killed during the
microseconds of a write, it can leave a part of that, which our reader leaves out.

Times are ticks of 1/8 microsecond from the beginning of the trace. Readers keep them as a number of microseconds with
a fraction, and cut that to nanoseconds: of eighths both are exact, so slices that meet do not overlap by rounding.
"""

import gzip
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TICKS = 8  # in a microsecond
CHUNK = 1 << 16  # characters that are written at once
PATIENCE = 1.0  # seconds that an event waits for others, at most, while events come
LEVEL = 1  # of compression: a third of the time of the default, 27% more bytes
_FRACTION = ["", ".125", ".25", ".375", ".5", ".625", ".75", ".875"]
_plain = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def microseconds(ticks: int) -> str:
    return f"{ticks >> 3}{_FRACTION[ticks & 7]}"


class Clock:
    """The clock of a trace.

    Args:
        start: when the trace begins, in seconds of ``time.monotonic()``.
    """

    def __init__(self, start: float) -> None:
        self.start = start

    def ticks(self, at: float) -> int:
        """Ticks since the beginning; 0 of what was before."""
        return max(0, round((at - self.start) * 1e6 * TICKS))

    def seconds(self, at: float) -> float:
        """Seconds since the beginning, to the nanosecond."""
        return round(at - self.start, 9)


class TraceFile:
    """The file of a trace, in Chrome's JSON format, written event by event.

    Args:
        path: is overwritten; with ``.gz`` at its end the file is compressed.
        most: how many events make the file ``full``; whoever writes should end then.
        fresh: the file must not be there already.

    Raises:
        OSError: it cannot be written; of the other methods as well.
    """

    def __init__(self, path: str | Path, most: int, fresh: bool = False) -> None:
        self.path, self.events, self.most = Path(path), 0, most
        self._file = open(self.path, "xb" if fresh else "wb", buffering=0)  # noqa: SIM115 - until close
        self._packed = self.path.suffix == ".gz"
        self._lines: list[str] = []
        self._size, self._began, self._written = 0, False, time.monotonic()

    @property
    def full(self) -> bool:
        return self.events >= self.most

    def slice(self, name: str, pid: int, tid: int, begin: int, end: int, args: Mapping[str, Any] | None = None) -> None:
        """Write a slice: something that lasted from ``begin`` to ``end``, in ticks."""
        more = "" if args is None else f',"args":{_plain(args)}'
        self._add(
            f'{{"ph":"X","name":{_plain(name)},"pid":{pid},"tid":{tid},"ts":{microseconds(begin)},'
            f'"dur":{microseconds(end - begin)}{more}}}'
        )

    def begin(self, name: str, pid: int, tid: int, at: int, args: Mapping[str, Any]) -> None:
        """Something begins of which nobody knows how long it will last; what happens on its track lies in it."""
        self._add(
            f'{{"ph":"B","name":{_plain(name)},"pid":{pid},"tid":{tid},"ts":{microseconds(at)},"args":{_plain(args)}}}'
        )

    def end(self, pid: int, tid: int, at: int) -> None:
        self._add(f'{{"ph":"E","pid":{pid},"tid":{tid},"ts":{microseconds(at)}}}')

    def instant(self, name: str, pid: int, tid: int, at: int, args: Mapping[str, Any]) -> None:
        self._add(
            f'{{"ph":"i","s":"t","name":{_plain(name)},"pid":{pid},"tid":{tid},"ts":{microseconds(at)},'
            f'"args":{_plain(args)}}}'
        )

    def counter(self, name: str, pid: int, at: int, values: Mapping[str, float]) -> None:
        """Write values of a counter. Each value has a track of its own, and holds until the next event of the name."""
        self._add(f'{{"ph":"C","name":{_plain(name)},"pid":{pid},"ts":{microseconds(at)},"args":{_plain(values)}}}')

    def flow(self, number: int, pid: int, tid: int, at: int, to_pid: int, to_tid: int, to: int) -> None:
        """An arrow from the slice that is there at ``at`` to the one at ``to``; both were written before."""
        self._add(
            f'{{"ph":"s","name":"step","cat":"flow","id":{number},"pid":{pid},"tid":{tid},"ts":{microseconds(at)}}}'
        )
        self._add(
            f'{{"ph":"f","bp":"e","name":"step","cat":"flow","id":{number},"pid":{to_pid},"tid":{to_tid},'
            f'"ts":{microseconds(to)}}}'
        )

    def name_process(self, pid: int, name: str, place: int) -> None:
        self._add(f'{{"ph":"M","name":"process_name","pid":{pid},"args":{{"name":{_plain(name)}}}}}')
        self._add(f'{{"ph":"M","name":"process_sort_index","pid":{pid},"args":{{"sort_index":{place}}}}}')

    def name_track(self, pid: int, tid: int, name: str) -> None:
        where = f'"pid":{pid},"tid":{tid}'
        self._add(f'{{"ph":"M","name":"thread_name",{where},"args":{{"name":{_plain(name)}}}}}')
        self._add(f'{{"ph":"M","name":"thread_sort_index",{where},"args":{{"sort_index":{tid}}}}}')

    def _add(self, line: str) -> None:
        self.events += 1
        self._lines.append(line)
        self._size += len(line)
        if self._size >= CHUNK:
            self.flush()

    def settle(self) -> None:
        """Write what has waited for long enough."""
        if self._lines and time.monotonic() - self._written >= PATIENCE:
            self.flush()

    def flush(self) -> None:
        """Write the events that wait."""
        if self._lines:
            text = (",\n" if self._began else "[\n") + ",\n".join(self._lines)
            self._lines, self._size, self._began = [], 0, True
            self._write(text)
        self._written = time.monotonic()

    def close(self) -> None:
        """Write the rest and the end. May be called again."""
        if self._file.closed:
            return
        try:
            self.flush()
            self._write("\n]\n" if self._began else "[\n]\n")
        finally:
            self._file.close()

    def _write(self, text: str) -> None:
        data = text.encode()  # JSON in ASCII
        if self._packed:
            data = gzip.compress(data, LEVEL, mtime=0)
        while data:
            data = data[self._file.write(data) :]

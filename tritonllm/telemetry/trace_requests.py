"""The tracks of requests in a trace: waiting, chunks of the prompt, decoding, preempted, and each one's end.

Each sequence has a track (a lane) from its arrival to its end; lanes are given again. Where all lanes are taken, a
request has none, and only its end is recorded.
"""

from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from tritonllm.events import NewTokens, Part, RequestAdded, RequestFinished
from tritonllm.telemetry.trace_file import TICKS, Clock, TraceFile
from tritonllm.telemetry.trace_layout import FIRST_LANE, OVERFLOW, REQUESTS

LANES = 256
SEGMENT = 64  # steps of decoding in one slice, with the time of each: one event instead of 64


@dataclass(slots=True)
class Sequence:
    """One sequence of a request.

    Attributes:
        lane: the track of the sequence; ``None`` if it has none.
        since: when the sequence began to wait, in ticks; if it does not wait, the end of its last slice.
        waits: why the sequence waits: ``queued``, or ``preempted`` at ``lost``; ``None`` if it does not.
        last: when its newest token came, in ticks.
        gaps: ticks between steps that brought tokens, of the slice to come; ``tokens`` of them all.
        step: when the first step of that slice began.
    """

    owner: "Traced"
    name: str
    lane: int | None
    since: int
    waits: str | None
    lost: int = 0
    last: int | None = None
    gaps: list[int] = field(default_factory=list)
    tokens: int = 0
    step: int = 0


@dataclass(slots=True)
class Traced:
    """A request, and what its record will say.

    Attributes:
        arrival: when the request arrived, in seconds; ``None``: before the trace.
        admitted: ticks; when a step first took it.
    """

    request_id: str
    arrival: float | None
    prompt_tokens: int
    sequences: list[Sequence] = field(default_factory=list)
    admitted: int | None = None
    chunks: int = 0
    prefilled: int = 0
    preemptions: int = 0
    tokens: int = 0


class RequestTracks:
    """Writes the tracks of requests and their sequences to a trace.

    Args:
        file: the file to write to.
        clock: the clock of the trace, which makes ticks of times in seconds.
        device: process and thread of the track that flows lead to.
    """

    def __init__(self, file: TraceFile, clock: Clock, device: tuple[int, int]) -> None:
        self._file, self._clock, self._device = file, clock, device
        self._sequences: dict[str, Sequence] = {}
        self._requests: dict[str, Traced] = {}
        self._free: list[int] = []
        self._lanes = self._flows = 0
        self._ends: dict[int, int] = {}  # of lanes: ticks of the last end
        self._named_overflow = False

    @property
    def unfinished(self) -> bool:
        return bool(self._requests)

    def added(self, event: RequestAdded) -> None:
        at = self._clock.ticks(event.time)
        request = Traced(event.request_id, event.time, len(event.prompt_token_ids))
        self._requests[event.request_id] = request
        for name in event.sequence_ids:
            self._follow(request, name, at, "queued")

    def _late(self, request_id: str, name: str, prompt_tokens: int, at: int) -> Sequence:
        """A sequence that was there before the trace."""
        request = self._requests.setdefault(request_id, Traced(request_id, None, prompt_tokens))
        return self._follow(request, name, at, None)

    def _follow(self, request: Traced, name: str, at: int, waits: str | None) -> Sequence:
        lane = self._take_lane()
        if lane is not None:
            at = max(at, self._ends.get(lane, 0))
            title = f"request {request.request_id}" + (f", sequence {name}" if name != request.request_id else "")
            self._file.begin(title, REQUESTS, lane, at, {"request": request.request_id})
        sequence = self._sequences[name] = Sequence(request, name, lane, at, waits)
        request.sequences.append(sequence)
        return sequence

    def _take_lane(self) -> int | None:
        if self._free:
            return heappop(self._free)
        if self._lanes == LANES:
            return None
        lane = FIRST_LANE + self._lanes
        self._lanes += 1
        self._file.name_track(REQUESTS, lane, f"lane {self._lanes}")
        return lane

    def planned(self, parts: tuple[Part, ...], at: int) -> list[tuple[Sequence, Part]]:
        """Note which sequences a planned step begins; returns those that compute something of a prompt, or of a
        sequence that was preempted."""
        filling = []
        for part in parts:
            fills = part.kind == "prefill" or part.start < part.num_prompt_tokens  # one token alone is a decode
            sequence = self._sequences.get(part.sequence_id)
            if sequence is not None and not fills and not part.admitted:  # most
                continue
            if sequence is None:
                sequence = self._late(part.request_id, part.sequence_id, part.num_prompt_tokens, at)
            elif sequence.waits is not None:
                self._waited(sequence, at)
                if sequence.owner.admitted is None:
                    sequence.owner.admitted = at
            if fills:
                filling.append((sequence, part))
        return filling

    def preempted(self, names: tuple[str, ...], at: int) -> None:
        for name in names:
            sequence = self._sequences.get(name)
            if sequence is not None:
                sequence.waits, sequence.lost = "preempted", at
                sequence.owner.preemptions += 1

    def computed(self, filling: list[tuple[Sequence, Part]], step: int, begin: int, end: int) -> None:
        """A step has ended; it began at ``begin``."""
        for sequence, part in filling:
            if self._sequences.get(part.sequence_id) is not sequence:
                continue  # aborted since
            self._decoded(sequence)
            request, at = sequence.owner, max(begin, sequence.since)
            request.chunks += bool(part.num_tokens)
            request.prefilled += part.num_tokens
            facts = {"step": step, "start": part.start, "tokens": part.num_tokens}
            if part.admitted and part.cached_tokens:
                facts["cached"] = part.cached_tokens
            sequence.since = at
            self._slice(sequence, "prefill", end, facts)
            self._flow(sequence, at, at)

    def got(self, tokens: tuple[NewTokens, ...], begin: int, end: int) -> None:
        """Tokens of a step from ``begin`` to ``end``."""
        sequences = self._sequences
        for new in tokens:
            count = len(new.token_ids)
            if not count:  # aborted since
                continue
            sequence = sequences.get(new.sequence_id)
            if sequence is None:
                sequence = self._late(new.request_id, new.sequence_id, 0, end)
            sequence.owner.tokens += count
            if sequence.last is not None:
                if not sequence.gaps:
                    sequence.step = begin
                sequence.gaps.append(end - sequence.last)
                sequence.tokens += count
                if len(sequence.gaps) >= SEGMENT:
                    sequence.last = end
                    self._decoded(sequence)
            sequence.last = end

    def forced(self, tokens: tuple[NewTokens, ...]) -> None:
        """Tokens that came with those of the step before."""
        for new in tokens:
            sequence = self._sequences.get(new.sequence_id)
            if sequence is not None:
                sequence.owner.tokens += len(new.token_ids)
                sequence.tokens += len(new.token_ids)

    def _waited(self, sequence: Sequence, at: int) -> None:
        assert sequence.waits is not None  # of who waits
        self._decoded(sequence)  # a token can come after the step was planned that took the blocks
        sequence.since = max(sequence.since, sequence.lost)
        self._slice(sequence, sequence.waits, at, {})
        sequence.waits = None

    def _decoded(self, sequence: Sequence) -> None:
        """Write the slice of the tokens since the last one."""
        if not sequence.gaps:
            return
        assert sequence.last is not None  # of the gaps
        gaps, begin = sequence.gaps, sequence.since
        facts = {"tokens": sequence.tokens, "itl_us": " ".join([str((gap + 4) >> 3) for gap in gaps])}
        sequence.gaps, sequence.tokens = [], 0
        self._slice(sequence, "decode", sequence.last, facts)
        if sequence.step >= begin:  # else the flow of a chunk leads there already
            self._flow(sequence, begin, sequence.step)

    def _slice(self, sequence: Sequence, name: str, end: int, facts: dict[str, Any]) -> None:
        """From the end of the sequence's last slice to ``end``."""
        begin = sequence.since
        end = sequence.since = max(begin, end)
        if sequence.lane is not None:
            self._file.slice(name, REQUESTS, sequence.lane, begin, end, facts or None)

    def _flow(self, sequence: Sequence, at: int, step: int) -> None:
        if sequence.lane is not None and at < sequence.since:
            self._flows += 1
            self._file.flow(self._flows, REQUESTS, sequence.lane, at, *self._device, step)

    def finished(self, event: RequestFinished) -> None:
        request = self._requests.pop(event.request_id, None)
        if request is None:  # it waited since before the trace
            request = Traced(event.request_id, None, 0)
        facts = {
            "cached_tokens": event.num_cached_tokens,
            "output_tokens": list(event.num_output_tokens),
            "finish_reasons": list(event.finish_reasons),
            "first": None if event.first_token_time is None else self._clock.seconds(event.first_token_time),
            "end": self._clock.seconds(event.time),
            "error": event.error,
        }
        self._end(request, self._clock.ticks(event.time), facts)

    def lost(self, at: float, why: str) -> None:
        """All requests ended in the middle of a step."""
        for request in list(self._requests.values()):
            del self._requests[request.request_id]
            reasons = ["error"] * len(request.sequences)
            facts = {"finish_reasons": reasons, "end": self._clock.seconds(at), "error": why}
            self._end(request, self._clock.ticks(at), facts)

    def leave(self, at: float) -> None:
        """The trace ends before them."""
        for request in list(self._requests.values()):
            del self._requests[request.request_id]
            self._end(request, self._clock.ticks(at), {"finish_reasons": [], "unfinished": True})

    def _end(self, request: Traced, at: int, facts: dict[str, Any]) -> None:
        arrival = request.arrival
        queued = None if arrival is None or request.admitted is None else request.admitted - self._clock.ticks(arrival)
        record = {
            "request": request.request_id,
            "prompt_tokens": request.prompt_tokens,
            "arrival": None if arrival is None else self._clock.seconds(arrival),
            **({} if queued is None else {"queue_us": queued / TICKS}),
            "chunks": request.chunks,
            "prefill_tokens": request.prefilled,
            "tokens": request.tokens,
            "preemptions": request.preemptions,
            **{name: value for name, value in facts.items() if value is not None},
        }
        lanes = []
        for sequence in request.sequences:
            del self._sequences[sequence.name]
            self._decoded(sequence)
            if sequence.waits is not None:
                self._waited(sequence, at)
            if sequence.lane is not None:
                lanes.append((sequence.lane, max(at, sequence.since)))
        track, end = lanes[0] if lanes else (OVERFLOW, at)
        if not lanes and not self._named_overflow:
            self._named_overflow = True
            self._file.name_track(REQUESTS, OVERFLOW, f"ends of requests beyond {LANES} lanes")
        self._file.instant("end", REQUESTS, track, end, record)
        for lane, end in lanes:
            self._file.end(REQUESTS, lane, end)
            self._ends[lane] = end
            heappush(self._free, lane)

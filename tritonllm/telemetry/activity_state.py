"""Follows an engine's events, and says what a screen shows of them. No screen in it, and no thread."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from tritonllm.events import (
    EngineReset,
    Event,
    NewTokens,
    Part,
    Present,
    RequestAdded,
    RequestFinished,
    StepFinished,
    StepPlanned,
    TokensForced,
)
from tritonllm.telemetry.pool_map import PoolMap
from tritonllm.telemetry.snapshot import (
    MOST_STEPS,
    Counters,
    RequestLine,
    RequestState,
    Snapshot,
    StepColumn,
    View,
)

SHOWN_STEPS = 20  # that a request stays in the list after its end
MOST_ENDED = 100  # of these, at most
RATE_SECONDS = 2.0  # over which speeds are measured
_BY_STATE = {"prefill": 0, "decode": 0, "verify": 0, "preempted": 0, "waiting": 1, "ended": 2}


@dataclass(slots=True)
class _Sequence:
    request: "_Request"
    state: RequestState = "waiting"
    output_tokens: int = 0
    computed: int = 0
    total: int = 0
    was_admitted: bool = False


@dataclass(slots=True)
class _Request:
    request_id: str
    number: int
    prompt_tokens: int
    most_output_tokens: int | None
    generates: bool
    sequences: dict[str, _Sequence] = field(default_factory=dict)
    cached_tokens: int = 0
    preemptions: int = 0
    ended_at: int = -1  # the last step then
    reason: str = ""

    @property
    def state(self) -> RequestState:
        """The state of the request's most active sequence."""
        if self.ended_at >= 0:
            return "ended"
        states = {sequence.state for sequence in self.sequences.values()}
        order: tuple[RequestState, ...] = ("prefill", "verify", "decode", "preempted")
        return next((state for state in order if state in states), "waiting")


class State:
    """Call :meth:`follow` with each event in its order, and :meth:`look` for what there is then.

    Args:
        present: what there was before the first event.
    """

    def __init__(self, present: Present | None = None) -> None:
        self._requests: dict[str, _Request] = {}  # the unfinished ones
        self._ended: deque[_Request] = deque(maxlen=MOST_ENDED)
        self._sequences: dict[str, _Sequence] = {}  # of unfinished requests
        self._pool = PoolMap()
        self._steps: deque[StepColumn] = deque(maxlen=MOST_STEPS)
        self._counters = Counters()
        self._generated = self._computed = self._prompt = self._queries = self._hits = self._preemptions = 0
        self._drafts = self._accepted = self._waiting = self._evicted = self._step = self._number = 0
        self._admission_end = ""
        self._rates: deque[tuple[float, int, int]] = deque()  # when, and how many new and prompt tokens there were
        if present is not None:
            self._begin(present)

    def _begin(self, present: Present) -> None:
        self._pool.num_blocks = present.num_blocks
        self._pool.keep(present.kept_blocks)
        for request in present.requests:
            self._added(request)
        for name, table in present.tables.items():
            self._pool.give(name, table)
            self._sequences[name].state, self._sequences[name].was_admitted = "decode", True
        for name, count in present.num_output_tokens.items():
            self._sequences[name].output_tokens = count
            self._sequences[name].was_admitted = True
        self._waiting = len(self._sequences) - len(present.tables)

    def follow(self, event: Event) -> None:
        if isinstance(event, StepPlanned):
            self._planned(event)
        elif isinstance(event, StepFinished | TokensForced):
            for tokens in event.tokens:
                self._got(tokens)
            self._note_rates(event.time)
        elif isinstance(event, RequestAdded):
            self._added(event)
            self._prompt += len(event.prompt_token_ids)
            self._waiting += len(event.sequence_ids)
        elif isinstance(event, RequestFinished):
            self._finished(event)
        elif isinstance(event, EngineReset):
            self._reset(event)

    def _added(self, event: RequestAdded) -> None:
        most, n = getattr(event.params, "max_tokens", None), len(event.sequence_ids)
        request = _Request(
            request_id=event.request_id,
            number=self._number,
            prompt_tokens=len(event.prompt_token_ids),
            most_output_tokens=None if most is None else most * n,
            generates=hasattr(event.params, "max_tokens"),
        )
        self._number += 1
        self._requests[event.request_id] = request
        for name in event.sequence_ids:
            self._sequences[name] = request.sequences[name] = _Sequence(request)

    def _planned(self, event: StepPlanned) -> None:
        pool, tokens = self._pool, {"decode": 0, "verify": 0, "prefill": 0}
        pool.num_blocks, self._step = event.num_blocks, event.step
        pool.keep(event.kept_blocks)
        for name in event.preempted:
            pool.take(name)
            sequence = self._sequences.get(name)
            if sequence is not None:
                sequence.state = "preempted"
                sequence.request.preemptions += 1
        self._preemptions += len(event.preempted)
        for part in event.parts:
            tokens[part.kind] += part.num_tokens
            self._has_part(part)
        for name, table in event.idle.items():
            pool.give(name, table)
        if len(pool) > event.num_running:
            pool.take_all_but({part.sequence_id for part in event.parts} | event.idle.keys())
        self._steps.append(StepColumn(event.step, **tokens, preempted=len(event.preempted)))
        self._computed += tokens["prefill"]
        self._waiting, self._evicted = event.num_waiting, event.evicted_blocks
        self._admission_end = event.admission_end
        while self._ended and self._step - self._ended[0].ended_at > SHOWN_STEPS:
            self._ended.popleft()

    def _has_part(self, part: Part) -> None:
        self._pool.give(part.sequence_id, part.block_ids)
        sequence = self._sequences.get(part.sequence_id)
        if sequence is None:
            return  # it was added before anybody followed
        sequence.state, sequence.total = part.kind, part.num_known_tokens
        sequence.computed = part.start + part.num_tokens
        if part.admitted and not sequence.was_admitted:
            sequence.was_admitted = True
            if part.num_tokens:  # else it shares all with its sibling
                self._queries += part.num_known_tokens
                self._hits += part.cached_tokens
                sequence.request.cached_tokens = max(sequence.request.cached_tokens, part.cached_tokens)

    def _got(self, tokens: NewTokens) -> None:
        sequence, count = self._sequences.get(tokens.sequence_id), len(tokens.token_ids)
        self._drafts += tokens.drafts
        self._accepted += tokens.accepted
        if sequence is not None and sequence.request.generates:
            sequence.output_tokens += count
            self._generated += count

    def _finished(self, event: RequestFinished) -> None:
        self._pool.keep(event.kept_blocks)
        request = self._requests.get(event.request_id)
        if request is None:
            return
        for sequence, count in zip(request.sequences.values(), event.num_output_tokens, strict=True):
            if request.generates:  # tokens behind a stop string were taken back
                self._generated += count - sequence.output_tokens
                sequence.output_tokens = count
        request.cached_tokens, request.preemptions = event.num_cached_tokens, event.num_preemptions
        self._end(request, "error" if event.error else ", ".join(sorted(set(event.finish_reasons))))

    def _end(self, request: _Request, reason: str) -> None:
        del self._requests[request.request_id]
        for name, sequence in request.sequences.items():
            self._pool.take(name)
            self._sequences.pop(name, None)
            if sequence.state in ("waiting", "preempted"):
                self._waiting = max(0, self._waiting - 1)
        request.ended_at, request.reason = self._step, reason
        self._ended.append(request)

    def _reset(self, event: EngineReset) -> None:
        for request in list(self._requests.values()):
            self._end(request, "error")
        self._pool.clear()

    def _note_rates(self, time: float) -> None:
        rates = self._rates
        rates.append((time, self._generated, self._computed))
        while len(rates) > 2 and rates[1][0] < time - RATE_SECONDS:
            rates.popleft()

    def _speeds(self, now: float) -> tuple[float, float]:
        """New and prompt tokens a second; nothing once a while has passed without any."""
        rates = self._rates
        if len(rates) < 2 or now - rates[-1][0] > RATE_SECONDS:
            return 0.0, 0.0
        seconds = max(now - rates[0][0], 1e-6)
        return (rates[-1][1] - rates[0][1]) / seconds, (rates[-1][2] - rates[0][2]) / seconds

    def look(self, view: View, now: float) -> Snapshot:
        """What there is to see.

        Args:
            now: the time, on the clock of the events.
        """
        lines = sorted(self._requests.values(), key=lambda request: (_BY_STATE[request.state], request.number))
        lines += reversed(self._ended)
        first = min(view.first_row, max(0, len(lines) - view.rows))
        tokens_per_second, prompt_tokens_per_second = self._speeds(now)
        counters, cells = self.counters(), None
        if self._pool.num_blocks:
            users = self._pool.users()
            used, shared = int((users > 0).sum()), int((users > 1).sum())
            counters = replace(counters, used_blocks=used, shared_blocks=shared)
            numbers = {name: sequence.request.number for name, sequence in self._sequences.items()}
            cells = self._pool.cells(view.cells, users, numbers)
        return Snapshot(
            counters=counters,
            requests=tuple(map(self._line, lines[first : first + view.rows])),
            num_requests=len(lines),
            first_row=first,
            steps=tuple(self._steps)[len(self._steps) - min(view.steps, len(self._steps)) :],
            cells=cells,
            used_part=counters.used_blocks / max(self._pool.num_blocks, 1),
            tokens_per_second=tokens_per_second,
            prompt_tokens_per_second=prompt_tokens_per_second,
            admission_end=self._admission_end,
        )

    def counters(self) -> Counters:
        """Since the first event; used and shared blocks are left out."""
        return Counters(
            steps=self._step,
            prompt_tokens=self._prompt,
            generated_tokens=self._generated,
            query_tokens=self._queries,
            hit_tokens=self._hits,
            preemptions=self._preemptions,
            running=len(self._pool),
            waiting=self._waiting,
            num_blocks=self._pool.num_blocks or None,
            cached_blocks=self._pool.num_cached,
            evicted_blocks=self._evicted,
            drafts=self._drafts,
            accepted=self._accepted,
        )

    def _line(self, request: _Request) -> RequestLine:
        sequences: Iterable[_Sequence] = request.sequences.values()
        first: Any = max(sequences, key=lambda one: one.computed)
        return RequestLine(
            request_id=request.request_id,
            number=request.number,
            state=request.state,
            sequences=len(request.sequences),
            prompt_tokens=request.prompt_tokens,
            computed_tokens=first.computed,
            total_tokens=first.total or request.prompt_tokens,
            output_tokens=sum(sequence.output_tokens for sequence in sequences),
            most_output_tokens=request.most_output_tokens,
            cached_tokens=request.cached_tokens,
            preemptions=request.preemptions,
            blocks=self._pool.blocks_of(request.sequences),
            reason=request.reason,
        )

"""Turns what the engine does into events (:mod:`tritonllm.events`). Asked only while somebody listens. No torch."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from tritonllm.config.sampling_params import ALL
from tritonllm.engine.data.plan import NewTokens, ScheduledRequest, StepPlan
from tritonllm.engine.data.request import Request
from tritonllm.engine.data.results import StepResult, TokenLogprobs
from tritonllm.engine.data.step import Restrictions
from tritonllm.engine.schedule.scheduler import Scheduler
from tritonllm.engine.text.output_processor import RequestState, SequenceOutput
from tritonllm.events import (
    EngineReset,
    Events,
    Kind,
    Part,
    Present,
    RequestAdded,
    RequestFinished,
    Sink,
    StepFinished,
    StepLaunched,
    StepPlanned,
    StepRestricted,
    TokensForced,
)
from tritonllm.events import NewTokens as TokensOf

MOST_SCORES = 20  # a request may ask for those of the whole vocabulary
Sequences = Mapping[str, tuple[RequestState, SequenceOutput]]


class Announcer(Events):
    """Tells an engine's events.

    Args:
        scheduler: the scheduler of the engine.
        sequences: the engine's unfinished sequences, by id.
    """

    def __init__(self, scheduler: Scheduler, sequences: Sequences) -> None:
        super().__init__()
        self._scheduler, self._sequences = scheduler, sequences
        self._known: dict[str, tuple[int, tuple[int, ...]]] = {}  # of running sequences: admission and block table
        self._left: list[int] = []  # blocks of those that left or forked since the last plan

    def subscribe(self, sink: Sink) -> Callable[[], None]:
        if not self.heard:  # or what runs already would seem to be admitted by the next step
            self._known = {r.request_id: (r.admission, tuple(r.block_ids)) for r in self._scheduler.running}
            self._left = []
        return super().subscribe(sink)

    def present(self) -> Present:
        states = {state.request_id: state for state, _ in self._sequences.values()}
        requests = [sequence.request for _, sequence in self._sequences.values()]
        return Present(
            time=time.monotonic(),
            requests=tuple(self._request(state, state.metrics.arrival_time) for state in states.values()),
            tables={request.request_id: tuple(request.block_ids) for request in self._scheduler.running},
            num_output_tokens={r.request_id: len(r.output_token_ids) for r in requests if r.output_token_ids},
            num_blocks=self._scheduler.pool.num_blocks,
            kept_blocks=tuple(self._scheduler.pool.kept()),
        )

    def added(self, state: RequestState) -> None:
        self.emit(self._request(state, state.metrics.arrival_time))

    @staticmethod
    def _request(state: RequestState, arrived: float) -> RequestAdded:
        ids = tuple(sequence.request.request_id for sequence in state.sequences)
        params = getattr(state, "pooling_params", state.params)  # of what is pooled, those are a stand-in
        return RequestAdded(arrived, state.request_id, ids, tuple(state.prompt_token_ids), params)

    def planned(self, step: int, plan: StepPlan, began: float) -> None:
        now, scheduler, transfers = time.monotonic(), self._scheduler, plan.transfers
        batches = [batch for batch in (transfers, plan.fills) if batch is not None]
        stats, pool = scheduler.stats, scheduler.pool
        decodes, verified = plan.segments.decode.sequences, plan.segments.verify.sequences
        parts = [
            self._part(item, "decode" if at < decodes else "verify" if at < decodes + verified else "prefill")
            for at, item in enumerate(plan.scheduled)
        ]
        for request in plan.preempted:
            self._forget(request.request_id)
        idle = self._idle(plan) if scheduler.num_running > len(parts) else {}
        if len(self._known) > scheduler.num_running:
            for name in self._known.keys() - {request.request_id for request in scheduler.running}:
                self._forget(name)
        left, self._left = self._left, []
        self.emit(
            StepPlanned(
                time=now,
                seconds=now - began,
                step=step,
                parts=tuple(parts),
                preempted=tuple(request.request_id for request in plan.preempted),
                copies=plan.copies,
                stores=tuple(block for batch in batches for block, _ in batch.stores),
                loads=() if transfers is None else tuple(block for _, block in transfers.loads),
                token_budget=scheduler.config.max_num_batched_tokens,
                num_running=scheduler.num_running,
                num_waiting=scheduler.num_waiting,
                admission_end=scheduler.admission_end,
                num_blocks=stats.num_blocks,
                num_free_blocks=stats.num_free_blocks,
                num_cached_blocks=pool.num_labelled,
                evicted_blocks=pool.evictions,
                idle=idle,
                kept_blocks=tuple(filter(pool.keeps, dict.fromkeys(left))),
                prompt_share=scheduler.prompt_share,
            )
        )

    def _idle(self, plan: StepPlan) -> dict[str, tuple[int, ...]]:
        scheduled = {item.request for item in plan.scheduled}
        idle = [request for request in self._scheduler.running if request not in scheduled]
        return {request.request_id: self._table(request)[2] for request in idle}

    def _forget(self, sequence_id: str) -> None:
        known = self._known.pop(sequence_id, None)
        if known is not None:
            self._left += known[1]

    def _table(self, request: Request) -> tuple[bool, int, tuple[int, ...]]:
        """Whether it was admitted since it was last seen, how many blocks it had then, and its block table."""
        name = request.request_id
        admission, table = self._known.get(name, (None, ()))
        before, same = len(table), admission == request.admission
        if not same:
            self._left += table
        if not same or before != len(request.block_ids):
            table = tuple(request.block_ids)
            self._known[name] = request.admission, table
        return not same, before, table

    def _part(self, item: ScheduledRequest, kind: Kind) -> Part:
        request = item.request
        name = request.request_id
        admitted, before, table = self._table(request)
        if admitted:
            before = item.start // self._scheduler.block_tokens
        return Part(
            sequence_id=name,
            request_id=self._owner(name),
            kind=kind,
            start=item.start,
            num_tokens=item.num_tokens,
            drafts=item.drafts,
            samples=item.samples,
            num_known_tokens=request.num_tokens,
            num_prompt_tokens=len(request.prompt_token_ids),
            admitted=admitted,
            cached_tokens=item.start if admitted else 0,
            block_ids=table,
            new_blocks=max(0, len(table) - before),
        )

    def launched(self, step: int, began: float, late: bool) -> None:
        now = time.monotonic()
        self.emit(StepLaunched(now, now - began, step, late))

    def restricted(self, step: int, plan: StepPlan, restrictions: Restrictions) -> None:
        if restrictions.masks is None:
            return
        drawing = [item.request.request_id for item in plan.scheduled if item.samples]
        masks: dict[str, np.ndarray] = {}
        for row, words in zip(restrictions.masks.rows.tolist(), restrictions.masks.words, strict=True):
            name = drawing[row]
            masks[name] = words & masks[name] if name in masks else words.copy()
        self.emit(StepRestricted(time.monotonic(), step, masks))

    def finished(
        self, step: int, plan: StepPlan, result: StepResult, new: Sequence[NewTokens], began: float, ended: float
    ) -> None:
        """``began``, ``ended``: of the wait for the results."""
        kept = {request.request_id: tokens for request, tokens in new}
        tokens, row = [], 0
        for at, (item, sampled) in enumerate(zip(plan.scheduled, result.sampled, strict=True)):
            if sampled:
                drafted = result.drafted[at] if result.drafted else 0
                name = item.request.request_id
                accepted = len(sampled) - 1 if drafted else 0
                ids = tuple(kept.get(name, ()))
                scores = _scores(item.request, result.logprobs, row, len(ids))
                tokens.append(TokensOf(name, self._owner(name), ids, drafted, accepted, scores))
            row += len(sampled)
        self.emit(StepFinished(ended, ended - began, step, tuple(tokens), 1e-9 * result.draft_nanoseconds))

    def forced(self, step: int, new: Iterable[NewTokens]) -> None:
        tokens = tuple(
            TokensOf(request.request_id, self._owner(request.request_id), tuple(ids), 0, 0) for request, ids in new
        )
        if tokens:
            self.emit(TokensForced(time.monotonic(), step, tokens))

    def ended(self, state: RequestState) -> None:
        requests: list[Request] = [sequence.request for sequence in state.sequences]
        for request in requests:
            self._forget(request.request_id)
        left, self._left = self._left, []
        self.emit(
            RequestFinished(
                time=state.metrics.finished_time or time.monotonic(),
                request_id=state.request_id,
                first_token_time=state.metrics.first_token_time,
                finish_reasons=tuple(request.finish_reason or "" for request in requests),
                num_output_tokens=tuple(len(request.output_token_ids) for request in requests),
                num_cached_tokens=requests[0].num_cached_tokens or 0,  # the others take what it has
                num_preemptions=sum(request.num_preemptions for request in requests),
                error=state.error,
                kept_blocks=tuple(filter(self._scheduler.pool.keeps, dict.fromkeys(left))),
            )
        )

    def reset(self, reason: str) -> None:
        self._known.clear()
        self._left.clear()
        self.emit(EngineReset(time.monotonic(), reason))

    def _owner(self, sequence_id: str) -> str:
        """The user's request; an aborted one's own id."""
        known = self._sequences.get(sequence_id)
        return sequence_id if known is None else known[0].request_id


def _scores(
    request: Request, scores: TokenLogprobs | None, row: int, count: int
) -> tuple[tuple[tuple[int, float], ...], ...]:
    """The log-probabilities of so many of a request's tokens, from this row on, if it asked for any."""
    top = request.params.logprobs
    if scores is None or top is None:
        return ()
    most = 1 + (MOST_SCORES if top == ALL else min(top, MOST_SCORES))
    rows = [(scores.token_ids[at][:most], scores.logprobs[at][:most]) for at in range(row, row + count)]
    return tuple(tuple(zip(ids, values, strict=True)) for ids, values in rows)

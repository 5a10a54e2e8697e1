"""Hands what a step brought to its requests: tokens, log-probabilities, vectors; and what they end of."""

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from tritonllm.engine.data.plan import NewTokens, StepPlan
from tritonllm.engine.data.request import Request, RequestStatus
from tritonllm.engine.data.results import StepResult, TokenLogprobs
from tritonllm.engine.loop.announcer import Announcer, Sequences
from tritonllm.engine.schedule.scheduler import Scheduler
from tritonllm.engine.schedule.speculation import DraftCounts, count_positions
from tritonllm.engine.text.detokenizer import TokenTexts
from tritonllm.engine.text.output_processor import RequestState
from tritonllm.engine.text.pooling import PoolingState

NOTHING: Mapping[str, Any] = MappingProxyType({})
Touched = dict[str, RequestState]


class Delivery:
    """An error that belongs to one request ends that request only.

    Args:
        scheduler: is told of requests that end.
        sequences: the engine's unfinished sequences, by id.
        words: texts of log-probabilities' tokens.
        events: are told of forced tokens.

    Attributes:
        generated_tokens: how many tokens were generated since the start, forced ones among them.
        forced_tokens: how many of these followed without being drawn.
        drafts: how many drafts were verified and accepted.
    """

    def __init__(self, scheduler: Scheduler, sequences: Sequences, words: TokenTexts, events: Announcer) -> None:
        self._scheduler, self._sequences, self._words, self._events = scheduler, sequences, words, events
        self.generated_tokens = self.forced_tokens = 0
        self.drafts = DraftCounts()

    def take(self, plan: StepPlan, result: StepResult, new_tokens: list[NewTokens]) -> tuple[Touched, list[Request]]:
        """Hand out a step's results.

        Args:
            new_tokens: the requests' new tokens that the scheduler kept.

        Returns:
            The requests that changed, in the plan's order, and those whose next tokens the host has a say in.
        """
        for request_id, (first, scores) in result.prompt_logprobs.items():
            state, sequence = self._sequences.get(request_id, (None, None))
            if state is not None and sequence is not None and sequence.index == 0:  # else it was aborted since
                state.take_prompt_logprobs(first, scores, self._words)
        for ids, first, vectors in result.pooled:
            for i, request_id in enumerate(ids):
                state, _ = self._sequences.get(request_id, (None, None))
                if isinstance(state, PoolingState):  # else it was aborted since
                    state.take_pooled(first, vectors if len(ids) == 1 else vectors[i : i + 1])
        rows: dict[str, int] = {}  # where the log-probabilities begin of those who may ask for them
        if result.logprobs is not None:
            first = 0
            for item, tokens in zip(plan.scheduled, result.sampled, strict=True):
                rows[item.request.request_id] = first
                first += len(tokens)
        if result.drafted:
            self._count_drafts(plan, result)
        touched: Touched = {}
        return touched, self._hand_out(new_tokens, touched, result.logprobs, rows, result.errors)

    def force(self, new_tokens: Sequence[NewTokens], touched: Touched, step: int) -> None:
        """Hand out tokens that follow those of the last ``step`` without being drawn."""
        self.forced_tokens += sum(len(new) for _, new in new_tokens)
        if self._events.heard:
            self._events.forced(step, new_tokens)
        self._hand_out(new_tokens, touched)

    def _hand_out(
        self,
        new_tokens: Sequence[NewTokens],
        touched: Touched,
        scores: TokenLogprobs | None = None,
        rows: Mapping[str, int] = NOTHING,
        errors: Mapping[str, str] = NOTHING,
    ) -> list[Request]:
        """Let requests have their new tokens, which may end them.

        Args:
            touched: the states of these requests are added to it.
            scores: log-probabilities, and the ``rows`` at which those of a request begin.
            errors: what went wrong in a request's processors.

        Returns:
            The requests whose next tokens the host has a say in.
        """
        controlled = []
        now, taken = time.monotonic(), 0
        for request, new in new_tokens:
            state, sequence = self._sequences[request.request_id]
            if state.metrics.first_token_time is None:
                state.metrics.first_token_time = now
                state.metrics.first_scheduled_time = request.admitted_time
            taken += len(new) * (request.pooling is None)
            try:
                stopped = sequence.extend(new, scores, rows.get(request.request_id, 0))
            except Exception as error:  # the tokenizer may be anybody's code, and these tokens are one request's
                state.error = f"tokens {list(new)} could not be decoded: {type(error).__name__}: {error}"
                self._scheduler.finish(request.request_id, RequestStatus.FINISHED_ERROR)
            else:
                wrong = None
                if request.controls or errors:  # asked of each request in each step
                    wrong = errors.get(request.request_id) or self._control(request, new)
                    controlled.append(request)
                if wrong is not None:
                    state.error = wrong
                    sequence.take_back(len(new))
                    self._scheduler.finish(request.request_id, RequestStatus.FINISHED_ERROR, drop=len(new))
                elif stopped is not None:
                    stop, drop = stopped
                    self._scheduler.finish(request.request_id, RequestStatus.FINISHED_STOPPED, stop, drop=drop)
                    taken -= drop
            touched[state.request_id] = state
        self.generated_tokens += taken
        return controlled

    def _count_drafts(self, plan: StepPlan, result: StepResult) -> None:
        self.drafts.draft_seconds = 1e-9 * result.draft_nanoseconds
        for item, drafted, tokens in zip(plan.scheduled, result.drafted, result.sampled, strict=True):
            state, _ = self._sequences.get(item.request.request_id, (None, None))
            if drafted:
                self.drafts.add(drafted, len(tokens) - 1)
            if drafted and state is not None:
                state.metrics.num_draft_tokens += drafted
                state.metrics.num_accepted_tokens += len(tokens) - 1
                count_positions(state.metrics.num_accepted_tokens_per_pos, drafted, len(tokens) - 1)

    @staticmethod
    def _control(request: Request, new: Sequence[int]) -> str | None:
        """Tell what decides about the request's next tokens of these; returns what is wrong with them, if anything."""
        for control in request.controls:
            try:
                wrong = control.take(new)
            except Exception as error:  # one request's, of a package that is not ours
                wrong = f"its next token could not be decided: {type(error).__name__}: {error}"
            if wrong is not None:
                return wrong
        return None

"""Turns new tokens into what the user sees: text, stop strings, log-probabilities, finished outputs."""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from tritonllm.config.sampling_params import ALL, RequestOutputKind, SamplingParams
from tritonllm.engine.data.outputs import (
    CompletionOutput,
    Logprob,
    Logprobs,
    PoolingRequestOutput,
    RequestMetrics,
    RequestOutput,
)
from tritonllm.engine.data.request import Request, RequestStatus
from tritonllm.engine.data.results import TokenLogprobs
from tritonllm.engine.text.answer_text import AnswerText, TextPart
from tritonllm.engine.text.detokenizer import IncrementalDetokenizer, TokenTexts, find_stop
from tritonllm.engine.transfer.connector import Params
from tritonllm.engine.transfer.transfer import Fetch


def to_logprobs(scores: TokenLogprobs, row: int, top: int, words: TokenTexts) -> dict[int, Logprob]:
    """One position's log-probabilities: the chosen token first, then the ``top`` most likely, all if it is ``ALL``."""
    top = len(scores.token_ids[row]) - 1 if top == ALL else top
    ids, values = scores.token_ids[row][: top + 1], scores.logprobs[row][: top + 1]
    ranks = [scores.ranks[row], *range(1, top + 1)]
    entries: dict[int, Logprob] = {}
    for token, value, rank in zip(ids, values, ranks, strict=False):  # a small vocabulary has fewer than `top`
        entries.setdefault(token, Logprob(value, rank, words(token)))
    return entries


class SequenceOutput:
    """One of a request's ``n`` continuations.

    Args:
        words: texts of the tokens of log-probabilities; ``None``: of this output's own.
        answer: tells where stop strings count; ``None``: everywhere.
    """

    def __init__(
        self,
        index: int,
        request: Request,
        tokenizer: Any,
        words: TokenTexts | None = None,
        answer: AnswerText | None = None,
    ) -> None:
        self.index = index
        self._answer = answer
        self.request = request
        self._words = TokenTexts(tokenizer) if words is None else words
        self._logprobs: list[Logprobs] = []
        self._cumulative = 0.0
        self._text_end: int | None = None  # where a stop string cut the text, or the tokenizer failed
        self._sent_chars = self._sent_tokens = 0
        self._before = 0, 0.0  # log-probabilities and their sum, before the newest tokens
        params = request.params
        self._tokenizer = tokenizer if params.detokenize else None
        self._detokenizer = self._new_detokenizer()
        # a stop string may still be on its way: what could be its beginning is not shown yet
        hidden = 0 if params.include_stop_str_in_output else 1
        self._held_back = max((len(s) - 1 for s in params.stop_strings), default=0) * hidden

    def _new_detokenizer(self) -> IncrementalDetokenizer | None:
        if self._tokenizer is None:
            return None
        params = self.request.params
        return IncrementalDetokenizer(
            self._tokenizer,
            self.request.prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )

    def extend(self, tokens: Sequence[int], scores: TokenLogprobs | None, row: int) -> tuple[str, int] | None:
        """Take in the newest tokens of the output, up to the first that completes a stop string.

        Args:
            scores: log-probabilities, those of the first token in row ``row``.

        Returns:
            The stop string, and how many of the tokens come after it; ``None`` if none was completed.
        """
        if scores is None and self._detokenizer is None:  # asked of each request in each step
            return None
        self._before = len(self._logprobs), self._cumulative
        last = len(tokens) - 1
        before = len(self.request.output_token_ids) - len(tokens)
        for index, token in enumerate(tokens):
            status = self.request.status if index == last else RequestStatus.RUNNING
            stop = self._append(token, scores, row + index, before + index + 1, status)
            if stop is not None:
                return stop, last - index
        return None

    def take_back(self, dropped: int) -> None:
        """The tokens of the last :meth:`extend` are dropped, and the output ends before them.

        Args:
            dropped: how many they are; the request still has them.
        """
        entries, self._cumulative = self._before
        del self._logprobs[entries:]
        self._text_end, self._detokenizer = None, self._new_detokenizer()
        if self._detokenizer is not None:  # what they completed was held back before them, or a part of the text
            for token in self.request.output_token_ids[:-dropped]:
                self._detokenizer.append(token)

    def _append(
        self, token: int, scores: TokenLogprobs | None, row: int, length: int, status: RequestStatus
    ) -> str | None:
        """Take in one token, which makes the output ``length`` tokens long; returns the stop string that it completes.
        One that ends the output, as the ``status`` then says, is a part of its text only with
        ``include_stop_str_in_output``."""
        params = self.request.params
        if scores is not None and params.logprobs is not None:
            entries = to_logprobs(scores, row, params.logprobs, self._words)
            self._logprobs.append(entries)
            self._cumulative += entries[token].logprob
        if self._detokenizer is None:
            return None
        new = ""
        if status is not RequestStatus.FINISHED_STOPPED or params.include_stop_str_in_output:
            self._text_end = len(self._detokenizer.text)  # if the tokenizer fails, it is asked no more
            new = self._detokenizer.append(token)
            self._text_end = None
        if not params.stop_strings:
            return None
        text = self._detokenizer.text
        if self._answer is None:
            parts = [TextPart(0, len(text) - len(new), len(text))]
        else:
            parts = self._answer.take(text, token, status.is_finished)
        if length < params.min_tokens:
            return None
        found = self._find_stop(parts)
        if found is None:
            return None
        start, stop = found
        self._text_end = start + len(stop) if params.include_stop_str_in_output else start
        return stop

    def _find_stop(self, parts: Sequence[TextPart]) -> tuple[int, str] | None:
        assert self._detokenizer is not None
        text, stops = self._detokenizer.text, self.request.params.stop_strings
        for begin, new, end in parts:
            if end > new and (found := find_stop(text, end - new, stops, begin, end)) is not None:
                return found
        return None

    def _text(self) -> str:
        if self._detokenizer is None:
            return ""
        if self._text_end is not None:
            return self._detokenizer.text[: self._text_end]
        ended = self.request.status.is_finished
        if ended:
            self._detokenizer.finish()
        text = self._detokenizer.text
        if ended or (self._answer is None and not self._held_back):
            return text
        sure = len(text) if self._answer is None else self._answer.decided
        return text[: max(0, sure - self._held_back)]

    def output(self, kind: RequestOutputKind) -> CompletionOutput:
        """What to show now; a delta is relative to the last call."""
        request = self.request
        text, first_char, first_token = self._text(), 0, 0
        if kind is RequestOutputKind.DELTA:
            first_char, first_token = self._sent_chars, self._sent_tokens
            self._sent_chars, self._sent_tokens = max(len(text), first_char), len(request.output_token_ids)
        asked = request.params.logprobs is not None
        return CompletionOutput(
            index=self.index,
            text=text[first_char:],
            token_ids=request.output_token_ids[first_token:],
            cumulative_logprob=self._cumulative if asked else None,
            logprobs=self._logprobs[first_token:] if asked else None,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
        )


@dataclass
class RequestState:
    """A user's request: its ``n`` continuations and what they share.

    Attributes:
        grammar: must be compiled before they are scheduled.
        fetch: brings blocks of the prompt before they are scheduled.
        offer: where others find the prompt's blocks, for the last output.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    sequences: list[SequenceOutput]
    metrics: RequestMetrics
    prompt_logprobs: list[Logprobs | None] = field(default_factory=lambda: [None])
    error: str | None = None
    grammar: Future[Any] | None = None
    fetch: Fetch | None = None
    offer: Params | None = None

    @property
    def finished(self) -> bool:
        for sequence in self.sequences:  # noqa: SIM110 (asked of each request in each step: all() takes thrice as long)
            if not sequence.request.status.is_finished:
                return False
        return True

    def take_prompt_logprobs(self, first: int, scores: TokenLogprobs, words: TokenTexts) -> None:
        """Store a chunk's scores from prompt position ``first`` on (again, if the prompt was computed again)."""
        top = self.params.prompt_logprobs or 0
        self.prompt_logprobs[first:] = [to_logprobs(scores, row, top, words) for row in range(len(scores.token_ids))]

    def output(self) -> RequestOutput | PoolingRequestOutput | None:
        """What this step returns of the request; ``None`` if it only wants its end."""
        kind, finished = self.params.output_kind, self.finished
        if kind is RequestOutputKind.FINAL_ONLY and not finished:
            return None
        if finished:
            self.metrics.finished_time = time.monotonic()
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=self.prompt_logprobs if self.params.prompt_logprobs is not None else None,
            outputs=[sequence.output(kind) for sequence in self.sequences],
            finished=finished,
            metrics=self.metrics,
            num_cached_tokens=self.sequences[0].request.num_cached_tokens or 0,
            error=self.error,
            kv_transfer_params=self.offer if finished else None,
        )

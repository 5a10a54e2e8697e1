"""What comes back of a step: on its way from the device, and on the host."""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from tritonllm.engine.data.agreement import Evidence

SHORT_WAIT = 0.05  # seconds: beyond it a step is so long that a millisecond more does not count
LogprobTensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # the three of TokenLogprobs, wherever they are


class StepTimeoutError(RuntimeError):
    """The device did not finish a step in time; the message names the step and its requests."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at R positions, on the host.

    Attributes:
        token_ids: for each position, the chosen token and then the most likely ones, best first; not all equally many.
        logprobs: the log-probability of each of those tokens, in the same shape.
        ranks: the rank of each chosen token in the vocabulary, 1 for the most likely.
    """

    token_ids: list[list[int]]
    logprobs: list[list[float]]
    ranks: list[int]


class PooledRows(NamedTuple):
    """What became of pooled prompts.

    Attributes:
        request_ids: a row each; of one request, whose every token has a row, one id.
        first: position of the first of those tokens.
        rows: ``[N, outputs]`` float32.
    """

    request_ids: tuple[str, ...]
    first: int
    rows: torch.Tensor


@dataclass(frozen=True)
class StepResult:
    """What a step produced, on the host.

    Attributes:
        sampled: for each sequence of the step its new tokens: none, one or several.
        logprobs: log-probabilities of the new tokens of all sequences, one after the other; ``None`` if no request
            asked.
        prompt_logprobs: by request id, the log-probabilities of the prompt tokens that this step's chunk predicts, with
            the position of the first.
        errors: messages by request id, for requests that must end.
        pooled: what became of pooled prompts.
        drafted: for each sequence how many drafts were verified; empty if none were.
        draft_nanoseconds: what drafting has taken since the start, if drafts were verified.
    """

    sampled: list[list[int]]
    logprobs: TokenLogprobs | None
    prompt_logprobs: dict[str, tuple[int, TokenLogprobs]]
    errors: Mapping[str, str] = field(default_factory=dict)
    pooled: Sequence[PooledRows] = ()
    drafted: Sequence[int] = ()
    draft_nanoseconds: int = 0


class RunningStep:
    """A step that was launched; its results are on their way to pinned memory.

    Args:
        samples: ``[B]`` bool, which sequences get tokens.
        tokens: ``[R]`` int64, one for each of those, or ``[R, G]``, up to G for each with -1 behind them; ``None`` if
            there are none.
        logprobs: log-probabilities of all entries of ``tokens``, if any request wants them.
        prompt_logprobs: log-probabilities of prompt tokens, in parts: request id, position of the first, and the
            scores.
        whole_logprobs: rows whose log-probabilities are longer than the others', with those. Of both each part is on
            its way to the host before the next one is computed.
        device: where it runs.
        errors: see :class:`StepResult`.
        pooled: the pooled prompts, still on the device.
        drafted: ``[4 + R (G - 1)]`` int32: as two int64 when the drafting of this step began and what all drafting has
            taken, in nanoseconds; and what the step verified of each row, with -1 behind its drafts.

    Attributes:
        evidence: what ranks compare of it, if they do.
    """

    def __init__(
        self,
        samples: np.ndarray,
        tokens: torch.Tensor | None,
        logprobs: LogprobTensors | None,
        prompt_logprobs: Iterable[tuple[str, int, LogprobTensors]],
        device: torch.device,
        whole_logprobs: Iterable[tuple[int, LogprobTensors]] = (),
        errors: Mapping[str, str] | None = None,
        pooled: Sequence[PooledRows] = (),
        drafted: torch.Tensor | None = None,
    ) -> None:
        self._check: Callable[[], None] = lambda: None
        self.evidence: Evidence | None = None
        self._pooled = [part._replace(rows=_to_host(part.rows)) for part in pooled]
        self._errors = errors or {}
        self._drafted = None if drafted is None else _to_host(drafted)
        self._samples = samples
        self._tokens = None if tokens is None else _to_host(tokens)
        self._logprobs = None if logprobs is None else tuple(_to_host(t) for t in logprobs)
        self._whole_logprobs = [(row, tuple(_to_host(t) for t in part)) for row, part in whole_logprobs]
        self._prompt_logprobs = [(name, at, tuple(_to_host(t) for t in part)) for name, at, part in prompt_logprobs]
        self._done = torch.cuda.Event() if device.type == "cuda" else None
        if self._done is not None:
            self._done.record(torch.cuda.current_stream(device))

    def watch(self, check: Callable[[], None]) -> None:
        """Call ``check`` while the device is waited for: it raises if the step will never end."""
        self._check = check

    def _await(self, event: torch.cuda.Event, timeout: float, what: Callable[[], str]) -> None:
        """Wait as ``event.synchronize()`` does, spinning, but so that Ctrl-C and the end of patience come through."""
        begin = time.monotonic()
        while not event.query():
            waited = time.monotonic() - begin
            if waited > timeout:
                raise StepTimeoutError(
                    f"the GPU has not finished a step after {timeout:g} s (step_timeout): {what()}. It may hang, and "
                    "then only the end of this process frees it"
                )
            if waited < SHORT_WAIT:
                os.sched_yield()
            else:
                self._check()
                time.sleep(0.001)

    def wait(self, timeout: float, what: Callable[[], str]) -> StepResult:
        """Wait for the device and return the results.

        Args:
            timeout: how long to wait, in seconds.
            what: says what the step computes, for the error.

        Raises:
            StepTimeoutError: it took longer.
        """
        if self._done is not None:
            self._await(self._done, timeout, what)
        logprobs = None if self._logprobs is None else TokenLogprobs(*(t.tolist() for t in self._logprobs))
        for row, (ids, values, _) in self._whole_logprobs:
            assert logprobs is not None  # this row is among them
            logprobs.token_ids[row], logprobs.logprobs[row] = ids[0].tolist(), values[0].tolist()
        if logprobs is not None and self._tokens is not None and self._tokens.dim() == 2:
            logprobs = _picked(logprobs, (self._tokens.flatten() >= 0).nonzero()[:, 0].tolist())
        of_prompts: dict[str, tuple[int, TokenLogprobs]] = {}
        for name, at, part in self._prompt_logprobs:
            scores = of_prompts.setdefault(name, (at, TokenLogprobs([], [], [])))[1]
            more = TokenLogprobs(*(values.tolist() for values in part))
            scores.token_ids.extend(more.token_ids)
            scores.logprobs.extend(more.logprobs)
            scores.ranks.extend(more.ranks)
        drafted, nanoseconds = self._read_drafts()
        return StepResult(self._sampled(), logprobs, of_prompts, self._errors, self._pooled, drafted, nanoseconds)

    def _read_drafts(self) -> tuple[Sequence[int], int]:
        """How many drafts each row had, and the nanoseconds that all drafting has taken."""
        if self._drafted is None or self._tokens is None:
            return (), 0
        drafts = self._drafted[4:].view(len(self._tokens), -1)
        return (drafts >= 0).sum(1).tolist(), int(self._drafted[:4].view(torch.int64)[1])

    def _sampled(self) -> list[list[int]]:
        if self._tokens is None:
            rows: list[list[int]] = []
        elif self._tokens.dim() == 1:
            rows = self._tokens.numpy()[:, None].tolist()
        else:
            rows = [[token for token in row if token >= 0] for row in self._tokens.tolist()]
        if len(rows) == len(self._samples):
            return rows
        drawn = iter(rows)
        return [next(drawn) if samples else [] for samples in self._samples.tolist()]


def _picked(scores: TokenLogprobs, rows: Sequence[int]) -> TokenLogprobs:
    ids, values = [scores.token_ids[row] for row in rows], [scores.logprobs[row] for row in rows]
    return TokenLogprobs(ids, values, [scores.ranks[row] for row in rows])


def _to_host(values: torch.Tensor) -> torch.Tensor:
    """Begin to copy to pinned memory."""
    if not values.is_cuda:
        return values.clone()  # the next step may overwrite it
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)

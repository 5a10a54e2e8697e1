"""Logits to token ids: what requests ask of the distribution, the draw, and log-probabilities.

Nothing here waits for the device. Results stay there until a :class:`~tritonllm.engine.results.RunningStep` is read.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from tritonllm.engine.edits import MAX_BAD_WORD, MAX_ENTRIES, SeatEdits
from tritonllm.engine.inputs import upload
from tritonllm.engine.processors import BatchProcessors, Errors, apply_to_rows
from tritonllm.engine.results import LogprobTensors
from tritonllm.engine.step import Step
from tritonllm.kernels import apply_token_bitmask, sample, token_logprobs
from tritonllm.kernels.sampling.edits import ALWAYS, Entry, LogitEdits, count_tokens, make_logit_edits, write_seat
from tritonllm.kernels.sampling.seat_state import SamplingRows


class Drawn(NamedTuple):
    """What a step drew.

    Attributes:
        tokens: ``[R]`` int64, valid until the next draw.
        logprobs: of the model's own distribution, before edits, if a request wants them.
        errors: what went wrong in requests' processors, by request id.
        whole: rows whose requests want the whole vocabulary, with those. Each is computed when it is asked for, before
            the next draw: one row takes 28 bytes a token of the vocabulary, and 256 at once would take a gigabyte.
    """

    tokens: torch.Tensor
    logprobs: LogprobTensors | None
    whole: Iterable[tuple[int, LogprobTensors]]
    errors: Errors


class Sampler:
    """Draws tokens, and keeps the edits of each seat on the device.

    Args:
        drawn: ``[seats]`` int64, where tokens are written.
        vocab: size of the vocabulary.
        processors: change the logits of whole steps.
    """

    def __init__(self, drawn: torch.Tensor, vocab: int, processors: BatchProcessors | None = None) -> None:
        self._processors = processors
        self._drawn = drawn
        self._workspace = torch.zeros(len(drawn), dtype=torch.int32, device=drawn.device)
        self._size = len(drawn), vocab
        self._state: LogitEdits | None = None

    def draw(self, logits: torch.Tensor, inputs: SamplingRows) -> torch.Tensor:
        """One token for each row of ``logits[R, V]`` float32 -> ``[R]`` int64, valid until the next draw. Can be
        captured in a graph."""
        return sample(logits, *inputs, workspace=self._workspace, out=self._drawn[: len(logits)])

    def sample(self, logits: torch.Tensor, inputs: SamplingRows, step: Step) -> Drawn:
        """One token for each row, whatever its request asks for.

        Args:
            logits: ``[R, V]`` float32; rows of requests that change them are overwritten.
            step: whose R rows they are.
        """
        batch = self._processors if self._processors is not None and self._processors.wanted(step) else None
        changed = step.changed or batch is not None
        raw = logits.clone() if changed and step.logprobs is not None else logits  # changes are made in place
        errors = apply_to_rows(logits, step.processors)
        if batch is not None:
            errors |= batch.apply(logits, inputs.steps, step)
        if step.masks is not None:  # last, so that no processor allows what it bans
            at, words = upload(step.masks, logits.device)
            apply_token_bitmask(logits, at, words)
        if step.edited is not None:
            more = {"workspace": self._workspace, "out": self._drawn[: len(logits)]}
            edits = self._told(step.new_edits)
            (seats,) = upload([step.edited], logits.device)
            tokens = sample(logits, *inputs, edits=edits, seats=seats, **more)
            count_tokens(edits, seats, tokens)
        else:
            tokens = self.draw(logits, inputs)
        if batch is not None:
            batch.count(tokens, step)
        logprobs = None if step.logprobs is None else token_logprobs(raw, tokens, step.logprobs)
        vocab = logits.shape[1]
        whole = ((i, token_logprobs(raw[i : i + 1], tokens[i : i + 1], vocab)) for i in step.whole_logprobs)
        return Drawn(tokens, logprobs, whole, errors)

    def _told(self, new: tuple[SeatEdits, ...]) -> LogitEdits:
        """The state of all seats, these ones written. It takes no memory before a request needs it (then 2.25 bytes a
        seat and token)."""
        if self._state is None:
            self._state = _make_state(*self._size, self._drawn.device)
        for edits in new:
            entries = [
                Entry(entry.token, entry.value, ALWAYS if entry.until is None else entry.until, entry.after)
                for entry in edits.entries
            ]
            write_seat(
                self._state,
                edits.seat,
                prompt=edits.prompt,
                output=edits.output,
                repetition=edits.repetition,
                frequency=edits.frequency,
                presence=edits.presence,
                entries=entries,
                allowed=edits.allowed,
            )
        return self._state

    def warm_up(self, logits: torch.Tensor) -> None:
        """Run every kernel that a request may need on ``logits[R, V]``; changes nothing."""
        n, device = len(logits), logits.device
        index = torch.zeros(n, dtype=torch.int64, device=device)
        seats = torch.full((n,), -1, dtype=torch.int32, device=device)
        ones = torch.ones(n, dtype=torch.float32, device=device)
        edits = _make_state(1, logits.shape[1], device)
        limits = ones, seats + 51, 0.9 * ones, 0.1 * ones
        for edited in ({}, {"edits": edits, "seats": seats}):
            tokens = sample(logits, *limits, index, index, workspace=self._workspace, **edited)
        count_tokens(edits, seats, tokens)
        rows = torch.full((1,), -1, dtype=torch.int32, device=device)
        apply_token_bitmask(logits, rows, rows.new_empty(1, -(-logits.shape[1] // 32)))
        for top in (0, 5):
            token_logprobs(logits, tokens, top)


def _make_state(seats: int, vocab: int, device: torch.device) -> LogitEdits:
    return make_logit_edits(seats, vocab, entries=MAX_ENTRIES, longest=MAX_BAD_WORD - 1, device=device)

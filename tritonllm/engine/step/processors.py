"""Functions of the user's that change logits before a token is drawn: of one request, or of a step on the device.

An exception in one ends the requests whose rows it was to change, and no other.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch

from tritonllm.config.checks import load_code
from tritonllm.config.sampling_params import SamplingParams
from tritonllm.engine.data.inputs import upload
from tritonllm.engine.data.step import RowProcessors, SeatedRequest, Step

Errors = dict[str, str]  # of requests, by id


class BatchLogitsProcessor(Protocol):
    """Changes the logits of a whole step, without the host. ``LLM(..., logits_processors=[make])`` registers what
    makes one: ``make(seats, vocab_size, device)``, once, or its name as ``"module:name"``.

    A request has a seat, from 0 to ``seats - 1``, while it runs. What a processor must know of requests it keeps in
    tensors with one row for each seat. ``SamplingParams.extra_args`` tells what a request wants of it.
    """

    def admit(self, seat: int, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> bool:
        """A request takes a seat (after a preemption again, with the output so far). Returns whether it wants anything.
        If not, its rows have seat -1 in the other calls; if nobody does, they are not called."""

    def apply(self, logits: torch.Tensor, seats: torch.Tensor, steps: torch.Tensor) -> None:
        """Change ``logits[R, V]`` float32 in place, before temperature and penalties. ``seats[R]`` int64 says whose
        they are, -1 for rows to leave alone; ``steps[R]`` int64 how many tokens their outputs have. Must not wait for
        the device."""

    def count(self, seats: torch.Tensor, tokens: torch.Tensor) -> None:
        """The tokens ``[R]`` int64 that were drawn; for processors that depend on the output. A step that verifies
        drafts calls ``apply`` and this once for each of them, with seat -1 for rows whose drafts have ended."""


Maker = Callable[[int, int, torch.device], BatchLogitsProcessor]


def load_maker(maker: str | Maker) -> Maker:
    """Import a function that makes logits processors, if it is given as ``"module:name"``.

    Raises:
        ValueError: there is no such module, or it has no such name.
    """
    if not isinstance(maker, str):
        return maker
    found: Maker = load_code("logits_processors: ", maker)
    return found


def _said(error: Exception) -> str:
    return f"a logits processor failed: {type(error).__name__}: {error}"


class BatchProcessors:
    """The logits processors of one engine, which see whole batches.

    Args:
        makers: for each processor, the function that makes it, or its ``"module:name"``.
        seats: how many requests may run at once.
        vocab: the size of the vocabulary.
        device: the device that the logits are on.
    """

    def __init__(self, makers: Sequence[str | Maker], seats: int, vocab: int, device: torch.device) -> None:
        self._all = [load_maker(maker)(seats, vocab, device) for maker in makers]
        self._wants = np.zeros((len(self._all), seats), dtype=bool)
        self._ids = [""] * seats
        self._failed: Errors = {}  # of requests that sit

    def admit(self, admitted: Sequence[SeatedRequest]) -> None:
        """Tell each processor of the requests that are new to their seats."""
        for seat, request_id, params, prompt, output in admitted:
            self._failed.pop(self._ids[seat], None)
            self._ids[seat] = request_id
            for index, processor in enumerate(self._all):
                self._wants[index, seat] = False
                try:
                    self._wants[index, seat] = processor.admit(seat, params, prompt, output)
                except Exception as error:
                    self._failed[request_id] = _said(error)

    def wanted(self, step: Step) -> bool:
        """Whether this step's rows are any processor's, or of a request that one failed for."""
        return bool(self._failed or self._wants[:, step.inputs.seats].any())

    def apply(
        self, logits: torch.Tensor, steps: torch.Tensor, step: Step, wanted: torch.Tensor | None = None
    ) -> Errors:
        """Change the rows of a step, if the device says (``[R]`` bool) that they are ``wanted``; returns the requests
        that must end."""
        for processor, seats in self._calls(step):
            self._guard(seats, partial(processor.apply, logits, _upload(seats, logits, wanted), steps))
        ids = {self._ids[seat] for seat in step.inputs.seats.tolist()}
        return {name: said for name, said in self._failed.items() if name in ids}

    def count(self, tokens: torch.Tensor, step: Step, wanted: torch.Tensor | None = None) -> None:
        """Tell the processors what was drawn."""
        for processor, seats in self._calls(step):
            self._guard(seats, partial(processor.count, _upload(seats, tokens, wanted), tokens))

    def _calls(self, step: Step) -> list[tuple[BatchLogitsProcessor, np.ndarray]]:
        """Processors whose rows these are, with the rows' seats, -1 for others."""
        at = step.inputs.seats
        masks = zip(self._all, self._wants[:, at], strict=True)
        return [(processor, np.where(mine, at, -1).astype(np.int64)) for processor, mine in masks if mine.any()]

    def _guard(self, seats: np.ndarray, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            for seat in seats[seats >= 0].tolist():
                self._failed[self._ids[seat]] = _said(error)
                self._wants[:, seat] = False


def _upload(seats: np.ndarray, like: torch.Tensor, wanted: torch.Tensor | None) -> torch.Tensor:
    (there,) = upload([seats], like.device)
    return there if wanted is None else torch.where(wanted, there, -1)


def apply_to_rows(logits: torch.Tensor, processors: Sequence[RowProcessors]) -> Errors:
    """Let requests change their rows of ``logits[R, V]`` float32; returns those that must end."""
    errors: Errors = {}
    for row, request_id, functions, prompt, output in processors:
        try:
            values = logits[row]
            for function in functions:
                past = (prompt, output) if _takes_prompt(function) else (output,)
                values = function(*past, values)
                if not isinstance(values, torch.Tensor) or values.shape != logits[row].shape:
                    raise ValueError(f"it must return logits of shape {list(logits[row].shape)}, got {values!r}")
            logits[row] = values
        except Exception as error:
            errors[request_id] = _said(error)
    return errors


def _takes_prompt(function: Callable[..., torch.Tensor]) -> bool:
    """vLLM's rule: with three parameters the first is the prompt's tokens."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is p.empty for p in parameters) == 3

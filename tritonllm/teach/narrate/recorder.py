"""Keeps the logits that tokens are drawn from, through the hook that every request has for functions of its own."""

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Recorded(NamedTuple):
    """A row of logits as the model gave it, and the tokens that it follows."""

    prompt: list[int]
    output: list[int]
    logits: torch.Tensor


class DrawRecorder:
    """A function for ``SamplingParams.logits_processors`` that changes nothing.

    The sampler calls it once for each row that it draws, in their order, after the results of the step before are
    known and before those of this step are. So between two finished steps it hears of one step. A request that has such
    a function gets no drafts, and its grammar forces no tokens: each is drawn. That changes how fast tokens come, and
    not which.

    Args:
        most: how many rows of a step it keeps, the first ones. A row of 152,000 logits takes 600 KB.

    Attributes:
        awake: whether it keeps what it hears.
    """

    def __init__(self, most: int = 16) -> None:
        self.awake = True
        self._most = most
        self._rows: list[Recorded] = []

    def __call__(self, prompt: Sequence[int], output: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        if self.awake and len(self._rows) < self._most:
            self._rows.append(Recorded(list(prompt), list(output), logits.clone()))  # it is edited in place later
        return logits

    def take(self) -> list[Recorded]:
        """What it has heard since the last time."""
        rows, self._rows = self._rows, []
        return rows

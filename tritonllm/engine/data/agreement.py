"""Whether the ranks agree: what each of them computed a step from, and the tokens that it took from it.

Rank 0 draws, and the others get its tokens. So ranks cannot draw differently, but they can differ in what they compute
from: the step that they were sent, and what their devices derive from it and from the steps before (last tokens,
positions, slots, lengths, drafts). A rank that differs there adds its wrong part to every sum, and all tokens are wrong
from then on without any sign of it. All of this is integers, which are the same ones on every device, so checksums
compare them. Hidden states are not compared: GPUs of several kinds may round them differently.

Of every :data:`EVERY`-th step each rank copies these arrays to the host, beside the steps. Rank 0 sends its checksums
with a later step, on the way that all steps go, and each other rank compares them with its own when both are there.
Nobody waits for anything. A rank that differs raises :class:`DivergedError`, and the group ends as with any rank that
fails.
"""

import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import NamedTuple

import numpy as np
import torch

from tritonllm.engine.data.inputs import Batch, host_bytes
from tritonllm.engine.data.step import Step

# Steps from one comparison to the next. A step takes some milliseconds, so a rank that differs is found within about a
# second, and the 0.1 ms of a comparison are 1.5 us a step (docs/distributed.md).
EVERY = 64


class DivergedError(RuntimeError):
    """This rank computed a step from something else than rank 0; the message names the step and what was different."""


class Sums(NamedTuple):
    """Checksums of a step.

    Attributes:
        number: the step's number; the first step is 1.
        values: the CRC-32 of each compared array, by the array's name.
    """

    number: int
    values: Mapping[str, int]


class Evidence:
    """A step's arrays on their way to the host.

    Args:
        number: the step's number; the first step is 1.
        arrays: contiguous, all on one device; the next step may overwrite them.
        known: checksums of what the host has already.
    """

    def __init__(self, number: int, arrays: Mapping[str, torch.Tensor], known: Mapping[str, int]) -> None:
        self.number, self._known = number, known
        parts = [array.reshape(-1).view(torch.uint8) for array in arrays.values()]
        self._sizes = {name: len(part) for name, part in zip(arrays, parts, strict=True)}
        packed = torch.cat(parts)  # one copy, however many they are
        self._bytes, self._done = packed, None
        if packed.is_cuda:
            self._bytes = host_bytes(len(packed), packed.device).copy_(packed, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record(torch.cuda.current_stream(packed.device))

    @property
    def is_there(self) -> bool:
        """Whether all of it has arrived."""
        return self._done is None or self._done.query()

    def sums(self) -> Sums:
        """The checksums of the arrays. Only valid once they have arrived (:attr:`is_there`)."""
        values, at, host = dict(self._known), 0, self._bytes.numpy()
        for name, size in self._sizes.items():
            values[name] = zlib.crc32(host[at : at + size])
            at += size
        return Sums(self.number, values)


class AgreementSampler:
    """Takes evidence of every :data:`EVERY`-th step, from the first one on.

    Args:
        ranks: how many there are; of one there is nothing to compare.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks, self._steps = ranks, 0

    def of(self, step: Step, batch: Batch, tokens: torch.Tensor | None) -> Evidence | None:
        """What is compared of a step, behind its launch; ``None`` if it is not this one's turn.

        Args:
            step: the step as it was sent to the ranks. Every step must be passed here, in the order in which it runs.
            batch: the arrays of that step on the device.
            tokens: the token ids that rank 0 drew in it and sent to all ranks; ``None`` if there are none.
        """
        self._steps += 1
        if self._ranks == 1 or self._steps % EVERY != 1:
            return None
        arrays = {field.name: getattr(batch.inputs, field.name) for field in fields(batch.inputs)}
        if tokens is not None:
            arrays["tokens"] = tokens
        tables = zlib.crc32(np.ascontiguousarray(step.block_tables))
        return Evidence(self._steps, arrays, {"block_tables": tables})


class Claims:
    """What rank 0 tells the others of its own steps."""

    def __init__(self) -> None:
        self._pending: deque[Evidence] = deque()

    def note(self, evidence: Evidence | None) -> None:
        """Queue the evidence of the step that was launched last; ``None`` is skipped."""
        if evidence is not None:
            self._pending.append(evidence)

    def next(self) -> Sums | None:
        """The checksums of the oldest step not yet sent to the other ranks; ``None`` if they have not arrived."""
        return self._pending.popleft().sums() if self._pending and self._pending[0].is_there else None


class Comparison:
    """What a rank other than 0 compares: its own steps with what it is told."""

    def __init__(self) -> None:
        self._own: deque[Evidence] = deque()
        self._told: deque[Sums] = deque()

    def note(self, evidence: Evidence | None) -> None:
        """Queue this rank's evidence of the step that was launched last; ``None`` is skipped."""
        if evidence is not None:
            self._own.append(evidence)

    def check(self, told: Sums | None) -> None:
        """Compare what is there of both; take in what rank 0 says, if it does.

        Raises:
            DivergedError: they differ.
        """
        if told is not None:
            self._told.append(told)
        while self._told:
            wanted = self._told[0]
            while self._own and self._own[0].number < wanted.number:  # rank 0 has said nothing of it
                self._own.popleft()
            if not self._own or self._own[0].number > wanted.number:
                raise DivergedError(f"it has run no step {wanted.number}, as rank 0 has: it counts other steps")
            if not self._own[0].is_there:
                return
            compare(self._own.popleft().sums(), self._told.popleft())


def compare(own: Sums, wanted: Sums) -> None:
    """Compare this rank's checksums of a step with rank 0's.

    Raises:
        DivergedError: they differ.
    """
    names = [*wanted.values, *(name for name in own.values if name not in wanted.values)]
    different = [name for name in names if own.values.get(name) != wanted.values.get(name)]
    if different:
        raise DivergedError(f"in step {own.number} it had other {_listed(different)} than rank 0")


def _listed(names: Sequence[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last

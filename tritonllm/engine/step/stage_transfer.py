"""What a stage of a pipeline does around its part of a step: it takes over from the stage before, and passes on.

A step goes through the stages as its inputs and the residual stream. The inputs are sent, too, since only the first
stage's device knows all of them: it has drawn the tokens before, and settled how many of a sequence's drafts were
right. The last stage sends the normalised rows that are drawn from, or all, back to the first one. That one draws from
them when it has begun so many later steps as there are other stages. What the draw needs is kept until then, for later
steps write to the same buffers.
"""

from collections import deque
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from tritonllm.dist.pipeline import Pipeline
from tritonllm.engine.data.agreement import AgreementSampler, Evidence
from tritonllm.engine.data.inputs import Batch, upload
from tritonllm.engine.step.device_seats import DeviceSeats
from tritonllm.engine.step.drawing import LaunchedStep
from tritonllm.models.interface import StagedLM


class Passed(NamedTuple):
    """A step on its way through the stages.

    Attributes:
        seats: ``[R]`` int32, whose its rows are, -1 for those whose seat another request has by now.
        evidence: what the ranks compare of it, if they do.
    """

    seats: np.ndarray
    evidence: Evidence | None


class StageTransfer:
    """Takes the steps of a pipeline over from the stage before, and passes them on to the next.

    Args:
        pipe: the stages of the pipeline, seen from this one.
        model: this stage's part of the model.
        seats: the seats of the first stage's device.
        ranks: how many ranks all stages have together.
        device: the device that the model is on.
    """

    def __init__(self, pipe: Pipeline, model: StagedLM, seats: DeviceSeats, ranks: int, device: torch.device) -> None:
        self._pipe, self._model, self._seats, self._device = pipe, model, seats, device
        self._agreement = AgreementSampler(ranks)
        self._passed: deque[Passed] = deque()

    def reserve(self, tokens: int) -> int:
        """Make room for steps of up to so many tokens.

        Returns:
            Bytes that what is on its way to the next stage takes at most.
        """
        model = self._model
        if not self._pipe.first and (model.incoming is None or len(model.incoming) < tokens):
            size = tokens, model.columns_in
            model.incoming = torch.zeros(size, dtype=model.dtype, device=self._device)
        return self._pipe.most_kept * tokens * model.columns_out * model.dtype.itemsize

    def take_over(self, batch: Batch) -> None:
        """Receive a step from the stage before: behind what the host has sent of it, and before its layers."""
        if not self._pipe.first:
            assert self._model.incoming is not None  # it was reserved
            self._pipe.receive(batch.sent)
            self._pipe.receive(self._model.incoming[: len(batch.inputs.positions)])

    def pass_on(self, launched: LaunchedStep) -> LaunchedStep:
        """Send a step to the next stage.

        Returns:
            The step with what its draw needs, which no later step changes.
        """
        step, batch = launched.step, launched.batch
        if not self._pipe.last:
            self._pipe.send(batch.sent)
        self._pipe.send(launched.hidden)
        evidence = self._agreement.of(step, batch, None)
        for other in self._passed:  # whose request gave its seat back: what is drawn of it must not be settled there
            other.seats[np.isin(other.seats, step.inputs.seats)] = -1
        self._passed.append(Passed(step.inputs.seats.astype(np.int32), evidence))
        if not self._pipe.first:
            return launched
        self._seats.set_aside()
        drafted = launched.drafted
        return launched._replace(
            hidden=launched.hidden.new_empty(0),  # the last stage's comes back
            batch=replace(batch, rows=batch.rows.each(torch.Tensor.clone)),
            drafted=None if drafted is None else drafted.clone(),
        )

    def newest_evidence(self) -> Evidence | None:
        """What the ranks compare of the step that was passed on last; a stage that draws nothing forgets the step with
        it."""
        return self._passed[-1].evidence if self._pipe.first else self._passed.pop().evidence

    def take_back(self, launched: LaunchedStep) -> LaunchedStep:
        """What the last stage has made of the oldest step that was not drawn."""
        inputs = launched.batch.inputs
        rows = len(inputs.logit_rows if launched.narrowed else inputs.positions)
        size = rows, self._model.spec.hidden_size
        hidden = self._pipe.receive(torch.empty(size, dtype=self._model.dtype, device=self._device))
        return launched._replace(hidden=hidden)

    def settle(self) -> Evidence | None:
        """Note the drawn tokens of the oldest step; returns what the ranks compare of it."""
        seats, evidence = self._passed.popleft()
        all_seats = np.full(len(self._seats.drawn), -1, dtype=np.int32)
        all_seats[: len(seats)] = seats
        self._seats.settle(upload([all_seats], self._device)[0])
        return evidence

    def warm_up(self) -> None:
        """Run every kernel that only this stage's transfers need."""
        if self._pipe.first:
            self._seats.settle(torch.full_like(self._seats.drawn, -1, dtype=torch.int32))

"""What the device must be told of each running request, kept in host arrays by seat. No torch.

A request keeps its seat while it runs, and most of what a step needs of it does not change meanwhile. So a step's
inputs are rows picked from these arrays, and the work per step that is left in Python is to look for new blocks.
"""

from collections.abc import Sequence
from weakref import ref

import numpy as np

from tritonllm.config.sampling_params import ALL
from tritonllm.config.sampling_rows import SamplingRows, row_of
from tritonllm.engine.data.request import Request
from tritonllm.engine.data.step_inputs import PARAMETERS

ALWAYS = np.iinfo(np.int64).max  # longer than any sequence


class SeatTable:
    """Arrays with one row per seat.

    Args:
        seats: most requests running at once.
        max_blocks: blocks of the longest sequence.

    Attributes:
        tables: ``[seats, max_blocks]`` int32, block tables. Beyond a request's blocks they hold what was there before.
        parameters: what sampling wants, each ``[seats]``.
        limits: ``[seats]`` int32: how many tokens of a sequence may have their keys and values stored.
        changed: whether parameters have changed since :meth:`take_parameters`.
        edited_lens: ``[seats]`` int64: logits are edited while the sequence is shorter.
        edits_told: ``[seats]`` bool: the device has been told how.
        logprobs: ``[seats]`` int64: how many of the most likely tokens to report; -1 for no report.
        limited: seats to which ``top_k``, ``top_p`` or ``min_p`` leave a part of the vocabulary.
        edited: seats whose logits are edited, at least while the sequence is short.
        reported: seats that want log-probabilities.
        whole_logprobs: seats among the reported ones that want the whole vocabulary's; their ``logprobs`` is 0.
        controlled: seats of which the host decides which tokens may come.
        pooled: seats whose prompts are pooled. All of these are sets because they are empty in most steps, and nothing
            is as quick to ask.
    """

    def __init__(self, seats: int, max_blocks: int) -> None:
        self.tables = np.zeros((seats, max_blocks), dtype=np.int32)
        self.parameters = SamplingRows(**{n: np.zeros(seats, dtype=c.dtype) for n, c in PARAMETERS.items()})
        self.changed = False
        self.limits = np.ones(seats, dtype=np.int32)
        self.edited_lens = np.zeros(seats, dtype=np.int64)
        self.logprobs = np.full(seats, -1, dtype=np.int64)
        self.edits_told = np.zeros(seats, dtype=bool)
        self.limited: set[int] = set()
        self.edited: set[int] = set()
        self.reported: set[int] = set()
        self.whole_logprobs: set[int] = set()
        self.controlled: set[int] = set()
        self.pooled: set[int] = set()
        self._admitted: list[Request] = []
        self._admissions = [-1] * seats  # of whom the arrays hold
        self._holders: list[ref[Request] | None] = [None] * seats
        self._num_blocks = [0] * seats

    def rows(self, requests: Sequence[Request]) -> np.ndarray:
        """Bring the arrays up to date with these running requests; returns their seats, int64."""
        seats, admissions, counts = [], self._admissions, self._num_blocks
        for request in requests:
            seat, blocks = request.seat, request.block_ids
            assert seat is not None  # it runs
            seats.append(seat)
            if admissions[seat] != request.admission:
                self._seat(request, seat)
            if len(blocks) != counts[seat]:
                self.tables[seat, counts[seat] : len(blocks)] = blocks[counts[seat] :]
                counts[seat] = len(blocks)
        return np.array(seats, dtype=np.int64)

    def take_parameters(self) -> SamplingRows[np.ndarray] | None:
        """A copy of all seats' parameters, if some have changed since the last call."""
        if not self.changed:
            return None
        self.changed = False
        return self.parameters.each(np.copy)

    def take_admitted(self) -> list[Request]:
        """The requests that were given a seat since the last call."""
        admitted, self._admitted = self._admitted, []
        return admitted

    def _seat(self, request: Request, seat: int) -> None:
        params, holder = request.params, self._holders[seat]
        self._admissions[seat] = request.admission
        self._num_blocks[seat] = 0
        self._admitted.append(request)
        self.edits_told[seat] = False
        if holder is not None and holder() is request:
            return  # it forks, or comes back: only its blocks are others (of 64 beams 25 fork in a step)
        self._holders[seat] = ref(request)
        self.changed = True
        self.limits[seat] = max(1, request.length_limit - 1)  # the last token is never computed
        row = row_of(params, request.seed, len(request.prompt_token_ids))
        for column, value in zip(self.parameters, row, strict=True):
            assert column is not None  # every seat has all of them
            column[seat] = value
        self.logprobs[seat] = -1 if params.logprobs is None else max(params.logprobs, 0)
        self.edited_lens[seat] = ALWAYS if request.edits_logits else len(request.prompt_token_ids) + params.min_tokens
        for seats, wanted in (
            (self.limited, params.limited),
            (self.edited, request.edits_logits or params.min_tokens > 0),
            (self.reported, params.logprobs is not None),
            (self.whole_logprobs, params.logprobs == ALL),
            (self.controlled, request.controls),
            (self.pooled, request.pooling is not None),
        ):
            (seats.add if wanted else seats.discard)(seat)

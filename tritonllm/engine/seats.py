"""What the device must be told of each running request, kept in host arrays by seat. No torch.

A request keeps its seat while it runs, and most of what a step needs of it does not change meanwhile. So a step's
inputs are rows picked from these arrays, and the work per step that is left in Python is to look for new blocks.
"""

from collections.abc import Sequence

import numpy as np

from tritonllm.engine.request import Request


class SeatTable:
    """Arrays with one row per seat.

    Args:
        seats: most requests running at once.
        max_blocks: blocks of the longest sequence.

    Attributes:
        tables: ``[seats, max_blocks]`` int32, block tables. Beyond a request's blocks they hold what was there before.
        temperature, top_p, min_p: ``[seats]`` float32; temperature 0 is greedy.
        top_k: ``[seats]`` int32; 0 keeps all.
        seeds, prompt_lens: ``[seats]`` int64.
        edits: ``[seats]`` bool: logits are edited at every token.
        min_tokens: ``[seats]`` int64: they are edited up to this token.
        edits_told: ``[seats]`` bool: the device has been told how.
        logprobs: ``[seats]`` int64: how many of the most likely tokens to report; -1 for no report.
        drawn: ``[seats]`` int64: which row of the step before drew the request's token.
    """

    def __init__(self, seats: int, max_blocks: int) -> None:
        self.tables = np.zeros((seats, max_blocks), dtype=np.int32)
        self.temperature, self.top_p, self.min_p = np.zeros((3, seats), dtype=np.float32)
        self.top_k = np.zeros(seats, dtype=np.int32)
        self.seeds, self.prompt_lens, self.min_tokens, self.drawn = np.zeros((4, seats), dtype=np.int64)
        self.logprobs = np.full(seats, -1, dtype=np.int64)
        self.edits, self.edits_told = np.zeros((2, seats), dtype=bool)
        self._admissions = [-1] * seats  # of whom the arrays hold
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

    def _seat(self, request: Request, seat: int) -> None:
        params = request.params
        self._admissions[seat] = request.admission
        self._num_blocks[seat] = 0
        self.temperature[seat] = 0.0 if params.greedy else params.temperature
        self.top_k[seat] = max(params.top_k, 0)
        self.top_p[seat] = params.top_p
        self.min_p[seat] = params.min_p
        self.seeds[seat] = request.seed
        self.prompt_lens[seat] = len(request.prompt_token_ids)
        self.logprobs[seat] = -1 if params.logprobs is None else params.logprobs
        self.edits[seat], self.edits_told[seat] = request.edits_logits, False
        self.min_tokens[seat] = params.min_tokens

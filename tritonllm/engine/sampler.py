"""Logits to token ids: what requests ask of the distribution, the draw, and log-probabilities.

Nothing here waits for the device. Results stay there; a :class:`TokenLogprobs` is made of them when they are read.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tritonllm.engine.batch import SamplingInputs
from tritonllm.engine.edits import SeatEdits, is_edited, make_state
from tritonllm.engine.scheduler import ScheduledRequest
from tritonllm.kernels import fill_pending_tokens, sample, token_logprobs
from tritonllm.kernels.sampling.edits import count_tokens


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at R positions, on the host.

    Attributes:
        token_ids: for each position the chosen token, then the most likely ones, best first.
        logprobs: the same shape.
        ranks: of the chosen token.
    """

    token_ids: list[list[int]]
    logprobs: list[list[float]]
    ranks: list[int]


LogprobTensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # the three of TokenLogprobs, wherever they are


class Sampler:
    """Draws tokens, and remembers on the device what the last step drew.

    Args:
        seats: most requests running at once.
        vocab: size of the vocabulary.
        device: where the logits are.
    """

    def __init__(self, seats: int, vocab: int, device: torch.device) -> None:
        self._drawn = torch.zeros(seats, dtype=torch.int64, device=device)
        self._workspace = torch.zeros(seats, dtype=torch.int32, device=device)
        self._edits = SeatEdits(seats, vocab, device)

    def fill_pending(self, input_ids: torch.Tensor) -> None:
        """Put what row i drew last in the place of -1 - i in ``input_ids[N]`` int32."""
        fill_pending_tokens(input_ids, self._drawn)

    def draw(self, logits: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
        """One token for each row of ``logits[R, V]`` float32 -> ``[R]`` int64, valid until the next draw. Can be
        captured in a graph."""
        i, out = inputs, self._drawn[: len(logits)]
        limits = i.temperature, i.top_k, i.top_p, i.min_p
        return sample(logits, *limits, i.seeds, i.steps, workspace=self._workspace, out=out)

    def sample(
        self, logits: torch.Tensor, inputs: SamplingInputs, items: Sequence[ScheduledRequest]
    ) -> tuple[torch.Tensor, LogprobTensors | None]:
        """One token for each request, whatever it asks for.

        Args:
            logits: ``[R, V]`` float32; rows of requests that edit them are overwritten.
            items: the R requests.

        Returns:
            ``[R]`` int64, valid until the next draw, and log-probabilities (of the model's own distribution, before
            edits) if a request wants them.
        """
        wanted = [item.request.params.logprobs for item in items if item.request.params.logprobs is not None]
        raw = logits
        if any(is_edited(item) for item in items):
            raw = logits.clone() if wanted else logits  # edits are made in place
            i, more = inputs, {"workspace": self._workspace, "out": self._drawn[: len(logits)]}
            limits = i.temperature, i.top_k, i.top_p, i.min_p
            edits, seats = self._edits.of(items)
            tokens = sample(logits, *limits, i.seeds, i.steps, edits=edits, seats=seats, **more)
            count_tokens(edits, seats, tokens)
        else:
            tokens = self.draw(logits, inputs)
        return tokens, token_logprobs(raw, tokens, max(wanted)) if wanted else None

    def warm_up(self, logits: torch.Tensor) -> None:
        """Run every kernel that a request may need on ``logits[R, V]``; changes nothing."""
        n, device = len(logits), logits.device
        index = torch.zeros(n, dtype=torch.int64, device=device)
        seats = torch.full((n,), -1, dtype=torch.int32, device=device)
        ones = torch.ones(n, dtype=torch.float32, device=device)
        edits = make_state(1, logits.shape[1], device)
        limits = ones, seats + 51, 0.9 * ones, 0.1 * ones
        for edited in ({}, {"edits": edits, "seats": seats}):
            tokens = sample(logits, *limits, index, index, workspace=self._workspace, **edited)
        count_tokens(edits, seats, tokens)
        self.fill_pending(index.int())
        for top in (0, 5):
            token_logprobs(logits, tokens, top)

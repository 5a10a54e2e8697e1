"""Logits to token ids: what requests ask of the distribution, then the sampling kernel, then log-probabilities.

Nothing here waits for the device: results stay there, and :class:`TokenLogprobs` is made of them when they are read.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tritonllm.engine.batch import SamplingInputs
from tritonllm.engine.request import Request
from tritonllm.engine.scheduler import ScheduledRequest
from tritonllm.kernels import sample


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


def gather_logprobs(logits: torch.Tensor, chosen: torch.Tensor, top: int) -> LogprobTensors:
    """Log-probabilities of the chosen tokens and of the ``top`` most likely ones.

    Args:
        logits: ``[R, V]`` float32.
        chosen: ``[R]`` int64.

    Returns:
        ``[R, 1 + top]`` int64 token ids, their log-probabilities, and the ranks ``[R]`` of the chosen ones.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    of_chosen = logprobs.gather(-1, chosen[:, None])
    ranks = (logprobs > of_chosen).sum(-1) + 1
    best = logprobs.topk(min(top, logits.shape[-1]), dim=-1)
    ids = torch.cat([chosen[:, None], best.indices], dim=-1)
    return ids, torch.cat([of_chosen, best.values], dim=-1), ranks


def is_plain(item: ScheduledRequest) -> bool:
    """The sampling kernel alone can serve it: its logits are not edited and not reported."""
    request = item.request
    p = request.params
    return not (
        request.needs_known_tokens
        or p.logit_bias
        or request.bad_words
        or p.allowed_token_ids is not None
        or p.logprobs is not None
        or item.output_index < p.min_tokens
    )


def _edits(items: Sequence[ScheduledRequest]) -> tuple[list[int], list[int], list[float]]:
    """Sparse additions to the logits, as rows, columns and values: biases, and -inf for what may not come next."""
    rows: list[int] = []
    cols: list[int] = []
    values: list[float] = []

    def add(row: int, tokens: Sequence[int] | frozenset[int], value: float) -> None:
        rows.extend([row] * len(tokens))
        cols.extend(tokens)
        values.extend([value] * len(tokens))

    for row, item in enumerate(items):
        request = item.request
        p = request.params
        for token, bias in (p.logit_bias or {}).items():
            add(row, (token,), bias)
        if item.output_index < p.min_tokens:
            add(row, request.eos_token_ids, -torch.inf)
            add(row, p.stop_token_ids or (), -torch.inf)
        for word in request.bad_words:
            head = list(word[:-1])
            if not head or request.output_token_ids[-len(head) :] == head:
                add(row, word[-1:], -torch.inf)
    return rows, cols, values


def _apply_penalties(logits: torch.Tensor, requests: Sequence[Request]) -> None:
    """Repetition, frequency and presence penalties, in place (Keskar et al. 2019 for the first)."""
    for row, request in enumerate(requests):
        p = request.params
        if p.repetition_penalty != 1.0:
            seen = sorted({*request.prompt_token_ids, *request.output_token_ids})
            index = torch.tensor(seen, device=logits.device)
            values = logits[row, index]
            factor = p.repetition_penalty
            logits[row, index] = torch.where(values > 0, values / factor, values * factor)
        if p.frequency_penalty or p.presence_penalty:
            counts = Counter(request.output_token_ids)
            index = torch.tensor(list(counts), dtype=torch.int64, device=logits.device)
            count = torch.tensor(list(counts.values()), dtype=torch.float32, device=logits.device)
            logits[row, index] -= p.frequency_penalty * count + p.presence_penalty


def edit_logits(logits: torch.Tensor, items: Sequence[ScheduledRequest]) -> None:
    """Apply penalties, biases, bans and allowed tokens of each request to its row, in place."""
    _apply_penalties(logits, [item.request for item in items])
    rows, cols, values = _edits(items)
    if rows:
        at = torch.tensor([rows, cols], device=logits.device)
        logits.index_put_((at[0], at[1]), torch.tensor(values, device=logits.device), accumulate=True)
    for row, item in enumerate(items):
        if item.request.params.allowed_token_ids is not None:
            allowed = torch.tensor(item.request.params.allowed_token_ids, device=logits.device)
            kept = logits[row, allowed]
            logits[row] = -torch.inf
            logits[row, allowed] = kept


def draw(logits: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
    """``logits[R, V]`` float32 -> ``[R]`` int64: the sampling kernel with its inputs."""
    i = inputs
    return sample(logits, i.temperature, i.top_k, i.top_p, i.min_p, i.seeds, i.steps)


def sample_tokens(
    logits: torch.Tensor, inputs: SamplingInputs, items: Sequence[ScheduledRequest]
) -> tuple[torch.Tensor, LogprobTensors | None]:
    """One token for each request.

    Args:
        logits: ``[R, V]`` float32; edited in place.
        items: the R requests.

    Returns:
        ``[R]`` int64, and the log-probabilities if any request wants them.
    """
    if all(is_plain(item) for item in items):
        return draw(logits, inputs), None
    wanted = [item.request.params.logprobs for item in items if item.request.params.logprobs is not None]
    raw = logits.clone() if wanted else logits  # log-probabilities are of the model's own distribution
    edit_logits(logits, items)
    ids = draw(logits, inputs)
    return ids, gather_logprobs(raw, ids, max(wanted)) if wanted else None

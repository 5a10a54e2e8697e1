"""Which tokens of a step belong to prompts that are pooled: part of the step as plain data. No torch."""

from collections.abc import Sequence
from typing import NamedTuple

from tritonllm.engine.plan import ScheduledRequest
from tritonllm.engine.request import Pooling


class PooledSpan(NamedTuple):
    """A pooled prompt's tokens in a step.

    Attributes:
        request_id: whose.
        seat: where its running sum is, while its prompt takes several steps.
        pooling: what becomes of the tokens.
        first: position of the first of them in its prompt.
        begin, end: they are the step's tokens ``begin`` to ``end`` (exclusive).
        row: which of the tokens that are sampled from is the prompt's last; -1 if it comes in a later step.
    """

    request_id: str
    seat: int
    pooling: Pooling
    first: int
    begin: int
    end: int
    row: int

    @property
    def length(self) -> int:
        """Tokens of its prompt up to the end of the step."""
        return self.first + self.end - self.begin


def pooled_spans(items: Sequence[ScheduledRequest]) -> tuple[PooledSpan, ...]:
    """Of a step's requests, in their order."""
    spans = []
    token = row = 0
    for item in items:
        request = item.request
        if request.pooling is not None:
            assert request.seat is not None  # it runs
            at = row if item.samples else -1
            place = item.start, token, token + item.num_tokens, at
            spans.append(PooledSpan(request.request_id, request.seat, request.pooling, *place))
        token += item.num_tokens
        row += item.samples * (1 + item.drafts)
    return tuple(spans)

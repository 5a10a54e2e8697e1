"""Which tokens of a step belong to prompts that are pooled: part of the step as plain data. No torch."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tritonllm.engine.data.plan import ScheduledRequest
from tritonllm.engine.data.request import Pooling


class PooledSpan(NamedTuple):
    """A pooled prompt's tokens in a step.

    Attributes:
        request_id: the id of the request whose prompt is pooled.
        seat: where its running sum is, while its prompt takes several steps.
        pooling: what becomes of the tokens.
        first: position of the first of them in its prompt.
        begin, end: the range of the tokens among the step's, from ``begin`` to ``end`` (exclusive).
        row: which of the tokens whose hidden states every step computes is of this prompt; -1 if its end comes in a
            later step. It is the prompt's last token, or its first if that is wanted and the step holds it.
    """

    request_id: str
    seat: int
    pooling: Pooling
    first: int
    begin: int
    end: int
    row: int

    @property
    def in_row(self) -> bool:
        """The row is all that is wanted."""
        how = self.pooling.how
        return how == "last" or (how == "cls" and self.first == 0 and self.row >= 0)

    @property
    def length(self) -> int:
        """Tokens of its prompt up to the end of the step."""
        return self.first + self.end - self.begin


def pooled_spans(items: Sequence[ScheduledRequest]) -> tuple[PooledSpan, ...]:
    """The spans of a step's pooled prompts, in the order of its requests; a step with such prompts has no drafts."""
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
        row += item.samples
    return tuple(spans)


def move_to_first_tokens(logit_rows: np.ndarray, spans: Sequence[PooledSpan]) -> None:
    """Change the tokens ``[R]`` whose hidden states are wanted: of prompts whose first token is, it is that.

    So a step of classified prompts, say, computes the last layer for few rows, and may be a captured one.
    """
    for span in spans:
        if span.in_row and span.pooling.how == "cls":
            logit_rows[span.row] = span.begin

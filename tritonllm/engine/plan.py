"""What the scheduler decides and learns: the requests of a step, and the tokens that came of it. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tritonllm.engine.request import Request
from tritonllm.layers.segments import Segments


class ScheduledRequest(NamedTuple):
    """A request's part of a step.

    Attributes:
        request: whose tokens.
        start: tokens computed before the step, the position of the first one in it.
        num_tokens: tokens to compute, at least 1.
        samples: its last token is among them, so the step ends with a new one.
        pending: that last token, the only one to compute, was sampled by a step in flight: the host does not know it.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool
    pending: bool = False

    @property
    def output_index(self) -> int:
        """Which of the request's output tokens this step samples, if it does."""
        return self.start + self.num_tokens - len(self.request.prompt_token_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes.

    Attributes:
        scheduled: segment by segment.
        preempted: the requests that lost their blocks to make room; none of them is scheduled.
        segments: decodes (one token each, sampled from), then prompt chunks.
    """

    scheduled: tuple[ScheduledRequest, ...]
    preempted: tuple[Request, ...]
    segments: Segments

    @property
    def num_tokens(self) -> int:
        return self.segments.tokens


class NewTokens(NamedTuple):
    """Sampled tokens, appended to the request's output; ``request.status`` tells whether the last of them ended it."""

    request: Request
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Totals since the start, and the blocks of now. Prefix-cache tokens count at a request's first admission."""

    prefix_cache_query_tokens: int
    prefix_cache_hit_tokens: int
    preemptions: int
    num_blocks: int
    num_free_blocks: int

"""What the scheduler decides and learns: the requests of a step, and the tokens that came of it. No torch."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from tritonllm.config.sampling_params import SamplingParams
from tritonllm.engine.data.copy_batches import Fills, Transfers
from tritonllm.engine.data.request import Request
from tritonllm.engine.data.stats import TierStats
from tritonllm.layers.segments import EMPTY, Segment, Segments, decodes

NAMED = 8  # requests of a step that does not end


class ScheduledRequest(NamedTuple):
    """A request's part of a step.

    Attributes:
        request: the request whose tokens are computed.
        start: tokens computed before the step, the position of the first one in it; at least so many, if steps in
            flight may accept drafts.
        num_tokens: tokens to compute; 0 for a request that samples from what the one before it in the plan computes.
        samples: whether the request's last token is computed, so that the step ends with a new one.
        pending: whether that last token is the only known one to compute and was sampled by a step in flight: the host
            does not know it.
        drafts: how many guesses of the tokens behind the last one are verified: the step brings from one new token to
            one more than these.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool
    pending: bool = False
    drafts: int = 0

    @property
    def output_index(self) -> int:
        """Which of the request's output tokens this step samples first, if it does; this one or a later one, if steps
        in flight may accept drafts."""
        return self.start + self.num_tokens - self.drafts - len(self.request.prompt_token_ids)


@dataclass(slots=True)
class Outline:
    """What is decided of a step so far.

    Attributes:
        budget: tokens that it may still take.
        preempted: the requests that lost their blocks to make room.
        scheduled: parts of the step, in the order of :attr:`Request.order`.
        forks: for requests of ``scheduled``, the requests that share all that they have computed, and sample from the
            same row.
    """

    budget: int
    preempted: list[Request]
    scheduled: list[ScheduledRequest] = field(default_factory=list)
    forks: dict[Request, list[ScheduledRequest]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes.

    Attributes:
        scheduled: segment by segment.
        preempted: the requests that lost their blocks to make room; none of them is scheduled.
        segments: how many sequences and tokens are decodes, verified sequences and chunks of prompts.
        copies: blocks that are copied before anything is written, each with its target.
        transfers: the copies between the device and the host's memory, which come first of all.
        fills: blocks that go to the host's memory while the step computes them.
    """

    scheduled: tuple[ScheduledRequest, ...]
    preempted: tuple[Request, ...]
    segments: Segments
    copies: tuple[tuple[int, int], ...] = ()
    transfers: Transfers | None = None
    fills: Fills | None = None

    @classmethod
    def of(
        cls,
        scheduled: Iterable[ScheduledRequest],
        preempted: Iterable[Request],
        forks: Mapping[Request, Sequence[ScheduledRequest]],
        copies: tuple[tuple[int, int], ...] = (),
        transfers: Transfers | None = None,
    ) -> "StepPlan":
        """Sort requests into segments; within each they keep their order.

        Args:
            forks: by request, the requests that sample from its last row. They stand behind it as chunks of no tokens,
                so that their last token in the step is its last one.
        """
        ones: list[ScheduledRequest] = []
        guesses: list[ScheduledRequest] = []
        chunks: list[ScheduledRequest] = []
        for item in scheduled:
            if forks and item.request in forks:
                chunks += (item, *forks[item.request])
            elif item.samples and item.num_tokens == 1:
                ones.append(item)
            else:
                (guesses if item.drafts else chunks).append(item)
        segments = Segments(decodes(len(ones)), _segment(guesses), _segment(chunks))
        return cls((*ones, *guesses, *chunks), tuple(preempted), segments, copies, transfers)

    @property
    def num_tokens(self) -> int:
        return self.segments.tokens

    def check(self, counts: Sequence[int]) -> None:
        """Whether the step can have brought so many tokens of each scheduled request.

        Raises:
            ValueError: it cannot.
        """
        allowed = [range(1, item.drafts + 2) if item.samples else (0,) for item in self.scheduled]
        if len(counts) != len(allowed) or any(count not in some for count, some in zip(counts, allowed, strict=True)):
            raise ValueError(
                "sampled must have tokens for each scheduled request that samples, at most one more than its drafts, "
                f"and none for the others; it has {list(counts)}"
            )


def _segment(items: Sequence[ScheduledRequest]) -> Segment:
    if not items:
        return EMPTY
    counts = [item.num_tokens for item in items]
    return Segment(len(items), sum(counts), max(counts))


# A request and its sampled tokens, which were appended to its output; its status tells whether the last of them ended
# it. (A plain pair: names would cost a step of 256 requests 40 us.)
NewTokens = tuple[Request, Sequence[int]]


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Totals since the start, and the blocks of now. Prefix-cache tokens count at a request's first admission."""

    prefix_cache_query_tokens: int
    prefix_cache_hit_tokens: int
    preemptions: int
    num_blocks: int
    num_free_blocks: int
    tier: TierStats


def describe(plan: StepPlan) -> str:
    """What a step computes, for a message about it."""
    decode, verify, chunk = (segment.tokens for segment in plan.segments)
    named, default = [], SamplingParams()
    for request, start, count, *_ in plan.scheduled[:NAMED]:
        wishes = {one.name: getattr(request.params, one.name) for one in fields(request.params)}
        chosen = [f"{name}={value!r}" for name, value in wishes.items() if value != getattr(default, name)]
        named.append(f"{request.request_id!r} (tokens {start} to {start + count}; {', '.join(chosen)})")
    more = len(plan.scheduled) - len(named)
    of_all = "; ".join(named) + (f"; and {more} more" if more else "")
    return f"{decode} decodes, {verify} drafts and {chunk} prompt tokens of requests {of_all}"

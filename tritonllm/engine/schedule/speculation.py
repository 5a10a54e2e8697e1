"""Who gets drafts in a step, and how many. No torch.

A step verifies drafts of all its sequences or of none, with as many tokens of each, so that it has one of few shapes,
all of them captured. A sequence with fewer drafts, or with none, is padded: in a step that verifies, one more draft
costs nothing. A step with prompt tokens verifies none: it is bound by computing, where a draft costs as much as a
token.

So what is decided is whether a step verifies. It does where the tokens that are likely to come outweigh what it takes
longer than a plain step. Each request's acceptance is followed by itself; the batch's is their sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tritonllm.config.engine import SchedulerConfig, SpeculativeConfig
from tritonllm.config.sampling_params import ALL
from tritonllm.engine.data.plan import ScheduledRequest
from tritonllm.engine.data.request import Request

# Tokens that a step verifies at most. With several times the tokens that a GPU computes while it reads the weights,
# drafts cost what plain tokens do. They also bound the memory of the logits: 512 rows of 152,000 in float32 are 311 MB.
MOST_ROWS = 512
# How much longer a step takes that verifies: what it launches beside a plain one's, and tokens with which computing
# takes as long as reading the weights. On an H200 a step of Llama-3.1-8B that verifies 4 drafts takes 1.16 plain ones
# at batch 1, 1.11 at 8 and 1.88 at 64; these give 1.12, 1.22 and 1.9.
LAUNCHES, ROWS = 1.1, 290
WEIGHT = 0.25  # of a step's acceptance in the average: drafts that are never accepted stop after some ten steps
PAUSE = 100  # plain steps after which one step tries again: at most 1.5% of the time, where that step takes 2.5 plain


def most_verified(config: SpeculativeConfig | None, limits: SchedulerConfig) -> int:
    """Most sequences of a step that verifies drafts."""
    if config is None:
        return 0
    each, most = 1 + config.num_speculative_tokens, config.disable_by_batch_size
    fits = MOST_ROWS // each if most is None else most
    return min(fits, limits.max_num_seqs, limits.max_num_batched_tokens // each)


def relative_cost(sequences: int, drafts: int, draft_cost: float = 0.0, depth: int | None = None) -> float:
    """How long a step takes, in plain steps, that verifies ``drafts`` drafts of each of ``sequences`` sequences.

    Args:
        draft_cost: how long a decode step of the draft model takes, in those of the model. A plain step has one, too.
        depth: the depth of a tree of drafts, for each level of which the draft model runs once; by default they are a
            chain.
    """
    verified = LAUNCHES * (ROWS + sequences * (1 + drafts)) / (ROWS + sequences)
    return (verified + (1 + (drafts if depth is None else depth)) * draft_cost) / (1 + draft_cost)


@dataclass
class DraftCounts:
    """What verified drafts came to, as totals since the start.

    Attributes:
        num_drafts: how many sequences of steps had drafts to verify.
        num_draft_tokens: how many drafts these sequences had.
        num_accepted_tokens: how many of these drafts were right.
        num_accepted_tokens_per_pos: how many of those were the first of their sequence in a step, the second, and so
            on.
        draft_seconds: how long making the drafts has taken on the device, in captured steps too, without the verdict.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    draft_seconds: float = 0.0

    def add(self, drafted: int, accepted: int) -> None:
        """What one sequence of a step had, at least one."""
        self.num_drafts += 1
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        count_positions(self.num_accepted_tokens_per_pos, drafted, accepted)


def count_positions(counts: list[int], drafted: int, accepted: int) -> None:
    """Add to ``counts``, which has as many as there ever were drafts, one for each of the accepted drafts."""
    counts.extend([0] * (drafted - len(counts)))
    for place in range(accepted):
        counts[place] += 1


class Drafting:
    """How many drafts a scheduler plans for each request, and whether a step verifies at all.

    Args:
        most: how many drafts a sequence may have in a step; 0 plans none.
        verified: how many sequences a step that verifies may have.
        adaptive: whether to plan plain steps where drafts do not pay; otherwise every step verifies that may.
        draft_cost: see :func:`relative_cost`.
        depth: how many drafts of a tree can be right, one behind the other; by default all of them.
    """

    def __init__(
        self,
        most: int = 0,
        verified: int = 1 << 30,
        *,
        adaptive: bool = False,
        draft_cost: float = 0.0,
        depth: int | None = None,
    ) -> None:
        self.most = most
        self._depth = most if depth is None else depth
        self._verified = verified
        self._adaptive = adaptive
        self._draft_cost = draft_cost
        self._typical = self._depth / 2  # accepted drafts of a request of which nothing is known yet
        self._plain = 0  # steps since one verified

    def begin(self, request: Request) -> None:
        """Tell a new request how many drafts it may have."""
        restricted = request.controls or request.params.logprobs == ALL  # those go a token at a time
        request.num_drafts = 0 if restricted else self.most
        request.expected_accepts = 0.0 if restricted else self._typical

    def now(self, running: Sequence[Request]) -> int:
        """Drafts of each of these requests in the next step."""
        if not self.most or len(running) > self._verified:
            return 0
        if not self._adaptive or self._plain >= PAUSE:
            return self.most
        count = len(running)
        likely = sum([request.expected_accepts for request in running])
        cost = relative_cost(count, self.most, self._draft_cost, self._depth)
        return self.most if count + likely > count * cost else 0

    def fit(self, scheduled: list[ScheduledRequest], *, forks: bool = False) -> list[ScheduledRequest]:
        """What a step does of what was planned: no drafts beside prompts. What these were to be stored in stays with
        their requests.

        Args:
            forks: siblings sample from some of these, which makes chunks of them, however short they are.
        """
        if not self.most:
            return scheduled
        if len(scheduled) > self._verified or forks or _has_prompts(scheduled):
            scheduled = [_without_drafts(item) if item.drafts else item for item in scheduled]
        elif scheduled:
            self._plain = 0 if any(item.drafts for item in scheduled) else self._plain + 1
        return scheduled

    def learn(self, request: Request, accepted: int) -> None:
        """A step has verified drafts of a request, and accepted so many."""
        request.expected_accepts += WEIGHT * (accepted - request.expected_accepts)
        self._typical += WEIGHT / 8 * (accepted - self._typical)


def _has_prompts(scheduled: Sequence[ScheduledRequest]) -> bool:
    """Whether some request computes more than its last token and drafts behind it, or has a prompt that is pooled."""
    return any(
        not item.samples or item.num_tokens - item.drafts > 1 or item.request.pooling is not None for item in scheduled
    )


def _without_drafts(item: ScheduledRequest) -> ScheduledRequest:
    item.request.num_possible_tokens -= item.drafts
    return item._replace(num_tokens=item.num_tokens - item.drafts, drafts=0)

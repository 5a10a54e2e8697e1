"""One prompt on its way through the engine: its tokens, its blocks and how far it has come. Imports no torch."""

import enum
from array import array
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal, NamedTuple

from tritonllm.config.sampling_params import SamplingParams
from tritonllm.engine.data.control import Control


class RequestStatus(enum.Enum):
    """Where a request is. ``PREEMPTED`` waits like ``WAITING``, but has run before.

    Attributes:
        finish_reason: ``"stop"``, ``"length"``, ``"repetition"``, ``"abort"``, ``"error"``, or ``None`` while
            unfinished.
        is_finished: whether there is one.
    """

    WAITING = "waiting", None
    RUNNING = "running", None
    PREEMPTED = "preempted", None
    FINISHED_STOPPED = "stopped", "stop"
    FINISHED_LENGTH = "length", "length"
    FINISHED_REPETITION = "repetition", "repetition"
    FINISHED_ABORTED = "aborted", "abort"
    FINISHED_ERROR = "error", "error"

    def __init__(self, _: str, finish_reason: str | None) -> None:
        self.finish_reason = finish_reason
        self.is_finished = finish_reason is not None


class Pooling(NamedTuple):
    """What becomes of a prompt that is not continued.

    Attributes:
        how: the hidden state of its ``last`` token, of its first (``cls``), the ``mean`` of all, or ``all``.
        head: through the model's head.
        whole: whether the model's attention lets a token see those behind it, so that one step must hold the whole
            prompt.
        cached: tokens that the prefix cache has need not be computed.
    """

    how: Literal["last", "cls", "mean", "all"]
    head: bool = False
    whole: bool = False
    cached: bool = True


PACKED = "I"  # the code of packed tokens' type, of 4 bytes
PACKED_BYTES = array(PACKED).itemsize


def packed_from(data: bytes) -> "array[int]":
    """The array of packed tokens whose bytes these are."""
    tokens = array(PACKED)
    tokens.frombytes(data)
    return tokens


# For the scheduler a pooled prompt is a sequence that ends with its first new token.
AS_SAMPLING = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, detokenize=False)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Request:
    """One sequence to generate, or a prompt to pool: for the scheduler that is a sequence that ends with its first new
    token, which nobody draws. The engine fills in the first group of fields, the scheduler owns the second.

    Args:
        request_id: unique among the unfinished requests.
        prompt_token_ids: the prompt, at least one token; never changed.
        params: how to continue it.
        max_total_tokens: most tokens of prompt and output together: the smaller of ``max_model_len`` and the prompt's
            length plus ``max_tokens``.
        eos_token_ids: tokens that end the output unless ``params.ignore_eos``.
        priority: the number that came with the request, which the policy may read; of ``priority``, lower runs first.
        arrival: a counter that only grows; decides among equal priorities.
        cache_salt: prompts with different salts share no cached blocks.
        seed: the seed of the request's random draws.
        bad_words: token sequences that the output may not contain, tokenized.
        controls: decide which tokens may come next.
        pooling: what becomes of the prompt; ``None`` if it is continued.
        packed_prompt: the prompt once more, as an array of type ``PACKED``, if who checked it has made one. (Of 32,768
            tokens that takes 0.4 ms, and from it digests and steps take theirs in a twentieth of that.)
        jumps: tokens are forced behind the one in flight, and are computed together once that is in.
        held: whether others than the scheduler choose the next token (a beam search); the request goes on from that
            token.
        siblings: the sequences of one user's request, of the same prompt and parameters, this one among them; all have
            the same tuple. Empty if it is the only one.
        output_token_ids: what was generated so far, as far as the host knows it.
        num_pending_tokens: sampled by steps in flight: they exist, but only the device knows them yet.
        num_possible_tokens: how many more the steps in flight bring if they accept all drafts.
        num_computed_tokens: leading tokens whose keys and values are in the cache once the steps in flight have run; at
            least so many, if those may accept drafts.
        num_cached_tokens: how many of them the prefix cache gave at the first admission; ``None`` before it.
        admitted_time: when the request was first admitted, in seconds of ``time.monotonic()``.
        block_ids: the block table: token i lives in block ``block_ids[i // block_tokens]``.
        tail: where the last computed tokens are that fill no block, if another sequence has computed them
            (:mod:`tritonllm.engine.schedule.gang`); it is copied to the next of the ``block_ids``.
        block_hashes: digests of the leading full blocks, as far as they were needed.
        num_labelled_blocks: leading blocks that the prefix cache knows.
        seat: the request's row in the runner's arrays while it runs, below ``max_num_seqs``.
        admission: a number for each time that a request was given a seat; no two of any requests are equal.
        status: where the request is.
        stop_reason: the stop token or stop string that ended it; ``None`` for the end-of-sequence token.
        num_preemptions: how often it lost its blocks and started again.
        rank: where the policy puts it; ``None`` before the scheduler has asked.
        order: the scheduler's sort key, unique.
        length_limit: tokens of prompt and output together at which the scheduler ends it.
        ends: tokens that end the output, if ``min_tokens`` lets them.
        watched: every new token may end the output, whichever it is.
        sampled_in: the number of the last plan that samples from it, of those that a pipeline runs.
        num_drafts: how many guesses of what follows may be verified with its last token.
        expected_accepts: how many of them are right, by the last steps.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    _: KW_ONLY
    max_total_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    priority: int = 0
    arrival: int = 0
    cache_salt: str | None = None
    seed: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    controls: tuple[Control, ...] = ()
    pooling: Pooling | None = None
    siblings: tuple["Request", ...] = field(default=(), repr=False)
    held: bool = False
    jumps: bool = False
    packed_prompt: "array[int] | None" = field(default=None, repr=False)

    output_token_ids: list[int] = field(default_factory=list)
    num_pending_tokens: int = 0
    num_possible_tokens: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int | None = None
    admitted_time: float | None = None
    block_ids: list[int] = field(default_factory=list)
    tail: int | None = None
    block_hashes: list[bytes] = field(default_factory=list)
    num_labelled_blocks: int = 0
    seat: int | None = None
    admission: int = 0
    status: RequestStatus = RequestStatus.WAITING
    stop_reason: int | str | None = None
    num_preemptions: int = 0
    rank: float | None = None
    order: tuple[float, int, int] = (0, 0, 0)
    length_limit: int = 0
    ends: frozenset[int] = frozenset()
    watched: bool = False
    sampled_in: int = 0
    num_drafts: int = 0
    expected_accepts: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Known tokens, prompt and output together."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def is_whole(self) -> bool:
        """Whether one step must hold all of its tokens."""
        return self.pooling is not None and self.pooling.whole

    @property
    def computes_all(self) -> bool:
        """Whether all of its prompt goes through the model: what the prefix cache has of it is of no use."""
        return self.reports_prompt or (self.pooling is not None and not self.pooling.cached)

    @property
    def waits_for_tokens(self) -> bool:
        """Whether the next token cannot be planned before those in flight are known, or before the last one is
        chosen."""
        if self.held or not self.num_pending_tokens:
            return self.held
        if self.jumps:
            return True
        for control in self.controls:  # noqa: SIM110 (asked of each request in each step: any() takes twice as long)
            if control.waits:
                return True
        return False

    @property
    def is_restricted(self) -> bool:
        """The host may have a say in the token that the last planned step samples, once it knows those before it."""
        pending = max(0, self.num_pending_tokens - 1)
        for control in self.controls:  # noqa: SIM110 (as above)
            if control.restricts(pending):
                return True
        return False

    @property
    def reports_prompt(self) -> bool:
        """Whether its steps report log-probabilities of the prompt. Of siblings, only the first one's steps do."""
        return self.params.prompt_logprobs is not None and (not self.siblings or self.siblings[0] is self)

    @property
    def edits_logits(self) -> bool:
        """Every one of its tokens is drawn from logits that were changed first. (``min_tokens`` changes only some.)"""
        p = self.params
        penalized = p.repetition_penalty != 1.0 or p.frequency_penalty != 0.0 or p.presence_penalty != 0.0
        return bool(penalized or p.logit_bias or self.bad_words or p.allowed_token_ids is not None)

    @property
    def finish_reason(self) -> str | None:
        """``"stop"``, ``"length"``, ``"repetition"``, ``"abort"``, ``"error"``, or ``None`` while unfinished."""
        return self.status.finish_reason

    def check(self, max_model_len: int) -> None:
        """Whether it is new and its limits agree.

        Raises:
            ValueError: it has run before, an empty prompt, or limits that contradict each other.
        """
        length, most = len(self.prompt_token_ids), max_model_len + (self.pooling is not None)
        if self.status is not RequestStatus.WAITING or self.output_token_ids:
            raise ValueError(f"request {self.request_id!r} has run before: make a new one")
        if length == 0:
            raise ValueError("prompt_token_ids is empty: a prompt needs at least one token")
        if self.params.max_tokens is not None:
            most = min(most, length + self.params.max_tokens)
        if not length < self.max_total_tokens <= most:
            raise ValueError(
                f"max_total_tokens must be more than the prompt's {length} tokens and at most {most} "
                f"(max_model_len, and the prompt with max_tokens), got {self.max_total_tokens}"
            )

    def token(self, place: int) -> int:
        """One of the known tokens of prompt and output."""
        split = len(self.prompt_token_ids)
        return self.output_token_ids[place - split] if place >= split else self.prompt_token_ids[place]

    def token_ids(self, start: int, end: int) -> list[int]:
        """Tokens ``start`` to ``end`` (exclusive) of prompt and output, in time proportional to their number.

        Raises:
            ValueError: unless ``0 <= start <= end <= num_tokens``.
        """
        if not 0 <= start <= end <= self.num_tokens:
            raise ValueError(f"token_ids({start}, {end}) is outside of the {self.num_tokens} known tokens")
        split = len(self.prompt_token_ids)
        tokens = list(self.prompt_token_ids[start:end])
        tokens += self.output_token_ids[max(start - split, 0) : max(end - split, 0)]
        return tokens

    def packed(self, start: int, end: int) -> bytes:
        """The token ids from ``start`` to ``end``, as bytes of an array of type ``PACKED``."""
        prompt = self.packed_prompt
        if prompt is not None and 0 <= start <= end <= len(prompt):
            return prompt[start:end].tobytes()
        return array(PACKED, self.token_ids(start, end)).tobytes()

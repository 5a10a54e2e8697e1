"""What an engine does, told while it does it: one value for each event, to whoever subscribed.

``engine.subscribe(sink)`` calls ``sink(event)`` in the engine's thread, in the order of events. Nothing is built while
nobody listens: a step then asks three times whether anybody does. Times are seconds of ``time.monotonic()``, as in
:class:`~tritonllm.engine.data.outputs.RequestMetrics`.

A request of the user's has one sequence or several (``n``, beams); steps know sequences only. A lone sequence has the
request's id.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

logger = logging.getLogger(__name__)

# Why a step took no more requests from the queue: nobody waits; max_num_seqs run; the token budget is spent; too few
# blocks are free; the first one's last token is still on its way; blocks were just taken from a running request.
AdmissionEnd = Literal["queue", "seats", "tokens", "blocks", "in_flight", "preemption"]
Kind = Literal["decode", "verify", "prefill"]


@dataclass(frozen=True, slots=True)
class RequestAdded:
    """A request came in, at its ``arrival_time``.

    Attributes:
        sequence_ids: the ids under which steps know its sequences.
        prompt_token_ids: the prompt, tokenized.
        params: :class:`~tritonllm.SamplingParams`, or those of a beam search or of pooling.
    """

    time: float
    request_id: str
    sequence_ids: tuple[str, ...]
    prompt_token_ids: Sequence[int]
    params: Any


class Part(NamedTuple):
    """A sequence's part of a step.

    Attributes:
        sequence_id, request_id: the ids of the sequence and of its request.
        kind: one new token (``decode``); one with drafts behind it (``verify``); a part of the prompt, or of a sequence
            that is computed again (``prefill``).
        start: position of the first token that is computed.
        num_tokens: how many are, drafts among them; 0 for a sequence that draws from the last row of its sibling.
        drafts: how many of them are guesses.
        samples: the part ends with a new token.
        num_known_tokens: prompt and output, as far as the host knows them.
        num_prompt_tokens: how many tokens the prompt has.
        admitted: this step is its first, or its first after a preemption.
        cached_tokens: if it is admitted, how many tokens had their keys and values in the cache already.
        block_ids: the block table of the sequence, with the blocks that the step was given.
        new_blocks: how many of the last of them were allocated for this step.
    """

    sequence_id: str
    request_id: str
    kind: Kind
    start: int
    num_tokens: int
    drafts: int
    samples: bool
    num_known_tokens: int
    num_prompt_tokens: int
    admitted: bool
    cached_tokens: int
    block_ids: tuple[int, ...]
    new_blocks: int


@dataclass(frozen=True, slots=True)
class StepPlanned:
    """The scheduler decided what a step computes; the step is launched next.

    Attributes:
        seconds: host time of the decision.
        step: steps are numbered from 1.
        parts: the parts of the step's sequences, in the order of the step's rows.
        preempted: sequences that lost their blocks to make room.
        copies: blocks that are copied first (copy-on-write), each with its target.
        stores, loads: blocks that go to the host's memory, some while the step computes them, and that come back from
            there.
        token_budget: most tokens of a step (``max_num_batched_tokens``).
        num_running, num_waiting: sequences, after the decision.
        admission_end: why no more of those that wait came in.
        num_blocks, num_free_blocks: how many blocks the KV cache has, and how many of them are free after the decision.
        num_cached_blocks: blocks whose contents the prefix cache can find, in use or free.
        evicted_blocks: blocks whose cached contents were given up for others, since the start.
        idle: block tables of sequences that run and have no part in this step: they wait for a token or for blocks.
        kept_blocks: blocks that were given back since the step before, when sequences ended, were preempted or forked,
            and that nobody uses: their contents can still be found.
        prompt_share: most tokens of prompts that the step could take, fewer than ``token_budget`` beside decodes;
            ``None`` if no prompt asked.
    """

    time: float
    seconds: float
    step: int
    parts: tuple[Part, ...]
    preempted: tuple[str, ...]
    copies: tuple[tuple[int, int], ...]
    stores: tuple[int, ...]
    loads: tuple[int, ...]
    token_budget: int
    num_running: int
    num_waiting: int
    admission_end: AdmissionEnd
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    evicted_blocks: int
    idle: Mapping[str, tuple[int, ...]]
    kept_blocks: tuple[int, ...]
    prompt_share: int | None = None

    @property
    def num_tokens(self) -> int:
        return sum(part.num_tokens for part in self.parts)


@dataclass(frozen=True, slots=True)
class StepLaunched:
    """A step is on its way to the device.

    Attributes:
        seconds: host time of the launch.
        late: whether the step's tokens are drawn when the host knows the results of the step before.
    """

    time: float
    seconds: float
    step: int
    late: bool


@dataclass(frozen=True, slots=True)
class StepRestricted:
    """The host decided which tokens some sequences of a late step may get next.

    Attributes:
        masks: for each of these sequences ``[ceil(vocab / 32)]`` int32: bit ``i % 32`` of word ``i // 32`` allows
            token i. A sequence with several masks has their intersection.
    """

    time: float
    step: int
    masks: Mapping[str, Any]


class NewTokens(NamedTuple):
    """What a step brought a sequence.

    Attributes:
        token_ids: the new tokens, up to the end of its output (before its text is searched for stop strings); none
            after an abort.
        drafts: guesses that were verified.
        accepted: how many of them were right.
        logprobs: for each of ``token_ids``, if the request asked for log-probabilities: the token itself and then the
            most likely ones (at most 20), each with its log-probability under the model's own distribution.
    """

    sequence_id: str
    request_id: str
    token_ids: tuple[int, ...]
    drafts: int
    accepted: int
    logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()


@dataclass(frozen=True, slots=True)
class StepFinished:
    """A step's results are known, since ``time``.

    Attributes:
        seconds: how long the host waited for them.
        tokens: the new tokens of the sequences that got some.
        draft_seconds: time that a drafter took, over all steps so far.
    """

    time: float
    seconds: float
    step: int
    tokens: tuple[NewTokens, ...]
    draft_seconds: float


@dataclass(frozen=True, slots=True)
class TokensForced:
    """A grammar left only one continuation: these tokens were not drawn (jump-forward)."""

    time: float
    step: int
    tokens: tuple[NewTokens, ...]


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """A request ended.

    Attributes:
        first_token_time: when the first of its sequences got its first token, if one did.
        finish_reasons, num_output_tokens: for each of its sequences, why it ended and how many tokens it generated.
        num_cached_tokens: prompt tokens that the prefix cache gave.
        num_preemptions: how often its sequences lost their blocks.
        error: what went wrong, if anything did.
        kept_blocks: blocks that it had and that nobody uses now: their contents can still be found.
    """

    time: float
    request_id: str
    first_token_time: float | None
    finish_reasons: tuple[str, ...]
    num_output_tokens: tuple[int, ...]
    num_cached_tokens: int
    num_preemptions: int
    error: str | None
    kept_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EngineReset:
    """The cache was emptied: a step was broken off, which ends all requests, or the prefix cache was reset while there
    were none."""

    time: float
    reason: str


Event = (
    RequestAdded
    | StepPlanned
    | StepLaunched
    | StepRestricted
    | StepFinished
    | TokensForced
    | RequestFinished
    | EngineReset
)
Sink = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class Present:
    """What there is at the moment, for those who begin to listen late (``engine.present()``); not an event.

    Attributes:
        requests: the unfinished requests.
        tables: the block tables of the sequences that run, by sequence id.
        num_output_tokens: how many tokens each sequence has generated, of those that have some.
        num_blocks: how many blocks the KV cache has.
        kept_blocks: blocks that nobody uses and whose contents can be found.
    """

    time: float
    requests: tuple[RequestAdded, ...]
    tables: Mapping[str, tuple[int, ...]]
    num_output_tokens: Mapping[str, int]
    num_blocks: int
    kept_blocks: tuple[int, ...]


class Events:
    """The sinks that listen to one engine.

    Attributes:
        heard: whether anybody does. An engine asks several times a step, so it is no method.
    """

    def __init__(self) -> None:
        self._sinks: list[Sink] = []
        self.heard = False

    def subscribe(self, sink: Sink) -> Callable[[], None]:
        """Call ``sink`` with each event from now on. One that raises is dropped, and the engine goes on.

        Returns:
            What ends the subscription; it may be called twice.
        """
        self._sinks = [*self._sinks, sink]
        self.heard = True

        def unsubscribe() -> None:
            self._drop(sink)

        return unsubscribe

    def emit(self, event: Event) -> None:
        for sink in self._sinks:
            try:
                sink(event)
            except Exception:
                logger.exception("a subscriber of the engine's events failed, and gets no more of them")
                self._drop(sink)

    def _drop(self, sink: Sink) -> None:
        self._sinks = [other for other in self._sinks if other is not sink]
        self.heard = bool(self._sinks)

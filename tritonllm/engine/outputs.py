"""What the engine returns. Names and meanings are vLLM's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of a token under the model's own distribution (before temperature, penalties and truncation).

    Attributes:
        logprob: natural logarithm.
        rank: 1 for the most likely token of the vocabulary.
        decoded_token: its text; ``None`` without a tokenizer.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


Logprobs = Mapping[int, Logprob]  # token id -> its log-probability, at one position


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request, in seconds of ``time.monotonic()``, and how many drafts were verified for it and right."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(slots=True)
class CompletionOutput:
    """One continuation of a prompt.

    Attributes:
        index: which of the ``n`` continuations.
        text: what was generated so far, without a character or a possible stop string that is still incomplete.
        token_ids: the tokens generated so far, including one that ended the output.
        cumulative_logprob: sum of the log-probabilities of ``token_ids``, if ``logprobs`` was asked for.
        logprobs: for each token, the most likely ones and the chosen one.
        finish_reason: ``"stop"``, ``"length"``, ``"repetition"``, ``"abort"``, ``"error"``, or ``None`` while it runs.
        stop_reason: the stop string or stop token that ended it; ``"repetition_detected"``; ``None`` for end of
            sequence and otherwise.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None
    logprobs: Sequence[Logprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its continuations so far.

    Attributes:
        prompt: the prompt's text, if it was given as text.
        prompt_logprobs: for each prompt token, ``None`` for the first one.
        outputs: ``n`` continuations, in order of their index.
        finished: whether all continuations have ended.
        num_cached_tokens: prompt tokens whose keys and values came from the prefix cache.
        error: what ended it, where a ``finish_reason`` is ``"error"``.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    prompt_logprobs: Sequence[Logprobs | None] | None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0
    error: str | None = None

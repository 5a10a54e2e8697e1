"""What the engine returns. Names and meanings are vLLM's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of a token under the model's own distribution (before temperature, penalties and truncation), or
    with ``logprobs_mode="processed_logprobs"`` under the one that it was drawn from.

    Attributes:
        logprob: natural logarithm.
        rank: 1 for the most likely token of the vocabulary.
        decoded_token: the text of the token; ``None`` without a tokenizer.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


Logprobs = Mapping[int, Logprob]  # token id -> its log-probability, at one position
SampleLogprobs = Sequence[Logprobs]  # of an output's tokens
PromptLogprobs = Sequence[Logprobs | None]  # of a prompt's; the first has none


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request, in seconds of ``time.monotonic()`` (``first_scheduled_time``: when it first left the queue,
    known with its first token), and how many drafts were verified for it and right; of
    the right ones also how many were the first, the second, ... of their step."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    first_scheduled_time: float | None = None


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
        lora_request: none; there are no adapters yet.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None
    logprobs: Sequence[Logprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: ClassVar[None] = None

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
        kv_transfer_params: where another engine finds the prompt's blocks, if the request asked for that; with the
            last output.
        lora_request, encoder_prompt, encoder_prompt_token_ids: none; there are no adapters, nor models with encoder and
            decoder.
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
    kv_transfer_params: Mapping[str, Any] | None = None
    lora_request: ClassVar[None] = None
    encoder_prompt: ClassVar[None] = None
    encoder_prompt_token_ids: ClassVar[None] = None


@dataclass(slots=True)
class BeamSearchSequence:
    """A sequence that a beam search has found.

    Attributes:
        tokens: the token ids of the prompt and of its continuation.
        logprobs: for each token of the continuation the most likely ones that it was chosen from.
        lora_request: always ``None``; vLLM has the field.
        cum_logprob: sum of the continuation's log-probabilities.
        text: the text of all tokens; ``None`` without a tokenizer.
        finish_reason: ``"stop"`` or ``"length"``.
        stop_reason: ``None``: no stop token but the end of sequence ends a beam.
    """

    tokens: list[int]
    logprobs: list[Logprobs]
    lora_request: None = None
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """What a beam search has found, best first: ``beam_width`` sequences."""

    sequences: list[BeamSearchSequence]


@dataclass(slots=True)
class PoolingOutput:
    """What a prompt was pooled to.

    Attributes:
        data: a float32 tensor on the CPU: ``[outputs]``, or ``[tokens, outputs]`` of the tasks that begin with
            ``token_``.
    """

    data: Any


@dataclass(slots=True)
class EmbeddingOutput:
    """A prompt's vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """A number for each class: its probability, or its logit with ``use_activation=False``."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """How well two texts fit."""

    score: float


Pooled = TypeVar("Pooled", PoolingOutput, EmbeddingOutput, ClassificationOutput, ScoringOutput)


@dataclass(slots=True)
class PoolingRequestOutput(Generic[Pooled]):
    """A prompt and what it was pooled to.

    Attributes:
        outputs: the pooled result. If the request was aborted or ended by an error, its ``data`` has no elements.
        num_cached_tokens: prompt tokens whose keys and values came from the prefix cache.
        error: what ended the request before it was pooled.
    """

    request_id: str
    outputs: Pooled
    prompt_token_ids: Sequence[int]
    num_cached_tokens: int = 0
    finished: bool = True
    error: str | None = None


EngineOutput = RequestOutput | PoolingRequestOutput


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """An output of :meth:`LLM.embed`: a prompt and its embedding."""

    __slots__ = ()

    @staticmethod
    def from_base(base: PoolingRequestOutput) -> "EmbeddingRequestOutput":
        return EmbeddingRequestOutput(*_with(base, EmbeddingOutput(base.outputs.data.tolist())))


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """An output of :meth:`LLM.classify`: a prompt and the score of each class."""

    __slots__ = ()

    @staticmethod
    def from_base(base: PoolingRequestOutput) -> "ClassificationRequestOutput":
        return ClassificationRequestOutput(*_with(base, ClassificationOutput(base.outputs.data.tolist())))


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """An output of :meth:`LLM.score`: a pair of texts and its score."""

    __slots__ = ()

    @staticmethod
    def from_base(base: PoolingRequestOutput) -> "ScoringRequestOutput":
        """Convert a pooled result of one number.

        Raises:
            ValueError: the result is not one number.
        """
        if base.outputs.data.numel() != 1:
            raise ValueError(f"a score is one number, got {base.outputs.data.numel()} of {base.request_id!r}")
        return ScoringRequestOutput(*_with(base, ScoringOutput(base.outputs.data.item())))


def _with(base: PoolingRequestOutput, outputs: Any) -> tuple[Any, ...]:
    return base.request_id, outputs, base.prompt_token_ids, base.num_cached_tokens, base.finished, base.error

"""What the API process and the engine process say to each other, as msgspec structures in MessagePack.

The API process sends :data:`ToEngine`, the engine process answers with :class:`News`, one message for a step. Both
processes are of one version of this package: the structures need not be compatible with others.
"""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import msgspec

from tritonllm.config.sampling_params import (
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from tritonllm.config.thought_format import ThoughtFormat
from tritonllm.engine.data.outputs import CompletionOutput, Logprob, Logprobs, RequestMetrics, RequestOutput

NESTED_FIELDS: dict[str, Any] = {
    "structured_outputs": StructuredOutputsParams,
    "repetition_detection": RepetitionDetectionParams,
    "stop_after_thought": ThoughtFormat,
}
NESTED = tuple(NESTED_FIELDS.values())

PackedLogprobs = list[tuple[int, float, int | None, str | None]]  # of one position: token, logprob, rank, text


class Add(msgspec.Struct, tag=True, array_like=True):
    """Queue a request; ``params`` are the fields of :class:`SamplingParams` that are not at their defaults, or
    ``pooling`` those of :class:`~tritonllm.PoolingParams`, or ``search`` those of :class:`~tritonllm.BeamSearchParams`.
    The ids of the prompt's tokens have been checked, and are :data:`~tritonllm.engine.data.request.PACKED`: as a list
    of numbers, 24,000 of them take 3 ms on their way. ``bad_words`` are the parameters', tokenized.
    """

    request_id: str
    prompt: str | None
    packed: bytes
    cache_salt: str | None
    params: dict[str, Any]
    priority: int
    pooling: dict[str, Any] | None = None
    token_type_ids: list[int] | None = None
    search: dict[str, Any] | None = None
    bad_words: tuple[tuple[int, ...], ...] | None = None


class Abort(msgspec.Struct, tag=True, array_like=True):
    request_ids: list[str]


class Stop(msgspec.Struct, tag=True, array_like=True):
    """End the engine process; requests that still run are dropped."""


class Call(msgspec.Struct, tag=True, array_like=True):
    """Do something between requests; an :class:`Answer` with the same number says what came of it.

    ``method`` is ``sleep``, ``wake_up``, ``reload_weights``, ``reset_prefix_cache``, ``expert_load`` or
    ``reset_expert_load`` of the engine, or ``start_profile`` or ``stop_profile`` of
    :class:`~tritonllm.serve.engines.profiling.Profiles`. The first and the third wait until the requests have ended
    that are unfinished; with ``abort`` they are ended. None begins meanwhile. Or it is ``activity``
    (:mod:`tritonllm.serve.engines.activity`). This and ``expert_load`` are of the engine that ``replica`` names, or of
    any.
    """

    number: int
    method: str
    arguments: dict[str, Any]
    abort: bool = False
    replica: int | None = None


ToEngine = Add | Abort | Call | Stop


class Completion(msgspec.Struct, array_like=True):
    """What is new of one of the ``n`` continuations."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    logprobs: list[PackedLogprobs] | None = None


class Update(msgspec.Struct, array_like=True):
    """What is new of one request; times are those of ``time.monotonic()``, which all processes of a machine share.

    ``refused`` is why the engine did not take the request: nothing else will come of it; ``asleep``: because it
    sleeps, or will when the unfinished ones have ended. ``pooled`` is what a prompt was pooled to: a shape, and the
    bytes of its float32 numbers. ``lost``: the engine that had the request has died, but others live.
    """

    request_id: str
    outputs: list[Completion]
    finished: bool
    arrival_time: float = 0.0
    first_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    prompt_logprobs: list[PackedLogprobs | None] | None = None
    refused: str | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = []
    pooled: tuple[list[int], bytes] | None = None
    asleep: bool = False
    lost: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    first_scheduled_time: float | None = None


class Stats(msgspec.Struct, array_like=True):
    """The engine's counters and load; see :class:`tritonllm.engine.loop.engine.EngineStats`."""

    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    forced_tokens: int = 0
    prefix_cache_query_tokens: int = 0
    prefix_cache_hit_tokens: int = 0
    preemptions: int = 0
    compilations_after_ready: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_host_blocks: int = 0
    num_used_host_blocks: int = 0
    stored_blocks: int = 0
    loaded_blocks: int = 0
    stored_bytes: int = 0
    loaded_bytes: int = 0
    kv_saved_blocks: int = 0
    kv_fetched_blocks: int = 0
    kv_missed_blocks: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: tuple[int, ...] = ()
    draft_seconds: float = 0.0
    step_seconds: float = 0.0
    wait_seconds: float = 0.0
    takes_requests: bool = True
    is_sleeping: bool = False


class Answer(msgspec.Struct, array_like=True):
    """What came of a :class:`Call`: a value, or an error; ``is_value_error``: of a bad argument."""

    number: int
    value: Any = None
    error: str | None = None
    is_value_error: bool = False


class News(msgspec.Struct, array_like=True):
    """What a step brought."""

    updates: list[Update]
    stats: Stats
    answers: list[Answer] = []


class PoolingFacts(msgspec.Struct):
    """What the engine pools; see :class:`tritonllm.engine.text.pooling.PoolingAbility`."""

    tasks: list[str]
    causal: bool
    labels: int
    label_names: list[str]
    token_types: int


class EngineReady(msgspec.Struct, tag=True):
    """The engine has started: what the API process must know of it."""

    tokenizer: str | None  # folder or hub id
    revision: str | None
    trust_remote_code: bool
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    eos_token_ids: list[int]
    seed: int
    default_params: dict[str, Any]
    stats: Stats
    pooling: PoolingFacts


class Failed(msgspec.Struct, tag=True):
    """The engine did not start, or cannot go on. ``is_value_error``: the user can change that."""

    message: str
    is_value_error: bool = False


def pack_params(params: SamplingParams) -> dict[str, Any]:
    """The fields that are not at their defaults; an enumeration as its value, and what has fields as those.

    Raises:
        ValueError: functions, which cannot go to another process.
    """
    if params.logits_processors:
        raise ValueError("logits_processors are functions, and the engine runs in another process: use LLM")
    packed = {}
    for field in fields(params):
        value = getattr(params, field.name)
        if value != field.default:
            value = value.value if isinstance(value, RequestOutputKind) else value
            packed[field.name] = _given(value) if isinstance(value, NESTED) else value
    return packed


def _given(value: Any) -> dict[str, Any]:
    """The fields that are not at their defaults."""
    pairs = ((field, getattr(value, field.name)) for field in fields(value))
    return {field.name: given for field, given in pairs if given != field.default}


def unpack_params(packed: dict[str, Any]) -> SamplingParams:
    """The sampling parameters that a message holds.

    Raises:
        ValueError: a value outside its range.
    """
    values = dict(packed)
    for name, kind in (("output_kind", RequestOutputKind), *NESTED_FIELDS.items()):
        if name in values:
            values[name] = kind(**values[name]) if name in NESTED_FIELDS else kind(values[name])
    return SamplingParams(**values)


def _pack_logprobs(positions: Sequence[Logprobs]) -> list[PackedLogprobs]:
    return [[(token, e.logprob, e.rank, e.decoded_token) for token, e in entries.items()] for entries in positions]


def unpack_logprobs(position: PackedLogprobs) -> Logprobs:
    return {token: Logprob(logprob, rank, text) for token, logprob, rank, text in position}


def pack_output(output: RequestOutput) -> Update:
    """An engine's output as a message. Its prompt stays behind: the receiver has it."""
    update = Update(
        output.request_id,
        [
            Completion(
                completion.index,
                completion.text,
                list(completion.token_ids),
                completion.finish_reason,
                completion.stop_reason,
                completion.cumulative_logprob,
                None if completion.logprobs is None else _pack_logprobs(completion.logprobs),
            )
            for completion in output.outputs
        ],
        output.finished,
        num_cached_tokens=output.num_cached_tokens,
        error=output.error,
        kv_transfer_params=None if output.kv_transfer_params is None else dict(output.kv_transfer_params),
    )
    times = output.metrics
    if times is not None:
        update.arrival_time, update.first_token_time = times.arrival_time, times.first_token_time
        update.finished_time, update.first_scheduled_time = times.finished_time, times.first_scheduled_time
        update.num_draft_tokens, update.num_accepted_tokens = times.num_draft_tokens, times.num_accepted_tokens
        update.num_accepted_tokens_per_pos = times.num_accepted_tokens_per_pos
    if output.finished and output.prompt_logprobs is not None:
        update.prompt_logprobs = [p if p is None else _pack_logprobs([p])[0] for p in output.prompt_logprobs]
    return update


def unpack_completion(completion: Completion) -> CompletionOutput:
    logprobs = completion.logprobs
    return CompletionOutput(
        index=completion.index,
        text=completion.text,
        token_ids=completion.token_ids,
        cumulative_logprob=completion.cumulative_logprob,
        logprobs=None if logprobs is None else [unpack_logprobs(position) for position in logprobs],
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
    )


def unpack_output(update: Update, prompt: str | None, prompt_token_ids: Sequence[int]) -> RequestOutput:
    """The message as the output that it was made of, with its prompt."""
    scores = update.prompt_logprobs
    return RequestOutput(
        request_id=update.request_id,
        prompt=prompt,
        prompt_token_ids=prompt_token_ids,
        prompt_logprobs=None if scores is None else [p if p is None else unpack_logprobs(p) for p in scores],
        outputs=[unpack_completion(completion) for completion in update.outputs],
        finished=update.finished,
        metrics=RequestMetrics(
            *(update.arrival_time, update.first_token_time, update.finished_time),
            *(update.num_draft_tokens, update.num_accepted_tokens, list(update.num_accepted_tokens_per_pos)),
            update.first_scheduled_time,
        ),
        num_cached_tokens=update.num_cached_tokens,
        error=update.error,
        kv_transfer_params=update.kv_transfer_params,
    )

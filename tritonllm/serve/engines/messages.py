"""What the API process and the engine process say to each other, in MessagePack.

The API process sends :data:`ToEngine`, the engine process answers with :class:`News`, one message for a step. Outputs
and statistics are the engine's own dataclasses, as rows of their values (:mod:`tritonllm.serve.engines.positional`).
Both processes are of one version of this package: the messages need not be compatible with others.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import msgspec
import numpy as np
import torch

from tritonllm.config.sampling_params import (
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from tritonllm.config.thought_format import ThoughtFormat
from tritonllm.engine.data.outputs import EngineOutput, PoolingOutput, PoolingRequestOutput, RequestOutput
from tritonllm.engine.data.stats import EngineStats
from tritonllm.serve.engines.positional import PositionalRows, Special

NESTED_FIELDS: dict[str, Any] = {
    "structured_outputs": StructuredOutputsParams,
    "repetition_detection": RepetitionDetectionParams,
    "stop_after_thought": ThoughtFormat,
}
NESTED = tuple(NESTED_FIELDS.values())


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


@dataclass(slots=True)
class RequestFailure:
    """Why nothing more comes of a request, nor any output.

    Attributes:
        kind: ``refused``: the engine did not take it. ``asleep``: because it sleeps, or will when the unfinished ones
            have ended. ``lost``: the engine that had it has died, but others live.
    """

    request_id: str
    why: str
    kind: Literal["refused", "asleep", "lost"] = "refused"
    finished: ClassVar[bool] = True


Update = EngineOutput | RequestFailure  # what is new of one request


@dataclass(slots=True)
class Answer:
    """What came of a :class:`Call`: a value, or an error; ``is_value_error``: of a bad argument."""

    number: int
    value: Any = None
    error: str | None = None
    is_value_error: bool = False


@dataclass(slots=True)
class News:
    """What a step brought. Outputs are without their prompts, which the receiver has; their times are those of
    ``time.monotonic()``, which all processes of a machine share."""

    outputs: list[RequestOutput]
    stats: EngineStats
    answers: list[Answer] = dataclasses.field(default_factory=list)
    pooled: list[PoolingRequestOutput[PoolingOutput]] = dataclasses.field(default_factory=list)
    failures: list[RequestFailure] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, updates: Iterable[Update], stats: EngineStats) -> "News":
        news = cls([], stats)
        for update in updates:
            if isinstance(update, RequestOutput):
                news.outputs.append(update)
            elif isinstance(update, PoolingRequestOutput):
                news.pooled.append(update)
            else:
                news.failures.append(update)
        return news

    @property
    def updates(self) -> list[Update]:
        """The updates of all requests, one or several of each request in their order."""
        return [*self.outputs, *self.pooled, *self.failures]


def _pack_pooled(output: PoolingOutput) -> tuple[list[int], bytes]:
    data = output.data
    return list(data.shape), data.float().contiguous().numpy().tobytes()


def _unpack_pooled(packed: tuple[list[int], bytes]) -> PoolingOutput:
    shape, data = packed
    return PoolingOutput(torch.from_numpy(np.frombuffer(data, dtype=np.float32).reshape(shape).copy()))


# Sent are a shape, and the bytes of float32 numbers in the machine's order.
_NEWS = PositionalRows(News, {PoolingOutput: Special(tuple[list[int], bytes], _pack_pooled, _unpack_pooled)})
_decode = msgspec.msgpack.Decoder(_NEWS.type).decode


def encode_news(news: News) -> bytes:
    return msgspec.msgpack.encode(_NEWS.pack(news))


def decode_news(data: bytes) -> News:
    """Read what :func:`encode_news` made.

    Raises:
        msgspec.DecodeError: other bytes.
    """
    return _NEWS.unpack(_decode(data))


def leave_prompt(output: EngineOutput) -> None:
    """Take out of an engine's output what stays behind: the prompt, and its log-probabilities before the end."""
    output.prompt_token_ids = ()
    if isinstance(output, RequestOutput):
        output.prompt = None
        if not output.finished:
            output.prompt_logprobs = None


class PoolingFacts(msgspec.Struct):
    """What the engine pools: those fields of :class:`tritonllm.engine.text.pooling.PoolingAbility` that an API process
    asks for, which does not load the kernels that a pooling head brings along."""

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
    stats: EngineStats
    pooling: PoolingFacts
    download_dir: str | None = None
    max_logprobs: int = 20


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

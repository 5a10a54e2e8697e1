"""The engine's dataclasses as rows, which is how they go to the API process."""

import dataclasses
from collections.abc import Mapping, Sequence

import msgspec
import pytest
import torch

from tritonllm.engine.data.outputs import (
    CompletionOutput,
    Logprob,
    PoolingOutput,
    PoolingRequestOutput,
    RequestMetrics,
    RequestOutput,
)
from tritonllm.engine.data.stats import EngineStats
from tritonllm.serve.engines.messages import Answer, News, RequestFailure, decode_news, encode_news, leave_prompt
from tritonllm.serve.engines.positional import PositionalRows


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: int = 2


@dataclasses.dataclass
class Shape:
    name: str
    corners: Sequence[Point]
    named: Mapping[str, Point | None] | None = None
    numbers: Sequence[int] = ()
    facts: Mapping[str, object] | None = None
    best: Point | None = None


def sent(rows, value):
    return rows.unpack(msgspec.msgpack.Decoder(rows.type).decode(msgspec.msgpack.encode(rows.pack(value))))


@pytest.mark.parametrize(
    "shape",
    [
        Shape("empty", []),
        Shape("full", [Point(1), Point(3, 4)], {"a": Point(5), "b": None}, [1, 2], {"of": [{}]}, Point(6)),
    ],
)
def test_what_is_sent_comes_as_it_was(shape):
    assert sent(PositionalRows(Shape), shape) == dataclasses.replace(shape, numbers=list(shape.numbers))
    assert sent(PositionalRows(list[Shape]), [shape, shape])[1].name == shape.name


def test_a_row_has_values_only_and_a_class_of_its_own_when_it_comes():
    rows = PositionalRows(Shape)
    assert rows.pack(Shape("a", (Point(1),), numbers=range(2))) == ("a", [(1, 2)], None, [0, 1], None, None)
    assert rows.unpack(("a", [(1, 2)], None, [], None, None)).corners == [Point(1, 2)]


def test_what_does_not_fit_a_row_is_no_message():
    for row in (["a"], ["a", [[1, "2"]], None, [], None, None]):
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.Decoder(PositionalRows(Shape).type).decode(msgspec.msgpack.encode(row))


def test_alternatives_that_msgpack_could_not_tell_apart_are_named():
    with pytest.raises(TypeError, match=r"Point.*None as an alternative, and nothing else"):
        PositionalRows(Point | Shape)


LOGPROBS = {7: Logprob(-0.5, 3, "g"), 2: Logprob(-0.1, 1), 4: Logprob(-0.2, 2, "d")}
METRICS = RequestMetrics(1.5, 2.5, 9.5, 4, 3, [2, 1], 2.0)


def test_news_come_as_the_engine_told_them():
    completion = CompletionOutput(1, "text", [7], -0.5, [LOGPROBS], "stop", "x")
    output = RequestOutput("a", None, [], [None, LOGPROBS], [completion], True, METRICS, 8, "why", {"port": [1]})
    counted = [field for field in dataclasses.fields(EngineStats) if type(field.default) is int]
    stats = EngineStats(**{field.name: place for place, field in enumerate(counted)}, is_sleeping=True)
    stats = dataclasses.replace(stats, num_accepted_tokens_per_pos=(3, 1), step_seconds=0.5)
    pooled = PoolingRequestOutput("p", PoolingOutput(torch.tensor([[1.5, 2], [3, 4]])), [], 5, error="no")
    answers = [Answer(1, {"a": [1]}), Answer(2, error="bad", is_value_error=True)]
    news = News(
        [output, RequestOutput("b", None, [], None)], stats, answers, [pooled], [RequestFailure("c", "why", "lost")]
    )
    found = decode_news(encode_news(news))
    (data,) = [one.outputs.data for one in found.pooled]
    assert torch.equal(data, pooled.outputs.data) and data.dtype == torch.float32
    found.pooled[0].outputs = pooled.outputs  # tensors have no truth value
    assert found == news and type(found.stats) is EngineStats
    assert list(found.outputs[0].outputs[0].logprobs[0]) == [7, 2, 4], "the chosen token first"
    assert News.of(news.updates, stats).updates == news.updates


@pytest.mark.parametrize("finished", [False, True])
def test_the_prompt_stays_behind_and_its_logprobs_until_the_end(finished):
    output = RequestOutput("a", "prompt", [1] * 1000, [None, LOGPROBS], finished=finished)
    leave_prompt(output)
    (found,) = decode_news(encode_news(News([output], EngineStats()))).outputs
    assert (found.prompt, found.prompt_token_ids) == (None, [])
    assert found.prompt_logprobs == ([None, LOGPROBS] if finished else None)
    pooled = PoolingRequestOutput("p", PoolingOutput(torch.empty(0)), [1] * 1000)
    leave_prompt(pooled)
    (found,) = decode_news(encode_news(News.of([pooled], EngineStats()))).pooled
    assert found.prompt_token_ids == [] and found.outputs.data.shape == (0,)


def test_a_token_is_a_short_message():
    """Of a step with many requests most bytes are their ids and times."""
    metrics = RequestMetrics(12345.678, 12346.789, first_scheduled_time=12345.9)
    completions = [CompletionOutput(0, "", [50_000])]
    outputs = [RequestOutput(f"cmpl-{i:032d}", None, (), None, completions, False, metrics, 16) for i in range(256)]
    each = (len(encode_news(News(outputs, EngineStats()))) - len(encode_news(News([], EngineStats())))) / 256
    ids, times = 2 + 37, 3 * 9
    assert each <= ids + times + 26

"""Bodies of requests: every field of which there can be many has a limit, which holds before any work; and what is at
its limit holds up no other client's stream."""

import json
import statistics
import threading
import time
from typing import get_args, get_origin

import httpx
import pytest
from pydantic import ValidationError
from support.many import Many
from support.server import MODEL, running_server
from support.streams import LONG
from support.waiting import PATIENCE

from tritonllm.config.sampling_params import (
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_STOP_CHARS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
)
from tritonllm.serve.api.fields import HARMLESS
from tritonllm.serve.api.messages_protocol import CountRequest, MessagesRequest
from tritonllm.serve.api.pooling_protocol import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from tritonllm.serve.api.protocol import (
    MAX_FIELDS,
    MAX_IDS,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_PROMPTS,
    MAX_TOOLS,
    MOST_ENTRIES,
    PROMPTS,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    chat_request,
)
from tritonllm.serve.api.responses_protocol import ResponsesRequest

BODIES = [
    *(CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest, ResponsesRequest, MessagesRequest),
    *(CountRequest, EmbeddingRequest, ClassifyRequest, PoolingRequest, ScoreRequest, RerankRequest),
]
# Objects of a few known names, or of which what is read has limits of its own, or that are not read.
FREE = {
    *("response_format", "structured_outputs", "repetition_detection", "kv_transfer_params", "tool_choice", "text"),
    *("reasoning", "thinking", "output_config", "stream_options"),
}


def kinds(annotation):
    """All that an annotation is made of."""
    yield get_origin(annotation) or annotation
    for inner in get_args(annotation):
        yield from kinds(inner)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_every_field_with_entries_has_a_limit(body):
    many = {name for name, field in body.model_fields.items() if {list, dict} & set(kinds(field.annotation))}
    assert many - FREE <= MOST_ENTRIES.keys() | set(PROMPTS)


def message_of(body, fields):
    with pytest.raises(ValidationError) as caught:
        body.model_validate(fields)
    (error,) = caught.value.errors()
    return error["msg"].removeprefix("Value error, ")


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_entries_are_counted_before_they_are_looked_at(body):
    for name in body.model_fields.keys() & MOST_ENTRIES.keys():
        most = MOST_ENTRIES[name]
        expected = f"{name} has {most + 1} entries, more than {most}: leave some out"
        assert message_of(body, {name: Many(most + 1)}) == expected
    expected = f"the body has {MAX_FIELDS + 1} fields, more than {MAX_FIELDS}: leave some out"
    assert message_of(body, {f"x{i}": 1 for i in range(MAX_FIELDS + 1)}) == expected


@pytest.mark.parametrize(("body", "name"), [(CompletionRequest, "prompt"), (EmbeddingRequest, "input")])
def test_prompts_are_counted_and_tokens_of_one_are_not(body, name):
    for one in ("x", [1]):
        body.model_validate({name: [one] * MAX_PROMPTS})
        assert message_of(body, {name: [one] * (MAX_PROMPTS + 1)}).startswith(f"{name} has {MAX_PROMPTS + 1} entries")
    body.model_validate({name: [1] * 100_000})


def test_messages_and_their_parts_are_counted():
    part = {"type": "text", "text": "x"}
    two = [{"role": "user", "content": [part] * (MAX_PARTS // 2)}] * 2
    ChatRequest.model_validate({"messages": two})
    assert message_of(ChatRequest, {"messages": [*two, {"role": "user", "content": [part]}]}).startswith(
        "messages have"
    )
    item = {"role": "user", "content": "x"}
    ResponsesRequest.model_validate({"input": [item] * MAX_MESSAGES})
    assert message_of(ResponsesRequest, {"input": [item] * (MAX_MESSAGES + 1)}).startswith("input has")


@pytest.mark.parametrize("wrong", [[1, "a"], [["a"]], [None]])
def test_the_first_wrong_entry_ends_the_check(wrong):
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate({"prompt": "x", "stop_token_ids": wrong * 2000})
    assert len(caught.value.errors()) == 1


def test_ignored_fields_may_be_as_large_as_they_like():
    for name in HARMLESS - CompletionRequest.model_fields.keys() - MOST_ENTRIES.keys():
        CompletionRequest.model_validate({"prompt": "x", name: {str(i): "x" for i in range(1000)}})


class Pulse:
    """When the tokens of a stream come, which a thread reads again and again."""

    def __init__(self, server):
        self._server, self._times, self._ends = server, [], threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self):
        with httpx.Client(base_url=self._server.url, timeout=PATIENCE) as client:
            while not self._ends.is_set():
                with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
                    for line in response.iter_lines():
                        if line:
                            self._times.append(time.monotonic())
                        if self._ends.is_set():
                            return

    def wait(self, count):
        """For so many more tokens."""
        goal = len(self._times) + count
        while len(self._times) < goal:
            assert self._thread.is_alive()
            time.sleep(0.001)

    def beside(self, work):
        """The longest gap while there is work, and the median of the gaps before."""
        self.wait(20)
        begin = len(self._times)
        work()
        self.wait(5)
        gaps = [after - before for before, after in zip(self._times, self._times[1:], strict=False)]
        return max(gaps[begin - 1 :]), statistics.median(gaps[begin - 20 : begin - 1])

    def close(self):
        self._ends.set()
        self._thread.join(PATIENCE)


@pytest.fixture(scope="module")
def roomy():
    with running_server("--max-queue", "4096") as server:
        yield server


@pytest.fixture(scope="module")
def pulse(roomy):
    pulse = Pulse(roomy)
    yield pulse
    pulse.close()


STORY = {"model": MODEL, "prompt": "There was a fox", "max_tokens": 1}
TALK = {"model": MODEL, "max_tokens": 1}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT = {"type": "text", "text": "x"}
TOOL = {"type": "function", "function": {"name": "f", "description": "x"}}
WORDS = [f"w{i}" for i in range(100 * MAX_BAD_WORDS)]


def properties(count):
    return {
        "type": "object",
        "properties": {f"p{i}": {"type": "string", "description": "x" * 1500} for i in range(count)},
    }


# Each field at its limit, and far beyond.
FIELDS = {
    "bad_words": (COMPLETIONS, {**STORY, "bad_words": WORDS[: MAX_BAD_WORDS // 2]}, 200),  # each is two bans
    "bad_words, all bans": (COMPLETIONS, {**STORY, "bad_words": WORDS[:MAX_BAD_WORDS]}, 400),
    "bad_words beyond": (COMPLETIONS, {**STORY, "bad_words": WORDS[: 10 * MAX_BAD_WORDS]}, 400),
    "stop_token_ids": (COMPLETIONS, {**STORY, "stop_token_ids": list(range(2048)) * (MAX_STOP_TOKEN_IDS // 2048)}, 200),
    "stop_token_ids beyond": (COMPLETIONS, {**STORY, "stop_token_ids": list(range(2048)) * 100}, 400),
    "allowed_token_ids": (COMPLETIONS, {**STORY, "allowed_token_ids": list(range(2048))}, 200),
    "allowed_token_ids beyond": (COMPLETIONS, {**STORY, "allowed_token_ids": list(range(2048)) * 100}, 400),
    "logit_bias": (COMPLETIONS, {**STORY, "logit_bias": dict.fromkeys(map(str, range(MAX_LOGIT_BIAS)), 1)}, 200),
    "logit_bias beyond": (COMPLETIONS, {**STORY, "logit_bias": dict.fromkeys(map(str, range(100_000)), 1)}, 400),
    "stop": (COMPLETIONS, {**STORY, "stop": [f"{i}" * (MAX_STOP_CHARS // 4) for i in range(MAX_STOPS)]}, 200),
    "choice": (COMPLETIONS, {**STORY, "structured_outputs": {"choice": WORDS[:MAX_CHOICES]}}, 200),
    "choice beyond": (COMPLETIONS, {**STORY, "structured_outputs": {"choice": WORDS}}, 400),
    "enum": (
        COMPLETIONS,
        {**STORY, "structured_outputs": {"json": {"enum": WORDS[:MAX_CHOICES], "type": "string"}}},
        200,
    ),
    "enum beyond": (COMPLETIONS, {**STORY, "structured_outputs": {"json": {"enum": WORDS, "type": "string"}}}, 400),
    "json": (COMPLETIONS, {**STORY, "structured_outputs": {"json": properties(250)}}, 200),
    "json beyond": (COMPLETIONS, {**STORY, "structured_outputs": {"json": properties(1000)}}, 400),
    "messages": (CHAT, {**TALK, "messages": [{"role": "user", "content": "x"}] * MAX_MESSAGES}, 400),  # too many tokens
    "parts": (CHAT, {**TALK, "messages": [{"role": "user", "content": [TEXT] * MAX_PARTS}]}, 400),  # as those
    "tools": (CHAT, {**TALK, "messages": [{"role": "user", "content": "x"}], "tools": [TOOL] * MAX_TOOLS}, 200),
    "tokens": ("/detokenize", {"model": MODEL, "tokens": list(range(2048)) * (MAX_IDS // 2048)}, 200),
    "fields": (COMPLETIONS, {**STORY, **dict.fromkeys(WORDS, 1)}, 400),
    "wrong entries": (COMPLETIONS, {**STORY, "prompt": [1, "a"] * 100_000}, 400),
}


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_at_its_limit_holds_up_no_stream(roomy, pulse, field):
    """What the machine does beside this can make a gap, too, but not each time."""
    path, body, expected = FIELDS[field]
    content, seen = json.dumps(body), []
    for _ in range(6):

        def work():
            answer = roomy.client.post(path, content=content, headers={"Content-Type": "application/json"})
            assert answer.status_code == expected, answer.text

        gap, median = pulse.beside(work)
        seen.append(gap / median)
        if gap <= 40 * median:
            return
    raise AssertionError(f"gaps of a stream, in its medians: {seen}")


def test_variables_of_the_template_that_a_request_does_not_bring():
    defaults = {"enable_thinking": False, "style": "short"}

    def variables(**more):
        return chat_request({"messages": [{"role": "user", "content": "a"}], **more}).options(None, False, defaults)

    assert variables().chat_template_kwargs == defaults
    options = variables(chat_template_kwargs={"enable_thinking": True}, reasoning_effort="low")
    assert options.chat_template_kwargs == {"enable_thinking": True, "style": "short", "reasoning_effort": "low"}

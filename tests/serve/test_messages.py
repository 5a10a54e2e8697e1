"""Anthropic's ``/v1/messages`` with its official client, against chat completions of the same model."""

import asyncio
import json

import anthropic
import pytest
from support.answers import TEXT
from support.server import MODEL

from tritonllm.serve.api.messages_protocol import CountRequest

ASK = "What is 47 + 66?"
MESSAGES = [{"role": "user", "content": ASK}]
ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS = [
    {"name": "add", "description": "Adds.", "input_schema": ADD},
    {"name": "greet", "input_schema": {"type": "object", "properties": {}}},
]
GREEDY = {"temperature": 0}  # newer clients have no argument for it
THINK = {"type": "enabled", "budget_tokens": 1024}


@pytest.fixture(scope="module")
def client(tools_server):
    with anthropic.Anthropic(base_url=tools_server.url, api_key="none", max_retries=0) as made:
        yield made


def saying(text, **more):
    form = {"structured_outputs": {"choice": [text]}, **GREEDY}
    return {"model": MODEL, "messages": MESSAGES, "max_tokens": 400, "extra_body": form, **more}


def test_text(client, tools_server):
    chat = {"model": MODEL, "messages": MESSAGES, "temperature": 0}
    expected = tools_server.client.post("/v1/chat/completions", json=chat).json()
    reply = client.messages.create(model=MODEL, messages=MESSAGES, max_tokens=400, extra_body=GREEDY)
    (block,) = reply.content
    assert (block.type, block.text) == ("text", expected["choices"][0]["message"]["content"])
    assert reply.id.startswith("msg_")
    assert (reply.role, reply.stop_reason, reply.stop_sequence) == ("assistant", "end_turn", None)
    usage = reply.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == expected["usage"]["prompt_tokens"]
    assert usage.output_tokens == expected["usage"]["completion_tokens"]
    counted = client.messages.count_tokens(model=MODEL, messages=MESSAGES)
    assert counted.input_tokens == expected["usage"]["prompt_tokens"]


def test_reasons_to_stop(client):
    cut = client.messages.create(**{**saying("Let me see."), "max_tokens": 1})
    assert cut.stop_reason == "max_tokens"
    stopped = client.messages.create(**saying("Let me see."), stop_sequences=["see", "x"])
    assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == ("stop_sequence", "see", "Let me ")


def test_stop_sequences_count_in_the_answer(client):
    reply = client.messages.create(**saying(TEXT), thinking=THINK, stop_sequences=["add", "see"])
    assert [getattr(block, block.type) for block in reply.content] == ["I add.", "Let me "]
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "see")
    body = saying(TEXT)
    body["extra_body"]["stop_after_thought"] = False
    reply = client.messages.create(**body, thinking=THINK, stop_sequences=["add", "see"])
    assert [getattr(block, block.type) for block in reply.content] == ["I"]


def test_thoughts_text_and_calls(client):
    reply = client.messages.create(**saying(TEXT), tools=TOOLS, thinking=THINK)
    assert [block.type for block in reply.content] == ["thinking", "text", "tool_use", "tool_use"]
    thought, said, add, greet = reply.content
    assert (thought.thinking, said.text) == ("I add.", "Let me see.")
    assert (add.name, add.input) == ("add", {"a": 47, "b": 6})
    assert (greet.name, greet.input) == ("greet", {"loud": True})
    assert (reply.stop_reason, add.id != greet.id) == ("tool_use", True)
    assert [block.type for block in client.messages.create(**saying(TEXT)).content] == ["text"], "no thoughts unasked"


@pytest.mark.parametrize("text", [TEXT, "Just text.", "<think>only a thought"])
def test_a_stream_says_the_same(client, text):
    body = saying(text, tools=TOOLS, thinking=THINK)
    whole = client.messages.create(**body)
    with client.messages.stream(**body) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")

    def without_ids(message):
        return [block.model_dump(exclude={"id", "parsed_output"}) for block in message.content]

    assert without_ids(final) == without_ids(whole)
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_a_call_that_breaks_off_has_what_came(client):
    text = '<tool_call>{"name": "add", "arguments": {"a": 47, "b": 66}}</tool_call>'
    reply = client.messages.create(**{**saying(text), "max_tokens": 30}, tools=TOOLS)
    assert reply.stop_reason == "max_tokens"
    assert reply.content[0].input in ({}, {"a": 4}, {"a": 47}, {"a": 47, "b": 6})


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": 47, "b": 6,}', {"a": 47, "b": 6}),
        ('{"a": 47, "b": nine}', {"a": 47}),
        ('{"a": "x\ny\\d", b: 6}', {"a": "x\ny\\d"}),
        ('{"a": [1, {"b": tru}], "c": 2}', {"a": [1, {}]}),
        ("[1, 2]", {}),
        ("{}", {}),
    ],
)
def test_arguments_that_are_no_json_are_an_object_in_any_case(client, arguments, expected):
    body = saying(f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>', tools=TOOLS)
    (call,) = client.messages.create(**body).content
    assert (call.name, call.input) == ("add", expected)
    with client.messages.stream(**body) as stream:
        parts = [event.partial_json for event in stream if event.type == "input_json"]
        (streamed,) = stream.get_final_message().content
    assert streamed.input == expected == json.loads("".join(parts))


def test_the_async_client(tools_server):
    async def ask():
        client = anthropic.AsyncAnthropic(base_url=tools_server.url, api_key="none")
        async with client, client.messages.stream(**saying("Just text.")) as stream:
            return "".join([text async for text in stream.text_stream])

    assert asyncio.run(ask()) == "Just text."


@pytest.mark.parametrize(
    "choice", [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "add"}]
)
def test_a_forced_call(client, choice):
    tools = TOOLS[:1]
    reply = client.messages.create(model=MODEL, messages=MESSAGES, max_tokens=300, tools=tools, tool_choice=choice)
    (call,) = reply.content
    assert (call.type, call.name, set(call.input), reply.stop_reason) == ("tool_use", "add", {"a"}, "tool_use")


def test_blocks_become_messages(client, tools_server):
    """What a conversation of blocks costs is what the same one of messages costs, so they are one prompt."""
    blocks = [
        {"role": "user", "content": [{"type": "text", "text": ASK, "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I add.", "signature": ""},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "call-1", "name": "add", "input": {"a": 47}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "call-1", "content": [{"type": "text", "text": "113"}]},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    message = {"role": "assistant", "content": "Let me see.", "reasoning_content": "I add."}
    function = {"name": "add", "arguments": '{"a": 47}'}
    message["tool_calls"] = [{"id": "call-1", "type": "function", "function": function}]
    messages = [
        {"role": "system", "content": "Be brief."},
        *MESSAGES,
        message,
        {"role": "tool", "tool_call_id": "call-1", "content": "113"},
        {"role": "user", "content": "And?"},
    ]
    tools = [{"type": "function", "function": {"name": "greet", "parameters": TOOLS[1]["input_schema"]}}]
    expected = tools_server.client.post("/tokenize", json={"messages": messages, "tools": tools}).json()["count"]
    counted = client.messages.count_tokens(model=MODEL, system="Be brief.", messages=blocks, tools=TOOLS[1:])
    assert counted.input_tokens == expected


def test_turns_of_one_role_in_a_row_are_joined():
    """As Anthropic does; clients send reminders in the system's name, too, and wherever they like."""

    def text(said):
        return [{"type": "text", "text": said}]

    def messages(*turns, system=None):
        given = [{"role": role, "content": content} for role, content in turns]
        return CountRequest(model="m", messages=given, system=system).fields()["messages"]

    call = {"type": "tool_use", "id": "1", "name": "add", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": "3"}
    thoughts = [{"type": "thinking", "thinking": thought, "signature": ""} for thought in ("a", "b")]
    for apart, joined in (
        ([("user", "a"), ("user", text("b"))], [("user", [*text("a"), *text("b")])]),
        (
            [("user", "x"), ("assistant", "a"), ("assistant", [call])],
            [("user", "x"), ("assistant", [*text("a"), call])],
        ),
        ([("user", [result]), ("user", "b")], [("user", [result, *text("b")])]),
        ([("system", "a"), ("system", "b"), ("user", "c")], [("system", [*text("a"), *text("b")]), ("user", "c")]),
        ([("assistant", thoughts[:1]), ("assistant", thoughts[1:])], [("assistant", thoughts)]),
    ):
        assert messages(*apart) == messages(*joined)
        roles = [one["role"] for one in messages(*apart) if one["role"] != "tool"]
        assert roles == [role for role, _ in joined]
    assert messages(("assistant", thoughts))[0]["reasoning_content"] == "a\nb"
    late = messages(("system", "b"), ("user", "c"), ("system", "d"), system="a")
    assert [(one["role"], one["content"]) for one in late] == [("system", "a\nb"), ("user", "c"), ("system", "d")]


@pytest.mark.parametrize("content", ["47 + 66 =", [{"type": "text", "text": "47 + 66 ="}]])
def test_a_last_message_of_the_assistant_is_continued(client, tools_server, content):
    """Its text is the beginning of the answer, which does not repeat it."""
    plain = [*MESSAGES, {"role": "assistant", "content": "47 + 66 ="}]
    goes_on = {"messages": plain, "continue_final_message": True, "add_generation_prompt": False}
    expected = tools_server.client.post(
        "/v1/chat/completions", json={"model": MODEL, "max_tokens": 12, "temperature": 0, **goes_on}
    ).json()
    messages = [*MESSAGES, {"role": "assistant", "content": content}]
    reply = client.messages.create(model=MODEL, messages=messages, max_tokens=12, extra_body=GREEDY)
    text = expected["choices"][0]["message"]["content"]
    assert text and [block.text for block in reply.content] == [text]
    counted = client.messages.count_tokens(model=MODEL, messages=messages).input_tokens
    assert counted == expected["usage"]["prompt_tokens"]
    turn = {"messages": plain, "add_generation_prompt": True}
    assert counted < tools_server.client.post("/tokenize", json=turn).json()["count"]


def test_what_is_no_beginning_of_an_answer_is_not_continued():
    call = {"type": "tool_use", "id": "1", "name": "add", "input": {}}
    for content in ("", [], [call], [{"type": "text", "text": "I add."}, call]):
        messages = [*MESSAGES, {"role": "assistant", "content": content}]
        assert "continue_final_message" not in CountRequest(model="m", messages=messages).fields()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"messages": [{"role": "robot", "content": "x"}]}, "role must be user or assistant"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "only text is supported"),
        (
            {
                "tools": [*TOOLS, {"type": "web_search_20250305", "name": "web_search"}],
                "tool_choice": {"type": "tool", "name": "web_search"},
            },
            "tool_choice names 'web_search', a tool of type 'web_search_20250305'",
        ),
        ({"tools": [{"name": "x"}]}, r"tools\[0\] must have name and input_schema"),
        ({"extra_body": {"mcp_servers": [{"url": "x"}]}}, "mcp_servers: not supported here"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "sub"}}, "'sub', which is not"),
        ({"thinking": {"type": "some"}}, "thinking.type"),
        ({"extra_body": {"temperature": -1.0}}, "temperature must be"),
        ({"max_tokens": 0}, "max_tokens must be"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_here_is_refused(client, more, message, stream):
    with pytest.raises(anthropic.BadRequestError, match=message) as caught:
        client.messages.create(**{"model": MODEL, "messages": MESSAGES, "max_tokens": 9, "stream": stream, **more})
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == "invalid_request_error"


def test_a_prompt_that_is_too_long_is_told_as_anthropic_tells_it(tools_server):
    """Claude Code shortens a conversation after an error that begins so."""
    long = [{"role": "user", "content": "yes " * 3000}]
    body = {"model": MODEL, "messages": long, "max_tokens": 1}
    error = tools_server.client.post("/v1/messages", json=body).json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith("prompt is too long: prompt has ")


def test_other_errors_have_anthropics_shape(tools_server):
    for path, body, kind in (
        ("/v1/messages", {"model": "gpt-9", "messages": MESSAGES, "max_tokens": 1}, "not_found_error"),
        ("/v1/messages", {"model": MODEL}, "invalid_request_error"),
    ):
        answer = tools_server.client.post(path, json=body).json()
        assert (answer["type"], answer["error"]["type"]) == ("error", kind)
    answer = tools_server.client.get("/v1/messages").json()
    assert answer["type"] == "error"

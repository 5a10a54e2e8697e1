"""Calls of tools and thoughts in chat completions, with the official client. A grammar makes the model write them."""

import json

import openai
import pytest
from support.answers import TEXT
from support.server import MODEL

ASK = [{"role": "user", "content": "What is 47 + 66?"}]
ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"$ref": "#/$defs/digit"}},
    "required": ["a", "b"],
    "additionalProperties": False,
    "$defs": {"digit": {"type": "integer", "minimum": 0, "maximum": 9}},
}
GREET = {
    "type": "object",
    "properties": {"loud": {"type": "boolean"}},
    "required": ["loud"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": ADD, "strict": True}},
    {"type": "function", "function": {"name": "greet", "parameters": GREET}},
]


@pytest.fixture(scope="module")
def client(tools_server):
    with openai.OpenAI(base_url=f"{tools_server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def saying(*texts, **more):
    """Arguments with which the model says one of these."""
    form = {"structured_outputs": {"choice": list(texts)}}
    return {"model": MODEL, "messages": ASK, "max_tokens": 400, "temperature": 0, "extra_body": form, **more}


def whole(client, **body):
    reply = client.chat.completions.create(**body)
    return reply.choices[0].message, reply.choices[0].finish_reason


def joined(client, **body):
    """The message and the reason of a stream, put together from its deltas."""
    reasoning, content, calls, reason = "", "", {}, None
    for chunk in client.chat.completions.create(**body, stream=True):
        for choice in chunk.choices:
            assert reason is None, "nothing comes after the end"
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            content += choice.delta.content or ""
            for part in choice.delta.tool_calls or ():
                call = calls.setdefault(part.index, {"id": part.id, "name": part.function.name, "arguments": ""})
                call["arguments"] += part.function.arguments
            reason = choice.finish_reason
    assert all(call["id"] for call in calls.values())
    return reasoning, content, [(calls[i]["name"], calls[i]["arguments"]) for i in sorted(calls)], reason


def test_calls_and_thoughts(client):
    message, reason = whole(client, **saying(TEXT), tools=TOOLS)
    assert (message.content, reason) == ("Let me see.", "tool_calls")
    assert message.reasoning_content == message.reasoning == "I add."
    assert [call.function.name for call in message.tool_calls] == ["add", "greet"]
    assert json.loads(message.tool_calls[0].function.arguments) == {"a": 47, "b": 6}
    assert len({call.id for call in message.tool_calls}) == 2
    assert joined(client, **saying(TEXT), tools=TOOLS) == (
        "I add.",
        "Let me see.",
        [(call.function.name, call.function.arguments) for call in message.tool_calls],
        "tool_calls",
    )


def test_the_clients_own_stream_helper(client):
    """It puts deltas together, and is strict about their form."""
    body = saying(TEXT)
    with client.chat.completions.stream(**body, tools=TOOLS) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    assert {"content.delta", "tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert [call.function.name for call in message.tool_calls] == ["add", "greet"]


def test_one_call_at_a_time(client):
    message, _ = whole(client, **saying(TEXT), tools=TOOLS, parallel_tool_calls=False)
    assert [call.function.name for call in message.tool_calls] == ["add"]
    assert joined(client, **saying(TEXT), tools=TOOLS, parallel_tool_calls=False)[2] == [("add", '{"a": 47, "b": 6}')]


@pytest.mark.parametrize("more", [{}, {"tools": TOOLS, "tool_choice": "none"}])
def test_without_tools_calls_are_text(client, more):
    message, reason = whole(client, **saying(TEXT), **more)
    assert message.content == TEXT.partition("</think>\n\n")[2]
    assert (message.tool_calls, reason) == (None, "stop")


@pytest.mark.parametrize(
    ("stop", "more", "expected"),
    [
        (["."], {}, ("I add.", "Let me see", ".")),
        (["\n\n", "me"], {}, ("I add.", "Let ", "me")),
        (["add", "see"], {}, ("I add.", "Let me ", "see")),
        (["add", "see"], {"include_reasoning": False}, (None, "Let me ", "see")),
        (["."], {"stop_after_thought": False}, ("I add", "", ".")),
    ],
)
def test_stop_strings_count_in_the_answer(client, stop, more, expected):
    body = saying(TEXT, stop=stop)
    body["extra_body"] |= more
    reply = client.chat.completions.create(**body, tools=TOOLS).choices[0]
    thought, said, reason = expected
    assert (getattr(reply.message, "reasoning", None), reply.message.content) == (thought, said)
    assert (reply.finish_reason, reply.stop_reason) == ("stop", reason)
    assert joined(client, **body, tools=TOOLS) == (thought or "", said, [], "stop")


def test_of_a_completion_stop_strings_count_everywhere_unless_asked(tools_server):
    form = {"structured_outputs": {"choice": [TEXT]}, "max_tokens": 100, "temperature": 0, "stop": "."}
    for more, begin in (({}, 0), ({"stop_after_thought": True}, TEXT.index("</think>"))):
        reply = tools_server.client.post("/v1/completions", json={"prompt": "x", **form, **more}).json()["choices"][0]
        assert reply["text"] == TEXT[: TEXT.index(".", begin)]


def test_thoughts_can_be_left_out(client):
    body = saying(TEXT)
    body["extra_body"]["include_reasoning"] = False
    message, _ = whole(client, **body)
    assert message.content.startswith("Let me see.")
    assert not hasattr(message, "reasoning_content")


def test_a_call_that_breaks_off(client):
    message, reason = whole(client, **{**saying(TEXT[TEXT.index("<tool_call>") :]), "max_tokens": 40}, tools=TOOLS)
    assert reason == "length"
    assert '{"a": 47, "b": 6}'.startswith(message.tool_calls[0].function.arguments)


def test_a_form_where_the_template_has_begun_a_thought(tools_server, client):
    """The grammar holds from the first token on, so what comes is the answer."""
    form = {"type": "json_schema", "json_schema": {"name": "greeting", "schema": GREET}}
    body = {"model": MODEL, "messages": ASK, "response_format": form, "temperature": 0}
    body["extra_body"] = {"chat_template_kwargs": {"think": True}}
    message, _ = whole(client, **body)
    assert set(json.loads(message.content)) == {"loud"}
    assert joined(client, **body)[:2] == ("", message.content)
    asked = {"messages": ASK, "chat_template_kwargs": {"think": True}}
    tokens = tools_server.client.post("/tokenize", json=asked).json()["tokens"]
    prompt = tools_server.client.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert prompt.endswith("<think>\n"), "else this would show nothing"


@pytest.mark.parametrize("seed", range(3))
def test_a_required_call(client, seed):
    body = {"model": MODEL, "messages": ASK, "max_tokens": 300, "seed": seed, "tools": TOOLS, "tool_choice": "required"}
    message, reason = whole(client, **body, parallel_tool_calls=False)
    (call,) = message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.function.name in ("add", "greet")
    assert set(arguments) == ({"a", "b"} if call.function.name == "add" else {"loud"})
    assert (message.content, reason) == (None, "tool_calls")
    _, content, calls, reason = joined(client, **body, parallel_tool_calls=False)
    assert (content, calls, reason) == ("", [(call.function.name, call.function.arguments)], "tool_calls")


def test_a_named_call(client):
    choice = {"type": "function", "function": {"name": "add"}}
    body = {"model": MODEL, "messages": ASK, "max_tokens": 300, "temperature": 0, "tools": TOOLS, "tool_choice": choice}
    message, reason = whole(client, **body)
    (call,) = message.tool_calls
    assert (call.function.name, set(json.loads(call.function.arguments)), reason) == ("add", {"a", "b"}, "stop")
    assert joined(client, **body)[2:] == ([("add", call.function.arguments)], "stop")


def only(mode, *names):
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("seed", range(3))
def test_a_call_of_some_of_the_tools_is_required(client, seed):
    body = {"model": MODEL, "messages": ASK, "max_tokens": 300, "seed": seed, "tools": TOOLS}
    message, reason = whole(client, **body, tool_choice=only("required", "greet"), parallel_tool_calls=False)
    assert ([call.function.name for call in message.tool_calls], reason) == (["greet"], "tool_calls")


def test_some_of_the_tools_may_be_called(client):
    """The template describes no others, and a call of another is none: the rest is numbered anew."""
    body = saying(TEXT, tools=TOOLS, tool_choice=only("auto", "greet"))
    message, reason = whole(client, **body)
    assert ([call.function.name for call in message.tool_calls], reason) == (["greet"], "tool_calls")
    assert joined(client, **body)[2:] == ([("greet", message.tool_calls[0].function.arguments)], "tool_calls")
    message, reason = whole(client, **{**body, "parallel_tool_calls": False})
    assert [call.function.name for call in message.tool_calls] == ["greet"]
    short = {"model": MODEL, "messages": ASK, "max_tokens": 1}
    shown = [
        client.chat.completions.create(**short, **more).usage.prompt_tokens
        for more in (
            {"tools": TOOLS, "tool_choice": only("auto", "greet", "greet")},
            {"tools": TOOLS[1:]},
            {"tools": TOOLS},
        )
    ]
    assert shown[0] == shown[1] < shown[2]


def test_calls_and_results_reach_the_template(client, tools_server):
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 47, "b": 66}'}}
    messages = [
        *ASK,
        {"role": "assistant", "content": None, "reasoning": "I add.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "113"},
    ]
    reply = tools_server.client.post("/tokenize", json={"messages": messages, "tools": TOOLS}).json()
    prompt = tools_server.client.post("/detokenize", json={"tokens": reply["tokens"]}).json()["prompt"]
    assert '"arguments": {"a": 47, "b": 66}' in prompt, "a template wants them decoded"
    assert '"reasoning_content": "I add."' in prompt
    assert '"content": "113"' in prompt and '"tool_call_id": "call_1"' in prompt
    assert '"description": "Adds."' in prompt
    assert client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS, max_tokens=3).choices


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"tool_choice": "required"}, "there are no tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "'sub', which is not"),
        ({"tools": TOOLS, "tool_choice": {"name": "add"}}, "tool_choice must be"),
        (
            {
                "tools": [*TOOLS, {"type": "custom", "custom": {"name": "patch"}}],
                "tool_choice": {"type": "custom", "custom": {"name": "patch"}},
            },
            "tool_choice names 'patch', a tool of type 'custom'",
        ),
        (
            {"tools": TOOLS, "tool_choice": only("auto", "add", "sub")},
            "tool_choice names the function 'sub', which is not",
        ),
        (
            {"tools": TOOLS, "tool_choice": only("none", "add")},
            'tool_choice of type allowed_tools must have "mode", auto',
        ),
        ({"tools": TOOLS, "tool_choice": only("required")}, "a list of functions by name that is not empty"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice of type allowed_tools must have"),
        ({"tool_choice": only("required", "add")}, "there are no tools"),
        ({"tool_choice": only("auto", "add")}, "tool_choice names the function 'add', which is not"),
        (
            {"tools": TOOLS, "tool_choice": only("required", "add"), "response_format": {"type": "json_object"}},
            "give one of them",
        ),
        (
            {
                "tools": [*TOOLS, {"type": "custom", "custom": {"name": "patch"}}],
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [{"type": "custom", "custom": {"name": "patch"}}]},
                },
            },
            "tool_choice names 'patch', a tool of type 'custom'",
        ),
        ({"tools": [{"type": "function"}]}, r"tools\[0\] must be"),
        ({"tools": [{"type": "function", "function": {}}]}, r"tools\[0\]: function.name"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "give one of them"),
    ],
)
def test_what_does_not_go_together_is_refused(client, more, message):
    with pytest.raises(openai.BadRequestError, match=message):
        client.chat.completions.create(model=MODEL, messages=ASK, **more)

"""``/v1/responses`` with the official client, against chat completions of the same model."""

import json

import openai
import pytest
from support.answers import TEXT
from support.server import MODEL

ASK = "What is 47 + 66?"
MESSAGES = [{"role": "user", "content": ASK}]
ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "name": "add", "parameters": ADD, "strict": True},
    {"type": "function", "name": "greet", "parameters": {"type": "object", "properties": {}}, "strict": False},
]


@pytest.fixture(scope="module")
def client(tools_server):
    with openai.OpenAI(base_url=f"{tools_server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def saying(text, **more):
    form = {"structured_outputs": {"choice": [text]}}
    return {"model": MODEL, "input": ASK, "temperature": 0, "extra_body": form, **more}


def test_text(client):
    chat = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0)
    reply = client.responses.create(model=MODEL, input=ASK, temperature=0, store=False)
    assert reply.output_text == chat.choices[0].message.content
    assert (reply.status, reply.error, reply.incomplete_details) == ("completed", None, None)
    assert reply.usage.input_tokens == chat.usage.prompt_tokens
    assert reply.usage.output_tokens == chat.usage.completion_tokens
    assert reply.id.startswith("resp_")
    cut = client.responses.create(model=MODEL, input=ASK, temperature=0, max_output_tokens=2)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert cut.output[0].status == "incomplete"


def test_stop_strings_count_in_the_answer(client):
    body = saying(TEXT)
    for more, expected in (({}, ["I add.", "Let me see"]), ({"stop_after_thought": False}, ["I add"])):
        body["extra_body"] |= {"stop": ["."], **more}
        assert [item.content[0].text for item in client.responses.create(**body).output] == expected


def test_what_came_is_echoed(client):
    more = {"metadata": {"project": "x"}, "reasoning": {"effort": "low", "summary": "auto"}}
    reply = client.responses.create(model=MODEL, input=ASK, max_output_tokens=2, **more)
    assert (reply.metadata, reply.reasoning.effort, reply.reasoning.summary) == ({"project": "x"}, "low", "auto")
    assert (reply.text.format.type, reply.store) == ("text", False)
    (item,) = reply.output
    assert item.id.startswith("msg_") and reply.id.removeprefix("resp_") in item.id


def test_thoughts_text_and_calls(client):
    reply = client.responses.create(**saying(TEXT), tools=TOOLS)
    assert [item.type for item in reply.output] == ["reasoning", "message", "function_call", "function_call"]
    thought, said, add, greet = reply.output
    assert (thought.content[0].text, said.content[0].text) == ("I add.", "Let me see.")
    assert (add.name, json.loads(add.arguments)) == ("add", {"a": 47, "b": 6})
    assert (greet.name, json.loads(greet.arguments)) == ("greet", {"loud": True})
    assert add.call_id != greet.call_id


@pytest.mark.parametrize("text", [TEXT, "Just text.", "<think>only a thought"])
def test_a_stream_says_the_same(client, text):
    whole = client.responses.create(**saying(text), tools=TOOLS)
    with client.responses.stream(**saying(text), tools=TOOLS) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]

    def without_ids(items):
        return [item.model_dump(exclude={"id", "call_id", "parsed", "parsed_arguments"}) for item in items]

    bare = [{k: v for k, v in item.items() if k != "content"} for item in without_ids(final.output)]
    assert bare == [{k: v for k, v in item.items() if k != "content"} for item in without_ids(whole.output)]
    assert final.output_text == whole.output_text
    assert final.usage.output_tokens == whole.usage.output_tokens
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.id for item in done] == [item.id for item in final.output]
    added = [event.item for event in events if event.type == "response.output_item.added"]
    assert not any(getattr(item, "arguments", "") or getattr(item, "content", []) for item in added)
    parts = [event.part for event in events if event.type == "response.content_part.added"]
    assert all(part.text == "" for part in parts)
    texts = {}
    for event in events:
        if event.type.endswith(".delta"):
            texts[event.output_index] = texts.get(event.output_index, "") + event.delta
    spoken = [item.arguments if item.type == "function_call" else item.content[0].text for item in final.output]
    assert [texts[index] for index in sorted(texts)] == spoken


def test_a_forced_call_and_a_schema(client):
    body = {"model": MODEL, "input": ASK, "temperature": 0}
    reply = client.responses.create(**body, tools=TOOLS, tool_choice={"type": "function", "name": "add"})
    assert [item.type for item in reply.output] == ["function_call"]
    assert set(json.loads(reply.output[0].arguments)) == {"a"}
    form = {"format": {"type": "json_schema", "name": "sum", "schema": ADD, "strict": True}}
    assert set(json.loads(client.responses.create(**body, text=form).output_text)) == {"a"}


def test_some_of_the_tools_may_be_called(client):
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "greet"}]}
    body = {"model": MODEL, "input": ASK, "max_output_tokens": 300, "parallel_tool_calls": False}
    reply = client.responses.create(**body, tools=TOOLS, tool_choice=choice)
    assert [item.name for item in reply.output if item.type == "function_call"] == ["greet"]
    assert reply.tool_choice.model_dump() == choice


def test_items_become_messages(client, tools_server):
    """What a conversation of items costs is what the same one of messages costs, so they are one prompt."""
    call = {"name": "add", "arguments": '{"a": 47}'}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": ASK}]},
        {"type": "reasoning", "id": "rs-1", "summary": [], "content": [{"type": "reasoning_text", "text": "I add."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
        {"type": "function_call", "call_id": "call-1", **call},
        {"type": "function_call_output", "call_id": "call-1", "output": "113"},
    ]
    message = {"role": "assistant", "content": "Let me see.", "reasoning_content": "I add."}
    message["tool_calls"] = [{"id": "call-1", "type": "function", "function": call}]
    messages = [
        {"role": "system", "content": "Be brief.\n\nBe kind."},
        *MESSAGES,
        message,
        {"role": "tool", "tool_call_id": "call-1", "content": "113"},
    ]
    expected = tools_server.client.post("/tokenize", json={"messages": messages}).json()["count"]
    items = [{"role": "developer", "content": "Be kind."}, *items]
    parts = [{"role": "system", "content": [{"type": "input_text", "text": "Be"}]}, {"role": "system", "content": "it"}]
    cost = client.responses.create(model=MODEL, input=[*parts, *MESSAGES], max_output_tokens=1).usage.input_tokens
    same = [{"role": "system", "content": "Be"}, {"role": "system", "content": "it"}, *MESSAGES]
    assert cost == tools_server.client.post("/tokenize", json={"messages": same}).json()["count"]
    reply = client.responses.create(model=MODEL, instructions="Be brief.", input=items, max_output_tokens=1)
    assert reply.usage.input_tokens == expected


FUNCTION = {"type": "function"}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"previous_response_id": "resp-1"}, "keeps no responses"),
        ({"conversation": "c"}, "keeps no responses"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "keeps no responses"),
        ({"input": []}, "input is empty"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input_image"),
        (
            {"tools": [*TOOLS, {"type": "web_search"}], "tool_choice": {"type": "web_search"}},
            "tool_choice names 'web_search', a tool of",
        ),
        (
            {"tools": [{"type": "custom", "name": "patch"}], "tool_choice": {"type": "custom", "name": "patch"}},
            "tool_choice names 'patch', a tool of type 'custom'",
        ),
        (
            {
                "tools": TOOLS,
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [FUNCTION | {"name": "x"}]},
            },
            "tool_choice names the function 'x', which is not one of tools",
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "tools": [FUNCTION | {"name": "add"}]}},
            'tool_choice of type allowed_tools must have "mode"',
        ),
        (
            {
                "tools": [*TOOLS, {"type": "web_search"}],
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]},
            },
            "tool_choice names 'web_search', a tool of",
        ),
        ({"text": {"verbosity": "low"}}, "text.verbosity: not supported here"),
        ({"truncation": "auto"}, "truncation: not supported here"),
        ({"top_logprobs": 3}, "top_logprobs: not supported here"),
        ({"tools": TOOLS, "tool_choice": {"type": "file_search"}}, "tool_choice must be"),
        ({"text": {"format": {"type": "xml"}}}, "response_format must be"),
        ({"background": True}, "background"),
        ({"temperature": -1}, "temperature must be"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_here_is_refused(client, more, message, stream):
    with pytest.raises(openai.BadRequestError, match=message):
        client.responses.create(**{"model": MODEL, "input": ASK, "stream": stream, **more})

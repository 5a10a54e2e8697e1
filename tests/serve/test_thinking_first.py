"""A model that thinks does so before a forced call and before a form. This one is made of random weights: it thinks
nonsense, and its budget ends that."""

import asyncio
import json

import httpx
import pytest
from support.engines import thinking_checkpoint
from support.imported_processes import imported_processes
from support.waiting import PATIENCE

from tritonllm import AsyncEngineArgs, AsyncLLM
from tritonllm.serve.api.app import make_app
from tritonllm.serve.api.config import ServerConfig

TEMPLATE = """\
{%- for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor -%}
{%- if think is defined %}<think>{% if not think %}</think>{% endif %}{% endif -%}"""
GREET = {"type": "object", "properties": {"loud": {"type": "boolean"}}, "required": ["loud"]}
GREET["additionalProperties"] = False
TOOL = {"type": "function", "function": {"name": "greet", "parameters": GREET}}
NAMED = {"type": "function", "function": {"name": "greet"}}
FORM = {"type": "json_schema", "json_schema": {"name": "greeting", "schema": GREET}}
ASK = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 150, "temperature": 0, "thinking_token_budget": 8}


@pytest.fixture(scope="module")
def loop():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def llm(loop):
    settings = {"block_size": 4, "num_gpu_blocks_override": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    with imported_processes():
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(thinking_checkpoint()), **settings))
    yield llm
    llm.shutdown()


@pytest.fixture
def parsers():
    return {"reasoning_parser": "qwen3"}


@pytest.fixture
def ask(llm, loop, parsers):
    app = make_app(llm, ServerConfig(model_names=("m",), chat_template=TEMPLATE, **parsers))

    async def post(**more):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x", timeout=PATIENCE) as client:
            reply = await client.post("/v1/chat/completions", json={**ASK, **more})
        assert reply.status_code == 200, reply.text
        return reply

    return lambda **more: loop.run(post(**more))


def message_of(reply):
    return reply.json()["choices"][0]["message"]


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("think", [True, False])
def test_a_forced_call(ask, choice, think):
    more = {"tools": [TOOL], "tool_choice": choice, "chat_template_kwargs": {"think": think}}
    reply = ask(**more, parallel_tool_calls=False)
    message = message_of(reply)
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "greet" and set(json.loads(call["function"]["arguments"])) == {"loud"}
    assert message["content"] is None
    assert ("reasoning_content" in message) == think
    assert reply.json()["choices"][0]["finish_reason"] == ("tool_calls" if choice == "required" else "stop")
    events = [
        json.loads(line[6:])
        for line in ask(**more, parallel_tool_calls=False, stream=True).text.splitlines()
        if line[6:7] == "{"
    ]
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    thoughts = "".join(delta.get("reasoning_content") or "" for delta in deltas)
    assert thoughts == message.get("reasoning_content", "")
    arguments = [c["function"].get("arguments", "") for delta in deltas for c in delta.get("tool_calls") or ()]
    assert "".join(arguments) == call["function"]["arguments"]


def test_a_model_that_may_begin_a_thought_itself(ask):
    more = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    reply = ask(**more, logit_bias={"1": 50, "2": 60}, return_token_ids=True)  # it begins a thought, and ends it
    assert reply.json()["choices"][0]["token_ids"][:2] == [1, 2]
    assert message_of(reply)["tool_calls"][0]["function"]["name"] == "greet"
    answers = message_of(ask(**more, logit_bias={"1": -50}))
    assert "reasoning_content" not in answers and answers["tool_calls"][0]["function"]["name"] == "greet"


@pytest.mark.parametrize("think", [True, False])
def test_a_form(ask, think):
    message = message_of(ask(response_format=FORM, chat_template_kwargs={"think": think}))
    assert set(json.loads(message["content"])) == {"loud"}
    assert ("reasoning_content" in message) == think
    shown = message_of(ask(response_format=FORM, chat_template_kwargs={"think": think}, include_reasoning=False))
    assert shown == {"role": "assistant", "content": message["content"]}


PARSERS = ("qwen3_coder", "pythonic", "kimi_k2")
CALL = "<tool_call>\n<function=greet>\n<parameter=loud>\nTrue\n</parameter>\n</function>\n</tool_call>"
PLUGIN = """
from tritonllm.serve.parsing.pieces import Arguments, Content, ToolCallBegin


class Shouted:
    def __init__(self, tools):
        self.text, self.tools = "", list(tools)

    def feed(self, text):
        self.text += text
        return []

    def finish(self):
        if not self.text.startswith("!"):
            return [Content(self.text)]
        return [ToolCallBegin(0, self.tools[0]), Arguments(0, self.text[1:])]


TOOL_PARSERS = {"shouted": Shouted}
"""


@pytest.mark.parametrize("parsers", [{"tool_call_parser": "qwen3_coder", "reasoning_parser": "none"}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_between_tags_has_the_types_of_its_tool(ask, stream):
    said = {"structured_outputs": {"choice": [f"So. {CALL}"]}, "tools": [TOOL], "stream": stream}
    reply = ask(**said)
    lines = [line[6:] for line in reply.text.splitlines() if line[6:7] == "{"] if stream else [reply.text]
    choices = [choice["delta" if stream else "message"] for line in lines for choice in json.loads(line)["choices"]]
    calls = [call["function"] for message in choices for call in message.get("tool_calls") or ()]
    assert [call["name"] for call in calls if "name" in call] == ["greet"]
    assert "".join(call["arguments"] for call in calls) == '{"loud": true}'
    assert "".join(message.get("content") or "" for message in choices) == "So."


@pytest.mark.parametrize("parsers", [{"tool_call_parser": name, "reasoning_parser": "none"} for name in PARSERS])
def test_a_forced_call_has_the_form_of_the_grammar_whatever_the_parser(ask):
    reply = ask(tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    (call,) = message_of(reply)["tool_calls"]
    assert call["function"]["name"] == "greet" and set(json.loads(call["function"]["arguments"])) == {"loud"}


@pytest.mark.parametrize("parsers", [{"tool_call_parser": "kimi_k2", "reasoning_parser": "none"}])
def test_ids_of_calls_are_numbered_where_the_template_shows_them(ask):
    first = {"id": "functions.greet:0", "type": "function", "function": {"name": "greet", "arguments": "{}"}}
    messages = [
        *ASK["messages"],
        {"role": "assistant", "tool_calls": [first]},
        {"role": "tool", "tool_call_id": "functions.greet:0", "content": "hi"},
    ]
    more = {"tools": [TOOL], "tool_choice": NAMED}
    assert [message_of(ask(**more))["tool_calls"][0]["id"]] == ["functions.greet:0"]
    assert [message_of(ask(**more, messages=messages))["tool_calls"][0]["id"]] == ["functions.greet:1"]


def test_a_parser_of_ones_own(llm, loop, tmp_path):
    (tmp_path / "own.py").write_text(PLUGIN)
    parsers = {
        "tool_call_parser": "shouted",
        "reasoning_parser": "none",
        "tool_parser_plugin": str(tmp_path / "own.py"),
    }
    app = make_app(llm, ServerConfig(model_names=("m",), chat_template=TEMPLATE, **parsers))

    async def post(text):
        said = {**ASK, "structured_outputs": {"choice": [text]}, "tools": [TOOL]}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            return (await client.post("/v1/chat/completions", json=said, timeout=PATIENCE)).json()

    reply = loop.run(post('!{"loud": true}'))["choices"][0]
    assert reply["finish_reason"] == "tool_calls"
    assert reply["message"]["tool_calls"][0]["function"] == {"name": "greet", "arguments": '{"loud": true}'}
    assert loop.run(post("So."))["choices"][0]["message"]["content"] == "So."

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
def app(loop):
    settings = {"block_size": 4, "num_gpu_blocks_override": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    with imported_processes():
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(thinking_checkpoint()), **settings))
    yield make_app(llm, ServerConfig(model_names=("m",), chat_template=TEMPLATE, reasoning_parser="qwen3"))
    llm.shutdown()


@pytest.fixture
def ask(app, loop):
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

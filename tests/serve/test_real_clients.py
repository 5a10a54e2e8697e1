"""What clients send that people have: bodies that they sent to this server, without their texts, and their fields.

``recorded_requests/`` holds requests of Claude Code and Codex, recorded between them and a server with the
demonstration model: a first turn, and one after a call. Long texts, ids and most of the tools are left out.
"""

import json
from pathlib import Path

import anthropic
import openai
import pytest
from support.server import MODEL

from tritonllm.serve.api.fields import HARMLESS
from tritonllm.serve.api.messages_protocol import CountRequest, MessagesRequest
from tritonllm.serve.api.pooling_protocol import EmbeddingRequest
from tritonllm.serve.api.protocol import ChatRequest, CompletionRequest
from tritonllm.serve.api.responses_protocol import ResponsesRequest

RECORDED = sorted(Path(__file__).with_name("recorded_requests").glob("*.json"))
ASK = [{"role": "user", "content": "Say hello"}]
# What methods of the packages openai 3.57 and anthropic 2.14 take for bodies, beside what every server knows.
FIELDS = {
    ChatRequest: (
        *("metadata", "moderation", "prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        *("safety_identifier", "service_tier", "store", "user", "audio", "function_call", "functions", "modalities"),
        *("verbosity", "web_search_options"),
    ),
    ResponsesRequest: (
        *("access_programs", "background_options", "context_management", "image", "include", "max_tool_calls"),
        *("metadata", "moderation", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "store"),
        *("safety_identifier", "service_tier", "stream_options", "user", "background", "conversation", "prompt"),
        *("previous_response_id", "top_logprobs", "truncation"),
    ),
    MessagesRequest: (
        *("billing_policy", "cache_control", "container", "context_management", "diagnostics", "fallbacks"),
        *("fallback_credit_token", "inference_geo", "metadata", "service_tier", "speed", "user_profile_id"),
        *("compaction", "mcp_servers", "output_format", "thread"),
    ),
    CountRequest: ("cache_control", "speed", "user_profile_id", "context_management", "mcp_servers", "thread"),
    EmbeddingRequest: ("user",),
    CompletionRequest: ("best_of", "suffix", "user"),
}


def events_of(text):
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda path: path.stem)
@pytest.mark.parametrize("which", ["server", "tools_server"])
def test_recorded_requests_are_answered(request, recorded, which):
    """By a template that takes any message, and by a plain one."""
    client = request.getfixturevalue(which).client
    sent = json.loads(recorded.read_text())
    limit = "max_tokens" if "messages" in sent["body"] else "max_output_tokens"
    answer = client.post(sent["path"], json={**sent["body"], limit: 8}, headers=sent["headers"])
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    kinds = [event["type"] for event in events_of(answer.text)]
    begin, end = ("message_start", "message_stop") if "messages" in sent["body"] else ("response.created", None)
    assert kinds[0] == begin and "error" not in kinds
    assert kinds[-1] in (end, "response.completed", "response.incomplete")


def test_what_was_recorded_has_what_clients_were_refused_for():
    bodies = {path.stem: json.loads(path.read_text())["body"] for path in RECORDED}
    claude, codex = bodies["claude_code_first_turn"], bodies["codex_first_turn"]
    assert claude["context_management"] and claude["messages"][-1]["role"] == "system"
    assert {"web_search", "namespace"} <= {tool["type"] for tool in codex["tools"]}
    assert codex["client_metadata"]
    assert bodies["claude_code_tool_result"]["messages"][-1]["content"][0]["type"] == "tool_result"
    assert bodies["codex_tool_result"]["input"][-1]["type"] == "function_call_output"


@pytest.mark.parametrize("kind", FIELDS, ids=lambda kind: kind.__name__)
def test_fields_of_the_official_packages_are_known(kind):
    """None of them is a warning about an unknown field."""
    unknown = set(FIELDS[kind]) - kind.model_fields.keys() - kind.refused.keys() - HARMLESS
    assert not unknown


def test_openais_package(server):
    more = {
        "store": True,
        "moderation": {"model": "omni-moderation-latest"},
        "prompt_cache_options": {"mode": "implicit"},
        "prompt_cache_key": "x",
        "safety_identifier": "x",
        "metadata": {"a": "b"},
        "prediction": {"type": "content", "content": "x"},
    }
    custom = {"type": "custom", "custom": {"name": "patch", "description": "text"}}
    function = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        chat = {
            "model": MODEL,
            "messages": ASK,
            "max_completion_tokens": 4,
            "tools": [custom, function],
            "extra_body": more,
        }
        whole = client.chat.completions.create(**chat, temperature=0)
        options = {"include_usage": True, "include_obfuscation": False}
        parts = list(client.chat.completions.create(**chat, temperature=0, stream=True, stream_options=options))
        text = "".join(choice.delta.content or "" for part in parts for choice in part.choices)
        assert text == whole.choices[0].message.content and parts[-1].usage == whole.usage
        response = {"model": MODEL, "input": "Say hello", "max_output_tokens": 4, "temperature": 0}
        tools = [{"type": "web_search"}, {"type": "custom", "name": "patch"}]
        reply = client.responses.create(**response, tools=tools, extra_body={**more, "context_management": []})
        assert reply.id.startswith("resp_") and reply.metadata == {"a": "b"}


def test_anthropics_package(server):
    more = {"context_management": {"edits": []}, "fallbacks": "default", "metadata": {"user_id": "0"}}
    tools = [{"type": "web_search_20250305", "name": "web_search"}, {"name": "f", "input_schema": {"type": "object"}}]
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        messages = [*ASK, *ASK, {"role": "system", "content": "Be brief."}]
        body = {"model": MODEL, "messages": messages, "max_tokens": 4, "tools": tools}
        assert client.messages.create(**body, extra_body=more).id.startswith("msg_")
        with pytest.raises(anthropic.BadRequestError, match="thread: not supported here: this server keeps no"):
            client.messages.create(**body, extra_body={"thread": {"type": "create"}})

"""What becomes of fields that an API does not know: ignored, logged and counted, or refused."""

import json
import re

import pytest
from support.server import MODEL, running_server

from tritonllm.serve.api.admin_api import OrderBody
from tritonllm.serve.api.fields import GENERATION, HARMLESS, MOST_NAMES, OTHERS, POOLING, PROMPT, IgnoredFields, shown
from tritonllm.serve.api.messages_protocol import CountRequest
from tritonllm.serve.api.protocol import Body, ChatRequest, CompletionRequest

ASK = [{"role": "user", "content": "Hi"}]
BODIES = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 1},
    "/v1/chat/completions": {"messages": ASK, "max_tokens": 1},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 1},
    "/v1/messages": {"model": MODEL, "messages": ASK, "max_tokens": 1},
    "/v1/messages/count_tokens": {"model": MODEL, "messages": ASK},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [5, 6]},
}
CUSTOM = [{"type": "web_search_x", "name": "search"}, {"type": "namespace", "name": "more", "tools": []}]


def bodies(kind=Body):
    """The classes that declare fields of requests for answers."""
    for one in kind.__subclasses__():
        if not issubclass(one, OrderBody):
            yield one
            yield from bodies(one)


def counted(server):
    text = server.client.get("/metrics").text
    found = re.findall(r'^tritonllm:ignored_fields_total{.*field="([^"]*)".*} (\S+)$', text, re.MULTILINE)
    return {field: float(count) for field, count in found}


@pytest.fixture(scope="module")
def strict():
    with running_server("--strict-fields") as running:
        yield running


@pytest.mark.parametrize("path", BODIES)
def test_what_cannot_change_an_answer_or_is_unknown_is_ignored(server, path):
    name = f"odd_{path.strip('/').replace('/', '_')}"
    more = {name: {"a": [1]}, "user": "x", "service_tier": "auto", "nothing": None}
    before = counted(server)
    for _ in range(2):
        answer = server.client.post(path, json={**BODIES[path], **more})
        assert answer.status_code == 200, answer.text
    after = counted(server)
    for field in (name, "user", "service_tier"):
        assert after[field] == before.get(field, 0) + 2
        assert server.text.count(f"the field '{field}'") == 1, "a line of the log for each field"
    assert "nothing" not in after, "null asks for nothing"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"])
def test_kinds_of_tools_that_are_not_here_are_left_out(server, path):
    before = counted(server)
    with_tools = server.client.post(path, json={**BODIES[path], "tools": CUSTOM})
    assert with_tools.status_code == 200, with_tools.text
    assert counted(server)["tools.namespace"] == before.get("tools.namespace", 0) + 1
    wrong = server.client.post(path, json={**BODIES[path], "tools": [{"type": 3}]})
    assert (wrong.status_code, "tools[0].type must be text" in wrong.text) == (400, True)


def test_they_are_not_shown_to_the_model(tools_server):
    function = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    counts = [
        tools_server.client.post("/tokenize", json={"messages": ASK, "tools": tools}).json()["count"]
        for tools in ([function], [*CUSTOM, function], CUSTOM, [])
    ]
    assert counts[0] == counts[1] > counts[2] == counts[3]


def test_fields_within_fields(server):
    before = counted(server)
    for path, more, name in (
        (
            "/v1/chat/completions",
            {"stream": True, "stream_options": {"include_obfuscation": False}},
            "stream_options.include_obfuscation",
        ),
        ("/v1/responses", {"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        ("/v1/messages", {"thinking": {"type": "disabled", "display": "omitted"}}, "thinking.display"),
        ("/v1/messages", {"output_config": {"odd": 1}}, "output_config.odd"),
        ("/v1/responses", {"text": {"odd": 1}}, "text.odd"),
    ):
        answer = server.client.post(path, json={**BODIES[path], **more})
        assert (answer.status_code, counted(server)[name]) == (200, before.get(name, 0) + 1), answer.text


@pytest.mark.parametrize("path", BODIES)
def test_strict_fields_refuse_them(strict, path):
    for more, name in (({"odd": 1}, "odd"), ({"user": "x"}, "user"), ({"\x1b[31m" + "x" * 99: 1}, "\\x1b[31m")):
        answer = strict.client.post(path, json={**BODIES[path], **more})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith(f"unknown field '{name}"), answer.text
        assert len(answer.text) < 400
    nothing = {"odd": None, "truncation": "disabled", "conversation": None}
    assert strict.client.post(path, json={**BODIES[path], **nothing}).status_code == 200


def test_strict_fields_refuse_what_is_within_and_tools(strict):
    chat = {**BODIES["/v1/chat/completions"], "stream": True}
    for more, param in (
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"tools": CUSTOM}, "tools.web_search_x"),
    ):
        answer = strict.client.post("/v1/chat/completions", json={**chat, **more})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert not counted(strict)


def test_a_stranger_fills_neither_log_nor_metrics(caplog):
    counts: dict[str, int] = {}

    def count(label):
        counts[label] = counts.get(label, 0) + 1

    fields = IgnoredFields(count)
    with caplog.at_level("INFO", logger="tritonllm"):
        for i in range(20):
            fields.note([f"a{i}-{j}" + "\n\x1b" * 99 for j in range(20)], "/x")
        fields.note(["user", "user", "a0-0" + "\n\x1b" * 99], "/x")
    assert len(counts) == MOST_NAMES + 2
    assert counts["user"] == 1, "what is known has its place, and counts once a request"
    assert counts[OTHERS] == 17, "once a request"
    assert counts[shown("a0-0" + "\n\x1b" * 99)] == 2
    assert len(caplog.records) == MOST_NAMES + 2
    for text in (*counts, *(record.getMessage() for record in caplog.records)):
        assert text.isprintable() and text.isascii() and len(text) < 200


def test_names_of_any_kind_are_labels(server):
    body = {**BODIES["/v1/completions"], 'quote"\\\n\u00e9': 1, "": 2}
    answer = server.client.post(
        "/v1/completions", content=json.dumps(body), headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 200
    assert server.client.get("/metrics").status_code == 200
    assert "" in counted(server)


def test_what_one_api_has_another_one_ignores_only_where_it_cannot_change_the_answer():
    """A field that comes to one API needs a decision for the others."""
    declared = {f"{kind.path}{name}" for kind in bodies() for name in kind.model_fields}
    own = {  # that say what is asked or computed in one API, and that no client takes for another's
        *("input", "text_1", "text_2", "data_1", "data_2", "queries", "query", "top_n", "return_documents", "tokens"),
        *("model", "stream", "return_token_strs", "reasoning.effort", "text.format", "thinking.type"),
        *("thinking.budget_tokens", "output_config.effort", "output_config.format", "stream_options.include_usage"),
        "stream_options.continuous_usage_stats",
    }
    known = PROMPT.keys() | GENERATION.keys() | POOLING.keys() | HARMLESS
    assert declared - own <= known, sorted(declared - own - known)
    assert not HARMLESS & (PROMPT.keys() | GENERATION.keys() | POOLING.keys())


@pytest.mark.parametrize(("field", "neutral"), [("best_of", 1), ("functions", []), ("suffix", ""), ("tools", [])])
def test_values_that_ask_for_nothing_are_no_errors(field, neutral):
    body = CompletionRequest(**{**BODIES["/v1/completions"], field: neutral})
    assert list(body.ignored()) == []
    with pytest.raises(ValueError, match=f"{field}: not supported here"):
        CompletionRequest(**{**BODIES["/v1/completions"], field: ["x"]})


def test_whoever_counts_tokens_may_say_how_to_sample():
    assert CountRequest(**BODIES["/v1/messages/count_tokens"], temperature=1.0, stop_sequences=["x"])
    with pytest.raises(ValueError, match="mcp_servers: not supported here"):
        CountRequest(**BODIES["/v1/messages/count_tokens"], mcp_servers=[{"url": "x"}])
    assert list(ChatRequest(messages=ASK, moderation={"x": 1}).ignored()) == ["moderation"]

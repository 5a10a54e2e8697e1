"""What no well-behaved client sends, and what an operator asks: status and shape of the answers."""

import json
import re
import socket
import subprocess
import sys

import httpx
import psutil
import pytest
from support.server import MODEL, ROOT, eventually, running_server
from support.waiting import PATIENCE

from tritonllm.serve.api.messages_protocol import MessagesRequest
from tritonllm.serve.api.pooling_protocol import EmbeddingRequest, RerankRequest
from tritonllm.serve.api.protocol import ChatRequest, CompletionRequest, GenerateRequest, TokenizeRequest
from tritonllm.serve.api.responses_protocol import ResponsesRequest

STORY = {"model": MODEL, "prompt": "There was a fox named", "max_tokens": 4, "temperature": 0}
PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/generate", "/tokenize", "/detokenize"]
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
JSON = {"Content-Type": "application/json"}


def error_of(response):
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("completions", {**STORY, "prompt": ""}, "prompt is empty"),
        ("completions", {**STORY, "prompt": []}, "prompt is empty"),
        ("completions", {**STORY, "prompt": [[]]}, "prompt is empty"),
        ("completions", {**STORY, "prompt": ["a", "", "b"]}, "prompt[1] is empty"),
        ("completions", {**STORY, "prompt": ["a", "word " * 5000]}, "prompt[1] has "),
        ("completions", {**STORY, "prompt": [[1], [10**9]]}, "prompt[1]: prompt_token_ids must be integers"),
        (
            "completions",
            {**STORY, "prompt": [1, "a"]},
            "prompt: must be a text, token ids, or a list of",
        ),
        ("completions", {**STORY, "prompt": ["a", [1]]}, "prompt: must be a text, token ids, or"),
        ("completions", {**STORY, "prompt": [10**9]}, "prompt_token_ids must be integers"),
        ("completions", {**STORY, "prompt": "a\ud800"}, "not valid Unicode"),
        ("completions", {**STORY, "prompt": ["a", "b\ud800"]}, "prompt[1] is not valid Unicode"),
        (
            "completions",
            {**STORY, "prompt": ["a", "b\ud800"], "add_special_tokens": False},
            "prompt[1] is not valid Unicode",
        ),
        ("completions", {**STORY, "prompt": "word " * 5000}, "max_model_len"),
        ("completions", {**STORY, "max_tokens": 0}, "max_tokens must be"),
        ("completions", {**STORY, "max_tokens": "4"}, "max_tokens"),
        ("completions", {**STORY, "n": 1000}, "n: "),
        ("completions", {**STORY, "top_p": float("nan")}, "top_p must be"),
        ("completions", {**STORY, "stop": [""]}, "stop must be"),
        ("completions", {**STORY, "logit_bias": {"x": 1.0}}, "logit_bias"),
        ("completions", {**STORY, "logit_bias": {str(i): 1.0 for i in range(1500)}}, "1024"),
        ("completions", {**STORY, "priority": 3}, "priority"),
        ("completions", {**STORY, "priority": -(2**63) - 1}, "priority: Input should be greater"),
        ("completions", {**STORY, "max_tokens": 10**30}, "max_tokens: Input should be less"),
        ("completions", {**STORY, "\ud800": 1}, "unicode string"),
        ("completions", {**STORY, "response_format": {"type": "xml"}}, "response_format"),
        ("completions", {**STORY, "structured_outputs": {"jason": "{}"}}, "structured_outputs"),
        ("completions", {**STORY, "structured_outputs": {"regex": "("}}, "structured_outputs"),
        ("completions", {**STORY, "structured_outputs": {}}, "structured_outputs: give exactly one of"),
        (
            "completions",
            {**STORY, "structured_outputs": {"grammar": "root ::= root"}},
            "no text of its rule 'root' ever",
        ),
        ("completions", {**STORY, "structured_outputs": {"json": {"$ref": "http://a/b"}}}, "'$ref' must name a schema"),
        ("completions", {**STORY, "structured_outputs": {"json": {"type": "object", "required": 3}}}, "'required'"),
        ("completions", {**STORY, "tools": [{}]}, "tools: not supported here"),
        ("chat/completions", {**CHAT, "enable_thinking": False}, "enable_thinking: not supported here: use chat_templ"),
        ("chat/completions", {**CHAT, "guided_json": {}}, "guided_json: not supported here: use structured_outputs"),
        ("completions", {"model": MODEL}, "prompt: Field required"),
        ("completions", {**STORY, "prompt": None}, "prompt: must be"),
        ("completions", {**STORY, "prompt": 5}, "prompt: must be"),
        ("chat/completions", {"model": MODEL, "messages": []}, "messages"),
        ("chat/completions", {"model": MODEL, "messages": [{"content": "x"}]}, "role"),
        ("chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "\udfff"}]}, "Unicode"),
        ("chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": 5}]}, "content"),
        ("chat/completions", {"model": MODEL, "messages": [{"role": 5, "content": ""}]}, "messages[0]['role']"),
        ("chat/completions", {**CHAT, "max_completion_tokens": 0}, "max_completion_tokens: "),
        ("responses", {"model": MODEL, "input": "x", "max_output_tokens": -1}, "max_output_tokens: "),
        (
            "chat/completions",
            {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "chat_template": "{{ 1 }}"},
            "takes none from requests",
        ),
        (
            "chat/completions",
            {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "top_logprobs": 2},
            "logprobs=true",
        ),
        ("completions", {**STORY, "logprobs": 21}, "logprobs=21 is more than max_logprobs=20"),
        ("completions", {**STORY, "logprobs": -1}, "logprobs=-1 is more than max_logprobs=20"),
        ("completions", {**STORY, "logprobs": -2}, "logprobs: Input should be greater"),
        ("chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs=21 is more than max_logpr"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_body_is_400_and_names_the_fault(server, path, body, message, stream):
    text = json.dumps({**body, "stream": stream} if stream else body)
    response = server.client.post(f"/v1/{path}", content=text, headers=JSON)
    assert response.status_code == 400, response.text
    assert message in error_of(response)["message"]


@pytest.mark.parametrize(
    ("form", "blanks"),
    [
        ({"response_format": {"type": "json_object"}}, " "),
        ({"structured_outputs": {"json_object": True}}, r" |\n {0,32}|\n\t{0,8}"),
    ],
)
def test_objects_are_not_filled_with_blanks(server, form, blanks):
    """A small model would fill its answer with them to the last token."""
    body = {**CHAT, **form, "max_tokens": 100, "temperature": 1, "seed": 1, "n": 4}
    answers = server.client.post("/v1/chat/completions", json=body).json()["choices"]
    for answer in answers:
        outside = re.sub(r'"(\\.|[^"\\])*("|$)', '""', answer["message"]["content"])
        assert all(re.fullmatch(blanks, run) for run in re.findall(r"\s+", outside)), answer


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "enum": [1, 2]}, "b": {"type": "array", "items": {"$ref": "#/$defs/x"}}},
    "required": ["a"],
    "$defs": {"x": {"type": "string", "maxLength": 3}},
}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"name": "f", "description": "d", "parameters": SCHEMA}
SAID = [
    {"role": "system", "content": [{"type": "text", "text": "s"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "t"},
    {"role": "tool", "tool_call_id": "1", "content": "r"},
]
ITEMS = [
    {"role": "system", "content": "s"},
    {"role": "developer", "content": [{"type": "input_text", "text": "d"}]},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "a"}]},
    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": "x"},
]
BLOCKS = [
    {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}]},
    {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "z"}]}],
    },
]
FORM = {"type": "json_schema", "schema": SCHEMA}
RICH = {  # what has as many places as can be for a wrong value
    "/v1/chat/completions": [
        {"messages": SAID, "tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"},
        {"messages": SAID[:1], "response_format": {"type": "json_schema", "json_schema": {"name": "n", **FORM}}},
    ],
    "/v1/responses": [
        {"input": ITEMS, "tools": [{"type": "function", **TOOL}], "tool_choice": {"type": "function", "name": "f"}},
        {"input": "x", "reasoning": {"effort": "low"}, "text": {"format": {"name": "n", **FORM}}},
    ],
    "/v1/messages/count_tokens": [
        {
            "messages": BLOCKS,
            "system": [{"type": "text", "text": "s"}],
            "tools": [{"name": "f", "input_schema": SCHEMA}],
            "tool_choice": {"type": "tool", "name": "f"},
            "thinking": {"type": "enabled", "budget_tokens": 9},
        },
    ],
    "/v1/messages": [{"messages": BLOCKS, "max_tokens": 1, "output_config": {"effort": "low", "format": FORM}}],
}


def places(value, path=()):
    """The keys that lead to each value within."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield (*path, key)
        yield from places(one, (*path, key))


@pytest.mark.parametrize(("path", "number"), [(path, i) for path, bodies in RICH.items() for i in range(len(bodies))])
def test_no_wrong_value_anywhere_is_our_fault(server, path, number):
    """Each place of a body, with a value of each kind: an answer or a complaint, and the server goes on."""
    limit = {"/v1/responses": {"max_output_tokens": 1}, "/v1/chat/completions": {"max_tokens": 1}}.get(path, {})
    body = {"model": MODEL, **limit, **RICH[path][number]}
    assert server.client.post(path, json=body).status_code == 200
    for place in places(RICH[path][number]):
        for value in (None, True, 7, "\ud800", [7], {"type": ["x"]}):
            changed = json.loads(json.dumps(body))
            within = changed
            for key in place[:-1]:
                within = within[key]
            within[place[-1]] = value
            response = server.client.post(path, content=json.dumps(changed), headers=JSON)
            assert response.status_code in (200, 400), (place, value, response.text)
            assert response.status_code == 200 or response.json()["error"]["message"]
    assert server.client.get("/health").status_code == 200


@pytest.mark.parametrize("depth", [400, 900, 5000])
def test_deep_nesting_is_400(server, depth):
    """Where the parser of JSON lets it through, templates, grammars and messages to the engine must not break."""
    deep, objects = "[" * depth + "]" * depth, '{"items":' * depth + "{}" + "}" * depth
    ask = '"messages": [{"role": "user", "content": "x"}], "max_tokens": 1'
    tools = f'"tools": [{{"type": "function", "function": {{"name": "f", "parameters": {objects}}}}}]'
    for path, body in (
        ("/v1/chat/completions", f"{{{ask}, {tools}}}"),
        ("/v1/chat/completions", f'{{{ask}, {tools}, "tool_choice": "required"}}'),
        ("/v1/chat/completions", f'{{"messages": [{{"role": "user", "content": "x", "more": {deep}}}]}}'),
        ("/v1/chat/completions", f'{{{ask}, "structured_outputs": {{"json": {objects}}}}}'),
        ("/v1/responses", f'{{"input": [{{"role": "user", "content": {deep}}}]}}'),
        ("/v1/messages", f'{{"model": "{MODEL}", {ask}, "output_config": {{"format": {objects}}}}}'),
        ("/tokenize", f'{{"messages": [{{"role": "user", "content": "x", "more": {deep}}}]}}'),
    ):
        response = server.client.post(path, content=body, headers=JSON)
        assert response.status_code == 400 or (response.status_code == 200 and depth == 400), (body[:99], response.text)
    assert server.client.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "the body is missing"),
        (b"{", "the body is not valid JSON"),
        (b"\xff\xfe", "the body is not valid JSON"),
        (b'{"prompt": "\xe9"}', "the body is not UTF-8"),
        (b"[" * 90_000, "nested too deep"),
        (b"null", "the body must be a JSON object"),
        (b'"text"', "the body must be a JSON object"),
        (b"[]", "the body must be a JSON object"),
        (b"\x00", "the body is not"),
    ],
)
@pytest.mark.parametrize("path", PATHS)
def test_what_is_no_object_is_400(server, path, body, why):
    response = server.client.post(path, content=body, headers=JSON)
    assert response.status_code == 400, response.text
    assert why in error_of(response)["message"]


@pytest.mark.parametrize(
    ("path", "kind", "body"),
    [
        ("/v1/completions", CompletionRequest, {**STORY, "max_tokens": 1}),
        ("/v1/chat/completions", ChatRequest, {**CHAT, "max_tokens": 1}),
        ("/v1/responses", ResponsesRequest, {"input": "x", "max_output_tokens": 1}),
        ("/generate", GenerateRequest, {"prompt": "x", "max_tokens": 1}),
        ("/v1/messages", MessagesRequest, {**CHAT, "max_tokens": 1}),
        ("/v1/embeddings", EmbeddingRequest, {"input": "x"}),
        ("/rerank", RerankRequest, {"query": "x", "documents": ["y"]}),
        ("/tokenize", TokenizeRequest, {"prompt": "x"}),
    ],
)
def test_null_is_the_default_of_every_field(server, path, kind, body):
    nothing = dict.fromkeys(name for name, field in kind.model_fields.items() if not field.is_required())
    assert server.client.post(path, json={**nothing, **body}).status_code == 200


def test_a_long_body_is_413(server):
    too_long = json.dumps({**STORY, "prompt": "a" * 200_000})
    response = server.client.post("/v1/completions", content=too_long, headers=JSON)
    assert response.status_code == 413
    in_pieces = (b"x" * 10_000 for _ in range(20))
    response = server.client.post("/v1/completions", content=in_pieces, headers=JSON)
    assert (response.status_code, error_of(response)["code"]) == (413, "body_too_large")


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2.0}, "top_p"),
        ({"n": 0}, "n"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ({"stop": [""]}, "stop"),
        ({"messages": [{"role": 3, "content": "Hi"}]}, "messages"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools"),
        ({"logit_bias": {"-4": 1.0}}, "logit_bias"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"messages": [{"role": "user", "content": "Hi " * 3000}]}, "messages"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"repetition_detection": {"max_pattern_size": -1}}, "repetition_detection"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "response_format"),
        ({"use_beam_search": True, "n": 100}, "n"),
    ],
)
def test_an_error_says_which_field_it_is_about(server, wrong, param):
    """As OpenAI's does, for programs: whoever has found it."""
    answer = server.client.post("/v1/chat/completions", json=chat_body() | wrong)
    assert (answer.status_code, error_of(answer)["param"]) == (400, param), answer.text


LONG = "yes " * 3000


@pytest.mark.parametrize(
    ("path", "body", "param", "begins"),
    [
        ("/v1/completions", {"prompt": "x", "best_of": 2}, "best_of", "best_of: "),
        ("/v1/completions", {"prompt": "x", "suffix": "y"}, "suffix", "suffix: "),
        ("/v1/completions", {"prompt": [-1]}, "prompt", "prompt_token_ids must be"),
        ("/v1/completions", {"prompt": ["x", LONG]}, "prompt", "prompt[1] has "),
        ("/v1/responses", {"input": LONG}, "input", "prompt has "),
        ("/v1/responses", {"input": "x", "prompt": {"id": "y"}}, "prompt", "prompt: "),
        ("/v1/responses", {"input": [{"role": "user", "content": 3}]}, "input", "messages[0]"),
        ("/v1/responses", {"input": "x", "text": {"format": {"type": "y"}}}, "text", "response_format must be"),
        ("/v1/embeddings", {"input": []}, "input", "input is empty"),
        ("/v1/embeddings", {"input": LONG}, "input", "input has "),
        ("/v1/embeddings", {"input": [[1], [-1]]}, "input", "input[1]: prompt_token_ids must be"),
        ("/v1/embeddings", {"input": "x", "dimensions": 0}, "dimensions", "dimensions must be"),
        ("/v1/embeddings", {"input": "x", "normalize": True, "use_activation": False}, "normalize", "normalize and"),
        ("/v1/embeddings", {"input": "x", "priority": 2**70}, "priority", "priority: "),
        ("/pooling", {"input": "x", "task": "classify"}, "task", "task="),
        ("/classify", {"input": "x"}, None, "task="),  # no field of this body
        ("/score", {"text_1": "x"}, "text_1", "text_1 and text_2, "),
        ("/score", {"text_1": "x", "text_2": ["y", LONG]}, "text_2", "text_2[1] has "),
        ("/rerank", {"query": "x", "documents": ["y", LONG]}, "documents", "documents[1] has "),
        ("/rerank", {"query": LONG, "documents": ["y"]}, "query", "query has "),
        ("/tokenize", {}, "prompt", "prompt and messages"),
        ("/detokenize", {"tokens": [-1]}, "tokens", "tokens must be"),
    ],
)
def test_errors_of_every_path_name_its_own_fields(server, path, body, param, begins):
    answer = server.client.post(path, json=body)
    assert (answer.status_code, error_of(answer)["param"]) == (400, param), answer.text
    assert error_of(answer)["message"].startswith(begins)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": LONG}),
        ("/v1/completions", {"prompt": ["x", LONG]}),
        ("/v1/completions", {"prompt": [5] * 3000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}], "stream": True}),
        ("/v1/responses", {"input": LONG}),
        ("/v1/embeddings", {"input": ["x", LONG]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 18_000}]}),
    ],
)
def test_a_prompt_that_is_too_long_has_a_code(server, path, body):
    """By which clients know that they must shorten the conversation."""
    answer = server.client.post(path, json=body)
    assert (answer.status_code, error_of(answer)["code"]) == (400, "context_length_exceeded"), answer.text
    assert error_of(server.client.post(path, json={**body, "model": 3}))["code"] is None


def test_no_page_of_a_browser_may_ask_by_default(server):
    headers = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}
    assert server.client.options("/v1/chat/completions", headers=headers).status_code == 405
    answer = server.client.get("/v1/models", headers=headers)
    assert not any(name.startswith("access-control") for name in answer.headers)


def test_other_statuses(server):
    assert server.client.post("/v1/completions", content="prompt=x").status_code == 415
    response = server.client.get("/v1/completions")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert error_of(server.client.get("/v1/nothing"))["type"] == "not_found_error"
    assert server.client.get("/v1/models/gpt-9").status_code == 404


def test_bytes_that_are_no_http(server):
    host, _, port = server.url.removeprefix("http://").partition(":")
    for data in (b"\x16\x03\x01\x00\xa5\x01", b"GET / HTTP/9\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\nContent-Le"):
        with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
            connection.sendall(data)
    assert server.client.post("/v1/completions", json=STORY).status_code == 200


def test_a_head_that_does_not_end(server):
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nx-long: " + b"a" * 70_000)
        assert connection.recv(1000).startswith(b"HTTP/1.1 431 ")
    assert server.client.get("/health").status_code == 200


def test_request_ids_go_in_and_out(server):
    response = server.client.post("/v1/completions", json=STORY, headers={"X-Request-Id": "my-id.1"})
    assert response.headers["x-request-id"] == "my-id.1"
    assert response.json()["id"] == "cmpl-my-id.1"
    response = server.client.post("/v1/completions", json=STORY, headers={"X-Request-Id": "a b\tc"})
    assert response.headers["x-request-id"] not in ("", "a b\tc")
    eventually(lambda: "id=my-id.1" in server.text)
    assert STORY["prompt"] not in server.text, "the log holds no prompts"


def test_one_id_may_be_used_by_two_requests_at_once(server):
    with httpx.Client(base_url=server.url, headers={"X-Request-Id": "twice"}, timeout=PATIENCE) as client:
        body = {**STORY, "max_tokens": 200, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as first:
            lines = first.iter_lines()  # httpx ends the stream when nobody holds this
            next(lines)
            assert client.post("/v1/completions", json=STORY).status_code == 200
    eventually(server.is_idle)


def test_tokenize_and_detokenize(server, llm):
    text = "There was a fox, 1 + 1"
    answer = server.client.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert answer["tokens"] == llm.get_tokenizer().encode(text)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert server.client.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": text}
    messages = [{"role": "user", "content": "Hi"}]
    answer = server.client.post("/tokenize", json={"messages": messages}).json()
    assert answer["tokens"] == llm.render_chat(messages)["prompt_token_ids"]
    assert server.client.post("/tokenize", json={"prompt": text, "messages": messages}).status_code == 400
    assert "tokens must be" in error_of(server.client.post("/detokenize", json={"tokens": [-1]}))["message"]
    wrong = server.client.post("/tokenize", json={"messages": messages, "tools": [{}]})
    assert error_of(wrong)["message"].startswith("tools[0] must be")


def test_status_pages(server):
    assert server.client.get("/health").json() == {"status": "ok"}
    assert server.client.get("/ready").json() == {"status": "ready"}
    assert "version" in server.client.get("/version").json()
    assert server.client.get("/openapi.json").status_code == 200


def test_metrics_count_what_happened(server):
    names = {
        "vllm:prompt_tokens_total": 5,
        "vllm:generation_tokens_total": 4,
        "vllm:request_success_total": 1,
        "vllm:time_to_first_token_seconds_count": 1,
        "vllm:inter_token_latency_seconds_count": 3,
        "vllm:e2e_request_latency_seconds_count": 1,
        "vllm:prefix_cache_queries_total": 5,
        "tritonllm:compilations_after_ready_total": 0,
        "vllm:spec_decode_num_drafts_total": 0,
        "vllm:spec_decode_num_draft_tokens_total": 0,
        "vllm:spec_decode_num_accepted_tokens_total": 0,
    }
    prompt = {**STORY, "prompt": [100, 101, 102, 103, 104], "ignore_eos": True, "stream": True}
    eventually(server.is_idle)
    before = {name: server.metric(name) for name in names}
    assert server.client.post("/v1/completions", json=prompt).status_code == 200
    eventually(server.is_idle)
    assert {name: server.metric(name) - before[name] for name in names} == names


def test_metrics_of_a_requests_times_add_up(server):
    parts = [f"vllm:request_{name}_time_seconds_sum" for name in ("queue", "prefill", "decode", "inference")]
    names = [*parts, "vllm:e2e_request_latency_seconds_sum", "tritonllm:step_seconds_total"]
    eventually(server.is_idle)
    before = [server.metric(name) for name in names]
    body = {**STORY, "n": 2, "max_tokens": 20, "ignore_eos": True}
    assert server.client.post("/v1/completions", json=body).status_code == 200
    eventually(server.is_idle)
    queue, prefill, decode, inference, whole, steps = (
        server.metric(name) - old for name, old in zip(names, before, strict=True)
    )
    assert queue >= 0 and prefill > 0 and decode > 0
    assert inference == pytest.approx(prefill + decode) and whole == pytest.approx(queue + inference)
    assert 0 < steps < whole + 1
    assert 0 < server.metric("tritonllm:step_host_seconds_total") <= server.metric("tritonllm:step_seconds_total")


def test_keys_limits_and_a_unix_socket(tmp_path):
    """A server of its own, with every option that the others leave out."""
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0]['content'] }}")
    path = tmp_path / "socket"
    options = ["--uds", str(path), "--chat-template", str(template), "--max-num-seqs", "1", "--max-queue", "1"]
    options += ["--allowed-origins", "https://chat.example", "http://localhost:3000"]
    with running_server(*options, environment={"TRITONLLM_API_KEY": "secret"}) as server:
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://server", timeout=PATIENCE) as client:
            server.client = client
            eventually(server._answers)
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
                response = client.post("/v1/completions", json=STORY, headers=headers)
                assert (response.status_code, error_of(response)["code"]) == (401, "invalid_api_key")
            asked = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}  # Anthropic's way to send a key
            answer = client.post("/v1/messages/count_tokens", json=asked, headers={"X-Api-Key": "wrong"}).json()
            assert answer["error"]["type"] == "authentication_error"
            answer = client.post("/v1/messages/count_tokens", json=asked, headers={"X-Api-Key": "secret"}).json()
            assert answer["input_tokens"] > 0
            check_browsers(client)
            client.headers["Authorization"] = "Bearer secret"
            long = {**STORY, "max_tokens": 2000, "ignore_eos": True, "stream": True}
            with client.stream("POST", "/v1/completions", json=long) as one:
                lines = one.iter_lines()
                next(lines)
                with pytest.raises(httpx.ReadTimeout):  # it waits for its turn, and its client gives up
                    client.post("/v1/chat/completions", json=chat_body(stream=True), timeout=0.5)
                eventually(lambda: server.metric("vllm:num_requests_waiting") == 0)
                refused = client.post("/v1/completions", json={**STORY, "n": 2})
                assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
                assert error_of(refused)["code"] == "queue_full"
                assert client.post("/v1/completions", json={**STORY, "n": 3}).status_code == 400, "never fits"
            eventually(server.is_idle)
            reply = client.post("/tokenize", json={"messages": [{"role": "user", "content": "just this"}]}).json()
            assert client.post("/detokenize", json={"tokens": reply["tokens"]}).json() == {"prompt": "just this"}
        server.client = None
        server.process.terminate()
        assert server.wait() == 0
    assert not path.exists()


def check_browsers(client):
    """Pages of the allowed origins may ask, and read why they were refused; a browser first asks without the key."""
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, content-type"}
    for origin, allowed in (("https://chat.example", True), ("http://localhost:3000", True), ("https://b.org", False)):
        headers = {"Origin": origin}
        first = client.options("/v1/chat/completions", headers=headers | asks)
        refused = client.post("/v1/chat/completions", json=chat_body(), headers=headers)
        assert (first.status_code, refused.status_code) == (200 if allowed else 400, 401)
        for answer in (first, refused):
            assert answer.headers.get("access-control-allow-origin") == (origin if allowed else None)
        assert first.headers.get("access-control-allow-headers", "") != "" or not allowed


def chat_body(**more):
    return {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], **more}


def test_a_prompt_can_be_truncated(server, llm):
    ids = llm.get_tokenizer().encode(STORY["prompt"])
    body = {**STORY, "truncate_prompt_tokens": 3}
    answer = server.client.post("/v1/completions", json=body).json()
    assert answer["usage"]["prompt_tokens"] == 3
    expected = server.client.post("/v1/completions", json={**STORY, "prompt": ids[-3:]}).json()
    assert answer["choices"][0]["text"] == expected["choices"][0]["text"]
    answer = server.client.post("/v1/chat/completions", json=chat_body(max_tokens=1, truncate_prompt_tokens=4)).json()
    assert answer["usage"]["prompt_tokens"] == 4
    wrong = server.client.post("/v1/completions", json={**STORY, "truncate_prompt_tokens": 0})
    assert "truncate_prompt_tokens must be" in error_of(wrong)["message"]


def test_a_repetition_ends_an_answer(server):
    often = {"max_pattern_size": 2, "min_count": 3}
    body = {**STORY, "max_tokens": 100, "repetition_detection": often, "structured_outputs": {"regex": "(ab){20}"}}
    assert server.client.post("/v1/completions", json=body).json()["choices"][0]["finish_reason"] == "repetition"
    body["repetition_detection"] = {"often": 3}
    assert "repetition_detection" in error_of(server.client.post("/v1/completions", json=body))["message"]


def test_it_may_have_as_many_connections_as_the_system_allows(server):
    soft, hard = psutil.Process(server.process.pid).rlimit(psutil.RLIMIT_NOFILE)
    assert soft == psutil.RLIM_INFINITY or soft >= (65536 if hard == psutil.RLIM_INFINITY else min(hard, 65536))
    program = """
import resource
from tritonllm.serve.processes.run import raise_file_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 512))
raise_file_limit()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == ["512", "512"]

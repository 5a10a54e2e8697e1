"""``POST /generate``: completions as vLLM's first servers gave them."""

import itertools
import json

import pytest
from support.server import MODEL

PROMPT = "There was a fox named"
BODY = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}


def texts(server, **more):
    reply = server.client.post("/v1/completions", json={**BODY, **more})
    return [PROMPT + choice["text"] for choice in reply.json()["choices"]]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"n": 3, "temperature": 1, "seed": 3},
        {"stop": ["a"]},
        {"n": 2, "use_beam_search": True},
        {"model": MODEL, "structured_outputs": {"regex": "[a-z]{3}"}},
    ],
)
def test_the_texts_of_a_completion_behind_its_prompt(server, more):
    assert server.client.post("/generate", json={**BODY, **more}).json() == {"text": texts(server, **more)}


@pytest.mark.parametrize("more", [{}, {"n": 3, "temperature": 1, "seed": 3}, {"max_tokens": 40, "n": 2, "seed": 1}])
def test_each_line_has_the_texts_so_far(server, more):
    with server.client.stream("POST", "/generate", json={**BODY, **more, "stream": True}) as reply:
        assert reply.headers["content-type"] == "application/x-ndjson"
        lines = [json.loads(line) for line in reply.iter_lines()]
    assert lines[-1] == {"text": texts(server, **more)}
    assert len(lines) > 1 and all(list(line) == ["text"] for line in lines)
    for before, after in itertools.pairwise(lines):
        assert all(new.startswith(old) for old, new in zip(before["text"], after["text"], strict=True))


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_of_token_ids(server, stream):
    ids = server.client.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    reply = server.client.post("/generate", json={**BODY, "prompt": ids, "stream": stream})
    assert json.loads(reply.text.splitlines()[-1]) == {"text": texts(server)}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": None}, "prompt: must be"),
        ({"prompt": "word " * 5000}, "prompt has "),
        ({"prompt": ["a", "b"]}, "prompt must be one text, or its token ids"),
        ({"temperature": -1}, "temperature must be"),
        ({"logprobs": 1}, "logprobs: "),
        ({"prompt_logprobs": 1}, "prompt_logprobs: "),
        ({"return_token_ids": True}, "return_token_ids: "),
        ({"stream_options": {"include_usage": True}}, "stream_options: "),
        ({"echo": False}, "echo: "),
        ({"best_of": 3}, "best_of: not supported here"),
    ],
)
def test_a_bad_body_is_400_and_names_the_fault(server, more, message):
    for stream in (False, True):
        reply = server.client.post("/generate", json={**BODY, **more, "stream": stream})
        assert reply.status_code == 400 and message in reply.json()["error"]["message"]


def test_another_model_is_404(server):
    reply = server.client.post("/generate", json={**BODY, "model": "other"})
    assert reply.status_code == 404 and reply.json()["error"]["code"] == "model_not_found"

"""What is read of a body: model, key, tokens; and whatever a client sends, nothing breaks."""

import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tritonllm.http.ask import ANSWER_TOKENS, MOST_TOKENS, Ask, read_fields

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"


def read(path, body, header=b"", chars=1024):
    return read_fields(path, json.dumps(body).encode(), header, chars)


def test_turns_of_a_conversation_have_one_key():
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}
    turns = [system, user], [system, user, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "More"}]
    first, second = (read(CHAT, {"model": "m", "messages": messages}) for messages in turns)
    assert first[1] == second[1]
    assert first[2] < second[2]
    other = read(CHAT, {"model": "m", "messages": [system, {"role": "user", "content": "Bye"}]})
    assert other[1] != first[1]
    assert read(CHAT, {"model": "n", "messages": [system, user]})[1] != first[1]


def test_prompts_that_begin_alike_have_one_key():
    keys = [read(COMPLETE, {"model": "m", "prompt": "x" * 100 + end}, chars=100)[1] for end in "ab"]
    assert keys[0] == keys[1]
    keys = [read(COMPLETE, {"model": "m", "prompt": "x" * 50 + end}, chars=100)[1] for end in "ab"]
    assert keys[0] != keys[1]


def test_what_names_a_key_wins():
    body = {"model": "m", "prompt": "Hi", "user": "u"}
    assert read(COMPLETE, body)[1] == b"m\0u"
    assert read(COMPLETE, {**body, "prompt_cache_key": "k"})[1] == b"m\0k"
    assert read(COMPLETE, {**body, "prompt_cache_key": "k"}, b"session")[1] == b"m\0session"
    assert read(COMPLETE, {"model": "m"})[1] == b""


@pytest.mark.parametrize(
    ("path", "body", "tokens"),
    [
        (COMPLETE, {"prompt": [1, 2, 3, 4], "max_tokens": 10}, 14),
        (COMPLETE, {"prompt": [[1, 2], [3, 4]], "max_tokens": 10}, 14),
        (COMPLETE, {"prompt": "x" * 398, "max_tokens": 10, "n": 3}, 130),
        (COMPLETE, {"prompt": [1]}, 1 + ANSWER_TOKENS),
        (COMPLETE, {"prompt": [1], "max_tokens": -5}, 1 + ANSWER_TOKENS),
        (COMPLETE, {"prompt": [1], "max_tokens": 10**30}, 1 + MOST_TOKENS),
        (CHAT, {"messages": [], "max_tokens": 9, "max_completion_tokens": 5}, 5),
        ("/v1/responses", {"input": "x" * 38, "max_output_tokens": 7}, 17),
        ("/v1/embeddings", {"input": [1, 2, 3]}, 3),
        ("/v1/files", {}, 1),
    ],
)
def test_tokens(path, body, tokens):
    assert read(path, body)[2] == tokens


FIELDS = ("model", "user", "prompt", "messages", "input", "system", "n", "max_tokens", "prompt_cache_key")
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content"]), inner),
    max_leaves=8,
)


@given(st.one_of(st.binary(max_size=60), st.dictionaries(st.sampled_from(FIELDS), ANYTHING).map(json.dumps)))
def test_nothing_breaks(body):
    raw = body if isinstance(body, bytes) else body.encode()
    for path in (CHAT, "/tokenize"):
        model, key, tokens = read_fields(path, raw, b"", 64)
        assert model is None or isinstance(model, str)
        assert isinstance(key, bytes) and tokens >= 1


@pytest.mark.parametrize(
    ("method", "path", "may"),
    [("POST", CHAT, True), ("POST", "/v1/rerank", True), ("GET", "/v1/files/1", True), ("POST", "/v1/files", False)],
)
def test_what_may_be_done_twice(method, path, may):
    ask = Ask(method, path, path, (), b"", "id", None, b"", 1)
    assert ask.repeatable == may


MANY = b"[" + b"[]," * 2_000_000 + b"1]"


@pytest.mark.parametrize("body", [b'{"user": %b}', b'{"n": %b}', b'{"messages": %b}', b'{"messages": [{"role": %b}]}'])
def test_what_is_not_looked_at_is_not_decoded(body):
    """A body of 6 MB of empty lists took half a second, in which no other request went on."""
    given = b'{"model": "m", ' + (body % MANY)[1:]
    tracemalloc.start()
    try:
        model, key, tokens = read_fields(CHAT, given, b"", 8)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (model, key[:2], tokens >= ANSWER_TOKENS) == ("m", b"m\0" if b"messages" in body else b"", True)
    assert peak < 6 * len(given)  # some copies of the bytes; a list for each took more than ten times


def test_what_is_nested_deep_is_left_to_the_backend():
    assert read_fields(CHAT, b'{"model": "m", "user": ' + b"[" * 100_000, b"", 8) == (None, b"", ANSWER_TOKENS)

"""Log-probabilities of completions, with a tokenizer that drops the first space and has tokens of single bytes."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.random_tokenizers import ByteFallback, ByteLevel

from tritonllm.engine.data.outputs import CompletionOutput, Logprob, RequestOutput
from tritonllm.engine.text.detokenizer import IncrementalDetokenizer, TokenTexts, bytes_of
from tritonllm.serve.api.completions_api import Choices
from tritonllm.serve.api.protocol import CompletionRequest
from tritonllm.serve.api.replies import Offsets, chat_logprobs

# The prompt ends in a part of a character; special tokens are skipped in what follows.
PROMPT, OUTPUT = [None, " a", b"\xe6", b"\xbc"], [b"\xa2", " b", None, b"\xc3", b"\xa9", "c"]


@pytest.mark.parametrize("given_as_text", [False, True])
@pytest.mark.parametrize("echo", [False, True])
def test_offsets_are_those_of_the_text(echo, given_as_text):
    tokenizer, ids = ByteFallback().tokenizer([*PROMPT, *OUTPUT])
    words, prompt = TokenTexts(tokenizer), ids[: len(PROMPT)]
    positions = [{token: Logprob(-1.0, 1, words(token))} for token in ids]
    follower = IncrementalDetokenizer(tokenizer, prompt)
    choices = Choices(
        SimpleNamespace(llm=SimpleNamespace(inputs=SimpleNamespace(tokenizer=tokenizer))),
        CompletionRequest(model="m", prompt=prompt, echo=echo, logprobs=1),
        n=1,
    )
    text, offsets = "", []
    for i, token in enumerate(ids[len(PROMPT) :], start=len(PROMPT)):  # as they are streamed
        part = CompletionOutput(0, follower.append(token), [token], logprobs=[positions[i]])
        scores = [None, *positions[1 : len(PROMPT)]] if i == len(PROMPT) and echo else None
        output = RequestOutput("a", "a\ufffd\ufffd" if given_as_text else None, prompt, scores, [part])
        choice = choices.choice(0, output, part, first=i == len(PROMPT))
        text += choice["text"]
        offsets += choice["logprobs"]["text_offset"]
    before = {(True, True): "a\ufffd\ufffd", (True, False): "</s> a\ufffd\ufffd"}.get((echo, given_as_text), "")
    assert text == before + "漢 béc"
    begins = {(True, True): [0, 0, 1, 1], (True, False): [0, 4, 6, 6]}.get((echo, given_as_text), [])
    assert offsets == [*begins, *(len(before) + begin for begin in (0, 1, 3, 3, 3, 4))]


@settings(max_examples=examples(30))
@given(data=st.data())
@pytest.mark.parametrize("kind", [ByteLevel(), ByteFallback()])
def test_tokens_begin_where_the_text_before_them_ends(kind, data):
    """And their bytes are those of the text, but for a first space that is dropped."""
    pieces = [piece for piece in kind.pieces(data.draw) if piece is not None]
    tokenizer, ids = kind.tokenizer(pieces)
    words, plain = TokenTexts(tokenizer), [p if isinstance(p, bytes) else p.encode() for p in pieces]
    assert b"".join(bytes_of(tokenizer, token, words(token)) for token in ids) == b"".join(plain)
    begins = Offsets(IncrementalDetokenizer(tokenizer, []), 7).add(ids)
    for i, begin in enumerate(begins):
        whole = kind.text(pieces[:i], whole=True)
        assert len(whole) - 4 <= begin - 7 <= len(whole) and whole[begin - 7 :].removeprefix(" ") in 4 * "\ufffd"


def test_offsets_without_a_tokenizer():
    assert Offsets(None).add([1, 20]) == [0, len("token_id:1")]


@pytest.mark.parametrize(("count", "ids"), [(0, []), (1, [5]), (2, [5, 9]), (-1, [5, 9, 7])])
def test_as_many_of_the_most_likely_as_asked_for(count, ids):
    position = {7: Logprob(-3.0, 3, "c"), 9: Logprob(-2.0, 2, "b"), 5: Logprob(-1.0, 1, "a")}
    (entry,) = chat_logprobs([7], [position], count, None)["content"]
    assert entry["logprob"] == -3.0
    assert [top["logprob"] for top in entry["top_logprobs"]] == [position[token].logprob for token in ids]

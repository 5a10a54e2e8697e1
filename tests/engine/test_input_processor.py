"""Prompts that are far too long are refused by their beginning."""

import re
from functools import partial

import pytest
from transformers import AutoTokenizer

from tritonllm.demo import model_path
from tritonllm.engine.chat import ChatOptions, render
from tritonllm.engine.input_processor import SURELY_QUICK, InputProcessor

MOST = 64  # max_model_len


class Counting:
    """A tokenizer that says how many characters it was given."""

    def __init__(self, tokenizer):
        self._tokenizer, self.read = tokenizer, 0

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def encode(self, text, **options):
        self.read += len(text)
        return self._tokenizer.encode(text, **options)

    def __call__(self, texts, **options):
        self.read += sum(map(len, texts))
        return self._tokenizer(texts, **options)


def reading(tokenizer):
    return InputProcessor(tokenizer, 1 << 20, MOST, frozenset({0}), 0)


@pytest.fixture
def inputs():
    found = reading(Counting(AutoTokenizer.from_pretrained(str(model_path()))))
    found.tokenizer.read = 0  # when it was tried out
    return found


def test_a_prompt_that_is_far_too_long_is_not_read_to_its_end(inputs):
    with pytest.raises(ValueError, match=r"prompt has more than \d+ tokens, but with at least one new .*=64: shorten"):
        inputs.tokenize("the little dog " * 1_000_000)
    assert 0 < inputs.tokenizer.read <= SURELY_QUICK + 8 * MOST


@pytest.mark.parametrize("words", [30, 100, 20_000])
def test_others_are_counted(inputs, words):
    """Also one that begins with so many characters that are few tokens, and all that shall be truncated."""
    text = "dog " * words
    count = len(inputs.tokenizer._tokenizer.encode(text))
    if count < MOST:
        assert len(inputs.tokenize(text).token_ids) == count
    elif len(text) <= SURELY_QUICK:
        with pytest.raises(ValueError, match=f"prompt has {count} tokens, but"):
            inputs.tokenize(text)
    assert inputs.tokenize(text, 20).token_ids == inputs.tokenizer._tokenizer.encode(text)[-20:]
    assert len(inputs.tokenize(text, -1).token_ids) == min(count, MOST - 1)


@pytest.mark.parametrize("ids", [[0], [3, (1 << 20) - 1, True], [7] * 63])
def test_ids_are_packed_for_those_who_read_many(inputs, ids):
    prompt = inputs.tokenize({"prompt_token_ids": ids})
    assert prompt.packed.tolist() == prompt.token_ids == ids
    params = inputs.default_params
    assert inputs.requests("r", prompt, params, 0, 0)[0].packed_prompt is prompt.packed


@pytest.mark.parametrize("wrong", [1 << 20, -1, 1 << 32, 1 << 70, 1.0, "7", None])
def test_one_wrong_id_among_others_is_named(inputs, wrong):
    with pytest.raises(ValueError, match=rf"must be integers from 0 to {(1 << 20) - 1}, got {re.escape(repr(wrong))}"):
        inputs.tokenize({"prompt_token_ids": [5, wrong, 6]})


def test_a_long_text_of_few_tokens_is_taken(inputs):
    whole = inputs.tokenizer.encode("x" * (SURELY_QUICK + 8 * MOST + 1))

    class Few(Counting):
        def encode(self, text, **options):
            return whole[: MOST // 2] if len(text) > SURELY_QUICK + 8 * MOST else whole[: MOST // 4]

    assert len(reading(Few(inputs.tokenizer)).tokenize("x" * (SURELY_QUICK + 8 * MOST + 1)).token_ids) == MOST // 2


def test_a_conversation_that_is_far_too_long(inputs):
    """Its special tokens stand in the text already."""
    text, encode = "the little dog", partial(inputs.encode_prompt, add_special_tokens=False)
    message = {"role": "user", "content": text}
    options = ChatOptions(chat_template="{{ messages[0].content }}", add_generation_prompt=True)
    assert render(inputs.tokenizer, [message], options, encode) == render(inputs.tokenizer, [message], options)
    inputs.tokenizer.read = 0
    with pytest.raises(ValueError, match="prompt has more than"):
        render(inputs.tokenizer, [{**message, "content": text * 1_000_000}], options, encode)
    assert 0 < inputs.tokenizer.read <= SURELY_QUICK + 8 * MOST

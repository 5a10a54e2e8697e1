"""What a prompt may be; those that are far too long are refused by their beginning; bad words are tokenized once."""

import re
from array import array
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.examples import examples
from transformers import AutoTokenizer

from tritonllm.config.prompts import as_list
from tritonllm.config.sampling_params import SamplingParams
from tritonllm.demo import model_path
from tritonllm.engine.text.chat import ChatOptions, render
from tritonllm.engine.text.input_processor import SURELY_QUICK, InputProcessor

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


FORMS = {
    "list": list,
    "tuple": tuple,
    "array.array": lambda ids: array("q", ids),
    "numpy": np.array,
    "numpy, int32": lambda ids: np.array(ids, dtype=np.int32),
    "numpy, uint64": lambda ids: np.array(ids, dtype=np.uint64),
    "tensor": torch.tensor,
    "tensor, int32": lambda ids: torch.tensor(ids, dtype=torch.int32),
    "integers of numpy": lambda ids: [*np.array(ids)],
    "integers of torch": lambda ids: [*torch.tensor(ids)],
    "integers of all kinds": lambda ids: [[int, np.int64, torch.tensor][i % 3](token) for i, token in enumerate(ids)],
}
WRAPS = {
    "bare": lambda ids: ids,
    "dict": lambda ids: {"prompt_token_ids": ids},
    "dict without media": lambda ids: {
        "prompt_token_ids": ids,
        "multi_modal_data": {},
        "multi_modal_uuids": np.zeros((0, 3)),
        "mm_processor_kwargs": None,
    },
}
SEVERAL = {"one": None, "list of one": 1, "list of three": 3}


@pytest.mark.parametrize("several", SEVERAL)
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("form", FORMS)
def test_all_forms_of_token_ids(inputs, form, wrap, several):
    ids = [5, 0, 900, 7]
    one, count = WRAPS[wrap](FORMS[form](ids)), SEVERAL[several]
    prompts = as_list(one if count is None else [one] * count)
    assert len(prompts) == (count or 1)
    for prompt in prompts:
        found = inputs.tokenize(prompt)
        assert [*found.token_ids] == ids and {*map(type, found.token_ids)} == {int}
        assert (
            inputs.tokenize({"prompt_token_ids": FORMS[form](ids), "token_type_ids": FORMS[form](ids)}).token_types
            == ids
        )


NOT_HERE = st.one_of(
    st.builds(
        torch.zeros, st.lists(st.integers(0, 3), max_size=3), dtype=st.sampled_from([torch.int64, torch.float32])
    ),
    st.builds(np.zeros, st.lists(st.integers(0, 3), max_size=3), dtype=st.sampled_from(["i8", "f4", "U1", "O", "?"])),
    st.sampled_from([b"bytes", 5, 1.5, object(), {1}, iter([1]), [None], [[1]], [np.zeros(2)], [torch.zeros(2, 2)]]),
)
KEYS = ("prompt", "prompt_token_ids", "token_type_ids", "cache_salt", "prompt_embeds", "multi_modal_data", 7)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(200))
@given(prompt=st.one_of(NOT_HERE, st.dictionaries(st.sampled_from(KEYS), NOT_HERE | st.just("text") | st.just([1, 2]))))
def test_whatever_a_prompt_holds_it_is_taken_or_refused_in_words(inputs, prompt):
    """By no error but `ValueError`: an array of several numbers is neither true nor false, say."""
    for several in (prompt, [prompt]):
        try:
            tokens = [inputs.tokenize(one).token_ids for one in as_list(several)]
        except ValueError as error:
            assert "prompt" in str(error) and "ambiguous" not in str(error)
        else:
            assert all(type(token) in (int, bool) for ids in tokens for token in ids)


@pytest.mark.parametrize("name", ["prompt_embeds", "multi_modal_data", "more"])
@pytest.mark.parametrize("value", [torch.zeros(4, 64), np.zeros((4, 64)), [torch.zeros(64)], {"image": torch.zeros(3)}])
def test_what_a_prompt_has_beside_tokens_is_named(inputs, name, value):
    for prompt in (
        {name: value},
        {"prompt": "text", name: value},
        {"prompt_token_ids": torch.tensor([1, 2]), name: value},
    ):
        with pytest.raises(ValueError, match=f"prompt must be a string, .*, got a dict with .*{name}"):
            inputs.tokenize(prompt)


WORDS = ("dog", " dog", "the little dog", "dog", "é", "\n")


def test_bad_words_are_the_same_one_by_one_and_together(inputs):
    """At the start of a text and after a space, each sequence once."""
    encode = partial(inputs.tokenizer._tokenizer.encode, add_special_tokens=False)
    expected = []
    for word in WORDS:
        for ids in map(tuple, map(encode, (word, " " + word.lstrip()))):
            if ids and ids not in expected:
                expected.append(ids)
    assert inputs.bad_words(SamplingParams(bad_words=WORDS)) == tuple(expected)
    assert inputs.bad_words(SamplingParams()) == ()


def test_bad_words_are_tokenized_once(inputs):
    params = SamplingParams(bad_words=WORDS)
    words, read = inputs.bad_words(params), inputs.tokenizer.read
    prompt = inputs.tokenize([1, 2])
    assert inputs.requests("a", prompt, params, 0, 0)[0].bad_words == words  # of the request's other prompts
    assert inputs.tokenizer.read == read > 0
    known = replace(prompt, bad_words=((7, 8),))  # by another process
    other = SamplingParams(bad_words=["little"])
    assert inputs.requests("b", known, other, 0, 1)[0].bad_words == ((7, 8),)
    assert inputs.tokenizer.read == read


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids", "logit_bias"])
def test_token_ids_are_of_the_vocabulary(inputs, name):
    for last, fits in ((inputs.vocab_size - 1, True), (inputs.vocab_size, False)):
        params = SamplingParams(**{name: {1: 1.0, last: 1.0} if name == "logit_bias" else [last, 1]})
        if fits:
            assert inputs.take_params(params) == params
        else:
            with pytest.raises(ValueError, match=f"^{name} has token {last}, but the vocabulary ends at {last - 1}"):
                inputs.take_params(params)


def test_no_more_tokens_are_allowed_than_there_are():
    few = InputProcessor(None, 8, MOST, frozenset({0}), 0)
    assert few.take_params(SamplingParams(allowed_token_ids=[1] * 8)).allowed_token_ids == [1] * 8
    with pytest.raises(ValueError, match=r"^allowed_token_ids has 9 entries, more than the vocabulary \(8\)"):
        few.take_params(SamplingParams(allowed_token_ids=[1] * 9))


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize(
    ("most", "taken", "refused"), [(20, (20, -1), (21,)), (0, (0,), (1, -1)), (7, (7,), (8, -1)), (-1, (1024, -1), ())]
)
def test_no_more_logprobs_than_the_engine_gives(name, most, taken, refused):
    """-1 is the number of the vocabulary, of which there are 8."""
    inputs = InputProcessor(None, 8, MOST, frozenset({0}), 0, max_logprobs=most)
    for count in (None, *taken):
        assert getattr(inputs.take_params(SamplingParams(**{name: count})), name) == count
    for count in refused:
        message = rf"^{name}={count} is more than max_logprobs={most}: .*max_logprobs={count}"
        with pytest.raises(ValueError, match=message):
            inputs.take_params(SamplingParams(**{name: count}))

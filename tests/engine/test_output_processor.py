"""What a sequence's tokens become for the user, with a tokenizer whose tokens may be single bytes."""

import pytest
from support.random_tokenizers import ByteFallback, SlowTokenizer

from tritonllm.config.sampling_params import RequestOutputKind, SamplingParams
from tritonllm.engine.data.request import Request, RequestStatus
from tritonllm.engine.data.results import TokenLogprobs
from tritonllm.engine.text.output_processor import SequenceOutput


def each(text):
    return [bytes([byte]) for byte in text.encode()]


def sequence_of(prompt, output, **params):
    """A sequence without output, and the tokens of one to come."""
    tokenizer, ids = ByteFallback().tokenizer([*prompt, *output])
    request = Request("a", ids[: len(prompt)], SamplingParams(**params), max_total_tokens=99)
    return SequenceOutput(0, request, tokenizer), ids[len(prompt) :]


def extend(sequence, tokens, status=RequestStatus.RUNNING):
    """Give it new tokens, as a step does; the last may end it."""
    sequence.request.output_token_ids += tokens
    sequence.request.status = status
    ranked = [[token, *tokens] for token in tokens]
    scores = TokenLogprobs(ranked, [[-1.0] * len(ids) for ids in ranked], [1] * len(ranked))
    return sequence.extend(tokens, scores, 0)


def test_a_stop_string_of_several_bytes_behind_a_prompt_of_bytes():
    sequence, ids = sequence_of(each("漢字"), each("日本語です"), stop=["本語"])
    for token in ids[:8]:
        assert extend(sequence, [token]) is None
    assert extend(sequence, ids[8:12]) == ("本語", 3)
    assert sequence.output(RequestOutputKind.CUMULATIVE).text == "日"


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_LENGTH, RequestStatus.FINISHED_ABORTED])
def test_what_may_become_a_character_is_a_part_of_the_last_text(status):
    sequence, ids = sequence_of(["a"], [" a", *each("漢")[:2]])
    extend(sequence, ids[:-1])
    assert sequence.output(RequestOutputKind.DELTA).text == " a"
    extend(sequence, ids[-1:], status)
    assert [sequence.output(RequestOutputKind.DELTA).text for _ in range(2)] == ["\ufffd\ufffd", ""]
    assert sequence.output(RequestOutputKind.CUMULATIVE).text == " a\ufffd\ufffd"


def test_a_tokenizer_that_fails_is_not_asked_again():
    """Its error has ended the request, whose last output is still to come."""
    tokenizer, ids = ByteFallback().tokenizer(["a", *each("漢")])
    broken = SlowTokenizer(tokenizer)
    request = Request("a", ids[:1], SamplingParams(), max_total_tokens=99)
    sequence = SequenceOutput(0, request, broken)
    extend(sequence, ids[1:2])
    broken = vars(sequence)["_detokenizer"]
    broken._decode = {}.__getitem__
    with pytest.raises(TypeError):
        extend(sequence, ids[2:])
    request.status = RequestStatus.FINISHED_ERROR
    assert sequence.output(RequestOutputKind.CUMULATIVE).text == ""


def test_texts_of_log_probabilities_have_the_spaces_of_the_text():
    sequence, ids = sequence_of(["a"], [" a", b"\xe6", b"\xbc", b"\xa2", "a"], logprobs=4)
    extend(sequence, ids)
    output = sequence.output(RequestOutputKind.CUMULATIVE)
    texts = [position[token].decoded_token for token, position in zip(output.token_ids, output.logprobs, strict=True)]
    assert output.text == " a漢a" and texts == [" a", "\ufffd", "\ufffd", "\ufffd", "a"]
    assert output.logprobs[2][ids[0]].decoded_token == " a"  # a candidate behind a part of a character

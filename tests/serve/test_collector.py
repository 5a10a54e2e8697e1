"""Texts that are made where a request is served."""

import pytest
from support.random_tokenizers import ByteFallback

from tritonllm.engine.data.outputs import CompletionOutput, RequestOutput
from tritonllm.engine.text.detokenizer import IncrementalDetokenizer
from tritonllm.serve.engines.collector import Texts


@pytest.mark.parametrize(("reason", "end"), [("length", "\ufffd\ufffd"), ("stop", "\ufffd"), ("error", "")])
def test_what_may_become_a_character_is_a_part_of_the_last_text(reason, end):
    """Each continuation ends by itself; a stop token is not text."""
    tokenizer, ids = ByteFallback().tokenizer(["a", " a", b"\xe6", b"\xbc"])
    texts, found = Texts(lambda: IncrementalDetokenizer(tokenizer, ids[:1])), ["", ""]
    for token, reasons in zip(ids[1:], [(None, None), (None, None), (reason, None)], strict=True):
        outputs = [CompletionOutput(i, "", [token], finish_reason=reasons[i]) for i in range(2)]
        output = RequestOutput("a", None, (), None, outputs)
        texts.add(output)
        found = [text + completion.text for text, completion in zip(found, output.outputs, strict=True)]
    assert found == [" a" + end, " a"]

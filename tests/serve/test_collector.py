"""Texts that are made where a request is served."""

import pytest
from support.random_tokenizers import ByteFallback

from tritonllm.engine.text.detokenizer import IncrementalDetokenizer
from tritonllm.serve.engines.collector import Texts
from tritonllm.serve.engines.messages import Completion, Update


@pytest.mark.parametrize(("reason", "end"), [("length", "\ufffd\ufffd"), ("stop", "\ufffd"), ("error", "")])
def test_what_may_become_a_character_is_a_part_of_the_last_text(reason, end):
    """Each continuation ends by itself; a stop token is not text."""
    tokenizer, ids = ByteFallback().tokenizer(["a", " a", b"\xe6", b"\xbc"])
    texts, found = Texts(lambda: IncrementalDetokenizer(tokenizer, ids[:1])), ["", ""]
    for token, reasons in zip(ids[1:], [(None, None), (None, None), (reason, None)], strict=True):
        outputs = [Completion(i, "", [token], reasons[i]) for i in range(2)]
        update = Update("a", outputs, finished=False)
        texts.add(update)
        found = [text + completion.text for text, completion in zip(found, update.outputs, strict=True)]
    assert found == [" a" + end, " a"]

"""The tokenizer as it is loaded."""

import copy

from transformers import AutoTokenizer

from tritonllm.demo import model_path
from tritonllm.engine.tokenizer import load_tokenizer

LONG = "the little dog " * 2000


def test_it_does_not_warn_of_long_texts_and_others_still_do(caplog):
    tokenizer = load_tokenizer(str(model_path()))
    assert len(tokenizer.encode(LONG)) > tokenizer.model_max_length
    tokenizer(LONG, LONG)
    copy.deepcopy(tokenizer).encode(LONG)
    assert not caplog.records
    AutoTokenizer.from_pretrained(str(model_path())).encode(LONG)
    assert "sequence length is longer" in caplog.text

import dataclasses
import json

import msgspec
import pytest
from support.engines import tiny_checkpoint

from tritonllm.config.beam_search_params import BeamSearchParams
from tritonllm.config.pooling_params import PoolingParams
from tritonllm.config.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from tritonllm.engine.text.input_processor import InputProcessor
from tritonllm.engine.text.tokenizer import load_tokenizer
from tritonllm.serve.engines import request_messages
from tritonllm.serve.engines.collector import Collector
from tritonllm.serve.engines.messages import Add, unpack_params
from tritonllm.serve.engines.pooling_messages import PoolingCollector

PROMPT = InputProcessor(None, 50, 32, frozenset({0}), 0).tokenize({"prompt_token_ids": [1, 2, 3], "cache_salt": "s"})


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(tiny_checkpoint()))


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_the_engine_sends_what_is_new(kind):
    params = SamplingParams(n=2, output_kind=kind)
    message, collector = request_messages.generation("a", PROMPT, params, 3, None)
    sent = unpack_params(message.params)
    assert sent.n == 2 and params.output_kind is kind  # the caller's are as they were
    cumulative = kind is RequestOutputKind.CUMULATIVE
    assert sent.output_kind is (RequestOutputKind.DELTA if cumulative else kind)
    assert (message.request_id, message.priority, message.cache_salt) == ("a", 3, "s")
    assert message.packed == PROMPT.packed.tobytes() and isinstance(collector, Collector)


@pytest.mark.parametrize(
    ("fields", "engine_does"), [({}, False), ({"stop": ["x"]}, True), ({"detokenize": False}, False)]
)
def test_who_makes_the_text(tokenizer, fields, engine_does):
    """The engine only where it has to find stop strings in it."""
    message, _ = request_messages.generation("a", PROMPT, SamplingParams(**fields), 0, tokenizer)
    assert unpack_params(message.params).detokenize == engine_does


def test_what_the_engine_would_do_between_steps_is_done():
    """Bad words are tokens, and a schema is text, which it compares with others as it is."""
    schema = {"type": "object", "properties": {"é\ud800": {"type": "string"}}}
    params = SamplingParams(bad_words=["x"], structured_outputs=StructuredOutputsParams(json=schema))
    prompt = dataclasses.replace(PROMPT, bad_words=((4, 5), (6,)))
    message, _ = request_messages.generation("a", prompt, params, 0, None)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Add).bad_words == ((4, 5), (6,))
    text = unpack_params(message.params).structured_outputs.json
    assert isinstance(text, str) and json.loads(text) == schema
    assert params.structured_outputs.json is schema
    endless = {}
    endless["items"] = endless
    for wrong in ({"const": {1, 2}}, endless):
        params = SamplingParams(structured_outputs={"json": {"type": "object"}})
        object.__setattr__(params.structured_outputs, "json", wrong)
        with pytest.raises(ValueError, match=r"^structured_outputs: json is not a JSON schema"):
            request_messages.generation("a", PROMPT, params, 0, None)


def test_prompts_that_are_not_continued():
    message, collector = request_messages.pooling("a", PROMPT, PoolingParams(task="embed"), 1)
    assert message.pooling == {"task": "embed"} and message.search is None and isinstance(collector, PoolingCollector)
    message, collector = request_messages.search("a", PROMPT, BeamSearchParams(beam_width=2, max_tokens=4), 1)
    assert message.search["beam_width"] == 2 and message.pooling is None and isinstance(collector, Collector)

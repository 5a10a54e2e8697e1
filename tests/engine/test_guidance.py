"""Structured outputs whose masks llguidance makes, in xgrammar's place."""

import json
import random
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from support.engines import token_ids
from support.examples import examples
from support.schemas import SCHEMAS, valid

from tritonllm import LLM, SamplingParams, StructuredOutputsParams
from tritonllm.demo import model_path
from tritonllm.engine.grammar import guidance
from tritonllm.engine.loop import engine as engine_module
from tritonllm.engine.text.input_processor import InputProcessor

llguidance = pytest.importorskip("llguidance")
PROMPTS = ["The little dog", "One day, Lily", "There was", "A big cat"]


class Bytes:
    """Grammars over single bytes."""

    def __init__(self):
        self.tokenizer = llguidance.LLTokenizer("byte")
        self.vocab, self.end = self.tokenizer.vocab_size, self.tokenizer.eos_token

    def matcher(self, **wish):
        text = guidance.parse(StructuredOutputsParams(**wish))
        made = llguidance.LLMatcher(self.tokenizer, text, log_level=0)
        return guidance.GuidanceMatcher(made, [self.end], -(-self.vocab // 32))

    def allowed(self, matcher):
        mask = np.zeros((1, -(-self.vocab // 32)), dtype=np.int32)
        matcher.fill_next_token_bitmask(mask)
        return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[: self.vocab]).tolist()

    def text(self, matcher, seed, most=300):
        rng, drawn = random.Random(seed), b""
        for _ in range(most):
            tokens = self.allowed(matcher)
            assert tokens
            ends = [token for token in (*b'"}]', self.end) if token in tokens]
            token = rng.choice(ends if ends and rng.random() < 0.3 else tokens)
            assert matcher.accept_token(token)
            if token == self.end:
                assert matcher.is_terminated()
                return drawn.decode()
            drawn += bytes([token])
        return None

    def allows(self, matcher, text):
        return all(matcher.accept_token(byte) for byte in text.encode()) and matcher.accept_token(self.end)


@pytest.fixture(scope="module")
def over_bytes():
    return Bytes()


MORE = [
    {"allOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 5}]},
    {"type": "string", "pattern": "^[ab\\\\]+$", "maxLength": 3},
    {"type": "object", "patternProperties": {"^a": {"type": "null"}, "^b": {"type": "boolean"}}},
    {"type": "number", "multipleOf": 0.5, "minimum": 1},
    {"type": "string", "minLength": 600, "maxLength": 700},
    {"type": "object", "properties": {"a": {"$ref": "#x"}}, "$defs": {"y": {"$anchor": "x", "type": "null"}}},
]


@settings(max_examples=examples(100))
@given(st.one_of(SCHEMAS, st.sampled_from(MORE)), st.booleans(), st.integers(0, 2**32))
def test_what_it_allows_is_json_and_valid(over_bytes, schema, tight, seed):
    text = over_bytes.text(over_bytes.matcher(json=schema, disable_any_whitespace=tight), seed)
    if text is not None:
        assert Draft202012Validator(schema).is_valid(json.loads(text)), text
        outside = re.sub(r'"(\\.|[^"\\])*"', '""', text)
        assert all(re.fullmatch(r" |\n {0,32}|\n\t{0,8}", run) for run in re.findall(r"\s+", outside))
        assert not tight or not re.search(r"[\n\t]|  ", outside)


@pytest.mark.parametrize(
    ("wish", "right", "wrong"),
    [
        ({"json": {"type": "string", "pattern": r"^C:\\[a-z]{2}$"}}, r'"C:\\ab"', r'"C:\ab"'),
        ({"json": {"type": "object", "properties": {"a": {}}}}, '{"a": 1}', '{"b": 1}'),
        ({"json_object": True}, '{\n  "a": [1]\n}', "{  }"),
        ({"json_object": True, "disable_any_whitespace": True}, '{"a": [1, 2]}', '{"a":1}'),
        ({"regex": "a.c|[0-9]{2}"}, "abc", "a\nc"),
        ({"choice": ['q"\\', "é\n\x01"]}, "é\n\x01", "é"),
        ({"grammar": 'root ::= "a" x\nx ::= [0-9]+'}, "a12", "a"),
    ],
)
def test_forms(over_bytes, wish, right, wrong):
    assert over_bytes.allows(over_bytes.matcher(**wish), right)
    assert not over_bytes.allows(over_bytes.matcher(**wish), wrong)


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"regex": "("}, "regex cannot be used: "),
        ({"regex": "(?=a)b"}, "regex has a lookahead"),
        ({"grammar": "root ::= root"}, "grammar cannot be used: no text of its rule 'root' ever ends"),
        ({"grammar": 'root ::= "a'}, "grammar cannot be used: "),
        ({"json": {"type": "array", "uniqueItems": True}}, "json has 'uniqueItems'"),
        ({"json": {"$ref": "http://a/b"}}, "json is not a JSON schema .*'\\$ref' must name"),
        ({"json": {"$ref": "#"}}, "json is not a JSON schema .*leads back to itself"),
        ({"json": {"type": []}}, "json is not a JSON schema .*'type' must name one"),
        ({"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "json has 'oneOf'"),
        ({"json": {"type": "object", "minProperties": 3}}, "json has 'minProperties'"),
        ({"json": {"anyOf": [{"$id": "a", "type": "null"}]}}, "json has an '\\$id' within it"),
        ({"json": {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}}, "json has 'exclusiveMinimum' beside"),
        ({"json": {"type": "string", "pattern": r"^[\x00-\x1f]$"}}, "json has a pattern with ranges of control"),
        ({"json": {"const": {"a": [-(2**70)]}}}, "json has integers beyond 64 bits"),
        ({"json": "{"}, "json is not a JSON schema"),
    ],
)
def test_what_cannot_be_kept_is_named(wish, message):
    with pytest.raises(ValueError, match=f"^structured_outputs: {message}") as caught:
        guidance.parse(StructuredOutputsParams(**wish))
    assert "\n" not in str(caught.value)


def test_a_failure_is_an_error_and_no_mask(over_bytes):
    matcher = over_bytes.matcher(regex="ab")
    assert over_bytes.allowed(matcher) == [ord("a")] and not matcher.accept_token(over_bytes.end)
    matcher._matcher.consume_token(ord("x"))
    with pytest.raises(RuntimeError):
        over_bytes.allowed(matcher)


@pytest.fixture(scope="module")
def llm():
    sizes = {"num_blocks": 256, "max_num_seqs": 8, "max_num_batched_tokens": 256}
    return LLM(str(model_path()), structured_outputs_backend="guidance", **sizes)


def structured(temperature, **wish):
    return SamplingParams(
        temperature=temperature, seed=1, max_tokens=400, structured_outputs=StructuredOutputsParams(**wish)
    )


@settings(max_examples=examples(12))
@given(st.lists(SCHEMAS, min_size=1, max_size=3), st.sampled_from([0.0, 1.0]), st.booleans())
def test_outputs_parse_and_validate(llm, schemas, temperature, tight):
    params = [structured(temperature, json=schema, disable_any_whitespace=tight) for schema in schemas]
    for schema, output in zip(schemas, llm.generate(PROMPTS[: len(schemas)], params, use_tqdm=False), strict=True):
        assert output.error is None and output.outputs[0].finish_reason == "stop", output.outputs[0].text
        assert valid(schema, json.loads(output.outputs[0].text)), output.outputs[0].text


def test_jumping_forward_changes_no_token(llm, monkeypatch):
    keys = {name: {"type": "boolean"} for name in ("xylophone", "question_mark_1234")}
    schema = {"type": "object", "properties": keys, "required": list(keys)}
    params = structured(0.0, json=schema, disable_any_whitespace=True)
    before = llm.engine.stats.forced_tokens
    jumped = llm.generate(PROMPTS[:2], params, use_tqdm=False)
    assert llm.engine.stats.forced_tokens > before
    monkeypatch.setattr(engine_module, "jump", lambda requests, scheduler: [])
    assert token_ids(llm.generate(PROMPTS[:2], params, use_tqdm=False)) == token_ids(jumped)


def test_a_form_ends_an_output_before_min_tokens(llm):
    params = structured(0.0, choice=["yes", "no"])
    params.min_tokens = 50
    (output,) = llm.generate(PROMPTS[:1], params, use_tqdm=False)
    assert output.outputs[0].text in ("yes", "no") and output.outputs[0].finish_reason == "stop"


def test_it_is_an_extra(llm, monkeypatch):
    monkeypatch.setattr(guidance, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"structured_outputs_backend='guidance' needs .*pip install '\.\[guidance\]'"):
        InputProcessor(llm.get_tokenizer(), 100, 100, frozenset({0}), 0, structured_outputs_backend="guidance")


def test_another_backend_is_refused():
    with pytest.raises(ValueError, match="structured_outputs_backend must be one of auto, xgrammar, guidance"):
        LLM(str(model_path()), structured_outputs_backend="outlines")

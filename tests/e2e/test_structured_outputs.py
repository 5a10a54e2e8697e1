"""Outputs that must look a certain way, from the demo model, which by itself would never make them."""

import json
import re
import threading
from concurrent.futures import Future, wait

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines import greedy, tiny_llm, token_ids
from support.examples import examples
from support.schemas import SCHEMAS, valid
from support.server import eventually
from support.waiting import PATIENCE
from xgrammar import BatchGrammarMatcher, GrammarMatcher

from tritonllm import LLM, SamplingParams, StructuredOutputsParams
from tritonllm.config.sampling_params import GuidedDecodingParams
from tritonllm.demo import model_path
from tritonllm.engine.data.results import RunningStep
from tritonllm.engine.grammar import grammar as grammar_module
from tritonllm.engine.grammar import jump_forward
from tritonllm.engine.grammar.grammar import GrammarControl, Grammars, masks_of
from tritonllm.engine.loop import engine as engine_module

# With the first words of most stories two tokens are equally likely, to the last bit, and then batches may differ.
PROMPTS = ["The little dog", "One day, Lily", "There was", "A big cat"]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
ON_GPU = pytest.mark.also_gpu
AHEAD = pytest.mark.parametrize("ahead", [False, True])


def demo(**kwargs):
    return LLM(str(model_path()), **{"num_blocks": 256, "max_num_seqs": 8, "max_num_batched_tokens": 256, **kwargs})


@pytest.fixture(scope="module")
def llm():
    return demo(async_scheduling=True)


def structured(temperature=0.0, max_tokens=200, n=1, seed=None, **wish):
    """The one that ends when its grammar does."""
    outputs = StructuredOutputsParams(**wish)
    return SamplingParams(temperature=temperature, max_tokens=max_tokens, n=n, seed=seed, structured_outputs=outputs)


def generate(llm, prompts, params):
    return llm.generate(prompts, params, use_tqdm=False)


def texts(outputs):
    assert [o.error for o in outputs] == [None] * len(outputs)
    completions = [completion for output in outputs for completion in output.outputs]
    assert [c.finish_reason for c in completions] == ["stop"] * len(completions)
    return [completion.text for completion in completions]


@pytest.mark.parametrize("count", [1, 3, 20])
def test_masks_of_many_outputs_are_those_of_each(llm, count):
    """Filled in one call, wherever each output stands."""
    vocab = llm.engine.inputs.vocab_size
    grammars = Grammars(llm.get_tokenizer(), vocab, frozenset({0}))
    controls = []
    for i in range(count):
        wish = StructuredOutputsParams(regex=f"[a-{chr(98 + i)}]{{5}}")
        compiled = grammars.compile(wish)
        wait([compiled])
        controls.append(GrammarControl(compiled, vocab))
        assert controls[-1].take(llm.get_tokenizer().encode("a" * (i % 3), add_special_tokens=False)) is None
    together = masks_of(controls)
    assert together.shape == (count, -(-vocab // 32))
    for control, mask in zip(controls, together, strict=True):
        assert np.array_equal(mask, control.mask())
    assert count < 20 or len({mask.tobytes() for mask in together}) > 3


@AHEAD
def test_a_failure_of_xgrammar_ends_one_request(ahead, monkeypatch):
    """Whatever asks it for a mask; the others' tokens are as ever."""
    llm = demo(async_scheduling=ahead)
    params = [
        structured(regex="[a-f]{12}"),
        structured(regex="[a-z]{12}"),
        SamplingParams(temperature=0, max_tokens=20),
    ]
    expected = generate(llm, PROMPTS[:3], params)
    batch, alone, asked = BatchGrammarMatcher.batch_fill_next_token_bitmask, GrammarMatcher.fill_next_token_bitmask, []

    def check(matchers):
        asked.extend(matchers)
        if asked.count(asked[0]) > 5 and asked[0] in matchers:
            raise RuntimeError("it is broken")

    def fill(self, matchers, *more):
        check(matchers)
        return batch(self, matchers, *more)

    def fill_alone(self, *more, **options):
        check([self])
        return alone(self, *more, **options)

    monkeypatch.setattr(BatchGrammarMatcher, "batch_fill_next_token_bitmask", fill)
    monkeypatch.setattr(GrammarMatcher, "fill_next_token_bitmask", fill_alone)
    outputs = generate(llm, PROMPTS[:3], params)
    assert outputs[0].error == "structured_outputs: the next token could not be restricted (the log says why)"
    assert [output.error for output in outputs[1:]] == [None, None]
    assert token_ids(outputs[1:]) == token_ids(expected[1:])
    stats = llm.engine.stats
    assert stats.num_free_blocks == stats.num_blocks


def test_a_sequences_id_is_taken_while_its_grammar_compiles(llm):
    engine = llm.engine
    engine.add_request("a", PROMPTS[0], structured(1.0, n=2, seed=1, regex="[b-k]{3}[a-m]{2}"))
    with pytest.raises(ValueError, match="'a#0' is in use by a sequence of another"):
        engine.add_request("a#0", PROMPTS[1], SamplingParams(max_tokens=4))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert outputs[-1].finished and outputs[-1].error is None


@AHEAD
def test_a_step_is_launched_before_the_tokens_that_its_masks_depend_on_are_known(ahead, monkeypatch):
    """Only its draw comes after them, and before the next launch."""
    llm, events = demo(async_scheduling=ahead), []
    runner, wait = llm.engine._runner, RunningStep.wait

    def noted(name, call):
        return lambda *args: (events.append(name), call(*args))[1]

    monkeypatch.setattr(runner, "launch", noted("launch", runner.launch))
    monkeypatch.setattr(runner, "draw", noted("draw", runner.draw))
    monkeypatch.setattr(RunningStep, "wait", noted("wait", wait))
    generate(llm, PROMPTS[:2], structured(regex="[a-z]{6}"))
    first, rest = (["launch", "draw"], ["launch", "wait", "draw"]) if ahead else ([], ["launch", "draw", "wait"])
    assert events[: len(first)] == first
    for at in range(len(first), len(first) + 12, 3):
        assert events[at : at + 3] == rest


@settings(max_examples=examples(25))
@given(st.lists(SCHEMAS, min_size=1, max_size=3), st.sampled_from([0.0, 1.0]), st.booleans())
def test_json_parses_and_validates(llm, schemas, temperature, as_text):
    """Several schemas in one batch."""
    params = [
        structured(
            temperature, seed=1, json=json.dumps(schema) if as_text else schema, disable_any_whitespace=not as_text
        )
        for schema in schemas
    ]
    for p in params:
        p.max_tokens = 400
    outputs = generate(llm, PROMPTS[: len(schemas)], params)
    for schema, output in zip(schemas, outputs, strict=True):
        completion = output.outputs[0]
        assert output.error is None and completion.finish_reason == "stop", completion.text
        assert valid(schema, json.loads(completion.text)), completion.text
        outside = re.sub(r'"(\\.|[^"\\])*"', '""', completion.text)
        assert as_text or not re.search(r"(?<![,:])\s|\s\s", outside), completion.text


REGEXES = (
    "[0-9]{3}-[0-9]{4}",
    "(yes|no|maybe)",
    "[A-Z][a-z]{2,8}( [A-Z][a-z]{1,6})?",
    r"\d{1,3}(\.\d{1,3}){3}",
    "^a{2,5}b?$",
)


@settings(max_examples=examples(25))
@given(st.sampled_from(REGEXES), st.sampled_from([0.0, 1.0]), st.integers(0, 99))
def test_a_regex_matches_all_of_the_output(llm, regex, temperature, seed):
    (text,) = texts(generate(llm, PROMPTS[0], structured(temperature, seed=seed, regex=regex)))
    assert re.fullmatch(regex, text)


@settings(max_examples=examples(25))
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8), min_size=1, max_size=4))
def test_the_output_is_a_choice(llm, choices):
    """Quotes, control characters and all."""
    params = structured(1.0, seed=3, choice=choices)
    params.skip_special_tokens = False
    output = generate(llm, PROMPTS[1], params)[0]
    assert output.error is None and output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].text in choices


def test_grammars_and_any_json(llm):
    expression = 'root ::= term (" + " term){1,2}\nterm ::= [0-9] | "(" [a-z] ")"'
    (text,) = texts(generate(llm, PROMPTS[0], structured(grammar=expression)))
    ends, tokenizer = structured(1.0, 150, n=8, seed=4, json_object=True), llm.get_tokenizer()
    ends.logit_bias = {i: 9.0 for i in range(len(tokenizer)) if tokenizer.decode([i]).strip() in ("}", "]", '"')}
    outputs = generate(llm, PROMPTS[1], ends)[0].outputs
    ended = [json.loads(completion.text) for completion in outputs if completion.finish_reason == "stop"]
    assert ended and all(isinstance(value, dict | list) for value in ended)
    assert re.fullmatch(r"(\d|\([a-z]\))( \+ (\d|\([a-z]\))){1,2}", text)


SMALL = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_output_is_filled_with_blanks(llm, temperature):
    """By default, too: a small model would indent to its last token."""
    params = structured(temperature, 80, n=8 if temperature else 1, seed=5, json=SMALL)
    for text in texts(generate(llm, PROMPTS[:3], params)):
        assert valid({**SMALL, "additionalProperties": False}, json.loads(text))


@AHEAD
def test_a_form_ends_an_output_however_many_tokens_it_should_have(ahead):
    """And nothing else does."""
    llm = demo(async_scheduling=ahead)
    params = structured(1.0, 30, n=2, seed=2, regex="(yes|no)|[ab]{3,12}")
    params.min_tokens, params.stop_token_ids = 25, llm.get_tokenizer().encode("a")
    for text in texts(generate(llm, PROMPTS[:3], params)):
        assert text in ("yes", "no") or len(text) == 12, "it goes on as long as it can"


def test_a_form_that_can_go_on_has_min_tokens(llm):
    params = structured(0.0, 40, regex="[a-z ]*")
    assert len(generate(llm, PROMPTS[0], params)[0].outputs[0].token_ids) < 40
    params.min_tokens = 35
    assert len(generate(llm, PROMPTS[0], params)[0].outputs[0].token_ids) >= 35


@AHEAD
@pytest.mark.parametrize(
    "limits", [{}, {"max_num_batched_tokens": 8}, {"num_blocks": 28, "block_size": 4}, {"max_num_seqs": 2}]
)
def test_neighbours_get_the_tokens_they_would_get_alone(ahead, limits):
    """And the structured ones, too, whether planned ahead, in chunks, preempted, or waiting for seats."""
    llm = demo(async_scheduling=ahead, max_model_len=100, **limits)
    sampled = SamplingParams(temperature=1.0, seed=8, max_tokens=40, repetition_penalty=1.2)
    params = [
        SamplingParams(temperature=0, max_tokens=40),
        structured(json=PERSON, disable_any_whitespace=True),
        sampled,
        structured(1.0, seed=5, n=2, json=PERSON, disable_any_whitespace=True),
        structured(choice=["red", "green"]),
    ]
    prompts = [*PROMPTS, PROMPTS[0]]
    outputs = generate(llm, prompts, params)
    for text in texts(outputs[1:2] + outputs[3:4]):
        assert valid(PERSON, json.loads(text))
    assert outputs[4].outputs[0].text in ("red", "green")
    roomy = demo(async_scheduling=False, enable_prefix_caching=False)
    alone = [generate(roomy, prompt, p)[0] for prompt, p in zip(prompts, params, strict=True)]
    assert token_ids(outputs) == token_ids(alone)
    assert token_ids(generate(llm, prompts, params)) == token_ids(alone)  # the prompts are cached now
    stats = llm.engine.stats
    assert stats.num_free_blocks == stats.num_blocks
    assert (stats.preemptions > 0) == ("num_blocks" in limits)


def together(llm, params, jumps):
    """Outputs and texts in one batch, with every jump that there is or with none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jump_forward, "WORTH", 10**9)
        if not jumps:
            patch.setattr(engine_module, "jump", lambda requests, scheduler: [])
        before = llm.engine.stats
        outputs = generate(llm, PROMPTS[: len(params)], params)
        after = llm.engine.stats
    assert after.num_free_blocks == after.num_blocks
    return outputs, after.forced_tokens - before.forced_tokens, after.steps - before.steps


KEYS = {name: {"type": "boolean"} for name in ("xylophone", "question_mark_1234", "zzzz")}
ALL_KEYS = {"type": "object", "properties": KEYS, "required": list(KEYS), "additionalProperties": False}


@settings(max_examples=examples(20))
@given(
    st.lists(st.one_of(SCHEMAS, st.just(ALL_KEYS)), min_size=1, max_size=3),
    st.sampled_from([0.0, 1.0]),
    st.integers(1, 60),
    st.sampled_from([{}, {"stop": ["e", "1"]}, {"include_stop_str_in_output": True, "stop": ["fa"]}, {"n": 2}]),
)
def test_jumping_forward_changes_no_token(llm, schemas, temperature, max_tokens, more):
    """Nor texts, endings and lengths, beside a neighbour without a grammar."""
    params = [structured(temperature, max_tokens, seed=3, json=s, disable_any_whitespace=True) for s in schemas]
    for p in params:
        for name, value in more.items():
            setattr(p, name, value)
    params.append(SamplingParams(temperature=1.0, seed=1, max_tokens=20))
    jumped, _, _ = together(llm, params, True)
    stepwise, forced, _ = together(llm, params, False)
    assert forced == 0 and token_ids(jumped) == token_ids(stepwise)
    for mine, other in zip(jumped, stepwise, strict=True):
        ends = [(c.text, c.finish_reason, c.stop_reason) for c in mine.outputs]
        assert ends == [(c.text, c.finish_reason, c.stop_reason) for c in other.outputs]


@ON_GPU
@AHEAD
@pytest.mark.parametrize("limits", [{}, {"max_num_batched_tokens": 8}, {"num_blocks": 50, "block_size": 2}])
def test_jumping_forward_saves_steps(ahead, limits):
    """Also in chunks, over many blocks, and preempted."""
    llm = demo(async_scheduling=ahead, max_model_len=100, dtype="float32", **limits)
    params = [structured(max_tokens=90, json=ALL_KEYS, disable_any_whitespace=True)] * 2
    jumped, forced, steps = together(llm, params, True)
    stepwise, _, more_steps = together(llm, params, False)
    assert token_ids(jumped) == token_ids(stepwise) and forced > 10
    assert all(valid(ALL_KEYS, json.loads(text)) for text in texts(jumped))
    if not limits:
        assert steps < more_steps - 10  # both jump at once, and with planning ahead each jump costs a step
    lengths = [len(output.outputs[0].token_ids) for output in jumped + stepwise]
    assert llm.engine.stats.generated_tokens == sum(lengths)


@pytest.mark.gpu
@AHEAD
def test_captured_steps_draw_with_masks(ahead):
    """As steps without graphs do, beside requests of other kinds, and nothing is compiled after the start."""
    kinds = [
        structured(json=PERSON, disable_any_whitespace=True),
        SamplingParams(temperature=1.0, seed=8, max_tokens=40),
        structured(1.0, seed=5, n=2, json=PERSON, disable_any_whitespace=True),
        structured(1.0, seed=6, regex="[a-z ]{30}[0-9]+"),
    ]
    kinds[2].top_k = 20
    outputs = {}
    for eager in (True, False):
        llm = demo(async_scheduling=ahead, dtype="float32", enforce_eager=eager)
        outputs[eager] = [token_ids(generate(llm, PROMPTS, kinds)), token_ids(generate(llm, PROMPTS[:1], kinds[:1]))]
        assert llm.engine.stats.compilations_after_ready == 0
    assert outputs[True] == outputs[False]


def test_what_must_see_each_token_drawn_does_not_jump(llm):
    for name, value in (("logprobs", 1), ("min_tokens", 2), ("repetition_penalty", 1.1), ("logit_bias", {5: 1.0})):
        params = structured(json=ALL_KEYS, disable_any_whitespace=True)
        setattr(params, name, value)
        outputs, forced, _ = together(llm, [params], True)
        assert forced == 0 and outputs[0].error is None
        assert name != "logprobs" or len(outputs[0].outputs[0].logprobs) == len(outputs[0].outputs[0].token_ids)


def test_where_the_grammar_allows_it_the_model_is_not_disturbed(llm):
    (free,) = generate(llm, PROMPTS[0], SamplingParams(temperature=0, max_tokens=30))
    (held,) = generate(llm, PROMPTS[0], structured(max_tokens=30, regex=r"(.|\n)*"))
    assert held.outputs[0].token_ids == free.outputs[0].token_ids


def test_logprobs_are_of_the_model(llm):
    params = structured(choice=["qqq"])
    params.logprobs = 1
    first = generate(llm, PROMPTS[0], params)[0].outputs[0].logprobs[0]
    (free,) = generate(llm, PROMPTS[0], SamplingParams(temperature=0, max_tokens=1, logprobs=1))
    assert free.outputs[0].token_ids[0] in first  # still the most likely one, though it is banned


def test_others_run_while_a_grammar_compiles(monkeypatch):
    """A request waits for its own grammar only; the same text is compiled once."""
    llm, may_go, compiled = demo(), threading.Event(), []
    make = Grammars._make_compiler

    class Slow:
        def __init__(self, compiler):
            self.compiler = compiler

        def compile_grammar(self, grammar):
            assert may_go.wait(PATIENCE)
            compiled.append(grammar)
            return self.compiler.compile_grammar(grammar)

    monkeypatch.setattr(Grammars, "_make_compiler", lambda self: Slow(make(self)))
    engine = llm.engine
    engine.add_request("held", PROMPTS[0], structured(choice=["yes", "no"]))
    engine.add_request("aborted", PROMPTS[0], structured(choice=["yes", "no"], n=2))
    engine.add_request("free", PROMPTS[1], SamplingParams(temperature=0, max_tokens=5))
    assert engine.stats.num_waiting == 4
    done = []
    while "free" not in done:
        done += [output.request_id for output in engine.step() if output.finished]
    assert done == ["free"] and engine.step() == [] and engine.has_unfinished_requests()
    (output,) = engine.abort_request("aborted")
    assert [c.finish_reason for c in output.outputs] == ["abort"] * 2
    may_go.set()
    outputs = {}
    while engine.has_unfinished_requests():
        outputs.update({output.request_id: output for output in engine.step()})
    assert outputs["held"].outputs[0].text in ("yes", "no")
    assert texts(generate(llm, PROMPTS[:2], structured(choice=["yes", "no"])))
    assert len(compiled) == 1


def test_a_grammar_that_cannot_be_compiled_ends_its_request(monkeypatch):
    class Broken:
        def compile_grammar(self, grammar):
            raise RuntimeError("too large")

    monkeypatch.setattr(Grammars, "_make_compiler", lambda self: Broken())
    llm = demo()
    bad, good = generate(llm, PROMPTS[:2], [structured(regex="a"), SamplingParams(temperature=0, max_tokens=3)])
    assert (
        bad.outputs[0].finish_reason == "error"
        and bad.error == "structured_outputs could not be compiled: the log says why"
    )
    assert good.outputs[0].finish_reason == "length"
    assert not llm.engine.has_unfinished_requests()


def test_a_grammar_whose_tokens_are_all_banned_ends_its_request(llm):
    params = structured(choice=["yes"])
    params.allowed_token_ids = llm.get_tokenizer().encode("x")
    bad, good = generate(llm, PROMPTS[:2], [params, SamplingParams(temperature=0, max_tokens=3)])
    assert bad.outputs[0].finish_reason == "error" and "no token was left that the grammar allows" in bad.error
    assert bad.error.endswith(": allowed_token_ids banned them")
    assert good.error is None


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"regex": "("}, "regex cannot be used: .*parenthesis"),
        ({"grammar": 'start ::= "a"'}, "grammar cannot be used: .*root"),
        ({"json": "{"}, "json is not a JSON schema"),
        ({"json": {"a": {1, 2}}}, "json is not a JSON schema"),
        ({"grammar": "root ::= root"}, "grammar cannot be used: no text of its rule 'root' ever ends"),
        ({"json": {"type": "strange"}}, "json is not a JSON schema .*: 'type' must be of string, "),
        ({"json": "3"}, "json is not a JSON schema .*: it must be an object, got 3"),
        ({"json": {"not": {"type": "null"}}}, "json has 'not'"),
        ({"json": {"type": "array", "items": {"minimum": 3}}}, "json has 'minimum' without 'type'"),
        ({"json": {"type": "array", "uniqueItems": True}}, "json has 'uniqueItems'"),
        ({"json": {"type": "number", "multipleOf": 2}}, "json has 'multipleOf'"),
        ({"json": {"type": "string", "format": "iri"}}, "json has 'format': 'iri'"),
        ({"json": {"allOf": [{"type": "integer"}, {"type": "number"}]}}, "json has 'allOf'"),
        ({"json": {"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": {}}}}, "json has 'minimum' beside"),
        ({"json": {"type": "object", "required": ["z"]}}, "json has 'required'.*'z'"),
    ],
)
def test_what_is_wrong_is_refused_at_the_door(llm, wish, message):
    with pytest.raises(ValueError, match=f"^structured_outputs: {message}") as caught:
        generate(llm, PROMPTS[0], structured(**wish))
    assert ".cc" not in str(caught.value)  # no line of another project's sources
    assert not llm.engine.has_unfinished_requests()


def test_a_grammar_can_be_parsed_before_its_request_comes(llm, monkeypatch):
    """In a thread, and once; what is wrong with it is said when it is compiled, each time."""
    grammars = Grammars(llm.get_tokenizer(), llm.engine.inputs.vocab_size, frozenset({0}))
    parse, parsed = grammar_module.parse, []

    def counting(wish):
        parsed.append(threading.current_thread() is threading.main_thread())
        return parse(wish)

    monkeypatch.setattr(grammar_module, "parse", counting)
    wish, wrong = StructuredOutputsParams(regex="[a-c]+"), StructuredOutputsParams(regex="(")
    ahead = grammars.parse(wish)
    assert grammars.parse(wish) is ahead
    wait([ahead, grammars.compile(wish)])
    assert parsed == [False] and grammars.parse(wish) is None
    for _ in range(3):  # of several requests
        wait([grammars.parse(wrong)])
        with pytest.raises(ValueError, match="regex cannot be used"):
            grammars.compile(wrong)
    assert parsed == [False] * 2
    wide = [StructuredOutputsParams(regex=f"a{{{n}}}") for n in range(1, grammar_module.MOST_KEPT + 3)]
    wait([grammars.parse(one) for one in wide])
    wait([grammars.parse(wish := StructuredOutputsParams(regex="z"))])
    assert len(grammars._parsed) == grammar_module.MOST_KEPT and wish.key in grammars._parsed


def test_a_grammar_is_not_compiled_for_requests_that_are_gone(llm, monkeypatch):
    """While slow ones compile, others wait in a queue; clients may leave it."""
    engine, began, goes_on = llm.engine, [], threading.Event()
    grammars = engine.inputs._grammars

    class Slow:
        def compile_grammar(self, grammar):
            began.append(re.findall('"([0-9])"', str(grammar))[0])
            assert goes_on.wait(PATIENCE)
            return compiler.compile_grammar(grammar)

    compiler, slow = grammars._compiler.result(), Future()
    slow.set_result(Slow())
    monkeypatch.setattr(grammars, "_compiler", slow)
    for name, number in zip("abcdef", "012344", strict=True):
        engine.add_request(name, PROMPTS[0], structured(regex=f"gone{number}"))
    eventually(lambda: sorted(began) == ["0", "1"])
    engine.abort_request(["a", "c", "d", "e"])  # what compiles already goes on, and another one wants what the last did
    goes_on.set()
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    ended = {output.request_id: output.outputs[0].text for output in outputs if output.finished}
    assert ended == {"b": "gone1", "f": "gone4"}
    assert sorted(began) == ["0", "1", "4"]
    eventually(lambda: grammars.parse(StructuredOutputsParams(regex="gone0")) is None)  # what was compiled is kept


def test_a_wrong_text_does_not_spoil_the_schema_that_it_looks_like(llm):
    """Which others ask for: what is wrong is kept."""
    grammars = Grammars(llm.get_tokenizer(), llm.engine.inputs.vocab_size, frozenset({0}))
    schema = {"type": "string"}
    for wish in (StructuredOutputsParams(json=repr(schema)), StructuredOutputsParams(json=schema)):
        wait([grammars.parse(wish)])
    with pytest.raises(ValueError, match="json is not a JSON schema"):
        grammars.compile(StructuredOutputsParams(json=repr(schema)))
    assert grammars.compile(StructuredOutputsParams(json=schema)).result() is not None


def test_what_does_not_go_together():
    for more in ({"ignore_eos": True}, {"thinking_token_budget": 3}):
        with pytest.raises(ValueError, match=f"^structured_outputs .* leave {next(iter(more))} out"):
            SamplingParams(structured_outputs={"regex": "a"}, **more)
    with pytest.raises(ValueError, match="need a tokenizer"):
        generate(tiny_llm(skip_tokenizer_init=True), [[1, 2]], greedy_without_eos({"regex": "a"}))


def greedy_without_eos(wish):
    params = greedy(3)
    params.ignore_eos, params.structured_outputs, params.detokenize = False, wish, False
    return params


def test_xgrammar_is_an_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "xgrammar", None)
    with pytest.raises(ValueError, match=r"pip install '\.\[structured\]'"):
        grammar_module.parse(StructuredOutputsParams(regex="a"))


def test_the_older_name():
    params = SamplingParams(guided_decoding=GuidedDecodingParams(regex="a+"))
    assert params.structured_outputs == StructuredOutputsParams(regex="a+") and params.guided_decoding is None
    assert SamplingParams(guided_decoding={"regex": "a+"}) == params == params.clone()
    with pytest.raises(ValueError, match="give one"):
        SamplingParams(guided_decoding={"regex": "a+"}, structured_outputs={"regex": "b"})

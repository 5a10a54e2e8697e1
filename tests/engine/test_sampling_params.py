import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.many import Many

from tritonllm.config.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_EXTRA_SIZE,
    MAX_FORM_CHARS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_PROCESSORS,
    MAX_SCHEMA_CHARS,
    MAX_STOP_CHARS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    RepetitionDetectionParams,
    SamplingParams,
    StructuredOutputsParams,
    size_of,
)
from tritonllm.serve.api.protocol import CompletionRequest
from tritonllm.serve.engines.messages import pack_params

NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", 1.0),
        ("n", True),
        ("temperature", -0.1),
        ("temperature", NAN),
        ("temperature", INFINITY),
        ("temperature", "1"),
        ("temperature", None),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", NAN),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", NAN),
        ("seed", 1.5),
        ("seed", 2**63),
        ("presence_penalty", 2.1),
        ("presence_penalty", NAN),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", INFINITY),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", "10"),
        ("min_tokens", -1),
        ("min_tokens", 17),  # the default of max_tokens is 16
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [1]),
        ("stop", 1),
        ("stop_token_ids", 5),
        ("stop_token_ids", "12"),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [1.0]),
        ("stop_token_ids", iter([1])),  # checking it would use it up
        ("logprobs", -2),
        ("logprobs", MAX_LOGPROBS + 1),
        ("logprobs", True),
        ("prompt_logprobs", -2),
        ("prompt_logprobs", MAX_LOGPROBS + 1),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("truncate_prompt_tokens", 1.0),
        ("thinking_token_budget", -1),
        ("thinking_token_budget", 1.5),
        ("logits_processors", len),
        ("logits_processors", [1]),
        ("logits_processors", "a"),
        ("extra_args", 3),
        ("structured_outputs", object()),
        ("structured_outputs", "a+"),
        ("structured_outputs", {"regex": "a", "json": "{}"}),
        ("structured_outputs", {"disable_any_whitespace": True}),
        ("structured_outputs", {"regexp": "a"}),
        ("structured_outputs", {"regex": 3}),
        ("structured_outputs", {"json": 3}),
        ("structured_outputs", {"choice": "ab"}),
        ("structured_outputs", {"choice": []}),
        ("structured_outputs", {"choice": ["a", ""]}),
        ("structured_outputs", {"json_object": False}),
        ("guided_decoding", {"grammar": 3}),
        ("repetition_detection", 3),
        ("repetition_detection", {"max_pattern_size": 3, "min_count": 1}),
        ("repetition_detection", {"max_pattern_size": 3, "min_pattern_size": 4, "min_count": 2}),
        ("repetition_detection", {"size": 3}),
        ("logit_bias", [(1, 1.0)]),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"1": 1.0}),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", {1: NAN}),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", 5),
        ("bad_words", "word"),  # not the letters w, o, r, d
        ("bad_words", [""]),
        ("bad_words", [1]),
        ("bad_words", 1),
    ],
)
def test_bad_values_are_named(name, value):
    with pytest.raises(ValueError, match=rf"^{name}\b"):
        SamplingParams(**{name: value})


def test_unknown_names_are_refused():
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"temperature": 0},
        {"top_k": -1},
        {"top_p": 1e-9},
        {"min_p": 1},
        {"seed": -(2**63)},
        {"presence_penalty": -2},
        {"max_tokens": None, "min_tokens": 1000},
        {"max_tokens": 5, "min_tokens": 5},
        {"logprobs": 0, "prompt_logprobs": MAX_LOGPROBS},
        {"logit_bias": {0: -100}},
    ],
)
def test_limits_themselves_are_allowed(kwargs):
    params = SamplingParams(**kwargs)
    assert {name: getattr(params, name) for name in kwargs} == kwargs


def test_sequences_become_lists():
    params = SamplingParams(stop="END", stop_token_ids=(1, 2), allowed_token_ids={3}, bad_words=("a", "b"))
    assert (params.stop, params.stop_strings) == (["END"], ["END"])
    assert (params.stop_token_ids, params.allowed_token_ids, params.bad_words) == ([1, 2], [3], ["a", "b"])
    empty = SamplingParams(stop_token_ids=None, bad_words=None)
    assert (empty.stop, empty.stop_token_ids, empty.bad_words) == ([], [], [])
    assert empty.allowed_token_ids is None


def test_stop_strings_need_text():
    with pytest.raises(ValueError, match="stop strings need detokenize=True"):
        SamplingParams(stop="END", detokenize=False)


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (1e-6, True), (1e-5, False), (1.0, False)])
def test_greedy(temperature, greedy):
    assert SamplingParams(temperature=temperature).greedy is greedy


def test_parameters_can_be_changed_and_are_checked_when_used():
    params = SamplingParams()
    params.temperature, params.stop = 0.5, "END"
    params.stop_token_ids.append(3)
    kept = params.checked()
    assert (kept.temperature, kept.stop, kept.stop_token_ids) == (0.5, ["END"], [3])
    params.stop_token_ids.append(4)
    assert kept.stop_token_ids == [3]
    params.top_p = 2.0
    with pytest.raises(ValueError, match=r"^top_p"):
        params.checked()
    with pytest.raises(AttributeError, match="temprature"):
        params.temprature = 1.0


def test_a_clone_shares_nothing():
    params = SamplingParams(stop=["a"], logit_bias={1: 2.0}, bad_words=["b"])
    clone = params.clone()
    assert clone == params
    for copy in (clone, params.checked()):
        copy.stop.append("c")
        copy.bad_words.append("c")
        copy.logit_bias[1] = 0.0
    assert params == SamplingParams(stop=["a"], logit_bias={1: 2.0}, bad_words=["b"])


def test_equal_parameters_are_one_key():
    assert len({SamplingParams(stop=["a"]), SamplingParams(stop="a"), SamplingParams(stop="b")}) == 2


def test_from_optional():
    params = SamplingParams.from_optional(
        n=None, temperature=None, top_p=0.5, max_tokens=None, logit_bias={"7": 200.0}, structured_outputs=None
    )
    assert params == SamplingParams(top_p=0.5, max_tokens=None, logit_bias={7: 100.0})
    assert SamplingParams.from_optional() == SamplingParams()
    assert SamplingParams.from_optional(logit_bias={1: -200, 2: 3}).logit_bias == {1: -100.0, 2: 3}
    for bias in ({"a": 1.0}, {1: NAN}, {1: None}, 5):
        with pytest.raises(ValueError, match=r"^logit_bias"):
            SamplingParams.from_optional(logit_bias=bias)


def test_places_are_those_of_vllm():
    assert SamplingParams(2, 0.1, 0.2, 1.1, 0.7, 0.9, 5, 0.05, 3) == SamplingParams(
        n=2,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        temperature=0.7,
        top_p=0.9,
        top_k=5,
        min_p=0.05,
        seed=3,
    )


@pytest.mark.parametrize(
    "kwargs",
    [
        {"best_of": None, "guided_decoding": None, "structured_outputs": None},
        {"best_of": 1, "skip_clone": False},
        {"output_text_buffer_length": 0, "flat_logprobs": False, "skip_clone": True, "use_beam_search": False},
    ],
)
def test_neutral_values_of_vllm(kwargs):
    assert SamplingParams(**kwargs).checked().temperature == 1.0


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("best_of", 3, "ask for n"),
        ("use_beam_search", True, "leave it out"),
    ],
)
def test_other_values_of_vllm_are_refused(name, value, advice):
    with pytest.raises(ValueError, match=rf"^{name}=.*{advice}"):
        SamplingParams(**{name: value})
    params = SamplingParams()
    setattr(params, name, value)
    with pytest.raises(ValueError, match=rf"^{name}="):
        params.checked()


class ManyKeys(dict):
    def __init__(self, count):
        self.count = count

    __len__ = Many.__len__
    __iter__ = __getitem__ = __contains__ = items = keys = values = Many.__iter__


COUNTED = [
    ("stop", MAX_STOPS, lambda n: [f"w{i}" for i in range(n)], Many),
    ("bad_words", MAX_BAD_WORDS, lambda n: [f"w{i}" for i in range(n)], Many),
    ("stop_token_ids", MAX_STOP_TOKEN_IDS, lambda n: list(range(n)), Many),
    ("allowed_token_ids", MAX_ALLOWED_TOKEN_IDS, lambda n: [0] * n, Many),
    ("logit_bias", MAX_LOGIT_BIAS, lambda n: dict.fromkeys(range(n), 1.0), ManyKeys),
    ("logits_processors", MAX_PROCESSORS, lambda n: [print] * n, Many),
]


@pytest.mark.parametrize(("name", "most", "make", "many"), COUNTED)
def test_lists_are_counted_before_any_work(name, most, make, many):
    SamplingParams(**{name: make(most)})
    for build in (SamplingParams, SamplingParams.from_optional):
        with pytest.raises(ValueError, match=f"^{name} has {most + 1} .*, more than {most}: leave some out"):
            build(**{name: many(most + 1)})


@pytest.mark.parametrize(("name", "most"), [("stop", MAX_STOP_CHARS), ("bad_words", MAX_BAD_WORD_CHARS)])
def test_strings_are_not_longer_than_their_limit(name, most):
    SamplingParams(**{name: ["a" * most]})
    with pytest.raises(ValueError, match=f"^{name} has a string of {most + 1} characters, more than {most}"):
        SamplingParams(**{name: ["a" * (most + 1)]})


def test_extra_args_are_not_larger_than_their_limit():
    nested = {"kv_transfer_params": {"remote_block_ids": [1] * (MAX_EXTRA_SIZE - 100)}}
    assert SamplingParams(extra_args=nested).extra_args == nested
    nested["kv_transfer_params"]["more"] = "x" * 200
    with pytest.raises(ValueError, match=r"^extra_args have more than"):
        SamplingParams(extra_args=nested)


FORMS = [
    ("regex", "a" * MAX_FORM_CHARS, "a" * (MAX_FORM_CHARS + 1)),
    ("grammar", "a" * MAX_FORM_CHARS, "a" * (MAX_FORM_CHARS + 1)),
    ("json", "1" * MAX_SCHEMA_CHARS, "1" * (MAX_SCHEMA_CHARS + 1)),
    ("json", {"title": "a" * (MAX_SCHEMA_CHARS - 100)}, {"title": "a" * MAX_SCHEMA_CHARS}),
    ("json", {"enum": [0] * (MAX_SCHEMA_CHARS - 100)}, {"enum": [0] * MAX_SCHEMA_CHARS}),
    ("json", {"enum": [[0]] * (MAX_SCHEMA_CHARS // 2 - 100)}, {"enum": [[0]] * MAX_SCHEMA_CHARS}),
    ("choice", ["a" * 10] * MAX_CHOICES, ["a" * 10] * (MAX_CHOICES - 1) + ["a" * 11]),
]


@pytest.mark.parametrize(("name", "allowed", "refused"), FORMS)
def test_forms_are_not_larger_than_their_limit(name, allowed, refused):
    assert StructuredOutputsParams(**{name: allowed}).wish == (name, allowed)
    with pytest.raises(
        ValueError, match=f"^{name} has more than {MAX_SCHEMA_CHARS if name == 'json' else MAX_FORM_CHARS} "
    ):
        StructuredOutputsParams(**{name: refused})


def test_choices_are_counted_before_any_work():
    with pytest.raises(ValueError, match=f"^choice has {MAX_CHOICES + 1} strings, more than {MAX_CHOICES}: leave some"):
        StructuredOutputsParams(choice=Many(MAX_CHOICES + 1))


def test_a_size_is_looked_at_no_further_than_its_limit():
    endless = []
    endless.append(endless)  # of itself
    assert 100 < size_of(endless, 100) <= 102
    assert size_of({"a": [1, "bc", None], "d": {}}, 100) == len([{}, "a", [], 1, "bc", None, "d", {}]) + len("abcd")


def test_a_schema_and_its_repr_are_two_wishes():
    schema = {"type": "string"}
    assert StructuredOutputsParams(json=schema).key != StructuredOutputsParams(json=repr(schema)).key
    assert StructuredOutputsParams(json=schema).key == StructuredOutputsParams(json=dict(schema)).key


def test_repr_shows_what_has_an_effect():
    text = repr(SamplingParams(top_k=3))
    assert "top_k=3" in text
    assert "best_of" not in text


@given(st.lists(st.integers(0, 2), max_size=16), st.integers(1, 4), st.integers(0, 4), st.integers(2, 4))
def test_repetitions_are_found_where_they_are(tokens, least, more, count):
    params = RepetitionDetectionParams(max_pattern_size=least + more, min_pattern_size=least, min_count=count)
    sizes = [size for size in range(least, least + more + 1) if size * count <= len(tokens)]
    expected = any(tokens[-size * count :] == tokens[-size:] * count for size in sizes)
    assert params.found([*tokens, 7, 7, 7, 7], len(tokens)) == expected


def found_by_definition(params, tokens, length):
    """Every size by itself."""
    for size in range(max(params.min_pattern_size, 1), params.max_pattern_size + 1):
        first = length - size * params.min_count
        if first < 0:
            return False
        if tokens[first : length - size] == tokens[first + size : length]:
            return True
    return False


SOME = st.lists(st.integers(0, 1), max_size=6)
REPEATED = st.lists(st.builds(lambda some, times: some * times, SOME, st.integers(1, 5)), max_size=5).map(
    lambda parts: [token for part in parts for token in part]
)


@given(REPEATED, st.integers(0, 20), st.integers(0, 60), st.integers(2, 4))
def test_repetitions_are_found_as_by_their_definition(tokens, least, more, count):
    params = RepetitionDetectionParams(max_pattern_size=least + more, min_pattern_size=least, min_count=count)
    for length in range(len(tokens) + 1):
        assert params.found(tokens, length) == found_by_definition(params, tokens, length)


class Counting(list):
    """Counts how many tokens are read or copied."""

    reads = 0

    def __getitem__(self, at):
        if isinstance(at, slice):
            found = Counting(super().__getitem__(at))
            Counting.reads += len(found)
            return found
        Counting.reads += 1
        return super().__getitem__(at)


@pytest.mark.parametrize("run", [1, 50, 3000])
def test_repetitions_are_looked_for_in_linear_time(run, monkeypatch):
    """Runs of one token that are nearly repetitions, for patterns of all lengths."""
    monkeypatch.setattr(Counting, "reads", 0)
    tokens = [2] + [0] * 3000 + [1] + [0] * run
    params = RepetitionDetectionParams(max_pattern_size=2**31 - 1, min_pattern_size=run, min_count=2)
    assert not params.found(Counting(tokens), len(tokens))
    assert Counting.reads < 10 * len(tokens)


def test_repetition_detection_may_be_a_dict_and_off():
    params = SamplingParams(repetition_detection={"max_pattern_size": 2, "min_count": 3})
    assert params.repetition_detection == RepetitionDetectionParams(max_pattern_size=2, min_count=3)
    assert not RepetitionDetectionParams().found([1, 1, 1, 1], 4)


def test_numbers_of_numpy_become_pythons():
    """A seed is often drawn, and a temperature taken from a range; another process gets both as messages."""
    params = SamplingParams(
        n=np.int64(2),
        temperature=np.float32(0.5),
        top_p=np.float64(0.25),
        seed=np.int64(3),
        max_tokens=np.int32(5),
        stop_token_ids=np.array([1, 2]),
        allowed_token_ids=np.array([3, 4]),
        logit_bias={np.int64(3): np.float32(1.5)},
    )
    numbers = [params.n, params.temperature, params.top_p, params.seed, params.max_tokens]
    assert numbers == [2, 0.5, 0.25, 3, 5] and [type(one) for one in numbers] == [int, float, float, int, int]
    assert (params.stop_token_ids, params.allowed_token_ids, params.logit_bias) == ([1, 2], [3, 4], {3: 1.5})
    assert msgspec.msgpack.encode(pack_params(params))
    for name in ("n", "max_tokens", "seed", "top_k"):
        with pytest.raises(ValueError, match=f"{name} must be an integer"):
            SamplingParams(**{name: np.float64(2.5)})


NEUTRAL = {
    "disable_fallback": False,
    "disable_additional_properties": False,
    "whitespace_pattern": None,
    "structural_tag": None,
}


def test_fields_of_structure_that_only_vllm_has():
    assert StructuredOutputsParams(regex="a", **NEUTRAL) == StructuredOutputsParams(regex="a")
    StructuredOutputsParams(regex="a", backend="xgrammar", disable_fallback=True)
    for name, value in (
        ("disable_additional_properties", True),
        ("whitespace_pattern", " "),
        ("structural_tag", "{}"),
        ("backend", "outlines"),
    ):
        with pytest.raises(ValueError, match=f"{name}={value!r}: tritonllm does not have this"):
            StructuredOutputsParams(regex="a", **{name: value})
    with pytest.raises(ValueError, match=r"structured_outputs: structural_tag="):
        SamplingParams(structured_outputs={"regex": "a", "structural_tag": "{}"})


def test_fields_of_structure_in_a_body():
    body = {"prompt": "x", "structured_outputs": {"regex": "a", **NEUTRAL}}
    assert CompletionRequest(**body).form() == StructuredOutputsParams(regex="a")
    body["structured_outputs"]["whitespace_pattern"] = " "
    with pytest.raises(ValueError, match=r"structured_outputs: whitespace_pattern=' '.*disable_any_whitespace"):
        CompletionRequest(**body).form()
    body["structured_outputs"] = {"regexp": "a"}
    with pytest.raises(ValueError, match=r"must have some of json, regex, .*, after_thought, got 'regexp'"):
        CompletionRequest(**body).form()

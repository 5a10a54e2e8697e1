import pytest

from tritonllm.sampling_params import MAX_LOGPROBS, SamplingParams

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
        ("logprobs", -1),
        ("logprobs", MAX_LOGPROBS + 1),
        ("logprobs", True),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", MAX_LOGPROBS + 1),
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


def test_sequences_become_tuples():
    params = SamplingParams(stop="END", stop_token_ids=[1, 2], allowed_token_ids={3}, bad_words=["a", "b"])
    assert (params.stop, params.stop_strings) == (("END",), ("END",))
    assert (params.stop_token_ids, params.allowed_token_ids, params.bad_words) == ((1, 2), (3,), ("a", "b"))
    assert SamplingParams().stop_strings == ()
    assert SamplingParams(bad_words=None).bad_words == ()


def test_stop_strings_need_text():
    with pytest.raises(ValueError, match="stop strings need detokenize=True"):
        SamplingParams(stop="END", detokenize=False)


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (1e-6, True), (1e-5, False), (1.0, False)])
def test_greedy(temperature, greedy):
    assert SamplingParams(temperature=temperature).greedy is greedy

"""Large bodies are parsed a part at a time, and say what they would at once."""

import json
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from tritonllm.serve.api import large_bodies
from tritonllm.serve.api.errors import APIError
from tritonllm.serve.api.large_bodies import MOST_CONTAINERS, parse

LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text('ab,:[]{}"\\é\n', max_size=30)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text('a"\\,é{', max_size=5), inner)),
    max_leaves=40,
)


def test_a_text_may_have_any_brackets():
    text = '{"[' * MOST_CONTAINERS + "\\"
    assert parse(json.dumps({"prompt": text, "n": 1}).encode()) == {"prompt": text, "n": 1}


@pytest.mark.parametrize("what", ["[]", "{}", '{"a": "["}'])
def test_objects_and_arrays_are_counted_before_any_is_made(monkeypatch, what):
    at_most = f'{{"x": [{",".join([what] * (MOST_CONTAINERS - 2))}]}}'
    assert len(parse(at_most.encode())["x"]) == MOST_CONTAINERS - 2
    monkeypatch.setattr(large_bodies, "_value", None)
    beyond = f'{{"x": [{",".join([what] * (MOST_CONTAINERS - 1))}]}}'
    message = f"the body has {MOST_CONTAINERS + 1} objects and arrays, more than {MOST_CONTAINERS}: leave some out"
    with pytest.raises(APIError, match=re.escape(message)) as caught:
        parse(beyond.encode())
    assert caught.value.status == 400


@pytest.fixture(scope="module")
def small_parts():
    """As if some bytes were a large body, and looked at a few at a time."""
    with pytest.MonkeyPatch.context() as patch:
        for name, size in (("LARGE", 8), ("PART", 6), ("_SLICE", 5)):
            patch.setattr(large_bodies, name, size)
        yield


@settings(max_examples=examples(300))
@given(VALUES, st.booleans(), st.sampled_from([None, 1]), st.sampled_from(["utf-8", "utf-8-sig", "utf-16"]))
def test_a_body_says_what_it_would_at_once(small_parts, value, ascii, indent, encoding):
    text = json.dumps(value, ensure_ascii=ascii, indent=indent)
    assert parse(f" {text}\n".encode(encoding)) == value


@pytest.mark.parametrize(
    "text",
    [
        *("[1,2,]", "[1,,2]", "[,1]", "[1],[2]", '{"a": 1,}', '{"a": [1}', "[1, 2", '["a, "b"]', '["a\\", 1]', ""),
        *(
            "[{], [}]",
            '{"a": 1, "b"}',
            '{"a": {"b": 1, "c"}, "d": 2}',
            "[[1, 2, 3], [4, 5, 6]",
            "[[1, 2, 3]], [4, 5, 6]]",
        ),
    ],
)
def test_what_is_no_json_is_none_in_parts(small_parts, text):
    for one in (text, text.replace(" ", "  " * 9), text.replace("1", "11111111111")):
        with pytest.raises(json.JSONDecodeError):
            json.loads(one)
        with pytest.raises(json.JSONDecodeError):
            parse(one.encode())


def test_mutated_bodies_are_told_alike(small_parts):
    rng = random.Random(3)
    good = json.dumps({"prompt": ["a, b", 'c"d', [1, 2, [3]]], "x": {"y": [{}, {"z": "\\"}], "w": 1.5}})
    for _ in range(2000):
        text = list(good)
        for _ in range(rng.choice([1, 2, 3])):
            text[rng.randrange(len(text))] = rng.choice(['"', "\\", ",", "[", "]", "{", "}", ":", " ", "1", ""])
        text = "".join(text)
        try:
            expected = json.loads(text)
        except ValueError:
            with pytest.raises(ValueError):
                parse(text.encode())
        else:
            assert parse(text.encode()) == expected


def test_nested_values_are_not_cut_again_and_again(small_parts):
    deep = "[" * 500 + "1" + "]" * 500
    assert parse(deep.encode()) == json.loads(deep)

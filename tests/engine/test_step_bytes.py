"""A step is the same behind its bytes, and bytes that are none are an error, whatever they are."""

import dataclasses
import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from tritonllm.config.sampling_rows import SamplingRows
from tritonllm.engine.data.agreement import Sums
from tritonllm.engine.data.copy_batches import Fills, Transfers
from tritonllm.engine.data.pooled_spans import PooledSpan
from tritonllm.engine.data.request import Pooling
from tritonllm.engine.data.step import OF_THE_FIRST, PromptSpan, SeatTokens, SharedPrefix, Step
from tritonllm.engine.data.step_bytes import MalformedError, StepMessage, pack, unpack
from tritonllm.engine.data.step_inputs import PARAMETERS
from tritonllm.engine.step.dummy_step import dummy_step

COUNTS = st.integers(0, 5)


def numbers(dtype, *shape):
    return st.integers(0, 2**31 - 1).map(lambda seed: np.random.default_rng(seed).integers(0, 2, shape).astype(dtype))


def several(strategy):
    return st.lists(strategy, max_size=3).map(tuple)


PAIRS = several(st.tuples(st.integers(0, 2**40), st.integers(-1, 9)))
IDS = st.text(max_size=8)
SPANS = st.builds(PromptSpan, IDS, COUNTS, COUNTS, numbers(np.int64, 3), st.sampled_from([0, 3, 1 << 30]))
POOLED = st.builds(
    PooledSpan, IDS, COUNTS, st.builds(Pooling, st.sampled_from(["last", "mean"]), st.booleans()), *[COUNTS] * 3, COUNTS
)
TOKENS = st.builds(SeatTokens, COUNTS, numbers(np.int32, 7), st.none() | numbers(np.int32, 4))


@st.composite
def steps(draw):
    decodes, chunks = draw(COUNTS), draw(st.lists(st.integers(1, 6), max_size=3))
    step = dummy_step(decodes, chunks, rows=min(decodes + len(chunks), 3), width=draw(st.integers(1, 4)))
    parameters = {name: draw(numbers(column.dtype, 4)) for name, column in PARAMETERS.items()}
    return dataclasses.replace(
        step,
        parameters=draw(st.none() | st.just(SamplingRows(**parameters))),
        longest=draw(st.integers(0, 1 << 20) | st.just(np.int64(7))),
        shared=draw(st.none() | st.builds(SharedPrefix, COUNTS, numbers(np.bool_, decodes))),
        late=draw(st.booleans() | st.just(np.True_)),
        prompt_spans=draw(several(SPANS)),
        pooled=draw(several(POOLED)),
        copies=draw(st.none() | numbers(np.int64, 2, 2)),
        tokens=draw(several(TOKENS)),
        transfers=draw(st.none() | st.builds(Transfers, COUNTS, PAIRS, PAIRS, COUNTS)),
        fills=draw(st.none() | st.builds(Fills, COUNTS, PAIRS)),
        limited=draw(st.booleans()),
    ).for_followers()


SUMS = st.none() | st.builds(Sums, COUNTS, st.dictionaries(IDS, st.integers(0, 2**32 - 1), max_size=4))


def assert_equal(found, expected):
    if isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype and found.flags.writeable
        np.testing.assert_array_equal(found, expected)
    elif dataclasses.is_dataclass(expected):
        assert type(found) is type(expected)
        for field in dataclasses.fields(expected):
            assert_equal(getattr(found, field.name), getattr(expected, field.name))
    elif isinstance(expected, tuple):
        assert type(found) is type(expected) and len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    else:
        assert found == expected and type(found) in (int, bool, str, dict, type(None))


@given(st.none() | steps(), SUMS)
@settings(max_examples=examples(25), deadline=None)
def test_a_step_is_the_same_behind_its_bytes(step, told):
    assert_equal(unpack(pack(step, told)), StepMessage(step, told))


def test_every_field_is_sent_or_the_first_ranks():
    """A field that the others lack by an oversight would be another step on them."""
    names = {field.name for field in dataclasses.fields(Step)}
    assert set(OF_THE_FIRST) < names
    full = dummy_step(2, [3], rows=3, width=2)
    assert_equal(unpack(pack(full.for_followers(), None)).step, full.for_followers())


@given(steps(), st.data())
@settings(max_examples=examples(40), deadline=None)
def test_what_is_no_step_is_refused(step, data):
    """Cut off, with a byte changed, or with other words: it is read as a step, or refused, and nothing else happens."""
    message = bytearray(pack(step, None))
    how = data.draw(st.sampled_from(["cut", "longer", "byte", "word"]))
    if how == "cut":
        message = message[: data.draw(st.integers(0, len(message) - 1))]
    elif how == "longer":
        message += b"\0" * 16
    elif how == "byte":
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    else:
        length = int.from_bytes(message[:8], "little")
        words = json.loads(message[8 : 8 + length])
        words[data.draw(st.integers(0, len(words) - 1))] = data.draw(
            st.sampled_from([-1, 1 << 70, 0.5, "x", None, [], ["|O", 1], ["<i8", 1 << 62, 1 << 62], ["<i4", -1], {}])
        )
        changed = json.dumps(words, separators=(",", ":")).encode()
        message = bytearray(len(changed).to_bytes(8, "little") + changed + message[8 + length :])
    try:
        found = unpack(message)
    except MalformedError:
        return
    assert how in ("byte", "word") and isinstance(found, StepMessage)


class Malicious:
    def __reduce__(self):
        return pytest.fail, ("it was called",)


@pytest.mark.parametrize("message", [b"", b"\0" * 8, pickle.dumps(Malicious()), pickle.dumps((None, Malicious()))])
def test_nothing_is_called_that_bytes_name(message):
    with pytest.raises(MalformedError, match="no step of rank 0"):
        unpack(message)

"""What the drafter that looks back at past outputs remembers of them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tritonllm.engine.drafts import drafters
from tritonllm.engine.drafts.drafters import SuffixDrafter

ROOM = 8


def remembering(lengths):
    """A drafter after outputs of these lengths, none of which has a token of another."""
    drafter, outputs = SuffixDrafter(4, 1.0, torch.device("cpu")), []
    for length in lengths:
        first = sum(map(len, outputs))
        outputs.append(list(range(first, first + length)))
        drafter.remember(torch.tensor(outputs[-1], dtype=torch.int32))
    return drafter._past.tolist(), outputs


@given(lengths=st.lists(st.integers(0, 2 * ROOM), max_size=8))
def test_outputs_stand_one_behind_the_other_with_an_end_each(lengths):
    """From the beginning on again where one does not fit; of one that is too long the last tokens stand there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafters, "REMEMBERED", ROOM)
        past, outputs = remembering(lengths)
    expected, end = [-1] * ROOM, 0
    for output in outputs:
        kept = [*output[max(0, len(output) - (ROOM - 1)) :], -1]
        if end + len(kept) > ROOM:
            end = 0
        expected[end : end + len(kept)] = kept
        end += len(kept)
    assert past == expected


@pytest.mark.parametrize("length", [ROOM - 2, ROOM - 1, ROOM, ROOM + 1])
def test_an_output_as_long_as_the_memory(length, monkeypatch):
    """Its last tokens stand there, and the end behind them, which nothing may be found across."""
    monkeypatch.setattr(drafters, "REMEMBERED", ROOM)
    past, (output,) = remembering([length])
    assert past == ([*output, -1, -1] if length == ROOM - 2 else [*output[-(ROOM - 1) :], -1])


def test_two_that_fill_it_exactly(monkeypatch):
    monkeypatch.setattr(drafters, "REMEMBERED", ROOM)
    assert remembering([3, 3])[0] == [0, 1, 2, -1, 3, 4, 5, -1]
    assert remembering([3, 4])[0] == [3, 4, 5, 6, -1, -1, -1, -1]

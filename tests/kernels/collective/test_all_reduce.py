"""Ranks in one process: the stages of a launch, one rank after the other, so that nobody waits in vain.

What only several GPUs can show is in ``tests/dist/test_symmetric.py``.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.compare import FLOATS, assert_close, poisoned, with_row_padding
from support.inboxes import local_inboxes

from tritonllm.kernels.collective import AddedNorm, InboxLayout, all_reduce, all_reduce_ref, sum_rows
from tritonllm.kernels.collective.all_reduce import Stages

dtypes = st.sampled_from(FLOATS)
sizes = st.sampled_from([1, 5, 16, 33, 70])
STAGES = [Stages(*(place == stage for place in range(3))) for stage in range(3)]


def on_all(inboxes, parts, added, outs, *, two_shot):
    """One sum on all ranks, stage by stage; only the last stage uses up the turn."""
    for stage in STAGES:
        for inbox, part, more, out in zip(inboxes, parts, added, outs, strict=True):
            sum_rows(part, inbox, more, out, two_shot=two_shot, stages=stage)


def streams(size, rows, n, dtype, device, padding=0, **kwargs):
    """The same residual stream on all ranks, and the norm that follows."""
    residual = torch.randn(rows, n).to(device, dtype)
    weight = torch.randn(n).to(device, dtype)
    return [AddedNorm(with_row_padding(residual.clone(), padding), weight, **kwargs) for _ in range(size)]


@given(
    size=st.integers(2, 4),
    rows=st.integers(0, 5),
    n=sizes,
    dtype=dtypes,
    programs=st.integers(1, 3),
    slots=st.integers(1, 2),
    padding=st.integers(0, 3),
    two_shot=st.booleans(),
)
def test_sums_are_the_references_and_the_same_everywhere(
    device, size, rows, n, dtype, programs, slots, padding, two_shot
):
    """Also of more rows than one launch takes, and three sums in a row: each place is used again."""
    inboxes = local_inboxes(InboxLayout(n, dtype, size, programs, slots), device)
    for _ in range(3):
        parts = [with_row_padding(torch.randn(rows, n).to(device, dtype), padding) for _ in range(size)]
        expected = all_reduce_ref(parts)
        outs = [poisoned(rows, n, dtype=dtype, device=device) for _ in range(size)]
        for start in range(0, max(rows, 1), programs * slots):
            here = slice(start, start + programs * slots)
            on_all(inboxes, [p[here] for p in parts], [None] * size, [o[here] for o in outs], two_shot=two_shot)
        for out in outs:
            assert torch.equal(out, expected)


@given(
    size=st.integers(2, 3),
    rows=st.integers(1, 3),
    n=sizes,
    dtype=dtypes,
    offset=st.sampled_from([0.0, 1.0]),
    x_scale=st.sampled_from([1.0, 0.22]),
    padding=st.integers(0, 3),
    two_shot=st.booleans(),
)
def test_with_the_addition_and_the_norm(device, size, rows, n, dtype, offset, x_scale, padding, two_shot):
    inboxes = local_inboxes(InboxLayout(n, dtype, size, 4, 1), device)
    parts = [torch.randn(rows, n).to(device, dtype) for _ in range(size)]
    added = streams(size, rows, n, dtype, device, padding, eps=1e-5, weight_offset=offset, x_scale=x_scale)
    reference = added[0]._replace(residual=added[0].residual.clone())
    expected = all_reduce_ref(parts, added=reference)
    on_all(inboxes, parts, added, parts, two_shot=two_shot)
    for part, more in zip(parts, added, strict=True):
        assert torch.equal(more.residual, added[0].residual) and torch.equal(part, parts[0])
        if x_scale == 1.0:
            assert torch.equal(more.residual, reference.residual)
        assert_close(more.residual, reference.residual)
        assert_close(part, expected)


@pytest.mark.parametrize("two_shot", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_negative_zeros_and_what_is_no_number_arrive(device, dtype, two_shot):
    """A negative zero is what nobody sends: it comes as a zero, and is not waited for."""
    inboxes = local_inboxes(InboxLayout(5, dtype, 2, 1, 1), device)
    values = [[-0.0, -0.0, 1.0, float("inf"), float("nan")], [-0.0, 2.0, -0.0, 1.0, 1.0]]
    parts = [torch.tensor([row], device=device).to(dtype) for row in values]
    on_all(inboxes, parts, [None] * 2, parts, two_shot=two_shot)
    for part in parts:
        assert part[0, :4].tolist() == [0.0, 2.0, 1.0, float("inf")] and part[0, 4].isnan()


def test_the_ranks_add_in_one_order(device):
    """Of these four, 1 is lost or not, depending on what is added first; rounding is to float32."""
    inboxes = local_inboxes(InboxLayout(1, torch.float32, 4, 1, 1), device)
    parts = [torch.tensor([[value]], device=device) for value in (2.0**24, 1.0, -(2.0**24), 1.0)]
    on_all(inboxes, parts, [None] * 4, parts, two_shot=False)
    assert [float(part) for part in parts] == [1.0] * 4


@pytest.mark.parametrize("two_shot", [False, True])
def test_a_word_ends_all_waiting(device, two_shot):
    """The other rank never comes: whoever waits gives up once that is known."""
    inbox, _ = local_inboxes(InboxLayout(8, torch.float32, 2, 2, 2), device, stopped=True)
    x = torch.ones(3, 8, device=device)
    assert all_reduce(x, inbox, two_shot=two_shot) is x


def test_rows_of_another_rank_stay(device):
    """A launch of few programs leaves the places of the others, and their turns, as they are."""
    inboxes = local_inboxes(InboxLayout(4, torch.float32, 2, 3, 1), device)
    for rows in (3, 1, 1, 2, 3):
        parts = [torch.randn(rows, 4, device=device) for _ in range(2)]
        expected = all_reduce_ref(parts)
        on_all(inboxes, parts, [None] * 2, parts, two_shot=False)
        assert torch.equal(parts[0], expected) and torch.equal(parts[1], expected)
    assert [inbox.turns.tolist() for inbox in inboxes] == [[1, 1, 0]] * 2


@pytest.mark.parametrize(
    ("x", "kwargs", "names"),
    [
        (torch.zeros(2, 5), {}, r"x must have shape \[\*, 4\]"),
        (torch.zeros(2, 4, dtype=torch.float16), {}, "x must be torch.float32"),
        (torch.zeros(4, 2).t(), {}, "x must be contiguous"),
        (torch.zeros(2, 4), {"out": torch.zeros(3, 4)}, r"out must have shape \[2, 4\]"),
        (torch.zeros(2, 4), {"added": AddedNorm(torch.zeros(3, 4), torch.zeros(4))}, "residual must have shape"),
        (torch.zeros(2, 4), {"added": AddedNorm(torch.zeros(2, 4), torch.zeros(5))}, "weight must have shape"),
    ],
)
def test_bad_arguments(x, kwargs, names):
    inbox, _ = local_inboxes(InboxLayout(4, torch.float32, 2, 1, 1), torch.device("cpu"))
    with pytest.raises(ValueError, match=names):
        all_reduce(x, inbox, **kwargs)

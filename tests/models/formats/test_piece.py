"""Rectangles of narrow weights: cut anywhere, they widen to the same elements."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.compare import FLOATS

from tritonllm.kernels.dense.weight import Groups
from tritonllm.models.formats import piece as module
from tritonllm.models.formats.piece import cut_out


@given(
    size=st.tuples(st.integers(1, 12), st.integers(1, 40)),
    group=st.tuples(st.integers(1, 14), st.sampled_from([0, 1, 3, 8, 16])),
    with_zeros=st.booleans(),
    with_order=st.booleans(),
    table=st.booleans(),
    at_a_time=st.sampled_from([1, 50, 1 << 16]),
    dtype=st.sampled_from(FLOATS),
    data=st.data(),
)
def test_any_rectangle(size, group, with_zeros, with_order, table, at_a_time, dtype, data):
    """Each element by its own formula, in float64."""
    (n, k), groups = size, Groups(*group)
    rows, columns = (
        range(begin := data.draw(st.integers(0, extent - 1)), data.draw(st.integers(begin + 1, extent)))
        for extent in (n, k)
    )
    shape = groups.shape(n, k)
    numbers, scales = torch.randint(16, (n, k), dtype=torch.uint8), torch.rand(shape)
    zeros = torch.randint(16, shape, dtype=torch.int32) if with_zeros else None
    order = torch.randint(shape[1], (k,)) if with_order else None
    values = torch.randn(16) if table else None
    of = order if with_order else torch.arange(k) // (groups.columns or k)
    down = torch.arange(n)[:, None] // groups.rows
    wide = numbers.double() if values is None else values.double()[numbers.int()]
    wide = (wide - (0 if zeros is None else zeros.double()[down, of])) * scales.double()[down, of]
    # what float32 cannot hold of a difference is rounded there
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(module._PIECE, "cpu", at_a_time)
        part = numbers[rows.start : rows.stop, columns.start : columns.stop]
        piece = cut_out(part, scales, groups, rows, columns, zeros=zeros, column_groups=order, values=values)
        got = piece.widen(dtype)
    assert got.dtype == dtype and got.shape == (len(rows), len(columns))
    want = wide[rows.start : rows.stop, columns.start : columns.stop]
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=1e-6)


def test_groups_that_are_cut_through_keep_their_scales():
    """Groups at the piece's edges stay groups where they begin with it; else each row, or column, says which it has."""
    numbers, scales = torch.ones(4, 16, dtype=torch.uint8), torch.rand(3, 4)
    aligned = cut_out(numbers, scales, Groups(4, 16), range(4, 8), range(16, 32))
    assert aligned.groups == Groups(4, 16) and aligned.scales.shape == (1, 1) and aligned.column_groups is None
    across = cut_out(numbers, scales, Groups(4, 16), range(2, 6), range(8, 24))
    assert across.groups == Groups(1, 0) and across.scales.shape == (4, 4)
    assert across.column_groups.tolist() == [0] * 8 + [1] * 8
    one = cut_out(numbers, scales[:1], Groups(12, 16), range(2, 6), range(16, 32))
    assert one.groups == Groups(4, 16) and one.scales.shape == (1, 1)

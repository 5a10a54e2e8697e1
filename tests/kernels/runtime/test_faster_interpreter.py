"""The faster interpreter of these tests gives what the stock one gives."""

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from support.faster_interpreter import is_elementwise

from tritonllm import env
from tritonllm.kernels.sampling.common import _better

pytestmark = pytest.mark.skipif(not env.TRITON_INTERPRET, reason="about the interpreter")


@triton.jit
def _better_in_words(score_a, id_a, score_b, id_b):
    """`_better` with an `if`, which blocks cannot take: the interpreter calls it element by element."""
    if score_a > score_b or (score_a == score_b and id_a < id_b):
        return score_a, id_a
    return score_b, id_b


@triton.jit
def _lowest_first_and_sum(low_a, first_a, sum_a, low_b, first_b, sum_b):
    return tl.minimum(low_a, low_b), first_a, sum_a + sum_b


@triton.jit
def _best_kernel(
    score_ptr, score_out, id_out, M: tl.constexpr, N: tl.constexpr, AXIS: tl.constexpr, KEEP: tl.constexpr,
    BETTER: tl.constexpr,
):  # fmt: skip
    b_at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    b_score, b_id = tl.reduce((tl.load(score_ptr + b_at), b_at), AXIS, BETTER, keep_dims=KEEP)
    b_out = tl.arange(0, M if AXIS == 1 else N)
    tl.store(score_out + b_out, tl.reshape(b_score, b_out.shape))
    tl.store(id_out + b_out, tl.reshape(b_id, b_out.shape))


@triton.jit
def _fold_kernel(x_ptr, out_ptr, N: tl.constexpr):
    b_x = tl.load(x_ptr + tl.arange(0, N))
    low, first, total = tl.reduce((b_x, b_x, b_x), 0, _lowest_first_and_sum)
    tl.store(out_ptr, low)
    tl.store(out_ptr + 1, first)
    tl.store(out_ptr + 2, total)


def test_which_functions_take_blocks():
    assert is_elementwise(_better.fn)
    assert not is_elementwise(_better_in_words.fn)
    assert not is_elementwise(tl.standard._argmax_combine.fn)


@given(
    rows=st.sampled_from([1, 2, 8]),
    columns=st.sampled_from([1, 4, 16]),
    axis=st.integers(0, 1),
    keep=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int32]),
    seed=st.integers(0, 2**20),
)
def test_halves_give_what_single_elements_give(rows, columns, axis, keep, dtype, seed):
    """Few different scores, so that the order of equals counts."""
    score = torch.randint(-2, 2, (rows, columns), generator=torch.Generator().manual_seed(seed)).to(dtype)
    found = []
    for better in (_better, _better_in_words):
        best = (
            torch.empty(rows if axis == 1 else columns, dtype=dtype),
            torch.empty(rows if axis == 1 else columns, dtype=torch.int32),
        )
        _best_kernel[(1,)](score, *best, rows, columns, axis, keep, better)
        found.append(best)
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


@given(st.sampled_from([1, 2, 64]), st.integers(0, 2**20))
def test_the_order_of_elements_is_kept(size, seed):
    x = torch.randint(-1000, 1000, (size,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    out = torch.empty(3, dtype=torch.int32)
    _fold_kernel[(1,)](x, out, size)
    assert out.tolist() == [x.min(), x[0], x.sum()]

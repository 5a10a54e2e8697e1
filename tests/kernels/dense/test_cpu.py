"""The CPU's packed weights against products of rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.compare import assert_close
from support.examples import examples

from tritonllm.kernels.dense.cpu import can_pack, pack_weight, product


@settings(max_examples=examples(60))
@given(
    rows=st.integers(0, 9) | st.just(70),
    n=st.integers(1, 70),
    k=st.integers(1, 70),
    bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    strided=st.booleans(),
)
def test_is_the_product(rows, n, k, bias, dtype, strided):
    x = torch.randn(rows, 2 * k if strided else k).to(dtype)[:, :k]
    weight, b = torch.randn(n, k).to(dtype), torch.randn(n).to(dtype) if bias else None
    packed = pack_weight(weight)
    assert (packed.format == "onednn") == can_pack(weight)
    with torch.no_grad():
        got = product(x, packed, b)
    want = x.double() @ weight.double().T + (0 if b is None else b.double())
    assert got.shape == (rows, n) and got.dtype == dtype
    assert_close(got, want, dtype)


def test_a_row_does_not_depend_on_how_few_are_with_it():
    x, weight = torch.randn(4, 64), pack_weight(torch.randn(96, 64))
    together = product(x, weight)
    for rows in (1, 2, 3):
        assert torch.equal(product(x[:rows], weight), together[:rows])


@pytest.mark.parametrize("weight", [torch.randn(4, 4).half(), torch.randn(0, 4), torch.randn(4, 0)])
def test_what_is_not_packed_stays_as_it_is(weight):
    packed = pack_weight(weight)
    assert packed.data is weight and packed.format == "plain"
    assert product(torch.zeros(2, weight.shape[1], dtype=weight.dtype), packed).shape == (2, weight.shape[0])

"""The CPU's norms against the references; its rotary embedding is in `tests/kernels/attention/test_cpu.py`."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.compare import FLOATS, assert_close
from support.cpu_path import on_cpu
from support.examples import examples

from tritonllm.kernels import (
    fused_add_layer_norm,
    fused_add_layer_norm_ref,
    fused_add_rms_norm,
    fused_add_rms_norm_ref,
    layer_norm,
    layer_norm_ref,
    rms_norm,
    rms_norm_ref,
)

SIZES = {
    "rows": st.integers(1, 9),
    "n": st.integers(1, 70),
    "dtype": st.sampled_from(FLOATS),
    "weight_dtype": st.sampled_from(FLOATS),
}


@settings(max_examples=examples(60))
@given(offset=st.sampled_from([0.0, 1.0]), scale=st.sampled_from([1.0, 0.22]), **SIZES)
def test_rms_norm(rows, n, dtype, weight_dtype, offset, scale):
    x, residual = torch.randn(rows, n).to(dtype), torch.randn(rows, n).to(dtype)
    weight = torch.randn(n).to(weight_dtype)
    got = on_cpu(rms_norm, x, weight, 1e-5, weight_offset=offset)
    assert_close(got, rms_norm_ref(x, weight, 1e-5, weight_offset=offset))
    keywords = {"weight_offset": offset, "x_scale": scale}
    pairs = zip(
        on_cpu(fused_add_rms_norm, x.clone(), residual.clone(), weight, 1e-5, **keywords),
        fused_add_rms_norm_ref(x.clone(), residual.clone(), weight, 1e-5, **keywords),
        strict=True,
    )
    for mine, theirs in pairs:
        assert_close(mine, theirs)


@settings(max_examples=examples(60))
@given(weighted=st.booleans(), biased=st.booleans(), **SIZES)
def test_layer_norm(rows, n, dtype, weight_dtype, weighted, biased):
    x, residual = torch.randn(rows, n).to(dtype), torch.randn(rows, n).to(dtype)
    affine = [torch.randn(n).to(weight_dtype) if there else None for there in (weighted, weighted and biased)]
    exact = x.float(), *(None if t is None else t.float() for t in affine)
    assert_close(on_cpu(layer_norm, x, *affine, 1e-2), layer_norm_ref(*exact, 1e-2), dtype)
    pairs = zip(
        on_cpu(fused_add_layer_norm, x.clone(), residual.clone(), *affine, 1e-2),
        fused_add_layer_norm_ref(x.clone(), residual.clone(), *affine, 1e-2),
        strict=True,
    )
    for mine, theirs in pairs:
        assert_close(mine, theirs)


def test_a_norm_with_weights_of_each_head_is_the_references():
    on_cpu(rms_norm, torch.randn(3, 2, 8), torch.randn(2, 8), takes=False)

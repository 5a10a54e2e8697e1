"""Soft caps of all sizes, on logits of all sizes, against float64.

A query that sees one key has that key's capped logit for its log-sum-exp: so each logit is checked by itself.
"""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention import Problem, make_problem
from support.attention_operations import OPERATIONS, attention_in_double
from support.compare import assert_close
from support.examples import examples
from support.marks import hopper

from tritonllm.kernels import (
    paged_decode_attention,
    varlen_prefill_attention,
)
from tritonllm.kernels.runtime import tuning

# Of a capped logit, some float32 roundings: the product's, the exponential's, two changes of base.
RELATIVE = 3e-6
HALF = torch.float16


def with_logits(device: torch.device, logits: torch.Tensor, dtype: torch.dtype, head_size: int, kv_heads: int = 1):
    """Sequences of one key, and a query for each of these logits ``[B, H]``, to the rounding of its dtype."""
    batch, heads = logits.shape
    group = heads // kv_heads
    shape: dict[str, Any] = {"dtype": dtype, "head_size": head_size, "kv_heads": kv_heads, "group": group}
    p = make_problem(device, [1] * batch, [1] * batch, layout="apart", **shape)
    p.q[:] = 0
    p.q[..., 3] = logits.to(p.q)
    p.k_cache[..., 3] = 1.0
    return p


def check_each_logit(p: Problem, operation: Any, softcap: float, scale: float = 1.0) -> None:
    _, lse = operation(p, softcap=softcap, scale=scale)
    logits = p.q[..., 3].double() * scale
    expected = softcap * torch.tanh(logits / softcap)
    torch.testing.assert_close(lse.double(), expected, rtol=RELATIVE, atol=0)


# A program has them all: from 1e-6 to 1e8, and what lies on both sides of 0.4 caps, of either sign.
SIZES = torch.cat((torch.logspace(-6, 8, 8), -torch.logspace(-5, 7, 8)))[None]
SHARES = torch.tensor([0.2, 0.39, 0.39999, 0.4, 0.40001, 0.41, 5.0, 50.0])
SHARES = torch.cat((SHARES, -SHARES))[None]


@pytest.mark.parametrize("operation", OPERATIONS)
@settings(max_examples=examples(5))
@given(cap=st.floats(0, 8), scale=st.sampled_from([1.0, 0.3]))
def test_each_capped_logit(device, operation, cap, scale):
    """Caps from 1 to 1e8."""
    for logits in (SIZES, 10.0**cap * SHARES):
        check_each_logit(with_logits(device, logits, torch.float32, 16), OPERATIONS[operation], 10.0**cap, scale)


@pytest.mark.parametrize("operation", OPERATIONS)
@settings(max_examples=examples(5))
@given(cap=st.floats(0, 8), scale=st.sampled_from([None, 0.01, 3.0]))
def test_matches_float64(device, operation, cap, scale):
    """Outputs and log-sum-exps over several keys."""
    q_lens = [3, 4] if operation in ("verify", "prefill") else [1, 1]
    p = make_problem(device, q_lens, [40, 7], head_size=16)
    out, lse = OPERATIONS[operation](p, softcap=10.0**cap, scale=scale)
    want, want_lse = attention_in_double(p, 0.25 if scale is None else scale, softcap=10.0**cap)
    assert_close(out, want)
    torch.testing.assert_close(lse.double(), want_lse, rtol=RELATIVE, atol=RELATIVE)


@hopper
@pytest.mark.parametrize("softcap", [1.0, 50.0, 1e3, 1e6, 1e8])
@pytest.mark.parametrize("heads", [(4, 2), (32, 2)], ids=["a warp each", "four warps"])
@pytest.mark.parametrize("head_size", [64, 128])
def test_hopper_kernels(device, head_size, heads, softcap):
    """Decode of up to eight rows and of more, and prefill: each logit, then whole outputs."""
    rows = 8 if heads[0] == 4 else 16
    shape = {"BLOCK_M": rows, "BLOCK_N": 64, "PROGRAMS": 264, "num_warps": 4, "num_stages": 2, "maxnreg": 128}
    hopper_prefill = {"kernel": "sm90", "BLOCK_M": 128, "PROGRAMS": 132, "num_warps": 4}
    hopper_prefill |= {"BLOCK_N": 64, "PARTS": 2, "MERGED": False, "SPLIT": 0, "num_stages": 4}

    def run(p: Problem, **options: Any):
        with tuning.override("paged_decode_attention", {"kernel": "sm90", **shape}):
            return paged_decode_attention(*p.decode, **options, return_lse=True)

    def run_prefill(p: Problem, **options: Any):
        with tuning.override("varlen_prefill_attention", hopper_prefill):
            return varlen_prefill_attention(*p.prefill, max_seqlen_q=80, **options, return_lse=True)

    logits = torch.logspace(-5, 4, 30 * heads[0]).view(30, heads[0])
    for operation in (run, run_prefill):
        check_each_logit(with_logits(device, logits, HALF, head_size, heads[1]), operation, softcap)
    options = {"kv_heads": heads[1], "group": heads[0] // heads[1], "head_size": head_size, "layout": "apart"}
    for operation, q_lens in ((run, [1, 1]), (run_prefill, [80, 3])):
        p = make_problem(device, q_lens, [300, 77], dtype=HALF, **options)
        out, lse = operation(p, softcap=softcap, scale=3.0)
        want, want_lse = attention_in_double(p, 3.0, softcap=softcap)
        assert_close(out, want)
        torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)

"""Logits of all sizes that a dtype and float32 hold, tiny ones too, through every kernel of attention.

A GPU's multiply-add does not round the product, and the maximum of the logits is a rounded one: from some size on their
difference is more than an exponent holds. The interpreter rounds each product, so it is told not to.
"""

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.attention import Problem, make_problem
from support.attention_operations import OPERATIONS, attention_in_double
from support.compare import assert_close
from support.contracted import contracted_products
from support.examples import examples
from support.marks import hopper

from tritonllm.kernels import (
    paged_decode_attention,
    paged_decode_attention_ref,
    varlen_prefill_attention,
    varlen_prefill_attention_ref,
)
from tritonllm.kernels.runtime import tuning


def reference(p: Problem, **options: Any):
    if len(p.cu_seqlens_q) - 1 == len(p.q):
        return paged_decode_attention_ref(*p.decode, **options, return_lse=True)
    return varlen_prefill_attention_ref(*p.prefill, max_seqlen_q=4, **options, return_lse=True)


def with_large_logits(p: Problem, size: float, sign: int) -> float:
    """Let the logits of each sequence's keys be ``size`` times 1, 2, 3, ..., in any order, exactly: all products but
    one are with 0, and that one is of numbers with few bits.

    Args:
        sign: 1 or -1, of all logits.

    Returns:
        The scale that belongs to it.
    """
    mantissa, exponent = math.frexp(size)
    part, block_size = (exponent + 6) // 2, p.k_cache.shape[1]
    generator = torch.Generator().manual_seed(0)
    p.q.zero_()
    p.q[..., 0] = 2.0**part
    for seq, length in enumerate(p.seq_lens.tolist()):
        at = torch.arange(length)
        places = (p.block_tables[seq, at // block_size].long(), at % block_size)
        for head in range(p.k_cache.shape[2]):
            numbers = 1.0 + torch.randperm(length, generator=generator)
            keys = torch.zeros(length, p.k_cache.shape[3])
            keys[:, 0] = sign * numbers * 2.0 ** (exponent - part)
            p.k_cache[(*places, torch.full((length,), head))] = keys.to(p.k_cache)
    return mantissa


def check(p: Problem, operation: Any, size: float, sign: int, how: str) -> None:
    scale = with_large_logits(p, size, sign)
    heads = p.q.shape[1]
    sinks = torch.linspace(-2.5, 2.5, heads, device=p.q.device) * size if how == "sinks" else None
    slopes = torch.linspace(0.5, 1, heads, device=p.q.device) if how == "alibi" else None
    out, lse = operation(p, scale=scale, sinks=sinks, alibi_slopes=slopes)
    want, want_lse = attention_in_double(p, scale, sinks=sinks, slopes=slopes)
    assert out.isfinite().all() and lse.isfinite().all()
    if size <= 1e4 or how != "alibi":  # else its slopes are lost in the roundings of the logits
        assert_close(out, want)
    torch.testing.assert_close(lse.double(), want_lse, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("operation", [*OPERATIONS, "reference"])
@pytest.mark.parametrize("how", ["plain", "sinks", "alibi"])
@settings(max_examples=examples(9))
@given(exponent=st.floats(-30, 30), sign=st.sampled_from([1, -1]))
@example(exponent=15.0, sign=1)
@example(exponent=9.7, sign=1)
@example(exponent=9.7, sign=-1)
def test_float32(device, operation, how, exponent, sign):
    """From 1e-30 to 1e30."""
    several = operation in ("verify", "prefill")
    p = make_problem(device, [3, 4] if several else [1, 1], [40, 7], head_size=16)
    run = reference if operation == "reference" else OPERATIONS[operation]
    with contracted_products() if device.type == "cpu" else nullcontext():
        check(p, run, 10.0**exponent, sign, how)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", ["plain", "sinks"])
@settings(max_examples=examples(6))
@given(exponent=st.floats(-6, 8), sign=st.sampled_from([1, -1]))
@example(exponent=8.0, sign=1)
@example(exponent=8.0, sign=-1)
def test_16_bits(device, operation, dtype, how, exponent, sign):
    """Up to what the documentation promises."""
    several = operation in ("verify", "prefill")
    p = make_problem(device, [3, 4] if several else [1, 1], [40, 7], head_size=16, dtype=dtype)
    with contracted_products() if device.type == "cpu" else nullcontext():
        check(p, OPERATIONS[operation], 10.0**exponent / 40, sign, how)


@hopper
@pytest.mark.parametrize("heads", [(4, 2), (32, 2)], ids=["a warp each", "four warps"])
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", ["plain", "sinks"])
def test_hopper_kernels(device, head_size, heads, dtype, how):
    """Decode of up to eight rows and of more, and prefill, from 1e-6 to 1e8."""
    rows = 8 if heads[0] == 4 else 16
    decode = {"kernel": "sm90", "BLOCK_M": rows, "BLOCK_N": 64, "PROGRAMS": 264, "num_warps": 4, "num_stages": 2}
    prefill = {"kernel": "sm90", "BLOCK_M": 128, "PROGRAMS": 132, "num_warps": 4, "BLOCK_N": 64, "PARTS": 2}
    prefill |= {"MERGED": False, "SPLIT": 0, "num_stages": 4}

    def run(p: Problem, **options: Any):
        with tuning.override("paged_decode_attention", decode | {"maxnreg": 128}):
            return paged_decode_attention(*p.decode, **options, return_lse=True)

    def run_prefill(p: Problem, **options: Any):
        with tuning.override("varlen_prefill_attention", prefill):
            return varlen_prefill_attention(*p.prefill, max_seqlen_q=80, **options, return_lse=True)

    shape = {"kv_heads": heads[1], "group": heads[0] // heads[1], "head_size": head_size, "layout": "apart"}
    for operation, q_lens in ((run, [1, 1]), (run_prefill, [80, 3])):
        p = make_problem(device, q_lens, [100, 77], dtype=dtype, **shape)
        for exponent in (-6.0, 0.0, 4.0, 7.0, 8.0):
            for sign in (1, -1):
                check(p, operation, 10.0**exponent / 100, sign, how)

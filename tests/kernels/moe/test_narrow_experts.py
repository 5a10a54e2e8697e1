"""Experts with narrow weights: the products against those of the widened weights, and what is refused."""

from contextlib import nullcontext

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from support.compare import FLOATS, assert_close

from tritonllm.kernels import (
    Groups,
    Weight,
    fused_moe,
    fused_moe_ref,
    moe_from_logits,
    quantize_weight,
    widen_weight_ref,
)
from tritonllm.kernels.dense.narrow import aligned, unit_of
from tritonllm.kernels.dense.weight import PACKED
from tritonllm.kernels.runtime import tuning

FORMATS = ("fp8", "int8", "int4", "fp4")
TILE = {"kernel": "portable", "BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 32, "GROUP_M": 2, "num_warps": 1}


def stack(experts, rows, k, format, groups, device, zeros=False):
    """(experts' weights in a narrow format, and the same in float32). With ``zeros``, of integers with zero points; of
    floats of four bits, with scales as NVFP4 has them."""
    each = [quantize_weight((torch.randn(rows, k) / k**0.5).to(device), format, groups) for _ in range(experts)]
    if zeros and format == "fp4":
        each = [
            of._replace(
                scales=(1 + 447 * torch.rand(of.scales.shape, device=device)).to(torch.float8_e4m3fn),
                row_scales=(0.5 + torch.rand(rows, device=device)) / (448 * k**0.5),
            )
            for of in each
        ]
    elif zeros:
        each = [
            of._replace(zeros=(torch.arange(of.scales.numel(), device=device) % 16).byte().view_as(of.scales))
            for of in each
        ]
    parts = [
        None if of[0] is None else torch.stack([part.view(torch.uint8) for part in of]).view(of[0].dtype)
        for of in zip(*((o.data, o.scales, o.zeros, o.row_scales) for o in each), strict=True)
    ]
    if format == "fp4" and rows % 3:  # rows of scales that begin at words, and at any byte
        parts[1] = aligned(parts[1])
    wide = torch.stack([widen_weight_ref(of, torch.float32) for of in each])
    return Weight(*parts[:2], format, groups, *parts[2:]), wide


@given(
    format=st.sampled_from(FORMATS),
    groups=st.builds(Groups, rows=st.sampled_from([1, 3, 16]), columns=st.sampled_from([0, 16, 32, 64])),
    tokens=st.integers(0, 20),
    n=st.integers(1, 100),
    i=st.integers(1, 60),
    dtype=st.sampled_from(FLOATS),
    small=st.booleans(),
    zeros=st.booleans(),
    batch_invariant=st.booleans(),
    activation=st.sampled_from(["silu", "swigluoai"]),
    bias=st.booleans(),
)
def test_products_are_those_of_the_widened_weights(
    device, format, groups, tokens, n, i, dtype, small, zeros, batch_invariant, activation, bias
):
    assume(format != "int4" or groups.columns != 16)
    unit = unit_of(groups) if format in PACKED else 1
    n, i, zeros = -(-n // unit) * unit, -(-i // unit) * unit, zeros and format in PACKED
    up, wide_up = stack(3, 2 * i, n, format, groups, device, zeros)
    down, wide_down = stack(3, n, i, format, groups, device, zeros)
    x = torch.randn(tokens, n).to(device, dtype)
    options = {"activation": activation}
    if bias:
        options |= {"gate_up_bias": torch.randn(3, 2 * i, device=device), "down_bias": torch.randn(3, n, device=device)}
    ids = torch.randint(-1, 4, (tokens, 2), dtype=torch.int32).to(device)
    weights = torch.rand(tokens, 2, device=device)
    with tuning.override("fused_moe_narrow", TILE) if small else nullcontext():
        found = fused_moe(x, up, down, weights, ids, batch_invariant=batch_invariant, **options)
    assert_close(found, fused_moe_ref(x.float(), wide_up, wide_down, weights, ids, **options), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [32, 16])
def test_gpt_oss(columns, dtype):
    """In true sizes, of which 128 columns are no part, with every tile; MXFP4, and NVFP4."""
    groups, n, experts = Groups(1, columns), 2880, 8
    up, wide_up = stack(experts, 2 * n, n, "fp4", groups, "cuda", columns == 16)
    down, wide_down = stack(experts, n, n, "fp4", groups, "cuda", columns == 16)
    biases = {"gate_up_bias": torch.randn(experts, 2 * n, device="cuda"), "down_bias": torch.randn(experts, n).cuda()}
    for tokens in (1, 2, 16, 33, 128, 500):
        x = torch.randn(tokens, n, device="cuda").to(dtype)
        ids = torch.stack([torch.randperm(experts)[:4] for _ in range(tokens)]).int().cuda()
        weights = torch.rand(tokens, 4, device="cuda")
        options = {"activation": "swigluoai", **biases}
        expected = fused_moe_ref(x.float(), wide_up, wide_down, weights, ids, **options)
        assert_close(fused_moe(x, up, down, weights, ids, **options), expected, dtype)


def test_from_logits(device):
    """One token of few columns, whose plain experts need no choice of their own."""
    up, wide_up = stack(4, 64, 128, "int4", Groups(1, 32), device)
    down, wide_down = stack(4, 128, 32, "int4", Groups(1, 32), device)
    x, logits = torch.randn(1, 128, device=device), torch.randn(1, 4, device=device)
    assert_close(moe_from_logits(x, logits, up, down, 2), moe_from_logits(x, logits, wide_up, wide_down, 2))


def test_what_does_not_fit_is_refused():
    device = torch.device("cpu")
    up, _ = stack(2, 16, 32, "fp8", Groups(), device)
    down, wide = stack(2, 32, 8, "fp8", Groups(), device)
    x, choice = torch.randn(3, 32), (torch.ones(3, 1), torch.zeros(3, 1, dtype=torch.int32))
    for w_down, message in (
        (wide, "w_down must have the format and groups of w_gate_up, 'fp8'"),
        (down._replace(groups=Groups(2, 0)), "w_down must have the format and groups of w_gate_up"),
        (down._replace(scales=None), "w_down.scales must be there for the format 'fp8'"),
        (down._replace(scales=torch.ones(2, 31, 1)), r"w_down.scales must have shape \[2, 32, 1\], got \[2, 31, 1\]"),
        (down._replace(data=down.data[:1]), r"w_down.scales must have shape \[1, 32, 1\], got"),
        (
            down._replace(data=down.data[:1], scales=down.scales[:1]),
            r"w_down must have shape \[2, 32, 8\], got \[1, 32, 8\]",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            fused_moe(x, up, w_down, *choice)

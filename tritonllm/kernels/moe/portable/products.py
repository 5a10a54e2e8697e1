"""Mixture of experts: the two grouped products, by programs that each take a block of pairs of one expert.

The first product reads the tokens' rows through the order of the pairs and applies the gate in its epilogue, so the
``[T, k, 2I]`` projection never reaches memory; the second writes a row for each pair, in the order of the tokens.
Grouped products over sorted tokens: Gale et al., "MegaBlocks" (2022).
"""

from typing import Any

import torch
import triton
import triton.language as tl

from tritonllm.kernels.dense import (
    Scaled,
    load_scales,
    load_tile,
    read_scales,
    tile_at,
    tile_reading,
    widen_bytes,
    widen_floats4,
    widen_nibbles,
)
from tritonllm.kernels.elementwise import gated
from tritonllm.kernels.moe.arguments import Experts
from tritonllm.kernels.moe.grouping import ExpertBlocks
from tritonllm.kernels.runtime import tuning
from tritonllm.kernels.runtime.dependent_launch import dependent_launch, let_next_start, wait_for_previous


@triton.jit
def _tile(num_blocks, n_tiles, GROUP_M: tl.constexpr):
    """(block of pairs, tile of columns) of this program: GROUP_M blocks share a tile of weights in L2."""
    pid = tl.program_id(0)
    group = pid // (GROUP_M * n_tiles)
    size = tl.minimum(num_blocks - group * GROUP_M, GROUP_M)
    within = pid % (GROUP_M * n_tiles)
    return group * GROUP_M + within % size, within // size


@triton.jit
def _product(
    p_a,  # [BLOCK_M, 1] rows of the left operand
    p_b,  # [BLOCK_N, BLOCK_K] the first tile of the weights, which are transposed; half as many bytes if HALF
    m_a,
    m_b,
    scales_ptr,  # of a narrow weight, or None
    zeros_ptr,  # likewise
    row_scales_ptr,  # likewise, of rows
    b_group,  # [BLOCK_N] where scales and zero points of the weight's rows begin
    b_row,  # [BLOCK_N] where scales of rows are
    K,
    FULL_K: tl.constexpr,  # BLOCK_K divides K: no columns to mask
    BLOCK_K: tl.constexpr,
    GROUP_K: tl.constexpr,  # of a narrow weight: BLOCK_K divides it, or with SCALES is divided; 0: it has all columns
    HALF: tl.constexpr,
    SCALES: tl.constexpr,  # what bytes of scales are: of floats of four bits; None: numbers
    WORDS: tl.constexpr,  # those of a row and a tile are one word
    IN_PLACE: tl.constexpr,
):
    BYTES: tl.constexpr = BLOCK_K // 2 if HALF else BLOCK_K
    k = tl.arange(0, BYTES)[None, :]
    if HALF:
        k = k // HALF * (2 * HALF) + k % HALF
        b_zero = tl.full([p_b.shape[0], 1], 8.0, tl.float32)
        if zeros_ptr is not None and not GROUP_K:
            b_zero = tl.load(zeros_ptr + b_group[:, None], mask=m_b, other=0).to(tl.float32)
    b_sum = tl.zeros([p_a.shape[0], p_b.shape[0]], tl.float32)
    for start in range(0, K, BLOCK_K):
        at = start // 2 if HALF else start
        if FULL_K:
            b_a = tl.load(p_a + start + k, mask=m_a, other=0.0)
            b_b = load_tile(p_b, at, m_b, "")
        else:
            b_a = tl.load(p_a + start + k, mask=m_a & (k < K - start), other=0.0)
            b_b = load_tile(p_b, at, m_b & (k < K - start), "")
        if HALF:
            if zeros_ptr is not None and GROUP_K:
                b_zero = tl.load(zeros_ptr + b_group[:, None] + start // GROUP_K, mask=m_b, other=0).to(tl.float32)
            m_high = m_a if FULL_K else m_a & (k < K - start)
            b_high_a = tl.load(p_a + start + HALF + k, mask=m_high, other=0.0)
            if SCALES is None:
                b_b, b_high = widen_nibbles(b_b, b_zero, b_a.dtype, IN_PLACE)
            else:
                b_scale = tl.full([1, 1], 1.0, tl.float32)
                if GROUP_K:
                    b_scale = load_scales(scales_ptr + b_group[:, None], m_b, start, K, GROUP_K, BLOCK_K, SCALES, WORDS)
                b_b, b_high = widen_floats4(b_b, b_scale, b_a.dtype, IN_PLACE)
        elif scales_ptr is not None:
            b_b = widen_bytes(b_b, b_a.dtype, IN_PLACE)
        if GROUP_K and SCALES is None:
            b_part = tl.dot(b_a, b_b.T, input_precision="ieee")
            if HALF:
                b_part = tl.dot(b_high_a, b_high.T, b_part, input_precision="ieee")
            b_sum += (
                b_part * tl.load(scales_ptr + b_group[:, None] + start // GROUP_K, mask=m_b, other=0.0).to(tl.float32).T
            )
        else:
            b_sum = tl.dot(b_a, b_b.T, b_sum, input_precision="ieee")
            if HALF:
                b_sum = tl.dot(b_high_a, b_high.T, b_sum, input_precision="ieee")
    if scales_ptr is not None and not GROUP_K:
        b_sum *= read_scales(tl.load(scales_ptr + b_group[:, None], mask=m_b, other=0), SCALES).T
    if row_scales_ptr is not None:
        b_sum *= tl.load(row_scales_ptr + b_row[:, None], mask=m_b, other=0.0).T
    return b_sum


@triton.jit(do_not_specialize=["num_blocks"])
def _gate_up_kernel(
    x_ptr,  # [T, N]
    w_ptr,  # [E, 2I, N]: gate rows, then up rows
    bias_ptr,  # [E, 2I] or None
    scales_ptr,  # [E, 2I / GROUP_N, N / GROUP_K], or None
    zeros_ptr,
    row_scales_ptr,  # [E, rows of the weight], or None
    h_ptr,  # [T * TOP_K, I], rows in the order of the experts
    order_ptr,
    table_ptr,
    I,
    N,
    num_blocks,
    n_tiles,
    stride_x,
    stride_we,
    stride_w,
    stride_bias,
    stride_se,
    stride_s,
    stride_rs,
    TOP_K: tl.constexpr,
    ACT: tl.constexpr,
    FULL_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # rows of weights: half of them gate, half up
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVICT: tl.constexpr,
    GROUP_N: tl.constexpr,
    GROUP_K: tl.constexpr,
    HALF: tl.constexpr,
    SCALES: tl.constexpr,
    WORDS: tl.constexpr,
    IN_PLACE: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    let_next_start(PDL)
    block, n_tile = _tile(num_blocks, n_tiles, GROUP_M)
    rows = tl.load(table_ptr + 2 * num_blocks + block)
    if rows == 0:
        return
    expert = tl.load(table_ptr + block).to(tl.int64)
    first = tl.load(table_ptr + num_blocks + block).to(tl.int64)
    row = tl.arange(0, BLOCK_M)
    m_row = row < rows
    token = tl.load(order_ptr + first + row, mask=m_row, other=0).to(tl.int64) // TOP_K
    COLUMNS: tl.constexpr = BLOCK_N // 2
    w_row = tl.arange(0, BLOCK_N)
    w_column = n_tile * COLUMNS + w_row % COLUMNS
    w_at = w_column + w_row // COLUMNS * I
    BYTES: tl.constexpr = BLOCK_K // 2 if HALF else BLOCK_K
    p_w = tile_at(w_ptr + expert * stride_we, w_at, tl.arange(0, BYTES)[None, :], stride_w)
    p_x = x_ptr + token * stride_x
    w_group = expert * stride_se + (w_at // GROUP_N).to(tl.int64) * stride_s
    b_both = _product(
        *(p_x[:, None], p_w, m_row[:, None], (w_column < I)[:, None]),
        *(scales_ptr, zeros_ptr, row_scales_ptr, w_group, expert * stride_rs + w_at),
        *(N, FULL_K, BLOCK_K, GROUP_K, HALF, SCALES, WORDS, IN_PLACE),
    )
    # a thread holds whole rows of the product, so gate and up are taken apart in registers
    b_gate, b_up = tl.split(tl.permute(tl.reshape(b_both, (BLOCK_M, 2, COLUMNS)), (0, 2, 1)))
    column = n_tile * COLUMNS + tl.arange(0, COLUMNS)
    m_column = column < I
    if bias_ptr is not None:
        p_bias = bias_ptr + expert * stride_bias + column
        b_gate += tl.load(p_bias, mask=m_column, other=0.0).to(tl.float32)[None, :]
        b_up += tl.load(p_bias + I, mask=m_column, other=0.0).to(tl.float32)[None, :]
    b_h = gated(b_gate, b_up, ACT)
    p_h = h_ptr + (first + row)[:, None] * I + column[None, :]
    mask = m_row[:, None] & m_column[None, :]
    tl.store(p_h, b_h.to(h_ptr.dtype.element_ty), mask=mask, eviction_policy=EVICT)


@triton.jit(do_not_specialize=["num_blocks"])
def _down_kernel(
    h_ptr,  # [T * TOP_K, I], rows in the order of the experts
    w_ptr,  # [E, N, I]
    bias_ptr,  # [E, N] or None
    scales_ptr,  # [E, N / GROUP_N, I / GROUP_K], or None
    zeros_ptr,
    row_scales_ptr,  # [E, rows of the weight], or None
    y_ptr,  # [T * TOP_K, N], rows by pair
    order_ptr,
    table_ptr,
    N,
    I,
    num_blocks,
    n_tiles,
    stride_we,
    stride_w,
    stride_bias,
    stride_se,
    stride_s,
    stride_rs,
    FULL_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVICT: tl.constexpr,
    GROUP_N: tl.constexpr,
    GROUP_K: tl.constexpr,
    HALF: tl.constexpr,
    SCALES: tl.constexpr,
    WORDS: tl.constexpr,
    IN_PLACE: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    let_next_start(PDL)
    block, n_tile = _tile(num_blocks, n_tiles, GROUP_M)
    rows = tl.load(table_ptr + 2 * num_blocks + block)
    if rows == 0:
        return
    expert = tl.load(table_ptr + block).to(tl.int64)
    first = tl.load(table_ptr + num_blocks + block).to(tl.int64)
    row = tl.arange(0, BLOCK_M)
    m_row = row < rows
    column = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m_column = column < N
    p_h = h_ptr + (first + row) * I
    BYTES: tl.constexpr = BLOCK_K // 2 if HALF else BLOCK_K
    p_w = tile_at(w_ptr + expert * stride_we, column, tl.arange(0, BYTES)[None, :], stride_w)
    w_group = expert * stride_se + (column // GROUP_N).to(tl.int64) * stride_s
    b_y = _product(
        *(p_h[:, None], p_w, m_row[:, None], m_column[:, None]),
        *(scales_ptr, zeros_ptr, row_scales_ptr, w_group, expert * stride_rs + column),
        *(I, FULL_K, BLOCK_K, GROUP_K, HALF, SCALES, WORDS, IN_PLACE),
    )
    if bias_ptr is not None:
        b_y += tl.load(bias_ptr + expert * stride_bias + column, mask=m_column, other=0.0).to(tl.float32)[None, :]
    pair = tl.load(order_ptr + first + row, mask=m_row, other=0).to(tl.int64)
    p_y = y_ptr + pair[:, None] * N + column[None, :]
    mask = m_row[:, None] & m_column[None, :]
    tl.store(p_y, b_y.to(y_ptr.dtype.element_ty), mask=mask, eviction_policy=EVICT)


def _narrowed(
    weight: torch.Tensor, scaled: Scaled, k: int, config: tuning.Config
) -> tuple[tuple[torch.Tensor | None, ...], tuple[int, ...], dict[str, Any]]:
    """(scales, zero points and scales of rows, strides of the first and the last, the kernel's constants and
    configuration) for a weight with ``k`` columns."""
    parts, constants, config = tile_reading(weight, scaled, config)
    scales, _, row_scales = parts
    strides = (0, 0) if scales is None else (scales.stride(0), scales.stride(1))
    of_rows = 0 if row_scales is None else row_scales.stride(0)
    return parts, (*strides, of_rows), {**constants, **config, "FULL_K": k % config["BLOCK_K"] == 0}


def launch_gate_up(
    x: torch.Tensor,
    experts: Experts,
    h: torch.Tensor,
    blocks: ExpertBlocks,
    top_k: int,
    evict: str,
    config: tuning.Config,
) -> None:
    """Write the gated activation of each pair that has an expert to ``h [T * k, I]``, in the order of ``blocks``."""
    w_gate_up, bias, scaled = experts.w_gate_up, experts.gate_up_bias, experts.scaled_gate_up
    i, n = h.shape[1], x.shape[1]
    num_blocks = blocks.table.shape[1]
    parts, of_scales, flags = _narrowed(w_gate_up, scaled, n, config)
    tiles = triton.cdiv(i, config["BLOCK_N"] // 2)
    strides = (x.stride(0), *w_gate_up.stride()[:2], 0 if bias is None else bias.stride(0), *of_scales)
    flags = {**flags, "TOP_K": top_k, "ACT": experts.activation, "EVICT": evict, **dependent_launch(h.device)}
    weights = w_gate_up, bias, *parts
    _gate_up_kernel[(num_blocks * tiles,)](
        x, *weights, h, blocks.order, blocks.table, i, n, num_blocks, tiles, *strides, **flags
    )


def launch_down(
    h: torch.Tensor, experts: Experts, y: torch.Tensor, blocks: ExpertBlocks, evict: str, config: tuning.Config
) -> None:
    """Write the row of each pair that has an expert to ``y [T * k, N]``, in the order of the pairs."""
    w_down, bias, scaled = experts.w_down, experts.down_bias, experts.scaled_down
    n, i = y.shape[1], h.shape[1]
    num_blocks = blocks.table.shape[1]
    parts, of_scales, flags = _narrowed(w_down, scaled, i, config)
    tiles = triton.cdiv(n, config["BLOCK_N"])
    strides = (*w_down.stride()[:2], 0 if bias is None else bias.stride(0), *of_scales)
    flags = {**flags, "EVICT": evict, **dependent_launch(h.device)}
    weights = w_down, bias, *parts
    _down_kernel[(num_blocks * tiles,)](
        h, *weights, y, blocks.order, blocks.table, n, i, num_blocks, tiles, *strides, **flags
    )

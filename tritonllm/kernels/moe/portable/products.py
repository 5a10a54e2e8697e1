"""Mixture of experts: the two grouped products, by programs that each take a block of pairs of one expert.

The first product reads the tokens' rows through the order of the pairs and applies the gate in its epilogue, so the
``[T, k, 2I]`` projection never reaches memory; the second writes a row for each pair, in the order of the tokens.
Grouped products over sorted tokens: Gale et al., "MegaBlocks" (2022).
"""

import torch
import triton
import triton.language as tl

from tritonllm.kernels.dense import load_tile, tile_at
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
    p_b,  # [BLOCK_N, BLOCK_K] the first tile of the weights, which are transposed
    m_a,
    m_b,
    K,
    FULL_K: tl.constexpr,  # BLOCK_K divides K: no columns to mask
    BLOCK_K: tl.constexpr,
):
    k = tl.arange(0, BLOCK_K)[None, :]
    b_sum = tl.zeros([p_a.shape[0], p_b.shape[0]], tl.float32)
    for start in range(0, K, BLOCK_K):
        if FULL_K:
            b_a = tl.load(p_a + start + k, mask=m_a, other=0.0)
            b_b = load_tile(p_b, start, m_b, "")
        else:
            b_a = tl.load(p_a + start + k, mask=m_a & (k < K - start), other=0.0)
            b_b = load_tile(p_b, start, m_b & (k < K - start), "")
        b_sum = tl.dot(b_a, b_b.T, b_sum, input_precision="ieee")
    return b_sum


@triton.jit(do_not_specialize=["num_blocks"])
def _gate_up_kernel(
    x_ptr,  # [T, N]
    w_ptr,  # [E, 2I, N]: gate rows, then up rows
    bias_ptr,  # [E, 2I] or None
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
    TOP_K: tl.constexpr,
    ACT: tl.constexpr,
    FULL_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # rows of weights: half of them gate, half up
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVICT: tl.constexpr,
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
    HALF: tl.constexpr = BLOCK_N // 2
    w_row = tl.arange(0, BLOCK_N)
    w_column = n_tile * HALF + w_row % HALF
    p_w = tile_at(w_ptr + expert * stride_we, w_column + w_row // HALF * I, tl.arange(0, BLOCK_K)[None, :], stride_w)
    p_x = x_ptr + token * stride_x
    b_both = _product(p_x[:, None], p_w, m_row[:, None], (w_column < I)[:, None], N, FULL_K, BLOCK_K)
    # a thread holds whole rows of the product, so gate and up are taken apart in registers
    b_gate, b_up = tl.split(tl.permute(tl.reshape(b_both, (BLOCK_M, 2, HALF)), (0, 2, 1)))
    column = n_tile * HALF + tl.arange(0, HALF)
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
    FULL_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVICT: tl.constexpr,
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
    p_w = tile_at(w_ptr + expert * stride_we, column, tl.arange(0, BLOCK_K)[None, :], stride_w)
    b_y = _product(p_h[:, None], p_w, m_row[:, None], m_column[:, None], I, FULL_K, BLOCK_K)
    if bias_ptr is not None:
        b_y += tl.load(bias_ptr + expert * stride_bias + column, mask=m_column, other=0.0).to(tl.float32)[None, :]
    pair = tl.load(order_ptr + first + row, mask=m_row, other=0).to(tl.int64)
    p_y = y_ptr + pair[:, None] * N + column[None, :]
    mask = m_row[:, None] & m_column[None, :]
    tl.store(p_y, b_y.to(y_ptr.dtype.element_ty), mask=mask, eviction_policy=EVICT)


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
    w_gate_up, bias = experts.w_gate_up, experts.gate_up_bias
    i, n = h.shape[1], x.shape[1]
    num_blocks = blocks.table.shape[1]
    tiles = triton.cdiv(i, config["BLOCK_N"] // 2)
    strides = (x.stride(0), *w_gate_up.stride()[:2], 0 if bias is None else bias.stride(0))
    flags = {"TOP_K": top_k, "ACT": experts.activation, "FULL_K": n % config["BLOCK_K"] == 0, "EVICT": evict}
    flags |= dependent_launch(h.device)
    _gate_up_kernel[(num_blocks * tiles,)](
        x, w_gate_up, bias, h, blocks.order, blocks.table, i, n, num_blocks, tiles, *strides, **flags, **config
    )


def launch_down(
    h: torch.Tensor, experts: Experts, y: torch.Tensor, blocks: ExpertBlocks, evict: str, config: tuning.Config
) -> None:
    """Write the row of each pair that has an expert to ``y [T * k, N]``, in the order of the pairs."""
    w_down, bias = experts.w_down, experts.down_bias
    n, i = y.shape[1], h.shape[1]
    num_blocks = blocks.table.shape[1]
    tiles = triton.cdiv(n, config["BLOCK_N"])
    strides = (*w_down.stride()[:2], 0 if bias is None else bias.stride(0))
    flags = {"FULL_K": i % config["BLOCK_K"] == 0, "EVICT": evict}
    flags |= dependent_launch(h.device)
    _down_kernel[(num_blocks * tiles,)](
        h, w_down, bias, y, blocks.order, blocks.table, n, i, num_blocks, tiles, *strides, **flags, **config
    )

"""The product of up to 64 rows with a matrix on the tensor cores: each program takes a tile of the weight.

The weight is read once, so memory bounds it: ``N K`` elements. A tile of 32 columns of the output or more is high
enough that reading ``x`` for each costs little, but then a layer can have fewer tiles than the chip has processors. So
K can be cut too: the parts go through memory that the second-level cache holds, and the program that ends last adds
them, in the order of K, so that timing does not change a bit of the result (the counting is that of
`attention/portable/balanced.py`).
"""

import torch
import triton
import triton.language as tl

from tritonllm.kernels.dense.arguments import Fused, Operands, Scaled
from tritonllm.kernels.dense.weight import fetch_ahead, lines_ahead, load_tile, tile_at
from tritonllm.kernels.elementwise import activate
from tritonllm.kernels.runtime import tuning
from tritonllm.kernels.runtime.dependent_launch import let_next_start, wait_for_previous


@triton.jit(do_not_specialize=["M"])
def linear_tiles_kernel(
    x_ptr,  # [M, K]
    weight_ptr,  # [N, K]; [2 N, K] if GATED
    bias_ptr,  # [N] or [2 N], or None
    scales_ptr,  # [weight rows / GROUP_N, K / GROUP_K] float32, or None
    out_ptr,  # [M, N]; read too if ADD
    part_ptr,  # [SPLIT_K, M, weight rows] float32
    count_ptr,  # [programs along N] int32 zeros, which they are again in the end
    M,
    N,
    K,
    scale,
    stride_x,
    stride_weight,
    stride_scales,
    stride_out,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
    EVEN_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_N: tl.constexpr,
    GROUP_K: tl.constexpr,  # BLOCK_K divides it; 0: a group has all columns
    AHEAD: tl.constexpr,  # lines of each row of the weight that are asked for before the kernel before this one ends
):
    let_next_start(PDL)
    tile = tl.program_id(0)
    part = tl.program_id(1)
    COLUMNS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    b_m = tl.arange(0, BLOCK_M)[:, None]
    b_col = tile * COLUMNS + tl.arange(0, COLUMNS)
    if GATED:  # the gate's rows and those of up in turn
        b_pair = tl.arange(0, BLOCK_N)
        b_row = tl.minimum(tile * COLUMNS + b_pair // 2, N - 1) + b_pair % 2 * N
    else:
        b_row = tl.minimum(b_col, N - 1)
    at = tl.arange(0, BLOCK_K)[None, :]
    p_weight = tile_at(weight_ptr, b_row, at, stride_weight)
    p_x = x_ptr + b_m * stride_x + at
    if scales_ptr is not None:
        p_factor = scales_ptr + (b_row // GROUP_N).to(tl.int64) * stride_scales
    m_m = b_m < M
    steps = tl.cdiv(K, BLOCK_K)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if PDL and AHEAD:
        fetch_ahead(weight_ptr, b_row, steps * part // SPLIT_K * BLOCK_K, stride_weight, AHEAD)
    wait_for_previous(PDL)
    for step in tl.range(steps * part // SPLIT_K, steps * (part + 1) // SPLIT_K, num_stages=STAGES):
        start = step * BLOCK_K
        if EVEN_K:
            b_weight = load_tile(p_weight, start, None, "evict_first")
            b_x = tl.load(p_x + start, mask=m_m, other=0.0)
        else:
            m_k = at + start < K
            b_weight = load_tile(p_weight, start, m_k, "evict_first")
            b_x = tl.load(p_x + start, mask=m_m & m_k, other=0.0)
        if GROUP_K:
            b_product = tl.dot(b_x, tl.trans(b_weight.to(b_x.dtype)), input_precision="ieee")
            acc += b_product * tl.load(p_factor + start // GROUP_K)[None, :]
        else:
            acc = tl.dot(b_x, tl.trans(b_weight.to(b_x.dtype)), acc, input_precision="ieee")
    last = True
    if SPLIT_K > 1:
        rows = tl.num_programs(0) * BLOCK_N
        p_part = part_ptr + b_m.to(tl.int64) * rows + (tile * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
        stride_part = (M * rows).to(tl.int64)
        tl.store(p_part + part * stride_part, acc, mask=m_m)
        tl.debug_barrier()  # every thread has stored its share of the part before one counts it
        last = tl.atomic_add(count_ptr + tile, 1) == SPLIT_K - 1
        if last:
            tl.store(count_ptr + tile, 0)
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for i in tl.static_range(SPLIT_K):
                acc += tl.load(p_part + i * stride_part, mask=m_m, other=0.0, cache_modifier=".cg")
    if last:
        if scales_ptr is not None and not GROUP_K:
            acc *= tl.load(p_factor)[None, :]
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + b_row).to(tl.float32)[None, :]
        if GATED:
            b_gate, b_up = tl.split(tl.reshape(acc, [BLOCK_M, COLUMNS, 2]))
            b_y = activate(b_gate, ACT) * b_up
        elif ACT is not None:
            b_y = activate(acc, ACT)
        else:
            b_y = acc
        p_out = out_ptr + b_m.to(tl.int64) * stride_out + b_col[None, :]
        m_out = m_m & (b_col < N)[None, :]
        if ADD:
            b_y = tl.load(p_out, mask=m_out, other=0.0).to(tl.float32) + b_y * scale
        tl.store(p_out, b_y.to(out_ptr.dtype.element_ty), mask=m_out)


def launch_tiles(
    operands: Operands, fused: Fused, scaled: Scaled, config: tuning.Config, launch: dict[str, bool]
) -> None:
    x, weight, bias, _, out, workspace = operands
    (m, k), (rows, _) = x.shape, weight.shape
    block_k, split = min(config["BLOCK_K"], scaled.group_columns or config["BLOCK_K"]), config["SPLIT_K"]
    tiles = triton.cdiv(rows, config["BLOCK_N"])
    parts = count = None
    if split > 1:
        parts = torch.empty(split * m * tiles * config["BLOCK_N"], dtype=torch.float32, device=x.device)
        count = workspace if workspace is not None else torch.zeros(tiles, dtype=torch.int32, device=x.device)
    linear_tiles_kernel[(tiles, split)](
        x,
        weight,
        bias,
        scaled.scales,
        out,
        parts,
        count,
        m,
        out.shape[1],
        k,
        fused.scale,
        x.stride(0),
        weight.stride(0),
        None if scaled.scales is None else scaled.scales.stride(0),
        out.stride(0),
        ACT=fused.activation,
        GATED=fused.gated,
        ADD=fused.add,
        EVEN_K=k % block_k == 0,
        SPLIT_K=split,
        STAGES=config["num_stages"],
        BLOCK_M=max(16, triton.next_power_of_2(m)),
        BLOCK_N=config["BLOCK_N"],
        BLOCK_K=block_k,
        GROUP_N=scaled.group_rows,
        GROUP_K=scaled.group_columns,
        AHEAD=lines_ahead(config["BLOCK_N"], k // split, weight) if fused.constant_weight else 0,
        num_warps=config["num_warps"],
        **launch,
    )

"""The product of few rows with a matrix on the tensor cores: each program takes a tile of the weight.

The weight is read once, so memory bounds it: ``N K`` elements. A tile of 32 columns of the output or more is high
enough that reading ``x`` for each costs little, but then a layer can have fewer tiles than the chip has processors. So
K can be cut too: the parts go through memory that the second-level cache holds, and the program that ends last adds
them, in the order of K, so that timing does not change a bit of the result (the counting is that of
`attention/portable/balanced.py`). More rows than a tile has are several programs, which run beside each other and read
a tile of the weight together.

Rows of 8 bits are multiplied by weights of 8 bits as they are, and the sums by the scales of both.
"""

import torch
import triton
import triton.language as tl

from tritonllm.kernels.dense.arguments import Fused, Operands, Scaled
from tritonllm.kernels.dense.reading import tile_reading
from tritonllm.kernels.dense.weight import fetch_ahead, lines_ahead, load_tile, tile_at
from tritonllm.kernels.dense.widen import (
    load_scales,
    read_scales,
    widen_bytes,
    widen_floats4,
    widen_nibbles,
)
from tritonllm.kernels.elementwise import activate
from tritonllm.kernels.runtime import tuning
from tritonllm.kernels.runtime.chip import on_amd
from tritonllm.kernels.runtime.dependent_launch import let_next_start, wait_for_previous

MAX_BLOCK_M = 256


@triton.jit
def _multiply(b_x, b_weight, acc, TURNED: tl.constexpr):
    """``acc [M, N]`` and the product of a step; ``[N, M]`` if TURNED."""
    if TURNED:
        acc = tl.dot(b_weight, tl.trans(b_x), acc, input_precision="ieee", out_dtype=acc.dtype)
    else:
        acc = tl.dot(b_x, tl.trans(b_weight), acc, input_precision="ieee", out_dtype=acc.dtype)
    return acc


@triton.jit(do_not_specialize=["M"])
def linear_tiles_kernel(
    x_ptr,  # [M, K]
    weight_ptr,  # [N, K]; [2 N, K] if GATED; K / 2 bytes in a row if HALF
    bias_ptr,  # [N] or [2 N], or None
    x_scales_ptr,  # [M] float32, of rows of the weight's dtype; or None
    scales_ptr,  # [weight rows / GROUP_N, K / GROUP_K], or None
    zeros_ptr,  # likewise, uint8; None: 8 where there are nibbles
    row_scales_ptr,  # [weight rows], or None
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
    GROUP_K: tl.constexpr,  # BLOCK_K divides it, or with SCALES is divided by it; 0: a group has all columns
    HALF: tl.constexpr,  # so many columns are the low nibbles of so many bytes, and the next the high; 0: no nibbles
    TURNED: tl.constexpr,  # the weight is the left operand, which the tensor cores of Hopper take from registers
    SCALES: tl.constexpr,  # what bytes of scales are: of floats of four bits; None: numbers
    WORDS: tl.constexpr,  # those of a row and a tile are one word
    IN_PLACE: tl.constexpr,
    AHEAD: tl.constexpr,  # lines of each row of the weight that are asked for before the kernel before this one ends
):
    let_next_start(PDL)
    blocks = tl.cdiv(M, BLOCK_M)
    tile = tl.program_id(0) // blocks
    part = tl.program_id(1)
    COLUMNS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    b_m = (tl.program_id(0) % blocks * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    b_col = tile * COLUMNS + tl.arange(0, COLUMNS)
    if GATED:  # the gate's rows and those of up in turn
        b_pair = tl.arange(0, BLOCK_N)
        b_row = tl.minimum(tile * COLUMNS + b_pair // 2, N - 1) + b_pair % 2 * N
    else:
        b_row = tl.minimum(b_col, N - 1)
    BYTES: tl.constexpr = BLOCK_K // 2 if HALF else BLOCK_K
    at = tl.arange(0, BYTES)[None, :]
    p_weight = tile_at(weight_ptr, b_row, at, stride_weight)
    if HALF:
        at = at // HALF * (2 * HALF) + at % HALF
    p_x = x_ptr + b_m.to(tl.int64) * stride_x + at
    if scales_ptr is not None:
        b_group = (b_row // GROUP_N).to(tl.int64) * stride_scales
        p_factor = scales_ptr + b_group
    if HALF:
        b_zero = tl.full([BLOCK_N], 8.0, tl.float32)
        if zeros_ptr is not None and not GROUP_K:
            b_zero = tl.load(zeros_ptr + b_group).to(tl.float32)
    m_m = b_m < M
    steps = tl.cdiv(K, BLOCK_K)
    WHOLE: tl.constexpr = x_scales_ptr is not None and x_ptr.dtype.element_ty == tl.int8
    acc = tl.zeros([BLOCK_N, BLOCK_M] if TURNED else [BLOCK_M, BLOCK_N], tl.int32 if WHOLE else tl.float32)
    if PDL and AHEAD:
        fetch_ahead(weight_ptr, b_row, steps * part // SPLIT_K * BYTES, stride_weight, AHEAD)
    wait_for_previous(PDL)
    for step in tl.range(steps * part // SPLIT_K, steps * (part + 1) // SPLIT_K, num_stages=STAGES):
        start = step * BLOCK_K
        if EVEN_K:
            b_weight = load_tile(p_weight, step * BYTES, None, "evict_first")
            b_x = tl.load(p_x + start, mask=m_m, other=0.0)
        else:
            m_k = at + start < K
            b_weight = load_tile(p_weight, step * BYTES, m_k, "evict_first")
            b_x = tl.load(p_x + start, mask=m_m & m_k, other=0.0)
        if HALF:
            if zeros_ptr is not None and GROUP_K:
                b_zero = tl.load(zeros_ptr + b_group + start // GROUP_K).to(tl.float32)
            m_high = m_m if EVEN_K else m_m & m_k
            b_high_x = tl.load(p_x + start + HALF, mask=m_high, other=0.0)
            if SCALES is None:
                b_weight, b_high = widen_nibbles(b_weight, b_zero[:, None], b_x.dtype, IN_PLACE)
            else:
                b_scale = tl.full([1, 1], 1.0, tl.float32)
                if GROUP_K:
                    b_scale = load_scales(p_factor[:, None], None, start, K, GROUP_K, BLOCK_K, SCALES, WORDS)
                b_weight, b_high = widen_floats4(b_weight, b_scale, b_x.dtype, IN_PLACE)
        elif scales_ptr is not None and x_scales_ptr is None:
            b_weight = widen_bytes(b_weight, b_x.dtype, IN_PLACE)
        if GROUP_K and SCALES is None:
            b_product = _multiply(b_x, b_weight, tl.zeros_like(acc), TURNED)
            if HALF:
                b_product = _multiply(b_high_x, b_high, b_product, TURNED)
            b_factor = tl.load(p_factor + start // GROUP_K).to(tl.float32)
            acc += b_product * (b_factor[:, None] if TURNED else b_factor[None, :])
        else:
            acc = _multiply(b_x, b_weight, acc, TURNED)
            if HALF:
                acc = _multiply(b_high_x, b_high, acc, TURNED)
    if TURNED:
        acc = tl.trans(acc)
    acc = acc.to(tl.float32)
    last = True
    if SPLIT_K > 1:
        rows = tl.num_programs(0) * BLOCK_N  # of one block of rows of x
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
        if x_scales_ptr is not None:
            acc *= tl.load(x_scales_ptr + b_m, mask=m_m, other=0.0)
        if scales_ptr is not None and not GROUP_K:
            acc *= read_scales(tl.load(p_factor), SCALES)[None, :]
        if row_scales_ptr is not None:
            acc *= tl.load(row_scales_ptr + b_row)[None, :]
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
    operands: Operands,
    fused: Fused,
    scaled: Scaled,
    config: tuning.Config,
    launch: dict[str, bool],
) -> None:
    x, weight, bias, _, out, workspace = operands
    (m, k), rows = x.shape, len(weight)
    (scales, *others), constants, config = tile_reading(weight, scaled, config)
    block_k, split = config["BLOCK_K"], config["SPLIT_K"]
    tiles = triton.cdiv(rows, config["BLOCK_N"])
    block_m = min(max(16, triton.next_power_of_2(m)), config.get("BLOCK_M", MAX_BLOCK_M))
    assert split == 1 or m <= block_m
    parts = count = None
    if split > 1:
        parts = torch.empty(split * m * tiles * config["BLOCK_N"], dtype=torch.float32, device=x.device)
        count = workspace if workspace is not None else torch.zeros(tiles, dtype=torch.int32, device=x.device)
    linear_tiles_kernel[(tiles * triton.cdiv(m, block_m), split)](
        x,
        weight,
        bias,
        scaled.of_rows,
        scales,
        *others,
        out,
        parts,
        count,
        m,
        out.shape[1],
        k,
        fused.scale,
        x.stride(0),
        weight.stride(0),
        None if scales is None else scales.stride(0),
        out.stride(0),
        ACT=fused.activation,
        GATED=fused.gated,
        ADD=fused.add,
        EVEN_K=k % block_k == 0,
        SPLIT_K=split,
        STAGES=config["num_stages"],
        BLOCK_M=block_m,
        BLOCK_N=config["BLOCK_N"],
        BLOCK_K=block_k,
        TURNED=config.get("TURNED", False) and not on_amd(weight.device),  # whose pipeliner fails with it
        AHEAD=lines_ahead(config["BLOCK_N"], weight.shape[1] // split, weight) if fused.constant_weight else 0,
        num_warps=config["num_warps"],
        **constants,
        **launch,
    )

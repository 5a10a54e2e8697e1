"""The product of one or two rows with a matrix: each program takes a few rows of the weight from end to end.

Memory bounds it: ``N K`` elements, each read once. A program loads all of its weights into registers, with nothing
between the loads, so that as many bytes are under way as registers hold; a loop over K, whose next loads wait for its
sums, takes longer (4096 x 4096 on an H200: 9.4 us, 10.2 with the best loop, 10.7 through shared memory). With all of K
in one program nothing has to be merged, and a result depends on its own row of ``x`` alone. Every row multiplies every
weight once more in the ordinary arithmetic units, so with more rows the tensor cores win (`portable/tiles.py`).

Weights do not depend on the kernel before, so they are loaded before waiting for it (`dependent_launch`): while a
kernel drains, or attention waits for its own results, the memory reads the next product's weights into registers.
"""

import triton
import triton.language as tl

from tritonllm.kernels.dense.arguments import Fused, Operands, Scaled, half_unit, scales_for_kernel
from tritonllm.kernels.dense.weight import load_tile, tile_at
from tritonllm.kernels.dense.widen import read_scales, widen_bytes, widen_floats4, widen_nibbles, widens_in_place
from tritonllm.kernels.elementwise import activate
from tritonllm.kernels.runtime import tuning
from tritonllm.kernels.runtime.dependent_launch import let_next_start, wait_for_previous

MAX_ROWS = 2


@triton.jit(do_not_specialize=["M"])
def linear_rows_kernel(
    x_ptr,  # [M, K]
    weight_ptr,  # [N, K]; [2 N, K] if GATED; K / 2 bytes in a row if HALF
    bias_ptr,  # [N] or [2 N], or None
    norm_ptr,  # [K] weight of the RMS norm of x, or None
    scales_ptr,  # [weight rows / GROUP_N, K / GROUP_K], or None
    zeros_ptr,  # likewise, uint8; None: 8 where there are nibbles
    row_scales_ptr,  # [weight rows], or None
    out_ptr,  # [M, N]; read too if ADD
    M,
    N,
    K,
    eps,
    norm_offset,
    scale,
    stride_x,
    stride_weight,
    stride_scales,
    stride_out,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
    EARLY: tl.constexpr,  # no kernel in flight writes the weights
    LATE: tl.constexpr,  # the next kernel may start when the weights are under way, not at once
    TILES: tl.constexpr,  # along K
    EVEN_K: tl.constexpr,  # BLOCK_K divides K
    ROWS: tl.constexpr,  # M rounded up to a power of two
    GROUP_N: tl.constexpr,
    GROUP_K: tl.constexpr,  # divides BLOCK_K; 0: a group has all columns
    HALF: tl.constexpr,  # so many columns are the low nibbles of so many bytes, and the next the high; 0: no nibbles
    SCALES: tl.constexpr,  # what bytes of scales are: of floats of four bits; None: numbers
    IN_PLACE: tl.constexpr,
    BLOCK_N: tl.constexpr,  # rows of the weight, two for each column of the output if GATED
    BLOCK_K: tl.constexpr,
):
    if not LATE:
        let_next_start(PDL)
    COLUMNS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    b_col = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    m_col = b_col < N
    if GATED:  # the gate's rows and those of up in turn
        b_pair = tl.arange(0, BLOCK_N)
        b_row = tl.minimum(tl.program_id(0) * COLUMNS + b_pair // 2, N - 1) + b_pair % 2 * N
    else:
        b_row = tl.minimum(b_col, N - 1)
    HALVES: tl.constexpr = 2 if HALF else 1
    BYTES: tl.constexpr = BLOCK_K // HALVES
    b_k = tl.arange(0, BYTES)[None, :]
    p_weight = tile_at(weight_ptr, b_row, b_k, stride_weight)
    if HALF:
        b_k = b_k // HALF * (2 * HALF) + b_k % HALF
    if not EARLY:
        wait_for_previous(PDL)
    weights: tl.tuple = ()
    norms: tl.tuple = ()
    factors: tl.tuple = ()
    zeros: tl.tuple = ()
    if scales_ptr is not None:
        p_factor = tile_at(scales_ptr, b_row // GROUP_N, 0, stride_scales)
        if not GROUP_K:
            factors += (tl.reshape(tl.load(p_factor), [BLOCK_N]),)
        if zeros_ptr is not None:
            p_zero = tile_at(zeros_ptr, b_row // GROUP_N, 0, stride_scales)
    for t in tl.static_range(TILES):
        at = t * BLOCK_K + b_k
        # each weight is used once: other lines shall stay in the cache rather than these
        if EVEN_K or t < TILES - 1:
            weights += (load_tile(p_weight, t * BYTES, None, "evict_first"),)
        else:
            weights += (load_tile(p_weight, t * BYTES, at < K, "evict_first"),)
        if norm_ptr is not None:
            norms += (tl.load(norm_ptr + at, mask=at < K, other=0.0),)
            if HALF:
                norms += (tl.load(norm_ptr + at + HALF, mask=at < K, other=0.0),)
        if GROUP_K:
            b_group = t * (BLOCK_K // GROUP_K) + tl.arange(0, BLOCK_K // GROUP_K)[None, :]
            factors += (tl.load(p_factor + b_group, mask=b_group * GROUP_K < K, other=0),)
        if HALF:
            if SCALES is not None:  # the floats alone: what a group adds up to is scaled
                zeros += (tl.full([1, 1], 1.0, tl.float32),)
            elif zeros_ptr is None:
                zeros += (tl.full([1, 1], 8.0, tl.float32),)
            elif GROUP_K:  # each column's, from the nearest cache
                zeros += (tl.load(p_zero + at // GROUP_K, mask=at < K, other=0).to(tl.float32),)
            else:
                zeros += (tl.load(p_zero).to(tl.float32),)
    if LATE:
        let_next_start(PDL)
    if EARLY:
        wait_for_previous(PDL)

    for m in tl.static_range(ROWS):
        p_out = out_ptr + m * stride_out + b_col
        m_out = m_col & (m < M)
        if ADD:
            b_before = tl.load(p_out, mask=m_out, other=0.0).to(tl.float32)
        if GROUP_K:
            b_y = tl.zeros([BLOCK_N], tl.float32)
        else:
            b_sums = tl.zeros([BLOCK_N, BYTES], tl.float32)
        b_squares = tl.zeros([1, BYTES], tl.float32)
        for t in tl.static_range(TILES):
            if SCALES is not None:
                halves = widen_floats4(weights[t], zeros[t], tl.float32, IN_PLACE)
            elif HALF:
                halves = widen_nibbles(weights[t], zeros[t], tl.float32, IN_PLACE)
            elif scales_ptr is not None:
                halves = (widen_bytes(weights[t], tl.float32, IN_PLACE),)
            else:
                halves = (weights[t].to(tl.float32),)
            if GROUP_K:
                b_sums = tl.zeros([BLOCK_N, BYTES], tl.float32)
            for h in tl.static_range(HALVES):
                at = t * BLOCK_K + h * HALF + b_k
                b_x = tl.load(x_ptr + m * stride_x + at, mask=(at < K) & (m < M), other=0.0).to(tl.float32)
                if norm_ptr is not None:
                    b_squares += b_x * b_x
                    b_x *= norms[t * HALVES + h].to(tl.float32) + norm_offset
                b_sums += halves[h] * b_x
            if GROUP_K:
                b_groups = tl.reshape(b_sums, [BLOCK_N, BLOCK_K // GROUP_K, GROUP_K // HALVES])
                b_y += tl.sum(tl.sum(b_groups, axis=2) * read_scales(factors[t], SCALES), axis=1)
        if not GROUP_K:
            b_y = tl.sum(b_sums, axis=1)
            if scales_ptr is not None:
                b_y *= read_scales(factors[0], SCALES)
        if row_scales_ptr is not None:
            b_y *= tl.load(row_scales_ptr + b_row)
        if norm_ptr is not None:  # one factor for the whole row of x, so it can wait until the end
            b_y *= tl.rsqrt(tl.sum(b_squares) / K + eps)
        if bias_ptr is not None:
            b_y += tl.load(bias_ptr + b_row).to(tl.float32)
        if GATED:
            b_gate, b_up = tl.split(tl.reshape(b_y, [COLUMNS, 2]))
            b_y = activate(b_gate, ACT) * b_up
        elif ACT is not None:
            b_y = activate(b_y, ACT)
        if ADD:
            b_y = b_before + b_y * scale
        tl.store(p_out, b_y.to(out_ptr.dtype.element_ty), mask=m_out)


def launch_rows(
    operands: Operands, fused: Fused, scaled: Scaled, config: tuning.Config, launch: dict[str, bool]
) -> None:
    x, weight, bias, norm_weight, out, _ = operands
    m, k = x.shape
    half, (scales, kind) = half_unit(weight, scaled), scales_for_kernel(scaled)
    block_n, block_k = config["BLOCK_N"], max(config["BLOCK_K"], scaled.group_columns, 2 * half)
    linear_rows_kernel[(triton.cdiv(weight.shape[0], block_n),)](
        x,
        weight,
        bias,
        norm_weight,
        scales,
        scaled.zeros,
        scaled.row_scales,
        out,
        m,
        out.shape[1],
        k,
        fused.eps,
        fused.norm_offset,
        fused.scale,
        x.stride(0),
        weight.stride(0),
        None if scales is None else scales.stride(0),
        out.stride(0),
        ACT=fused.activation,
        GATED=fused.gated,
        ADD=fused.add,
        EARLY=fused.constant_weight,
        LATE=config["LATE"],
        TILES=triton.cdiv(k, block_k),
        EVEN_K=k % block_k == 0,
        ROWS=triton.next_power_of_2(m),
        GROUP_N=scaled.group_rows,
        GROUP_K=scaled.group_columns,
        HALF=half,
        SCALES=kind,
        IN_PLACE=scales is not None and widens_in_place(weight.device),
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=config["num_warps"],
        **launch,
    )

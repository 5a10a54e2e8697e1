"""The product of 65 and more rows with a matrix for Hopper, in Gluon, with what comes before and after it in a layer.

A tile is 64 or 128 rows of ``x`` by up to 256 rows of the weight. The last tile of ``x`` ends with its last row: that
some rows are computed twice costs less than to fetch rows that are not there. One warp copies both by the bulk copy
engine, some steps of 64 along K ahead; two groups of four warps multiply, each 64 of 128 rows, or of 64 rows every
other step. (Producer and consumer warps: CUTLASS, NVIDIA.) Every sum is added up in one order: a row's result does not
depend on the others. Programs that stay take one tile after the other, but at these sizes a processor has one, and its
time is that of bringing `x` and weights from the second-level cache.

Weights do not depend on the kernel before, so the first of them are on their way while it ends (`dependent_launch`).
"""

import torch
import triton
from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from tritonllm.kernels.dense.arguments import Fused, NextNorm, Operands
from tritonllm.kernels.dense.sm90.epilogues import add_to_stream, fetch_squares, fetch_stream, normalise_and_activate
from tritonllm.kernels.dense.sm90.tile import HopperTile
from tritonllm.kernels.hopper.descriptors import BLOCK_K, descriptor, weight_descriptor
from tritonllm.kernels.runtime.chip import processors
from tritonllm.kernels.runtime.dependent_launch import dependent_launch, let_next_start, wait_for_previous


@constexpr_function
def power_of_two(width):
    """The largest that fits: so many rows of the weight are one instruction; what is left is another."""
    return 1 << (width.bit_length() - 1)


@gluon.jit
def first_row(tile, shape, BLOCK_M: gl.constexpr):
    """The first of the tile's rows of ``x``."""
    m_tiles, tiles, steps, last = shape
    return gl.minimum(tile % m_tiles * BLOCK_M, last)


@gluon.jit
def _copy_weights(desc, tail_desc, smem, tail_smem, stage, bar, row, k, GATED: gl.constexpr):
    """The step's rows of the weight, from `row` on: of a gated one, 8 rows of gate and 8 of up take turns."""
    N0: gl.constexpr = smem.shape[1] * (16 if GATED else 1)
    if GATED:
        tma.async_copy_global_to_shared(desc, [row // 16, 0, 0, k], bar, smem.index(stage))
        if tail_desc is not None:
            tma.async_copy_global_to_shared(tail_desc, [(row + N0) // 16, 0, 0, k], bar, tail_smem.index(stage))
    else:
        tma.async_copy_global_to_shared(desc, [row, k], bar, smem.index(stage))
        if tail_desc is not None:
            tma.async_copy_global_to_shared(tail_desc, [row + N0, k], bar, tail_smem.index(stage))


@gluon.jit
def _prefetch(weight, first, m_tile, m_tiles, k, GATED: gl.constexpr, BLOCK_N: gl.constexpr):
    """A share of the tile's rows of the weight, from column `k` on, into the second-level cache."""
    weight_ptr, rows, K, stride = weight
    WIDTH: gl.constexpr = power_of_two(2 * BLOCK_N - 1)
    b_i = gl.arange(0, WIDTH, gl.BlockedLayout([1], [32], [1], [0]))
    b_row = first + b_i
    if GATED:
        b_row = b_row // 16 * 8 + b_row % 8 + b_row // 8 % 2 * (rows // 2)
    p_row = weight_ptr + gl.minimum(b_row, rows - 1).to(gl.int64) * stride + k
    b_mine = (b_i % m_tiles == m_tile) & (b_i < BLOCK_N)
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }",
        "=r,l,r,r",
        [p_row, b_i * 0 + (K - k) * 2, b_mine.to(gl.int32)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _copy(descs, weight, pipes, shape, GATED: gl.constexpr, PDL: gl.constexpr, EARLY: gl.constexpr,
          BLOCK_N: gl.constexpr):  # fmt: skip
    """The copying warp."""
    x_desc, w_desc, tail_desc = descs
    x_smem, w_smem, tail_smem, full, empty = pipes
    m_tiles, tiles, steps, last = shape
    STAGES: gl.constexpr = x_smem.shape[0]
    BLOCK_M: gl.constexpr = x_smem.shape[1]
    BYTES: gl.constexpr = (BLOCK_M + BLOCK_N) * 128
    if not EARLY:
        wait_for_previous(PDL)
    tile = gl.program_id(0)
    ahead = gl.minimum(steps, STAGES)
    for i in range(ahead):
        mbarrier.expect(full.index(i), BYTES)
        _copy_weights(w_desc, tail_desc, w_smem, tail_smem, i, full.index(i), tile // m_tiles * BLOCK_N, i * 64, GATED)
    if weight[0] is not None:
        if steps > STAGES:
            _prefetch(weight, tile // m_tiles * BLOCK_N, tile % m_tiles, m_tiles, STAGES * 64, GATED, BLOCK_N)
    if EARLY:
        wait_for_previous(PDL)
    row = first_row(tile, shape, BLOCK_M)
    for i in range(ahead):
        tma.async_copy_global_to_shared(x_desc, [row, i * 64], full.index(i), x_smem.index(i))
    count = ahead
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row = first_row(tile, shape, BLOCK_M)
        for step in range(gl.where(tile == gl.program_id(0), ahead, 0), steps):
            stage = count % STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), (count // STAGES & 1) ^ 1)
            mbarrier.expect(bar, BYTES)
            tma.async_copy_global_to_shared(x_desc, [row, step * 64], bar, x_smem.index(stage))
            first = tile // m_tiles * BLOCK_N
            _copy_weights(w_desc, tail_desc, w_smem, tail_smem, stage, bar, first, step * 64, GATED)
            count += 1


@gluon.jit
def _wait(left: gl.constexpr, accs):
    """Until so many products are still under way."""
    if len(accs) == 1:
        return (warpgroup_mma_wait(left, deps=[accs[0]]),)
    else:
        return warpgroup_mma_wait(left, deps=[accs[0], accs[1]])


@gluon.jit
def _weights(smem, stage, N: gl.constexpr):
    """A step's rows of the weight as the right operand."""
    return smem.index(stage).reshape([N, 64]).permute((1, 0))


@gluon.jit
def _product(count, first, steps, pipes, ROW: gl.constexpr, EVERY: gl.constexpr, N0: gl.constexpr, N1: gl.constexpr):
    """The sums of 64 rows of a tile, from `ROW` on, over steps ``first, first + EVERY, ...``."""
    x_smem, w_smem, tail_smem, full, empty = pipes
    STAGES: gl.constexpr = x_smem.shape[0]
    accs: gl.tuple = (gl.zeros([64, N0], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N0, 16])),)
    if N1:
        accs += (gl.zeros([64, N1], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N1, 16])),)
    count += first
    for step in range(first, steps, EVERY):
        stage = count % STAGES
        mbarrier.wait(full.index(stage), count // STAGES & 1)
        b_x = x_smem.index(stage).slice(ROW, 64)
        more: gl.tuple = (warpgroup_mma(b_x, _weights(w_smem, stage, N0), accs[0], is_async=True),)
        if N1:
            more += (warpgroup_mma(b_x, _weights(tail_smem, stage, N1), accs[1], is_async=True),)
        accs = _wait(2 if N1 else 1, more)
        # the products of the step before are done with their stage
        mbarrier.arrive(empty.index((count + STAGES - EVERY) % STAGES), count=1, pred=step > first)
        count += EVERY
    accs = _wait(0, accs)
    mbarrier.arrive(empty.index((count + STAGES - EVERY) % STAGES), count=1, pred=steps > first)
    return accs


@gluon.jit
def _hand_over(accs, letter, tile_count):
    """The second group's sums go to the first through shared memory."""
    smem, tail_smem, there, taken = letter
    mbarrier.wait(taken.index(0), (tile_count & 1) ^ 1)
    smem.store(accs[0])
    if len(accs) == 2:
        tail_smem.store(accs[1])
    gl.thread_barrier()
    mbarrier.arrive(there.index(0), count=1)


@gluon.jit
def _add_other(accs, letter, tile_count):
    """The first group's sums with the second's."""
    smem, tail_smem, there, taken = letter
    mbarrier.wait(there.index(0), tile_count & 1)
    layout: gl.constexpr = accs[0].type.layout
    sums: gl.tuple = (accs[0] + smem.load(layout),)
    if len(accs) == 2:
        tail_layout: gl.constexpr = accs[1].type.layout
        sums += (accs[1] + tail_smem.load(tail_layout),)
    gl.thread_barrier()
    mbarrier.arrive(taken.index(0), count=1)
    return sums


@gluon.jit
def _multiply(pipes, letter, tensors, norm, sizes, shape, GROUP: gl.constexpr, GATED: gl.constexpr,
              ACT: gl.constexpr, PDL: gl.constexpr, BLOCK_N: gl.constexpr, TERMS: gl.constexpr):  # fmt: skip
    """One of the two groups that multiply. Of 128 rows each has 64; of 64 rows each has every other step along K:
    of an even number of stages always the same, whose barriers' phases it then waits for one by one."""
    bias_ptr, out, following = tensors
    M, N, K, scale = sizes
    m_tiles, tiles, steps, last = shape
    N0: gl.constexpr = power_of_two(BLOCK_N)
    N1: gl.constexpr = BLOCK_N - N0
    BLOCK_M: gl.constexpr = pipes[0].shape[1]
    ROW: gl.constexpr = GROUP * 64 if BLOCK_M == 128 else 0
    wait_for_previous(PDL)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        tile_count = tile // gl.num_programs(0)
        row = first_row(tile, shape, BLOCK_M) + ROW
        begin = tile % m_tiles * BLOCK_M  # rows before it are another tile's to add
        first = tile // m_tiles * BLOCK_N
        count = tile_count * steps
        if BLOCK_M == 64 and GROUP == 1:
            _hand_over(_product(count, (count + 1) % 2, steps, pipes, 0, 2, N0, N1), letter, tile_count)
        else:
            if norm[0] is None:
                b_before = fetch_stream(out, (M, N), begin, row, first, N0)
            else:
                b_before = fetch_squares(norm, M, row, TERMS)
            if BLOCK_M == 64:
                accs = _add_other(_product(count, count % 2, steps, pipes, 0, 2, N0, N1), letter, tile_count)
            else:
                accs = _product(count, 0, steps, pipes, ROW, 1, N0, N1)
            if norm[0] is None:
                add_to_stream(accs[0], b_before, bias_ptr, out, following, (M, N), scale, begin, row, first)
            else:
                b_factor = gl.rsqrt(gl.sum(b_before, 0) / K + norm[2])
                normalise_and_activate(accs[0], b_factor, bias_ptr, out, (M, N), row, first, GATED, ACT)
                if N1:
                    normalise_and_activate(accs[1], b_factor, bias_ptr, out, (M, N), row, first + N0, GATED, ACT)


@gluon.jit(do_not_specialize=["M", "m_tiles", "tiles", "steps", "terms", "last"])
def linear_tiles_sm90_kernel(
    x_desc,  # [M, K]
    w_desc,  # [N, K]; [N / 8, 2, 8, K] if GATED: 8 rows of gate, 8 of up
    tail_desc,  # the same in smaller boxes, or None
    weight_ptr,  # the weight, if it is to be prefetched; or None
    bias_ptr,  # [N] or [2 N], or None
    squares_ptr,  # [terms, M] float32: parts of the sums of squares of rows of x that are to be normalised; or None
    out_ptr,  # [M, N]; without squares_ptr read too: the stream
    scaled_ptr,  # without squares_ptr, [M, N]: the stream times the weight of the norm that follows
    norm_ptr,  # [N] that weight
    next_squares_ptr,  # [tiles along N, M] float32: parts of the sums of squares of the stream
    M,
    N,
    K,
    terms,
    eps,
    norm_offset,
    scale,
    stride_out,
    rows_w,  # of the weight
    stride_w,
    m_tiles,
    tiles,
    steps,  # of 64 along K
    last,  # first row of the last tile of x
    ACT: gl.constexpr,
    GATED: gl.constexpr,
    PDL: gl.constexpr,
    EARLY: gl.constexpr,  # no kernel in flight writes the weights
    BLOCK_M: gl.constexpr,  # 64 or 128
    BLOCK_N: gl.constexpr,  # rows of the weight: a power of two or the sum of two, in multiples of 16 if GATED
    TERMS: gl.constexpr,  # a power of two, `terms` or more
    STAGES: gl.constexpr,
    GROUP_REGISTERS: gl.constexpr,  # of a thread of the second group that multiplies
):
    let_next_start(PDL)
    dtype: gl.constexpr = x_desc.dtype
    N0: gl.constexpr = power_of_two(BLOCK_N)
    N1: gl.constexpr = BLOCK_N - N0
    x_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, 64], x_desc.layout)
    w_smem = gl.allocate_shared_memory(dtype, [STAGES] + w_desc.block_shape, w_desc.layout)
    tail_smem = w_smem
    if tail_desc is not None:
        tail_smem = gl.allocate_shared_memory(dtype, [STAGES] + tail_desc.block_shape, tail_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=BLOCK_M // 64)
    letter = (full, full, full, full)  # none
    if BLOCK_M == 64:
        swizzled: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
        sum_smem = gl.allocate_shared_memory(gl.float32, [64, N0], swizzled)
        sum_tail = sum_smem
        if N1:
            sum_tail = gl.allocate_shared_memory(gl.float32, [64, N1], swizzled)
        there = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
        taken = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
        mbarrier.init(there.index(0), count=1)
        mbarrier.init(taken.index(0), count=1)
        letter = (sum_smem, sum_tail, there, taken)
    pipes = (x_smem, w_smem, tail_smem, full, empty)
    out = (out_ptr, stride_out)
    tensors = (bias_ptr, out, (scaled_ptr, norm_ptr, norm_offset, next_squares_ptr))
    norm = (squares_ptr, terms, eps)
    sizes = (M, N, K, scale)
    shape = (m_tiles, tiles, steps, last)
    descs = (x_desc, w_desc, tail_desc)
    weight = (weight_ptr, rows_w, K, stride_w)
    gl.warp_specialize(
        [
            (_multiply, (pipes, letter, tensors, norm, sizes, shape, 0, GATED, ACT, PDL, BLOCK_N, TERMS)),
            (_multiply, (pipes, letter, tensors, norm, sizes, shape, 1, GATED, ACT, PDL, BLOCK_N, TERMS)),
            (_copy, (descs, weight, pipes, shape, GATED, PDL, EARLY, BLOCK_N)),
        ],
        [4, 1],
        [GROUP_REGISTERS, 40],
    )


def launch(
    operands: Operands,
    fused: Fused,
    tile: HopperTile,
    squares: torch.Tensor | None = None,
    after: NextNorm | None = None,
) -> None:
    """With `squares` the product of rows that are to be normalised, else one that is added to `out`."""
    x, weight, bias, _, out, _ = operands
    (m, k), rows = x.shape, weight.shape[0]
    block_m, block_n, stages, registers, prefetch = tile
    assert block_m == 128 or stages % 2 == 0
    whole = power_of_two(block_n)
    assert squares is not None or whole == block_n  # each tile leaves one part of a row's squares
    m_tiles = triton.cdiv(m, block_m)
    tiles = m_tiles * triton.cdiv(rows, block_n)
    terms = 0 if squares is None else len(squares)
    norm_weight, norm_offset, scaled, next_squares = (None, 0.0, None, None) if after is None else after
    linear_tiles_sm90_kernel[(min(2 * processors(x.device), tiles),)](
        descriptor(x, [m, k], [x.stride(0), 1], [block_m, BLOCK_K]),
        weight_descriptor(weight, whole, fused.gated),
        weight_descriptor(weight, block_n - whole, fused.gated) if block_n > whole else None,
        weight if fused.constant_weight and prefetch else None,
        *(bias, squares, out, scaled, norm_weight, next_squares),
        *(m, out.shape[1], k, terms, fused.eps, norm_offset, fused.scale, out.stride(0), rows, weight.stride(0)),
        *(m_tiles, tiles, triton.cdiv(k, BLOCK_K), max(0, m - block_m)),
        ACT=fused.activation,
        GATED=fused.gated,
        EARLY=fused.constant_weight,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        TERMS=triton.next_power_of_2(terms),
        STAGES=stages,
        GROUP_REGISTERS=(3 * registers - 40) // 16 * 8 - (16 if block_m == 64 else 0),
        num_warps=4,
        maxnreg=registers,
        **dependent_launch(x.device),
    )

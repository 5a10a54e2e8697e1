"""The gated product of many rows for Hopper, in Gluon: ``act(x @ gate.T) * (x @ up.T)`` in one launch.

The product itself is the one that experts have (:mod:`tritonllm.kernels.hopper.product`): the *weights* are the rows
of the matrix instruction, 8 of gate and 8 of up in turn, which puts a gate and its up into one thread, so that what
leaves the registers is the activated product, half as much as the two. Here the rows of ``x`` lie in order: the bulk
copy engine fetches them, too, by one warp, and where a tile lies follows from its number.

A tile is 256 rows of ``x``, with small weights 128, by 64 rows of gate and the same 64 of up. Programs stay and take
one tile after the other.
Every sum is added up in one order, so a row's result does not depend on the others, nor on how many they are.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from tritonllm.kernels.dense.sm90.tile import fits as fetchable
from tritonllm.kernels.hopper.descriptors import BLOCK_K, descriptor, weight_descriptor
from tritonllm.kernels.hopper.product import MAX_REGISTERS, product
from tritonllm.kernels.runtime.chip import processors
from tritonllm.kernels.runtime.dependent_launch import dependent_launch, let_next_start, wait_for_previous

# Rows from which on it is taken: beyond a power of two, because warm-up steps are powers of two, and what cuBLAS's
# products need for up to so many rows (the activation's kernel) is then launched by one of them.
# It saves 3 to 14% of cuBLAS with `silu_and_mul` at 2048 rows and more, and loses up to 19% at 512
# (docs/notebook/products.md, "More than 1024 rows").
MIN_M = 1025

BLOCK_I = 64  # rows of gate, and of up
# (rows of x, stages of 192 KiB). Twice as many tiles divide more evenly among processors, but fetch a third more: of
# the small weight above they take 21.5 us for 1024 rows instead of 27.4, of the largest one 790 for 2048, not 747.
WIDE, NARROW = (256, 4), (128, 6)
NARROW_WEIGHT = 2**23  # elements up to which tiles are narrow
GROUP = 8  # blocks of rows that take turns with a tile of weights, which then is in the second-level cache


@gluon.jit
def _tile_of(tile, shape, BLOCK_M: gl.constexpr, GROUP: gl.constexpr):
    """(first row, rows, tile of the weight)."""
    rows, total, n_tiles, steps = shape
    begin = tile // (GROUP * n_tiles) * GROUP
    size = gl.minimum(gl.cdiv(rows, BLOCK_M) - begin, GROUP)
    within = tile - begin * n_tiles
    first = (begin + within % size) * BLOCK_M
    return first, gl.minimum(rows - first, BLOCK_M), within // size


@gluon.jit
def _copy(descs, pipes, shape, GROUP: gl.constexpr, PDL: gl.constexpr):
    """The copying warp."""
    w_desc, x_desc = descs
    w_smem, x_smem, _, full, empty = pipes
    rows, total, n_tiles, steps = shape
    STAGES: gl.constexpr = x_smem.shape[0]
    BLOCK_M: gl.constexpr = x_smem.shape[1]
    wait_for_previous(PDL)  # the others wait for this warp's copies
    count = 0
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        first, there, n = _tile_of(tile, shape, BLOCK_M, GROUP)
        for step in range(steps):
            stage = count % STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), (count // STAGES & 1) ^ 1)
            mbarrier.expect(bar, (128 + BLOCK_M) * 128)
            tma.async_copy_global_to_shared(w_desc, [n * 8, 0, 0, step * 64], bar, w_smem.index(stage))
            tma.async_copy_global_to_shared(x_desc, [first, step * 64], bar, x_smem.index(stage))
            count += 1


@gluon.jit
def _multiply(args, HALF: gl.constexpr, ACT: gl.constexpr, BIAS: gl.constexpr, GROUP: gl.constexpr):
    """One of the two groups that multiply: half of the rows of each tile of the weight."""
    pipes, shape, bias_ptr, columns, out = args
    rows, total, n_tiles, steps = shape
    BLOCK_M: gl.constexpr = pipes[1].shape[1]
    count = 0
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        first, there, n = _tile_of(tile, shape, BLOCK_M, GROUP)
        item = (first, there, n * 64)
        product(count, steps, pipes, bias_ptr, columns, out, item, HALF, ACT, BIAS, BLOCK_M)
        count += steps


# What differs from step to step is the number of rows: one compilation serves them all.
@gluon.jit(do_not_specialize=["rows"])
def linear_gated_sm90_kernel(
    w_desc,  # [I / 8, 2, 8, K]: 8 rows of gate, 8 of up
    x_desc,  # [M, K]
    bias_ptr,  # [2 I], read if BIAS
    out_ptr,  # [M, I]
    rows,
    n_tiles,
    steps,  # of 64 along K
    columns,  # I
    ACT: gl.constexpr,
    BIAS: gl.constexpr,
    PDL: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
):
    dtype: gl.constexpr = x_desc.dtype
    BLOCK_M: gl.constexpr = x_desc.block_shape[0]
    w_smem = gl.allocate_shared_memory(dtype, [STAGES] + w_desc.block_shape, w_desc.layout)
    x_smem = gl.allocate_shared_memory(dtype, [STAGES] + x_desc.block_shape, x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)  # by both groups
    let_next_start(PDL)
    pipes = (w_smem, x_smem, x_smem, full, empty)  # a tile has no tail with a place of its own
    shape = (rows, gl.cdiv(rows, BLOCK_M) * n_tiles, n_tiles, steps)
    args = (pipes, shape, bias_ptr, columns, (out_ptr, out_ptr, False))
    gl.warp_specialize(
        [
            (_multiply, (args, 0, ACT, BIAS, GROUP)),
            (_multiply, (args, 1, ACT, BIAS, GROUP)),
            (_copy, ((w_desc, x_desc), pipes, shape, GROUP, PDL)),
        ],
        [4, 1],
        [240, 24],
    )


def pays(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> bool:
    return len(x) >= MIN_M


def fits(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> bool:
    """The copy engine can fetch the operands, and ``out`` is such as was measured: rows side by side, with the dtype of
    ``x``."""
    return out.dtype == x.dtype and out.is_contiguous() and fetchable(x, weight, True)


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    activation: str,
    constant_weight: bool = False,
) -> None:
    """``out[M, I] = activation(gate) * up`` of ``x[M, K] @ weight[2 I, K].T + bias[2 I]``; what :func:`fits`
    asks for."""
    (m, k), columns = x.shape, out.shape[1]
    n_tiles = triton.cdiv(columns, BLOCK_I)
    block_m, stages = NARROW if weight.numel() <= NARROW_WEIGHT else WIDE
    tiles = triton.cdiv(m, block_m) * n_tiles
    linear_gated_sm90_kernel[(min(processors(x.device), tiles),)](
        weight_descriptor(weight, 2 * BLOCK_I, True),
        descriptor(x, [m, k], [x.stride(0), 1], [block_m, BLOCK_K]),
        *(x if bias is None else bias, out, m, n_tiles, triton.cdiv(k, BLOCK_K), columns),
        ACT=activation,
        BIAS=bias is not None,
        STAGES=stages,
        GROUP=GROUP,
        num_warps=4,
        maxnreg=MAX_REGISTERS,
        **dependent_launch(x.device),
    )

"""The two grouped products of a mixture of experts for Hopper, in Gluon: what
:mod:`tritonllm.kernels.moe.portable.products` computes, with copies and products asynchronous, by programs that stay
and take one tile after the other.

A tile is 128 rows of an expert's weights by up to 288 of its pairs. The *weights* are the rows of the matrix
instruction and the pairs its columns, so a tile has 16, 32, 64, 80, 96, 128, 192, 256, 272 or 288 pairs and little is
multiplied in vain; with pairs as rows it would be multiples of 64. In the first product 8 rows of gate and 8 of up take
turns, which puts a gate and its up into one thread.

Four warps copy: weights by the bulk copy engine, tokens through the order of the pairs (rows from all over, which that
engine does not gather on this chip) by ordinary asynchronous copies. The activations of the second product lie in order
and take the engine too. Two groups of four warps multiply, each 64 rows of weights. (Producer and consumer warps
that stay: CUTLASS, NVIDIA; gathering beside bulk copies: FlashAttention-3's paged keys.)
"""

import torch
import triton
from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    mbarrier,
    tma,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tritonllm.kernels.hopper.descriptors import BLOCK_K, descriptor
from tritonllm.kernels.hopper.product import MAX_REGISTERS, product
from tritonllm.kernels.moe.arguments import Experts
from tritonllm.kernels.moe.grouping import ExpertBlocks
from tritonllm.kernels.runtime import tuning
from tritonllm.kernels.runtime.checks import aligned
from tritonllm.kernels.runtime.dependent_launch import dependent_launch, let_next_start, wait_for_previous

UNIT = 16  # pairs of a tile, but for an expert's last, are a multiple of it


@gluon.jit
def _tile_of(tile, table, n_tiles):
    """(expert, first pair, pairs, tile of rows): the blocks of a group in turn share a tile of weights in L2."""
    table_ptr, num_blocks = table
    p_group = table_ptr + 3 * num_blocks + 1 + tile // n_tiles
    begin = gl.load(p_group)
    size = gl.load(p_group + num_blocks)
    within = tile - begin * n_tiles
    p_block = table_ptr + begin + within % size
    return gl.load(p_block), gl.load(p_block + num_blocks), gl.load(p_block + 2 * num_blocks), within // size


@gluon.jit
def _rows_of_x(x, first, rows, START: gl.constexpr, LENGTH: gl.constexpr, wide: gl.constexpr):
    """Offsets of the tokens of pairs [START, START + LENGTH) of a tile, and which of them are there."""
    x_ptr, stride_x, order_ptr, top_k = x
    b_row = START + gl.arange(0, LENGTH, gl.SliceLayout(1, wide))
    m_row = b_row < rows
    b_token = gl.load(order_ptr + first + b_row, mask=m_row, other=0) // top_k
    b_k = gl.arange(0, 64, gl.SliceLayout(0, wide))
    return (b_token * stride_x)[:, None] + b_k[None, :], m_row[:, None]


@gluon.jit
def _copy_gate_up(x, descs, pipes, table, shape, TAIL: gl.constexpr):
    """The copying warps of the first product."""
    w_desc, x_desc, tail_desc = descs
    w_smem, x_smem, tail_smem, full, empty = pipes
    total, n_tiles, steps = shape
    STAGES: gl.constexpr = x_smem.shape[0]
    PAIRS: gl.constexpr = x_smem.shape[1]
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    count = 0
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        expert, first, rows, n = _tile_of(tile, table, n_tiles)
        b_x, m_x = _rows_of_x(x, first, rows, 0, PAIRS, wide)
        if TAIL:
            b_tail, m_tail = _rows_of_x(x, first, rows, PAIRS, TAIL, wide)
        for step in range(steps):
            stage = count % STAGES
            k = step * 64
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), (count // STAGES & 1) ^ 1)
            mbarrier.expect(bar, 128 * 128)
            tma.async_copy_global_to_shared(w_desc, [expert, n * 8, 0, 0, k], bar, w_smem.index(stage))
            async_copy.async_copy_global_to_shared(x_smem.index(stage), x[0] + k + b_x, m_x)
            if TAIL:
                async_copy.async_copy_global_to_shared(tail_smem.index(stage), x[0] + k + b_tail, m_tail)
            async_copy.mbarrier_arrive(bar, increment_count=False)  # each thread, when its rows are there
            count += 1


@gluon.jit
def _copy_part(desc, row, k, bar, to, there):
    """Rows of activations, if there are any: in either case one arrival."""
    mbarrier.expect(bar, to.shape[0] * 128, pred=there)
    tma.async_copy_global_to_shared(desc, [row, k], bar, to, pred=there)
    mbarrier.arrive(bar, count=1, pred=there == 0)


@gluon.jit
def _copy_down(descs, pipes, table, shape, PDL: gl.constexpr, TAIL: gl.constexpr):
    """The copying warps of the second product."""
    w_desc, x_desc, tail_desc = descs
    w_smem, x_smem, tail_smem, full, empty = pipes
    total, n_tiles, steps = shape
    STAGES: gl.constexpr = x_smem.shape[0]
    HALF: gl.constexpr = x_smem.shape[1] // 2
    early = gl.minimum(steps, STAGES)
    for tile in range(gl.program_id(0), gl.minimum(total, gl.program_id(0) + 1)):
        expert, first, rows, n = _tile_of(tile, table, n_tiles)
        for step in range(early):
            mbarrier.expect(full.index(step), (128 + HALF) * 128)
            tma.async_copy_global_to_shared(w_desc, [expert, n * 128, step * 64], full.index(step), w_smem.index(step))
    wait_for_previous(PDL)  # only now: the first tile's weights do not depend on the kernel before
    count = 0
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        expert, first, rows, n = _tile_of(tile, table, n_tiles)
        for step in range(steps):
            stage = count % STAGES
            k = step * 64
            bar = full.index(stage)
            if count >= early:
                mbarrier.wait(empty.index(stage), (count // STAGES & 1) ^ 1)
                mbarrier.expect(bar, (128 + HALF) * 128)
                tma.async_copy_global_to_shared(w_desc, [expert, n * 128, k], bar, w_smem.index(stage))
            tma.async_copy_global_to_shared(x_desc, [first, k], bar, x_smem.index(stage).slice(0, HALF))
            _copy_part(x_desc, first + HALF, k, bar, x_smem.index(stage).slice(HALF, HALF), rows > HALF)
            if TAIL:
                _copy_part(tail_desc, first + 2 * HALF, k, bar, tail_smem.index(stage), rows > 2 * HALF)
            count += 1


@constexpr_function
def _widths(pairs, tail):
    """The numbers of pairs that a tile may be computed for."""
    base = {16: (16,), 32: (32,), 64: (32, 64), 128: (64, 96, 128), 256: (64, 128, 192, 256)}[pairs]
    return base + ((pairs + 16, pairs + 32)[: tail // 16])


@gluon.jit
def _multiply(args, HALF: gl.constexpr, ACT: gl.constexpr, BIAS: gl.constexpr, TAIL: gl.constexpr):
    """One of the two groups that multiply: rows [64 HALF, 64 HALF + 64) of each tile."""
    pipes, table, shape, bias, columns, out = args
    PAIRS: gl.constexpr = pipes[1].shape[1]
    bias_ptr, stride_bias = bias
    total, n_tiles, steps = shape
    count = 0
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        expert, first, rows, n = _tile_of(tile, table, n_tiles)
        p_bias = bias_ptr + expert.to(gl.int64) * stride_bias
        item = (first, rows, n * (64 if ACT != "" else 128))
        for i in gl.static_range(len(_widths(PAIRS, TAIL))):
            above = rows > (_widths(PAIRS, TAIL)[i - 1] if i else 0)
            if above & (rows <= _widths(PAIRS, TAIL)[i]):
                product(count, steps, pipes, p_bias, columns, out, item, HALF, ACT, BIAS, _widths(PAIRS, TAIL)[i])
        count += steps


# Arguments whose values and alignment change from step to step: one compilation serves them all.
@gluon.jit(do_not_specialize=["order_ptr", "table_ptr", "num_blocks", "top_k"])
def _grouped_sm90_kernel(
    x_ptr,  # [T, K] if ACT
    w_desc,  # [E, I / 8, 2, 8, K] if ACT: 8 rows of gate, 8 of up; else [E, columns, K]
    x_desc,  # [pairs, K] unless ACT
    tail_desc,
    bias_ptr,  # [E, columns], or [E, 2 columns] if ACT; read if BIAS
    out_ptr,  # [pairs, columns]: in the order of the experts if ACT, else in the order of the pairs
    order_ptr,
    table_ptr,
    num_blocks,
    n_tiles,
    steps,  # K / 64
    columns,
    stride_x,
    stride_bias,
    top_k,
    ACT: gl.constexpr,  # "" for the second product
    BIAS: gl.constexpr,
    PDL: gl.constexpr,
    PAIRS: gl.constexpr,  # of a tile
    TAIL: gl.constexpr,  # and so many more, which have a place of their own
    STAGES: gl.constexpr,
    KEEP: gl.constexpr,  # results in the second-level cache
):
    dtype: gl.constexpr = w_desc.dtype
    x_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    if ACT != "":
        w_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 8, 2, 8, 64], w_desc.layout)
    else:
        w_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 128, 64], w_desc.layout)
    x_smem = gl.allocate_shared_memory(dtype, [STAGES, PAIRS, 64], x_layout)
    tail_smem = x_smem
    if TAIL:
        tail_smem = gl.allocate_shared_memory(dtype, [STAGES, TAIL, 64], x_layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=129 if ACT != "" else (3 if TAIL else 2))
        mbarrier.init(empty.index(i), count=2)  # by both groups
    if ACT != "":
        wait_for_previous(PDL)  # the second product's copying warps do it later
    let_next_start(PDL)
    pipes = (w_smem, x_smem, tail_smem, full, empty)
    shape = (gl.load(table_ptr + 3 * num_blocks) * n_tiles, n_tiles, steps)
    table = (table_ptr, num_blocks)
    descs = (w_desc, x_desc, tail_desc)
    args = (pipes, table, shape, (bias_ptr, stride_bias), columns, (out_ptr, order_ptr, KEEP))
    if ACT != "":
        gl.warp_specialize(
            [
                (_multiply, (args, 0, ACT, BIAS, TAIL)),
                (_multiply, (args, 1, ACT, BIAS, TAIL)),
                (_copy_gate_up, ((x_ptr, stride_x, order_ptr, top_k), descs, pipes, table, shape, TAIL)),
            ],
            [4, 4],
            [224, 56],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (args, 0, ACT, BIAS, TAIL)),
                (_multiply, (args, 1, ACT, BIAS, TAIL)),
                (_copy_down, (descs, pipes, table, shape, PDL, TAIL)),
            ],
            [4, 4],
            [232, 40],
        )


def fits(x: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor) -> bool:
    """16-bit tensors of whole steps, aligned for copies of 16 bytes; offsets within ``x`` in 32 bits."""
    n, i = w_down.shape[1:]
    if x.dtype == torch.float32 or n % BLOCK_K or i % BLOCK_K:
        return False
    if x.stride(0) % 16 or not aligned(x, w_gate_up, w_down) or x.shape[0] * x.stride(0) >= 2**31:
        return False
    return all(w.stride(0) % 8 == 0 and w.stride(1) % 8 == 0 for w in (w_gate_up, w_down))


def _launch(
    x: torch.Tensor,
    descriptors: list[TensorDescriptor],
    bias: torch.Tensor | None,
    out: torch.Tensor,
    blocks: ExpertBlocks,
    rows: int,
    top_k: int,
    activation: str,
    evict: str,
    programs: int,
    config: tuning.Config,
) -> None:
    k, columns = x.shape[1], out.shape[1]
    num_blocks, n_tiles = blocks.table.shape[1], triton.cdiv(columns, rows)
    _grouped_sm90_kernel[(min(programs, num_blocks * n_tiles),)](
        *(x, *descriptors, x if bias is None else bias, out, blocks.order, blocks.table),
        *(num_blocks, n_tiles, k // BLOCK_K, columns),
        *(x.stride(0), 0 if bias is None else bias.stride(0), top_k),
        ACT=activation,
        BIAS=bias is not None,
        KEEP=evict == "evict_last",
        **dependent_launch(x.device),
        **config,
        num_warps=4,
        maxnreg=MAX_REGISTERS,
    )


def launch_gate_up(
    x: torch.Tensor,
    experts: Experts,
    h: torch.Tensor,
    blocks: ExpertBlocks,
    top_k: int,
    evict: str,
    programs: int,
    config: tuning.Config,
) -> None:
    """As in portable/products.py, by so many programs."""
    w_gate_up = experts.w_gate_up
    count, rows, n = w_gate_up.shape
    step = w_gate_up.stride(1)
    strides = [w_gate_up.stride(0), 8 * step, rows // 2 * step, step, 1]
    w_desc = descriptor(w_gate_up, [count, rows // 16, 2, 8, n], strides, [1, 8, 2, 8, BLOCK_K])
    _launch(x, [w_desc] * 3, experts.gate_up_bias, h, blocks, 64, top_k, experts.activation, evict, programs, config)


def launch_down(
    h: torch.Tensor,
    experts: Experts,
    y: torch.Tensor,
    blocks: ExpertBlocks,
    evict: str,
    programs: int,
    config: tuning.Config,
) -> None:
    """As in portable/products.py, by so many programs."""
    w_down = experts.w_down
    w_desc = descriptor(w_down, [*w_down.shape], [*w_down.stride()], [1, 128, BLOCK_K])
    boxes = (config["PAIRS"] // 2, config["TAIL"] or 8)
    x_descs = [descriptor(h, [*h.shape], [*h.stride()], [box, BLOCK_K]) for box in boxes]
    _launch(h, [w_desc, *x_descs], experts.down_bias, y, blocks, 128, 1, "", evict, programs, config)

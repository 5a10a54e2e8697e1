"""A tile of a product for Hopper, in Gluon, from a ring of stages in shared memory to what it leaves in memory.

The *weights* are the rows of the matrix instruction, 128 of a tile, and the rows of ``x`` its columns. Two groups of
warps take 64 rows of weights each. A gated product has 8 rows of gate and 8 of up in turn: a gate and its up then lie
in one thread, so that only the activated product leaves the registers. Experts (moe/sm90/products.py) and the gated
product of many rows (dense/sm90/gated.py) take it; what they copy into the ring, and from where, is theirs.
"""

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tritonllm.kernels.elementwise import gated

MAX_REGISTERS = 168  # a thread, when the program starts; then the copying warps give some to the others


@gluon.jit
def _store(b_out, columns, out, first, rows, column, START: gl.constexpr, BY_PAIR: gl.constexpr):
    """Write columns ``column + [0, WIDTH)`` of pairs ``START + [0, LENGTH)``."""
    out_ptr, order_ptr, KEEP = out
    WIDTH: gl.constexpr = b_out.shape[0]
    LENGTH: gl.constexpr = b_out.shape[1]
    turned: gl.constexpr = gl.BlockedLayout([8, 1], [WIDTH // 8, 256 // WIDTH], [1, 4], [0, 1])
    b_out = gl.convert_layout(b_out.to(out_ptr.dtype.element_ty), turned)
    b_row = START + gl.arange(0, LENGTH, gl.SliceLayout(0, turned))
    m_row = b_row < rows
    b_column = column + gl.arange(0, WIDTH, gl.SliceLayout(1, turned))
    b_at = (first + b_row).to(gl.int64)
    if BY_PAIR:
        b_at = gl.load(order_ptr + first + b_row, mask=m_row, other=0).to(gl.int64)
    p_out = out_ptr + b_at[None, :] * columns + b_column[:, None]
    mask = m_row[None, :] & (b_column < columns)[:, None]
    if KEEP:
        gl.store(p_out, b_out, mask=mask, eviction_policy="evict_last")
    else:
        gl.store(p_out, b_out, mask=mask)


@gluon.jit
def _finish(b_acc, bias_ptr, columns, out, item, HALF: gl.constexpr, START: gl.constexpr, ACT: gl.constexpr,
            BIAS: gl.constexpr):  # fmt: skip
    """Bias, activation and store of 64 rows: gate and up in turn, 8 rows each, or (no ACT) of the second product."""
    first, rows, tile_column = item
    LENGTH: gl.constexpr = b_acc.shape[1]
    if ACT != "":
        # a thread holds a row of gate and the row of up 8 below it, so they are taken apart in registers
        b_both = gl.permute(gl.reshape(b_acc, [4, 2, 8, LENGTH]), (0, 2, 3, 1))
        b_gate, b_up = gl.split(gl.reshape(b_both, [32, LENGTH, 2]))
        column = tile_column + HALF * 32
        if BIAS:
            b_column = column + gl.arange(0, 32, gl.SliceLayout(1, b_gate.type.layout))
            p_bias = bias_ptr + b_column
            b_gate += gl.load(p_bias, mask=b_column < columns, other=0.0).to(gl.float32)[:, None]
            b_up += gl.load(p_bias + columns, mask=b_column < columns, other=0.0).to(gl.float32)[:, None]
        _store(gated(b_gate, b_up, ACT), columns, out, first, rows, column, START, False)
    else:
        column = tile_column + HALF * 64
        if BIAS:
            b_column = column + gl.arange(0, 64, gl.SliceLayout(1, b_acc.type.layout))
            b_acc += gl.load(bias_ptr + b_column, mask=b_column < columns, other=0.0).to(gl.float32)[:, None]
        _store(b_acc, columns, out, first, rows, column, START, True)


@constexpr_function
def _power_of_two(width):
    """The largest that fits: one instruction; what is left is another."""
    return 1 << (width.bit_length() - 1)


@gluon.jit
def _zeros(N: gl.constexpr):
    return gl.zeros([64, N], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16]))


@gluon.jit
def product(count, steps, pipes, bias_ptr, columns, out, item, HALF: gl.constexpr, ACT: gl.constexpr,
            BIAS: gl.constexpr, WIDTH: gl.constexpr):  # fmt: skip
    """One group's share of a tile, 64 rows of weights, computed for WIDTH pairs in one or two instructions a step."""
    w_smem, x_smem, tail_smem, full, empty = pipes
    STAGES: gl.constexpr = x_smem.shape[0]
    N0: gl.constexpr = _power_of_two(WIDTH)
    N1: gl.constexpr = WIDTH - N0
    AT: gl.constexpr = N0 % x_smem.shape[1]  # where the second piece begins; 0: it has a place of its own
    acc = _zeros(N0)
    more = _zeros(N1 if N1 else 16)
    for step in range(steps):
        stage = count % STAGES
        mbarrier.wait(full.index(stage), count // STAGES & 1)
        if ACT != "":
            fence_async_shared()  # tokens came by ordinary copies, which the matrix unit does not see without
        w = w_smem.index(stage).reshape([128, 64]).slice(HALF * 64, 64)
        x_0 = x_smem.index(stage).slice(0, N0).permute((1, 0))
        acc = warpgroup_mma(w, x_0, acc, is_async=True)
        if N1:
            x_1 = (x_smem if AT else tail_smem).index(stage).slice(AT, N1).permute((1, 0))
            more = warpgroup_mma(w, x_1, more, is_async=True)
            acc, more = warpgroup_mma_wait(2, deps=[acc, more])
        else:
            acc = warpgroup_mma_wait(1, deps=[acc])
        # the products of the step before are done with their stage
        mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1, pred=step > 0)
        count += 1
    acc, more = warpgroup_mma_wait(0, deps=[acc, more])
    mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1)
    if N1:  # the smaller piece first: the larger then has the registers
        _finish(more, bias_ptr, columns, out, item, HALF, N0, ACT, BIAS)
    _finish(acc, bias_ptr, columns, out, item, HALF, 0, ACT, BIAS)

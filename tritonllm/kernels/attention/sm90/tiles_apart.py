"""Tiles of keys and values as operands of four warps' own products: a quarter of the keys to each. In Gluon.

Operands are ``[4, ...]``, a warp to each. Fetched in the order in which a product wants it, a thread would read a
float8 tile byte by byte. But the columns of two operands may be permuted together, and the rows of a result apart: here
so that each thread reads 16 bytes at a time, those that it needs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from tritonllm.kernels.attention.sm90.tiles import float8_of


@gluon.jit
def clear_stale_values(v_smem, start, first, seq_len):
    """Write zeros over the slots of keys outside [first, seq_len): their weight is 0, but they may hold NaN.

    ``v_smem`` is ``[N, D]``, the values of keys from ``start`` on; four warps do it together, four bytes at a time:
    for each byte two more instructions would be needed, and registers that are not there.
    """
    KEYS: gl.constexpr = v_smem.shape[0]
    WORDS: gl.constexpr = v_smem.shape[1] * v_smem.dtype.primitive_bitwidth // 32
    layout: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=v_smem.layout.swizzle_byte_width, element_bitwidth=32, rank=2
    )
    wide: gl.constexpr = gl.BlockedLayout([1, 4], [128 // WORDS, WORDS // 4], [4, 1], [1, 0])
    words = v_smem._reinterpret(gl.int32, [KEYS, WORDS], layout)
    b_v = words.load(wide)
    b_key = start + gl.arange(0, KEYS, gl.SliceLayout(1, wide))
    m_v = (b_key >= first) & (b_key < seq_len)
    words.store(gl.where(m_v[:, None], b_v, gl.zeros_like(b_v)))
    fence_async_shared()
    gl.thread_barrier()


@gluon.constexpr_function
def _doublings(step: int, end: int, dim: int, rank: int = 2) -> list[list[int]]:
    """Bases ``step, 2 step, 4 step ... < end`` along a dimension."""
    bases = []
    while step < end:
        bases.append([step if i == dim else 0 for i in range(rank)])
        step *= 2
    return bases


@gluon.constexpr_function
def _keys_layout(n: int, d: int, float8: bool) -> gl.DistributedLinearLayout:
    """``[N, D]``; float8: a quarter of a key's dimensions to a thread."""
    warps, rows = [[n // 4, 0], [n // 2, 0]], [[1, 0], [2, 0], [4, 0]]
    if float8:
        registers = [*_doublings(1, d // 4, 1), [8, 0], *_doublings(16, n // 4, 0)]
        return gl.DistributedLinearLayout(registers, [[0, d // 4], [0, d // 2], *rows], warps, [], [n, d])
    registers = [[0, 1], [8, 0], [0, 8], *_doublings(16, d, 1), *_doublings(16, n // 4, 0)]
    return gl.DistributedLinearLayout(registers, [[0, 2], [0, 4], *rows], warps, [], [n, d])


@gluon.constexpr_function
def _values_layout(n: int, d: int, float8: bool) -> gl.DistributedLinearLayout:
    """``[N, D]``; float8: D / 8 dimensions of every fourth pair of values to a thread, two values' four by four."""
    warps, pairs = [[n // 4, 0], [n // 2, 0]], [[2, 0], [4, 0]]
    if float8:
        registers = [[0, 1], [0, 2], [1, 0], *_doublings(4, d // 8, 1), [8, 0], *_doublings(16, n // 4, 0)]
        return gl.DistributedLinearLayout(registers, [*pairs, *_doublings(d // 8, d, 1)], warps, [], [n, d])
    registers = [[1, 0], [0, 8], [8, 0], *_doublings(16, d, 1), *_doublings(16, n // 4, 0)]
    return gl.DistributedLinearLayout(registers, [*pairs, [0, 1], [0, 2], [0, 4]], warps, [], [n, d])


@gluon.constexpr_function
def queries_layout(columns: int, d: int, float8: bool) -> gl.DistributedLinearLayout:
    """``[4, C, D]``, the same in each warp; float8: a quarter of a row's dimensions to a thread."""
    registers, lanes = _doublings(1, d // 4, 2, 3), _doublings(d // 4, d, 2, 3)
    if not float8:
        registers, lanes = [[0, 0, 1], *_doublings(8, d, 2, 3)], [[0, 0, 2], [0, 0, 4]]
    registers += _doublings(8, columns, 1, 3)
    warps = _doublings(1, 4, 0, 3)
    return gl.DistributedLinearLayout(registers, [*lanes, *_doublings(1, 8, 1, 3)], warps, [], [4, columns, d])


@gluon.jit
def _permute_dims(b_x):
    """The dimensions of ``[4, N, D]`` in the order in which a thread's quarter of them is its share of an operand."""
    N: gl.constexpr = b_x.shape[1]
    D: gl.constexpr = b_x.shape[2]
    return b_x.reshape([4, N, 4, D // 8, 2]).permute([0, 1, 3, 2, 4]).reshape([4, N, D])


@gluon.jit
def keys_operand(k_smem, dtype: gl.constexpr, mma: gl.constexpr):
    """Keys ``[N, D]`` as the left operand ``[4, N / 4, D]``, float8 with permuted dimensions."""
    N: gl.constexpr = k_smem.shape[0]
    D: gl.constexpr = k_smem.shape[1]
    FLOAT8: gl.constexpr = float8_of(k_smem.dtype)
    b_k = k_smem.load(_keys_layout(N, D, FLOAT8 is not None))
    if FLOAT8 is not None:
        b_k = b_k.to(FLOAT8, bitcast=True).to(dtype)
    b_k = b_k.reshape([4, N // 4, D])
    if FLOAT8 is not None:
        b_k = _permute_dims(b_k)
    return gl.convert_layout(b_k, gl.DotOperandLayout(0, mma, 2), assert_trivial=True)


@gluon.jit
def queries_operand(b_q, FLOAT8: gl.constexpr, mma: gl.constexpr):
    """Queries ``[4, C, D]`` in :func:`queries_layout` as the right operand ``[4, D, C]`` of a product with keys."""
    if FLOAT8:
        b_q = _permute_dims(b_q)
    return gl.convert_layout(b_q.permute([0, 2, 1]), gl.DotOperandLayout(1, mma, 2), assert_trivial=True)


# Two registers with four float8 elements of one key each, those of one and the next, become four registers of float16
# with elements of both keys: exchanged as bytes and converted two at a time, 6 instructions instead of 8.
_CONVERT_PAIRS: gl.constexpr = gl.constexpr("""{
.reg .b32 low, high; .reg .b16 a, b, c, d;
prmt.b32 low, $4, $5, 0x5140;
prmt.b32 high, $4, $5, 0x7362;
mov.b32 {a, b}, low;
mov.b32 {c, d}, high;
cvt.rn.f16x2.e4m3x2 $0, a;
cvt.rn.f16x2.e4m3x2 $1, b;
cvt.rn.f16x2.e4m3x2 $2, c;
cvt.rn.f16x2.e4m3x2 $3, d;
}""")
# The same of e5m2, which is the upper byte of a float16.
_WIDEN_PAIRS: gl.constexpr = gl.constexpr("""{
.reg .b32 low, high;
prmt.b32 low, $4, $5, 0x5140;
prmt.b32 high, $4, $5, 0x7362;
prmt.b32 $0, low, 0, 0x1404;
prmt.b32 $1, low, 0, 0x3424;
prmt.b32 $2, high, 0, 0x1404;
prmt.b32 $3, high, 0, 0x3424;
}""")


@gluon.jit
def values_operand(v_smem, dtype: gl.constexpr, mma: gl.constexpr):
    """Values ``[N, D]`` as the left operand ``[4, D, N / 4]``, float8 (as float16) with permuted dimensions."""
    N: gl.constexpr = v_smem.shape[0]
    D: gl.constexpr = v_smem.shape[1]
    FLOAT8: gl.constexpr = float8_of(v_smem.dtype)
    b_v = v_smem.load(_values_layout(N, D, FLOAT8 is not None))
    if FLOAT8 is not None:
        ASM: gl.constexpr = _WIDEN_PAIRS if FLOAT8 == gl.float8e5 else _CONVERT_PAIRS
        b_v = gl.inline_asm_elementwise(ASM, "=r,=r,=r,=r,r,r", [b_v], dtype=gl.float16, is_pure=True, pack=8)
        # what stands at (key bit, dimension bits 1 and 0) is the element of dimension bits (key bit, 1) and key bit 0
        b_v = b_v.reshape([N // 2, 2, D // 4, 2, 2]).permute([0, 4, 2, 1, 3])
        b_v = b_v.reshape([4, N // 4, 8, D // 16, 2]).permute([0, 3, 4, 2, 1]).reshape([4, D, N // 4])
    else:
        b_v = b_v.reshape([4, N // 4, D]).permute([0, 2, 1])
    return gl.convert_layout(b_v, gl.DotOperandLayout(0, mma, 2), assert_trivial=True)


@gluon.jit
def dims_in_order(b_o, FLOAT8: gl.constexpr):
    """The rows of a product with :func:`values_operand`, ``[4, D, C]``, in the order of the dimensions."""
    D: gl.constexpr = b_o.shape[1]
    C: gl.constexpr = b_o.shape[2]
    if FLOAT8:
        b_o = b_o.reshape([4, D // 16, 2, 8, C]).permute([0, 3, 1, 2, 4]).reshape([4, D, C])
    return b_o


@gluon.jit
def weights_operand(b_p, mma: gl.constexpr):
    """Weights ``[4, N / 4, C]`` of 16 bits, a product's result, as the right operand of the product with values.

    A thread holds two columns of one key and needs two keys of one column: blocks of 8 x 8 are transposed.
    """
    N: gl.constexpr = b_p.shape[1]
    C: gl.constexpr = b_p.shape[2]
    b_p = gl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [b_p], dtype=b_p.dtype, is_pure=True, pack=2
    )
    b_p = b_p.reshape([4, N // 8, 8, C // 8, 8]).permute([0, 1, 4, 3, 2]).reshape([4, N, C])
    return gl.convert_layout(b_p, gl.DotOperandLayout(1, mma, 2), assert_trivial=True)

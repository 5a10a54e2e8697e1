"""Tiles of keys and values in the shared memory of a Hopper program: copied there, cleared, converted. In Gluon."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tritonllm.kernels.runtime.checks import aligned

BYTES = {torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.int8}


@gluon.constexpr_function
def float8_of(dtype: gl.dtype) -> gl.dtype | None:
    """Of which float8 the bytes in shared memory are: the sign says. ``None``: of none."""
    return {gl.uint8: gl.float8e4nv, gl.int8: gl.float8e5}.get(dtype)


def pages_fit(k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
    """Whether the bulk copy engine can fetch the pages of both caches: each cache is one row after the other."""
    blocks, size, _, head_size = k_cache.shape
    if size < 8 or size & (size - 1) or blocks * size >= 2**31:
        return False
    return all(
        cache.stride(2) == head_size
        and cache.stride(0) == size * cache.stride(1)
        and cache.stride(1) * cache.itemsize % 16 == 0
        and aligned(cache)
        for cache in (k_cache, v_cache)
    )


def page_descriptors(
    k_cache: torch.Tensor, v_cache: torch.Tensor, block_n: int
) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Both caches as ``[P * S, K * D]``, to be copied a page of one head at a time; float8 as bytes, see
    :func:`float8_of`."""
    blocks, size, kv_heads, head_size = k_cache.shape
    if k_cache.dtype in BYTES:
        k_cache, v_cache = k_cache.view(BYTES[k_cache.dtype]), v_cache.view(BYTES[k_cache.dtype])
    swizzle = min(128, head_size * k_cache.itemsize)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=8 * k_cache.itemsize, rank=2)
    shape, box = [blocks * size, kv_heads * head_size], [min(size, block_n), head_size]
    k_desc = TensorDescriptor(k_cache, shape, [k_cache.stride(1), 1], box, layout)
    return k_desc, TensorDescriptor(v_cache, shape, [v_cache.stride(1), 1], box, layout)


@gluon.jit
def clear_stale_values(v_smem, start, first, seq_len):
    """Write zeros over the slots of keys outside [first, seq_len): their weight is 0, but they may hold NaN.

    ``v_smem`` is ``[N, D]``, the values of keys from ``start`` on; four warps do it together.
    """
    HEAD_SIZE: gl.constexpr = v_smem.shape[1]
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_SIZE, HEAD_SIZE // 8], [4, 1], [1, 0])
    b_v = v_smem.load(wide)
    b_key = start + gl.arange(0, v_smem.shape[0], gl.SliceLayout(1, wide))
    m_v = (b_key >= first) & (b_key < seq_len)
    v_smem.store(gl.where(m_v[:, None], b_v, gl.zeros_like(b_v)))
    fence_async_shared()
    gl.thread_barrier()


# A float8 tile becomes the left operand of a product in registers, where its rows and columns are spread over the
# threads in a pattern of single pairs. Fetched so, a thread would read bytes. But the columns of two operands may be
# permuted together, and the rows of a result apart: here so that each thread reads its elements side by side.


@gluon.constexpr_function
def _doublings(step: int, end: int, dim: int) -> list[list[int]]:
    """Bases ``step, 2 step, 4 step ... < end`` along a dimension of two."""
    bases = []
    while step < end:
        bases.append([step, 0] if dim == 0 else [0, step])
        step *= 2
    return bases


@gluon.constexpr_function
def _key_layout(block_n: int, head_size: int) -> gl.DistributedLinearLayout:
    """``[N, D]``: a quarter of a key's dimensions to a thread."""
    quarter = head_size // 4
    registers = [*_doublings(1, quarter, 1), [8, 0], *_doublings(64, block_n, 0)]
    lanes = [[0, quarter], [0, 2 * quarter], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [block_n, head_size])


@gluon.constexpr_function
def _value_layout(block_n: int, head_size: int) -> gl.DistributedLinearLayout:
    """``[N, D]``: D / 32 dimensions of every fourth pair of values to a thread."""
    wide = head_size // 32
    registers = [*_doublings(1, wide, 1), [1, 0], [8, 0], *_doublings(16, block_n, 0)]
    lanes = [[2, 0], [4, 0], [0, wide], [0, 2 * wide], [0, 4 * wide]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 8 * wide], [0, 16 * wide]], [], [block_n, head_size])


@gluon.jit
def permute_dims(b_x):
    """The columns of a ``[N, D]`` tile in the order in which :func:`convert_keys` leaves a key's dimensions."""
    N: gl.constexpr = b_x.shape[0]
    D: gl.constexpr = b_x.shape[1]
    return b_x.reshape([N, 4, D // 8, 2]).permute([0, 2, 1, 3]).reshape([N, D])


@gluon.jit
def convert_keys(k_smem, dtype: gl.constexpr, mma: gl.constexpr):
    """float8 keys ``[N, D]`` as the left operand of a product; the right one's rows need :func:`permute_dims` too."""
    b_k = k_smem.load(_key_layout(k_smem.shape[0], k_smem.shape[1]))
    b_k = permute_dims(b_k.to(float8_of(k_smem.dtype), bitcast=True).to(dtype))
    return gl.convert_layout(b_k, gl.DotOperandLayout(0, mma, 2))


@gluon.jit
def convert_values(v_smem, dtype: gl.constexpr, mma: gl.constexpr):
    """float8 values ``[N, D]``, transposed, as the left operand of a product, whose rows are then permuted."""
    N: gl.constexpr = v_smem.shape[0]
    D: gl.constexpr = v_smem.shape[1]
    b_v = v_smem.load(_value_layout(N, D)).to(float8_of(v_smem.dtype), bitcast=True).to(dtype)
    b_v = b_v.permute([1, 0]).reshape([4, 8, D // 64, 2, N]).permute([2, 0, 3, 1, 4]).reshape([D, N])
    return gl.convert_layout(b_v, gl.DotOperandLayout(0, mma, 2))


@gluon.jit
def dims_of_rows(D: gl.constexpr, FLOAT8: gl.constexpr, layout: gl.constexpr):
    """Which dimension each row of a product with :func:`convert_values` (if FLOAT8) holds."""
    b_row = gl.arange(0, D, layout)
    if FLOAT8:
        b_row = (b_row // 16 % 4 * 8 + b_row % 8) * (D // 32) + b_row // 64 * 2 + b_row // 8 % 2
    return b_row

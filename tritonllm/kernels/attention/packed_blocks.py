"""Blocks of the key/value cache in one piece each, as they leave the device and come back.

The cache holds a block in R pieces: keys and values of every layer. ``pack_blocks`` puts the pieces of some blocks side
by side, so that one copy takes a block to the host's memory (:mod:`tritonllm.engine.cache.host_copies`), and
``unpack_blocks`` puts them back. Both read every element once and write it once: the floor is those bytes over the
memory bandwidth.

Packed blocks are rows of a tensor, in the order of the blocks, or wherever ``places`` says: so blocks go straight into
slots of the device's memory that lie apart.
"""

import torch
import triton
import triton.language as tl

from tritonllm.kernels.attention.common import FLOAT8, as_movable
from tritonllm.kernels.runtime import tuning
from tritonllm.kernels.runtime.checks import FLOATS, check_tensor
from tritonllm.kernels.runtime.registry import register_op, with_reference

DTYPES = (*FLOATS, *FLOAT8)


# Neither the number of blocks nor that of layers makes another kernel.
@triton.jit(do_not_specialize=["blocks_ptr", "places_ptr", "rows"])
def _pack_blocks_kernel(
    pool_ptr,  # [R, P, E]
    blocks_ptr,  # [N]
    places_ptr,  # [N]; not read if not PLACED
    packed_ptr,  # [N, R, E], or [M, R, E] if PLACED
    rows,
    stride_row,
    ELEMENTS: tl.constexpr,
    PLACED: tl.constexpr,
    INTO_POOL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: BLOCK elements of one piece of a block."""
    # One axis for blocks, pieces and their parts: a second one ends at 65,535.
    PARTS: tl.constexpr = triton.cdiv(ELEMENTS, BLOCK)
    piece = (tl.program_id(0) // PARTS).to(tl.int64)
    block = tl.load(blocks_ptr + piece // rows)
    if block < 0:
        return
    b_element = tl.program_id(0) % PARTS * BLOCK + tl.arange(0, BLOCK)
    mask = b_element < ELEMENTS
    p_pool = pool_ptr + piece % rows * stride_row + block * ELEMENTS + b_element
    packed_piece = piece
    if PLACED:
        packed_piece = tl.load(places_ptr + piece // rows) * rows + piece % rows
    p_packed = packed_ptr + packed_piece * ELEMENTS + b_element
    if INTO_POOL:
        tl.store(p_pool, tl.load(p_packed, mask=mask), mask=mask)
    else:
        tl.store(p_packed, tl.load(p_pool, mask=mask), mask=mask)


def default_pack_config(elements: int) -> tuning.Config:
    block = min(triton.next_power_of_2(elements), 4096)
    return {"BLOCK": block, "num_warps": max(1, block // 1024)}


def _pack_reference(
    pool: torch.Tensor, blocks: torch.Tensor, packed: torch.Tensor, places: torch.Tensor | None
) -> None:
    kept = blocks >= 0
    there = kept if places is None else places[kept]
    as_movable(packed)[there] = as_movable(pool)[:, blocks[kept]].transpose(0, 1)


def _unpack_reference(
    packed: torch.Tensor, blocks: torch.Tensor, pool: torch.Tensor, places: torch.Tensor | None
) -> None:
    kept = blocks >= 0
    there = kept if places is None else places[kept]
    as_movable(pool)[:, blocks[kept]] = as_movable(packed)[there].transpose(0, 1)


def _launch(
    pool: torch.Tensor, blocks: torch.Tensor, packed: torch.Tensor, places: torch.Tensor | None, into_pool: bool
) -> None:
    if len(blocks) == 0 or packed.numel() == 0:
        return
    _, rows, elements = packed.shape
    config = tuning.get_config("pack_blocks", pool.device, default_pack_config, elements=elements)
    where = blocks if places is None else places
    _pack_blocks_kernel[(len(blocks) * rows * triton.cdiv(elements, config["BLOCK"]),)](
        *(as_movable(pool), blocks, where, as_movable(packed), rows, pool.stride(0)),
        ELEMENTS=elements,
        PLACED=places is not None,
        INTO_POOL=into_pool,
        **config,
    )


@register_op(mutates=("packed",), reference=_pack_reference)
def _pack_blocks(pool: torch.Tensor, blocks: torch.Tensor, packed: torch.Tensor, places: torch.Tensor | None) -> None:
    _launch(pool, blocks, packed, places, into_pool=False)


@register_op(mutates=("pool",), reference=_unpack_reference)
def _unpack_blocks(packed: torch.Tensor, blocks: torch.Tensor, pool: torch.Tensor, places: torch.Tensor | None) -> None:
    _launch(pool, blocks, packed, places, into_pool=True)


def _check(pool: torch.Tensor, blocks: torch.Tensor, packed: torch.Tensor, places: torch.Tensor | None) -> None:
    check_tensor("pool", pool, ("R", "P", "E"), dtype=DTYPES)
    check_tensor("blocks", blocks, ("N",), dtype=torch.int64, like=pool)
    count: int | str = len(blocks)
    if places is not None:
        check_tensor("places", places, (len(blocks),), dtype=torch.int64, like=pool)
        count = "M"
    check_tensor("packed", packed, (count, pool.shape[0], pool.shape[2]), dtype=pool.dtype, like=pool)
    for name, tensor in (("pool", pool), ("packed", packed)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous: pass the whole tensor, or a copy")


def pack_blocks(
    pool: torch.Tensor, blocks: torch.Tensor, packed: torch.Tensor, *, places: torch.Tensor | None = None
) -> None:
    """Copy blocks out of the cache, each into one piece.

    Args:
        pool: ``[R, P, E]`` float16, bfloat16, float32 or float8, contiguous: R pieces of each of P blocks.
        blocks: ``[N]`` int64; of a negative one nothing is copied.
        packed: ``[N, R, E]`` with the dtype of ``pool``, contiguous; written. With ``places`` ``[M, R, E]``.
        places: ``[N]`` int64, from 0 to M - 1, each at most once: the row of ``packed`` that a block goes to; by
            default they go there in order.

    Raises:
        ValueError: a shape, dtype or device that does not fit, or a tensor that is not contiguous.
    """
    _check(pool, blocks, packed, places)
    _pack_blocks(pool, blocks, packed, places)


pack_blocks_ref = with_reference(pack_blocks)


def unpack_blocks(
    packed: torch.Tensor, blocks: torch.Tensor, pool: torch.Tensor, *, places: torch.Tensor | None = None
) -> None:
    """The opposite of :func:`pack_blocks`: write the pieces of blocks back into the cache.

    Args:
        packed: ``[N, R, E]`` float16, bfloat16, float32 or float8, contiguous. With ``places`` ``[M, R, E]``.
        blocks: ``[N]`` int64, each at most once; a negative one is left out.
        pool: ``[R, P, E]`` with the dtype of ``packed``, contiguous; written.
        places: ``[N]`` int64, from 0 to M - 1: the row of ``packed`` that a block comes from; by default they come in
            order.

    Raises:
        ValueError: a shape, dtype or device that does not fit, or a tensor that is not contiguous.
    """
    _check(pool, blocks, packed, places)
    _unpack_blocks(packed, blocks, pool, places)


unpack_blocks_ref = with_reference(unpack_blocks)

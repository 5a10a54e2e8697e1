"""A paged cache for benchmarks: the blocks of a sequence lie scattered in the pool, as after hours of serving."""

import random

import torch
import triton

from autotune.problem import Inputs, TensorFactory


def sequence_lengths(batch: int, longest: int, ragged: bool) -> list[int]:
    """All of one length, or uniform from 1 to ``longest``; always the same for the same arguments."""
    if not ragged:
        return [longest] * batch
    draw = random.Random(batch * 2**32 + longest)
    return [draw.randint(1, longest) for _ in range(batch)]


def paged_cache(
    new: TensorFactory, lengths: list[int], capacity: int, block_size: int, kv_heads: int, head_size: int
) -> Inputs:
    """``k_cache``, ``v_cache``, ``block_tables`` (for ``capacity`` keys a sequence) and ``seq_lens``."""
    counts = [triton.cdiv(length, block_size) for length in lengths]
    ids = new.permutation(sum(counts))
    tables = new.filled(0, len(lengths), triton.cdiv(capacity, block_size), dtype=torch.int32)
    for table, blocks in zip(tables, ids.split(counts), strict=True):
        table[: len(blocks)] = blocks
    pool = (sum(counts), block_size, kv_heads, head_size)
    return {
        "k_cache": new.normal(*pool),
        "v_cache": new.normal(*pool),
        "block_tables": tables,
        "seq_lens": new.tensor(lengths, torch.int32),
    }

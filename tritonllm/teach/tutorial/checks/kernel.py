"""Check of lesson 9: a decode kernel, against ``paged_decode_attention_ref``."""

from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import torch

from tritonllm.kernels import paged_decode_attention_ref
from tritonllm.teach.tutorial.holes import Wrong

TOLERANCE = 1e-5


class Case(NamedTuple):
    """Arguments of one call."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    lengths: torch.Tensor


def make_case(
    lengths: Sequence[int], *, heads: int = 4, key_heads: int = 2, size: int = 16, head_size: int = 32
) -> Case:
    """Sequences whose blocks are mixed in the pool; what is in no sequence is large, so that reading it shows."""
    random = torch.Generator().manual_seed(len(lengths))
    blocks = [-(-length // size) for length in lengths]
    order = torch.randperm(sum(blocks) + 2, generator=random).int()
    tables = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
    cache = torch.full((2, len(order), size, key_heads, head_size), 100.0)
    taken = 0
    for row, (length, count) in enumerate(zip(lengths, blocks, strict=True)):
        tables[row, :count] = order[taken : taken + count]
        taken += count
        for token in range(length):
            cache[:, tables[row, token // size], token % size] = torch.randn(2, key_heads, head_size, generator=random)
    q = torch.randn(len(lengths), heads, head_size, generator=random) * 2
    return Case(q, cache[0].clone(), cache[1].clone(), tables, torch.tensor(lengths, dtype=torch.int32))


def error_of(learner: ModuleType, case: Case) -> float:
    """``|out - expected| / |expected|``.

    Raises:
        Wrong: no tensor of that shape.
    """
    expected = paged_decode_attention_ref(*case)
    out = learner.decode_attention(*case)
    if not isinstance(out, torch.Tensor) or out.shape != expected.shape:
        raise Wrong(f"decode_attention must return a tensor {list(expected.shape)}, got {out!r:.80}.")
    if not out.isfinite().all():
        raise Wrong(
            f"Some results are not numbers (lengths {case.lengths.tolist()}). Is a weight computed from -inf minus "
            "-inf, or something divided by a total of 0?"
        )
    return float((out - expected).norm() / expected.norm())


def check(learner: ModuleType) -> str:
    """From the simplest case on, so that the first that fails says what is missing."""
    one = error_of(learner, make_case([16]))
    if one > TOLERANCE:
        raise Wrong(
            f"One sequence that fills one block: the error is {one:.2g}. Nothing has to be masked or rescaled there, "
            "so look at the address of the block: its number in the table, then `places`, `key_head` and `dims`."
        )
    two = error_of(learner, make_case([32]))
    if two > TOLERANCE:
        raise Wrong(
            f"One block is right, two are not: the error is {two:.2g}. When a later block has a larger score, what was "
            "summed up before (total and b_out) is relative to the old largest: multiply it by "
            "exp(largest - new_largest). Is the i-th entry of the table read for the i-th block?"
        )
    part = error_of(learner, make_case([21]))
    if part > TOLERANCE:
        raise Wrong(
            f"Full blocks are right, a block that is filled in part is not: the error is {part:.2g}. Token i * S + "
            "places exists only below `length`; what lies behind it is not this sequence's and must get the score "
            "-inf."
        )
    many = make_case([1, 37, 64, 5])
    error = error_of(learner, many)
    if error > TOLERANCE:
        raise Wrong(f"One sequence is right, four are not: the error is {error:.2g}. Where does a table's row begin?")
    programs = many.q.shape[0] * many.q.shape[1]
    return f"Right. {programs} programs, 4 sequences of {many.lengths.tolist()} tokens: the error is {error:.1e}."

"""Mixture of experts: how many pairs (token, expert) each expert gets, added up on the device over many steps.

Counts are integers that are added atomically, so the order in which programs run does not change them. A few
microseconds, bound by latency; nothing is launched unless somebody asks for counts.
"""

import torch
import triton
import triton.language as tl

from tritonllm.kernels.moe.grouping import expert_of_pairs
from tritonllm.kernels.runtime.checks import check_tensor, require
from tritonllm.kernels.runtime.dependent_launch import dependent_launch, let_next_start, wait_for_previous
from tritonllm.kernels.runtime.registry import register_op, with_reference

INTEGERS = (torch.int32, torch.int64)
# Pairs of a program, whatever the number of pairs and the dtype of marks: an engine has one kernel, whose first launch
# is at the start, whichever layers and steps that rehearses.
CHUNK = 256


@triton.jit(do_not_specialize=["pairs", "words"])
def _count_experts_kernel(
    ids_ptr,  # [T, TOP_K]
    marks_ptr,  # [T * words] int32
    counts_ptr,  # [E] int64
    pairs,
    experts,
    words,  # of a mark
    stride_ids,
    TOP_K: tl.constexpr,
    PDL: tl.constexpr,
    E_BLOCK: tl.constexpr,  # power of two, >= experts
    CHUNK: tl.constexpr,
):
    wait_for_previous(PDL)
    let_next_start(PDL)
    pair = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    b_expert = expert_of_pairs(ids_ptr, ids_ptr, pair, pairs, experts, experts, stride_ids, TOP_K, 0)
    b_word = (pair // TOP_K).to(tl.int64) * words + words - 1  # the last one has the sign
    b_mark = tl.load(marks_ptr + b_word, mask=pair < pairs, other=-1)
    b_count = tl.histogram(tl.maximum(b_expert, 0), E_BLOCK, mask=(b_expert >= 0) & (b_mark >= 0))
    lane = tl.arange(0, E_BLOCK)
    tl.atomic_add(counts_ptr + lane, b_count.to(tl.int64), mask=(lane < experts) & (b_count > 0), sem="relaxed")


def _reference(ids: torch.Tensor, marks: torch.Tensor, counts: torch.Tensor) -> None:
    chosen = ids[marks >= 0].flatten().long()
    chosen = chosen[(chosen >= 0) & (chosen < len(counts))]
    counts += torch.bincount(chosen, minlength=len(counts))


@register_op(mutates=("counts",), reference=_reference)
def _count_experts(ids: torch.Tensor, marks: torch.Tensor, counts: torch.Tensor) -> None:
    pairs, experts = ids.numel(), len(counts)
    if pairs == 0:
        return
    programs = triton.cdiv(pairs, CHUNK)
    _count_experts_kernel[(programs,)](
        *(ids, marks.view(torch.int32), counts, pairs, experts, marks.element_size() // 4, ids.stride(0)),
        **dependent_launch(ids.device, programs),
        TOP_K=ids.shape[1],
        E_BLOCK=max(16, triton.next_power_of_2(experts)),
        CHUNK=CHUNK,
    )


def count_experts(ids: torch.Tensor, marks: torch.Tensor, counts: torch.Tensor) -> None:
    """Add to ``counts`` how often each expert was chosen, by the tokens that are no padding.

    Args:
        ids: ``[T, k]`` int32 or int64 experts of each token, usually from :func:`moe_route`; one out of range is left
            out.
        marks: ``[T]`` int32 or int64; a token with a negative one is padding, and is not counted. (A step's slots in
            the cache, or its seats, say.)
        counts: ``[E]`` int64, added to in place.

    Raises:
        ValueError: a wrong shape, dtype or device.
    """
    check_tensor("ids", ids, ("T", "k"), dtype=INTEGERS)
    require(ids.numel() < 2**31, "ids must have fewer than 2^31 elements: split the tokens")
    check_tensor("marks", marks, (len(ids),), dtype=INTEGERS, like=ids)
    check_tensor("counts", counts, ("E",), dtype=torch.int64, like=ids)
    _count_experts(ids, marks, counts)


count_experts_ref = with_reference(count_experts)

"""The limits of every row of logits, for a kernel that works with them afterwards, as `rejection_judge` does.

Two launches, as in `sample`, which draws where these store: candidates settle most rows, and the others are searched.
Apart, because a search needs many registers: with it in the judges' kernel, 320 rows came one to a multiprocessor.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tritonllm.config.sampling_rows import SamplingRows
from tritonllm.kernels.runtime import tuning
from tritonllm.kernels.runtime.dependent_launch import dependent_launch, let_next_start, wait_for_previous
from tritonllm.kernels.sampling.candidates import limit_candidates
from tritonllm.kernels.sampling.common import MIN_TEMPERATURE, UNIFORM_SUMS, load_scan, scale_of, weight
from tritonllm.kernels.sampling.limited import candidates_config, default_config
from tritonllm.kernels.sampling.truncation import is_limited, load_limits, search_limits

_UNSETTLED = tl.constexpr(-1)  # in place of a last tie


class RowLimits(NamedTuple):
    """The limits of R rows, each ``[R]``; not written for rows that take the argmax, or hold nothing but -inf.

    Attributes:
        threshold: float32: larger logits stay; -inf where nothing is cut.
        last_tie: int32: of logits that equal the threshold, those of ids up to this one stay.
        total: float32: the weight of what stays.
    """

    threshold: torch.Tensor
    last_tie: torch.Tensor
    total: torch.Tensor


@triton.jit
def _row_limits_kernel(
    logits_ptr,  # [B, N, V]
    temperature_ptr,  # [B]
    top_k_ptr,  # [B] or None
    top_p_ptr,  # [B] or None
    min_p_ptr,  # [B] or None
    max_ptr,  # [B * N, n_groups]
    sum_ptr,  # [B * N, n_groups]
    list_ptr,  # scratch [B * N, n_groups]
    buffer_ptr,  # scratch [B * N, CAPACITY]
    limits,  # RowLimits of B * N
    V,
    n_groups,
    positions,  # N
    stride_b,
    stride_n,
    NG: tl.constexpr,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
    SEARCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for each row: without SEARCH by its candidates, with SEARCH those that these did not settle."""
    wait_for_previous(PDL)
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    seq, position = row // positions, row % positions
    temperature = tl.load(temperature_ptr + seq)
    is_mine = temperature >= MIN_TEMPERATURE
    if SEARCH:
        is_mine &= tl.load(limits.last_tie + row) == _UNSETTLED
    if is_mine:
        p_row = logits_ptr + seq * stride_b + position * stride_n
        p_list, p_buffer = list_ptr + row * n_groups, buffer_ptr + row * CAPACITY
        top_k, top_p, min_p = load_limits(top_k_ptr, top_p_ptr, min_p_ptr, seq, "")
        _b_group, b_max, b_sum = load_scan(max_ptr, sum_ptr, row, n_groups, NG)
        scale = scale_of(temperature)
        top = tl.max(b_max)
        if top > float("-inf"):
            threshold = tl.full((), float("-inf"), tl.float32)
            last_tie = tl.full((), V, tl.int32)
            total = tl.sum(b_sum * weight(b_max, top, scale))
            whole_row = p_row, None, 1
            if SEARCH:
                threshold, last_tie, total = search_limits(
                    *(whole_row, p_list, p_buffer, V, n_groups, b_max, total, top, scale, top_k, top_p, min_p),
                    *(NG, CAPACITY, TILE),
                )
            elif is_limited(V, top_k, top_p, min_p):
                found, threshold, last_tie, total, _whole = limit_candidates(
                    whole_row, p_list, p_buffer, V, n_groups, b_max, b_sum, top, scale, top_k, top_p, min_p, NG, TILE
                )
                last_tie = tl.where(found > 0, last_tie, _UNSETTLED)
            tl.store(limits.threshold + row, threshold)
            tl.store(limits.last_tie + row, last_tie)
            tl.store(limits.total + row, total)


def find_row_limits(
    logits: torch.Tensor,
    parameters: SamplingRows[torch.Tensor],
    group_max: torch.Tensor,
    group_sum: torch.Tensor,
    groups: torch.Tensor,
) -> RowLimits | None:
    """Find what min-p, top-k and top-p leave of each row.

    Args:
        logits: ``[B, N, V]``, contiguous in the last dimension.
        parameters: temperature, top_k, top_p, min_p, and what else a caller has of each sequence.
        group_max, group_sum: ``[B * N, ceil(V / 128)]``, from ``common.scan``.
        groups: scratch, int32 of the same shape.

    Returns:
        The limits of B * N rows; ``None``, and nothing is launched, if no row can have any.
    """
    if all(limit is None for limit in parameters.limits):
        return None
    positions, vocab = logits.shape[1:]
    (rows, n_groups), device = group_max.shape, logits.device
    config = tuning.get_config("sample", device, default_config, vocab=vocab)
    buffer = torch.empty(rows, config["CAPACITY"], dtype=torch.float32, device=device)
    threshold, total = (torch.empty(rows, dtype=torch.float32, device=device) for _ in range(2))
    limits = RowLimits(threshold, torch.empty(rows, dtype=torch.int32, device=device), total)
    sizes = (vocab, n_groups, positions, *logits.stride()[:2])
    given = (logits, *parameters[:4], group_max, group_sum, groups, buffer, limits, *sizes)
    flags = {"NG": triton.next_power_of_2(n_groups), **UNIFORM_SUMS, **dependent_launch(device)}
    _row_limits_kernel[(rows,)](*given, SEARCH=False, **flags, **candidates_config(vocab, device))
    _row_limits_kernel[(rows,)](*given, SEARCH=True, **flags, **config)
    return limits

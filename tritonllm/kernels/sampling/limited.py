"""The draw of rows with limits in `sample`, after the pass over the logits.

One program for each row. The first launch settles rows whose limits leave a few hundred tokens at most (`candidates`),
the second searches the rest (`truncation`). Both read again only the groups that matter.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tritonllm.config.sampling_rows import SamplingRows
from tritonllm.kernels.runtime import chip, tuning
from tritonllm.kernels.runtime.dependent_launch import dependent_launch, let_next_start, wait_for_previous
from tritonllm.kernels.runtime.random import STREAM_GROUP, STREAM_TOKEN, gumbel
from tritonllm.kernels.sampling.candidates import SMALL, draw_candidate, limit_candidates, list_groups, load_listed
from tritonllm.kernels.sampling.common import (
    GROUP,
    MIN_TEMPERATURE,
    UNIFORM_SUMS,
    first_max,
    keep,
    load_row,
    load_scan,
    load_scans,
    scale_of,
    weight,
)
from tritonllm.kernels.sampling.truncation import is_limited, load_limits, search_limits

_UNSETTLED = tl.constexpr(-1)  # in place of a token


@triton.jit
def _draw_listed(
    row,
    p_list,
    V,
    n_groups,
    b_max,
    top,
    scale,
    threshold,
    last_tie,
    seed,
    step,
    NG: tl.constexpr,
    TILE: tl.constexpr,
):
    """The token drawn from what the limits keep: reads the groups that reach the threshold."""
    n_listed = list_groups(p_list, b_max, n_groups, threshold, NG)
    b_best = tl.full([TILE], float("-inf"), tl.float32)
    b_best_group = tl.zeros([TILE], tl.int32)
    for first in range(0, n_listed, TILE):
        b_logit, b_id = load_listed(row, p_list, first, n_listed, V, TILE)
        b_kept = tl.where(keep(b_logit, b_id, threshold, last_tie), weight(b_logit, top, scale), 0.0)
        b_at = first + tl.arange(0, TILE)
        b_group = tl.load(p_list + b_at, mask=b_at < n_listed, other=0)
        b_score = tl.log2(tl.sum(b_kept, axis=1)) + gumbel(b_group, seed, step, STREAM_GROUP)
        m_better = b_score > b_best
        b_best = tl.where(m_better, b_score, b_best)
        b_best_group = tl.where(m_better, b_group, b_best_group)
    b_token = first_max(b_best, b_best_group) * GROUP + tl.arange(0, GROUP)
    b_x = load_row(row, b_token, b_token < V)
    b_token_score = (b_x - top) * scale + gumbel(b_token, seed, step, STREAM_TOKEN)
    return first_max(tl.where(keep(b_x, b_token, threshold, last_tie), b_token_score, float("-inf")), b_token)


@triton.jit
def _draw_searched(
    row,
    p_list,
    p_buffer,
    V,
    n_groups,
    b_max,
    b_sum,
    top,
    scale,
    top_k,
    top_p,
    min_p,
    seed,
    step,
    NG: tl.constexpr,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
):
    """The token of a row whose limits are searched."""
    whole = tl.sum(b_sum * weight(b_max, top, scale))
    threshold, last_tie, _kept = search_limits(
        *(row, p_list, p_buffer, V, n_groups, b_max, whole, top, scale, top_k, top_p, min_p, NG, CAPACITY, TILE)
    )
    return _draw_listed(row, p_list, V, n_groups, b_max, top, scale, threshold, last_tie, seed, step, NG, TILE)


@triton.jit
def _draw_settled(
    row,
    p_list,
    p_buffer,
    V,
    n_groups,
    b_max,
    b_sum,
    top,
    scale,
    top_k,
    top_p,
    min_p,
    seed,
    step,
    NG: tl.constexpr,
    TILE: tl.constexpr,
):
    """The token of a row whose limits a few candidates settle, or ``_UNSETTLED``."""
    found, threshold, last_tie, _kept, _whole = limit_candidates(
        row, p_list, p_buffer, V, n_groups, b_max, b_sum, top, scale, top_k, top_p, min_p, NG, TILE
    )
    token = tl.full((), _UNSETTLED, tl.int32)
    if found > 0:
        token = draw_candidate(p_buffer, found, top, scale, threshold, last_tie, seed, step)
    return token


@triton.jit
def _limited_kernel(
    logits_ptr,  # [B, N, V]
    temperature_ptr,  # [B]
    top_k_ptr,  # [B] or None
    top_p_ptr,  # [B] or None
    min_p_ptr,  # [B] or None
    seeds_ptr,  # [B]
    steps_ptr,  # [B]
    offsets_ptr,  # [B * N] or None
    max_ptr,  # [B * N, n_groups]; of ranks [B * N, EACH / GROUP]
    sum_ptr,  # as max_ptr
    rank_steps_ptr,  # [ranks] int64: where the rows' other parts lie (`tokens_at`); None if there are none
    list_ptr,  # scratch [B * N, n_groups]
    buffer_ptr,  # scratch [B * N, CAPACITY]
    out_ptr,  # [B * N]
    V,
    n_groups,
    positions,
    stride_b,
    stride_n,
    NG: tl.constexpr,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
    SEARCH: tl.constexpr,
    EACH: tl.constexpr,  # columns of a rank
    PDL: tl.constexpr,
):
    """Rows with limits, one program each: first by their candidates; with SEARCH those that these did not settle.

    Two launches, since a search needs many registers, and would leave room for few programs of the usual kind.
    """
    row = tl.program_id(0).to(tl.int64)
    seq, position = row // positions, row % positions
    # A trip to memory that need not wait: the pass over the logits, which may still run, has waited for all kernels
    # before it, so these values are there. In the second-level cache: the first may hold those of the last step.
    temperature = tl.load(temperature_ptr + seq, cache_modifier=".cg")
    top_k, top_p, min_p = load_limits(top_k_ptr, top_p_ptr, min_p_ptr, seq, ".cg")
    offset = position if offsets_ptr is None else tl.load(offsets_ptr + row, cache_modifier=".cg")
    seed = tl.load(seeds_ptr + seq, cache_modifier=".cg")
    step = tl.load(steps_ptr + seq, cache_modifier=".cg") + offset
    wait_for_previous(PDL)
    let_next_start(PDL)
    is_mine = (temperature >= MIN_TEMPERATURE) & is_limited(V, top_k, top_p, min_p)
    if SEARCH:
        is_mine &= tl.load(out_ptr + row) == _UNSETTLED
    if is_mine:
        p_row = logits_ptr + seq * stride_b + position * stride_n
        p_list, p_buffer = list_ptr + row * n_groups, buffer_ptr + row * CAPACITY
        if rank_steps_ptr is None:
            _b_group, b_max, b_sum = load_scan(max_ptr, sum_ptr, row, n_groups, NG)
        else:
            b_max, b_sum = load_scans(max_ptr, sum_ptr, rank_steps_ptr, row, n_groups, NG, EACH // GROUP)
        scale = scale_of(temperature)
        top = tl.max(b_max)
        token = tl.zeros((), tl.int32)
        if top > float("-inf"):
            row_and_scan = ((p_row, rank_steps_ptr, EACH), p_list, p_buffer, V, n_groups, b_max, b_sum, top, scale)
            if SEARCH:
                token = _draw_searched(*row_and_scan, top_k, top_p, min_p, seed, step, NG, CAPACITY, TILE)
            else:
                token = _draw_settled(*row_and_scan, top_k, top_p, min_p, seed, step, NG, TILE)
        tl.store(out_ptr + row, token.to(tl.int64))


def candidates_config(vocab: int, device: torch.device) -> tuning.Config:
    """Up to 64 groups give candidates. A constant: a row's sums, hence its result, depend on it.

    ``maxnreg``: for two programs a multiprocessor. Left to itself, the assembler spills some of 80 registers, but for
    V = 151936, where it takes 110: then top-k + top-p takes 1 us less in every batch (H200), top-p alone the same.
    """
    groups = triton.next_power_of_2(triton.cdiv(vocab, GROUP.value))
    config = {"CAPACITY": 2 * SMALL.value, "TILE": min(64, groups), "num_warps": 8}
    return config if chip.on_amd(device) else config | {"maxnreg": 128}


def default_config(vocab: int) -> tuning.Config:
    """A row that is searched holds ``CAPACITY`` logits in registers: 32 for each of 256 threads.

    The batch is no part of the key: a row's sums, hence its result, must not depend on it. ``maxnreg``: left to itself,
    the assembler rather spills a few registers than takes more than 80 for the smallest vocabularies.
    """
    groups = triton.next_power_of_2(triton.cdiv(vocab, GROUP.value))
    capacity = min(8192, max(2 * SMALL.value, triton.next_power_of_2(vocab)))
    return {"CAPACITY": capacity, "TILE": min(32, groups), "num_warps": 8, "maxnreg": 255}


class LogitParts(NamedTuple):
    """Rows of logits of which several ranks, whose GPUs reach each other's memory, have some columns each.

    Each rank's memory has the same layout, so one distance leads from a rank's logits, maxima and sums to another's.

    Attributes:
        rank_steps: ``[ranks]`` int64, in ``STEP`` elements of float32 (256 bytes): from this rank's memory to each's.
        each: columns of a rank but the last ones, which may have fewer; a multiple of ``GROUP``.
        vocab: columns of all.
    """

    rank_steps: torch.Tensor
    each: int
    vocab: int


def draw_limited_rows(
    logits: torch.Tensor,
    parameters: SamplingRows[torch.Tensor],
    offsets: torch.Tensor | None,
    group_max: torch.Tensor,
    group_sum: torch.Tensor,
    out: torch.Tensor,
    parts: LogitParts | None = None,
) -> None:
    """The two launches, with the arguments of ``draw.draw_rows`` and what it returned.

    Args:
        parts: ``logits``, ``group_max`` and ``group_sum`` are this rank's parts of these.
    """
    (rows, n_groups), device = group_max.shape, logits.device
    positions, vocab = logits.shape[1:]
    rank_steps, each = None, 1
    if parts is not None:
        rank_steps, each, vocab = parts
        n_groups = triton.cdiv(vocab, GROUP.value)
    config = tuning.get_config("sample", device, default_config, vocab=vocab)
    groups = torch.empty(rows, n_groups, dtype=torch.int32, device=device)
    buffer = torch.empty(rows, config["CAPACITY"], dtype=torch.float32, device=device)
    scratch = (group_max, group_sum, rank_steps, groups, buffer)
    sizes = (vocab, n_groups, positions, *logits.stride()[:2])
    given = (logits, *parameters, offsets, *scratch, out, *sizes)
    flags = {"NG": triton.next_power_of_2(n_groups), "EACH": each, **UNIFORM_SUMS, **dependent_launch(device)}
    _limited_kernel[(rows,)](*given, SEARCH=False, **flags, **candidates_config(vocab, device))
    _limited_kernel[(rows,)](*given, SEARCH=True, **flags, **config)

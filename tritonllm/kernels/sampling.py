"""One token for each row of logits: temperature, min-p, top-k, top-p, with one noise for each seed and step.

The order is vLLM's: edit the logits (`logit_edits`), divide by the temperature, drop tokens less likely than min_p
times the likeliest, keep the top_k largest, keep the shortest beginning of those that holds top_p of their probability,
draw. Ties at an edge go to the lower ids, so exactly ``top_k`` tokens stay, and ``top_k=1`` is the argmax.

Three launches, whatever the rows ask for; one if no row can have limits. The first (`sampling_draw`) reads the logits
once and draws for rows without limits by the Gumbel-max trick (`sampling_common`). The others give one program to each
row with limits: the second settles rows whose limits leave a few hundred tokens at most (`candidates`), the third
searches the rest (`truncation`); both read again only the groups that matter. Floor: the bytes of the logits over the
memory bandwidth, 36 us for [256, 151936] float32 on an H200.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from tritonllm.kernels import tuning
from tritonllm.kernels.candidates import SMALL, draw_candidate, limit_candidates, list_groups, load_listed
from tritonllm.kernels.checks import check_tensor, require
from tritonllm.kernels.dependent_launch import dependent_launch, let_next_start, wait_for_previous
from tritonllm.kernels.logit_edits import LogitEdits, check_edits, edit_logits_ref
from tritonllm.kernels.random import STREAM_GROUP, STREAM_TOKEN, gumbel
from tritonllm.kernels.registry import register_op
from tritonllm.kernels.sampling_common import (
    GROUP,
    MIN_TEMPERATURE,
    clean_ref,
    draw_ref,
    first_max,
    keep,
    keep_ref,
    load_logits,
    load_scan,
    scale_of,
    scale_ref,
    weight,
)
from tritonllm.kernels.sampling_draw import draw_rows
from tritonllm.kernels.truncation import is_limited, limits_ref, load_limits, search_limits

_UNSETTLED = tl.constexpr(-1)  # in place of a token


@triton.jit
def _draw_listed(
    p_row,
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
        b_logit, b_id = load_listed(p_row, p_list, first, n_listed, V, TILE)
        b_kept = tl.where(keep(b_logit, b_id, threshold, last_tie), weight(b_logit, top, scale), 0.0)
        b_at = first + tl.arange(0, TILE)
        b_group = tl.load(p_list + b_at, mask=b_at < n_listed, other=0)
        b_score = tl.log2(tl.sum(b_kept, axis=1)) + gumbel(b_group, seed, step, STREAM_GROUP)
        m_better = b_score > b_best
        b_best = tl.where(m_better, b_score, b_best)
        b_best_group = tl.where(m_better, b_group, b_best_group)
    b_token = first_max(b_best, b_best_group) * GROUP + tl.arange(0, GROUP)
    b_x = load_logits(p_row, b_token, b_token < V)
    b_token_score = (b_x - top) * scale + gumbel(b_token, seed, step, STREAM_TOKEN)
    return first_max(tl.where(keep(b_x, b_token, threshold, last_tie), b_token_score, float("-inf")), b_token)


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
    max_ptr,  # [B * N, n_groups]
    sum_ptr,  # [B * N, n_groups]
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
        _b_group, b_max, b_sum = load_scan(max_ptr, sum_ptr, row, n_groups, NG)
        scale = scale_of(temperature)
        top = tl.max(b_max)
        token = tl.zeros((), tl.int32)
        if top > float("-inf"):
            if SEARCH:
                whole = tl.sum(b_sum * weight(b_max, top, scale))
                threshold, last_tie, _kept = search_limits(
                    *(p_row, p_list, p_buffer, V, n_groups, b_max, whole, top, scale, top_k, top_p, min_p),
                    *(NG, CAPACITY, TILE),
                )
                token = _draw_listed(
                    p_row, p_list, V, n_groups, b_max, top, scale, threshold, last_tie, seed, step, NG, TILE
                )
            else:
                found, threshold, last_tie, _kept, _whole = limit_candidates(
                    p_row, p_list, p_buffer, V, n_groups, b_max, b_sum, top, scale, top_k, top_p, min_p, NG, TILE
                )
                token = tl.full((), _UNSETTLED, tl.int32)
                if found > 0:
                    token = draw_candidate(p_buffer, found, top, scale, threshold, last_tie, seed, step)
        tl.store(out_ptr + row, token.to(tl.int64))


def candidates_config(vocab: int) -> tuning.Config:
    """Up to 64 groups give candidates. A constant: a row's sums, hence its result, depend on it."""
    groups = triton.next_power_of_2(triton.cdiv(vocab, GROUP.value))
    return {"CAPACITY": 2 * SMALL.value, "TILE": min(64, groups), "num_warps": 8}


def default_config(vocab: int) -> tuning.Config:
    """A row that is searched holds ``CAPACITY`` logits in registers: 32 for each of 256 threads.

    The batch is no part of the key: a row's sums, hence its result, must not depend on it. ``maxnreg``: left to itself,
    the assembler rather spills a few registers than takes more than 80 for the smallest vocabularies.
    """
    groups = triton.next_power_of_2(triton.cdiv(vocab, GROUP.value))
    capacity = min(8192, max(2 * SMALL.value, triton.next_power_of_2(vocab)))
    return {"CAPACITY": capacity, "TILE": min(32, groups), "num_warps": 8, "maxnreg": 255}


def log_weights_ref(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
) -> torch.Tensor:
    """``[B, V]`` float32: log2 of what a row that is not greedy draws from, up to a constant; -inf if excluded."""
    x, scale = clean_ref(logits), scale_ref(temperature)
    threshold, last_tie, _ = limits_ref(x, scale, top_k, top_p, min_p)
    log_weights = (x - x.amax(-1, keepdim=True)) * scale[:, None]
    excluded = ~keep_ref(x, threshold, last_tie) | (x == -torch.inf)  # a row of -inf is left with nothing
    return log_weights.masked_fill(excluded, -torch.inf)


def sample_rows(
    logits: torch.Tensor,
    parameters: Sequence[torch.Tensor | None],
    seats: torch.Tensor | None,
    edits: LogitEdits | None,
    workspace: torch.Tensor | None,
    out: torch.Tensor,
    offsets: torch.Tensor | None = None,
) -> None:
    """What :func:`sample` launches, for ``[B, N, V]``: see ``sampling_draw.draw_rows``."""
    batch, positions, vocab = logits.shape
    rows, device = batch * positions, logits.device
    if rows == 0:
        return
    group_max, group_sum = draw_rows(logits, parameters, seats, edits, workspace, out, offsets)
    if all(limit is None for limit in parameters[1:4]):
        return
    n_groups = group_max.shape[1]
    config = tuning.get_config("sample", device, default_config, vocab=vocab)
    groups = torch.empty(rows, n_groups, dtype=torch.int32, device=device)
    buffer = torch.empty(rows, config["CAPACITY"], dtype=torch.float32, device=device)
    scratch = (group_max, group_sum, groups, buffer)
    sizes = (vocab, n_groups, positions, *logits.stride()[:2])
    given = (logits, *parameters, offsets, *scratch, out, *sizes)
    flags = {"NG": triton.next_power_of_2(n_groups), **dependent_launch(device)}
    _limited_kernel[(rows,)](*given, SEARCH=False, **flags, **candidates_config(vocab))
    _limited_kernel[(rows,)](*given, SEARCH=True, **flags, **config)


def _reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    seeds: torch.Tensor,
    steps: torch.Tensor,
    workspace: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    torch.argmax(clean_ref(logits), -1, out=out)
    rows = (temperature >= MIN_TEMPERATURE.value).nonzero()[:, 0]
    if rows.numel():
        limits = (None if t is None else t[rows] for t in (top_k, top_p, min_p))
        log_weights = log_weights_ref(logits[rows], temperature[rows], *limits)
        out[rows] = draw_ref(log_weights, seeds[rows], steps[rows], STREAM_GROUP.value, STREAM_TOKEN.value)


@register_op(mutates=("workspace", "out"), reference=_reference)
def _sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    seeds: torch.Tensor,
    steps: torch.Tensor,
    workspace: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    parameters = (temperature, top_k, top_p, min_p, seeds, steps)
    sample_rows(logits.unsqueeze(1), parameters, None, None, workspace, out)


def _edited_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    seeds: torch.Tensor,
    steps: torch.Tensor,
    workspace: torch.Tensor | None,
    out: torch.Tensor,
    seats: torch.Tensor,
    edits: Sequence[torch.Tensor],
) -> None:
    logits.copy_(edit_logits_ref(logits, LogitEdits(*edits), seats, steps))
    _reference(logits, temperature, top_k, top_p, min_p, seeds, steps, workspace, out)


@register_op(mutates=("logits", "workspace", "out"), reference=_edited_reference)
def _sample_edited(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    seeds: torch.Tensor,
    steps: torch.Tensor,
    workspace: torch.Tensor | None,
    out: torch.Tensor,
    seats: torch.Tensor,
    edits: Sequence[torch.Tensor],
) -> None:
    parameters = (temperature, top_k, top_p, min_p, seeds, steps)
    sample_rows(logits.unsqueeze(1), parameters, seats, LogitEdits(*edits), workspace, out)


def check_parameters(
    batch: int,
    like: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    seeds: torch.Tensor,
    steps: torch.Tensor,
) -> None:
    """Check the tensors that hold one value for each sequence."""
    for name, t, dtype in (
        ("temperature", temperature, torch.float32),
        ("top_k", top_k, torch.int32),
        ("top_p", top_p, torch.float32),
        ("min_p", min_p, torch.float32),
        ("seeds", seeds, torch.int64),
        ("steps", steps, torch.int64),
    ):
        if t is not None:
            check_tensor(name, t, (batch,), dtype=dtype, like=like)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    seeds: torch.Tensor,
    steps: torch.Tensor,
    *,
    edits: LogitEdits | None = None,
    seats: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw one token for each row.

    A row's token depends on its logits, parameters, seed and step only: not on the batch or its place in it. A token of
    -inf or NaN is never drawn; a row with nothing else gives token 0. One of +inf is drawn before all others. The
    values of the parameters are on the device and are not checked: those outside the ranges below mean no limit, or the
    nearest valid one. Rows without limits or edits do not pay for those of others.

    Args:
        logits: ``[B, V]`` float16, bfloat16 or float32; contiguous in the last dimension, any row stride. Rows
            with a seat are overwritten with what the edits make of them; others do not change.
        temperature: ``[B]`` float32; below 1e-5 the argmax is taken, the lowest id among equals.
        top_k: ``[B]`` int32: how many logits to keep; 0, -1 or V and more keep all. ``None``: no row has one.
        top_p: ``[B]`` float32 in (0, 1]; 1 keeps all. ``None``: no row has one.
        min_p: ``[B]`` float32 in [0, 1], relative to the largest probability; 0 keeps all. ``None``: no row has one.
        seeds: ``[B]`` int64, the sequence's own.
        steps: ``[B]`` int64, the number of the token in its sequence.
        edits: penalties, biases, bans and allowed tokens of requests, applied before all else. Needs float32 logits.
        seats: ``[B]`` int32 with ``edits``: the row's place in them; negative for none.
        workspace: at least ``[B]`` int32 zeros, and zeros again afterwards: saves the launch that makes them. Calls
            that may run at the same time need one each.
        out: ``[B]`` int64 to write into.

    Returns:
        ``[B]`` int64: ``out``, or a new tensor.

    Raises:
        ValueError: a wrong shape, dtype or device, an empty vocabulary, or only one of ``edits`` and ``seats``.
    """
    check_tensor("logits", logits, ("B", "V"))
    batch, vocab = logits.shape
    require(vocab > 0, "logits must have at least one column (the vocabulary is empty)")
    check_parameters(batch, logits, temperature, top_k, top_p, min_p, seeds, steps)
    require((edits is None) == (seats is None), "edits and seats must be given together")
    if edits is not None and seats is not None:
        check_edits(edits, seats, logits)
    if workspace is not None:
        check_tensor("workspace", workspace, ("B",), dtype=torch.int32, like=logits)
        require(len(workspace) >= batch, f"workspace must have at least {batch} elements, got {len(workspace)}")
    if out is None:
        out = torch.empty(batch, dtype=torch.int64, device=logits.device)
    check_tensor("out", out, (batch,), dtype=torch.int64, like=logits)
    given = (logits, temperature, top_k, top_p, min_p, seeds, steps, workspace, out)
    if edits is not None and seats is not None:
        _sample_edited(*given, seats, list(edits))
    else:
        _sample(*given)
    return out


def sample_ref(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    seeds: torch.Tensor,
    steps: torch.Tensor,
    *,
    edits: LogitEdits | None = None,
    seats: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """:func:`sample` in plain torch, with the same noise: equal ids but where two scores are within rounding."""
    if out is None:
        out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    given = (logits, temperature, top_k, top_p, min_p, seeds, steps, workspace, out)
    if edits is not None and seats is not None:
        _edited_reference(*given, seats, list(edits))
    else:
        _reference(*given)
    return out

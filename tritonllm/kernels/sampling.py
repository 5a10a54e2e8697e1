"""One token for each row of logits: temperature, min-p, top-k, top-p, with one noise for each seed and step.

The order is vLLM's: divide by the temperature, drop tokens less likely than min_p times the likeliest, keep the top_k
largest, keep the shortest beginning of those that holds top_p of their probability, draw. Ties at an edge go to the
lower ids, so exactly ``top_k`` tokens stay, and ``top_k=1`` is the argmax.

Two launches, whatever the rows ask for. The first reads the logits once and leaves one maximum and one weight for each
group of 128 tokens; the second gives one program to each row. It picks a group and then a token by the Gumbel-max trick
(`sampling_common`); for a truncated row it finds the limits first (`truncation`), reading again the few groups that
matter. Floor: the bytes of the logits over the memory bandwidth, 36 us for [256, 151936] float32 on an H200.
"""

import torch
import triton
import triton.language as tl

from tritonllm.kernels import tuning
from tritonllm.kernels.checks import check_tensor, require
from tritonllm.kernels.random import STREAM_GROUP, STREAM_TOKEN, gumbel
from tritonllm.kernels.registry import register_op
from tritonllm.kernels.sampling_common import (
    GROUP,
    MIN_TEMPERATURE,
    argmax_token,
    clean_ref,
    draw_ref,
    first_max,
    keep,
    keep_ref,
    load_logits,
    load_scan,
    scale_of,
    scale_ref,
    scan,
    weight,
)
from tritonllm.kernels.truncation import find_limits, is_limited, limits_ref, list_groups, load_limits, load_listed


@triton.jit
def _draw_group(
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
    """The group drawn from what the limits keep: reads the groups that reach the threshold."""
    n_listed = list_groups(p_list, b_max, n_groups, threshold, NG)
    b_best = tl.full([TILE], float("-inf"), tl.float32)
    b_best_group = tl.zeros([TILE], tl.int32)
    for first in range(0, n_listed, TILE):
        b_x, b_token = load_listed(p_row, p_list, first, n_listed, V, TILE)
        b_kept = tl.where(keep(b_x, b_token, threshold, last_tie), weight(b_x, top, scale), 0.0)
        b_at = first + tl.arange(0, TILE)
        b_group = tl.load(p_list + b_at, mask=b_at < n_listed, other=0)
        b_score = tl.log2(tl.sum(tl.reshape(b_kept, [TILE, GROUP]), axis=1)) + gumbel(b_group, seed, step, STREAM_GROUP)
        m_better = b_score > b_best
        b_best = tl.where(m_better, b_score, b_best)
        b_best_group = tl.where(m_better, b_group, b_best_group)
    return first_max(b_best, b_best_group)


@triton.jit
def _sample_kernel(
    logits_ptr,  # [B, V]
    temperature_ptr,  # [B]
    top_k_ptr,  # [B] or None
    top_p_ptr,  # [B] or None
    min_p_ptr,  # [B] or None
    seeds_ptr,  # [B]
    steps_ptr,  # [B]
    max_ptr,  # [B, n_groups]
    sum_ptr,  # [B, n_groups]
    list_ptr,  # scratch [B, n_groups]
    buffer_ptr,  # scratch [B, CAPACITY]
    out_ptr,  # [B]
    V,
    n_groups,
    stride_logits,
    NG: tl.constexpr,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    p_row = logits_ptr + row * stride_logits
    p_list = list_ptr + row * n_groups
    b_group, b_max, b_sum = load_scan(max_ptr, sum_ptr, row, n_groups, NG)
    temperature = tl.load(temperature_ptr + row)
    top_k, top_p, min_p = load_limits(top_k_ptr, top_p_ptr, min_p_ptr, row)
    seed, step = tl.load(seeds_ptr + row), tl.load(steps_ptr + row)
    scale = scale_of(temperature)
    top = tl.max(b_max)
    if (temperature >= MIN_TEMPERATURE) & (top > float("-inf")):
        threshold = tl.full((), float("-inf"), tl.float32)
        last_tie = tl.full((), V, tl.int32)
        if is_limited(V, top_k, top_p, min_p):
            p_buffer = buffer_ptr + row * CAPACITY
            threshold, last_tie, _ = find_limits(
                p_row, p_list, p_buffer, V, n_groups, b_max, b_sum, top, scale, top_k, top_p, min_p, NG, CAPACITY, TILE
            )
            group = _draw_group(
                p_row, p_list, V, n_groups, b_max, top, scale, threshold, last_tie, seed, step, NG, TILE
            )
        else:
            b_score = (b_max - top) * scale + tl.log2(b_sum) + gumbel(b_group, seed, step, STREAM_GROUP)
            group = first_max(b_score, b_group)
        b_token = group * GROUP + tl.arange(0, GROUP)
        b_x = load_logits(p_row, b_token, b_token < V)
        b_score = (b_x - top) * scale + gumbel(b_token, seed, step, STREAM_TOKEN)
        token = first_max(tl.where(keep(b_x, b_token, threshold, last_tie), b_score, float("-inf")), b_token)
    else:
        token = argmax_token(p_row, b_max, b_group, V)
    tl.store(out_ptr + row, token.to(tl.int64))


def default_config(vocab: int) -> tuning.Config:
    """``CAPACITY`` logits of a truncated row are searched in registers: 16 for each of 512 threads.

    The batch is no part of the key: a row's sums, hence its result, must not depend on it.
    """
    groups = triton.cdiv(vocab, GROUP.value)
    capacity = min(8192, max(512, triton.next_power_of_2(vocab)))
    warps = max(4, capacity // 512)
    return {"CAPACITY": capacity, "TILE": min(4 * warps, triton.next_power_of_2(groups)), "num_warps": warps}


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


def _reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    seeds: torch.Tensor,
    steps: torch.Tensor,
    out: torch.Tensor,
) -> None:
    torch.argmax(clean_ref(logits), -1, out=out)
    rows = (temperature >= MIN_TEMPERATURE.value).nonzero()[:, 0]
    if rows.numel():
        limits = (None if t is None else t[rows] for t in (top_k, top_p, min_p))
        log_weights = log_weights_ref(logits[rows], temperature[rows], *limits)
        out[rows] = draw_ref(log_weights, seeds[rows], steps[rows], STREAM_GROUP.value, STREAM_TOKEN.value)


@register_op(mutates=("out",), reference=_reference)
def _sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    seeds: torch.Tensor,
    steps: torch.Tensor,
    out: torch.Tensor,
) -> None:
    batch, vocab = logits.shape
    if batch == 0:
        return
    group_max, group_sum = scan(logits.unsqueeze(1), temperature)
    n_groups = group_max.shape[1]
    config = tuning.get_config("sample", logits.device, default_config, vocab=vocab)
    scratch_rows = 0 if top_k is None and top_p is None and min_p is None else batch
    groups = torch.empty(scratch_rows, n_groups, dtype=torch.int32, device=logits.device)
    buffer = torch.empty(scratch_rows, config["CAPACITY"], dtype=torch.float32, device=logits.device)
    parameters = (temperature, top_k, top_p, min_p, seeds, steps)
    scratch = (group_max, group_sum, groups, buffer)
    sizes = (vocab, n_groups, logits.stride(0))
    pow2_groups = triton.next_power_of_2(n_groups)
    _sample_kernel[(batch,)](logits, *parameters, *scratch, out, *sizes, NG=pow2_groups, **config)


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
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw one token for each row.

    A row's token depends on its logits, parameters, seed and step only: not on the batch or its place in it. A token of
    -inf or NaN is never drawn; a row with nothing else gives token 0. The values of the parameters are on the device
    and are not checked: those outside the ranges below mean no limit, or the nearest valid one.

    Args:
        logits: ``[B, V]`` float16, bfloat16 or float32; contiguous in the last dimension, any row stride.
        temperature: ``[B]`` float32; below 1e-5 the argmax is taken, the lowest id among equals.
        top_k: ``[B]`` int32: how many logits to keep; 0, -1 or V and more keep all. ``None``: no row has one.
        top_p: ``[B]`` float32 in (0, 1]; 1 keeps all. ``None``: no row has one.
        min_p: ``[B]`` float32 in [0, 1], relative to the largest probability; 0 keeps all. ``None``: no row has one.
        seeds: ``[B]`` int64, the sequence's own.
        steps: ``[B]`` int64, the number of the token in its sequence.
        out: ``[B]`` int64 to write into.

    Returns:
        ``[B]`` int64: ``out``, or a new tensor.

    Raises:
        ValueError: a wrong shape, dtype or device, or an empty vocabulary.
    """
    check_tensor("logits", logits, ("B", "V"))
    batch, vocab = logits.shape
    require(vocab > 0, "logits must have at least one column (the vocabulary is empty)")
    check_parameters(batch, logits, temperature, top_k, top_p, min_p, seeds, steps)
    if out is None:
        out = torch.empty(batch, dtype=torch.int64, device=logits.device)
    check_tensor("out", out, (batch,), dtype=torch.int64, like=logits)
    _sample(logits, temperature, top_k, top_p, min_p, seeds, steps, out)
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
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """:func:`sample` in plain torch, with the same noise: equal ids but where two scores are within rounding."""
    if out is None:
        out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    _reference(logits, temperature, top_k, top_p, min_p, seeds, steps, out)
    return out

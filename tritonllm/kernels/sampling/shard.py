"""One token for each row of logits whose columns lie on several ranks, without bringing them together.

The draw of `sample` is a maximum over noisy groups of 128 tokens (`common.py`), and the noise belongs to a group's or a
token's number. So each rank draws from its own columns with the noise of their numbers in the whole vocabulary, and the
best of these draws is the draw from all: the same token that `sample` takes on one device. A row sends 16 bytes
to each rank, where its logits are 4 a token.

This is for rows with a temperature and nothing else. What `top_k`, `top_p` and `min_p` leave is a matter of the whole
row: `shard_limits.py` draws such rows again.

The bits of a group's sum are the same in both if the rows of the whole vocabulary and those of the shards begin at
multiples of 16 columns. Otherwise Triton gives the group's columns to other threads (8 with 4 of each 32, or 32 with
one), and sums have another order: of 9,600 draws none was another token, but one can be.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tritonllm.kernels.runtime.checks import check_tensor, require
from tritonllm.kernels.runtime.dependent_launch import dependent_launch, let_next_start, wait_for_previous
from tritonllm.kernels.runtime.random import STREAM_GROUP, STREAM_TOKEN
from tritonllm.kernels.runtime.registry import register_op, with_reference
from tritonllm.kernels.sampling.common import (
    FLOAT_MAX,
    GROUP,
    MIN_TEMPERATURE,
    clean_ref,
    first_best,
    load_scan,
    scale_of,
    scale_ref,
    scan,
    scored_draw_ref,
)
from tritonllm.kernels.sampling.draw import draw_of_group, group_score

SHARD_UNIT = GROUP.value  # tokens: a shard begins at a multiple of it
ROW_UNIT = 16  # columns: Triton deals a group out to other threads where rows do not begin at multiples of it
SCORE, TOKEN = 0, 1  # columns of what a shard draws


@triton.jit(do_not_specialize=["first", "n_groups"])
def _shard_kernel(
    logits_ptr,  # [R, V]
    temperature_ptr,  # [R]
    seeds_ptr,  # [R]
    steps_ptr,  # [R]
    max_ptr,  # [R, n_groups]
    sum_ptr,  # [R, n_groups]
    out_ptr,  # [R, 2] float64
    first,
    V,
    n_groups,
    stride,
    NG: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    seed, step = tl.load(seeds_ptr + row), tl.load(steps_ptr + row)
    is_random = temperature >= MIN_TEMPERATURE  # false for NaN
    scale = tl.where(is_random, scale_of(temperature), 1.0)
    b_mine, b_max, b_sum = load_scan(max_ptr, sum_ptr, row, n_groups, NG)
    b_group = b_mine + first // GROUP
    b_score = b_max.to(tl.float64)
    if is_random:
        b_noisy = group_score(b_max, b_sum, scale, b_group, seed, step)
        b_score = tl.where(b_mine < n_groups, b_noisy, float("-inf"))
    best, group = first_best(b_score, b_group)
    # Tokens have their numbers in the whole vocabulary: the row begins so many before the shard
    p_row = logits_ptr + row * stride - first
    token = draw_of_group(p_row, group, first + V, scale, is_random, seed, step)
    tl.store(out_ptr + row * 2, best)
    tl.store(out_ptr + row * 2 + 1, token.to(tl.float64))


class Found(NamedTuple):
    """Where :func:`sample_shard` leaves what it found of the groups, for :func:`sample_limited_shards`.

    Attributes:
        group_max: ``[R, G]`` float32, contiguous, of at least the shard's groups of 128 columns: their largest logits.
        group_sum: as ``group_max``, the groups' weights relative to those.
    """

    group_max: torch.Tensor | None = None
    group_sum: torch.Tensor | None = None


def _shard_ref(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    steps: torch.Tensor,
    out: torch.Tensor,
    first: int,
    found: Found,
) -> None:
    x, scale = clean_ref(logits), scale_ref(temperature)
    if found.group_max is not None and found.group_sum is not None:
        padded = torch.nn.functional.pad(x, (0, found.group_max.shape[1] * GROUP.value - x.shape[1]), value=-torch.inf)
        groups = padded.view(len(x), -1, GROUP.value)
        found.group_max.copy_(groups.amax(-1))
        top = groups.amax(-1, keepdim=True).clamp_min(-FLOAT_MAX.value)
        found.group_sum.copy_(torch.exp2((groups - top) * scale[:, None, None]).sum(-1))
    out[:, SCORE], out[:, TOKEN] = x.amax(-1), x.argmax(-1) + first
    rows = (temperature >= MIN_TEMPERATURE.value).nonzero()[:, 0]
    if rows.numel():
        x, scale = x[rows], scale[rows]
        top = x.amax(-1).clamp_min(-FLOAT_MAX.value)
        log_weights = ((x - top[:, None]) * scale[:, None]).masked_fill(x == -torch.inf, -torch.inf)
        streams = STREAM_GROUP.value, STREAM_TOKEN.value
        score, token = scored_draw_ref(log_weights, seeds[rows], steps[rows], *streams, first)
        out[rows, SCORE] = top.double() * scale.double() + score.double()
        out[rows, TOKEN] = token.double()


@register_op(mutates=("out", "group_max", "group_sum"), reference=_shard_ref)
def _sample_shard(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    steps: torch.Tensor,
    out: torch.Tensor,
    first: int,
    found: Found,
) -> None:
    rows, vocab = logits.shape
    if rows == 0:
        return
    group_max, group_sum = found
    kept = None if group_max is None or group_sum is None else (group_max, group_sum)
    scanned = scan(logits.unsqueeze(1), temperature, kept)
    n_groups = scanned[0].shape[1]
    flags = {"NG": triton.next_power_of_2(n_groups)} | dependent_launch(logits.device)
    given = logits, temperature, seeds, steps, *scanned, out
    _shard_kernel[(rows,)](*given, first, vocab, n_groups, logits.stride(0), **flags)


@triton.jit
def _best_kernel(
    drawn_ptr,  # [shards, R, 2] float64
    out_ptr,  # [R]
    rows,
    shards,
    SHARDS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    b_shard = tl.arange(0, SHARDS)
    m_shard = b_shard < shards
    p_drawn = drawn_ptr + (b_shard.to(tl.int64) * rows + row) * 2
    b_score = tl.load(p_drawn, mask=m_shard, other=float("-inf"))
    b_token = tl.load(p_drawn + 1, mask=m_shard, other=float("inf"))
    best, token = first_best(b_score, b_token)
    tl.store(out_ptr + row, tl.where(best > float("-inf"), token, 0.0).to(tl.int64))


def _best_ref(drawn: torch.Tensor, out: torch.Tensor) -> None:
    score, token = drawn.unbind(-1)
    best = score.amax(0)
    lowest = token.masked_fill(score != best, torch.inf).amin(0)
    out.copy_(torch.where(best > -torch.inf, lowest, 0.0))


@register_op(mutates=("out",), reference=_best_ref)
def _best_of_shards(drawn: torch.Tensor, out: torch.Tensor) -> None:
    shards, rows, _ = drawn.shape
    if rows:
        flags = {"SHARDS": triton.next_power_of_2(shards), "num_warps": 1} | dependent_launch(drawn.device)
        _best_kernel[(rows,)](drawn, out, rows, shards, **flags)


def sample_shard(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    steps: torch.Tensor,
    *,
    first: int,
    out: torch.Tensor | None = None,
    found: Found = Found(),  # noqa: B008 (a tuple, which nobody can change)
) -> torch.Tensor:
    """Draw from some columns of rows of logits, so that the best of all columns' draws is :func:`sample`'s (where all
    rows are aligned to ``ROW_UNIT``, to the last bit of a score).

    Values out of range, NaN and infinite logits count as in :func:`sample`.

    Args:
        logits: ``[R, V]`` float16, bfloat16 or float32, the shard's V columns; contiguous in the last dimension, any
            row stride.
        temperature: ``[R]`` float32; below 1e-5 the argmax is taken, the lowest id among equals.
        seeds: ``[R]`` int64, the sequence's own.
        steps: ``[R]`` int64, the number of the token in its sequence.
        first: the token of the first column, a multiple of ``SHARD_UNIT`` (128).
        out: ``[R, 2]`` float64 to write into, contiguous.
        found: where the groups' maxima and weights are to be left; by default nowhere.

    Returns:
        ``[R, 2]`` float64, ``out`` or a new tensor: how good the shard's best token is, and that token's number in the
        whole vocabulary. For :func:`best_of_shards`.

    Raises:
        ValueError: a wrong shape, dtype or device, no columns, or a shard that begins elsewhere.
    """
    check_tensor("logits", logits, ("R", "V"))
    rows, vocab = logits.shape
    require(vocab > 0, "logits must have at least one column (the shard is empty)")
    whole = first >= 0 and first % SHARD_UNIT == 0
    require(whole, f"first must be a multiple of {SHARD_UNIT} and not negative, got {first}")
    check_tensor("temperature", temperature, (rows,), dtype=torch.float32, like=logits)
    for name, t in (("seeds", seeds), ("steps", steps)):
        check_tensor(name, t, (rows,), dtype=torch.int64, like=logits)
    if out is None:
        out = torch.empty(rows, 2, dtype=torch.float64, device=logits.device)
    check_drawn("out", out, (rows, 2), logits)
    require((found.group_max is None) == (found.group_sum is None), "found must have both tensors, or neither")
    for name, kept in zip(Found._fields, found, strict=True):
        if kept is not None:
            check_tensor(name, kept, (rows, "G"), dtype=torch.float32, like=logits)
            fits = kept.is_contiguous() and kept.shape[1] >= triton.cdiv(vocab, GROUP.value)
            require(fits, f"{name} must be contiguous, with a column or more for each {GROUP.value} of {vocab}")
    _sample_shard(logits, temperature, seeds, steps, out, first, *found)
    return out


def best_of_shards(drawn: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """The tokens that N shards together have drawn for R rows.

    Args:
        drawn: ``[N, R, 2]`` float64, contiguous: of each shard what :func:`sample_shard` returned, in any order.
        out: ``[R]`` int64 to write into, contiguous.

    Returns:
        ``[R]`` int64, ``out`` or a new tensor: of each row the best shard's token, the lowest one among equals, and 0
        if no shard has any.

    Raises:
        ValueError: a wrong shape, dtype or device, or no shards.
    """
    require(drawn.dim() == 3, f"drawn must have three dimensions, got {drawn.dim()}")
    shards, rows, _ = drawn.shape
    require(shards > 0, "drawn must be of at least one shard")
    check_drawn("drawn", drawn, (shards, rows, 2), drawn)
    if out is None:
        out = torch.empty(rows, dtype=torch.int64, device=drawn.device)
    check_tensor("out", out, (rows,), dtype=torch.int64, like=drawn)
    require(out.is_contiguous(), "out must be contiguous")
    _best_of_shards(drawn, out)
    return out


def check_drawn(name: str, x: torch.Tensor, shape: tuple[int, ...], like: torch.Tensor) -> None:
    """Check a tensor that holds what shards draw.

    Raises:
        ValueError: ``x`` cannot hold what shards draw.
    """
    check_tensor(name, x, shape, dtype=torch.float64, like=like)
    require(x.is_contiguous(), f"{name} must be contiguous")


sample_shard_ref = with_reference(sample_shard)
best_of_shards_ref = with_reference(best_of_shards)

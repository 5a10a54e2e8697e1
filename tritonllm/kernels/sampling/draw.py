"""The pass over the logits of `sample`: it draws for rows without limits, and describes the groups of the others.

A program takes a stretch of a row. It reduces each group of 128 logits (`common.py`), adds the groups' noise, and
notes its best group. The program that ends last in a row, found by counting in the workspace, takes the best of them,
reads it again and draws a token of it. So one launch reads a row once, and nothing else grows with the vocabulary.

Groups are compared by largest * scale + log2(weight) + noise in float64: exact to 1e-15, so the row's own maximum,
which no program knows, need not be subtracted, and the result does not depend on who takes which part.
"""

import torch
import triton
import triton.language as tl

from tritonllm.config.sampling_rows import SamplingRows
from tritonllm.kernels.runtime import chip, tuning
from tritonllm.kernels.runtime.dependent_launch import dependent_launch, let_next_start, wait_for_previous
from tritonllm.kernels.runtime.random import STREAM_GROUP, STREAM_TOKEN, gumbel
from tritonllm.kernels.sampling.common import (
    FLOAT_MAX,
    GROUP,
    MIN_TEMPERATURE,
    RUN,
    first_best,
    first_max,
    load_logits,
    load_run,
    reduce_runs,
    scale_of,
)
from tritonllm.kernels.sampling.edits import LogitEdits, edit_run, entries_between
from tritonllm.kernels.sampling.masks import (
    NO_MASKS,
    MaybeMasks,
    allowed_tokens,
    ban_groups,
    load_allowed_run,
    mask_of_row,
)
from tritonllm.kernels.sampling.truncation import is_limited, load_limits


@triton.jit
def group_score(b_max, b_sum, scale, b_group, seed, step):
    """float64: log2 of each group's weight, up to a constant, plus its noise."""
    b_noise = tl.log2(b_sum) + gumbel(b_group, seed, step, STREAM_GROUP)
    return b_max.to(tl.float64) * scale.to(tl.float64) + b_noise.to(tl.float64)


@triton.jit
def draw_of_group(p_row, group, V, scale, is_random, seed, step, mask=None):
    """The token drawn from one group."""
    b_token = group * GROUP + tl.arange(0, GROUP)
    m_token = b_token < V
    if mask is not None:
        m_token &= allowed_tokens(mask, b_token)
    b_x = load_logits(p_row, b_token, m_token)
    b_score = b_x
    if is_random:
        b_noise = gumbel(b_token, seed, step, STREAM_TOKEN)
        b_score = (b_x - tl.maximum(tl.max(b_x), -FLOAT_MAX)) * scale + b_noise
    return first_max(b_score, b_token)


@triton.jit
def _edit_groups(
    p_row,
    first_group,
    V,
    edits,
    seat,
    step,
    GROUPS: tl.constexpr,
    TILES: tl.constexpr,
    ENTRIES: tl.constexpr,
    LONGEST: tl.constexpr,
):
    """Edit a stretch of the row in place. Run by run: rows without a seat would pay for more registers than that."""
    first, end = first_group * GROUP, (first_group + GROUPS * TILES) * GROUP
    lo, hi = entries_between(edits, seat, first, end, ENTRIES)
    for tile in range(TILES):
        b_group = first_group + tile * GROUPS + tl.arange(0, GROUPS)
        for run in range(GROUP // RUN):
            b_x = load_run(p_row, b_group, run, V)
            b_x = edit_run(b_x, b_group, run, V, edits, seat, step, lo, hi, ENTRIES, LONGEST)
            b_token = b_group[:, None] * GROUP + run * RUN + tl.arange(0, RUN)[None, :]
            tl.store(p_row + b_token, b_x, mask=b_token < V)
    tl.debug_barrier()  # the whole program reads it


@triton.jit
def _load_allowed(p_row, b_group, run, V, mask):
    return load_run(p_row, b_group, run, V) if mask is None else load_allowed_run(p_row, b_group, run, V, mask)


@triton.jit
def _load_tile(p_row, first_group, V, mask, GROUPS: tl.constexpr):
    """``GROUPS`` groups as their four runs, [GROUPS, RUN] each; -inf for what the mask bans, if there is one."""
    b_group = first_group + tl.arange(0, GROUPS)
    b_x0, b_x1 = _load_allowed(p_row, b_group, 0, V, mask), _load_allowed(p_row, b_group, 1, V, mask)
    return b_x0, b_x1, _load_allowed(p_row, b_group, 2, V, mask), _load_allowed(p_row, b_group, 3, V, mask)


@triton.jit
def _largest_group(p_row, b_x0, b_x1, b_x2, b_x3, first_group, V, mask, GROUPS: tl.constexpr, TILES: tl.constexpr):
    """The largest logit of a stretch, and the first group that has it. Threads compare what they loaded themselves.

    The first tile is loaded by the caller, before it knows which of the two functions it needs.
    """
    b_best = tl.full([GROUPS, RUN], float("-inf"), tl.float32)
    b_tile = tl.zeros([GROUPS, RUN], tl.int32)
    for tile in range(TILES):
        if tile > 0:
            b_x0, b_x1, b_x2, b_x3 = _load_tile(p_row, first_group + tile * GROUPS, V, mask, GROUPS)
        b_x = tl.maximum(tl.maximum(b_x0, b_x1), tl.maximum(b_x2, b_x3))
        b_tile = tl.where(b_x > b_best, tile, b_tile)
        b_best = tl.maximum(b_x, b_best)
    b_group = first_group + b_tile * GROUPS + tl.arange(0, GROUPS)[:, None]
    best, best_group = first_best(b_best, b_group)
    return best.to(tl.float64), best_group


@triton.jit
def _reduce_stretch(
    p_row, b_x0, b_x1, b_x2, b_x3, first_group, V, mask, scale, GROUPS: tl.constexpr, TILES: tl.constexpr
):
    """Maxima, weights and numbers of the groups of a stretch, [GROUPS, RUN]: four columns for each of 8 tiles.

    All threads that share a group get its sums. Here each keeps those of another tile (four columns are one thread's),
    so that what follows, the noise, is computed once a group, and not by all eight: it would take a third of the time.
    """
    tl.static_assert(TILES <= RUN // 4)
    b_tile = tl.arange(0, RUN)[None, :] // 4
    b_max = tl.full([GROUPS, RUN], float("-inf"), tl.float32)
    b_sum = tl.zeros([GROUPS, RUN], tl.float32)
    for tile in tl.static_range(TILES):
        if tile > 0:
            b_x0, b_x1, b_x2, b_x3 = _load_tile(p_row, first_group + tile * GROUPS, V, mask, GROUPS)
        b_tile_max, b_tile_sum = reduce_runs(b_x0, b_x1, b_x2, b_x3, scale)
        b_max = tl.where(b_tile == tile, b_tile_max[:, None], b_max)
        b_sum = tl.where(b_tile == tile, b_tile_sum[:, None], b_sum)
    return b_max, b_sum, first_group + b_tile * GROUPS + tl.arange(0, GROUPS)[:, None], b_tile < TILES


@triton.jit
def _finish_row(
    score_ptr, group_ptr, out_ptr, row, parts, p_row, V, mask, scale, is_random, seed, step, PARTS: tl.constexpr
):
    """The row's token, once all programs of the row have stored the best group of their stretch."""
    b_part = tl.arange(0, PARTS)
    b_part_best = tl.load(score_ptr + row * parts + b_part, mask=b_part < parts, other=float("-inf"))
    b_part_group = tl.load(group_ptr + row * parts + b_part, mask=b_part < parts, other=0)
    best, best_group = first_best(b_part_best, b_part_group)
    token = draw_of_group(p_row, best_group, V, scale, is_random, seed, step, mask)
    tl.store(out_ptr + row, tl.where(best > float("-inf"), token, 0).to(tl.int64))


@triton.jit(do_not_specialize=["n_masks"])
def _draw_kernel(
    logits_ptr,  # [B, N, V]
    temperature_ptr,  # [B]
    top_k_ptr,  # [B] or None
    top_p_ptr,  # [B] or None
    min_p_ptr,  # [B] or None
    seeds_ptr,  # [B]
    steps_ptr,  # [B]
    offsets_ptr,  # [B * N] or None
    seats_ptr,  # [B] or None
    edits,  # LogitEdits or None
    mask_rows_ptr,  # [B] or None
    bitmask_ptr,  # [n_masks, words] or None
    max_ptr,  # [B * N, n_groups]: of rows with limits
    sum_ptr,  # [B * N, n_groups]
    score_ptr,  # scratch [B * N, parts] float64
    group_ptr,  # scratch [B * N, parts]
    count_ptr,  # [B * N] int32 zeros, which they are again in the end
    out_ptr,  # [B * N]
    V,
    n_groups,
    positions,  # N
    parts,
    stride_b,
    stride_n,
    n_masks,
    words,
    GROUPS: tl.constexpr,
    TILES: tl.constexpr,
    PARTS: tl.constexpr,
    ENTRIES: tl.constexpr,
    LONGEST: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    let_next_start(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    seq, position = row // positions, row % positions
    p_row = logits_ptr + seq * stride_b + position * stride_n
    temperature = tl.load(temperature_ptr + seq)
    offset = position if offsets_ptr is None else tl.load(offsets_ptr + row)
    seed, step = tl.load(seeds_ptr + seq), tl.load(steps_ptr + seq) + offset
    is_random = temperature >= MIN_TEMPERATURE  # false for NaN
    scale = tl.where(is_random, scale_of(temperature), 1.0)
    top_k, top_p, min_p = load_limits(top_k_ptr, top_p_ptr, min_p_ptr, seq, "")
    has_limits = is_random & is_limited(V, top_k, top_p, min_p)
    if edits is not None:
        seat = tl.load(seats_ptr + seq).to(tl.int64)
        if seat >= 0:
            _edit_groups(p_row, part * TILES * GROUPS, V, edits, seat, step, GROUPS, TILES, ENTRIES, LONGEST)
    first_group = part * TILES * GROUPS
    best = tl.full((), float("-inf"), tl.float64)
    best_group = first_group
    mask = None if bitmask_ptr is None else mask_of_row(mask_rows_ptr, bitmask_ptr, seq, n_masks, words)
    b_x0, b_x1, b_x2, b_x3 = _load_tile(p_row, first_group, V, mask, GROUPS)
    if is_random:
        b_max, b_sum, b_group, m_group = _reduce_stretch(
            p_row, b_x0, b_x1, b_x2, b_x3, first_group, V, mask, scale, GROUPS, TILES
        )
        if has_limits:
            m_store = m_group & (b_group < n_groups) & (tl.arange(0, RUN)[None, :] % 4 == 0)
            tl.store(max_ptr + row * n_groups + b_group, b_max, mask=m_store)
            tl.store(sum_ptr + row * n_groups + b_group, b_sum, mask=m_store)
            if mask is not None:
                if mask[1] > 0:
                    ban_groups(p_row, first_group, V, mask, GROUPS, TILES)
        else:
            b_score = tl.where(m_group, group_score(b_max, b_sum, scale, b_group, seed, step), float("-inf"))
            best, best_group = first_best(b_score, b_group)
    else:
        best, best_group = _largest_group(p_row, b_x0, b_x1, b_x2, b_x3, first_group, V, mask, GROUPS, TILES)
    if has_limits == 0:
        tl.store(score_ptr + row * parts + part, best)
        tl.store(group_ptr + row * parts + part, best_group)
        tl.debug_barrier()  # both are stored before this program is counted
        if tl.atomic_add(count_ptr + row, 1) == parts - 1:
            tl.store(count_ptr + row, 0)
            _finish_row(score_ptr, group_ptr, out_ptr, row, parts, p_row, V, mask, scale, is_random, seed, step, PARTS)


def default_config(rows: int, vocab: int) -> tuning.Config:
    """A program takes 4 * num_warps groups at a time: 16 logits a thread, whose loads are all in flight at once.

    The ends of programs cost: 256 rows of 151936 take 43 us with 8 tiles a program, 46 with 4, 55 with 2 (H200). Fewer
    rows need more programs than that.
    """
    tiles = rows * triton.cdiv(vocab, GROUP.value) // 16  # of 4 warps
    return {"TILES": 8 if tiles >= 16384 else 4 if tiles >= 4096 else 2 if tiles >= 1024 else 1, "num_warps": 4}


def draw_rows(
    logits: torch.Tensor,
    parameters: SamplingRows[torch.Tensor],
    seats: torch.Tensor | None,
    edits: LogitEdits | None,
    workspace: torch.Tensor | None,
    out: torch.Tensor,
    offsets: torch.Tensor | None = None,
    masks: MaybeMasks = NO_MASKS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the pass.

    Args:
        logits: ``[B, N, V]``, contiguous in the last dimension; position n of a sequence draws with its step + n.
        parameters: temperature, top_k, top_p, min_p, seeds, steps as of `sample`, each ``[B]``.
        seats, edits: as of `sample`; need N = 1 and float32.
        workspace: at least ``[B * N]`` int32 zeros; ``None`` makes them.
        out: ``[B * N]`` int64: gets the tokens of rows without limits.
        offsets: ``[B, N]`` int32, contiguous: what each row adds to the sequence's step in place of its position.
        masks: the masks of the rows; need N = 1.

    Returns:
        For rows with limits, ``[B * N, ceil(V / 128)]`` twice, as of ``common.scan``.
    """
    (batch, positions, vocab), device = logits.shape, logits.device
    rows, n_groups = batch * positions, triton.cdiv(vocab, GROUP.value)
    most = triton.next_power_of_2(rows)  # kernels must not change between two powers, where nobody has warmed them up
    config = tuning.get_config("sample_draw", device, default_config, rows=most, vocab=vocab)
    if edits is not None and not chip.on_amd(device):  # left to itself, the assembler rather spills than takes so many
        config = config | {"maxnreg": 56}
    groups = 4 * config["num_warps"]  # a fixed ratio: the threads that share a group are always the same eight
    parts = triton.cdiv(n_groups, groups * config["TILES"])
    described = 0 if all(limit is None for limit in parameters.limits) else rows
    group_max = torch.empty(described, n_groups, dtype=torch.float32, device=device)
    group_sum = torch.empty_like(group_max)
    scores = torch.empty(rows, parts, dtype=torch.float64, device=device)
    best_groups = torch.empty(rows, parts, dtype=torch.int32, device=device)
    if workspace is None:
        workspace = torch.zeros(rows, dtype=torch.int32, device=device)
    _, entries, longest = (0, 1, 1) if edits is None else edits.entry_after.shape
    n_masks, words = (0, 0) if masks.bitmask is None else masks.bitmask.shape
    sizes = (vocab, n_groups, positions, parts, *logits.stride()[:2], n_masks, words)
    scratch = (group_max, group_sum, scores, best_groups, workspace)
    flags = {"PARTS": triton.next_power_of_2(parts), "ENTRIES": entries, "LONGEST": longest}
    # With dependent launch whatever the number of programs: each reads for longer than it takes to start the next
    _draw_kernel[(rows, parts)](
        *(logits, *parameters, offsets, seats, edits, *masks, *scratch, out, *sizes),
        **(config | flags | dependent_launch(device)),
        GROUPS=groups,
    )
    return group_max, group_sum

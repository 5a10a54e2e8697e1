"""For drafts with probabilities, each row's verdict: the draft, or the token in its place.

A program for each row works on what the scan of `sampling/common.py` left of it; of the logits it reads again the
groups that proposals fall in (`residual.py`). Rows beyond the first rejection are judged as well: they run beside it.
"""

import torch
import triton
import triton.language as tl

from tritonllm.config.sampling_rows import SamplingRows
from tritonllm.kernels.runtime import tuning
from tritonllm.kernels.runtime.dependent_launch import dependent_launch, let_next_start, wait_for_previous
from tritonllm.kernels.runtime.random import (
    STREAM_ACCEPT,
    STREAM_RESIDUAL_GROUP,
    STREAM_RESIDUAL_TOKEN,
    uniform,
    uniform_ref,
)
from tritonllm.kernels.sampling import (
    GROUP,
    MIN_TEMPERATURE,
    UNIFORM_SUMS,
    argmax_token,
    clean_ref,
    draw_of_group,
    draw_ref,
    find_row_limits,
    first_max,
    group_score,
    keep,
    keep_ref,
    limits_ref,
    load_logits,
    load_scan,
    scale_of,
    scale_ref,
    scan,
    weight,
    weight_ref,
)
from tritonllm.kernels.speculative.residual import REMNANT, draw_exhaustively, thin, thin_ref


@triton.jit
def _load_row_limits(limits, row, V, b_weight):
    """Threshold, last tie and weight of what stays of a row."""
    if limits is None:
        return float("-inf"), V, tl.sum(b_weight)
    else:
        return tl.load(limits.threshold + row), tl.load(limits.last_tie + row), tl.load(limits.total + row)


@triton.jit
def _is_accepted(p_row, p_probs, draft, position, top, scale, threshold, last_tie, total, seed, step):
    x, q = load_logits(p_row, draft, draft >= 0), tl.load(p_probs + draft).to(tl.float32)
    likely = tl.where(keep(x, draft, threshold, last_tie), weight(x, top, scale), 0.0)
    return uniform(position, seed, step, STREAM_ACCEPT) * q * total < likely


@triton.jit
def _judge_random(
    p_row,
    p_probs,
    p_max,
    p_sum,
    p_list,
    limits,
    row,
    position,
    draft,
    V,
    n_groups,
    b_group,
    b_max,
    b_sum,
    top,
    scale,
    seed,
    step,
    NG: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The verdict on a row that is drawn from: the draft, a proposal in its place, or what a draw of the row gives."""
    b_weight = b_sum * weight(b_max, top, scale)
    threshold, last_tie, total = _load_row_limits(limits, row, V, b_weight)
    has_draft = (draft >= 0) & (draft < V)
    token = tl.full((), -1, tl.int32)
    at = step + position
    if has_draft:
        if _is_accepted(p_row, p_probs, draft, position, top, scale, threshold, last_tie, total, seed, step):
            token = draft.to(tl.int32)
        else:
            token = thin(
                *(p_row, p_probs, p_max, p_sum, V, n_groups, b_weight, top, scale),
                *(threshold, last_tie, total, seed, at, NG),
            )
    if token < 0:
        if has_draft | (threshold > float("-inf")):
            token = draw_exhaustively(
                *(p_row, p_probs, p_list, V, n_groups, b_max, top, scale, threshold, last_tie, total),
                *(has_draft, seed, at, NG, WIDE),
            )
        else:
            b_score = group_score(b_max, b_sum, scale, b_group, seed, at)
            token = draw_of_group(p_row, first_max(b_score, b_group), V, scale, True, seed, at)
    return token


@triton.jit(do_not_specialize=["draft_ids_ptr", "G", "stride_draft"])
def _judge_kernel(
    logits_ptr,  # [B, G + 1, V]
    temperature_ptr,  # [B]
    seeds_ptr,  # [B]
    steps_ptr,  # [B]
    draft_ids_ptr,  # [B, G]
    draft_probs_ptr,  # [B, G, V]
    max_ptr,  # [B * (G + 1), n_groups]
    sum_ptr,  # [B * (G + 1), n_groups]
    list_ptr,  # scratch [B * (G + 1), n_groups]
    limits,  # RowLimits of B * (G + 1), or None
    tokens_ptr,  # [B * (G + 1)] int64
    V,
    n_groups,
    G,
    stride_logits_b,
    stride_logits_n,
    stride_draft,
    stride_probs_b,
    stride_probs_n,
    NG: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for each row: the draft if it is accepted, else the token in its place, as if the path came here."""
    wait_for_previous(PDL)
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    seq, position = row // (G + 1), row % (G + 1)
    p_row = logits_ptr + seq * stride_logits_b + position * stride_logits_n
    draft = tl.load(draft_ids_ptr + seq * stride_draft + position, mask=position < G, other=-1).to(tl.int64)
    b_group, b_max, b_sum = load_scan(max_ptr, sum_ptr, row, n_groups, NG)
    temperature = tl.load(temperature_ptr + seq)
    scale = scale_of(temperature)
    top = tl.max(b_max)
    if (temperature >= MIN_TEMPERATURE) & (top > float("-inf")):
        token = _judge_random(
            *(p_row, draft_probs_ptr + seq * stride_probs_b + position * stride_probs_n),
            *(max_ptr + row * n_groups, sum_ptr + row * n_groups, list_ptr + row * n_groups),
            *(limits, row, position, draft, V, n_groups, b_group, b_max, b_sum, top, scale),
            *(tl.load(seeds_ptr + seq), tl.load(steps_ptr + seq), NG, WIDE),
        )
    else:
        token = argmax_token(p_row, b_max, b_group, V)
    tl.store(tokens_ptr + row, token.to(tl.int64))


def default_config(vocab: int) -> tuning.Config:
    """A row that is read whole is so by ``WIDE`` groups at a time.

    ``maxnreg``: for two programs a multiprocessor. Left to itself the assembler takes 138 registers where rows have
    limits, which makes 320 rows 6 us slower (H200), and spills some of the 64 that it takes for small vocabularies.
    """
    groups = triton.next_power_of_2(triton.cdiv(vocab, GROUP.value))
    return {"WIDE": min(16, groups), "num_warps": 8, "maxnreg": 128}


def judge(
    draft_ids: torch.Tensor,
    draft_probs: torch.Tensor,
    target_logits: torch.Tensor,
    parameters: SamplingRows[torch.Tensor],
    tokens: torch.Tensor,
) -> None:
    """Write each row's token to ``tokens [B, G + 1]`` int64: the scan, the limits if there are any, the judges.

    ``parameters`` are temperature, top_k, top_p, min_p, seeds, steps; the others as of ``rejection_sample``.
    """
    batch, positions, vocab = target_logits.shape
    rows, device = batch * positions, target_logits.device
    group_max, group_sum = scan(target_logits, parameters.temperature)
    n_groups = group_max.shape[1]
    config = tuning.get_config("rejection_judge", device, default_config, vocab=vocab)
    groups = torch.empty(rows, n_groups, dtype=torch.int32, device=device)
    limits = find_row_limits(target_logits, parameters, group_max, group_sum, groups)
    drafts = (draft_ids, draft_probs)
    given = (
        target_logits,
        parameters.temperature,
        *parameters[4:],
        *drafts,
        group_max,
        group_sum,
        groups,
        limits,
        tokens,
    )
    strides = (*target_logits.stride()[:2], draft_ids.stride(0), *draft_probs.stride()[:2])
    flags = {"NG": triton.next_power_of_2(n_groups), **UNIFORM_SUMS, **dependent_launch(device)}
    _judge_kernel[(rows,)](*given, vocab, n_groups, positions - 1, *strides, **flags, **config)


def judge_ref(
    draft_ids: torch.Tensor,
    draft_probs: torch.Tensor,
    target_logits: torch.Tensor,
    parameters: SamplingRows[torch.Tensor],
    sampled: torch.Tensor,
) -> torch.Tensor:
    """:func:`judge` in torch: ``[B, G + 1]`` int64, from the tokens that `sample` draws, for rows without a draft."""
    vocab, tokens = target_logits.shape[-1], sampled.clone()
    temperature, top_k, top_p, min_p, seeds, steps = parameters
    draft = torch.nn.functional.pad(draft_ids.long(), (0, 1), value=-1)
    judged = (draft >= 0) & (draft < vocab) & (temperature >= MIN_TEMPERATURE.value)[:, None]
    judged &= (clean_ref(target_logits) > -torch.inf).any(-1)
    seq, position = judged.nonzero(as_tuple=True)
    if not len(seq):
        return tokens
    x, scale = clean_ref(target_logits[seq, position]), scale_ref(temperature[seq])
    threshold, last_tie, total = limits_ref(x, scale, *(None if t is None else t[seq] for t in (top_k, top_p, min_p)))
    every = weight_ref(x, x.amax(-1, keepdim=True), scale[:, None])
    weights = every * keep_ref(x, threshold, last_tie)
    q, draft = draft_probs[seq, position].float(), draft[seq, position]
    u = uniform_ref(position, seeds[seq], steps[seq], STREAM_ACCEPT.value)
    at_draft = draft[:, None]
    accepted = u * q.gather(1, at_draft)[:, 0] * total < weights.gather(1, at_draft)[:, 0]
    tokens[seq[accepted], position[accepted]] = draft[accepted]

    seq, position, weights, every = (t[~accepted] for t in (seq, position, weights, every))
    left = torch.maximum(weights - q[~accepted] * total[~accepted, None], weights * REMNANT.value)
    seeds, steps = seeds[seq], steps[seq] + position
    token = thin_ref(every, left, seeds, steps)
    rare = token < 0
    streams = (STREAM_RESIDUAL_GROUP.value, STREAM_RESIDUAL_TOKEN.value)
    token[rare] = draw_ref(left[rare].log2(), seeds[rare], steps[rare], *streams)
    tokens[seq, position] = token
    return tokens

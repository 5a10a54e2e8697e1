"""For drafts with probabilities, each row's verdict: the draft, or the token in its place.

A program for each row works on what the scan of `sampling_common` left of it; of the logits it reads again the groups
that proposals fall in (`rejection_residual`). Rows beyond the first rejection are judged as well: they run beside it.
"""

import torch
import triton
import triton.language as tl

from tritonllm.kernels import tuning
from tritonllm.kernels.candidates import SMALL
from tritonllm.kernels.dependent_launch import dependent_launch, let_next_start, wait_for_previous
from tritonllm.kernels.random import (
    STREAM_ACCEPT,
    STREAM_RESIDUAL_GROUP,
    STREAM_RESIDUAL_TOKEN,
    uniform,
    uniform_ref,
)
from tritonllm.kernels.rejection_residual import REMNANT, draw_exhaustively, thin, thin_ref
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
    weight_ref,
)
from tritonllm.kernels.sampling_draw import draw_of_group, group_score
from tritonllm.kernels.truncation import find_limits, is_limited, limits_ref, load_limits

# Of each sequence: temperature, top_k, top_p, min_p, seed, step
Parameters = tuple[
    torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor, torch.Tensor
]


@triton.jit(do_not_specialize=["draft_ids_ptr", "G", "stride_draft"])
def _judge_kernel(
    logits_ptr,  # [B, G + 1, V]
    temperature_ptr,  # [B]
    top_k_ptr,  # [B] or None
    top_p_ptr,  # [B] or None
    min_p_ptr,  # [B] or None
    seeds_ptr,  # [B]
    steps_ptr,  # [B]
    draft_ids_ptr,  # [B, G]
    draft_probs_ptr,  # [B, G, V]
    max_ptr,  # [B * (G + 1), n_groups]
    sum_ptr,  # [B * (G + 1), n_groups]
    list_ptr,  # scratch [B * (G + 1), n_groups]
    buffer_ptr,  # scratch [B * (G + 1), CAPACITY]
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
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for each row: the draft if it is accepted, else the token in its place, as if the path came here."""
    wait_for_previous(PDL)
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    seq, position = row // (G + 1), row % (G + 1)
    p_row = logits_ptr + seq * stride_logits_b + position * stride_logits_n
    p_list = list_ptr + row * n_groups
    draft = tl.load(draft_ids_ptr + seq * stride_draft + position, mask=position < G, other=-1).to(tl.int64)
    has_draft = (draft >= 0) & (draft < V)
    b_group, b_max, b_sum = load_scan(max_ptr, sum_ptr, row, n_groups, NG)
    temperature = tl.load(temperature_ptr + seq)
    top = tl.max(b_max)
    token = tl.full((), -1, tl.int32)
    if (temperature >= MIN_TEMPERATURE) & (top > float("-inf")):
        top_k, top_p, min_p = load_limits(top_k_ptr, top_p_ptr, min_p_ptr, seq, "")
        seed, step = tl.load(seeds_ptr + seq), tl.load(steps_ptr + seq)
        scale = scale_of(temperature)
        b_weight = b_sum * weight(b_max, top, scale)
        threshold = tl.full((), float("-inf"), tl.float32)
        last_tie = tl.full((), V, tl.int32)
        total = tl.sum(b_weight)
        if is_limited(V, top_k, top_p, min_p):
            p_buffer = buffer_ptr + row * CAPACITY
            threshold, last_tie, total = find_limits(
                p_row, p_list, p_buffer, V, n_groups, b_max, b_sum, top, scale, top_k, top_p, min_p, NG, CAPACITY, TILE
            )
        p_probs = draft_probs_ptr + seq * stride_probs_b + position * stride_probs_n
        if has_draft:
            x, q = load_logits(p_row, draft, has_draft), tl.load(p_probs + draft).to(tl.float32)
            likely = tl.where(keep(x, draft, threshold, last_tie), weight(x, top, scale), 0.0)
            if uniform(position, seed, step, STREAM_ACCEPT) * q * total < likely:
                token = draft.to(tl.int32)
            else:
                p_max, p_sum = max_ptr + row * n_groups, sum_ptr + row * n_groups
                token = thin(
                    p_row,
                    p_probs,
                    p_max,
                    p_sum,
                    V,
                    n_groups,
                    b_weight,
                    top,
                    scale,
                    threshold,
                    last_tie,
                    total,
                    seed,
                    step + position,
                    NG,
                )
        if token < 0:
            if has_draft | is_limited(V, top_k, top_p, min_p):
                token = draw_exhaustively(
                    p_row,
                    p_probs,
                    p_list,
                    V,
                    n_groups,
                    b_max,
                    top,
                    scale,
                    threshold,
                    last_tie,
                    total,
                    has_draft,
                    seed,
                    step + position,
                    NG,
                    WIDE,
                )
            else:
                b_score = group_score(b_max, b_sum, scale, b_group, seed, step + position)
                token = draw_of_group(p_row, first_max(b_score, b_group), V, scale, True, seed, step + position)
    else:
        token = argmax_token(p_row, b_max, b_group, V)
    tl.store(tokens_ptr + row, token.to(tl.int64))


def default_config(vocab: int) -> tuning.Config:
    """``CAPACITY`` and ``TILE`` as of `sample`; a row that is read whole is so by ``WIDE`` groups at a time.

    ``maxnreg``: left to itself, the assembler rather spills a few registers than takes more than 64.
    """
    groups = triton.next_power_of_2(triton.cdiv(vocab, GROUP.value))
    capacity = min(8192, max(2 * SMALL.value, triton.next_power_of_2(vocab)))
    return {"CAPACITY": capacity, "TILE": min(32, groups), "WIDE": min(32, groups), "num_warps": 8, "maxnreg": 255}


def judge(
    draft_ids: torch.Tensor,
    draft_probs: torch.Tensor,
    target_logits: torch.Tensor,
    parameters: Parameters,
    tokens: torch.Tensor,
) -> None:
    """Write each row's token to ``tokens [B, G + 1]`` int64: two launches, the scan and the judges.

    ``parameters`` are temperature, top_k, top_p, min_p, seeds, steps; the others as of ``rejection_sample``.
    """
    batch, positions, vocab = target_logits.shape
    rows, device = batch * positions, target_logits.device
    group_max, group_sum = scan(target_logits, parameters[0])
    n_groups = group_max.shape[1]
    config = tuning.get_config("rejection_judge", device, default_config, vocab=vocab)
    groups = torch.empty(rows, n_groups, dtype=torch.int32, device=device)
    limited_rows = 0 if all(limit is None for limit in parameters[1:4]) else rows
    buffer = torch.empty(limited_rows, config["CAPACITY"], dtype=torch.float32, device=device)
    given = (target_logits, *parameters, draft_ids, draft_probs, group_max, group_sum, groups, buffer, tokens)
    strides = (*target_logits.stride()[:2], draft_ids.stride(0), *draft_probs.stride()[:2])
    flags = {"NG": triton.next_power_of_2(n_groups), **dependent_launch(device)}
    _judge_kernel[(rows,)](*given, vocab, n_groups, positions - 1, *strides, **flags, **config)


def judge_ref(
    draft_ids: torch.Tensor,
    draft_probs: torch.Tensor,
    target_logits: torch.Tensor,
    parameters: Parameters,
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

"""Speculative decoding's verdict on draft tokens: the longest accepted beginning, and one token more.

Draft token d at position i is accepted with probability min(1, p(d) / q(d)), p being the target's distribution there
(after temperature, min-p, top-k and top-p) and q the drafter's; at the first rejection one token is drawn from
max(p - q, 0), normalised, and after the last draft one from p. The tokens then have the target's distribution, whatever
the drafts (Leviathan, Kalman and Matias, "Fast inference from transformers via speculative decoding", 2023; Chen et
al., "Accelerating large language model decoding with speculative sampling", 2023).

Four launches. The scan of `sampling_common` reads the target logits once; one program for each position finds limits
and accepts or rejects; where a sequence stops, logits and draft probabilities are read again, by programs that each
draw from some groups; and the best draw is taken. Floor: the target logits' bytes over the memory bandwidth, 46 us for
64 sequences of 4 drafts and V = 151936 in float32 on an H200, and one or two fifths more for what is read again.
"""

import torch
import triton
import triton.language as tl

from tritonllm.kernels import tuning
from tritonllm.kernels.checks import FLOATS, check_tensor, require
from tritonllm.kernels.random import (
    STREAM_ACCEPT,
    STREAM_GROUP,
    STREAM_RESIDUAL_GROUP,
    STREAM_RESIDUAL_TOKEN,
    STREAM_TOKEN,
    gumbel,
    uniform,
    uniform_ref,
)
from tritonllm.kernels.registry import register_op
from tritonllm.kernels.sampling import check_parameters, default_config
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
from tritonllm.kernels.truncation import find_limits, is_limited, limits_ref, load_limits

# A token that p - q leaves nothing keeps this part of p: it is drawn only if rounding left nothing to any token.
_REMNANT = tl.constexpr(2.0**-40)


@triton.jit
def _judge_kernel(
    logits_ptr,  # [B, G + 1, V]
    draft_ids_ptr,  # [B, G]
    draft_probs_ptr,  # [B, G, V] or None
    temperature_ptr,  # [B]
    seeds_ptr,  # [B]
    steps_ptr,  # [B]
    top_k_ptr,  # [B] or None
    top_p_ptr,  # [B] or None
    min_p_ptr,  # [B] or None
    max_ptr,  # [B * (G + 1), n_groups]
    sum_ptr,  # [B * (G + 1), n_groups]
    list_ptr,  # scratch [B * (G + 1), n_groups]
    buffer_ptr,  # scratch [B * (G + 1), CAPACITY]
    verdict_ptr,  # [B * (G + 1), 3] int32: accepted, the token if there is no choice or else -1, the last tie
    limits_ptr,  # [B * (G + 1), 3] float32: largest logit, threshold, weight
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
):
    row = tl.program_id(0).to(tl.int64)
    seq, position = row // (G + 1), row % (G + 1)
    p_row = logits_ptr + seq * stride_logits_b + position * stride_logits_n
    draft = tl.load(draft_ids_ptr + seq * stride_draft + position, mask=position < G, other=-1).to(tl.int64)
    has_draft = (draft >= 0) & (draft < V)
    b_group, b_max, b_sum = load_scan(max_ptr, sum_ptr, row, n_groups, NG)
    temperature = tl.load(temperature_ptr + seq)
    top = tl.max(b_max)
    if (temperature >= MIN_TEMPERATURE) & (top > float("-inf")):
        top_k, top_p, min_p = load_limits(top_k_ptr, top_p_ptr, min_p_ptr, seq)
        scale = scale_of(temperature)
        threshold = tl.full((), float("-inf"), tl.float32)
        last_tie = tl.full((), V, tl.int32)
        total = tl.sum(b_sum * weight(b_max, top, scale))
        if is_limited(V, top_k, top_p, min_p):
            p_list, p_buffer = list_ptr + row * n_groups, buffer_ptr + row * CAPACITY
            threshold, last_tie, total = find_limits(
                p_row, p_list, p_buffer, V, n_groups, b_max, b_sum, top, scale, top_k, top_p, min_p, NG, CAPACITY, TILE
            )
        x = load_logits(p_row, draft, has_draft)
        likely = tl.where(keep(x, draft, threshold, last_tie), weight(x, top, scale), 0.0)
        q = tl.full((), 1.0, tl.float32)
        if draft_probs_ptr is not None:
            p_probs = draft_probs_ptr + seq * stride_probs_b + position * stride_probs_n + draft
            q = tl.load(p_probs, mask=has_draft, other=1.0).to(tl.float32)
        u = uniform(position, tl.load(seeds_ptr + seq), tl.load(steps_ptr + seq), STREAM_ACCEPT)
        accepted = has_draft & (u * q * total < likely)
        tl.store(verdict_ptr + row * 3 + 1, -1)
        tl.store(verdict_ptr + row * 3 + 2, last_tie)
        tl.store(limits_ptr + row * 3, top)
        tl.store(limits_ptr + row * 3 + 1, threshold)
        tl.store(limits_ptr + row * 3 + 2, total)
    else:
        token = argmax_token(p_row, b_max, b_group, V)
        accepted = has_draft & (token == draft)
        tl.store(verdict_ptr + row * 3 + 1, token)
    tl.store(verdict_ptr + row * 3, accepted.to(tl.int32))


@triton.jit
def _first_rejected(verdict_ptr, seq, G, POSITIONS: tl.constexpr):
    """The position where the sequence stops; the last one, G, accepts nothing."""
    b_position = tl.arange(0, POSITIONS)
    p_accepted = verdict_ptr + (seq * (G + 1) + b_position) * 3
    b_accepted = tl.load(p_accepted, mask=b_position < G, other=0)
    return tl.min(tl.where(b_accepted == 0, b_position, POSITIONS))


@triton.jit
def _residual(p_row, p_probs, b_token, m_token, V, top, scale, threshold, last_tie, total, draft):
    """The weight of each token for the last draw: that of p, or what p - q leaves if ``draft`` (>= 0) was rejected."""
    m_token &= b_token < V
    b_x = load_logits(p_row, b_token, m_token)
    b_weight = tl.where(keep(b_x, b_token, threshold, last_tie), weight(b_x, top, scale), 0.0)
    if p_probs is not None:
        b_q = tl.load(p_probs + b_token, mask=m_token & (draft >= 0), other=0.0).to(tl.float32)
    else:
        b_q = (b_token == draft).to(tl.float32)
    return tl.maximum(b_weight - b_q * total, b_weight * _REMNANT)


@triton.jit
def _redraw_kernel(
    logits_ptr,  # [B, G + 1, V]
    draft_ids_ptr,  # [B, G]
    draft_probs_ptr,  # [B, G, V] or None
    temperature_ptr,  # [B]
    seeds_ptr,  # [B]
    steps_ptr,  # [B]
    max_ptr,  # [B * (G + 1), n_groups]
    verdict_ptr,  # [B * (G + 1), 3]
    limits_ptr,  # [B * (G + 1), 3]
    score_ptr,  # [B, splits]
    token_ptr,  # [B, splits]
    V,
    n_groups,
    G,
    stride_logits_b,
    stride_logits_n,
    stride_draft,
    stride_probs_b,
    stride_probs_n,
    TILE: tl.constexpr,
    POSITIONS: tl.constexpr,
):
    seq, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = _first_rejected(verdict_ptr, seq, G, POSITIONS).to(tl.int64)
    row = seq * (G + 1) + at
    if tl.load(verdict_ptr + row * 3 + 1) < 0:  # else there is nothing to draw
        draft = tl.load(draft_ids_ptr + seq * stride_draft + at, mask=at < G, other=-1)
        draft = tl.where(draft < V, draft, -1).to(tl.int32)
        p_row = logits_ptr + seq * stride_logits_b + at * stride_logits_n
        p_probs = None
        if draft_probs_ptr is not None:
            p_probs = draft_probs_ptr + seq * stride_probs_b + at * stride_probs_n
        p_limits = limits_ptr + row * 3
        top, threshold, total = tl.load(p_limits), tl.load(p_limits + 1), tl.load(p_limits + 2)
        last = tl.load(verdict_ptr + row * 3 + 2)
        scale = scale_of(tl.load(temperature_ptr + seq))
        seed, step = tl.load(seeds_ptr + seq), tl.load(steps_ptr + seq) + at

        b_group = split * TILE + tl.arange(0, TILE)
        b_max = tl.load(max_ptr + row * n_groups + b_group, mask=b_group < n_groups, other=float("-inf"))
        m_group = (b_group < n_groups) & (b_max >= threshold)
        b_token = b_group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        b_weight = _residual(p_row, p_probs, b_token, m_group[:, None], V, top, scale, threshold, last, total, draft)
        stream = tl.where(draft >= 0, STREAM_RESIDUAL_GROUP, STREAM_GROUP)
        b_score = tl.log2(tl.sum(b_weight, axis=1)) + gumbel(b_group, seed, step, stream)
        group = first_max(b_score, b_group)

        b_token = group * GROUP + tl.arange(0, GROUP)
        b_weight = _residual(p_row, p_probs, b_token, b_token >= 0, V, top, scale, threshold, last, total, draft)
        stream = tl.where(draft >= 0, STREAM_RESIDUAL_TOKEN, STREAM_TOKEN)
        token = first_max(tl.log2(b_weight) + gumbel(b_token, seed, step, stream), b_token)
        tl.store(score_ptr + seq * tl.num_programs(1) + split, tl.max(b_score))
        tl.store(token_ptr + seq * tl.num_programs(1) + split, token)


@triton.jit
def _emit_kernel(
    draft_ids_ptr,  # [B, G]
    verdict_ptr,  # [B * (G + 1), 3]
    score_ptr,  # [B, splits]
    token_ptr,  # [B, splits]
    ids_ptr,  # [B, G + 1]
    accepted_ptr,  # [B]
    G,
    splits,
    stride_draft,
    POSITIONS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    seq = tl.program_id(0).to(tl.int64)
    at = _first_rejected(verdict_ptr, seq, G, POSITIONS)
    token = tl.load(verdict_ptr + (seq * (G + 1) + at) * 3 + 1)
    if token < 0:
        b_split = tl.arange(0, SPLITS)
        b_score = tl.load(score_ptr + seq * splits + b_split, mask=b_split < splits, other=float("-inf"))
        token = tl.load(token_ptr + seq * splits + first_max(b_score, b_split))
    b_position = tl.arange(0, POSITIONS)
    b_id = tl.load(draft_ids_ptr + seq * stride_draft + b_position, mask=b_position < at, other=-1).to(tl.int64)
    b_id = tl.where(b_position == at, token, b_id)
    tl.store(ids_ptr + seq * (G + 1) + b_position, b_id, mask=b_position <= G)
    tl.store(accepted_ptr + seq, at.to(tl.int64))


def redraw_config(vocab: int) -> tuning.Config:
    return {"TILE": min(32, triton.next_power_of_2(triton.cdiv(vocab, GROUP.value))), "num_warps": 8}


def _reference(
    draft_ids: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    seeds: torch.Tensor,
    steps: torch.Tensor,
    ids: torch.Tensor,
    accepted: torch.Tensor,
) -> None:
    batch, positions, vocab = target_logits.shape
    x = clean_ref(target_logits).view(-1, vocab)
    limits = (None if t is None else t.repeat_interleave(positions) for t in (top_k, top_p, min_p))
    temperature = temperature.repeat_interleave(positions)
    scale, top = scale_ref(temperature)[:, None], x.amax(-1, keepdim=True)
    threshold, last_tie, total = limits_ref(x, scale[:, 0], *limits)
    weights = weight_ref(x, top, scale) * keep_ref(x, threshold, last_tie)
    weights, total = weights.view(batch, positions, vocab), total.view(batch, positions)
    no_choice = (~(temperature >= MIN_TEMPERATURE.value) | (top[:, 0] == -torch.inf)).view(batch, positions)
    choice = x.argmax(-1).view(batch, positions)

    draft = torch.nn.functional.pad(draft_ids.long(), (0, 1), value=-1)
    draft = draft.masked_fill((draft < 0) | (draft >= vocab), -1)
    column = draft.clamp_min(0)[..., None]
    q = torch.ones(batch, positions, device=x.device)
    if draft_probs is not None:
        q[:, :-1] = draft_probs.gather(2, column[:, :-1])[..., 0]
    position = torch.arange(positions, device=x.device)[None]
    u = uniform_ref(position, seeds[:, None], steps[:, None], STREAM_ACCEPT.value)
    likely = weights.gather(2, column)[..., 0]
    accept = (draft >= 0) & torch.where(no_choice, choice == draft, u * q * total < likely)
    at = accept.long().cumprod(-1).sum(-1, keepdim=True)

    row = torch.arange(batch, device=x.device), at[:, 0]
    weights, rejected = weights[row], draft.gather(1, at)
    if draft_probs is None or positions == 1:
        left_q = torch.zeros_like(weights).scatter_(1, rejected.clamp_min(0), 1.0)
    else:
        left_q = draft_probs[row[0], row[1].clamp_max(positions - 2)].float()
    left = torch.maximum(weights - left_q * total[row][:, None] * (rejected >= 0), weights * _REMNANT.value)
    group_stream = torch.where(rejected >= 0, STREAM_RESIDUAL_GROUP.value, STREAM_GROUP.value)
    token_stream = torch.where(rejected >= 0, STREAM_RESIDUAL_TOKEN.value, STREAM_TOKEN.value)
    token = draw_ref(left.log2(), seeds, steps + at[:, 0], group_stream, token_stream)
    token = torch.where(no_choice[row], choice[row], token)[:, None]
    ids.copy_(torch.where(position < at, draft, torch.where(position == at, token, -1)))
    accepted.copy_(at[:, 0])


@register_op(mutates=("ids", "accepted"), reference=_reference)
def _rejection_sample(
    draft_ids: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    seeds: torch.Tensor,
    steps: torch.Tensor,
    ids: torch.Tensor,
    accepted: torch.Tensor,
) -> None:
    batch, positions, vocab = target_logits.shape
    if batch == 0:
        return
    rows, device = batch * positions, target_logits.device
    group_max, group_sum = scan(target_logits, temperature)
    n_groups = group_max.shape[1]
    probs_strides = (0, 0) if draft_probs is None else draft_probs.stride()[:2]
    sizes = (vocab, n_groups, positions - 1, *target_logits.stride()[:2], draft_ids.stride(0), *probs_strides)
    inputs = (target_logits, draft_ids, draft_probs, temperature, seeds, steps)
    verdict = torch.empty(rows, 3, dtype=torch.int32, device=device)
    limits = torch.empty(rows, 3, dtype=torch.float32, device=device)

    config = tuning.get_config("sample", device, default_config, vocab=vocab)
    scratch_rows = 0 if top_k is None and top_p is None and min_p is None else rows
    groups = torch.empty(scratch_rows, n_groups, dtype=torch.int32, device=device)
    buffer = torch.empty(scratch_rows, config["CAPACITY"], dtype=torch.float32, device=device)
    given = (*inputs, top_k, top_p, min_p, group_max, group_sum)
    pow2 = {"NG": triton.next_power_of_2(n_groups)}
    _judge_kernel[(rows,)](*given, groups, buffer, verdict, limits, *sizes, **pow2, **config)

    config = tuning.get_config("rejection_redraw", device, redraw_config, vocab=vocab)
    splits = triton.cdiv(n_groups, config["TILE"])
    scores = torch.empty(batch, splits, dtype=torch.float32, device=device)
    tokens = torch.empty(batch, splits, dtype=torch.int32, device=device)
    pow2 = {"POSITIONS": triton.next_power_of_2(positions)}
    _redraw_kernel[(batch, splits)](*inputs, group_max, verdict, limits, scores, tokens, *sizes, **pow2, **config)

    pow2["SPLITS"] = triton.next_power_of_2(splits)
    outputs = (ids, accepted, positions - 1, splits, draft_ids.stride(0))
    _emit_kernel[(batch,)](draft_ids, verdict, scores, tokens, *outputs, **pow2, num_warps=1)


def rejection_sample(
    draft_ids: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    seeds: torch.Tensor,
    steps: torch.Tensor,
    *,
    min_p: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept or reject draft tokens, and add one token of the target's own.

    Position i draws with step ``steps + i``, so ``steps`` counts the tokens of a sequence, and no noise is used twice.
    The drafter may draw with the same seeds and steps through :func:`sample`: a token in place of a rejected draft has
    noise of its own. A sequence without drafts gets the token that :func:`sample` draws from its first row.

    Args:
        draft_ids: ``[B, G]`` int32 or int64; at an id outside [0, V), such as -1, a sequence has no more drafts.
        draft_probs: ``[B, G, V]`` float16, bfloat16 or float32, the distributions that the drafts were drawn from; only
            the last dimension must be contiguous. ``None`` for drafts that were not drawn (n-grams, argmax).
        target_logits: ``[B, G + 1, V]`` float16, bfloat16 or float32: row i is what follows draft i - 1. As
            ``draft_probs``, it may have any strides but the last.
        temperature: ``[B]`` float32; below 1e-5 a draft is accepted if it is the argmax.
        top_k, top_p, min_p: ``[B]``, limits of the target's distribution as in :func:`sample`, or ``None``.
        seeds, steps: ``[B]`` int64; a step is the number of the sequence's token at position 0.

    Returns:
        ``ids [B, G + 1]`` int64: the accepted drafts, one token more, then -1; ``accepted [B]`` int64: how many
        drafts were accepted.

    Raises:
        ValueError: a wrong shape, dtype or device, or an empty vocabulary.
    """
    check_tensor("target_logits", target_logits, ("B", "G + 1", "V"))
    batch, positions, vocab = target_logits.shape
    require(positions > 0, "target_logits must have a row for each draft and one more, got none")
    require(vocab > 0, "target_logits must have at least one column (the vocabulary is empty)")
    drafts = (batch, positions - 1)
    check_tensor("draft_ids", draft_ids, drafts, dtype=(torch.int32, torch.int64), like=target_logits)
    if draft_probs is not None:
        check_tensor("draft_probs", draft_probs, (*drafts, vocab), dtype=FLOATS, like=target_logits)
    check_parameters(batch, target_logits, temperature, top_k, top_p, min_p, seeds, steps)
    ids = torch.empty(batch, positions, dtype=torch.int64, device=target_logits.device)
    accepted = torch.empty(batch, dtype=torch.int64, device=target_logits.device)
    _rejection_sample(
        draft_ids, draft_probs, target_logits, temperature, top_k, top_p, min_p, seeds, steps, ids, accepted
    )
    return ids, accepted


def rejection_sample_ref(
    draft_ids: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    seeds: torch.Tensor,
    steps: torch.Tensor,
    *,
    min_p: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`rejection_sample` in plain torch, with the same noise."""
    ids = torch.empty(target_logits.shape[:2], dtype=torch.int64, device=target_logits.device)
    accepted = torch.empty(len(target_logits), dtype=torch.int64, device=target_logits.device)
    _reference(draft_ids, draft_probs, target_logits, temperature, top_k, top_p, min_p, seeds, steps, ids, accepted)
    return ids, accepted

"""Mixture of experts, routing: which experts each token goes to, and with what weights.

The scores of a token stay in registers while the largest is taken ``top_k`` times: no sort, and bound by latency.
Routing: Shazeer et al., "Outrageously Large Neural Networks" (2017); groups of experts and the correction bias:
DeepSeek-V2 and DeepSeek-V3 (2024); SparseMixer: Liu et al., "GRIN: GRadient-INformed MoE" (2024).
"""

import torch
import triton
import triton.language as tl

from tritonllm.kernels.dense import rows_apart
from tritonllm.kernels.moe.arguments import Rule
from tritonllm.kernels.runtime import tuning
from tritonllm.kernels.runtime.checks import check_tensor, require
from tritonllm.kernels.runtime.dependent_launch import dependent_launch, let_next_start, wait_for_previous
from tritonllm.kernels.runtime.registry import register_op, with_reference

# Stands for NaN and -inf when experts are compared: less than any score, more than an expert that may not be taken.
LOWEST = tl.constexpr(-1e38)

SCORINGS = "softmax", "sigmoid", "late_sigmoid", "sparsemixer"
# How far, of its own size or the best one's, an expert's logit may be below the best one for SparseMixer to count it:
# twice the noise that Phi-3.5-MoE was trained with.
NEAR = tl.constexpr(0.02)


@triton.jit
def _only_best_groups(
    b_choice,
    HAS_BIAS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    TOP_K_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Set the experts outside the best groups to -inf."""
    b_grouped = tl.reshape(b_choice, (b_choice.shape[0], GROUPS, GROUP))
    b_score, b_best = tl.max(b_grouped, axis=2, return_indices=True)
    if HAS_BIAS and GROUP_SIZE > 1:
        is_best = tl.arange(0, GROUP)[None, None, :] == b_best[:, :, None]
        b_score += tl.max(tl.where(is_best, float("-inf"), b_grouped), axis=2)
    group = tl.arange(0, GROUPS)[None, :]
    b_taken = tl.zeros([b_choice.shape[0], GROUPS], tl.int32)
    for _ in range(TOP_K_GROUPS):
        hit = group == tl.argmax(b_score, axis=1)[:, None]
        b_taken = tl.where(hit, 1, b_taken)
        b_score = tl.where(hit, float("-inf"), b_score)
    return tl.reshape(tl.where(b_taken[:, :, None] > 0, b_grouped, float("-inf")), b_choice.shape)


@triton.jit
def _largest_first(b_choice, lane, TOP_K: tl.constexpr):
    """``[ROWS, LANES]`` float32 without NaN -> the place of each among the row's ``TOP_K`` largest, or ``TOP_K``.

    Of equals the lowest lane goes first. Floats are compared as integers of the same order, whose maximum over a warp
    is one instruction.
    """
    b_bits = tl.where(b_choice == 0.0, 0.0, b_choice).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    b_key = tl.where(b_bits < 0, b_bits ^ 0x7FFFFFFF, b_bits)
    b_rank = tl.full(b_choice.shape, TOP_K, tl.int32)
    for i in range(TOP_K):
        b_hits = tl.where(b_key == tl.max(b_key, axis=1)[:, None], lane, 0x7FFFFFFF)
        hit = lane == tl.min(b_hits, axis=1)[:, None]
        b_rank = tl.where(hit, i, b_rank)
        b_key = tl.where(hit, -0x80000000, b_key)  # less than -inf
    return b_rank


@triton.jit
def choose_experts(p_logits, m_row, bias_ptr, TOP_K: tl.constexpr, ROUTING: tl.constexpr):
    """The ``TOP_K`` experts of each row of logits.

    Args:
        p_logits: ``[ROWS, 1]`` pointers to rows of logits; m_row: ``[ROWS, 1]`` which of them there are.
        bias_ptr: ``[E]`` added to the scores for the choice, or None.
        ROUTING: the constants that :func:`routing_constants` gives.

    Returns:
        experts ``[1, LANES]``, their logits ``[ROWS, LANES]`` in float32 (-inf in lanes without an expert), and the
        place ``[ROWS, LANES]`` of each among the chosen, or ``TOP_K``.
    """
    SOFTMAX: tl.constexpr = ROUTING[0]
    LATE: tl.constexpr = ROUTING[8]
    NUM_GROUPS: tl.constexpr = ROUTING[2]
    GROUP_SIZE: tl.constexpr = ROUTING[3]
    TOP_K_GROUPS: tl.constexpr = ROUTING[4]
    GROUPS: tl.constexpr = ROUTING[5]
    GROUP: tl.constexpr = ROUTING[6]
    # each group has its own lanes, so that a reshape finds it; lanes are in the order of the experts
    lane = tl.arange(0, GROUPS * GROUP)[None, :]
    expert = lane // GROUP * GROUP_SIZE + lane % GROUP
    m_expert = (lane // GROUP < NUM_GROUPS) & (lane % GROUP < GROUP_SIZE)
    b_logits = tl.load(p_logits + expert, mask=m_row & m_expert, other=float("-inf")).to(tl.float32)
    b_choice = b_logits
    if bias_ptr is not None:
        b_bias = tl.load(bias_ptr + expert, mask=m_expert, other=0.0).to(tl.float32)
        b_choice = (b_logits if LATE else _scores(b_logits, SOFTMAX)) + b_bias
    b_choice = tl.where(b_choice > LOWEST, b_choice, LOWEST)  # also where it is NaN
    b_choice = tl.where(m_expert, b_choice, float("-inf"))
    if TOP_K_GROUPS < NUM_GROUPS:
        b_choice = _only_best_groups(b_choice, bias_ptr is not None, GROUP_SIZE, TOP_K_GROUPS, GROUPS, GROUP)
    return expert, b_logits, _largest_first(b_choice, lane, TOP_K)


@triton.jit
def _scores(b_logits, SOFTMAX: tl.constexpr):
    if SOFTMAX:
        b_exp = tl.exp(b_logits - tl.max(b_logits, axis=1)[:, None])
        b_scores = b_exp / tl.sum(b_exp, axis=1)[:, None]
    else:
        b_scores = tl.sigmoid(b_logits)
    return b_scores


@triton.jit
def _sparsemixer(b_logits, b_rank, TOP_K: tl.constexpr):
    """For each chosen expert its part of a softmax over those that are near it, of all that come after it."""
    b_weights = tl.zeros(b_logits.shape, tl.float32)
    for i in range(TOP_K):
        b_left = tl.where(b_rank >= i, b_logits, float("-inf"))
        b_best = tl.max(b_left, axis=1)[:, None]
        is_far = b_best - b_left > NEAR * tl.maximum(tl.abs(b_left), b_best)
        b_sum = tl.sum(tl.where(is_far, 0.0, tl.exp(b_left - b_best)), axis=1)[:, None]
        b_weights = tl.where(b_rank == i, 1.0 / b_sum, b_weights)
    return b_weights


@triton.jit
def weigh_experts(b_logits, b_rank, scale, TOP_K: tl.constexpr, ROUTING: tl.constexpr):
    """The weights ``[ROWS, LANES]`` of the chosen experts; 0 for the others."""
    SOFTMAX: tl.constexpr = ROUTING[0]
    RENORMALIZE: tl.constexpr = ROUTING[1]
    SPARSEMIXER: tl.constexpr = ROUTING[7]
    if SPARSEMIXER:
        b_weights = _sparsemixer(b_logits, b_rank, TOP_K)
    else:
        b_weights = tl.where(b_rank < TOP_K, _scores(b_logits, SOFTMAX), 0.0)
    if RENORMALIZE:
        b_weights = b_weights / (tl.sum(b_weights, axis=1)[:, None] + 1e-20)  # sigmoids may all be 0
    return b_weights * scale


@triton.jit(do_not_specialize=["T"])
def _moe_route_kernel(
    logits_ptr,  # [T, E]
    bias_ptr,  # [E] or None
    weights_ptr,  # [T, TOP_K]
    ids_ptr,  # [T, TOP_K]
    T,
    stride_logits,
    scale,
    TOP_K: tl.constexpr,
    ROUTING: tl.constexpr,
    PDL: tl.constexpr,
    ROWS: tl.constexpr,
):
    wait_for_previous(PDL)
    let_next_start(PDL)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    expert, b_logits, b_rank = choose_experts(logits_ptr + row * stride_logits, row < T, bias_ptr, TOP_K, ROUTING)
    b_weights = weigh_experts(b_logits, b_rank, scale, TOP_K, ROUTING)
    place = row * TOP_K + b_rank
    m_chosen = (row < T) & (b_rank < TOP_K)
    tl.store(weights_ptr + place, b_weights, mask=m_chosen)
    tl.store(ids_ptr + place, expert, mask=m_chosen)


def routing_constants(experts: int, rule: Rule) -> tuple[bool | int, ...]:
    """What the kernels know of a routing when they are compiled, as they take it."""
    renormalize, scoring, num_groups, top_k_groups, _, _ = rule
    group_size = experts // num_groups
    lanes = triton.next_power_of_2(num_groups), triton.next_power_of_2(group_size)
    rule_of_choice = renormalize, num_groups, group_size, top_k_groups
    return (scoring == "softmax", *rule_of_choice, *lanes, scoring == "sparsemixer", scoring == "late_sigmoid")


def default_route_config(experts: int, tokens: int) -> tuning.Config:
    """One warp a token, so that no comparison leaves it; four tokens a program once that fills the chip."""
    rows = 4 if tokens >= 4096 else 1
    return {"ROWS": rows, "num_warps": rows * max(1, min(8, experts // 512))}


def _route(
    router_logits: torch.Tensor, bias: torch.Tensor | None, top_k: int, rule: Rule
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and experts, ``[T, top_k]`` each."""
    renormalize, scoring, num_groups, top_k_groups, scale, _ = rule
    logits = router_logits.float()
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    choice = logits if bias is None or scoring == "late_sigmoid" else scores
    choice = choice if bias is None else choice + bias.float()
    choice = choice.nan_to_num(nan=LOWEST.value, posinf=float("inf"), neginf=LOWEST.value).clamp(min=LOWEST.value)
    if top_k_groups < num_groups:
        grouped = choice.unflatten(-1, (num_groups, -1))
        per_group = 1 if bias is None else min(2, grouped.shape[-1])
        group_score = grouped.topk(per_group, dim=-1).values.sum(-1)
        best = group_score.sort(dim=-1, descending=True, stable=True).indices[:, :top_k_groups]
        allowed = torch.zeros_like(group_score, dtype=torch.bool).scatter_(1, best, True)
        choice = grouped.masked_fill(~allowed.unsqueeze(-1), float("-inf")).flatten(1)
    chosen = choice.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    picked = _sparsemixer_reference(logits, chosen) if scoring == "sparsemixer" else scores.gather(1, chosen)
    if renormalize:
        picked = picked / (picked.sum(dim=-1, keepdim=True) + 1e-20)
    return picked * scale, chosen.int()


def _sparsemixer_reference(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """The weights of :func:`_sparsemixer`, ``[T, top_k]``."""
    left, weights = logits.clone(), []
    for expert in chosen.split(1, dim=1):
        best = left.amax(1, keepdim=True)
        far = best - left > NEAR.value * left.abs().maximum(best)
        weights.append(1.0 / (left - best).exp().masked_fill(far, 0.0).sum(1, keepdim=True))
        left.scatter_(1, expert, float("-inf"))
    return torch.cat(weights, dim=1)


def _route_reference(
    router_logits: torch.Tensor, bias: torch.Tensor | None, weights: torch.Tensor, ids: torch.Tensor, rule: Rule
) -> None:
    whole = [(slice(0, len(ids)), router_logits)]
    for part, rows in rows_apart(router_logits) if rule.batch_invariant else whole:
        weights[part], ids[part] = _route(rows, bias, ids.shape[1], rule)


@register_op(mutates=("weights", "ids"), reference=_route_reference)
def _moe_route(
    router_logits: torch.Tensor, bias: torch.Tensor | None, weights: torch.Tensor, ids: torch.Tensor, rule: Rule
) -> None:
    tokens, experts = router_logits.shape
    if tokens == 0:
        return
    if rule.batch_invariant:  # one for any number of tokens: who adds up a row's scores follows from it
        config = default_route_config(experts, 1)
    else:
        sizes = {"experts": experts, "tokens": tokens}
        config = tuning.get_config("moe_route", router_logits.device, default_route_config, **sizes)
    programs = triton.cdiv(tokens, config["ROWS"])
    _moe_route_kernel[(programs,)](
        *(router_logits, bias, weights, ids, tokens, router_logits.stride(0), rule.routing_scale),
        TOP_K=ids.shape[1],
        ROUTING=routing_constants(experts, rule),
        **dependent_launch(router_logits.device, programs),
        **config,
    )


def check_routing(logits: torch.Tensor, top_k: int, bias: torch.Tensor | None, rule: Rule) -> None:
    _, scoring, groups, top_k_groups, _, _ = rule
    check_tensor("router_logits", logits, ("T", "E"))
    experts = logits.shape[1]
    require(scoring in SCORINGS, f"scoring must be one of {', '.join(SCORINGS)}, got {scoring!r}")
    plain = bias is None and groups == 1
    require(plain or scoring != "sparsemixer", "scoring='sparsemixer' with a bias or groups is not supported")
    if bias is not None:
        check_tensor("bias", bias, (experts,), like=logits)
    require(groups >= 1 and experts % groups == 0, f"num_groups must divide the {experts} experts, got {groups}")
    require(1 <= top_k_groups <= groups, f"top_k_groups must be from 1 to num_groups={groups}, got {top_k_groups}")
    available = experts // groups * top_k_groups
    require(1 <= top_k <= available, f"top_k must be from 1 to the {available} experts to choose from, got {top_k}")


def moe_route(
    router_logits: torch.Tensor,
    top_k: int,
    *,
    renormalize: bool = True,
    scoring: str = "softmax",
    bias: torch.Tensor | None = None,
    num_groups: int | None = None,
    top_k_groups: int | None = None,
    scale: float = 1.0,
    batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the ``top_k`` experts of each token, best first, and their weights.

    The scores are computed in float32 over all experts, and a weight is the score of a chosen expert. The choice is
    by score (softmax and sigmoid increase, so the logits themselves are compared), or by score + ``bias``. Of equal
    experts the lowest goes first; NaN loses to every number, so that ids are always valid and distinct, and its
    weights are NaN. Mixtral and Qwen3-MoE: the defaults.

    With groups, experts are ``num_groups`` runs of equal length, and only those of the ``top_k_groups`` best can be
    chosen. A group's score is its largest one (DeepSeek-V2) or, if there is a bias, the sum of its two largest
    (DeepSeek-V3).

    ``late_sigmoid`` (Kolibri 1) has the bias added to the logits, not to their sigmoids, which are the weights.
    SparseMixer (Phi-3.5-MoE) weighs each chosen expert among those that were left when it was chosen, as a softmax over
    those whose logits are nearly as large as its own.

    Args:
        router_logits: ``[T, E]`` float16, bfloat16 or float32.
        top_k: experts a token.
        renormalize: divide the weights of a token by their sum.
        scoring: ``"softmax"``, ``"sigmoid"``, ``"late_sigmoid"``, or ``"sparsemixer"``, which has neither bias nor
            groups.
        bias: ``[E]`` added for the choice only (DeepSeek-V3's correction bias).
        num_groups: divides ``E``; with ``top_k_groups``.
        top_k_groups: groups a token.
        scale: multiplies the weights (DeepSeek's routed scaling factor).
        batch_invariant: a token's weights have the same bits whatever the number of tokens.

    Returns:
        ``(weights, ids)``: ``[T, top_k]`` float32 and int32.

    Raises:
        ValueError: a wrong shape, dtype or device, or a number that does not fit the others.
    """
    require((num_groups is None) == (top_k_groups is None), "num_groups and top_k_groups must be given together")
    groups = (1, 1) if num_groups is None or top_k_groups is None else (num_groups, top_k_groups)
    rule = Rule(renormalize, scoring, *groups, scale, batch_invariant)
    check_routing(router_logits, top_k, bias, rule)
    weights = torch.empty((router_logits.shape[0], top_k), dtype=torch.float32, device=router_logits.device)
    ids = torch.empty_like(weights, dtype=torch.int32)
    _moe_route(router_logits, bias, weights, ids, *rule)
    return weights, ids


moe_route_ref = with_reference(moe_route)

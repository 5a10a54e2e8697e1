"""Mixture of experts, routing: which experts each token goes to, and with what weights.

The scores of a token stay in registers while the largest is taken ``top_k`` times: no sort, and bound by latency.
Routing: Shazeer et al., "Outrageously Large Neural Networks" (2017); groups of experts and the correction bias:
DeepSeek-V2 and DeepSeek-V3 (2024).
"""

import torch
import triton
import triton.language as tl

from tritonllm.kernels import tuning
from tritonllm.kernels.checks import check_tensor, require
from tritonllm.kernels.dependent_launch import dependent_launch, let_next_start, wait_for_previous
from tritonllm.kernels.registry import register_op

# Stands for NaN and -inf when experts are compared: less than any score, more than an expert that may not be taken.
LOWEST = tl.constexpr(-1e38)


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


@triton.jit(do_not_specialize=["T"])
def _moe_route_kernel(
    logits_ptr,  # [T, E]
    bias_ptr,  # [E] if HAS_BIAS
    weights_ptr,  # [T, TOP_K]
    ids_ptr,  # [T, TOP_K]
    T,
    stride_logits,
    scale,
    TOP_K: tl.constexpr,
    SOFTMAX: tl.constexpr,  # else sigmoid
    RENORMALIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    TOP_K_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr,  # power of two, >= NUM_GROUPS
    GROUP: tl.constexpr,  # power of two, >= GROUP_SIZE
    K_BLOCK: tl.constexpr,  # power of two, >= TOP_K
    PDL: tl.constexpr,
    ROWS: tl.constexpr,
):
    wait_for_previous(PDL)
    let_next_start(PDL)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    # each group has its own lanes, so that a reshape finds it; lanes are in the order of the experts
    lane = tl.arange(0, GROUPS * GROUP)[None, :]
    expert = lane // GROUP * GROUP_SIZE + lane % GROUP
    m_expert = (lane // GROUP < NUM_GROUPS) & (lane % GROUP < GROUP_SIZE)
    p_logits = logits_ptr + row * stride_logits + expert
    b_logits = tl.load(p_logits, mask=(row < T) & m_expert, other=float("-inf")).to(tl.float32)
    if SOFTMAX:
        b_exp = tl.exp(b_logits - tl.max(b_logits, axis=1)[:, None])
        b_scores = b_exp / tl.sum(b_exp, axis=1)[:, None]
    else:
        b_scores = tl.sigmoid(b_logits)
    b_choice = b_logits
    if HAS_BIAS:
        b_choice = b_scores + tl.load(bias_ptr + expert, mask=m_expert, other=0.0).to(tl.float32)
    b_choice = tl.where(b_choice > LOWEST, b_choice, LOWEST)  # also where it is NaN
    b_choice = tl.where(m_expert, b_choice, float("-inf"))
    if TOP_K_GROUPS < NUM_GROUPS:
        b_choice = _only_best_groups(b_choice, HAS_BIAS, GROUP_SIZE, TOP_K_GROUPS, GROUPS, GROUP)

    column = tl.arange(0, K_BLOCK)[None, :]
    b_weights = tl.zeros([ROWS, K_BLOCK], tl.float32)
    b_ids = tl.zeros([ROWS, K_BLOCK], tl.int32)
    for i in range(TOP_K):
        best = tl.argmax(b_choice, axis=1)[:, None]  # the lowest lane of equals
        hit = lane == best
        b_weight = tl.sum(tl.where(hit, b_scores, 0.0), axis=1)[:, None]
        b_weights = tl.where(column == i, b_weight, b_weights)
        b_ids = tl.where(column == i, best // GROUP * GROUP_SIZE + best % GROUP, b_ids)
        b_choice = tl.where(hit, float("-inf"), b_choice)
    if RENORMALIZE:
        b_weights = b_weights / (tl.sum(b_weights, axis=1)[:, None] + 1e-20)  # sigmoids may all be 0
    mask = (row < T) & (column < TOP_K)
    tl.store(weights_ptr + row * TOP_K + column, b_weights * scale, mask=mask)
    tl.store(ids_ptr + row * TOP_K + column, b_ids, mask=mask)


def default_route_config(experts: int, tokens: int) -> tuning.Config:
    """One warp a token, so that no comparison leaves it; four tokens a program once that fills the chip."""
    rows = 4 if tokens >= 4096 else 1
    return {"ROWS": rows, "num_warps": rows * max(1, min(8, experts // 512))}


def _route_reference(
    router_logits: torch.Tensor,
    bias: torch.Tensor | None,
    weights: torch.Tensor,
    ids: torch.Tensor,
    renormalize: bool,
    scoring: str,
    num_groups: int,
    top_k_groups: int,
    scale: float,
) -> None:
    logits = router_logits.float()
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    choice = logits if bias is None else scores + bias.float()
    choice = choice.nan_to_num(nan=LOWEST.value, posinf=float("inf"), neginf=LOWEST.value).clamp(min=LOWEST.value)
    if top_k_groups < num_groups:
        grouped = choice.unflatten(-1, (num_groups, -1))
        per_group = 1 if bias is None else min(2, grouped.shape[-1])
        group_score = grouped.topk(per_group, dim=-1).values.sum(-1)
        best = group_score.sort(dim=-1, descending=True, stable=True).indices[:, :top_k_groups]
        allowed = torch.zeros_like(group_score, dtype=torch.bool).scatter_(1, best, True)
        choice = grouped.masked_fill(~allowed.unsqueeze(-1), float("-inf")).flatten(1)
    chosen = choice.sort(dim=-1, descending=True, stable=True).indices[:, : ids.shape[1]]
    picked = scores.gather(1, chosen)
    if renormalize:
        picked = picked / (picked.sum(dim=-1, keepdim=True) + 1e-20)
    weights.copy_(picked * scale)
    ids.copy_(chosen)


@register_op(mutates=("weights", "ids"), reference=_route_reference)
def _moe_route(
    router_logits: torch.Tensor,
    bias: torch.Tensor | None,
    weights: torch.Tensor,
    ids: torch.Tensor,
    renormalize: bool,
    scoring: str,
    num_groups: int,
    top_k_groups: int,
    scale: float,
) -> None:
    tokens, experts = router_logits.shape
    top_k, group_size = ids.shape[1], experts // num_groups
    if tokens == 0:
        return
    config = tuning.get_config("moe_route", router_logits.device, default_route_config, experts=experts, tokens=tokens)
    programs = triton.cdiv(tokens, config["ROWS"])
    _moe_route_kernel[(programs,)](
        router_logits,
        router_logits if bias is None else bias,
        weights,
        ids,
        tokens,
        router_logits.stride(0),
        scale,
        TOP_K=top_k,
        SOFTMAX=scoring == "softmax",
        RENORMALIZE=renormalize,
        HAS_BIAS=bias is not None,
        NUM_GROUPS=num_groups,
        GROUP_SIZE=group_size,
        TOP_K_GROUPS=top_k_groups,
        GROUPS=triton.next_power_of_2(num_groups),
        GROUP=triton.next_power_of_2(group_size),
        K_BLOCK=triton.next_power_of_2(top_k),
        **dependent_launch(router_logits.device, programs),
        **config,
    )


def _check_route(
    logits: torch.Tensor, top_k: int, scoring: str, bias: torch.Tensor | None, groups: int, top_k_groups: int
) -> None:
    check_tensor("router_logits", logits, ("T", "E"))
    experts = logits.shape[1]
    require(scoring in ("softmax", "sigmoid"), f"scoring must be 'softmax' or 'sigmoid', got {scoring!r}")
    if bias is not None:
        check_tensor("bias", bias, (experts,), like=logits)
    require(groups >= 1 and experts % groups == 0, f"num_groups must divide the {experts} experts, got {groups}")
    require(1 <= top_k_groups <= groups, f"top_k_groups must be from 1 to num_groups={groups}, got {top_k_groups}")
    available = experts // groups * top_k_groups
    require(1 <= top_k <= available, f"top_k must be from 1 to the {available} experts to choose from, got {top_k}")


def _prepare(
    router_logits: torch.Tensor,
    top_k: int,
    scoring: str,
    bias: torch.Tensor | None,
    num_groups: int | None,
    top_k_groups: int | None,
) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Check, and allocate ``(weights, ids)``; the groups are 1 of 1 if there are none."""
    require((num_groups is None) == (top_k_groups is None), "num_groups and top_k_groups must be given together")
    groups = 1 if num_groups is None else num_groups
    best_groups = 1 if top_k_groups is None else top_k_groups
    _check_route(router_logits, top_k, scoring, bias, groups, best_groups)
    weights = torch.empty((router_logits.shape[0], top_k), dtype=torch.float32, device=router_logits.device)
    return weights, torch.empty_like(weights, dtype=torch.int32), groups, best_groups


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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the ``top_k`` experts of each token, best first, and their weights.

    The scores are computed in float32 over all experts, and a weight is the score of a chosen expert. The choice is
    by score (softmax and sigmoid increase, so the logits themselves are compared), or by score + ``bias``. Of equal
    experts the lowest goes first; NaN loses to every number, so that ids are always valid and distinct, and its
    weights are NaN. Mixtral and Qwen3-MoE: the defaults.

    With groups, experts are ``num_groups`` runs of equal length, and only those of the ``top_k_groups`` best can be
    chosen. A group's score is its largest one (DeepSeek-V2) or, if there is a bias, the sum of its two largest
    (DeepSeek-V3).

    Args:
        router_logits: ``[T, E]`` float16, bfloat16 or float32.
        top_k: experts a token.
        renormalize: divide the weights of a token by their sum.
        scoring: ``"softmax"`` or ``"sigmoid"``.
        bias: ``[E]`` added for the choice only (DeepSeek-V3's correction bias).
        num_groups: divides ``E``; with ``top_k_groups``.
        top_k_groups: groups a token.
        scale: multiplies the weights (DeepSeek's routed scaling factor).

    Returns:
        ``(weights, ids)``: ``[T, top_k]`` float32 and int32.

    Raises:
        ValueError: a wrong shape, dtype or device, or a number that does not fit the others.
    """
    weights, ids, groups, best_groups = _prepare(router_logits, top_k, scoring, bias, num_groups, top_k_groups)
    _moe_route(router_logits, bias, weights, ids, renormalize, scoring, groups, best_groups, scale)
    return weights, ids


def moe_route_ref(
    router_logits: torch.Tensor,
    top_k: int,
    *,
    renormalize: bool = True,
    scoring: str = "softmax",
    bias: torch.Tensor | None = None,
    num_groups: int | None = None,
    top_k_groups: int | None = None,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`moe_route` in plain torch."""
    weights, ids, groups, best_groups = _prepare(router_logits, top_k, scoring, bias, num_groups, top_k_groups)
    _route_reference(router_logits, bias, weights, ids, renormalize, scoring, groups, best_groups, scale)
    return weights, ids

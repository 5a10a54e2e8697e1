"""Mixture of experts from the router's logits: the choice of experts and their gated MLPs.

:func:`moe_route` and then :func:`fused_moe`. For one token the programs of :mod:`tritonllm.kernels.moe.portable.direct`
choose the experts themselves, each of them the same: a launch less between the router and the experts' weights, which
cannot be asked for before.
"""

import torch

from tritonllm.kernels.dense import Weight
from tritonllm.kernels.moe.arguments import ExpertChoice, Experts, Result, Rule, map_size
from tritonllm.kernels.moe.experts import check_experts, check_map, make_experts, make_result, normalise
from tritonllm.kernels.moe.portable import direct
from tritonllm.kernels.moe.route import check_routing, routing_constants
from tritonllm.kernels.moe.tiles import FUSED_MOE, config_key
from tritonllm.kernels.runtime import tuning
from tritonllm.kernels.runtime.checks import check_scaled, check_tensor
from tritonllm.kernels.runtime.registry import OPS, register_op, with_reference

# Of longer rows programs have 8 warps, which each choose: gpt-oss (2880) 57 us instead of 52.
MAX_HIDDEN = 2048


def _choose(
    x: torch.Tensor,
    logits: torch.Tensor,
    correction_bias: torch.Tensor | None,
    expert_map: torch.Tensor | None,
    top_k: int,
    rule: Rule,
    experts: Experts,
    result: Result,
) -> None:
    """Choose the experts and compute their products, as two operations."""
    weights = torch.empty((len(x), top_k), dtype=torch.float32, device=x.device)
    ids = torch.empty_like(weights, dtype=torch.int32)
    OPS["moe_route"](logits, correction_bias, weights, ids, *rule)
    OPS["fused_moe"](x, *experts, *ExpertChoice(weights, ids, expert_map), *result, rule.batch_invariant)


@register_op(mutates=("out", "normed"), reference=_choose)
def _moe_from_logits(
    x: torch.Tensor,
    logits: torch.Tensor,
    correction_bias: torch.Tensor | None,
    expert_map: torch.Tensor | None,
    top_k: int,
    rule: Rule,
    experts: Experts,
    result: Result,
) -> None:
    tokens, num_experts = logits.shape
    if tokens == 0:
        return
    chooses_itself = rule.num_groups == 1 and expert_map is None and not (rule.batch_invariant or experts.narrow)
    if tokens == 1 and chooses_itself and x.shape[1] <= MAX_HIDDEN:
        key = config_key(x, experts, top_k, num_experts)
        if tuning.get_config("fused_moe", x.device, FUSED_MOE.default_config, **key)["kernel"] == "direct":
            constants = routing_constants(num_experts, rule)
            direct.launch(
                x, experts, direct.Routing(logits, correction_bias, rule.routing_scale, top_k, constants), result
            )
            normalise(result)
            return
    _choose(x, logits, correction_bias, expert_map, top_k, rule, experts, result)


def moe_from_logits(
    x: torch.Tensor,
    logits: torch.Tensor,
    w_gate_up: torch.Tensor | Weight,
    w_down: torch.Tensor | Weight,
    top_k: int,
    *,
    renormalize: bool = True,
    scoring: str = "softmax",
    correction_bias: torch.Tensor | None = None,
    num_groups: int = 1,
    top_k_groups: int = 1,
    routing_scale: float = 1.0,
    activation: str = "silu",
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    scale: float = 1.0,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_weight_offset: float = 0.0,
    batch_invariant: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """:func:`fused_moe` of the experts that :func:`moe_route` chooses; what is not listed here is as in those two.

    Args:
        logits: ``[T, E]`` float16, bfloat16 or float32 of the router.
        correction_bias: the ``bias`` of :func:`moe_route`; ``routing_scale``: its ``scale``.
        num_groups: divides ``E``; 1 for no groups.
        top_k_groups: groups a token.
        scale: multiplies the result where it is added to ``residual``, without which it must be 1.

    Returns:
        ``residual``, or a new tensor ``[T, N]`` of the dtype of ``x``; with ``norm_weight`` that and its norm.

    Raises:
        ValueError: as those two do.
    """
    check_scaled(scale, residual)
    experts = make_experts(w_gate_up, w_down, gate_up_bias, down_bias, activation)
    rule = Rule(renormalize, scoring, num_groups, top_k_groups, routing_scale, batch_invariant)
    check_experts(x, experts, residual)
    check_map(x, expert_map, batch_invariant)
    check_tensor("logits", logits, (len(x), map_size(expert_map, len(experts.w_down))[1]), like=x)
    check_routing(logits, top_k, correction_bias, rule)
    result = make_result(x, residual, scale, norm_weight, norm_eps, norm_weight_offset)
    _moe_from_logits(x, logits, correction_bias, expert_map, top_k, *rule, *experts, *result)
    return result.out if result.normed is None else (result.out, result.normed)


moe_from_logits_ref = with_reference(moe_from_logits)

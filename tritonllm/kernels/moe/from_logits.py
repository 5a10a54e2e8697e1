"""Mixture of experts from the router's logits: the choice of experts and their gated MLPs.

:func:`moe_route` and then :func:`fused_moe`. For one token the programs of :mod:`tritonllm.kernels.moe.portable.direct`
choose the experts themselves, each of them the same: a launch less between the router and the experts' weights, which
cannot be asked for before.
"""

from typing import Any

import torch

from tritonllm.kernels.moe.experts import check_experts, fused_moe_reference, outputs
from tritonllm.kernels.moe.portable import direct
from tritonllm.kernels.moe.route import check_routing, moe_route_ref, routing_constants
from tritonllm.kernels.moe.tiles import config_key, default_config
from tritonllm.kernels.runtime import tuning
from tritonllm.kernels.runtime.checks import check_scaled, check_tensor
from tritonllm.kernels.runtime.registry import OPS, register_op

# Of longer rows programs have 8 warps, which each choose: gpt-oss (2880) 57 us instead of 52.
MAX_HIDDEN = 2048


def _reference(
    x: torch.Tensor,
    logits: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    correction_bias: torch.Tensor | None,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    out: torch.Tensor,
    norm_weight: torch.Tensor | None,
    normed: torch.Tensor | None,
    top_k: int,
    renormalize: bool,
    scoring: str,
    num_groups: int,
    top_k_groups: int,
    routing_scale: float,
    activation: str,
    add: bool,
    scale: float,
    norm_eps: float,
    norm_offset: float,
) -> None:
    groups: dict[str, Any] = {"num_groups": num_groups, "top_k_groups": top_k_groups, "scale": routing_scale}
    how: dict[str, Any] = {"renormalize": renormalize, "scoring": scoring, "bias": correction_bias}
    choice = moe_route_ref(logits, top_k, **how, **groups)
    fused_moe_reference(
        *(x, w_gate_up, w_down, *choice, gate_up_bias, down_bias, None, out, norm_weight, normed, activation, add),
        *(scale, norm_eps, norm_offset),
    )


@register_op(mutates=("out", "normed"), reference=_reference)
def _moe_from_logits(
    x: torch.Tensor,
    logits: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    correction_bias: torch.Tensor | None,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    out: torch.Tensor,
    norm_weight: torch.Tensor | None,
    normed: torch.Tensor | None,
    top_k: int,
    renormalize: bool,
    scoring: str,
    num_groups: int,
    top_k_groups: int,
    routing_scale: float,
    activation: str,
    add: bool,
    scale: float,
    norm_eps: float,
    norm_offset: float,
) -> None:
    tokens, experts = logits.shape
    if tokens == 0:
        return
    key = config_key(x, w_gate_up, w_down, top_k, experts, activation)
    biases = gate_up_bias, down_bias
    config = tuning.get_config("fused_moe", x.device, default_config, **key)
    if config["kernel"] == "direct" and tokens == 1 and num_groups == 1 and x.shape[1] <= MAX_HIDDEN:
        constants = routing_constants(experts, renormalize, scoring, num_groups, top_k_groups)
        routing = direct.Routing(logits, correction_bias, routing_scale, top_k, constants)
        direct.launch(x, w_gate_up, w_down, routing, *biases, out, activation, add, scale)
        if normed is not None:
            OPS["norm"](out, None, norm_weight, None, normed, None, norm_eps, norm_offset, 1.0, False)
        return
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=x.device)
    ids = torch.empty_like(weights, dtype=torch.int32)
    OPS["moe_route"](
        logits, correction_bias, weights, ids, renormalize, scoring, num_groups, top_k_groups, routing_scale
    )
    norm = (norm_eps, norm_offset)
    OPS["fused_moe"](
        x, w_gate_up, w_down, weights, ids, *biases, None, out, norm_weight, normed, activation, add, scale, *norm
    )


def _prepare(
    x: torch.Tensor,
    logits: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    activation: str,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Check all but the routing; what is written."""
    check_experts(x, w_gate_up, w_down, gate_up_bias, down_bias, activation, residual)
    check_tensor("logits", logits, (len(x), len(w_down)), like=x)
    return outputs(x, residual, norm_weight)


def moe_from_logits(
    x: torch.Tensor,
    logits: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
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
    residual: torch.Tensor | None = None,
    scale: float = 1.0,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_weight_offset: float = 0.0,
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
    out, normed = _prepare(x, logits, w_gate_up, w_down, gate_up_bias, down_bias, activation, residual, norm_weight)
    check_routing(logits, top_k, scoring, correction_bias, num_groups, top_k_groups)
    _moe_from_logits(
        *(x, logits, w_gate_up, w_down, correction_bias, gate_up_bias, down_bias, out, norm_weight, normed),
        *(top_k, renormalize, scoring, num_groups, top_k_groups, routing_scale, activation, residual is not None),
        *(scale, norm_eps, norm_weight_offset),
    )
    return out if normed is None else (out, normed)


def moe_from_logits_ref(
    x: torch.Tensor,
    logits: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
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
    residual: torch.Tensor | None = None,
    scale: float = 1.0,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_weight_offset: float = 0.0,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """:func:`moe_from_logits` in plain torch."""
    check_scaled(scale, residual)
    out, normed = _prepare(x, logits, w_gate_up, w_down, gate_up_bias, down_bias, activation, residual, norm_weight)
    check_routing(logits, top_k, scoring, correction_bias, num_groups, top_k_groups)
    _reference(
        *(x, logits, w_gate_up, w_down, correction_bias, gate_up_bias, down_bias, out, norm_weight, normed),
        *(top_k, renormalize, scoring, num_groups, top_k_groups, routing_scale, activation, residual is not None),
        *(scale, norm_eps, norm_weight_offset),
    )
    return out if normed is None else (out, normed)

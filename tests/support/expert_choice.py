"""One model's choice of experts, forced on another: then only the arithmetic differs.

Where two experts are nearly equal, rounding sends a token to another one in every implementation, and each such token
changes all later ones a little. Of gpt-oss with dummy weights it is 3% of the tokens in the first layer and 15% in the
second: without forcing, that decides how far two implementations are apart, and it is chance (on an H200 in bfloat16,
0.036 to 0.062 from float32 for ours and 0.050 to 0.057 for transformers; with the experts of float32 0.017 and 0.026).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from transformers import PreTrainedModel

from tritonllm.kernels import fused_moe
from tritonllm.layers import moe
from tritonllm.layers.moe import MoESpec
from tritonllm.models.spec import ModelSpec

EXPERT_OPTIONS = (
    "activation",
    "gate_up_bias",
    "down_bias",
    "residual",
    "scale",
    "norm_weight",
    "norm_eps",
    "norm_weight_offset",
)


def can_be_forced(spec: ModelSpec) -> bool:
    """There are experts, weighed by a softmax over the chosen ones' logits."""
    experts = [layer.mlp for layer in spec.layers if isinstance(layer.mlp, MoESpec)]
    return bool(experts) and all(e.scoring == "softmax" and e.renormalize and not e.expert_scales for e in experts)


def _weights(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return logits.float().gather(1, ids.long()).softmax(-1)


@contextmanager
def experts_of(model: PreTrainedModel, forced: Sequence[torch.Tensor] | None = None) -> Iterator[list[torch.Tensor]]:
    """Inside the block, yields what the routers of a model of transformers choose: ``[tokens, k]`` a call, in order.

    Args:
        forced: what they shall choose instead, call by call.
    """
    chosen: list[torch.Tensor] = []

    def hook_of_logits(router: Any, args: Any, logits: torch.Tensor) -> torch.Tensor:
        """DBRX's router says no more: the experts that it shall not choose get none of the softmax."""
        ids = logits.topk(model.config.ffn_config.moe_top_k).indices
        if forced is not None:
            ids = forced[len(chosen)].to(ids.dtype)
            logits = torch.full_like(logits, -torch.inf).scatter(1, ids, logits.gather(1, ids))
        chosen.append(ids)
        return logits

    def hook(router: Any, args: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        logits, weights, ids = output
        if forced is not None:
            ids = forced[len(chosen)].to(ids.dtype)
            weights = _weights(logits, ids).to(weights.dtype)
        chosen.append(ids)
        return logits, weights, ids

    hooks = {"TopKRouter": hook, "MoEV1Gate": hook, "DbrxRouter": hook_of_logits}
    handles = [
        module.register_forward_hook(hooks[end])
        for module in model.modules()
        for end in hooks
        if type(module).__name__.endswith(end)
    ]
    try:
        yield chosen
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def forced_on_ours(choices: Sequence[torch.Tensor]) -> Iterator[None]:
    """Inside the block, our layers choose ``choices``, ``[tokens, k]`` a call; exactly so many calls must come."""
    calls = iter(choices)

    def forced(
        x: torch.Tensor, logits: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, top_k: int, **kwargs: Any
    ):
        ids = next(calls)
        of_experts = {name: kwargs[name] for name in EXPERT_OPTIONS if name in kwargs}
        return fused_moe(x, gate_up, down, _weights(logits, ids), ids.to(torch.int32), **of_experts)

    with patch.object(moe, "moe_from_logits", forced):
        yield
    assert next(calls, None) is None

"""What the operators and launchers of a mixture of experts take together; as of ``fused_moe`` and ``moe_route``."""

from typing import NamedTuple

import torch


class Experts(NamedTuple):
    """The experts' weights, and what they compute."""

    w_gate_up: torch.Tensor
    w_down: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    activation: str


class ExpertChoice(NamedTuple):
    """The experts that were chosen for each token, and their weights."""

    weights: torch.Tensor
    ids: torch.Tensor
    expert_map: torch.Tensor | None


def map_size(expert_map: torch.Tensor | None, experts: int) -> tuple[int, int]:
    """Rows of a map, which tokens take in turns, and the ids that it knows; without one 0, and the experts here."""
    if expert_map is None:
        return 0, experts
    return (1 if expert_map.dim() == 1 else expert_map.shape[0]), expert_map.shape[-1]


class Rule(NamedTuple):
    """How experts are chosen; without groups, there is one."""

    renormalize: bool
    scoring: str
    num_groups: int
    top_k_groups: int
    routing_scale: float
    batch_invariant: bool = False


class Result(NamedTuple):
    """What is written: the sum over a token's experts, and its norm."""

    out: torch.Tensor
    add: bool  # `scale` times the sum to what is in `out`
    scale: float
    normed: torch.Tensor | None
    norm_weight: torch.Tensor | None
    norm_eps: float
    norm_offset: float

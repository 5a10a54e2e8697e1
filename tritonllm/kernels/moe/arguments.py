"""What the operators and launchers of a mixture of experts take together; as of ``fused_moe`` and ``moe_route``."""

from typing import NamedTuple

import torch

from tritonllm.kernels.dense import Scaled


class Experts(NamedTuple):
    """The experts' weights (the numbers of narrow ones), and what they compute."""

    w_gate_up: torch.Tensor
    w_down: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    activation: str
    gate_up_scales: torch.Tensor | None = None  # of narrow weights; None for plain ones
    down_scales: torch.Tensor | None = None
    gate_up_zeros: torch.Tensor | None = None
    down_zeros: torch.Tensor | None = None
    gate_up_row_scales: torch.Tensor | None = None
    down_row_scales: torch.Tensor | None = None
    group_rows: int = 1
    group_columns: int = 0

    @property
    def narrow(self) -> bool:
        return self.gate_up_scales is not None

    @property
    def scaled_gate_up(self) -> Scaled:
        groups = self.group_rows, self.group_columns
        return Scaled(self.gate_up_scales, *groups, self.gate_up_zeros, self.gate_up_row_scales)

    @property
    def scaled_down(self) -> Scaled:
        return Scaled(self.down_scales, self.group_rows, self.group_columns, self.down_zeros, self.down_row_scales)

    def sizes(self) -> tuple[int, int, int]:
        """How many experts there are, the columns of a token, and those between an expert's two products."""
        experts, n, _ = self.w_down.shape
        return experts, n, self.w_gate_up.shape[1] // 2


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

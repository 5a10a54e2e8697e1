"""What the operator of the norms takes together."""

from typing import NamedTuple

import torch


class NormOptions(NamedTuple):
    """How rows are normalised."""

    weight: torch.Tensor | None  # [N] or [H, N]
    bias: torch.Tensor | None  # as the weight
    eps: float
    weight_offset: float = 0.0
    mean: bool = False  # LayerNorm
    batch_invariant: bool = False  # a row is summed in one order, however many rows there are


class Rows(NamedTuple):
    """What is normalised, and what is written."""

    x: torch.Tensor
    residual: torch.Tensor | None  # gets the sum
    out: torch.Tensor
    scale: torch.Tensor | None  # of each row, if out is float8 or int8
    x_scale: float

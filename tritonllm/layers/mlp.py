"""The feed-forward block: ``down(act(up(x)))``, or gated, ``down(act(gate(x)) * up(x))``."""

from dataclasses import dataclass

import torch
from torch import nn

from tritonllm.kernels import xielu
from tritonllm.kernels.dense.portable.tiles import MAX_BLOCK_M
from tritonllm.kernels.elementwise.quantized import act_and_mul_quantize
from tritonllm.layers.linear import Linear
from tritonllm.layers.norm import BlockInput
from tritonllm.layers.parameters import empty_parameter
from tritonllm.layers.residual import Addend

GATED_ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
ACTIVATIONS = (*GATED_ACTIVATIONS, "relu", "relu2", "xielu")


@dataclass(frozen=True, kw_only=True)
class MLPSpec:
    """A feed-forward block.

    Attributes:
        intermediate_size: columns between the two products.
        activation: one of ``ACTIVATIONS``; of ``GATED_ACTIVATIONS`` with a gate.
        gated: the activation multiplies a second projection of the input.
        bias: whether all projections have a bias.
    """

    intermediate_size: int
    activation: str
    gated: bool = True
    bias: bool = False

    def __post_init__(self) -> None:
        allowed = GATED_ACTIVATIONS if self.gated else ACTIVATIONS
        if self.activation not in allowed:
            gated = " of a gated MLP" if self.gated else ""
            raise ValueError(f"activation{gated} must be one of {', '.join(allowed)}, got {self.activation!r}")


class XIELU(nn.Module):
    """The activation xIELU (:func:`tritonllm.kernels.xielu`) with its parameters."""

    def __init__(self, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = empty_parameter(4, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, size]``, in place."""
        return xielu(x, self.weight, out=x)


class MLP(nn.Module):
    """A feed-forward block. With a gate, gate and up are one projection, gate first: one product reads the input
    once."""

    def __init__(self, hidden_size: int, spec: MLPSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec = spec
        inner = spec.intermediate_size
        columns = 2 * inner if spec.gated else inner
        self.up = Linear(hidden_size, columns, bias=spec.bias, dtype=dtype, device=device)
        self.act = XIELU(dtype=dtype, device=device) if spec.activation == "xielu" else None
        self.down = Linear(inner, hidden_size, bias=spec.bias, dtype=dtype, device=device)

    def forward(self, x: BlockInput) -> Addend:
        """``[T, hidden]`` -> ``[T, hidden]``, to be added."""
        if self.act is not None:
            return Addend(self.down, self.act(self.up(*x)))
        rounds_to = self.down.rounds_to
        if self.spec.gated and rounds_to is not None and x.rows.shape[0] > MAX_BLOCK_M:
            rows, scales = act_and_mul_quantize(self.up(*x), self.spec.activation, rounds_to)
            return Addend(self.down, BlockInput(rows, scales=scales))
        return Addend(self.down, self.up(*x, activation=self.spec.activation, gated=self.spec.gated))

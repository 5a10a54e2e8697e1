"""The gated feed-forward block: ``down(act(gate(x)) * up(x))``."""

import torch
from torch import nn

from tritonllm.kernels import gelu_and_mul, silu_and_mul
from tritonllm.layers.linear import Linear


class GatedMLP(nn.Module):
    """Gate and up are one projection, gate first.

    Args:
        activation: ``silu``, ``gelu`` or ``gelu_tanh``.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.gate_up = Linear(hidden_size, 2 * intermediate_size, bias=bias, dtype=dtype, device=device)
        self.down = Linear(intermediate_size, hidden_size, bias=bias, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate_up = self.gate_up(x)
        if self.activation == "silu":
            return self.down(silu_and_mul(gate_up))
        return self.down(gelu_and_mul(gate_up, approximate="tanh" if self.activation == "gelu_tanh" else "none"))

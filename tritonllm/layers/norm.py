"""Root mean square normalisation with the residual stream (Zhang and Sennrich, 2019)."""

import torch
from torch import nn

from tritonllm.kernels import fused_add_rms_norm, rms_norm
from tritonllm.layers.linear import empty_parameter


class RMSNorm(nn.Module):
    """``x / rms(x) * weight`` over the last dimension, in float32."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = empty_parameter(size, dtype=dtype, device=device)
        self.eps = eps

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Add ``x`` to the residual stream and normalise the sum.

        Args:
            x: ``[T, size]``, what the last block computed; overwritten if there is a residual.
            residual: ``[T, size]``, the stream so far, updated in place; ``None`` where ``x`` starts it.

        Returns:
            The normalised sum, and the stream.
        """
        if residual is None:
            return rms_norm(x, self.weight, self.eps), x
        return fused_add_rms_norm(x, residual, self.weight, self.eps)

    def normalize_(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise ``x[..., size]`` in place, without a residual."""
        return rms_norm(x, self.weight, self.eps, out=x)

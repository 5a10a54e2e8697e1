"""Normalisation with the residual stream.

RMS norm: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019). Layer norm: Ba et al. (2016).
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import nn

from tritonllm.kernels import fused_add_layer_norm, fused_add_rms_norm, layer_norm, rms_norm
from tritonllm.layers.parameters import empty_parameter


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """What a norm computes.

    Attributes:
        kind: ``rms`` divides by the root mean square; ``layer`` subtracts the mean first.
        eps: added to the mean square or the variance.
        weight: there is a weight, or a layer norm has none.
        bias: a layer norm adds one.
        weight_offset: added to the weight of an RMS norm (Gemma stores its difference from 1).
    """

    kind: Literal["rms", "layer"]
    eps: float
    weight: bool = True
    bias: bool = False
    weight_offset: float = 0.0

    def __post_init__(self) -> None:
        if self.kind == "rms" and (self.bias or not self.weight):
            raise ValueError(f"an RMS norm has a weight and no bias, got weight={self.weight}, bias={self.bias}")
        if self.kind == "layer" and self.weight_offset:
            raise ValueError(f"a layer norm has no weight_offset, got {self.weight_offset}")


class Norm(nn.Module):
    """Normalise the last dimension in float32.

    Args:
        shape: ``(size,)``, or ``(heads, size)`` where each head has weights of its own.
        spec: what to compute.
    """

    def __init__(self, shape: tuple[int, ...], spec: NormSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec = spec
        self.weight = empty_parameter(*shape, dtype=dtype, device=device) if spec.weight else None
        self.bias = empty_parameter(*shape, dtype=dtype, device=device) if spec.bias else None

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, x_scale: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add ``x`` to the residual stream and normalise the sum.

        Args:
            x: ``[T, size]``, what the last block computed; overwritten if there is a residual.
            residual: ``[T, size]``, the stream so far, updated in place; ``None`` where ``x`` starts it.
            x_scale: multiplies ``x`` where it is added to a stream.

        Returns:
            The normalised sum, and the stream.
        """
        if residual is None:
            return self.normalize(x), x
        if self.weight is None or self.spec.kind == "layer":
            return fused_add_layer_norm(x, residual, self.weight, self.bias, self.spec.eps, x_scale=x_scale)
        return fused_add_rms_norm(
            x, residual, self.weight, self.spec.eps, weight_offset=self.spec.weight_offset, x_scale=x_scale
        )

    def normalize(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Normalise ``x[..., *shape]`` without a residual, into ``out`` (which may be ``x``) or a new tensor."""
        if self.weight is None or self.spec.kind == "layer":
            return layer_norm(x, self.weight, self.bias, self.spec.eps, out=out)
        return rms_norm(x, self.weight, self.spec.eps, weight_offset=self.spec.weight_offset, out=out)


class BlockInput(NamedTuple):
    """Rows with which a block begins, and what its first product has still to do to them.

    Attributes:
        rows: ``[T, size]``.
        norm: an RMS norm that the product takes along; ``None`` if the rows are as they should be.
        squares: ``[parts, T]`` float32, with a ``norm`` that was begun: ``rows`` are multiplied by its weight, and
            their squares before that add up to these. What is left is to divide by the root mean square.
    """

    rows: torch.Tensor
    norm: Norm | None = None
    squares: torch.Tensor | None = None

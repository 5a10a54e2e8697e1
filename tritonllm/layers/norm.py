"""Normalisation with the residual stream.

RMS norm: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019). Layer norm: Ba et al. (2016).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import nn

from tritonllm.dist.group import Group
from tritonllm.kernels import elementwise as kernels
from tritonllm.kernels.collective import AddedNorm
from tritonllm.kernels.elementwise import cpu
from tritonllm.kernels.elementwise.norm import add_and_normalize, normalize
from tritonllm.kernels.runtime.float8 import empty_rows
from tritonllm.kernels.runtime.registry import runs_in_torch
from tritonllm.layers.parameters import empty_parameter


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """What a norm computes.

    Attributes:
        kind: ``rms`` divides by the root mean square; ``layer`` subtracts the mean first.
        eps: added to the mean square or the variance.
        weight: whether there is a weight.
        bias: whether a layer norm adds a bias.
        weight_offset: added to the weight of an RMS norm (Gemma stores its difference from 1).
    """

    kind: Literal["rms", "layer"]
    eps: float
    weight: bool = True
    bias: bool = False
    weight_offset: float = 0.0

    def __post_init__(self) -> None:
        if self.kind == "rms" and self.bias:
            raise ValueError("an RMS norm has no bias, got bias=True")
        if self.kind == "layer" and self.weight_offset:
            raise ValueError(f"a layer norm has no weight_offset, got {self.weight_offset}")


class Norm(nn.Module):
    """Normalise the last dimension in float32.

    Args:
        shape: ``(size,)``, or ``(heads, size)`` where each head has weights of its own.
        spec: what to compute.
    """

    batch_invariant = False
    weight: torch.Tensor | None

    def __init__(self, shape: tuple[int, ...], spec: NormSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec = spec
        if spec.weight:
            self.weight = empty_parameter(*shape, dtype=dtype, device=device)
        else:  # kernels of RMS norms read one
            ones = torch.ones(shape, dtype=dtype, device=device) if spec.kind == "rms" else None
            self.register_buffer("weight", ones, persistent=False)
        self.bias = empty_parameter(*shape, dtype=dtype, device=device) if spec.bias else None
        self._of_rows = len(shape) == 1

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
        if runs_in_torch(x) and self._of_rows:
            return self._in_torch(residual.add_(x, alpha=x_scale)), residual
        return add_and_normalize(x, residual, self._arguments(), x_scale)

    def add_and_round(self, x: torch.Tensor, residual: torch.Tensor, x_scale: float, dtype: torch.dtype) -> BlockInput:
        """As :meth:`forward` with a residual, of an RMS norm; the normalised sum leaves as float8 or int8."""
        rounded = empty_rows(x, x.shape[-1], dtype)
        add_and_normalize(x, residual, self._arguments(), x_scale, rounded)
        return BlockInput(rounded[0], scales=rounded[1])

    def normalize(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Normalise ``x[..., *shape]`` without a residual, into ``out`` (which may be ``x``) or a new tensor."""
        if out is None and self._of_rows and runs_in_torch(x):
            return self._in_torch(x)
        return normalize(x, self._arguments(), out)

    def after_adding(self, residual: torch.Tensor, x_scale: float) -> AddedNorm:
        """This RMS norm of a stream, as a sum over ranks takes it along. Arguments as in :meth:`forward`."""
        assert self.weight is not None and self.spec.kind == "rms"
        return AddedNorm(residual, self.weight, self.spec.eps, self.spec.weight_offset, x_scale)

    def normalize_over(self, group: Group, x: torch.Tensor) -> None:
        """Normalise rows of which each rank has a part, ``x[T, size]``, in place.

        All parts are equally long. Where two ranks have the same one (replicated key heads) all do equally often, so
        the mean over the ranks is that over the row.
        """
        assert self.weight is not None and self._of_rows
        spec, wide = self.spec, x.float()
        if spec.kind == "layer":
            wide = wide - group.all_reduce(wide.mean(-1, keepdim=True)) / group.size
        square = group.all_reduce(wide.square().mean(-1, keepdim=True)) / group.size
        wide = wide * torch.rsqrt(square + spec.eps) * (self.weight.float() + spec.weight_offset)
        x.copy_(wide if self.bias is None else wide + self.bias.float())

    def _arguments(self) -> kernels.NormOptions:
        spec = self.spec
        how = spec.eps, spec.weight_offset, spec.kind == "layer", self.batch_invariant
        return kernels.NormOptions(self.weight, self.bias, *how)

    def _in_torch(self, x: torch.Tensor) -> torch.Tensor:
        norm = self._arguments()
        return (cpu.layer_normalized(x, norm) if norm.mean else cpu.normalized(x, norm)).to(x.dtype)


class BlockInput(NamedTuple):
    """Rows with which a block begins, and what its first product has still to do to them.

    Attributes:
        rows: ``[T, size]``.
        norm: an RMS norm that the product takes along; ``None`` if the rows are as they should be.
        squares: ``[parts, T]`` float32, with a ``norm`` that was begun: ``rows`` are multiplied by its weight, and
            their squares before that add up to these. What is left is to divide by the root mean square.
        scales: ``[T]`` float32, by which rows that are float8 or int8 have still to be multiplied.
    """

    rows: torch.Tensor
    norm: Norm | None = None
    squares: torch.Tensor | None = None
    scales: torch.Tensor | None = None

"""Heads of embedding models, classifiers and reward models: a few dense layers over pooled hidden states.

They compute in float32 with torch: a row for each prompt, far from where a step's time goes.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F

from tritonllm.layers.norm import Norm, NormSpec
from tritonllm.layers.parameters import empty_parameter

_FUNCTIONS = {
    "tanh": torch.tanh,
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
ACTIVATIONS = tuple(_FUNCTIONS)


@dataclass(frozen=True, kw_only=True)
class DenseSpec:
    """``norm(activation(weight @ x + bias))``.

    Attributes:
        in_features, out_features: the sizes of the input ``x`` and of the result.
        bias: whether there is a bias.
        activation: one of ``ACTIVATIONS``; ``None`` for none.
        norm: a layer norm of the result; ``None`` for none.
    """

    in_features: int
    out_features: int
    bias: bool = False
    activation: str | None = None
    norm: NormSpec | None = None

    def __post_init__(self) -> None:
        if self.activation not in (None, *ACTIVATIONS):
            raise ValueError(f"activation must be None or one of {', '.join(ACTIVATIONS)}, got {self.activation!r}")
        if self.norm is not None and self.norm.kind != "layer":
            raise ValueError(f"a head has layer norms only, got norm.kind={self.norm.kind!r}")


@dataclass(frozen=True, kw_only=True)
class HeadSpec:
    """What a classifier or a reward model has in the place of the output projection.

    Attributes:
        dense: the layers of the head, from the first to the last; the last one has an output for each label.
        pooling: which of a sequence's hidden states is classified: the last, the first, or the mean.
        activation: the function that is applied to the last layer's outputs, if the request wants it.
        step_tag_id: the token id of whose positions token classification reports results; ``None``: all tokens'.
    """

    dense: tuple[DenseSpec, ...]
    pooling: Literal["LAST", "CLS", "MEAN"]
    activation: Literal["none", "sigmoid", "softmax"]
    step_tag_id: int | None = None

    @property
    def labels(self) -> int:
        return self.dense[-1].out_features


class Dense(nn.Module):
    """A :class:`DenseSpec` with its weights."""

    def __init__(self, spec: DenseSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec = spec
        self.weight = empty_parameter(spec.out_features, spec.in_features, dtype=dtype, device=device)
        self.bias = empty_parameter(spec.out_features, dtype=dtype, device=device) if spec.bias else None
        self.norm = None
        if spec.norm is not None:
            self.norm = Norm((spec.out_features,), spec.norm, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x[N, in]`` float32 -> ``[N, out]`` float32."""
        x = F.linear(x, self.weight.float(), _float(self.bias))
        if self.spec.activation is not None:
            x = _FUNCTIONS[self.spec.activation](x)
        if self.norm is not None:
            x = F.layer_norm(x, x.shape[-1:], _float(self.norm.weight), _float(self.norm.bias), self.norm.spec.eps)
        return x


class Head(nn.ModuleList):
    """Dense layers, one after the other."""

    def __init__(self, specs: tuple[DenseSpec, ...], *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(Dense(spec, dtype=dtype, device=device) for spec in specs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x[N, in]`` float32 -> ``[N, out]`` float32."""
        for dense in self:
            x = dense(x)
        return x


def _float(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.float()

"""Linear maps and the embedding table: weights, and one torch call each.

Nothing is fused into these products, so they stay with cuBLAS. Parameters are for inference only (no gradient) and
are left uninitialised: a loader writes every element once.
"""

import torch
from torch import nn
from torch.nn import functional as F


def empty_parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """An uninitialised parameter without gradient."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


def linear_float32(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x[N, in] @ weight[out, in].T + bias[out]`` -> ``[N, out]`` float32, whatever the dtype of the arguments.

    On CUDA the product itself writes float32: rounded to bfloat16 first, logits near 16 would be 1/8 apart, and an
    argmax would meet ties that the model does not have.
    """
    if x.is_cuda and x.dtype != torch.float32:
        out = torch.mm(x, weight.t(), out_dtype=torch.float32)
        return out if bias is None else out.add_(bias)
    return F.linear(x, weight, bias).float()


class Linear(nn.Module):
    """``x[..., in_features] @ weight[out_features, in_features].T + bias[out_features]``.

    Projections of the same input (q, k and v; gate and up) are stacked along ``out_features``: one product reads the
    input once.
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = empty_parameter(out_features, in_features, dtype=dtype, device=device)
        self.bias = empty_parameter(out_features, dtype=dtype, device=device) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class Embedding(nn.Module):
    """Rows of ``weight[num_embeddings, size]``, and the same table as an output projection."""

    def __init__(self, num_embeddings: int, size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = empty_parameter(num_embeddings, size, dtype=dtype, device=device)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """``ids[T]`` int32 or int64 -> ``[T, size]``."""
        return F.embedding(ids, self.weight)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden[N, size] @ weight.T`` -> ``[N, num_embeddings]`` float32."""
        return linear_float32(hidden, self.weight)

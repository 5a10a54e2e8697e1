"""Norms and the rotary embedding on the CPU, in as few operations of torch as they can be.

Rows of a decode step are short: an operation takes 1 to 3 us to call, whatever it computes. Results are those of the
references beside the operators, which say the same more plainly.
"""

import torch
from torch.nn import functional as F

from tritonllm.kernels.elementwise.arguments import Norm, Rows


def normalize(given: Rows, norm: Norm) -> bool:
    """The operator ``norm``; not into float8, and not with weights for each head."""
    x, residual, out, scale, x_scale = given
    affine = [t for t in (norm.weight, norm.bias) if t is not None]
    if scale is not None or any(t.dim() != 1 for t in affine):
        return False
    if residual is not None:
        x = residual.add_(x, alpha=x_scale)  # a product and a sum in float32, rounded once
    if norm.mean:
        if any(t.dtype != x.dtype for t in affine):
            x, affine = x.float(), [t.float() for t in affine]
        weight = None if norm.weight is None else affine[0]
        y = F.layer_norm(x, x.shape[-1:], weight, None if norm.bias is None else affine[-1], norm.eps)
    else:
        assert norm.weight is not None
        y = normalized(x, norm.weight, norm.eps, norm.weight_offset)
    out.copy_(y)
    return True


def normalized(x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float) -> torch.Tensor:
    """As :func:`tritonllm.kernels.rms_norm`, of any dtypes; ``weight[N]``."""
    if weight_offset:
        weight = weight.float() + weight_offset
    if x.numel() == x.shape[-1]:  # of one row the root mean square is a number: 5 us, and below 11
        y = x.float()
        row = y.view(-1)
        mean = float(torch.dot(row, row)) / len(row)
        return (y * weight).mul_((mean + eps) ** -0.5)
    if weight.dtype != x.dtype:
        x, weight = x.float(), weight.float()
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def turned(x: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """``x[T, H, D]`` with the beginning of each head turned by its token's angles, as a new tensor."""
    rotary = cos_sin_cache.shape[1]
    cos, sin = cos_sin_cache.index_select(0, positions).unsqueeze(1).float().chunk(2, dim=-1)
    out = torch.empty(x.shape, dtype=x.dtype)
    if rotary < x.shape[-1]:
        out[..., rotary:] = x[..., rotary:]
    halves = (
        (slice(0, rotary, 2), slice(1, rotary, 2)) if interleaved else (slice(rotary // 2), slice(rotary // 2, rotary))
    )
    a, b = (x[..., half] for half in halves)
    torch.addcmul(a * cos, b, sin, value=-1, out=out[..., halves[0]])
    torch.addcmul(b * cos, a, sin, out=out[..., halves[1]])
    return out

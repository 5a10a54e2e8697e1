"""Norms and the rotary embedding on the CPU, in as few operations of torch as they can be.

Rows of a decode step are short: an operation takes 1 to 3 us to call, whatever it computes. Results are those of the
references beside the operators, which say the same more plainly.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional as F

from tritonllm.kernels.elementwise.arguments import NormOptions, Rows


def normalize(given: Rows, norm: NormOptions) -> bool:
    """The operator ``norm``; not into float8, and not with weights for each head."""
    affine = [t for t in (norm.weight, norm.bias) if t is not None]
    if given.scale is not None or any(t.dim() != 1 for t in affine):
        return False
    x = given.x
    if given.residual is not None:
        x = given.residual.add_(x, alpha=given.x_scale)  # a product and a sum in float32, rounded once
    given.out.copy_(layer_normalized(x, norm) if norm.mean else normalized(x, norm))
    return True


def layer_normalized(x: torch.Tensor, norm: NormOptions) -> torch.Tensor:
    """LayerNorm as a new tensor, with the dtype of ``x`` or float32."""
    weight, bias = norm.weight, norm.bias
    if any(t is not None and t.dtype != x.dtype for t in (weight, bias)):
        x, weight, bias = x.float(), *(None if t is None else t.float() for t in (weight, bias))
    return F.layer_norm(x, x.shape[-1:], weight, bias, norm.eps)


def normalized(x: torch.Tensor, norm: NormOptions) -> torch.Tensor:
    """RMSNorm as a new tensor, with the dtype of ``x`` or float32."""
    weight = norm.weight
    assert weight is not None
    if norm.weight_offset:
        weight = weight.float() + norm.weight_offset
    if weight.dtype != x.dtype:
        x, weight = x.float(), weight.float()
    size = x.shape[-1]
    if (
        x.numel() == size and not norm.batch_invariant
    ):  # of one row the root mean square is a number: 7 us, and below 12
        mean = float(torch.linalg.vector_norm(x, dtype=torch.float32)) ** 2 / size
        # a product of three that is rounded once
        return torch.addcmul(x.new_zeros(size), x, weight, value=(mean + norm.eps) ** -0.5)
    return F.rms_norm(x, (size,), weight, norm.eps)


def act_and_mul(x: torch.Tensor, activation: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """``activation(x[T, :N]) * x[T, N:]`` in float32, rounded once."""
    gate, up = x.float().chunk(2, dim=-1)
    return activation(gate).mul_(up).to(x.dtype)


class Rotation(NamedTuple):
    """Angles of a step's tokens: an element is multiplied by ``same``, and its partner by ``other``."""

    same: torch.Tensor
    other: torch.Tensor
    interleaved: bool


def turn_of(positions: torch.Tensor, cos_sin_cache: torch.Tensor, interleaved: bool) -> Rotation:
    """The rows of a table, ``[T, 1, 1, half]`` and ``[T, 1, 2, half]``; interleaved with the last two exchanged."""
    cos, sin = cos_sin_cache.index_select(0, positions)[:, None].float().chunk(2, dim=-1)
    pair = -1 if interleaved else -2
    return Rotation(cos.unsqueeze(pair), torch.stack((-sin, sin), dim=pair), interleaved)


def turned(x: torch.Tensor, turn: Rotation) -> torch.Tensor:
    """``x[T, H, D]`` with the beginning of each head turned by its token's angles, as a new tensor."""
    rotary = 2 * turn.same.shape[-2 if turn.interleaved else -1]
    out = torch.empty(x.shape, dtype=x.dtype)
    a, b = x, out
    if rotary < x.shape[-1]:
        out[..., rotary:] = x[..., rotary:]
        a, b = x[..., :rotary], out[..., :rotary]
    pair, sizes = (-1, (rotary // 2, 2)) if turn.interleaved else (-2, (2, rotary // 2))
    a = a.unflatten(-1, sizes)
    torch.addcmul(a * turn.same, a.flip(pair), turn.other, out=b.unflatten(-1, sizes))
    return out

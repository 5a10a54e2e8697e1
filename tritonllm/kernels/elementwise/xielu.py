"""The activation xIELU: a parabola above zero, an exponential below, with learned curvatures.

Huang, "Deriving Activation Functions Using Integration" (2024); Apertus has it. Memory-bound, as other activations are:
each element is loaded and stored once.
"""

import torch
import triton
import triton.language as tl
from torch.nn import functional

from tritonllm.kernels.elementwise.activation import default_config
from tritonllm.kernels.runtime.checks import check_tensor, require
from tritonllm.kernels.runtime.dependent_launch import dependent_launch, let_next_start, wait_for_previous
from tritonllm.kernels.runtime.registry import register_op, with_reference


@triton.jit
def _softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(x)))


@triton.jit
def _expm1(b_x):
    """``exp(x) - 1`` of numbers not above zero: near zero by its series, where the difference would lose all digits."""
    b_series = b_x * (1.0 + b_x * (0.5 + b_x * (0.16666667 + b_x * (0.041666667 + b_x * 0.0083333333))))
    return tl.where(b_x > -0.2, b_series, tl.exp(b_x) - 1.0)


@triton.jit
def _xielu_kernel(
    x_ptr,  # [T, N]
    parameters_ptr,  # [4]
    out_ptr,  # [T, N]
    N,
    stride_x,
    stride_out,
    PROGRAMS: tl.constexpr,  # of a row
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = (tl.program_id(0) // PROGRAMS).to(tl.int64)
    cols = tl.program_id(0) % PROGRAMS * BLOCK + tl.arange(0, BLOCK)
    m_cols = cols < N
    wait_for_previous(PDL)
    beta = tl.load(parameters_ptr + 2).to(tl.float32)
    eps = tl.load(parameters_ptr + 3).to(tl.float32)
    above = _softplus(tl.load(parameters_ptr).to(tl.float32))
    below = beta + _softplus(tl.load(parameters_ptr + 1).to(tl.float32))
    b_x = tl.load(x_ptr + row * stride_x + cols, mask=m_cols, other=0.0).to(tl.float32)
    let_next_start(PDL)
    b_below = (_expm1(tl.where(b_x > eps, eps, b_x)) - b_x) * below
    b_out = tl.where(b_x > 0.0, above * b_x * b_x, b_below) + beta * b_x
    tl.store(out_ptr + row * stride_out + cols, b_out.to(out_ptr.dtype.element_ty), mask=m_cols)


def _reference(x: torch.Tensor, parameters: torch.Tensor, out: torch.Tensor) -> None:
    x = x.float()
    alpha_p, alpha_n, beta, eps = parameters.float()
    above = functional.softplus(alpha_p) * x * x
    below = (torch.expm1(torch.minimum(x, eps)) - x) * (beta + functional.softplus(alpha_n))
    out.copy_(torch.where(x > 0, above, below) + beta * x)


@register_op(mutates=("out",), reference=_reference)
def _xielu(x: torch.Tensor, parameters: torch.Tensor, out: torch.Tensor) -> None:
    tokens, n = out.shape
    config = default_config(n, tokens)
    programs = triton.cdiv(n, config["BLOCK"])  # of a row
    _xielu_kernel[(tokens * programs,)](
        *(x, parameters, out, n, x.stride(0), out.stride(0)),
        PROGRAMS=programs,
        **config,
        **dependent_launch(x.device, tokens * programs),
    )


def xielu(x: torch.Tensor, parameters: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """The activation xIELU of each element, computed in float32.

    It is ``softplus(alpha_p) * x * x + beta * x`` above zero, and else
    ``(exp(min(x, eps)) - 1 - x) * (beta + softplus(alpha_n)) + beta * x``.

    Args:
        x: ``[..., N]`` float16, bfloat16 or float32; contiguous in the last dimension.
        parameters: ``[4]`` of any of these dtypes: ``alpha_p``, ``alpha_n``, ``beta`` and ``eps``, which is below zero.
        out: ``[..., N]`` to write into, which may be ``x`` itself but not overlap it otherwise; by default a new
            tensor with the dtype of ``x``.

    Returns:
        ``out``.

    Raises:
        ValueError: another shape or dtype, or an ``out`` that does not fit.
    """
    check_tensor("x", x, [None] * max(x.dim(), 1))
    check_tensor("parameters", parameters, (4,), like=x)
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    check_tensor("out", out, tuple(x.shape), like=x)
    require(out.dim() <= 2 or out.is_contiguous(), "out must be contiguous if it has more than two dimensions")
    if out.numel():
        n = x.shape[-1]
        _xielu(x.reshape(-1, n), parameters, out.view(-1, n))
    return out


xielu_ref = with_reference(xielu)

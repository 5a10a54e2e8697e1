"""A gate of attention's output: its elements times a function of other numbers, one for each element or for each head.

Qiu et al., "Gated Attention for Large Language Models" (2025). AFMoE has the sigmoid of a number for each element,
Laguna the softplus of one for each head. Memory-bound: output and gate are loaded once.
"""

from typing import Literal

import torch
import triton
import triton.language as tl
from torch.nn import functional

from tritonllm.kernels.elementwise.activation import default_config
from tritonllm.kernels.runtime.checks import check_tensor, require
from tritonllm.kernels.runtime.dependent_launch import dependent_launch, let_next_start, wait_for_previous
from tritonllm.kernels.runtime.registry import register_op, with_reference

Gate = Literal["sigmoid", "softplus"]
_FUNCTIONS = {"sigmoid": torch.sigmoid, "softplus": functional.softplus}


@triton.jit
def _softplus(b_x):
    """``log(1 + exp(x))`` of an exponential that cannot overflow, with what the sum of 1 and it has lost of it (Kahan's
    way to the logarithm of numbers near 1)."""
    b_small = tl.exp(-tl.abs(b_x))
    b_sum = 1.0 + b_small
    b_kept = tl.where(b_sum == 1.0, 1.0, b_sum - 1.0)
    b_log = tl.where(b_sum == 1.0, b_small, tl.log(b_sum) * (b_small / b_kept))
    return tl.where(b_x > 0.0, b_x + b_log, b_log)


@triton.jit
def _output_gate_kernel(
    x_ptr,  # [T, N]
    gate_ptr,  # [T, N / EACH]
    out_ptr,  # [T, N]
    N,
    stride_x,
    stride_gate,
    stride_out,
    EACH: tl.constexpr,  # elements that one number of the gate multiplies
    SOFTPLUS: tl.constexpr,
    PROGRAMS: tl.constexpr,  # of a row
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = (tl.program_id(0) // PROGRAMS).to(tl.int64)
    cols = tl.program_id(0) % PROGRAMS * BLOCK + tl.arange(0, BLOCK)
    m_cols = cols < N
    wait_for_previous(PDL)
    b_x = tl.load(x_ptr + row * stride_x + cols, mask=m_cols, other=0.0).to(tl.float32)
    b_gate = tl.load(gate_ptr + row * stride_gate + cols // EACH, mask=m_cols, other=0.0).to(tl.float32)
    let_next_start(PDL)
    b_out = b_x * (_softplus(b_gate) if SOFTPLUS else tl.sigmoid(b_gate))
    tl.store(out_ptr + row * stride_out + cols, b_out.to(out_ptr.dtype.element_ty), mask=m_cols)


def _reference(x: torch.Tensor, gate: torch.Tensor, out: torch.Tensor, function: str) -> None:
    factors = _FUNCTIONS[function](gate.float())
    if gate.shape[1] == x.shape[1]:
        out.copy_(x.float() * factors)
    else:
        out.copy_((x.float().unflatten(1, (gate.shape[1], -1)) * factors[..., None]).flatten(1))


@register_op(mutates=("out",), reference=_reference)
def _output_gate(x: torch.Tensor, gate: torch.Tensor, out: torch.Tensor, function: str) -> None:
    tokens, n = out.shape
    config = default_config(n, tokens)
    programs = triton.cdiv(n, config["BLOCK"])  # of a row
    _output_gate_kernel[(tokens * programs,)](
        *(x, gate, out, n, x.stride(0), gate.stride(0), out.stride(0)),
        EACH=n // gate.shape[1],
        SOFTPLUS=function == "softplus",
        PROGRAMS=programs,
        **config,
        **dependent_launch(x.device, tokens * programs),
    )


def output_gate(
    x: torch.Tensor, gate: torch.Tensor, *, function: Gate = "sigmoid", out: torch.Tensor | None = None
) -> torch.Tensor:
    """``x * function(gate)``, computed in float32.

    Args:
        x: ``[..., N]`` float16, bfloat16 or float32; contiguous in the last dimension.
        gate: ``[..., G]`` of any of these dtypes, likewise: each of its numbers for N / G neighbouring elements of
            ``x``, the N / G of a head or a single one.
        function: ``sigmoid`` or ``softplus``.
        out: ``[..., N]`` to write into, which may be ``x`` or (if G is N) ``gate`` itself but not overlap either
            otherwise; by default a new tensor with the dtype of ``x``.

    Returns:
        ``out``.

    Raises:
        ValueError: another shape, dtype or function, a G that does not divide N, or an ``out`` that does not fit.
    """
    check_tensor("x", x, [None] * max(x.dim(), 1))
    check_tensor("gate", gate, (*x.shape[:-1], "G"), like=x)
    n, gates = x.shape[-1], gate.shape[-1]
    require((gates > 0 and n % gates == 0) or n == gates, f"gate must have a divisor of x's {n} columns, got {gates}")
    require(function in _FUNCTIONS, f"function must be one of {', '.join(_FUNCTIONS)}, got {function!r}")
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    check_tensor("out", out, tuple(x.shape), like=x)
    require(out.dim() <= 2 or out.is_contiguous(), "out must be contiguous if it has more than two dimensions")
    if out.numel():
        _output_gate(x.reshape(-1, n), gate.reshape(-1, gates), out.view(-1, n), function)
    return out


output_gate_ref = with_reference(output_gate)

"""A gate of attention's output: each element times the sigmoid of another tensor's.

Qiu et al., "Gated Attention for Large Language Models" (2025); AFMoE has it. Memory-bound: both are loaded once.
"""

import torch
import triton
import triton.language as tl

from tritonllm.kernels.elementwise.activation import default_config
from tritonllm.kernels.runtime.checks import check_tensor, require
from tritonllm.kernels.runtime.dependent_launch import dependent_launch, let_next_start, wait_for_previous
from tritonllm.kernels.runtime.registry import register_op, with_reference


@triton.jit
def _sigmoid_gate_kernel(
    x_ptr,  # [T, N]
    gate_ptr,  # [T, N]
    out_ptr,  # [T, N]
    N,
    stride_x,
    stride_gate,
    stride_out,
    PROGRAMS: tl.constexpr,  # of a row
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = (tl.program_id(0) // PROGRAMS).to(tl.int64)
    cols = tl.program_id(0) % PROGRAMS * BLOCK + tl.arange(0, BLOCK)
    m_cols = cols < N
    wait_for_previous(PDL)
    b_x = tl.load(x_ptr + row * stride_x + cols, mask=m_cols, other=0.0).to(tl.float32)
    b_gate = tl.load(gate_ptr + row * stride_gate + cols, mask=m_cols, other=0.0).to(tl.float32)
    let_next_start(PDL)
    b_out = b_x * tl.sigmoid(b_gate)
    tl.store(out_ptr + row * stride_out + cols, b_out.to(out_ptr.dtype.element_ty), mask=m_cols)


def _reference(x: torch.Tensor, gate: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x.float() * gate.float().sigmoid())


@register_op(mutates=("out",), reference=_reference)
def _sigmoid_gate(x: torch.Tensor, gate: torch.Tensor, out: torch.Tensor) -> None:
    tokens, n = out.shape
    config = default_config(n, tokens)
    programs = triton.cdiv(n, config["BLOCK"])  # of a row
    _sigmoid_gate_kernel[(tokens * programs,)](
        *(x, gate, out, n, x.stride(0), gate.stride(0), out.stride(0)),
        PROGRAMS=programs,
        **config,
        **dependent_launch(x.device, tokens * programs),
    )


def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """``x * sigmoid(gate)``, computed in float32.

    Args:
        x: ``[..., N]`` float16, bfloat16 or float32; contiguous in the last dimension.
        gate: ``[..., N]`` of any of these dtypes, likewise.
        out: ``[..., N]`` to write into, which may be ``x`` or ``gate`` itself but not overlap either otherwise; by
            default a new tensor with the dtype of ``x``.

    Returns:
        ``out``.

    Raises:
        ValueError: another shape or dtype, or an ``out`` that does not fit.
    """
    check_tensor("x", x, [None] * max(x.dim(), 1))
    check_tensor("gate", gate, tuple(x.shape), like=x)
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    check_tensor("out", out, tuple(x.shape), like=x)
    require(out.dim() <= 2 or out.is_contiguous(), "out must be contiguous if it has more than two dimensions")
    if out.numel():
        n = x.shape[-1]
        _sigmoid_gate(x.reshape(-1, n), gate.reshape(-1, n), out.view(-1, n))
    return out


sigmoid_gate_ref = with_reference(sigmoid_gate)

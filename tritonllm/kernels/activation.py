"""Gated activations: ``act(gate) * up`` in one pass over a fused gate/up projection.

Read 2N and write N elements a row: memory-bound, so the kernel is one load, one multiply and one store per element.
SwiGLU and GeGLU: Shazeer, "GLU Variants Improve Transformer" (2020).
"""

import torch
import triton
import triton.language as tl

from tritonllm.kernels import tuning
from tritonllm.kernels.checks import check_tensor, require
from tritonllm.kernels.registry import register_op


@triton.jit
def activate(b_x, ACT: tl.constexpr):
    """silu, gelu or gelu_tanh of a float32 block."""
    if ACT == "silu":
        b_act = b_x * tl.sigmoid(b_x)
    elif ACT == "gelu":
        b_act = 0.5 * b_x * (1.0 + tl.erf(b_x * 0.7071067811865476))
    else:
        # tanh(z) = 2 sigmoid(2z) - 1, so 0.5 x (1 + tanh z) = x sigmoid(2z)
        b_z = 0.7978845608028654 * (b_x + 0.044715 * b_x * b_x * b_x)
        b_act = b_x * tl.sigmoid(2.0 * b_z)
    return b_act


@triton.jit
def _act_and_mul_kernel(
    x_ptr,  # [T, 2N]
    out_ptr,  # [T, N]
    N,
    stride_x,
    stride_out,
    ACT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_cols = cols < N
    p_gate = x_ptr + row * stride_x + cols
    b_gate = tl.load(p_gate, mask=m_cols, other=0.0).to(tl.float32)
    b_up = tl.load(p_gate + N, mask=m_cols, other=0.0).to(tl.float32)
    b_act = activate(b_gate, ACT)
    tl.store(out_ptr + row * stride_out + cols, (b_act * b_up).to(out_ptr.dtype.element_ty), mask=m_cols)


def default_config(n: int, tokens: int) -> tuning.Config:
    block = min(triton.next_power_of_2(n), 2048)
    return {"BLOCK": block, "num_warps": max(1, min(8, block // 256))}


def _reference(x: torch.Tensor, out: torch.Tensor, activation: str) -> None:
    gate, up = x.float().chunk(2, dim=-1)
    if activation == "silu":
        act = torch.nn.functional.silu(gate)
    else:
        act = torch.nn.functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")
    out.copy_(act * up)


@register_op(mutates=("out",), reference=_reference)
def _act_and_mul(x: torch.Tensor, out: torch.Tensor, activation: str) -> None:
    tokens, n = out.shape
    if out.numel() == 0:
        return
    config = tuning.get_config("act_and_mul", x.device, default_config, n=n, tokens=tokens)
    grid = (tokens, triton.cdiv(n, config["BLOCK"]))
    _act_and_mul_kernel[grid](x, out, n, x.stride(0), out.stride(0), ACT=activation, **config)


def _gated(x: torch.Tensor, activation: str, out: torch.Tensor | None) -> torch.Tensor:
    check_tensor("x", x, [None] * max(x.dim(), 1))
    require(x.shape[-1] % 2 == 0, f"x must have an even last dimension (gate and up), got {list(x.shape)}")
    n = x.shape[-1] // 2
    shape = (*x.shape[:-1], n)
    if out is None:
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
    check_tensor("out", out, shape, like=x)
    require(out.dim() <= 2 or out.is_contiguous(), "out must be contiguous if it has more than two dimensions")
    # `view` for the output: a silent copy there would lose the result
    _act_and_mul(x.reshape(-1, 2 * n), out.view(-1, n), activation)
    return out


def _gated_ref(x: torch.Tensor, activation: str, out: torch.Tensor | None) -> torch.Tensor:
    if out is None:
        out = x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
    _reference(x, out, activation)
    return out


def silu_and_mul(x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """SwiGLU: ``silu(x[..., :N]) * x[..., N:]``, computed in float32.

    Args:
        x: ``[..., 2N]`` float16, bfloat16 or float32, gate first; contiguous in the last dimension.
        out: ``[..., N]`` to write into; by default a new tensor with the dtype of ``x``.

    Returns:
        ``out``.

    Raises:
        ValueError: an odd last dimension, a dtype that is not floating point, or an ``out`` that does not fit.
    """
    return _gated(x, "silu", out)


def silu_and_mul_ref(x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """:func:`silu_and_mul` in plain torch."""
    return _gated_ref(x, "silu", out)


def gelu_and_mul(x: torch.Tensor, *, approximate: str = "none", out: torch.Tensor | None = None) -> torch.Tensor:
    """GeGLU: ``gelu(x[..., :N]) * x[..., N:]``, computed in float32.

    Args:
        x: ``[..., 2N]`` float16, bfloat16 or float32, gate first; contiguous in the last dimension.
        approximate: ``"none"`` (erf) or ``"tanh"``, as in :func:`torch.nn.functional.gelu`.
        out: ``[..., N]`` to write into; by default a new tensor with the dtype of ``x``.

    Returns:
        ``out``.

    Raises:
        ValueError: another ``approximate``, an odd last dimension, a wrong dtype, or an ``out`` that does not fit.
    """
    require(approximate in ("none", "tanh"), f"approximate must be 'none' or 'tanh', got {approximate!r}")
    return _gated(x, "gelu_tanh" if approximate == "tanh" else "gelu", out)


def gelu_and_mul_ref(x: torch.Tensor, *, approximate: str = "none", out: torch.Tensor | None = None) -> torch.Tensor:
    """:func:`gelu_and_mul` in plain torch."""
    return _gated_ref(x, "gelu_tanh" if approximate == "tanh" else "gelu", out)

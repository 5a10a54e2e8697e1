"""Gated activations inside a product's kernel: of blocks of gate and up that it still has in registers."""

import torch
import triton
import triton.language as tl

from tritonllm.kernels.elementwise.activation import act_and_mul, activate

GATED_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swigluoai")

# GPT-OSS: "gpt-oss-120b & gpt-oss-20b Model Card" (2025), and `swiglu` in the reference implementation beside it.
SWIGLU_ALPHA = 1.702  # x * sigmoid(1.702 x) is close to gelu(x)
SWIGLU_LIMIT = 7.0


@triton.jit
def gated(b_gate, b_up, ACT: tl.constexpr, ALPHA: tl.constexpr = SWIGLU_ALPHA, LIMIT: tl.constexpr = SWIGLU_LIMIT):
    """The gated activation of float32 blocks.

    The constants are defaults and no globals: with globals a kernel's name in Triton's cache would depend on whether
    this function had been compiled before (Triton 3.6 looks them up too early).
    """
    if ACT == "swigluoai":
        # comparisons, because tl.minimum and tl.clamp would turn NaN into the limit
        b_gate = tl.where(b_gate > LIMIT, LIMIT, b_gate)
        b_up = tl.where(b_up > LIMIT, LIMIT, b_up)
        b_up = tl.where(b_up < -LIMIT, -LIMIT, b_up)
        b_h = b_gate * tl.sigmoid(ALPHA * b_gate) * (b_up + 1.0)
    else:
        b_h = activate(b_gate, ACT) * b_up
    return b_h


def gated_reference(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """``[..., 2I]`` -> ``[..., I]`` in plain torch."""
    if activation == "swigluoai":
        gate, up = gate_up.chunk(2, dim=-1)
        gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        return gate * (SWIGLU_ALPHA * gate).sigmoid() * (up + 1)
    return act_and_mul(gate_up, activation)

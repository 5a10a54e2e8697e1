"""Operations on single rows or elements: norms, activations, rotary embedding, logits.

The names here are open to other wings, whose kernels and references take such an operation along.
"""

from tritonllm.kernels.elementwise.activation import (
    ACTIVATIONS,
    act_and_mul,
    activate,
    apply_activation,
)
from tritonllm.kernels.elementwise.arguments import NormOptions
from tritonllm.kernels.elementwise.cpu import Rotation, normalized, turn_of, turned
from tritonllm.kernels.elementwise.gated_activation import GATED_ACTIVATIONS, gated, gated_reference
from tritonllm.kernels.elementwise.logits import tanh_series
from tritonllm.kernels.elementwise.norm import check_affine, rms_norm
from tritonllm.kernels.elementwise.quantized import round_rows
from tritonllm.kernels.elementwise.rope import (
    apply_rope,
    check_angles,
    check_positions,
    check_rope,
    load_angles,
    load_pairs,
    store_pairs,
)

__all__ = [
    "ACTIVATIONS",
    "GATED_ACTIVATIONS",
    "NormOptions",
    "Rotation",
    "act_and_mul",
    "activate",
    "apply_activation",
    "apply_rope",
    "check_affine",
    "check_angles",
    "check_positions",
    "check_rope",
    "gated",
    "gated_reference",
    "load_angles",
    "load_pairs",
    "normalized",
    "rms_norm",
    "round_rows",
    "store_pairs",
    "tanh_series",
    "turn_of",
    "turned",
]

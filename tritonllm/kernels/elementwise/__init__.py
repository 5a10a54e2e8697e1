"""Operations on single rows or elements: norms, activations, rotary embedding, logits.

The names here are open to other wings, whose kernels and references take such an operation along.
"""

from tritonllm.kernels.elementwise.activation import (
    ACTIVATIONS,
    act_and_mul,
    activate,
    apply_activation,
)
from tritonllm.kernels.elementwise.gated_activation import GATED_ACTIVATIONS, gated, gated_reference
from tritonllm.kernels.elementwise.norm import check_affine, norm_reference, rms_norm, rms_norm_ref
from tritonllm.kernels.elementwise.rope import check_rope, load_angles, load_pairs, rope_reference, store_pairs

__all__ = [
    "ACTIVATIONS",
    "GATED_ACTIVATIONS",
    "act_and_mul",
    "activate",
    "apply_activation",
    "check_affine",
    "check_rope",
    "gated",
    "gated_reference",
    "load_angles",
    "load_pairs",
    "norm_reference",
    "rms_norm",
    "rms_norm_ref",
    "rope_reference",
    "store_pairs",
]

"""Models of which a token's bits do not depend on what else is in its step.

A sum of floating-point numbers depends on its order, and fast kernels choose that by the size of a step. A model that
is batch invariant has operations that do not: products with one chain of sums for each element
(:mod:`tritonllm.kernels.dense.invariant`), attention that goes by the keys in one order
(:mod:`tritonllm.kernels.attention.invariant`), norms with one launch configuration, and nothing that is fused for some
sizes only. What else a step computes, it computes element by element.
"""

from torch import nn

from tritonllm.layers.attention import Attention
from tritonllm.layers.fusion import FusionLimits
from tritonllm.layers.linear import Embedding, Linear
from tritonllm.layers.moe import MoE
from tritonllm.layers.norm import Norm

# Nothing is fused: a plan is the same for every size.
SEPARATE = FusionLimits(routed=-1)


def make_batch_invariant(model: nn.Module) -> None:
    """All that ``model`` has of products, experts, norms and attention is batch invariant from here on."""
    for module in model.modules():
        if isinstance(module, Linear | Embedding | Norm | Attention | MoE):
            module.batch_invariant = True

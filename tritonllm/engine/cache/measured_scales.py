"""Scales of a narrow cache for a checkpoint without some: what the keys and values of one prompt reach.

The prompt is made of fixed tokens, whatever is asked for later, so that engines of one model have the same scales and
find one another's blocks. Scales are powers of two, which moves numbers within the range of float8 and rounds none:
more exact ones would be no better, and differ where sums are added in another order. What was measured may grow to
twice as much before it saturates.
"""

import math

import torch

from tritonllm.dist.group import Group
from tritonllm.engine.cache.kv_cache import SCALED
from tritonllm.layers.metadata import UNSCALED, KVScales
from tritonllm.models.interface import CausalLM
from tritonllm.models.one_sequence import empty_cache, run_alone

TOKENS = 512
_ROOM = 2.0
_STRIDE = 7919  # from one token of the prompt to the next, a prime


def measured_scales(model: CausalLM, group: Group, device: torch.device, most_tokens: int) -> list[KVScales]:
    """The scales of each layer; those of the checkpoint if it has some. All ranks of the group call it.

    Args:
        most_tokens: how long a prompt may be.
    """
    if any(scales != UNSCALED for scales in model.kv_scales):
        return list(model.kv_scales)
    tokens = min(TOKENS, most_tokens)
    views = empty_cache(model, device, tokens)
    run_alone(model, device, [i * _STRIDE % model.spec.vocab_size for i in range(tokens)], views)
    largest = torch.stack([torch.stack((view.k.abs().amax(), view.v.abs().amax())) for view in views]).float()
    return [KVScales(*map(scale_for, pair)) for pair in group.stack(largest).amax(0).tolist()]


def scale_for(largest: float) -> float:
    """The least power of two by which ``largest`` may be divided to leave room; 1 for what says nothing."""
    if not 0 < largest < math.inf:
        return 1.0
    return 2.0 ** math.ceil(math.log2(largest * _ROOM / torch.finfo(SCALED).max))

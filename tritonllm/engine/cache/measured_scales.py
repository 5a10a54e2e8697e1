"""Scales of a narrow cache for a checkpoint without some: what the keys and values of one prompt reach.

The prompt is made of fixed tokens, whatever is asked for later, so that engines of one model have the same scales and
find one another's blocks. Scales are powers of two, which moves numbers within the range of float8 and rounds none:
more exact ones would be no better, and differ where sums are added in another order. What was measured may grow to
twice as much before it saturates.
"""

import math

import torch

from tritonllm.dist.group import Group
from tritonllm.engine.cache.kv_cache import SCALED, make_cache
from tritonllm.layers.metadata import UNSCALED, AttentionMetadata, KVScales
from tritonllm.layers.segments import Segment, Segments
from tritonllm.models.interface import CausalLM

TOKENS = 512
_BLOCK = 16
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
    blocks = -(-tokens // _BLOCK)
    views, _ = make_cache(model.spec, model.dtype, blocks, _BLOCK, device)
    at = torch.arange(tokens, device=device)
    metadata = AttentionMetadata(
        segments=Segments(chunk=Segment(1, tokens, tokens)),
        slot_mapping=at,
        block_tables=torch.arange(blocks, dtype=torch.int32, device=device)[None],
        seq_lens=torch.tensor([tokens], dtype=torch.int32, device=device),
        cu_seqlens_q=torch.tensor([0, tokens], dtype=torch.int32, device=device),
    )
    model(at * _STRIDE % model.spec.vocab_size, at, metadata, views)
    largest = torch.stack([torch.stack((view.k.abs().amax(), view.v.abs().amax())) for view in views]).float()
    return [KVScales(*map(scale_for, pair)) for pair in group.stack(largest).amax(0).tolist()]


def scale_for(largest: float) -> float:
    """The least power of two by which ``largest`` may be divided to leave room; 1 for what says nothing."""
    if not 0 < largest < math.inf:
        return 1.0
    return 2.0 ** math.ceil(math.log2(largest * _ROOM / torch.finfo(SCALED).max))

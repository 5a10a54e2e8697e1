"""A model's pass over one sequence by itself, without an engine: for looks into a model, calibration and accuracy."""

from collections.abc import Sequence
from typing import Any

import torch

from tritonllm.layers.metadata import AttentionMetadata, KVCacheView
from tritonllm.layers.segments import Segment, Segments

BLOCK = 16


def empty_cache(model: Any, device: torch.device, tokens: int, dtype: torch.dtype | None = None) -> list[KVCacheView]:
    """A cache for a sequence of so many tokens, a view for each layer; ``dtype``: by default the model's."""
    sizes = [(2, -(-tokens // BLOCK), BLOCK, *shape) for shape in model.spec.caches]
    caches = [KVCacheView(*torch.zeros(size, dtype=dtype or model.dtype, device=device)) for size in sizes]
    return [caches[cache] for cache in model.spec.cache_of_layer]


@torch.inference_mode()
def run_alone(
    model: Any, device: torch.device, token_ids: Sequence[int], cache: Sequence[KVCacheView] | None = None
) -> torch.Tensor:
    """Hidden states ``[T, hidden]`` of a sequence.

    Args:
        model: a :class:`~tritonllm.models.interface.CausalLM`.
        device: where the model is.
        cache: where keys and values go (:func:`empty_cache`); by default thrown away.
    """
    count = len(token_ids)
    blocks = -(-count // BLOCK)
    positions = torch.arange(count, device=device)
    metadata = AttentionMetadata(
        segments=Segments(chunk=Segment(1, count, count)),
        slot_mapping=positions,
        block_tables=torch.arange(blocks, dtype=torch.int32, device=device)[None],
        seq_lens=torch.tensor([count], dtype=torch.int32, device=device),
        cu_seqlens_q=torch.tensor([0, count], dtype=torch.int32, device=device),
    )
    ids = torch.tensor(list(token_ids), dtype=torch.int64, device=device)
    cache = empty_cache(model, device, count) if cache is None else cache
    hidden: torch.Tensor = model(ids, positions, metadata, cache)
    return hidden

"""A model's pass over one sequence by itself, without an engine: for looks into a model, calibration and accuracy."""

from collections.abc import Sequence
from typing import Any

import torch

from tritonllm.layers.metadata import AttentionMetadata, KVCacheView
from tritonllm.layers.segments import Segment, Segments

BLOCK = 16


@torch.inference_mode()
def run_alone(
    model: Any, device: torch.device, token_ids: Sequence[int], *, cache_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Hidden states ``[T, hidden]`` of a sequence, with a cache that is thrown away.

    Args:
        model: a :class:`~tritonllm.models.interface.CausalLM`.
        device: where the model is.
        cache_dtype: the dtype of keys and values; by default the model's.
    """
    count, dtype = len(token_ids), cache_dtype or model.dtype
    blocks = -(-count // BLOCK)
    both = [torch.zeros(2, blocks, BLOCK, *shape, dtype=dtype, device=device) for shape in model.spec.caches]
    caches = [KVCacheView(k, v) for k, v in both]
    positions = torch.arange(count, device=device)
    metadata = AttentionMetadata(
        segments=Segments(chunk=Segment(1, count, count)),
        slot_mapping=positions,
        block_tables=torch.arange(blocks, dtype=torch.int32, device=device)[None],
        seq_lens=torch.tensor([count], dtype=torch.int32, device=device),
        cu_seqlens_q=torch.tensor([0, count], dtype=torch.int32, device=device),
    )
    ids = torch.tensor(list(token_ids), dtype=torch.int64, device=device)
    hidden: torch.Tensor = model(ids, positions, metadata, [caches[cache] for cache in model.spec.cache_of_layer])
    return hidden

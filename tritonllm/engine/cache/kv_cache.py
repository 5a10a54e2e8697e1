"""The paged cache of one model: memory for its blocks, and a view of it for each layer."""

import torch

from tritonllm.engine.cache.block_copies import BlockCopies
from tritonllm.engine.cache.engine_memory import EngineMemory
from tritonllm.kernels.attention.decode import WORKSPACE_SIZE
from tritonllm.layers.metadata import KVCacheView
from tritonllm.models.interface import ModelFacts


def block_bytes(spec: ModelFacts, dtype: torch.dtype, block_size: int) -> int:
    """Bytes of one block over all layers, keys and values, with ``block_size`` keys in each layer."""
    return 2 * spec.num_layers * block_size * spec.num_kv_heads * spec.head_size * dtype.itemsize


def make_cache(
    spec: ModelFacts,
    dtype: torch.dtype,
    num_blocks: int,
    block_size: int,
    device: torch.device,
    memory: EngineMemory | None = None,
) -> tuple[list[KVCacheView], BlockCopies]:
    """A view for each layer, and what copies blocks in all of them.

    Args:
        block_size: keys of a block in this cache: of a model whose ranks split the keys, this rank's.
        memory: where the cache lies; by default with torch.
    """
    shape = (spec.num_layers, 2, num_blocks, block_size, spec.num_kv_heads, spec.head_size)
    # zeros, not empty: a stale NaN beyond a sequence's length would be multiplied by a probability of zero
    pool = torch.zeros(shape, dtype=dtype, device=device) if memory is None else memory.zeros(shape, dtype)
    workspace = torch.zeros(WORKSPACE_SIZE, dtype=torch.int32, device=device)
    return [KVCacheView(layer[0], layer[1], workspace) for layer in pool], BlockCopies(pool)

"""The paged cache of one model: memory for its blocks, and a view of it for each layer.

Layers whose caches have one shape lie in one tensor, a pool. A block has the same number in all pools, and stands for
the same tokens there; how many bytes it has may differ between layers.
"""

from collections.abc import Sequence

import torch

from tritonllm.config.engine import CacheConfig
from tritonllm.engine.cache.block_copies import BlockCopies
from tritonllm.engine.cache.engine_memory import EngineMemory
from tritonllm.kernels.attention.decode import WORKSPACE_SIZE
from tritonllm.layers.metadata import UNSCALED, CacheShape, KVCacheView, KVScales
from tritonllm.models.interface import ModelFacts

NARROW = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
SCALED = torch.float8_e4m3fn  # what the scales of checkpoints are for: the exponents of e5m2 reach as far as float16's


def cache_dtype(config: CacheConfig, dtype: torch.dtype) -> torch.dtype:
    """The dtype of keys and values in the cache of a model of ``dtype``.

    Raises:
        ValueError: ``kv_cache_dtype`` names a dtype of models, but another one than ``dtype``.
    """
    name = config.kv_cache_dtype
    if name in NARROW:
        return NARROW[name]
    own = str(dtype).removeprefix("torch.")
    if name not in ("auto", own):
        raise ValueError(
            f"kv_cache_dtype={name!r}: this model runs in {own}, and its cache can have that dtype or fp8: leave it "
            f"out, or add dtype={name!r}"
        )
    return dtype


def block_bytes(spec: ModelFacts, dtype: torch.dtype, block_size: int) -> int:
    """Bytes of one block over all layers, keys and values, with ``block_size`` keys in each layer."""
    return block_size * dtype.itemsize * sum(shape.elements for shape in spec.caches)


def layers_of_pools(spec: ModelFacts) -> list[list[int]]:
    """For each pool of :func:`make_cache`, the layers that write to it, in the order of its rows."""
    writers = _writers(spec)
    return [[writers[cache] for cache in caches] for caches in _by_shape(spec).values()]


def _writers(spec: ModelFacts) -> dict[int, int]:
    """For each cache, the layer that writes it."""
    writers: dict[int, int] = {}  # the cache that a layer reads is its own if no layer before it reads that one
    for layer, cache in enumerate(spec.cache_of_layer):
        writers.setdefault(cache, layer)
    return writers


def _by_shape(spec: ModelFacts) -> dict[CacheShape, list[int]]:
    found: dict[CacheShape, list[int]] = {}
    for cache, shape in enumerate(spec.caches):
        found.setdefault(shape, []).append(cache)
    return found


def make_cache(
    spec: ModelFacts,
    dtype: torch.dtype,
    num_blocks: int,
    block_size: int,
    device: torch.device,
    memory: EngineMemory | None = None,
    scales: Sequence[KVScales] | None = None,
) -> tuple[list[KVCacheView], list[BlockCopies]]:
    """A view for each layer, and for each pool what copies blocks in it.

    Args:
        block_size: keys of a block in this cache: of a model whose ranks split the keys, this rank's.
        memory: where the cache lies; by default with torch.
        scales: for each layer, by what its keys and values are divided in the cache; ``None``: by nothing.
    """
    workspace = torch.zeros(WORKSPACE_SIZE, dtype=torch.int32, device=device)
    views: dict[int, KVCacheView] = {}
    copies, writers = [], _writers(spec)
    for shape, caches in _by_shape(spec).items():
        sizes = (len(caches), 2, num_blocks, block_size, *shape)
        # zeros, not empty: a stale NaN beyond a sequence's length would be multiplied by a probability of zero
        pool = torch.zeros(sizes, dtype=dtype, device=device) if memory is None else memory.zeros(sizes, dtype)
        for cache, (k, v) in zip(caches, pool, strict=True):
            divided_by = UNSCALED if scales is None else scales[writers[cache]]
            views[cache] = KVCacheView(k, v, workspace, divided_by)
        copies.append(BlockCopies(pool))
    return [views[cache] for cache in spec.cache_of_layer], copies

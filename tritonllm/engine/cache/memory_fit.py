"""How many blocks of the cache fit into a GPU's memory, when all else that steps need is there."""

from collections.abc import Callable

import torch

from tritonllm.config.engine import CacheConfig


def peak_bytes(step: Callable[[], None], device: torch.device) -> int:
    """Bytes that a step needs for itself."""
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    return torch.cuda.max_memory_allocated(device) - before


def blocks_that_fit(cache: CacheConfig, block_bytes: int, reserved: int, device: torch.device, also: str = "") -> int:
    """What the configuration grants, less what is in use and what is ``reserved``, in blocks of ``block_bytes``.

    Args:
        also: arguments that take of the GPU's memory, for the message.

    Raises:
        ValueError: not even one block fits.
    """
    free, total = torch.cuda.mem_get_info(device)
    granted = int(total * cache.gpu_memory_utilization) - (total - free) - reserved
    if granted < block_bytes:
        raise ValueError(
            f"gpu_memory_utilization={cache.gpu_memory_utilization} leaves {granted / 1e9:.2f} GB for the KV cache, "
            f"less than a block ({block_bytes / 1e9:.3f} GB): raise it, or lower max_num_batched_tokens"
            + (f", or {also}" if also else "")
        )
    return granted // block_bytes

"""Positions as waves, which are added to the embeddings: nothing of them is learned."""

import torch


def wave_table(rows: int, size: int, base: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Sines, then cosines of a position times ``base ** (-2 k / size)``, the waves k from 0 to ``size / 2 - 1``.

    Vaswani et al., "Attention Is All You Need" (2017), where they alternate.

    Args:
        rows: how many positions there are, from 0 on.
        size: numbers of each, even.
        base: how much slower the wave behind the last would be than the first one.

    Returns:
        ``[rows, size]``.
    """
    rates = base ** (-2 * torch.arange(size // 2, dtype=torch.float64) / size)
    angles = torch.arange(rows, dtype=torch.float64)[:, None] * rates
    return torch.cat((angles.sin(), angles.cos()), dim=1).to(device, dtype)

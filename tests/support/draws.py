"""Compare token draws that share their noise: equal, or a near-tie that rounding decided."""

import torch

from tritonllm.kernels.runtime.random import STREAM_GROUP, STREAM_TOKEN, gumbel_ref
from tritonllm.kernels.sampling.sample import log_weights_ref

# Scores are log2-weights plus noise, numbers of size 1 to 30 made of a few float32 operations
NEAR_TIE = 3e-5


def _levels(log_weights: torch.Tensor, tokens: torch.Tensor, seed: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """How far each token is from winning each of its two levels, [n, 2]; of one row's [V] log2-weights."""
    n_groups = -(-log_weights.numel() // 128)
    padded = torch.nn.functional.pad(log_weights.double(), (0, n_groups * 128 - log_weights.numel()), value=-torch.inf)
    ids = torch.arange(n_groups * 128, device=padded.device)
    token_score = (padded + gumbel_ref(ids, seed[None], step[None], STREAM_TOKEN.value)).view(n_groups, 128)
    mass = torch.logsumexp(padded.view(n_groups, 128) * 0.6931471805599453, -1) / 0.6931471805599453
    group_score = mass + gumbel_ref(ids[:n_groups], seed[None], step[None], STREAM_GROUP.value)
    group = tokens // 128
    best_token = token_score.amax(-1)[group]
    return torch.stack([group_score.max() - group_score[group], best_token - token_score.flatten()[tokens]], -1)


def assert_same_draws(ids, expected, logits, temperature, top_k, top_p, min_p, seeds, steps) -> None:
    """`ids` equal `expected`, except in rows where the two tokens' scores are a near-tie."""
    assert ids.shape == expected.shape and ids.dtype == expected.dtype
    different = (ids != expected).nonzero()[:, 0]
    assert len(different) <= 1 + len(ids) // 100, f"{len(different)} of {len(ids)} draws differ"
    for row in different.tolist():
        rows = [None if t is None else t[row : row + 1] for t in (logits, temperature, top_k, top_p, min_p)]
        log_weights = log_weights_ref(*rows)[0]
        behind = _levels(log_weights, torch.stack([ids[row], expected[row]]), seeds[row], steps[row])
        assert float(behind.max()) < NEAR_TIE, f"row {row}: {ids[row]} is not {expected[row]}, behind by {behind}"

"""Statistical checks of samplers. Seeds are fixed, so a check that passes once always does."""

import torch


def p_value(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """Pearson's chi-square test: how likely counts at least as far from `probs` are.

    Categories expected fewer than 5 times are taken together. A category of probability 0 that occurred gives 0.
    """
    counts, probs = counts.double().cpu().flatten(), probs.double().cpu().flatten()
    if bool((counts[probs == 0] > 0).any()):
        return 0.0
    expected = counts.sum() * probs / probs.sum()
    rare = expected < 5
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    used = expected > 0
    statistic = ((counts - expected)[used].square() / expected[used]).sum()
    freedom = used.sum() - 1
    return float(torch.special.gammaincc(freedom / 2, statistic / 2)) if freedom else 1.0


def assert_drawn_from(tokens: torch.Tensor, probs: torch.Tensor, least: float = 1e-5) -> None:
    """`tokens` is a plausible sample of the distribution `probs` [V].

    There are some 300 such checks: at 1e-5 one in 300 new choices of seeds would fail a right sampler. A wrong one has
    no chance either way: at 200,000 draws over 12 tokens, one that is 5% too likely is found.
    """
    assert tokens.numel() >= 100, f"{tokens.numel()} tokens are too few to judge"
    p = p_value(torch.bincount(tokens.flatten(), minlength=probs.numel()), probs)
    assert p >= least, f"chi-square p-value {p:.2g} < {least:g}: these tokens are not drawn from the distribution"

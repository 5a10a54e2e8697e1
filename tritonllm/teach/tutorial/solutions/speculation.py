"""Lesson 7: the verdict on one draft.

The holes of the exercise are filled.
"""


def draw(weights: list[float], noise: float) -> int:
    """A token by its weight, which need not add up to 1; ``noise`` is evenly distributed between 0 and 1."""
    rest = noise * sum(weights)
    for token, weight in enumerate(weights):
        rest -= weight
        if rest < 0:
            return token
    return max(range(len(weights)), key=lambda token: weights[token])  # rounding


def verify(draft: int, p: list[float], q: list[float], coin: float, noise: float) -> tuple[int, bool]:
    """Keep a draft or replace it, so that the token follows ``p``.

    Args:
        draft: a token that was drawn from ``q``.
        p, q: the large model's and the draft model's probabilities of each token.
        coin: evenly distributed between 0 and 1; for the decision.
        noise: the same; for :func:`draw`.

    Returns:
        The token, and whether the draft was accepted.
    """
    if coin < p[draft] / q[draft]:
        return draft, True
    return draw([max(0.0, a - b) for a, b in zip(p, q, strict=True)], noise), False

"""Lesson 7: the verdict on one draft.

The exercise: replace each `hole` by an expression. `tritonllm tutorial check 7` checks it.
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
        noise: evenly distributed between 0 and 1; for :func:`draw`.

    Returns:
        The token, and whether the draft was accepted.
    """
    # exercise: if coin < hole("the probability with which the draft is accepted (more than 1 counts as 1)"):
    if coin < p[draft] / q[draft]:
        # until here
        return draft, True
    # exercise: return draw(hole("for each token a weight: what p has more than q"), noise), False
    return draw([max(0.0, a - b) for a, b in zip(p, q, strict=True)], noise), False
    # until here

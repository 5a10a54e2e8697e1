"""Lesson 6: top-p, also called nucleus sampling.

One hole is left for you: replace `hole(...)` by your code. Check it with `tritonllm tutorial check 6`.
"""

from tritonllm.teach.tutorial.holes import hole


def top_p(probabilities: list[float], limit: float) -> list[float]:
    """Keep the shortest list of most likely tokens whose probabilities add up to at least ``limit``.

    Args:
        probabilities: of each token; they add up to 1.
        limit: more than 0 and at most 1.

    Returns:
        The probabilities after that, in the same order: 0 for tokens that were dropped, and the others add up to 1.
    """
    return hole("sort the tokens by their probability, keep the first ones, and scale what is left")

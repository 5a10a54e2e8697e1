"""Lesson 6: top-p, also called nucleus sampling.

The exercise: replace the `hole` by your code. `tritonllm tutorial check 6` checks it.
"""


def top_p(probabilities: list[float], limit: float) -> list[float]:
    """Keep the shortest list of most likely tokens whose probabilities add up to at least ``limit``.

    Args:
        probabilities: the probability of each token; they add up to 1.
        limit: more than 0 and at most 1.

    Returns:
        The probabilities after that, in the same order: 0 for tokens that were dropped, and the others add up to 1.
    """
    # exercise: return hole("sort the tokens by their probability, keep the first ones, and scale what is left")
    order = sorted(range(len(probabilities)), key=lambda token: -probabilities[token])
    kept, total = [], 0.0
    for token in order:
        kept.append(token)
        total += probabilities[token]
        if total >= limit:
            break
    result = [0.0] * len(probabilities)
    for token in kept:
        result[token] = probabilities[token] / total
    return result
    # until here

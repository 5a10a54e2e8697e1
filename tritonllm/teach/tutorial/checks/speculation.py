"""Check of lesson 7: the tokens of ``verify`` follow p, and as many drafts are accepted as can be."""

import random
from types import ModuleType

from tritonllm.teach.tutorial.holes import Wrong

ROWS, TOLERANCE = 20_000, 0.02  # the spread of a share of so many draws is 0.0035
PAIRS = (([0.5, 0.3, 0.2, 0.0], [0.2, 0.6, 0.1, 0.1]), ([0.1, 0.9], [0.8, 0.2]))


def check(learner: ModuleType) -> str:
    accepted = 0.0
    for p, q in PAIRS:
        accepted = _check_pair(learner, p, q)
    return f"Right. The tokens follow p, and of the last pair {accepted:.3f} of the drafts were accepted."


def _check_pair(learner: ModuleType, p: list[float], q: list[float]) -> float:
    chance = random.Random(0)
    counts, accepted = [0] * len(p), 0
    for draft in chance.choices(range(len(q)), weights=q, k=ROWS):
        token, kept = learner.verify(draft, list(p), list(q), chance.random(), chance.random())
        if kept and token != draft:
            raise Wrong(f"verify says that it accepted draft {draft}, but returns token {token!r}.")
        counts[token] += 1
        accepted += bool(kept)
    shares = [count / ROWS for count in counts]
    most = sum(map(min, p, q))
    about = f"With p = {p} and q = {q}, {accepted / ROWS:.3f} of the drafts were accepted"
    if max(abs(a - b) for a, b in zip(shares, p, strict=True)) > TOLERANCE:
        message = f"{about}, and the tokens have the shares {[round(s, 3) for s in shares]}, not p. "
        if abs(accepted / ROWS - most) <= TOLERANCE:
            raise Wrong(
                message
                + "The drafts are accepted as often as they should be, so look at what replaces a rejected one: a "
                "token that q proposes often enough already must not come from there, too."
            )
        raise Wrong(message + f"min(1, p/q) would accept {most:.3f} of them.")
    if abs(accepted / ROWS - most) > TOLERANCE:
        raise Wrong(f"{about}. The tokens follow p, but {most:.3f} could be accepted.")
    return accepted / ROWS

"""Check of lesson 6: top-p, against what the kernel ``sample`` draws from the demo model's probabilities."""

import math
from types import ModuleType

import torch

from tritonllm.teach.tutorial.holes import Wrong
from tritonllm.teach.tutorial.lab import Lab
from tritonllm.teach.tutorial.lessons.sampling import DRAWS, PROMPT, ManyDraws


def check(learner: ModuleType) -> str:
    _small(learner, [0.1, 0.6, 0.3], 0.5, [0.0, 1.0, 0.0], "the first token alone has 0.6")
    _small(learner, [0.1, 0.6, 0.3], 0.8, [0.0, 2 / 3, 1 / 3], "0.6 + 0.3 reach 0.8, and 0.6 alone does not")
    _small(learner, [0.25, 0.25, 0.5], 1.0, [0.25, 0.25, 0.5], "a limit of 1 keeps all")
    (scores,) = Lab().ask("names", PROMPT, 1, logprobs=-1).outputs[0].logprobs or ()
    logits = torch.tensor([scores[token].logprob for token in range(len(scores))])
    for limit in (0.3, 0.7):
        drawn = ManyDraws(logits, top_p=limit)
        mine = learner.top_p([math.exp(x) for x in logits.tolist()], limit)
        kept = {token for token, p in enumerate(mine) if p > 0}
        if kept != set(drawn.counts):
            raise Wrong(
                f"With the model's probabilities after {PROMPT!r} and a limit of {limit}, you keep {len(kept)} "
                f"tokens; in {DRAWS} draws the kernel brought {len(drawn.counts)} different ones."
            )
        off = max(abs(mine[token] - drawn.share(token)) for token in kept)
        if off > 0.04:
            raise Wrong(
                f"limit={limit}: a token's share of the kernel's draws and your probability differ by {off:.2f}."
            )
    return f"Right. You keep the tokens that the kernel drew, and your probabilities are their shares of {DRAWS} draws."


def _small(learner: ModuleType, probabilities: list[float], limit: float, expected: list[float], why: str) -> None:
    mine = learner.top_p(list(probabilities), limit)
    if not isinstance(mine, list) or len(mine) != len(expected):
        raise Wrong(f"top_p must return a list of {len(expected)} probabilities, one for each token; it gave {mine!r}.")
    if any(abs(a - b) > 1e-6 for a, b in zip(mine, expected, strict=True)):
        rounded = [round(p, 3) for p in mine]
        message = (
            f"top_p({probabilities}, {limit}) gave {rounded}, where {[round(p, 3) for p in expected]} is right: {why}."
        )
        if [p > 0 for p in mine] == [p > 0 for p in expected]:
            message += f" You keep the right tokens, but their probabilities must add up to 1, not to {sum(mine):.3g}."
        raise Wrong(message)

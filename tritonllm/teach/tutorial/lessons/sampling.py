"""Lesson 6: from probabilities to one token, and what temperature, top-k, top-p and seeds do to that."""

import math
from collections import Counter
from collections.abc import Iterator

import torch

from tritonllm.kernels import sample
from tritonllm.teach.tutorial.lab import Lab
from tritonllm.teach.tutorial.lesson import Exercise, LessonQuestion, MultipleChoice, Number, Say, Step, ValueTable

PROMPT = "There was a fox named"
DRAWS = 2000
TOP_P, TOP_K = 0.3, 3


class ManyDraws:
    """What the kernel ``sample`` draws from one row of logits with many seeds.

    Args:
        logits: ``[V]`` float32.
    """

    def __init__(
        self, logits: torch.Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
    ) -> None:
        rows = logits.expand(DRAWS, -1).contiguous()
        ids = sample(
            rows,
            torch.full((DRAWS,), temperature),
            None if top_k is None else torch.full((DRAWS,), top_k, dtype=torch.int32),
            None if top_p is None else torch.full((DRAWS,), top_p),
            None,
            seeds=torch.arange(DRAWS),
            steps=torch.zeros(DRAWS, dtype=torch.int64),
        )
        self.counts = Counter(ids.tolist())

    def share(self, token: int) -> float:
        return self.counts[token] / DRAWS


def steps() -> Iterator[Step]:
    lab = Lab()
    (scores,) = lab.ask("names", PROMPT, 1, logprobs=-1).outputs[0].logprobs or ()
    logits = torch.full((len(scores),), -math.inf)
    for token, score in scores.items():
        logits[token] = score.logprob
    order = logits.argsort(descending=True).tolist()
    name = {token: (scores[token].decoded_token or "").strip() for token in order[:8]}
    probabilities = logits.exp()
    best = order[0]
    yield Say(
        f"""
        The model's last layer gives a number to each of the {len(logits):,} tokens of its vocabulary, the logits.
        Softmax makes probabilities of them. Then somebody must choose. The most likely token every time (greedy,
        `temperature=0`) gives one text, always the same, and long greedy texts tend to repeat themselves. A draw by the
        probabilities gives many texts, but now and then a token that makes no sense: each of a thousand unlikely tokens
        is unlikely, all of them together are not.

        This is what the demo model thinks of "{PROMPT} ...":
        """
    )
    sums = probabilities[order].cumsum(0).tolist()
    yield ValueTable(
        "the eight most likely tokens",
        ("token", "probability", "sum up to here"),
        [(name[t], float(probabilities[t]), sums[i]) for i, t in enumerate(order[:8])],
    )
    yield from _top_k(logits, order, name)
    yield from _top_p(logits, sums)
    yield from _temperature(logits, best, name[best])
    yield from _seeds(lab)
    yield Exercise(
        """
        The exercise is top-p in a few lines of Python. The check compares what you keep with what the kernel draws.
        """
    )


def _top_k(logits: torch.Tensor, order: list[int], name: dict[int, str]) -> Iterator[Step]:
    best = order[0]
    drawn = ManyDraws(logits, top_k=TOP_K)
    before = float(logits[best].exp())
    yield LessonQuestion(
        f"`top_k={TOP_K}` keeps the {TOP_K} most likely tokens and drops all others. How likely is {name[best]} then? "
        "(Two digits will do.)",
        Number(
            drawn.share(best),
            tolerance=0.03,
            traps={before: "That was its share of all tokens. The others are gone, and shares must add up to 1."},
        ),
        [f"Divide its probability by the sum of the {TOP_K} that are left; the table has that sum."],
        f"""
        {before:.3f} / {float(logits[order[:TOP_K]].exp().sum()):.3f}. The kernel `sample` just drew {DRAWS:,} tokens
        with {DRAWS:,} seeds: {drawn.counts[best]:,} were {name[best]}, which is {drawn.share(best):.3f}. The others
        were {", ".join(f"{name[t]} ({drawn.counts[t]:,})" for t in order[1:TOP_K])}.
        """,
    )


def _top_p(logits: torch.Tensor, sums: list[float]) -> Iterator[Step]:
    drawn = ManyDraws(logits, top_p=TOP_P)
    kept = len(drawn.counts)
    wide = ManyDraws(logits, top_p=0.9)
    yield LessonQuestion(
        f"A fixed number does not fit all places: sometimes two tokens make sense, sometimes fifty. `top_p={TOP_P}` "
        f"keeps the shortest list of most likely tokens whose probabilities add up to at least {TOP_P}. How many "
        "does it keep here?",
        Number(
            kept,
            traps={
                kept - 1: f"Look at the sums: these make only {sums[kept - 2]:.3f}. The list must reach {TOP_P}.",
                1: f"The first one alone has {sums[0]:.3f}.",
            },
        ),
        [f"Go down the column of sums. Where is it {TOP_P} or more for the first time?"],
        f"""
        {kept}: their sum is {sums[kept - 1]:.3f}, and without the last one it is {sums[kept - 2]:.3f}. In {DRAWS:,}
        draws the kernel brought {len(drawn.counts)} different tokens, with `top_p=0.9` {len(wide.counts)}, and without
        a limit {len(ManyDraws(logits).counts)}.
        """,
    )


def _temperature(logits: torch.Tensor, best: int, name: str) -> Iterator[Step]:
    yield Say(
        """
        Temperature comes before the limits: the logits are divided by it. Differences between logits are ratios of
        probabilities, so a temperature below 1 makes every ratio larger, and one above 1 makes it smaller.
        """
    )
    cold, warm, hot = (ManyDraws(logits, temperature) for temperature in (0.5, 1.0, 2.0))
    yield LessonQuestion(
        f"At temperature 1, {warm.share(best):.0%} of the draws are {name}. And at temperature 2?",
        MultipleChoice(
            ("more", "as many", "fewer"),
            0 if hot.share(best) > warm.share(best) else 2 if hot.share(best) < warm.share(best) else 1,
            traps={0: "A logit that leads by 4 leads by 2 when both are halved."},
        ),
        ["All logits are halved. Does the best one lead by more or by less then?"],
        f"""
        The distribution becomes flatter: the best token loses, and the thousands of unlikely ones win. Here is how
        often {name} was drawn, and how many different tokens came in {DRAWS:,} draws.
        """,
    )
    yield ValueTable(
        "temperature",
        ("temperature", f"share of {name}", "different tokens"),
        [(t, d.share(best), len(d.counts)) for t, d in ((0.5, cold), (1.0, warm), (2.0, hot))],
    )


def _seeds(lab: Lab) -> Iterator[Step]:
    yield Say(
        """
        How does a kernel draw from thousands of probabilities at once? It adds a random number (of the Gumbel
        distribution) to each logit and takes the largest sum. That is the same as a draw by the probabilities. The
        random numbers are a function of the request's seed, of the token's number in its text, and of its place in the
        vocabulary. There is no generator that is advanced from one request to the next.
        """
    )
    wishes = {"temperature": 1.0, "seed": 11}
    alone = list(lab.ask("alone", PROMPT, 12, **wishes).outputs[0].token_ids)
    for i in range(5):
        lab.add(f"other {i}", "Once upon a time", 20, temperature=1.0, seed=i)
    lab.step()
    lab.add("among others", PROMPT, 12, **wishes)
    lab.run()
    same = list(lab.outputs["among others"].outputs[0].token_ids) == alone
    yield LessonQuestion(
        "A request with seed 11 ran alone. Then it ran again, and came late into a batch of five others. Was its "
        "text the same?",
        MultipleChoice(("yes", "no"), 0 if same else 1),
        ["Which numbers does the noise of its tokens depend on? Is the batch among them?"],
        f"""
        {"It was" if same else "It was not"}: "{PROMPT}{lab.text("among others")}". The noise depends on the seed and on
        the token's number, not on neighbours. The next lesson will need that once more.
        """,
    )

"""Chats of many people: seeded, in the shape of published traces.

Sessions begin as a Poisson process. Each has a system prompt, shared with other sessions (popularity by Zipf's law), a
first message that often holds a document, and further questions after the answer was read; each turn's prompt is all
that was said before and the question. The lengths are set so that prompts and answers are about as long as in the trace
that Qin et al. published with "Mooncake" (arXiv 2407.00079: 7,590 tokens in and 182 out on average, up to a half of
which a cache can hold). No token of anybody's text is in here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

READ_AND_ANSWERED = 4.0  # seconds; about what an answer takes, for turns that lie before the simulation


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Args:
    requests_per_second: turns of all sessions together, on average.
    system_prompts: different ones.
    zipf: exponent of their popularity; 0: all alike.
    turns: of a session on average (geometric).
    system, first, question, answer: median tokens and sigma of a lognormal distribution.
    think: seconds from an answer's end to the next question: median and sigma of a lognormal distribution.
    most: tokens that any one piece can have.

    Raises:
        ValueError: a rate, count or mean is too small.
    """

    requests_per_second: float
    system_prompts: int = 200
    zipf: float = 1.0
    turns: float = 2.5
    system: tuple[float, float] = (700.0, 0.8)
    first: tuple[float, float] = (3500.0, 1.1)
    question: tuple[float, float] = (80.0, 1.0)
    answer: tuple[float, float] = (140.0, 0.7)
    think: tuple[float, float] = (20.0, 0.8)
    most: int = 24_000

    def __post_init__(self) -> None:
        for name, least in (("requests_per_second", 1e-9), ("system_prompts", 1), ("zipf", 0), ("turns", 1)):
            if not getattr(self, name) >= least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")

    def popularity(self) -> np.ndarray:
        """The share of sessions that have each system prompt."""
        weights = np.arange(1, self.system_prompts + 1, dtype=np.float64) ** -self.zipf
        return weights / weights.sum()


@dataclass(frozen=True)
class Chats:
    """Sessions in the order in which they begin, and their turns one after the other.

    Attributes:
        system: index of each session's system prompt. ``[sessions]``
        system_tokens: of each system prompt. ``[system prompts]``
        begin: a session's turns are ``begin[i]`` to ``begin[i + 1]``. ``[sessions + 1]``
        at: seconds at which a turn would come if every answer took ``READ_AND_ANSWERED``. ``[turns]``
        think: seconds before the turn that follow the answer to the one before. ``[turns]``
        question, answer: tokens. ``[turns]``
        history: tokens of all turns before. ``[turns]``
    """

    system: np.ndarray
    system_tokens: np.ndarray
    begin: np.ndarray
    at: np.ndarray
    think: np.ndarray
    question: np.ndarray
    answer: np.ndarray
    history: np.ndarray


def chats(traffic: Traffic, seconds: float, seed: int, before: float = 200.0) -> Chats:
    """All sessions that begin from ``-before`` to ``seconds``, those from before 0 for caches that are in use.

    What is drawn depends on nothing but the arguments, so every cluster and every policy gets the same.
    """
    draw = np.random.default_rng([seed, 0])
    count = int(draw.poisson(traffic.requests_per_second / traffic.turns * (before + seconds)))
    start = np.sort(draw.uniform(-before, seconds, count))
    turns = draw.geometric(1 / traffic.turns, count)
    begin = np.concatenate([[0], np.cumsum(turns)])
    total = int(begin[-1])
    opens = np.zeros(total, dtype=bool)
    opens[begin[:-1]] = True

    def tokens(shape: tuple[float, float], size: int) -> np.ndarray:
        drawn = draw.lognormal(np.log(shape[0]), shape[1], size)
        return np.clip(drawn.astype(np.int64), 1, traffic.most)

    system = draw.choice(traffic.system_prompts, count, p=traffic.popularity())
    system_tokens = tokens(traffic.system, traffic.system_prompts)
    question = np.where(opens, tokens(traffic.first, total), tokens(traffic.question, total))
    answer = tokens(traffic.answer, total)
    think = np.where(opens, 0.0, draw.lognormal(np.log(traffic.think[0]), traffic.think[1], total))
    since = _within(np.where(opens, 0.0, think + READ_AND_ANSWERED), begin)
    said = question + answer
    history = _within(said, begin) - said
    return Chats(system, system_tokens, begin, np.repeat(start, turns) + since, think, question, answer, history)


def single(at: Sequence[float], prompts: Sequence[int], answers: Sequence[int]) -> Chats:
    """Requests that have nothing to do with each other.

    Args:
        at: seconds, ascending.
        prompts, answers: tokens; of a prompt at least 2.
    """
    count = len(at)
    nothing = np.zeros(count, dtype=np.int64)
    return Chats(
        system=np.arange(count),
        system_tokens=np.ones(count, dtype=np.int64),
        begin=np.arange(count + 1),
        at=np.asarray(at, dtype=np.float64),
        think=np.zeros(count),
        question=np.asarray(prompts, dtype=np.int64) - 1,
        answer=np.asarray(answers, dtype=np.int64),
        history=nothing,
    )


def _within(values: np.ndarray, begin: np.ndarray) -> np.ndarray:
    """Running sums that begin anew with each session."""
    sums = np.cumsum(values)
    first = begin[:-1]
    return sums - np.repeat(sums[first] - values[first], np.diff(begin))

"""What the host decides about a request's next token, when it knows the tokens before it. No torch.

The device needs nothing of the host to draw a token, so a step is planned and launched while the one before runs. A
request that is controlled here is the exception: the mask of its next token depends on its last one. Its step is
launched all the same, but for the draw. While the device computes the hidden states, the results of the step before
come in, masks are filled (:mod:`tritonllm.engine.grammar.restrictions`), and the draw is launched behind. vLLM divides
its steps in the same way (`execute_model` and `sample_tokens`).
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

THOUGHTS = (  # tokens that begin and end a model's thoughts: of Qwen3 and DeepSeek-R1, Magistral, Command-A, Seed-OSS
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
)

MOST_FORCED = 16  # tokens that are known to follow, at most


class Control(Protocol):
    """Decides which tokens may come next in one sequence. It is told of the output's tokens in their order.

    Attributes:
        waits: a step with the next token cannot be planned before the last one is known.
    """

    waits: bool

    def restricts(self, pending: int) -> bool:
        """Whether there may be a mask for the next token, or a function for its logits, while so many tokens before it
        are unknown. If not, it is drawn without asking again."""

    def take(self, tokens: Sequence[int]) -> str | None:
        """New tokens of the output, which goes on. Returns what is wrong with them, if the request must end."""

    def mask(self) -> np.ndarray | None:
        """``[ceil(V / 32)]`` int32: bit ``t % 32`` of word ``t // 32`` says that token t may be next. ``None``: all."""

    def forced(self) -> Sequence[int]:
        """Tokens that must come next, one after the other; not always all of them."""


def thought_tokens(vocabulary: dict[str, int]) -> tuple[int, int] | None:
    """The tokens that begin and end a thought, if the tokenizer's vocabulary has a pair that is known."""
    for begin, end in THOUGHTS:
        if begin in vocabulary and end in vocabulary:
            return vocabulary[begin], vocabulary[end]
    return None


def mask_of(token: int, words: int) -> np.ndarray:
    """The mask of one token."""
    mask = np.zeros(words, dtype=np.uint32)
    mask[token // 32] = 1 << token % 32
    return mask.view(np.int32)


def only_token(mask: np.ndarray) -> int | None:
    """The token that a mask allows, if it is one."""
    if np.count_nonzero(mask) != 1:
        return None
    at = int(np.flatnonzero(mask)[0])
    word = int(mask[at]) & 0xFFFFFFFF
    return at * 32 + word.bit_length() - 1 if word & (word - 1) == 0 else None


class ReadsOutput:
    """Bans no token; functions read the output before the next token is drawn."""

    waits = False

    def restricts(self, pending: int) -> bool:
        return True

    def take(self, tokens: Sequence[int]) -> str | None:
        return None

    def mask(self) -> np.ndarray | None:
        return None

    def forced(self) -> Sequence[int]:
        return ()


class ThinkingBudget:
    """Forces the end of a thought once it has so many tokens.

    Args:
        budget: most tokens of a thought, those that begin and end it not counted.
        begin, end: the token ids that begin and end a thought.
        prompt: may begin a thought, too.
        vocab: size of the model's vocabulary.
    """

    waits = False

    def __init__(self, budget: int, begin: int, end: int, prompt: Sequence[int], vocab: int) -> None:
        self._budget, self._begin, self._end, self._words = budget, begin, end, -(-vocab // 32)
        self._thought = -1  # tokens of the thought so far; -1 outside of one
        self.take(prompt)

    def restricts(self, pending: int) -> bool:
        """Only where a thought may reach the budget: it may have ended just before, or begun."""
        return self._thought + pending >= self._budget

    def take(self, tokens: Sequence[int]) -> str | None:
        for token in tokens:
            if token == self._end:
                self._thought = -1
            elif token == self._begin:
                self._thought = 0
            elif self._thought >= 0:
                self._thought += 1
        return None

    def mask(self) -> np.ndarray | None:
        if not 0 <= self._budget <= self._thought:
            return None
        return mask_of(self._end, self._words)

    def forced(self) -> Sequence[int]:
        return ()


class AtLeast:
    """Bans what ends an output that is too short, unless another control allows nothing else.

    Args:
        control: the control of the output, which this one adds to.
        least: tokens, the one that ends it not counted.
        ends: tokens that would end it.
        vocab: size of the model's vocabulary.
    """

    waits = False

    def __init__(self, control: Control, least: int, ends: Iterable[int], vocab: int) -> None:
        self._control, self._left = control, least
        self._others = np.full(-(-vocab // 32), -1, dtype=np.int32)
        for token in ends:
            self._others[token // 32] &= ~mask_of(token % 32, 1)[0]

    def restricts(self, pending: int) -> bool:
        return self._left > 0 or self._control.restricts(pending)

    def take(self, tokens: Sequence[int]) -> str | None:
        self._left -= len(tokens)
        return self._control.take(tokens)

    def mask(self) -> np.ndarray | None:
        words = self._control.mask()
        if self._left <= 0:
            return words
        longer = self._others if words is None else words & self._others
        return longer if words is None or longer.any() else words

    def forced(self) -> Sequence[int]:
        return () if self._left > 0 else self._control.forced()


class AfterThought:
    """Lets another control begin when a thought has ended, or at once if the output does not begin with one.

    Args:
        control: the control of the output behind the thought.
        begin, end: tokens that begin and end a thought.
        prompt: may begin a thought, too.
        vocab: size of the model's vocabulary.
    """

    waits = False

    def __init__(self, control: Control, begin: int, end: int, prompt: Sequence[int], vocab: int) -> None:
        self._control, self._begin, self._end, self._words = control, begin, end, -(-vocab // 32)
        marks = [token for token in prompt if token in (begin, end)]
        self._inside = bool(marks) and marks[-1] == begin
        self._may_begin = not self._inside

    def restricts(self, pending: int) -> bool:
        return True  # the thought may just have ended

    def take(self, tokens: Sequence[int]) -> str | None:
        for number, token in enumerate(tokens):
            if self._inside:
                self._inside = token != self._end
            elif self._may_begin and token == self._begin:
                self._inside, self._may_begin = True, False
            else:
                self._may_begin = False
                return self._control.take(tokens[number:])
        return None

    def forced(self) -> Sequence[int]:
        return () if self._inside or self._may_begin else self._control.forced()

    def mask(self) -> np.ndarray | None:
        if self._inside:
            return None
        words = self._control.mask()
        if words is None or not self._may_begin:
            return words
        words = words.copy()
        words.view(np.uint32)[self._begin // 32] |= np.uint32(1 << self._begin % 32)
        return words
